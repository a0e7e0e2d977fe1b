#include "transport/pool_regions.h"

#include <algorithm>
#include <functional>

namespace kvferry {
namespace {

std::vector<PoolRegions::Region> Buffers(const KvPool& pool) {
  std::vector<PoolRegions::Region> buffers;
  for (const BufferInfo& buffer : pool.buffer_infos()) {
    buffers.emplace_back(buffer.address, static_cast<size_t>(buffer.bytes));
  }
  std::sort(buffers.begin(), buffers.end(),
            [](const auto& a, const auto& b) { return std::less<>()(a.data(), b.data()); });
  return buffers;
}

// Those that are one, as of layers that share a cache, and those that touch.
std::vector<PoolRegions::Region> Merged(const std::vector<PoolRegions::Region>& sorted) {
  std::vector<PoolRegions::Region> merged;
  for (const PoolRegions::Region& next : sorted) {
    if (merged.empty() || next.data() > merged.back().data() + merged.back().size()) {
      merged.push_back(next);
      continue;
    }
    PoolRegions::Region& last = merged.back();
    const std::byte* const end = std::max(last.data() + last.size(), next.data() + next.size());
    last = {last.data(), static_cast<size_t>(end - last.data())};
  }
  return merged;
}

}  // namespace

PoolRegions::PoolRegions(const KvPool& pool) {
  if (const SharedMemory* shared = pool.shared_memory(); shared != nullptr) {
    regions_.emplace_back(shared->data.get(), static_cast<size_t>(shared->bytes));
  } else {
    regions_ = Merged(Buffers(pool));
  }
  uint64_t offset = 0;
  for (const Region& region : regions_) {
    offsets_.push_back(offset);
    offset += region.size();
  }
}

bool PoolRegions::EachInOne(const KvPool& pool,
                            std::span<const PoolMemory::SharedPart> parts) const {
  std::vector<uint64_t> ends;
  for (const PoolMemory::SharedPart& part : parts) {
    ends.push_back((ends.empty() ? 0 : ends.back()) + static_cast<uint64_t>(part.bytes));
  }
  const auto buffers = pool.buffer_infos();
  return std::all_of(buffers.begin(), buffers.end(), [&](const BufferInfo& buffer) {
    const uint64_t begin = OffsetOf(buffer.address);
    const auto end = std::upper_bound(ends.begin(), ends.end(), begin);
    return end != ends.end() && begin + static_cast<uint64_t>(buffer.bytes) <= *end;
  });
}

size_t PoolRegions::RegionOf(const std::byte* byte) const {
  const auto after = std::upper_bound(
      regions_.begin(), regions_.end(), byte,
      [](const std::byte* a, const Region& region) { return std::less<>()(a, region.data()); });
  return static_cast<size_t>(after - regions_.begin()) - 1;
}

}  // namespace kvferry
