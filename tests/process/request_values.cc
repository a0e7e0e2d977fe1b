#include "tests/process/request_values.h"

#include <cstring>
#include <deque>

#include "tests/pool/naive_numbers.h"
#include "tests/support/kv_pattern.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

// Of a dtype of `bytes`, as it lies in memory.
uint32_t CodeOf(std::span<const std::byte> stored) {
  uint32_t code = 0;
  std::memcpy(&code, stored.data(), stored.size());
  return code;
}

// The one whose value that is; +0 for 0.
uint32_t Encoded(DType dtype, float value) {
  uint32_t code = 0;
  if (dtype == DType::kFloat32) {
    std::memcpy(&code, &value, sizeof value);
    return code;
  }
  const NaiveFormat& format = NaiveFormat::Of(dtype);
  while (code < format.num_codes() && format.Decode(code) != value) ++code;
  EXPECT_LT(code, format.num_codes()) << DTypeName(dtype) << " does not have " << value;
  return code;
}

}  // namespace

RequestValues::RequestValues(std::shared_ptr<KvPool> pool, float scale) : pool_(std::move(pool)) {
  const DType dtype = pool_->layout().dtype;
  for (int value = -kLargest; value <= kLargest; ++value) {
    const uint32_t code = Encoded(dtype, static_cast<float>(value) / scale);
    std::vector<std::byte> stored(static_cast<size_t>(DTypeBytes(dtype)));
    std::memcpy(stored.data(), &code, stored.size());
    stored_.push_back(stored);
    values_[code] = value;
  }
}

int RequestValues::ValueAt(std::span<const std::byte> page, int64_t at) const {
  const auto bytes = static_cast<int64_t>(stored_[0].size());
  const auto found = values_.find(CodeOf(page.subspan(at * bytes, bytes)));
  return found == values_.end() ? kLargest + 1 : found->second;
}

template <typename Fn>
void RequestValues::ForEachRow(uint64_t seed, int64_t buffer, int64_t page, const Fn& fn) const {
  const KvLayout& layout = pool_->layout();
  const int64_t heads = layout.num_heads(), dim = layout.tensors[0].head_dim;
  std::vector<std::byte> random(static_cast<size_t>(heads * dim));
  std::vector<int> row(static_cast<size_t>(dim));
  for (int64_t token = 0; token < layout.page_size; ++token) {
    PatternBytes(seed, buffer, page * layout.page_size + token, random);
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t i = 0; i < dim; ++i) {
        row[i] = static_cast<int>(random[head * dim + i]) % (2 * kLargest + 1) - kLargest;
      }
      const int64_t first =
          layout.page_format == "HND" ? head * layout.page_size + token : token * heads + head;
      fn(token, head, first * dim, row);
    }
  }
}

void RequestValues::Write(uint64_t seed, int64_t first_layer, int64_t end_layer,
                          const std::vector<int64_t>& pages) const {
  const KvLayout& layout = pool_->layout();
  const auto bytes = static_cast<int64_t>(stored_[0].size());
  std::deque<std::vector<std::byte>> written;
  std::vector<BytesMove> moves;
  for (int64_t buffer = 0; buffer < layout.num_buffers(); ++buffer) {
    const int64_t layer = buffer % layout.num_layers;
    if (layer < first_layer || layer >= end_layer) continue;
    const BufferInfo& info = pool_->buffer_infos()[buffer];
    for (size_t i = 0; i < pages.size(); ++i) {
      std::vector<std::byte>& page = written.emplace_back(static_cast<size_t>(info.item_bytes));
      ForEachRow(seed, buffer, static_cast<int64_t>(i),
                 [&](int64_t, int64_t, int64_t first, const std::vector<int>& row) {
                   for (size_t at = 0; at < row.size(); ++at) {
                     const std::vector<std::byte>& stored = stored_[row[at] + kLargest];
                     std::memcpy(&page[(first + static_cast<int64_t>(at)) * bytes], stored.data(),
                                 stored.size());
                   }
                 });
      moves.push_back({page.data(), info.address + pages[i] * info.item_bytes, info.item_bytes});
    }
  }
  EXPECT_TRUE(IsOk(pool_->memory().MoveApart(moves)));
}

testing::AssertionResult RequestValues::Holds(uint64_t seed, int64_t first_page, int64_t end_layer,
                                              const std::vector<int64_t>& pages, int64_t tokens,
                                              HeadRange heads) const {
  const KvLayout& layout = pool_->layout();
  auto result = testing::AssertionSuccess();
  for (int64_t buffer = 0; buffer < layout.num_buffers() && result; ++buffer) {
    if (buffer % layout.num_layers >= end_layer) continue;
    for (size_t i = 0; i < pages.size() && result; ++i) {
      const int64_t of_page = first_page + static_cast<int64_t>(i);
      const std::vector<std::byte> page = ReadPage(*pool_, buffer, pages[i]);
      ForEachRow(seed, buffer, of_page,
                 [&](int64_t token, int64_t head, int64_t first, const std::vector<int>& row) {
                   if (!result || of_page * layout.page_size + token >= tokens) return;
                   if (head < heads.first || head >= heads.first + heads.count) return;
                   for (size_t at = 0; at < row.size() && result; ++at) {
                     if (ValueAt(page, first + static_cast<int64_t>(at)) == row[at]) continue;
                     result = testing::AssertionFailure()
                              << "buffer " << buffer << " page " << pages[i] << " (the request's "
                              << of_page << ", seed " << seed << ") differs at token " << token
                              << " head " << head << " value " << at;
                   }
                 });
    }
  }
  return result;
}

}  // namespace kvferry
