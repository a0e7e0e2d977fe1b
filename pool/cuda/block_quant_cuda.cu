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

using casts_cuda::Mxfp4Block;

constexpr int64_t kThreads = 256;  // Of a block.

struct Fp8Block {
  using Scale = float;
  using Code = casts_cuda::Float8E4M3;
  static constexpr uint32_t kValues = 128;
  static constexpr uint32_t kValuesPerCode = 1;

  __device__ static Scale ScaleOf(uint32_t largest) { return casts_cuda::Fp8ScaleOf(largest); }
  __device__ static uint8_t Encode(const float* values, Scale scale) {
    return scale == 0 ? 0 : Code::Encode(Scaled(*values, 1, scale));
  }
  __device__ static void Decode(uint8_t code, Scale scale, float* values) {
    *values = Scaled(Code::Decode(code), scale, 1);
  }
};

// A side whose rows are values one after the other, whatever the heads are.
struct Flat {
  Side side;
  uint32_t head_dim;

  __device__ std::byte* at(int64_t slot, uint32_t i) const {
    const uint32_t head = i / head_dim;
    return side.row(slot) + head * side.head_stride + (i - head * head_dim) * side.word_stride;
  }
};

struct Sides {
  Flat rows, codes, scales;
  int64_t num_rows;
  uint32_t codes_per_row;
  float rows_scale;
};

// Code `code` of a row, its place in `rows`, and in the pool its slot.
struct Place {
  int64_t row, slot;
  uint32_t code;
};

// The threads of a block's codes each look at all its values, which lie in the cache then: none has
// to wait for another.
template <typename Format, typename Block>
__device__ void StoreCode(const Sides& sides, const Place& place) {
  constexpr uint32_t kCodes = Block::kValues / Block::kValuesPerCode;
  const auto value = [&](uint32_t i) {
    const std::byte* at = sides.rows.at(place.row, i);
    return Scaled(Format::Decode(Load<false, typename Format::Stored>(at)), sides.rows_scale, 1);
  };
  const uint32_t block = place.code / kCodes;
  uint32_t largest = 0;
  for (uint32_t i = 0; i < Block::kValues; ++i) {
    largest = max(largest, casts_cuda::MagnitudeForScale(value(block * Block::kValues + i)));
  }
  const typename Block::Scale scale = Block::ScaleOf(largest);
  if (place.code % kCodes == 0) Store<false>(sides.scales.at(place.slot, block), scale);
  float values[Block::kValuesPerCode];
  for (uint32_t i = 0; i < Block::kValuesPerCode; ++i) {
    values[i] = value(place.code * Block::kValuesPerCode + i);
  }
  Store<true>(sides.codes.at(place.slot, place.code), Block::Encode(values, scale));
}

template <typename Format, typename Block>
__device__ void LoadCode(const Sides& sides, const Place& place) {
  constexpr uint32_t kCodes = Block::kValues / Block::kValuesPerCode;
  const auto scale =
      Load<false, typename Block::Scale>(sides.scales.at(place.slot, place.code / kCodes));
  float values[Block::kValuesPerCode];
  Block::Decode(Load<true, uint8_t>(sides.codes.at(place.slot, place.code)), scale, values);
  for (uint32_t i = 0; i < Block::kValuesPerCode; ++i) {
    Store<false, typename Format::Stored>(
        sides.rows.at(place.row, place.code * Block::kValuesPerCode + i),
        Format::Encode(Scaled(values[i], 1, sides.rows_scale)));
  }
}

// A thread takes a code, so that neighbours read and write side by side.
template <typename Format, typename Block, bool kStores>
__global__ void MoveCodes(Sides sides) {
  const int64_t num_codes = sides.num_rows * sides.codes_per_row;
  const int64_t num_threads = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < num_codes; i += num_threads) {
    const int64_t row = i / sides.codes_per_row;
    const Place place = {row, sides.codes.side.slot(row),
                         static_cast<uint32_t>(i % sides.codes_per_row)};
    if (!sides.codes.side.Has(place.slot) || !sides.scales.side.Has(place.slot)) continue;
    if constexpr (kStores) {
      StoreCode<Format, Block>(sides, place);
    } else {
      LoadCode<Format, Block>(sides, place);
    }
  }
}

Flat FlatOf(const TokenView& view, const int32_t* slots) {
  return {SideOf(view, slots, 1), static_cast<uint32_t>(view.head_dim)};
}

template <typename Format, typename Block>
absl::Status Launch(const Sides& sides, bool stores, cudaStream_t stream) {
  const cudaLaunchConfig_t config = GridOf(sides.num_rows * sides.codes_per_row, kThreads, stream);
  return CudaStatus(
      cudaLaunchKernelEx(
          &config, stores ? &MoveCodes<Format, Block, true> : &MoveCodes<Format, Block, false>,
          sides),
      "block quantisation");
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
  const TokenView& codes = copy.codes();
  const Sides sides = {FlatOf(rows, nullptr),
                       FlatOf(codes, slots),
                       FlatOf(copy.scales(), slots),
                       rows.num_slots,
                       static_cast<uint32_t>(codes.num_heads * codes.head_dim),
                       rows.scale};
  return WithFormat(rows.dtype, [&](auto format) {
    using Format = decltype(format);
    return copy.format() == BlockFormat::kMxfp4
               ? Launch<Format, Mxfp4Block>(sides, copy.stores(), stream)
               : Launch<Format, Fp8Block>(sides, copy.stores(), stream);
  });
}

}  // namespace kvferry
