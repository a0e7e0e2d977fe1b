#include "pool/block_quant.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "pool/casts.h"
#include "pool/token_copy.h"

#define KVFERRY_CASTS_NAMESPACE casts_blocks
#define KVFERRY_CASTS_TARGET
#include "pool/number_formats_impl.h"
// Behind it.
#include "pool/block_formats_impl.h"

namespace kvferry {
namespace {

// What a thread takes at a time: some 50 us of work, far more than it takes to claim it.
constexpr int64_t kValuesPerPart = 32 << 10;

// ---------------------------------------------------------------- one block

uint32_t LargestMagnitude(const float* values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, casts_blocks::MagnitudeForScale(values[i]));
  }
  return largest;
}

void QuantizeMxfp4(const float* values, std::byte* codes, std::byte* scale_byte) {
  using casts_blocks::Mxfp4Block;
  const Mxfp4Block::Scale scale = Mxfp4Block::ScaleOf(LargestMagnitude(values, 16));
  *scale_byte = static_cast<std::byte>(scale);
  for (int64_t i = 0; i < 8; ++i) {
    codes[i] = static_cast<std::byte>(Mxfp4Block::Encode(values + 2 * i, scale));
  }
}

void DequantizeMxfp4(const std::byte* codes, const std::byte* scale, float* values) {
  for (int64_t i = 0; i < 8; ++i) {
    casts_blocks::Mxfp4Block::Decode(std::to_integer<uint8_t>(codes[i]),
                                     std::to_integer<uint8_t>(*scale), values + 2 * i);
  }
}

void QuantizeFp8(const float* values, std::byte* codes, std::byte* scale_bytes) {
  static const CastFn cast = CastBetween(DType::kFloat32, DType::kFloat8E4M3);
  const float scale = casts_blocks::Fp8ScaleOf(LargestMagnitude(values, 128));
  std::memcpy(scale_bytes, &scale, sizeof scale);
  // What a block without a scale has are zeros, what is too small to have one, and NaNs.
  if (scale == 0) {
    float kept[128];
    for (int64_t i = 0; i < 128; ++i) kept[i] = std::isnan(values[i]) ? values[i] : 0;
    cast(reinterpret_cast<const std::byte*>(kept), codes, 128, 1, 1);
  } else {
    cast(reinterpret_cast<const std::byte*>(values), codes, 128, 1, scale);
  }
}

void DequantizeFp8(const std::byte* codes, const std::byte* scale_bytes, float* values) {
  static const CastFn cast = CastBetween(DType::kFloat8E4M3, DType::kFloat32);
  float scale;
  std::memcpy(&scale, scale_bytes, sizeof scale);
  cast(codes, reinterpret_cast<std::byte*>(values), 128, scale, 1);
}

// ---------------------------------------------------------------- rows

struct Codec {
  BlockFormatInfo info;
  void (*quantize)(const float* values, std::byte* codes, std::byte* scale);
  void (*dequantize)(const std::byte* codes, const std::byte* scale, float* values);
};

Codec CodecOf(BlockFormat format) {
  switch (format) {
    case BlockFormat::kMxfp4:
      return {{16, 4, DType::kUint8, DType::kUint8}, &QuantizeMxfp4, &DequantizeMxfp4};
    case BlockFormat::kFp8Block128:
      break;
  }
  return {{128, 8, DType::kFloat8E4M3, DType::kFloat32}, &QuantizeFp8, &DequantizeFp8};
}

absl::Status CheckRow(const BlockFormatInfo& info, int64_t num_heads, int64_t head_dim) {
  if (num_heads > 0 && head_dim > 0 && num_heads * head_dim % info.block_values == 0 &&
      head_dim * info.codes_bits % 8 == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("block quantisation: rows of ", num_heads, " heads x ", head_dim,
                   " are no multiple of a block of ", info.block_values));
}

absl::Status CheckTensor(absl::string_view what, const TokenView& view, int64_t num_heads,
                         int64_t head_dim, DType dtype) {
  if (view.num_heads * view.head_dim == num_heads * head_dim && view.dtype == dtype &&
      view.scale == 1) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("block quantisation: the ", what, " are ", DTypeName(view.dtype), " rows of ",
                   view.num_heads, " heads x ", view.head_dim, " scaled by ", view.scale, ", not ",
                   DTypeName(dtype), " rows of ", num_heads, " x ", head_dim, " scaled by 1"));
}

// Packed rows as a view's are, of another dtype.
TokenView Like(const TokenView& view, std::span<const int32_t> slots, std::byte* data,
               DType dtype) {
  return TokenView::Packed(data, dtype, static_cast<int64_t>(slots.size()), view.num_heads,
                           view.head_dim);
}

// Calls visit(address, count) for pieces that lie without gaps: together the values of a row from
// `first` on, in the order of its heads.
template <typename Visit>
void ForEachPiece(const TokenView& view, int64_t slot, int64_t first, int64_t count,
                  const Visit& visit) {
  std::byte* const row = view.row(slot);
  const int64_t together = view.RowsAreDense()    ? view.num_heads * view.head_dim
                           : view.HeadsAreDense() ? view.head_dim
                                                  : 1;
  for (int64_t done = 0; done < count;) {
    const int64_t at = first + done;
    const int64_t values = std::min(count - done, together - at % together);
    visit(row + at / view.head_dim * view.head_stride + at % view.head_dim * view.value_stride,
          values);
    done += values;
  }
}

void ReadPiece(const TokenView& view, int64_t slot, int64_t first, int64_t count, std::byte* to) {
  ForEachPiece(view, slot, first, count, [&](const std::byte* from, int64_t values) {
    const int64_t bytes = values * DTypeBytes(view.dtype);
    std::memcpy(to, from, static_cast<size_t>(bytes));
    to += bytes;
  });
}

void WritePiece(const TokenView& view, int64_t slot, int64_t first, int64_t count,
                const std::byte* from) {
  ForEachPiece(view, slot, first, count, [&](std::byte* to, int64_t values) {
    const int64_t bytes = values * DTypeBytes(view.dtype);
    std::memcpy(to, from, static_cast<size_t>(bytes));
    from += bytes;
  });
}

// Whole blocks of a row, as floats, as codes and as scales, without gaps. On the stack: what runs
// allocates nothing, so that it cannot end half done.
class Blocks {
 public:
  Blocks(const Codec& codec, const TokenView& rows, const TokenView& codes, const TokenView& scales)
      : codec_(codec),
        rows_(rows),
        codes_(codes),
        scales_(scales),
        to_float_(CastBetween(rows.dtype, DType::kFloat32)),
        from_float_(CastBetween(DType::kFloat32, rows.dtype)) {}

  // Row `row` of the rows becomes that of the codes and scales, or the other way round.
  void Store(int64_t row, int64_t slot) {
    ForEachPart([&](int64_t first, int64_t count) {
      ReadValues(row, first, count);
      ForEachBlock(count, codec_.quantize);
      WritePiece(codes_, slot, CodesIn(first), CodesIn(count), packed_codes_);
      WritePiece(scales_, slot, BlocksIn(first), BlocksIn(count), packed_scales_);
    });
  }
  void Load(int64_t row, int64_t slot) {
    ForEachPart([&](int64_t first, int64_t count) {
      ReadPiece(codes_, slot, CodesIn(first), CodesIn(count), packed_codes_);
      ReadPiece(scales_, slot, BlocksIn(first), BlocksIn(count), packed_scales_);
      ForEachBlock(count, [this](float* values, const std::byte* codes, const std::byte* scale) {
        codec_.dequantize(codes, scale, values);
      });
      WriteValues(row, first, count);
    });
  }

 private:
  static constexpr int64_t kMostValues = 2048;  // Whole blocks of every format.

  int64_t BlocksIn(int64_t values) const { return values / codec_.info.block_values; }
  int64_t CodesIn(int64_t values) const { return codec_.info.CodesIn(values); }
  bool RowsAreFloats() const { return rows_.dtype == DType::kFloat32 && rows_.scale == 1; }

  void ReadValues(int64_t row, int64_t first, int64_t count) {
    auto* to = reinterpret_cast<std::byte*>(values_);
    if (RowsAreFloats()) return ReadPiece(rows_, row, first, count, to);
    ForEachPiece(rows_, row, first, count, [&](const std::byte* from, int64_t values) {
      to_float_(from, to, values, rows_.scale, 1);
      to += values * static_cast<int64_t>(sizeof(float));
    });
  }
  void WriteValues(int64_t row, int64_t first, int64_t count) {
    const auto* from = reinterpret_cast<const std::byte*>(values_);
    if (RowsAreFloats()) return WritePiece(rows_, row, first, count, from);
    ForEachPiece(rows_, row, first, count, [&](std::byte* to, int64_t values) {
      from_float_(from, to, values, 1, rows_.scale);
      from += values * static_cast<int64_t>(sizeof(float));
    });
  }

  // Calls visit(first, count) for each part of a row.
  template <typename Visit>
  void ForEachPart(const Visit& visit) {
    const int64_t values = rows_.num_heads * rows_.head_dim;
    for (int64_t first = 0; first < values; first += kMostValues) {
      visit(first, std::min(kMostValues, values - first));
    }
  }

  template <typename Visit>
  void ForEachBlock(int64_t values, const Visit& visit) {
    const BlockFormatInfo& info = codec_.info;
    for (int64_t block = 0; block < BlocksIn(values); ++block) {
      visit(values_ + block * info.block_values,
            packed_codes_ + block * info.block_values * info.codes_bits / 8,
            packed_scales_ + block * DTypeBytes(info.scales_dtype));
    }
  }

  const Codec codec_;
  const TokenView rows_, codes_, scales_;
  const CastFn to_float_, from_float_;
  float values_[kMostValues];
  std::byte packed_codes_[kMostValues];
  std::byte packed_scales_[kMostValues / 16];  // A byte for 16 values, four for 128.
};

absl::Status CheckRows(const TokenView& rows, std::span<const int32_t> slots) {
  if (rows.num_slots == static_cast<int64_t>(slots.size())) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("block quantisation: ", rows.num_slots, " rows but ", slots.size(), " slots"));
}

}  // namespace

BlockFormatInfo InfoOf(BlockFormat format) { return CodecOf(format).info; }

absl::StatusOr<std::vector<KvTensor>> QuantizedTensors(BlockFormat format, absl::string_view name,
                                                       int64_t num_heads, int64_t head_dim) {
  const BlockFormatInfo info = InfoOf(format);
  if (num_heads > KvLayout::kMaxHeads || head_dim > KvLayout::kMaxHeadDim) {
    return absl::InvalidArgumentError(
        absl::StrCat("block quantisation: ", num_heads, " heads x ", head_dim, " are too many"));
  }
  KVFERRY_RETURN_IF_ERROR(CheckRow(info, num_heads, head_dim));
  const int64_t codes = info.CodesIn(head_dim);
  return std::vector<KvTensor>{{std::string(name), num_heads, codes, info.codes_dtype},
                               {absl::StrCat(name, "_scale"), 1,
                                num_heads * head_dim / info.block_values, info.scales_dtype}};
}

absl::Status QuantizedCopy::Check() const {
  KVFERRY_RETURN_IF_ERROR(CheckRows(rows_, slots_));
  const BlockFormatInfo info = InfoOf(format_);
  const int64_t values = rows_.num_heads * rows_.head_dim;
  KVFERRY_RETURN_IF_ERROR(CheckRow(info, rows_.num_heads, rows_.head_dim));
  KVFERRY_RETURN_IF_ERROR(CheckTensor("codes", codes_, rows_.num_heads,
                                      info.CodesIn(rows_.head_dim), info.codes_dtype));
  KVFERRY_RETURN_IF_ERROR(
      CheckTensor("scales", scales_, 1, values / info.block_values, info.scales_dtype));
  if (CastBetween(rows_.dtype, DType::kFloat32) == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("block quantisation: rows of ", DTypeName(rows_.dtype), " hold no numbers"));
  }
  // Only for their checks of scales and lists.
  KVFERRY_RETURN_IF_ERROR(CheckRowsFit(rows_, Like(rows_, slots_, nullptr, DType::kFloat32)));
  for (const TokenView& view : {codes_, scales_}) {
    KVFERRY_RETURN_IF_ERROR(
        TokenCopy::PlanGather(view, slots_, Like(view, slots_, nullptr, view.dtype)).status());
  }
  return absl::OkStatus();
}

absl::StatusOr<QuantizedCopy> QuantizedCopy::PlanStore(BlockFormat format, const TokenView& rows,
                                                       const TokenView& codes,
                                                       const TokenView& scales,
                                                       std::span<const int32_t> slots) {
  const QuantizedCopy copy(format, /*stores=*/true, rows, codes, scales, slots);
  KVFERRY_RETURN_IF_ERROR(copy.Check());
  return copy;
}

absl::StatusOr<QuantizedCopy> QuantizedCopy::PlanLoad(BlockFormat format, const TokenView& codes,
                                                      const TokenView& scales,
                                                      std::span<const int32_t> slots,
                                                      const TokenView& rows) {
  const QuantizedCopy copy(format, /*stores=*/false, rows, codes, scales, slots);
  KVFERRY_RETURN_IF_ERROR(copy.Check());
  return copy;
}

void QuantizedCopy::Run(ThreadPool* threads) const {
  const auto rows = static_cast<int64_t>(slots_.size());
  const int64_t parts = rows * rows_.num_heads * rows_.head_dim / kValuesPerPart;
  if (threads == nullptr || parts < 2) return RunPart(0, rows);
  threads->ParallelFor(
      parts, [&](int64_t part) { RunPart(rows * part / parts, rows * (part + 1) / parts); });
}

void QuantizedCopy::RunPart(int64_t begin, int64_t end) const {
  Blocks blocks(CodecOf(format_), rows_, codes_, scales_);
  for (int64_t row = begin; row < end; ++row) {
    if (stores_) {
      blocks.Store(row, slots_[row]);
    } else {
      blocks.Load(row, slots_[row]);
    }
  }
}

absl::Status StoreQuantized(BlockFormat format, const TokenView& rows, const TokenView& codes,
                            const TokenView& scales, std::span<const int32_t> slots,
                            const PoolMemory& memory, ThreadPool* threads) {
  KVFERRY_ASSIGN_OR_RETURN(const QuantizedCopy copy,
                           QuantizedCopy::PlanStore(format, rows, codes, scales, slots));
  return memory.RunQuantized({&copy, 1}, threads);
}

absl::Status LoadQuantized(BlockFormat format, const TokenView& codes, const TokenView& scales,
                           std::span<const int32_t> slots, const TokenView& rows,
                           const PoolMemory& memory, ThreadPool* threads) {
  KVFERRY_ASSIGN_OR_RETURN(const QuantizedCopy copy,
                           QuantizedCopy::PlanLoad(format, codes, scales, slots, rows));
  return memory.RunQuantized({&copy, 1}, threads);
}

}  // namespace kvferry
