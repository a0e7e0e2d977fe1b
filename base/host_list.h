#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kvferry {

// Hosts that may be connected to, comma separated: numeric addresses, networks (10.0.0.0/8,
// fd00::/8), names, which are compared as they are written and not resolved, or "*", any host.

// INVALID_ARGUMENT, naming the entry, for what looks like a network, a pattern or several hosts and
// is none of these: it would admit nobody.
absl::Status CheckHostList(absl::string_view list);
bool HostListAdmits(absl::string_view list, absl::string_view host);

}  // namespace kvferry
