#pragma once

// Moves token rows between views on the CPU, whatever their order of dimensions, dtypes and scales:
// gather, scatter, store with scale and cast, copy and conversion between layouts are all this.

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/thread_pool.h"
#include "pool/casts.h"
#include "pool/token_view.h"

namespace kvferry {

// INVALID_ARGUMENT unless rows of `from` can become rows of `to`: heads or head_dim differ, a scale
// is not finite and positive, or a conversion is asked for that does not exist (to or from uint8).
// What every copy of tokens checks of its views, here and in cuda/.
absl::Status CheckRowsFit(const TokenView& from, const TokenView& to);
// Dtype and scale are the same: bytes can move as they are.
bool SameNumbers(const TokenView& from, const TokenView& to);

// A copy that has been checked and can only succeed. Row to_slots[i] of `to` becomes row
// from_slots[i] of `from`, for all i, converted to `to`'s dtype and scale (casts.h says how it
// rounds). Neighbouring slots that are neighbours in both views move in one piece.
//
// A destination slot that stands twice (engines write all padded tokens to slot 0) keeps the later
// row; with threads, either row or parts of both. Rows must not overlap between the views, unless
// they are the same row. The lists and the memory of the views must outlive it. Thread-compatible.
class TokenCopy {
 public:
  // INVALID_ARGUMENT when the lists differ in length, or as CheckRowsFit() says; OUT_OF_RANGE
  // naming the first slot that is outside its view.
  static absl::StatusOr<TokenCopy> Plan(const TokenView& from, std::span<const int32_t> from_slots,
                                        const TokenView& to, std::span<const int32_t> to_slots,
                                        CpuKernels kernels = BestCpuKernels());
  // The side without a list has slots 0, 1, 2, ..., as many as the other's list.
  static absl::StatusOr<TokenCopy> PlanGather(const TokenView& from,
                                              std::span<const int32_t> from_slots,
                                              const TokenView& to,
                                              CpuKernels kernels = BestCpuKernels());
  static absl::StatusOr<TokenCopy> PlanScatter(const TokenView& from, const TokenView& to,
                                               std::span<const int32_t> to_slots,
                                               CpuKernels kernels = BestCpuKernels());

  // What it copies, for who copies it otherwise (PoolMemory); a null list stands for 0, 1, 2, ... .
  const TokenView& from() const { return from_; }
  const TokenView& to() const { return to_; }
  const int32_t* from_slots() const { return from_slots_.ids; }
  const int32_t* to_slots() const { return to_slots_.ids; }
  int64_t num_rows() const { return from_slots_.count; }

  // With `threads`, which may be null, large copies are spread over them; returns when all is done.
  void Run(ThreadPool* threads = nullptr) const;

 private:
  // Slots of a list, or 0, 1, 2, ... .
  struct Slots {
    const int32_t* ids = nullptr;
    int64_t count = 0;

    int64_t operator[](int64_t i) const { return ids == nullptr ? i : ids[i]; }
  };

  TokenCopy(const TokenView& from, const Slots& from_slots, const TokenView& to,
            const Slots& to_slots, CastFn cast);

  static Slots List(std::span<const int32_t> slots);
  static Slots InOrder(const TokenView& view);
  static absl::Status CheckSlots(absl::string_view side, const Slots& slots, const TokenView& view);
  static absl::StatusOr<TokenCopy> PlanBetween(const TokenView& from, const Slots& from_slots,
                                               const TokenView& to, const Slots& to_slots,
                                               CpuKernels kernels);

  // Rows [begin, end) of the lists.
  void CopyPart(int64_t begin, int64_t end) const;
  int64_t RunLength(int64_t begin, int64_t end) const;
  void CopyRows(const std::byte* from, std::byte* to, int64_t rows) const;
  void CopyHead(const std::byte* from, std::byte* to) const;
  void CopyValues(const std::byte* from, std::byte* to, int64_t values) const;

  TokenView from_, to_;
  Slots from_slots_, to_slots_;
  CastFn cast_;               // Null when bytes move as they are.
  bool runs_, rows_, heads_;  // What lies without gaps on both sides.
};

}  // namespace kvferry
