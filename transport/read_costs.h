#pragma once

#include <cstdint>

namespace kvferry {

// What reading a peer's memory from afar takes, as its reader has measured; all 0: it cannot.
struct ReadCosts {
  int64_t read_ns = 0;  // One read of a few bytes, of many under way; 1 at least.
  int64_t mib_ns = 0;   // A mebibyte in one read; 1 at least.

  bool possible() const { return read_ns > 0 && mib_ns > 0; }
};

}  // namespace kvferry
