#pragma once

#include <cstdint>

namespace kvferry {

// What a message of the control plane counts as in the turn of who sent it: one, and one more for
// each so many bytes, as the longest take up to 35 ms to be read (measured: 2 MiB of numbers in
// lists, in keys that nobody knows).
constexpr int64_t MessageCost(int64_t bytes) {
  constexpr int64_t kBytesOfAMessage = 16 << 10;
  return 1 + bytes / kBytesOfAMessage;
}

}  // namespace kvferry
