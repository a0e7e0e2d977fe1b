#pragma once

#include <cstdint>

namespace kvferry {

// What has been sent to a peer by one way, a link or the control plane, and how much of it that has
// taken.
struct Backlog {
  int64_t waiting = 0;  // Bytes of messages that the connection has not taken.
  int64_t taken = 0;    // Bytes of anything that it has, as long as some wait.
  bool open = true;     // It is made: before that it takes nothing.
};
// More than nodes let wait, but for short words; a peer that has so many to read reads nothing any
// more.
inline constexpr int64_t kMaxMessagesWaiting = 32 << 20;

}  // namespace kvferry
