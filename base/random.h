#pragma once

#include <cstdint>
#include <string>

namespace kvferry {

// An unpredictable, non-zero 64-bit number from the operating system: epochs, lease and transfer
// ids. Thread-safe.
uint64_t RandomId();
// 16 such bytes: tokens, and names that nobody else has.
std::string RandomBytes16();

}  // namespace kvferry
