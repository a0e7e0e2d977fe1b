#include "transport/guards.h"

#include <utility>

#include "base/slab.h"
#include "base/status.h"
#include "transport/generation.h"

namespace kvferry {

absl::StatusOr<std::unique_ptr<Guards>> Guards::Create() {
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> words, MapSlab(kNumWords * 8));
  return std::unique_ptr<Guards>(new Guards(std::move(words)));
}

Guards::Guards(std::shared_ptr<std::byte> words) : words_(std::move(words)) {}

uint64_t Guards::Generation(int64_t index) const {
  return GenerationIn(words_.get(), index).load(std::memory_order_relaxed);
}

void Guards::RaiseAndGiveBack(int64_t index) {
  RaiseGeneration(words_.get(), index);
  slots_.GiveBack(index);
}

}  // namespace kvferry
