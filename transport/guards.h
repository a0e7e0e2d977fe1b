#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "transport/slots.h"

namespace kvferry {

// A word for each transfer whose pages a peer reads from afar, where the peer can read it too: it
// has the value that the peer was told for as long as the pages are the transfer's. Not
// thread-safe.
class Guards {
 public:
  static constexpr int64_t kNumWords = 4096;  // Transfers beyond them go through the arena.

  static absl::StatusOr<std::unique_ptr<Guards>> Create();

  // An index in [0, kNumWords), or -1 when all are taken.
  int64_t Take() { return slots_.Take(); }
  uint64_t Generation(int64_t index) const;
  // The pages are to be their owner's again, or the transfer has ended in order. A reader whose
  // reads began before and end later finds another word than it was told.
  void RaiseAndGiveBack(int64_t index);

  // All words, a u64 each: what peers read.
  std::span<const std::byte> memory() const { return {words_.get(), kNumWords * 8}; }

 private:
  explicit Guards(std::shared_ptr<std::byte> words);

  const std::shared_ptr<std::byte> words_;
  Slots slots_{kNumWords};
};

}  // namespace kvferry
