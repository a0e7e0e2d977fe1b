#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/config.h"
#include "transport/control_plane.h"

namespace kvferry {

// The ZeroMQ control plane: a ROUTER when `listen`, and a DEALER for each dialled peer; with
// key_file between peers that have the same key alone. UNAVAILABLE when listen_host:listen_port
// cannot be bound; errors of ReadCurveKeys().
absl::StatusOr<std::unique_ptr<ControlPlane>> MakeZmqControlPlane(const Config& config,
                                                                  bool listen);
// What that says of the config's key_file.
absl::Status CheckKeyFile(const Config& config);

}  // namespace kvferry
