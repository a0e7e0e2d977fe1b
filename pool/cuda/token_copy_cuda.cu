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

constexpr uint32_t kThreads = 256;    // Of a block.
constexpr uint32_t kBlocks = 4;       // At once on a multiprocessor: some work while others wait.
constexpr uint32_t kWordsAtOnce = 4;  // A thread reads so many before it writes them.
// What a block copies before it looks for its next piece of all rows, one after the other.
constexpr uint32_t kTile = kThreads * kWordsAtOnce;

// Of both sides.
struct Shape {
  int64_t num_words;
  Divisor words_per_row, words_per_head;
  uint32_t num_rows;
};

// One word as it is.
template <typename Word, bool kWordsAreAligned>
struct Plain {
  using In = Word;
  using Out = Word;
  static constexpr bool kAligned = kWordsAreAligned;
  __device__ Out operator()(const In& word) const { return word; }
};

// A word of kValues numbers, scaled and cast.
template <typename From, typename To, int kValues, bool kWordsAreAligned>
struct Cast {
  using In = Group<typename From::Stored, kValues>;
  using Out = Group<typename To::Stored, kValues>;
  static constexpr bool kAligned = kWordsAreAligned;
  float multiply;
  Division division;

  __device__ Out operator()(const In& in) const {
    float values[kValues];
    DecodeFinite<From, kValues>(in.values, values);
    bool takes = true;
#pragma unroll
    for (float& value : values) {
      value = __fmul_rn(value, multiply);
      takes = takes && division.Takes<To>(value);
    }
    Out out;
    if (takes) {
#pragma unroll
      for (float& value : values) value = division(value);
      EncodeFinite<To, kValues>(values, out.values);
      return out;
    }
    for (int i = 0; i < kValues; ++i) {
      out.values[i] = static_cast<typename To::Stored>(
          To::Encode(Scaled(From::Decode(in.values[i]), multiply, division.divide)));
    }
    return out;
  }
};

// Neighbouring threads take neighbouring words, so that reads and writes coalesce, whatever rows
// they are of, so that none is idle beside short ones.
template <typename Move>
__global__ void __launch_bounds__(kThreads, kBlocks)
    CopyRows(Side from, Side to, Shape shape, Move move, unsigned long long* skipped) {
  const uint32_t row_words = shape.words_per_row.number, head_words = shape.words_per_head.number;
  for (int64_t first = int64_t{blockIdx.x} * kTile; first < shape.num_words;
       first += int64_t{gridDim.x} * kTile) {
    const auto first_row = static_cast<uint32_t>(first / row_words);
    const auto first_word = static_cast<uint32_t>(first % row_words);
    // Step by step, so that a thread waits once for all its slots, and once for all its words.
    uint32_t words[kWordsAtOnce], from_slots[kWordsAtOnce], to_slots[kWordsAtOnce];
    bool copies[kWordsAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kWordsAtOnce; ++i) {
      const uint32_t place = first_word + i * kThreads + threadIdx.x;
      const uint32_t rows = shape.words_per_row.Into(place);
      words[i] = place - rows * row_words;
      copies[i] = first_row + rows < shape.num_rows;
      const uint32_t row = copies[i] ? first_row + rows : shape.num_rows - 1;
      from_slots[i] = from.slot(row);
      to_slots[i] = to.slot(row);
    }
    const std::byte* in[kWordsAtOnce];
    std::byte* out[kWordsAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kWordsAtOnce; ++i) {
      const bool skips = !from.Has(from_slots[i]) || !to.Has(to_slots[i]);
      if (copies[i] && skips && words[i] == 0 && skipped != nullptr) atomicAdd(skipped, 1ULL);
      copies[i] = copies[i] && !skips;
      in[i] = from.row(from_slots[i]);
      out[i] = to.row(to_slots[i]);
      uint32_t word = words[i];
      if (head_words != row_words) {
        const uint32_t head = shape.words_per_head.Into(word);
        word -= head * head_words;
        in[i] += head * from.head_stride;
        out[i] += head * to.head_stride;
      }
      in[i] += word * from.word_stride;
      out[i] += word * to.word_stride;
    }
    typename Move::In moved[kWordsAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kWordsAtOnce; ++i) {
      if (copies[i]) moved[i] = Load<Move::kAligned, typename Move::In>(in[i]);
    }
#pragma unroll
    for (uint32_t i = 0; i < kWordsAtOnce; ++i) {
      if (copies[i]) Store<Move::kAligned>(out[i], move(moved[i]));
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
  const int64_t words_per_head = copy.from.head_dim / values_per_word;
  const int64_t words_per_row = words_per_head * copy.from.num_heads;
  if (copy.num_rows == 0 || words_per_row == 0) return absl::OkStatus();
  const Shape shape = {copy.num_rows * words_per_row, Divisor::Of(words_per_row),
                       Divisor::Of(words_per_head), static_cast<uint32_t>(copy.num_rows)};
  const cudaLaunchConfig_t config = GridOf(shape.num_words, kTile, kThreads, copy.stream);
  return CudaStatus(cudaLaunchKernelEx(&config, &CopyRows<Move>,
                                       SideOf(copy.from, copy.from_slots, values_per_word),
                                       SideOf(copy.to, copy.to_slots, values_per_word), shape, move,
                                       reinterpret_cast<unsigned long long*>(copy.skipped_rows)),
                    "token copy");
}

// Both sides can be moved so many values at a time.
bool WordsFit(const Copy& copy, int64_t values) {
  return HeadsAreWords(copy.from, values) && HeadsAreWords(copy.to, values);
}

bool ValuesAreAligned(const Copy& copy) {
  return ValuesAreAligned(copy.from) && ValuesAreAligned(copy.to);
}

template <typename Value>
absl::Status LaunchPlainValues(const Copy& copy) {
  return ValuesAreAligned(copy) ? Launch(copy, 1, Plain<Value, true>())
                                : Launch(copy, 1, Plain<Value, false>());
}

absl::Status LaunchPlain(const Copy& copy) {
  const int64_t value_bytes = DTypeBytes(copy.from.dtype);
  if (const int64_t values = 16 / value_bytes; WordsFit(copy, values)) {
    return Launch(copy, values, Plain<uint4, true>());
  }
  if (const int64_t values = 4 / value_bytes; WordsFit(copy, values)) {
    return Launch(copy, values, Plain<uint32_t, true>());
  }
  if (value_bytes == 4) return LaunchPlainValues<uint32_t>(copy);
  if (value_bytes == 2) return LaunchPlainValues<uint16_t>(copy);
  return Launch(copy, 1, Plain<uint8_t, true>());
}

template <typename From, typename To>
absl::Status LaunchCast(const Copy& copy) {
  // 16 bytes of the side whose values are larger, but no more than there are registers for.
  constexpr size_t kBytes = std::max(sizeof(typename From::Stored), sizeof(typename To::Stored));
  constexpr int kValues = std::min<int>(16 / kBytes, 8);
  const float multiply = copy.from.scale;
  const Division division = Division::By(copy.to.scale);
  if (WordsFit(copy, kValues)) {
    return Launch(copy, kValues, Cast<From, To, kValues, true>{multiply, division});
  }
  if (ValuesAreAligned(copy)) {
    return Launch(copy, 1, Cast<From, To, 1, true>{multiply, division});
  }
  return Launch(copy, 1, Cast<From, To, 1, false>{multiply, division});
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
