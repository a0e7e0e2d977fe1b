#include "pool/block_quant.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "pool/casts.h"
#include "pool/token_copy.h"

namespace kvferry {
namespace {

constexpr int64_t kRowsAtOnce = 64;  // Bounds the memory that a call takes.
constexpr float kMaxFp8 = 448;

// ---------------------------------------------------------------- one block

// e2m1 magnitudes by code.
constexpr std::array<float, 8> kE2M1 = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
// Between code i and i + 1; the middle itself goes to the even one.
constexpr std::array<float, 7> kE2M1Middles = {0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5};

uint8_t EncodeE2M1(float value) {
  const float magnitude = std::fabs(value);
  uint8_t code = 0;
  for (size_t i = 0; i < kE2M1Middles.size(); ++i) {
    const bool above = i % 2 == 0 ? magnitude > kE2M1Middles[i] : magnitude >= kE2M1Middles[i];
    code += above || std::isnan(magnitude) ? 1 : 0;
  }
  return static_cast<uint8_t>(code | (std::signbit(value) ? 8 : 0));
}

float DecodeE2M1(uint8_t code) { return (code & 8) != 0 ? -kE2M1[code & 7] : kE2M1[code & 7]; }

// Of the numbers among them: the largest magnitude, finite.
float LargestMagnitude(const float* values, int64_t count) {
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = std::fabs(values[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  return std::min(largest, std::numeric_limits<float>::max());
}

// The smallest k with largest <= 6 * 2^k, which is 0.75 * 2^(k + 3).
int E8M0Exponent(float largest) {
  if (largest == 0) return -127;
  int exponent = 0;
  const float mantissa = std::frexp(largest, &exponent);
  return std::clamp(mantissa <= 0.75F ? exponent - 3 : exponent - 2, -127, 127);
}

void QuantizeMxfp4(const float* values, std::byte* codes, std::byte* scale) {
  const int exponent = E8M0Exponent(LargestMagnitude(values, 16));
  *scale = static_cast<std::byte>(exponent + 127);
  for (int64_t i = 0; i < 16; i += 2) {
    const uint8_t low = EncodeE2M1(std::ldexp(values[i], -exponent));
    const uint8_t high = EncodeE2M1(std::ldexp(values[i + 1], -exponent));
    codes[i / 2] = static_cast<std::byte>(low | high << 4);
  }
}

void DequantizeMxfp4(const std::byte* codes, const std::byte* scale, float* values) {
  const int exponent = std::to_integer<int>(*scale) - 127;
  for (int64_t i = 0; i < 16; i += 2) {
    const auto pair = std::to_integer<uint8_t>(codes[i / 2]);
    values[i] = std::ldexp(DecodeE2M1(pair & 15), exponent);
    values[i + 1] = std::ldexp(DecodeE2M1(pair >> 4), exponent);
  }
}

void QuantizeFp8(const float* values, std::byte* codes, std::byte* scale_bytes) {
  static const CastFn cast = CastBetween(DType::kFloat32, DType::kFloat8E4M3);
  const float scale = LargestMagnitude(values, 128) / kMaxFp8;
  std::memcpy(scale_bytes, &scale, sizeof scale);
  // All of a block without a scale are zeros, or too small to have one.
  if (scale == 0) {
    std::memset(codes, 0, 128);
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

// Rows of one call, in pieces of kRowsAtOnce: as floats, as codes and as scales, without gaps.
class Pieces {
 public:
  Pieces(const Codec& codec, const TokenView& rows, const TokenView& codes, const TokenView& scales)
      : codec_(codec), rows_(rows), codes_(codes), scales_(scales) {
    order_.resize(static_cast<size_t>(rows.num_slots));
    std::iota(order_.begin(), order_.end(), 0);
    values_.resize(static_cast<size_t>(kRowsAtOnce * rows.num_heads * rows.head_dim));
    packed_codes_.resize(static_cast<size_t>(kRowsAtOnce * codes.row_bytes()));
    packed_scales_.resize(static_cast<size_t>(kRowsAtOnce * scales.row_bytes()));
  }

  absl::Status Check(std::span<const int32_t> slots) const {
    const BlockFormatInfo& info = codec_.info;
    const int64_t values = rows_.num_heads * rows_.head_dim;
    KVFERRY_RETURN_IF_ERROR(CheckRow(info, rows_.num_heads, rows_.head_dim));
    KVFERRY_RETURN_IF_ERROR(CheckTensor(
        "codes", codes_, rows_.num_heads,
        rows_.head_dim * info.codes_bits / 8 / DTypeBytes(info.codes_dtype), info.codes_dtype));
    KVFERRY_RETURN_IF_ERROR(
        CheckTensor("scales", scales_, 1, values / info.block_values, info.scales_dtype));
    if (CastBetween(rows_.dtype, DType::kFloat32) == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("block quantisation: rows of ", DTypeName(rows_.dtype), " hold no numbers"));
    }
    // Only for its checks of the lists.
    KVFERRY_RETURN_IF_ERROR(TokenCopy::PlanGather(codes_, slots, Like(codes_, slots)).status());
    return TokenCopy::PlanGather(scales_, slots, Like(scales_, slots)).status();
  }

  absl::Status Store(std::span<const int32_t> slots) {
    return ForEach(slots, [&](std::span<const int32_t> rows, std::span<const int32_t> to) {
      KVFERRY_RETURN_IF_ERROR(Run(TokenCopy::PlanGather(rows_, rows, Values(to))));
      ForEachBlock(to, codec_.quantize);
      KVFERRY_RETURN_IF_ERROR(Run(TokenCopy::PlanScatter(Codes(to), codes_, to)));
      return Run(TokenCopy::PlanScatter(Scales(to), scales_, to));
    });
  }

  absl::Status Load(std::span<const int32_t> slots) {
    return ForEach(slots, [&](std::span<const int32_t> rows, std::span<const int32_t> from) {
      KVFERRY_RETURN_IF_ERROR(Run(TokenCopy::PlanGather(codes_, from, Codes(from))));
      KVFERRY_RETURN_IF_ERROR(Run(TokenCopy::PlanGather(scales_, from, Scales(from))));
      ForEachBlock(from, [this](float* values, const std::byte* codes, const std::byte* scale) {
        codec_.dequantize(codes, scale, values);
      });
      return Run(TokenCopy::PlanScatter(Values(from), rows_, rows));
    });
  }

 private:
  using Slots = std::span<const int32_t>;

  static absl::Status Run(const absl::StatusOr<TokenCopy>& copy) {
    KVFERRY_RETURN_IF_ERROR(copy);
    copy->Run();
    return absl::OkStatus();
  }
  static TokenView Like(const TokenView& view, Slots slots, std::byte* data = nullptr) {
    return TokenView::Packed(data, view.dtype, static_cast<int64_t>(slots.size()), view.num_heads,
                             view.head_dim);
  }
  TokenView Values(Slots slots) {
    TokenView view = Like(rows_, slots, reinterpret_cast<std::byte*>(values_.data()));
    return TokenView::Packed(view.data, DType::kFloat32, view.num_slots, view.num_heads,
                             view.head_dim);
  }
  TokenView Codes(Slots slots) { return Like(codes_, slots, packed_codes_.data()); }
  TokenView Scales(Slots slots) { return Like(scales_, slots, packed_scales_.data()); }

  // Calls visit(rows, slots) for each piece: positions in rows_, and the slots for them.
  template <typename Visit>
  absl::Status ForEach(Slots slots, const Visit& visit) {
    for (size_t at = 0; at < slots.size(); at += kRowsAtOnce) {
      const size_t count = std::min<size_t>(kRowsAtOnce, slots.size() - at);
      KVFERRY_RETURN_IF_ERROR(visit(Slots(order_).subspan(at, count), slots.subspan(at, count)));
    }
    return absl::OkStatus();
  }

  template <typename Visit>
  void ForEachBlock(Slots slots, const Visit& visit) {
    const BlockFormatInfo& info = codec_.info;
    const int64_t values = static_cast<int64_t>(slots.size()) * rows_.num_heads * rows_.head_dim;
    for (int64_t block = 0; block < values / info.block_values; ++block) {
      visit(values_.data() + block * info.block_values,
            packed_codes_.data() + block * info.block_values * info.codes_bits / 8,
            packed_scales_.data() + block * DTypeBytes(info.scales_dtype));
    }
  }

  const Codec codec_;
  const TokenView rows_, codes_, scales_;
  std::vector<int32_t> order_;  // 0, 1, 2, ...
  std::vector<float> values_;
  std::vector<std::byte> packed_codes_, packed_scales_;
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
  const int64_t codes = head_dim * info.codes_bits / 8 / DTypeBytes(info.codes_dtype);
  return std::vector<KvTensor>{{std::string(name), num_heads, codes, info.codes_dtype},
                               {absl::StrCat(name, "_scale"), 1,
                                num_heads * head_dim / info.block_values, info.scales_dtype}};
}

absl::Status StoreQuantized(BlockFormat format, const TokenView& rows, const TokenView& codes,
                            const TokenView& scales, std::span<const int32_t> slots) {
  KVFERRY_RETURN_IF_ERROR(CheckRows(rows, slots));
  Pieces pieces(CodecOf(format), rows, codes, scales);
  KVFERRY_RETURN_IF_ERROR(pieces.Check(slots));
  return pieces.Store(slots);
}

absl::Status LoadQuantized(BlockFormat format, const TokenView& codes, const TokenView& scales,
                           std::span<const int32_t> slots, const TokenView& rows) {
  KVFERRY_RETURN_IF_ERROR(CheckRows(rows, slots));
  Pieces pieces(CodecOf(format), rows, codes, scales);
  KVFERRY_RETURN_IF_ERROR(pieces.Check(slots));
  return pieces.Load(slots);
}

}  // namespace kvferry
