#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/config.h"

namespace kvferry {

// What a decode process needs to fetch one published request. Travels as text, through routers that
// need not understand it: "kvferry1|tcp://10.0.0.1:4000|<epoch>|<lease>|<pages>|<tokens>", ids in
// hex. The lease id is random: who has no ticket cannot guess one.
//
// A ticket without an epoch is one that both sides have agreed on, or been told, beforehand. It
// means whichever process listens there when the fetch gets through, and that process alone from
// then on; the request may be published as late as the fetch's deadline.
struct Ticket {
  std::string address;  // Of the prefill side's control plane.
  uint64_t epoch = 0;   // Of its process; 0: of whichever.
  uint64_t lease_id = 0;
  int64_t num_pages = 0;  // Of the prefill side, whose size it does not say.
  int64_t num_tokens = 0;

  std::string ToString() const;
  // INVALID_ARGUMENT says what is wrong; a ticket may come from an HTTP client.
  static absl::StatusOr<Ticket> Parse(absl::string_view text);

  bool operator==(const Ticket&) const = default;
};

// The other way round: what a prefill process needs to push a request into pages that a decode
// process has registered. "kvferrypush1|tcp://10.0.0.2:4000|<epoch>|<receive>|<pages>|<tokens>".
struct ReceiveTicket {
  std::string address;  // Of the decode side's control plane.
  uint64_t epoch = 0;
  uint64_t receive_id = 0;  // Random, as a lease id is.
  int64_t num_pages = 0;    // Of the decode side, with those that it has already.
  int64_t num_tokens = 0;   // 0: not said.

  std::string ToString() const;
  // INVALID_ARGUMENT says what is wrong.
  static absl::StatusOr<ReceiveTicket> Parse(absl::string_view text);

  bool operator==(const ReceiveTicket&) const = default;
};

// The host of "tcp://host:port"; IPv6 without brackets.
absl::StatusOr<std::string> HostOfAddress(absl::string_view address);

// PERMISSION_DENIED unless config.allowed_hosts (or its default) admits the address's host: without
// this whoever can hand in a ticket could make a decode process connect anywhere.
absl::Status CheckHostAllowed(absl::string_view address, const Config& config);

}  // namespace kvferry
