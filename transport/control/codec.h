#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "transport/control_plane.h"
#include "transport/messages.h"

namespace kvferry {

// Encodes one control message. Texts longer than their limit are cut; nothing else can fail.
std::string EncodeMessage(const Message& message);

// Decodes bytes from a peer that may be hostile: bounded in size, depth and element counts, and
// never throws. INVALID_ARGUMENT says what is malformed; FAILED_PRECONDITION is a message of
// another protocol version, and names both.
absl::StatusOr<Message> DecodeMessage(std::span<const std::byte> bytes);

// Tells `events` what `peer` has said with these bytes.
void DeliverMessage(const PeerKey& peer, std::span<const std::byte> bytes, ControlEvents* events);

}  // namespace kvferry
