#include "pool/rows_aside.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "base/ceil_div.h"
#include "base/status.h"

namespace kvferry {
namespace {

// Rows of a view, by a list or, where that is null, the first ones.
struct ListedRows {
  TokenView view;
  const int32_t* slots;
  int64_t count;
};

// Of rows that wait aside, rounded up so that the next ones begin aligned.
int64_t AsideBytes(const ListedRows& rows) {
  constexpr int64_t kAlignment = 256;
  return RoundUp(rows.count * rows.view.row_bytes(), kAlignment);
}

absl::StatusOr<std::shared_ptr<std::byte>> AllocateAside(std::span<const ListedRows> from,
                                                         const PoolMemory& memory) {
  int64_t bytes = 0;
  for (const ListedRows& rows : from) bytes += AsideBytes(rows);
  absl::StatusOr<std::shared_ptr<std::byte>> aside = memory.AllocateForNow(bytes);
  if (aside.ok()) return aside;
  return absl::Status(aside.status().code(),
                      absl::StrCat("token pool: slots are both read and written, for which ", bytes,
                                   " bytes are missing; copy fewer, or layer by layer: ",
                                   aside.status().message()));
}

absl::StatusOr<RowsAside> PutAside(std::span<const ListedRows> from, const PoolMemory& memory,
                                   ThreadPool* threads) {
  RowsAside aside;
  KVFERRY_ASSIGN_OR_RETURN(aside.memory, AllocateAside(from, memory));
  std::vector<TokenCopy> reads;
  std::byte* next = aside.memory.get();
  for (const ListedRows& rows : from) {
    TokenView packed = TokenView::Packed(next, rows.view.dtype, rows.count, rows.view.num_heads,
                                         rows.view.head_dim);
    packed.scale = rows.view.scale;  // So that values come as they are, not rounded on the way.
    KVFERRY_ASSIGN_OR_RETURN(
        const TokenCopy read,
        TokenCopy::PlanGather(rows.view, {rows.slots, static_cast<size_t>(rows.count)}, packed));
    reads.push_back(read);
    aside.rows.push_back(packed);
    next += AsideBytes(rows);
  }
  KVFERRY_RETURN_IF_ERROR(memory.Run(reads, threads));
  return aside;
}

}  // namespace

bool Meet(std::span<const std::byte> a, std::span<const std::byte> b) {
  const std::less<const std::byte*> below;
  return below(a.data(), b.data() + b.size()) && below(b.data(), a.data() + a.size());
}

std::optional<std::pair<size_t, size_t>> FindMeetInPart(
    std::span<const std::span<std::byte>> stretches) {
  std::vector<size_t> order(stretches.size());
  std::iota(order.begin(), order.end(), 0);
  // As numbers: pointers of different objects have no order.
  const auto begin = [&](size_t i) { return reinterpret_cast<uintptr_t>(stretches[i].data()); };
  std::ranges::sort(order, {}, [&](size_t i) { return std::pair(begin(i), stretches[i].size()); });
  for (size_t next = 1; next < order.size(); ++next) {
    const size_t low = order[next - 1], high = order[next];
    const bool are_one =
        begin(low) == begin(high) && stretches[low].size() == stretches[high].size();
    if (!are_one && begin(high) - begin(low) < stretches[low].size()) return std::minmax(low, high);
  }
  return std::nullopt;
}

bool Meet(std::span<const TokenView> some, std::span<const TokenView> others) {
  return std::any_of(some.begin(), some.end(), [&others](const TokenView& one) {
    return std::any_of(others.begin(), others.end(), [&one](const TokenView& other) {
      return one.num_slots > 0 && Meet(one.Hull(), other.Hull());
    });
  });
}

absl::StatusOr<RowsAside> PutAside(std::span<const TokenView> views, const PoolMemory& memory,
                                   ThreadPool* threads) {
  std::vector<ListedRows> from;
  for (const TokenView& view : views) from.push_back({view, nullptr, view.num_slots});
  return PutAside(from, memory, threads);
}

absl::Status RunAside(std::span<const TokenCopy> copies, const PoolMemory& memory,
                      ThreadPool* threads) {
  std::vector<ListedRows> from;
  for (const TokenCopy& copy : copies) {
    from.push_back({copy.from(), copy.from_slots(), copy.num_rows()});
  }
  KVFERRY_ASSIGN_OR_RETURN(const RowsAside aside, PutAside(from, memory, threads));
  std::vector<TokenCopy> writes;
  for (size_t i = 0; i < copies.size(); ++i) {
    const TokenCopy& copy = copies[i];
    const auto count = static_cast<size_t>(copy.num_rows());
    KVFERRY_ASSIGN_OR_RETURN(
        const TokenCopy write,
        TokenCopy::PlanScatter(aside.rows[i], copy.to(), {copy.to_slots(), count}));
    writes.push_back(write);
  }
  return memory.Run(writes, threads);
}

}  // namespace kvferry
