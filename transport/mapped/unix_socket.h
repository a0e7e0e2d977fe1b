#pragma once

// SEQPACKET sockets with abstract names: messages keep their bounds and order, a peer's death shows
// as a hang-up, and a descriptor can travel along. None of it blocks.

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace kvferry {

inline constexpr size_t kMaxPacketBytes = 4096;

// Listens at an abstract name.
absl::StatusOr<UniqueFd> ListenUnix(const std::string& name);
// UNAVAILABLE when nobody listens at that name in this network namespace, or takes no connection.
absl::StatusOr<UniqueFd> ConnectUnix(const std::string& name);
// An invalid fd when nobody waits, or errno says why not.
UniqueFd AcceptUnix(const UniqueFd& listener);
// PERMISSION_DENIED when the other end runs under another user id than this process.
absl::Status CheckSameUser(const UniqueFd& socket);

// Of the other end: who connected, or listened. 0: not known, or out of this process's sight
// (pid_namespaces(7)).
pid_t ProcessOf(const UniqueFd& socket);

enum class SocketResult { kOk, kWouldBlock, kBroken };

inline constexpr size_t kMaxPassed = 2;

// The descriptors in `passed`, at most kMaxPassed, travel along and stay open here.
SocketResult SendPacket(const UniqueFd& socket, std::span<const std::byte> bytes,
                        std::span<const int> passed = {});

struct Packet {
  std::byte bytes[kMaxPacketBytes];
  size_t size = 0;
  std::array<UniqueFd, kMaxPassed> passed;
};
// A packet longer than kMaxPacketBytes is kBroken.
SocketResult ReceivePacket(const UniqueFd& socket, Packet* packet);

}  // namespace kvferry
