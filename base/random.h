#pragma once

#include <cstdint>

namespace kvferry {

// An unpredictable, non-zero 64-bit number from the operating system: epochs, lease and transfer
// ids. Thread-safe.
uint64_t RandomId();

}  // namespace kvferry
