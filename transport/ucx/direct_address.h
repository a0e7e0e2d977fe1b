#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvferry {

// What a peer has to know to read this process's memory (docs/wire_protocol.md, "Direct").
struct DirectAddress {
  struct Memory {
    uint64_t address = 0;
    uint64_t bytes = 0;
    std::string key{};
  };

  std::string worker;
  std::vector<Memory> memories;  // The guards, then the pool's.

  std::string Encode() const;
  // INVALID_ARGUMENT says what is wrong with it.
  static absl::StatusOr<DirectAddress> Decode(const std::string& bytes);
};

}  // namespace kvferry
