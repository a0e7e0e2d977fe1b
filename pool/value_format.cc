#include "pool/value_format.h"

#include <algorithm>
#include <array>
#include <deque>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "pool/casts.h"
#include "pool/page_cut.h"
#include "pool/token_copy.h"
#include "pool/token_view.h"

namespace kvferry {
namespace {

constexpr size_t kMaxValueBytes = 4;

float ScaleOf(std::span<const float> scales, int64_t buffer) {
  return scales.empty() ? 1 : scales[buffer];
}

absl::Status CheckCast(const KvTensor& tensor, DType from, DType to) {
  if (from == to || CastBetween(from, to) != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("values of '", tensor.name,
                                                 "' are not cast between ", DTypeName(from),
                                                 " and ", DTypeName(to)));
}

constexpr absl::string_view kNotCast =
    ", which may be another one for another dtype: only values in pages of NHD and HND are cast";

}  // namespace

absl::Status CheckScales(const KvLayout& layout, std::span<const float> scales) {
  if (scales.empty()) return absl::OkStatus();
  if (static_cast<int64_t>(scales.size()) != layout.num_buffers()) {
    return absl::InvalidArgumentError(absl::StrCat(
        scales.size(), " scales, not one for each of ", layout.num_buffers(), " buffers (",
        layout.num_layers, " layers x ", layout.num_tensors(), " tensors)"));
  }
  const auto bad = std::find_if_not(scales.begin(), scales.end(), &IsScale);
  if (bad == scales.end()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the scale of buffer ", bad - scales.begin(),
                                                 " is ", *bad, " but must be finite and above 0"));
}

ValueFormat ValueFormatOf(const KvLayout& layout, std::span<const float> scales) {
  ValueFormat format;
  for (const KvTensor& tensor : layout.tensors) format.dtypes.push_back(layout.dtype_of(tensor));
  const bool ones = std::all_of(scales.begin(), scales.end(), [](float it) { return it == 1; });
  if (!ones) format.scales.assign(scales.begin(), scales.end());
  return format;
}

bool SameDTypes(const KvLayout& one, const KvLayout& other) {
  return std::equal(one.tensors.begin(), one.tensors.end(), other.tensors.begin(),
                    other.tensors.end(), [&](const KvTensor& mine, const KvTensor& theirs) {
                      return one.dtype_of(mine) == other.dtype_of(theirs);
                    });
}

absl::Status CheckCastable(const KvLayout& one, const KvLayout& other) {
  if (SameDTypes(one, other) || one.num_tensors() != other.num_tensors()) return absl::OkStatus();
  KVFERRY_RETURN_IF_ERROR(CheckOrderIsKnown(one, kNotCast));
  KVFERRY_RETURN_IF_ERROR(CheckOrderIsKnown(other, kNotCast));
  for (int64_t i = 0; i < one.num_tensors(); ++i) {
    KVFERRY_RETURN_IF_ERROR(
        CheckCast(one.tensors[i], one.dtype_of(one.tensors[i]), other.dtype_of(other.tensors[i])));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const ValueCasts>> ValueCasts::Make(const KvLayout& layout,
                                                                   const ValueFormat& own,
                                                                   const ValueFormat& wanted) {
  if (wanted.dtypes.empty() || wanted == own) return nullptr;
  if (static_cast<int64_t>(wanted.dtypes.size()) != layout.num_tensors()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "dtypes of ", wanted.dtypes.size(), " tensors asked of pages of ", layout.num_tensors()));
  }
  KVFERRY_RETURN_IF_ERROR(CheckScales(layout, wanted.scales));
  std::vector<Cast> casts;
  bool any = false;
  for (int64_t tensor = 0; tensor < layout.num_tensors(); ++tensor) {
    const DType from = layout.dtype_of(layout.tensors[tensor]), to = wanted.dtypes[tensor];
    KVFERRY_RETURN_IF_ERROR(CheckCast(layout.tensors[tensor], from, to));
    const bool numbers = CastBetween(from, to) != nullptr;
    for (int64_t layer = 0; layer < layout.num_layers; ++layer) {
      const int64_t buffer = layout.buffer_index(layer, tensor);
      const Cast cast{from, to, numbers ? ScaleOf(own.scales, buffer) : 1,
                      numbers ? ScaleOf(wanted.scales, buffer) : 1};
      any |= cast.from != cast.to || cast.from_scale != cast.to_scale;
      casts.push_back(cast);
    }
  }
  if (!any) return nullptr;
  KVFERRY_RETURN_IF_ERROR(CheckOrderIsKnown(layout, kNotCast));
  return std::shared_ptr<const ValueCasts>(new ValueCasts(std::move(casts)));
}

int64_t ValueCasts::Bytes(int64_t buffer, int64_t own_bytes) const {
  const Cast& cast = casts_[buffer];
  return own_bytes / DTypeBytes(cast.from) * DTypeBytes(cast.to);
}

// Copies of token rows, each of them an item or a part of one, whatever is one there.
class ValueCasts::Copies {
 public:
  explicit Copies(const PageRuns& items) : items_(items) {}

  absl::Status Add(const Cast& cast, const Window& window) {
    const int64_t value_bytes = DTypeBytes(cast.to);
    int64_t offset = window.offset;
    std::span<std::byte> packed = window.packed;
    while (!packed.empty()) {
      const int64_t skip = offset % value_bytes;
      const auto left = static_cast<int64_t>(packed.size());
      const bool whole = skip == 0 && left >= value_bytes;
      const int64_t take =
          whole ? left / value_bytes * value_bytes : std::min(left, value_bytes - skip);
      std::span<std::byte> to = packed.first(take);
      if (!whole) {
        Split& split = splits_.emplace_back(Split{{}, skip, to});
        to = std::span(split.value).first(value_bytes);
      }
      KVFERRY_RETURN_IF_ERROR(AddValues(cast, window.from, offset / value_bytes, to));
      offset += take;
      packed = packed.subspan(take);
    }
    return absl::OkStatus();
  }
  absl::Status Run(const PoolMemory& memory, const PoolMemory& to) const {
    KVFERRY_RETURN_IF_ERROR(memory.RunApart(copies_));
    if (splits_.empty()) return absl::OkStatus();
    std::vector<BytesMove> moves;
    for (const Split& split : splits_) {
      moves.push_back({split.value.data() + split.skip, split.to.data(),
                       static_cast<int64_t>(split.to.size())});
    }
    return to.MoveApart(moves);
  }

 private:
  // A value of which only some bytes are asked for.
  struct Split {
    std::array<std::byte, kMaxValueBytes> value;
    int64_t skip;
    std::span<std::byte> to;
  };

  // Values from number `first` of the items laid end to end.
  absl::Status AddValues(const Cast& cast, const BufferInfo& buffer, int64_t first,
                         std::span<std::byte> to) {
    const int64_t of_item = buffer.item_bytes / DTypeBytes(cast.from);
    int64_t left = static_cast<int64_t>(to.size()) / DTypeBytes(cast.to);
    while (left > 0) {
      const int64_t into = first % of_item;
      const bool whole = into == 0 && left >= of_item;
      const int64_t rows = whole ? left / of_item : 1;
      const int64_t values = whole ? of_item : std::min(left, of_item - into);
      KVFERRY_RETURN_IF_ERROR(AddRows(cast, buffer, first / of_item, rows, into, values, to));
      to = to.subspan(rows * values * DTypeBytes(cast.to));
      first += rows * values;
      left -= rows * values;
    }
    return absl::OkStatus();
  }
  // Of so many items from that position on, the values [into, into + values) of each.
  absl::Status AddRows(const Cast& cast, const BufferInfo& buffer, int64_t position, int64_t rows,
                       int64_t into, int64_t values, std::span<std::byte> to) {
    const int64_t of_item = buffer.item_bytes / DTypeBytes(cast.from);
    TokenView from =
        TokenView::Packed(buffer.address, cast.from, buffer.bytes / buffer.item_bytes, 1, of_item)
            .Slice(into, values);
    from.scale = cast.from_scale;
    TokenView target = TokenView::Packed(to.data(), cast.to, rows, 1, values);
    target.scale = cast.to_scale;
    std::vector<int32_t>& slots = slots_.emplace_back();
    slots.reserve(rows);
    for (size_t run = items_.RunAt(position); static_cast<int64_t>(slots.size()) < rows; ++run) {
      const int64_t begin = position + static_cast<int64_t>(slots.size()) - items_.RunBegin(run);
      const PageRun items = items_.Run(run);
      const int64_t count =
          std::min(items.count - begin, rows - static_cast<int64_t>(slots.size()));
      for (int64_t i = 0; i < count; ++i) {
        slots.push_back(static_cast<int32_t>(items.first + begin + i));
      }
    }
    KVFERRY_ASSIGN_OR_RETURN(TokenCopy copy, TokenCopy::PlanGather(from, slots, target));
    copies_.push_back(copy);
    return absl::OkStatus();
  }

  const PageRuns& items_;
  std::vector<TokenCopy> copies_;
  // What copies_ refer to: deques leave it where it is.
  std::deque<std::vector<int32_t>> slots_;
  std::deque<Split> splits_;
};

absl::Status ValueCasts::Gather(const PoolMemory& memory, const PageRuns& items,
                                std::span<const Window> windows, const PoolMemory& to) const {
  Copies copies(items);
  for (const Window& window : windows) {
    KVFERRY_RETURN_IF_ERROR(copies.Add(casts_[window.buffer], window));
  }
  return copies.Run(memory, to);
}

}  // namespace kvferry
