#include "pool/token_copy.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "pool/bulk_copy.h"

namespace kvferry {
namespace {

// What a thread copies at a time: some 30 us of work, far more than it takes to claim it.
constexpr int64_t kBytesPerPart = 256 << 10;

absl::Status CheckScale(absl::string_view side, float scale) {
  if (IsScale(scale)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("token copy: the scale of the ", side, " is ",
                                                 scale, " but must be finite and above 0"));
}

absl::Status CheckShapes(const TokenView& from, const TokenView& to) {
  if (from.num_heads == to.num_heads && from.head_dim == to.head_dim) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("token copy: rows of ", from.num_heads,
                                                 " heads x ", from.head_dim, " do not fit rows of ",
                                                 to.num_heads, " heads x ", to.head_dim));
}

absl::Status CheckConversion(const TokenView& from, const TokenView& to) {
  if (SameNumbers(from, to) || CastBetween(from.dtype, to.dtype) != nullptr) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("token copy: no conversion from ", DTypeName(from.dtype), " scaled by ",
                   from.scale, " to ", DTypeName(to.dtype), " scaled by ", to.scale));
}

}  // namespace

absl::Status CheckRowsFit(const TokenView& from, const TokenView& to) {
  KVFERRY_RETURN_IF_ERROR(CheckShapes(from, to));
  KVFERRY_RETURN_IF_ERROR(CheckScale("source", from.scale));
  KVFERRY_RETURN_IF_ERROR(CheckScale("destination", to.scale));
  return CheckConversion(from, to);
}

bool SameNumbers(const TokenView& from, const TokenView& to) {
  return from.dtype == to.dtype && from.scale == to.scale;
}

TokenCopy::TokenCopy(const TokenView& from, const Slots& from_slots, const TokenView& to,
                     const Slots& to_slots, CastFn cast)
    : from_(from),
      to_(to),
      from_slots_(from_slots),
      to_slots_(to_slots),
      cast_(cast),
      runs_(from.SlotsAreDense() && to.SlotsAreDense()),
      rows_(from.RowsAreDense() && to.RowsAreDense()),
      heads_(from.HeadsAreDense() && to.HeadsAreDense()) {}

TokenCopy::Slots TokenCopy::List(std::span<const int32_t> slots) {
  return {slots.data(), static_cast<int64_t>(slots.size())};
}

TokenCopy::Slots TokenCopy::InOrder(const TokenView& view) { return {nullptr, view.num_slots}; }

absl::Status TokenCopy::CheckSlots(absl::string_view side, const Slots& slots,
                                   const TokenView& view) {
  if (slots.ids == nullptr) return absl::OkStatus();
  const auto outside = [&view](int32_t slot) { return slot < 0 || slot >= view.num_slots; };
  bool any = false;  // No early exit, so that it vectorises.
  for (int64_t i = 0; i < slots.count; ++i) any |= outside(slots.ids[i]);
  if (!any) return absl::OkStatus();
  const int64_t at = std::find_if(slots.ids, slots.ids + slots.count, outside) - slots.ids;
  return absl::OutOfRangeError(absl::StrCat("token copy: ", side, " slot ", slots.ids[at],
                                            " at position ", at, " is not in [0, ", view.num_slots,
                                            ")"));
}

absl::StatusOr<TokenCopy> TokenCopy::PlanBetween(const TokenView& from, const Slots& from_slots,
                                                 const TokenView& to, const Slots& to_slots,
                                                 CpuKernels kernels) {
  if (from_slots.count != to_slots.count) {
    return absl::InvalidArgumentError(absl::StrCat(
        "token copy: ", from_slots.count, " rows to read but ", to_slots.count, " to write"));
  }
  KVFERRY_RETURN_IF_ERROR(CheckRowsFit(from, to));
  KVFERRY_RETURN_IF_ERROR(CheckSlots("source", from_slots, from));
  KVFERRY_RETURN_IF_ERROR(CheckSlots("destination", to_slots, to));
  const CastFn cast = SameNumbers(from, to) ? nullptr : CastBetween(from.dtype, to.dtype, kernels);
  return TokenCopy(from, from_slots, to, to_slots, cast);
}

absl::StatusOr<TokenCopy> TokenCopy::Plan(const TokenView& from,
                                          std::span<const int32_t> from_slots, const TokenView& to,
                                          std::span<const int32_t> to_slots, CpuKernels kernels) {
  return PlanBetween(from, List(from_slots), to, List(to_slots), kernels);
}

absl::StatusOr<TokenCopy> TokenCopy::PlanGather(const TokenView& from,
                                                std::span<const int32_t> from_slots,
                                                const TokenView& to, CpuKernels kernels) {
  return PlanBetween(from, List(from_slots), to, InOrder(to), kernels);
}

absl::StatusOr<TokenCopy> TokenCopy::PlanScatter(const TokenView& from, const TokenView& to,
                                                 std::span<const int32_t> to_slots,
                                                 CpuKernels kernels) {
  return PlanBetween(from, InOrder(from), to, List(to_slots), kernels);
}

void TokenCopy::Run(ThreadPool* threads) const {
  const int64_t rows = from_slots_.count;
  const int64_t parts = rows * std::max(from_.row_bytes(), to_.row_bytes()) / kBytesPerPart;
  if (threads == nullptr || parts < 2) return CopyPart(0, rows);
  threads->ParallelFor(
      parts, [&](int64_t part) { CopyPart(rows * part / parts, rows * (part + 1) / parts); });
}

void TokenCopy::CopyPart(int64_t begin, int64_t end) const {
  CopyAhead<PlainCopy> ahead;
  for (int64_t i = begin; i < end;) {
    const int64_t rows = runs_ ? RunLength(i, end) : 1;
    const std::byte* const from = from_.row(from_slots_[i]);
    std::byte* const to = to_.row(to_slots_[i]);
    if (cast_ == nullptr && rows_ && from != to) {
      ahead.Add(to, {from, static_cast<size_t>(rows * from_.row_bytes())});
    } else {
      CopyRows(from, to, rows);
    }
    i += rows;
  }
  ahead.Finish();
}

int64_t TokenCopy::RunLength(int64_t begin, int64_t end) const {
  int64_t i = begin + 1;
  while (i < end && from_slots_[i] == from_slots_[i - 1] + 1 &&
         to_slots_[i] == to_slots_[i - 1] + 1) {
    ++i;
  }
  return i - begin;
}

void TokenCopy::CopyRows(const std::byte* from, std::byte* to, int64_t rows) const {
  if (rows_) return CopyValues(from, to, rows * from_.num_heads * from_.head_dim);
  for (int64_t head = 0; head < from_.num_heads; ++head) {
    CopyHead(from + head * from_.head_stride, to + head * to_.head_stride);
  }
}

void TokenCopy::CopyHead(const std::byte* from, std::byte* to) const {
  if (heads_) return CopyValues(from, to, from_.head_dim);
  for (int64_t value = 0; value < from_.head_dim; ++value) {
    CopyValues(from + value * from_.value_stride, to + value * to_.value_stride, 1);
  }
}

void TokenCopy::CopyValues(const std::byte* from, std::byte* to, int64_t values) const {
  if (cast_ != nullptr) return cast_(from, to, values, from_.scale, to_.scale);
  if (from != to) std::memcpy(to, from, static_cast<size_t>(values * DTypeBytes(from_.dtype)));
}

}  // namespace kvferry
