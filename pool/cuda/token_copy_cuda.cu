#include "pool/cuda/token_copy_cuda.h"

#include <algorithm>
#include <cstddef>
#include <limits>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "pool/cuda/cuda_status.h"
#include "pool/cuda/device_rows.cuh"
#include "pool/token_copy.h"

namespace kvferry {
namespace {

constexpr uint32_t kLanes = 32;  // Threads of a warp.
constexpr int64_t kWarps = 8;    // Of a block.
// What a warp copies before it looks for its next piece: of a row, so that few long rows keep a
// device busy too.
constexpr uint32_t kWordsPerPiece = 4 * kLanes;

// Of both sides.
struct Shape {
  int64_t num_rows;
  uint32_t words_per_row, words_per_head, pieces_per_row;
};

// One word as it is.
template <typename Word, bool kWordsAreAligned>
struct Plain {
  using In = Word;
  using Out = Word;
  static constexpr bool kAligned = kWordsAreAligned;
  __device__ Out operator()(const In& word) const { return word; }
};

template <typename Value, int kValues>
struct Group {
  Value values[kValues];
};

// A word of kValues numbers, scaled and cast.
template <typename From, typename To, int kValues>
struct Cast {
  using In = Group<typename From::Stored, kValues>;
  using Out = Group<typename To::Stored, kValues>;
  static constexpr bool kAligned = kValues > 1;
  float multiply, divide;

  __device__ Out operator()(const In& in) const {
    Out out;
    for (int i = 0; i < kValues; ++i)
      out.values[i] = To::Encode(Scaled(From::Decode(in.values[i]), multiply, divide));
    return out;
  }
};

// A warp takes one piece of one row at a time, its lanes side by side so that reads and writes
// coalesce.
template <typename Move>
__global__ void CopyRows(Side from, Side to, Shape shape, Move move, unsigned long long* skipped) {
  const uint32_t lane = threadIdx.x % kLanes;
  const int64_t num_pieces = shape.num_rows * shape.pieces_per_row;
  const int64_t num_warps = int64_t{gridDim.x} * kWarps;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes; i < num_pieces;
       i += num_warps) {
    const int64_t row = i / shape.pieces_per_row;
    const auto piece = static_cast<uint32_t>(i % shape.pieces_per_row);
    const int64_t from_slot = from.slot(row), to_slot = to.slot(row);
    if (!from.Has(from_slot) || !to.Has(to_slot)) {
      if (skipped != nullptr && piece == 0 && lane == 0) atomicAdd(skipped, 1ULL);
      continue;
    }
    const std::byte* in = from.row(from_slot);
    std::byte* out = to.row(to_slot);
    const uint32_t end = min((piece + 1) * kWordsPerPiece, shape.words_per_row);
    for (uint32_t word = piece * kWordsPerPiece + lane; word < end; word += kLanes) {
      const uint32_t head = word / shape.words_per_head;
      const uint32_t place = word - head * shape.words_per_head;
      Store<Move::kAligned>(out + head * to.head_stride + place * to.word_stride,
                            move(Load<Move::kAligned, typename Move::In>(
                                in + head * from.head_stride + place * from.word_stride)));
    }
  }
}

// A copy whose arguments are checked.
struct Copy {
  TokenView from, to;
  const int32_t *from_slots, *to_slots;
  int64_t num_rows;
  int64_t* skipped_rows;
  cudaStream_t stream;
};

template <typename Move>
absl::Status Launch(const Copy& copy, int64_t values_per_word, const Move& move) {
  const auto words_per_head = static_cast<uint32_t>(copy.from.head_dim / values_per_word);
  const auto words_per_row = words_per_head * static_cast<uint32_t>(copy.from.num_heads);
  const Shape shape = {copy.num_rows, words_per_row, words_per_head,
                       (words_per_row + kWordsPerPiece - 1) / kWordsPerPiece};
  const int64_t threads = shape.num_rows * shape.pieces_per_row * kLanes;
  if (threads == 0) return absl::OkStatus();
  const cudaLaunchConfig_t config = GridOf(threads, kWarps * kLanes, copy.stream);
  return CudaStatus(cudaLaunchKernelEx(&config, &CopyRows<Move>,
                                       SideOf(copy.from, copy.from_slots, values_per_word),
                                       SideOf(copy.to, copy.to_slots, values_per_word), shape, move,
                                       reinterpret_cast<unsigned long long*>(copy.skipped_rows)),
                    "token copy");
}

// Every head of every slot begins at a multiple of `bytes`, a power of two.
bool HeadsAreAligned(const TokenView& view, int64_t bytes) {
  const auto misaligned = [bytes](int64_t offset) { return offset % bytes != 0; };
  return !misaligned(static_cast<int64_t>(reinterpret_cast<uintptr_t>(view.data))) &&
         !misaligned(view.page_stride) && (view.page_size == 1 || !misaligned(view.token_stride)) &&
         (view.num_heads == 1 || !misaligned(view.head_stride));
}

// Both sides can be moved so many values at a time.
bool WordsFit(const Copy& copy, int64_t values) {
  const auto fits = [values](const TokenView& view) {
    return view.HeadsAreDense() && view.head_dim % values == 0 &&
           HeadsAreAligned(view, values * DTypeBytes(view.dtype));
  };
  return fits(copy.from) && fits(copy.to);
}

absl::Status LaunchPlain(const Copy& copy) {
  const int64_t value_bytes = DTypeBytes(copy.from.dtype);
  if (const int64_t values = 16 / value_bytes; WordsFit(copy, values)) {
    return Launch(copy, values, Plain<uint4, true>());
  }
  if (const int64_t values = 4 / value_bytes; WordsFit(copy, values)) {
    return Launch(copy, values, Plain<uint32_t, true>());
  }
  if (value_bytes == 4) return Launch(copy, 1, Plain<uint32_t, false>());
  if (value_bytes == 2) return Launch(copy, 1, Plain<uint16_t, false>());
  return Launch(copy, 1, Plain<uint8_t, true>());
}

template <typename From, typename To>
absl::Status LaunchCast(const Copy& copy) {
  const float multiply = copy.from.scale, divide = copy.to.scale;
  if (WordsFit(copy, 4)) return Launch(copy, 4, Cast<From, To, 4>{multiply, divide});
  return Launch(copy, 1, Cast<From, To, 1>{multiply, divide});
}

absl::Status LaunchCast(const Copy& copy) {
  return WithFormat(copy.from.dtype, [&copy](auto from) {
    return WithFormat(copy.to.dtype,
                      [&copy](auto to) { return LaunchCast<decltype(from), decltype(to)>(copy); });
  });
}

absl::Status CheckSide(absl::string_view side, const TokenView& view, const int32_t* slots,
                       int64_t num_rows) {
  int64_t values = 0;
  if (view.page_size < 1 || view.num_heads < 0 || view.head_dim < 0 ||
      __builtin_mul_overflow(view.num_heads, view.head_dim, &values) ||
      values > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "token copy: the ", side, " has rows of ", view.num_heads, " heads x ", view.head_dim,
        " in pages of ", view.page_size, "; values a row must be at most INT32_MAX"));
  }
  if (view.data == nullptr && num_rows > 0) {
    return absl::InvalidArgumentError(absl::StrCat("token copy: the ", side, " has no data"));
  }
  if (slots != nullptr || num_rows <= view.num_slots) return absl::OkStatus();
  return absl::OutOfRangeError(absl::StrCat("token copy: ", num_rows, " rows but the ", side,
                                            " has ", view.num_slots, " slots"));
}

// Heads become one where they lie without gaps on both sides.
void JoinHeads(Copy& copy) {
  if (!copy.from.RowsAreDense() || !copy.to.RowsAreDense()) return;
  for (TokenView* view : {&copy.from, &copy.to}) {
    view->head_dim *= view->num_heads;
    view->num_heads = 1;
  }
}

}  // namespace

absl::Status CopyTokensCuda(const TokenView& from, const int32_t* from_slots, const TokenView& to,
                            const int32_t* to_slots, int64_t num_rows, int64_t* skipped_rows,
                            cudaStream_t stream) {
  if (num_rows < 0 || num_rows > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("token copy: num_rows is ", num_rows, " but must lie in [0, INT32_MAX]"));
  }
  KVFERRY_RETURN_IF_ERROR(CheckRowsFit(from, to));
  KVFERRY_RETURN_IF_ERROR(CheckSide("source", from, from_slots, num_rows));
  KVFERRY_RETURN_IF_ERROR(CheckSide("destination", to, to_slots, num_rows));
  Copy copy = {from, to, from_slots, to_slots, num_rows, skipped_rows, stream};
  JoinHeads(copy);
  return SameNumbers(from, to) ? LaunchPlain(copy) : LaunchCast(copy);
}

}  // namespace kvferry
