#include "pool/cuda/block_quant_cuda.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "pool/cuda/cuda_status.h"
#include "pool/cuda/device_rows.cuh"
// Behind the number formats.
#include "pool/block_formats_impl.h"

namespace kvferry {
namespace {

using casts_cuda::Float8E4M3;
using casts_cuda::Mxfp4Block;

constexpr int64_t kThreads = 256;  // Of a block of them.
constexpr uint32_t kValues = 16;   // Of a piece of a row, which one thread takes.

// How a thread makes codes of its piece and values of its codes. Neighbouring pieces may share a
// scale. Encode() is told whether all values are finite, which most are, so that it may go a
// shorter way; DecodeMost() may give up on values that Division does not take.
struct Mxfp4 {
  using Scale = Mxfp4Block::Scale;
  static constexpr uint32_t kPieces = 1;     // With the same scale.
  static constexpr uint32_t kCodeBytes = 8;  // Of a piece.

  __device__ static Scale ScaleOf(uint32_t largest) { return Mxfp4Block::ScaleOf(largest); }

  __device__ static void Encode(const float* values, bool finite, Scale scale, uint8_t* codes) {
    if (finite) return EncodeNumbers(values, scale, codes);
    for (uint32_t i = 0; i < kCodeBytes; ++i) codes[i] = Mxfp4Block::Encode(values + 2 * i, scale);
  }

  __device__ static void DecodeMost(const uint8_t* codes, Scale scale, float* values) {
    // As the first bits of floats, codes are 2^126 times too small; in two steps with the scale, as
    // there may be no float for both.
    const int exponent = int{scale} - 127 + 126;
    const float first = casts_cuda::PowerOfTwo(exponent / 2);
    const float second = casts_cuda::PowerOfTwo(exponent - exponent / 2);
#pragma unroll
    for (uint32_t i = 0; i < kValues; ++i) {
      const uint32_t code = codes[i / 2] >> (i % 2 * 4);
      values[i] = casts_cuda::AsFloat((code & 7) << 22 | (code & 8) << 28) * first * second;
    }
  }
  __device__ static float Decode(const uint8_t* codes, uint32_t i, Scale scale) {
    return Mxfp4Block::DecodeOne(codes[i / 2] >> (i % 2 * 4) & 15, scale);
  }

 private:
  // Codes count in steps of 0.5, from 2 on of 1 and from 4 on of 2, so a value's is the smallest of
  // three lines', rounded to an integer with ties to even. Floats from 2^23 on are integers, into
  // which adding rounds so.
  __device__ static void EncodeNumbers(const float* values, Scale scale, uint8_t* codes) {
    constexpr float kIntegers = 0x1p23F;
    const float unit = casts_cuda::PowerOfTwo(127 - scale);
#pragma unroll
    for (uint32_t i = 0; i < kCodeBytes; ++i) {
      uint32_t both = 0;
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const float value = values[2 * i + half];
        const float scaled = fabsf(value) * unit;
        const float code = fminf(fminf(__fmaf_rn(scaled, 2, kIntegers), scaled + (kIntegers + 2)),
                                 __fmaf_rn(scaled, 0.5F, kIntegers + 4));
        const uint32_t sign = casts_cuda::AsBits(value) >> 31 << 3;
        both |= ((casts_cuda::AsBits(code) & 7) | sign) << (4 * half);
      }
      codes[i] = static_cast<uint8_t>(both);
    }
  }
};

struct Fp8Blocks {
  using Scale = float;
  static constexpr uint32_t kPieces = 8;
  static constexpr uint32_t kCodeBytes = 16;

  __device__ static Scale ScaleOf(uint32_t largest) { return casts_cuda::Fp8ScaleOf(largest); }

  __device__ static void Encode(const float* values, bool finite, Scale scale, uint8_t* codes) {
    const Division division = Division::By(scale);
    if (finite && division.most > 0) {
      float scaled[kValues];
#pragma unroll
      for (uint32_t i = 0; i < kValues; ++i) scaled[i] = division(values[i]);
      return EncodeFinite<Float8E4M3, kValues>(scaled, codes);
    }
    for (uint32_t i = 0; i < kValues; ++i) {
      // As the host does: a block without a scale may have NaNs beside its zeros.
      const float kept = std::isnan(values[i]) ? values[i] : 0;
      codes[i] =
          static_cast<uint8_t>(Float8E4M3::Encode(scale == 0 ? kept : Scaled(values[i], 1, scale)));
    }
  }

  __device__ static void DecodeMost(const uint8_t* codes, Scale scale, float* values) {
    DecodeFinite<Float8E4M3, kValues>(codes, values);
#pragma unroll
    for (uint32_t i = 0; i < kValues; ++i) values[i] = __fmul_rn(values[i], scale);
  }
  __device__ static float Decode(const uint8_t* codes, uint32_t i, Scale scale) {
    return Scaled(Float8E4M3::Decode(codes[i]), scale, 1);
  }
};

// A side whose rows are values one after the other, whatever the heads are.
struct Flat {
  Side side;
  Divisor head_dim;

  __device__ std::byte* at(uint32_t slot, uint32_t i) const {
    const uint32_t head = head_dim.Into(i);
    return side.row(slot) + head * side.head_stride +
           (i - head * head_dim.number) * side.word_stride;
  }
};

struct Sides {
  Flat rows, codes, scales;
  int64_t num_pieces;
  Divisor pieces_per_row;
  Division rows_scale;
};

// Piece `piece` of a row, its place in `rows`, and in the pool its slot.
struct Place {
  uint32_t row, slot, piece;
};

template <typename Value, uint32_t kCount>
constexpr uint32_t kValuesOfWord = kCount * sizeof(Value) < 16 ? kCount : 16 / sizeof(Value);

// kCount values of a row, from number `first` on. Those that are aligned lie in one head, and words
// of 16 bytes or all of them are.
template <bool kAligned, uint32_t kCount, typename Value>
__device__ void Read(const Flat& from, uint32_t slot, uint32_t first, Value* values) {
  if constexpr (kAligned) {
    constexpr uint32_t kInWord = kValuesOfWord<Value, kCount>;
    const std::byte* at = from.at(slot, first);
#pragma unroll
    for (uint32_t i = 0; i < kCount; i += kInWord) {
      const auto word = Load<true, Group<Value, kInWord>>(at + i * sizeof(Value));
#pragma unroll
      for (uint32_t j = 0; j < kInWord; ++j) values[i + j] = word.values[j];
    }
  } else {
    for (uint32_t i = 0; i < kCount; ++i) values[i] = Load<false, Value>(from.at(slot, first + i));
  }
}

template <bool kAligned, uint32_t kCount, typename Value>
__device__ void Write(const Flat& to, uint32_t slot, uint32_t first, const Value* values) {
  if constexpr (kAligned) {
    constexpr uint32_t kInWord = kValuesOfWord<Value, kCount>;
    std::byte* at = to.at(slot, first);
#pragma unroll
    for (uint32_t i = 0; i < kCount; i += kInWord) {
      Group<Value, kInWord> word;
#pragma unroll
      for (uint32_t j = 0; j < kInWord; ++j) word.values[j] = values[i + j];
      Store<true>(at + i * sizeof(Value), word);
    }
  } else {
    for (uint32_t i = 0; i < kCount; ++i) Store<false>(to.at(slot, first + i), values[i]);
  }
}

struct Piece {
  float values[kValues];
  bool finite;
  uint32_t largest;  // As casts_cuda::MagnitudeForScale().
};

template <typename Format, bool kAligned>
__device__ Piece ReadPiece(const Sides& sides, const Place& place) {
  typename Format::Stored stored[kValues];
  Read<kAligned, kValues>(sides.rows, place.row, place.piece * kValues, stored);
  Piece piece;
  DecodeFinite<Format, kValues>(stored, piece.values);
  piece.largest = 0;
#pragma unroll
  for (float& value : piece.values) {
    value = __fmul_rn(value, sides.rows_scale.divide);
    piece.largest = max(piece.largest, casts_cuda::AsBits(value) & casts_cuda::kMagnitude);
  }
  piece.finite = piece.largest < casts_cuda::kInfinity;
  if (piece.finite) return piece;
  piece.largest = 0;
  for (uint32_t i = 0; i < kValues; ++i) {
    piece.values[i] = Scaled(Format::Decode(stored[i]), sides.rows_scale.divide, 1);
    piece.largest = max(piece.largest, casts_cuda::MagnitudeForScale(piece.values[i]));
  }
  return piece;
}

// Of all pieces that share a scale, which neighbouring threads of a warp have: all of its threads
// must come here. Where there are no warps (tests/pool_cuda/emulated), a thread looks at all of
// them itself.
template <typename Format, typename Block, bool kAligned>
__device__ uint32_t LargestOfBlock(const Sides& sides, const Place& place, bool exists,
                                   uint32_t largest) {
#ifdef __CUDA_ARCH__
  for (uint32_t lanes = 1; lanes < Block::kPieces; lanes *= 2) {
    largest = max(largest, __shfl_xor_sync(0xffffffff, largest, lanes));
  }
#else
  const uint32_t first = place.piece / Block::kPieces * Block::kPieces;
  for (uint32_t i = 0; exists && i < Block::kPieces; ++i) {
    const Place other = {place.row, place.slot, first + i};
    largest = max(largest, ReadPiece<Format, kAligned>(sides, other).largest);
  }
#endif
  return largest;
}

template <typename Format, typename Block, bool kAligned>
__device__ void StorePiece(const Sides& sides, const Place& place, bool exists) {
  Piece piece = {};
  if (exists) piece = ReadPiece<Format, kAligned>(sides, place);
  const uint32_t largest =
      LargestOfBlock<Format, Block, kAligned>(sides, place, exists, piece.largest);
  if (!exists) return;
  const typename Block::Scale scale = Block::ScaleOf(largest);
  if (place.piece % Block::kPieces == 0) {
    Store<kAligned>(sides.scales.at(place.slot, place.piece / Block::kPieces), scale);
  }
  uint8_t codes[Block::kCodeBytes];
  Block::Encode(piece.values, piece.finite, scale, codes);
  Write<kAligned, Block::kCodeBytes>(sides.codes, place.slot, place.piece * Block::kCodeBytes,
                                     codes);
}

template <typename Format, typename Block, bool kAligned>
__device__ void LoadPiece(const Sides& sides, const Place& place) {
  using Stored = typename Format::Stored;
  uint8_t codes[Block::kCodeBytes];
  Read<kAligned, Block::kCodeBytes>(sides.codes, place.slot, place.piece * Block::kCodeBytes,
                                    codes);
  const auto scale = Load<kAligned, typename Block::Scale>(
      sides.scales.at(place.slot, place.piece / Block::kPieces));
  float values[kValues];
  Block::DecodeMost(codes, scale, values);
  const Division& division = sides.rows_scale;
  bool takes = true;
#pragma unroll
  for (const float value : values) takes = takes && division.Takes<Format>(value);
  Stored stored[kValues];
  if (takes) {
#pragma unroll
    for (float& value : values) value = division(value);
    EncodeFinite<Format, kValues>(values, stored);
  } else {
    for (uint32_t i = 0; i < kValues; ++i) {
      stored[i] = static_cast<Stored>(
          Format::Encode(Scaled(Block::Decode(codes, i, scale), 1, division.divide)));
    }
  }
  Write<kAligned, kValues>(sides.rows, place.row, place.piece * kValues, stored);
}

// Neighbouring threads take neighbouring pieces. Blocks of values are whole in a warp, as a row and
// a turn of a block of threads are multiples of them.
template <typename Format, typename Block, bool kStores, bool kAligned>
__global__ void MovePieces(Sides sides) {
  const uint32_t row_pieces = sides.pieces_per_row.number;
  for (int64_t first = int64_t{blockIdx.x} * kThreads; first < sides.num_pieces;
       first += int64_t{gridDim.x} * kThreads) {
    const uint32_t in_row = static_cast<uint32_t>(first % row_pieces) + threadIdx.x;
    const uint32_t rows = sides.pieces_per_row.Into(in_row);
    const uint32_t row = static_cast<uint32_t>(first / row_pieces) + rows;
    bool exists = first + threadIdx.x < sides.num_pieces;
    const Place place = {row, exists ? sides.codes.side.slot(row) : 0, in_row - rows * row_pieces};
    exists = exists && sides.codes.side.Has(place.slot) && sides.scales.side.Has(place.slot);
    if constexpr (kStores) {
      StorePiece<Format, Block, kAligned>(sides, place, exists);
    } else {
      if (exists) LoadPiece<Format, Block, kAligned>(sides, place);
    }
  }
}

Flat FlatOf(const TokenView& view, const int32_t* slots) {
  return {SideOf(view, slots, 1), Divisor::Of(view.head_dim)};
}

// A piece of a row, and that of its codes, lie in one head as aligned words.
template <typename Block>
bool WordsFit(const QuantizedCopy& copy, const TokenView& rows) {
  return rows.head_dim % kValues == 0 && HeadsAreWords(rows, 16 / DTypeBytes(rows.dtype)) &&
         HeadsAreWords(copy.codes(), Block::kCodeBytes) && ValuesAreAligned(copy.scales());
}

template <typename Format, typename Block, bool kAligned>
absl::Status Launch(const Sides& sides, bool stores, cudaStream_t stream) {
  const cudaLaunchConfig_t config = GridOf(sides.num_pieces, kThreads, kThreads, stream);
  return CudaStatus(cudaLaunchKernelEx(&config,
                                       stores ? &MovePieces<Format, Block, true, kAligned>
                                              : &MovePieces<Format, Block, false, kAligned>,
                                       sides),
                    "block quantisation");
}

template <typename Format, typename Block>
absl::Status Launch(const QuantizedCopy& copy, const TokenView& rows, const Sides& sides,
                    cudaStream_t stream) {
  return WordsFit<Block>(copy, rows) ? Launch<Format, Block, true>(sides, copy.stores(), stream)
                                     : Launch<Format, Block, false>(sides, copy.stores(), stream);
}

}  // namespace

absl::Status RunQuantizedCuda(const QuantizedCopy& copy, const TokenView& rows,
                              const int32_t* slots, cudaStream_t stream) {
  const int64_t values = rows.num_heads * rows.head_dim;
  if (std::max(rows.num_slots, values) > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("block quantisation: ", rows.num_slots, " rows of ", values,
                     " values; each of the two must be at most INT32_MAX"));
  }
  if (rows.num_slots == 0) return absl::OkStatus();
  const int64_t pieces_per_row = values / kValues;
  const Sides sides = {FlatOf(rows, nullptr),        FlatOf(copy.codes(), slots),
                       FlatOf(copy.scales(), slots), rows.num_slots * pieces_per_row,
                       Divisor::Of(pieces_per_row),  Division::By(rows.scale)};
  return WithFormat(rows.dtype, [&](auto format) {
    using Format = decltype(format);
    return copy.format() == BlockFormat::kMxfp4
               ? Launch<Format, Mxfp4>(copy, rows, sides, stream)
               : Launch<Format, Fp8Blocks>(copy, rows, sides, stream);
  });
}

}  // namespace kvferry
