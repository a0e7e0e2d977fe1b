#include "connector/store/kv_store.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "connector/store/staged_pages.h"

namespace kvferry {
namespace {

template <typename Parts>
int64_t Sum(Parts parts) {
  int64_t bytes = 0;
  for (const auto& part : parts) bytes += static_cast<int64_t>(part.size());
  return bytes;
}

}  // namespace

std::vector<absl::Status> KvStore::PutBatch(std::span<const PutItem> items, Deadline deadline) {
  std::vector<absl::Status> statuses;
  statuses.reserve(items.size());
  for (const PutItem& item : items) statuses.push_back(Put(item.key, item.value, deadline));
  return statuses;
}

std::vector<absl::Status> KvStore::GetBatch(std::span<const GetItem> items, Deadline deadline) {
  std::vector<absl::Status> statuses;
  statuses.reserve(items.size());
  for (const GetItem& item : items) statuses.push_back(Get(item.key, item.out, deadline));
  return statuses;
}

namespace {

absl::Status CheckPages(std::span<const std::string_view> keys, const KvPool& pool,
                        std::span<const int64_t> pages) {
  if (keys.size() != pages.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("store: ", keys.size(), " keys for ", pages.size(), " pages"));
  }
  for (const int64_t page : pages) {
    if (page >= 0 && page < pool.num_pages()) continue;
    return absl::OutOfRangeError(
        absl::StrCat("store: page ", page, " of a pool of ", pool.num_pages()));
  }
  return absl::OkStatus();
}

// The items of pages, those of one page side by side.
std::vector<std::span<std::byte>> ItemsOf(const KvPool& pool, std::span<const int64_t> pages) {
  const KvLayout& layout = pool.layout();
  std::vector<std::span<std::byte>> items;
  items.reserve(pages.size() * layout.num_buffers());
  for (const int64_t page : pages) {
    for (int64_t layer = 0; layer < layout.num_layers; ++layer) {
      for (int64_t tensor = 0; tensor < layout.num_tensors(); ++tensor) {
        items.push_back(pool.page(layer, tensor, page));
      }
    }
  }
  return items;
}

// What is to be put, or got, under each key: the next of as many parts for each.
template <typename Item, typename Part>
std::vector<Item> ItemPerKey(std::span<const std::string_view> keys, std::span<const Part> parts) {
  std::vector<Item> items;
  items.reserve(keys.size());
  const size_t per_key = keys.empty() ? 0 : parts.size() / keys.size();
  for (size_t i = 0; i < keys.size(); ++i) {
    items.push_back({keys[i], parts.subspan(i * per_key, per_key)});
  }
  return items;
}

// Calls move(keys, staged) for some pages at a time, and returns its statuses of all.
template <typename Move>
std::vector<absl::Status> Staged(std::span<const std::string_view> keys, const KvPool& pool,
                                 std::span<const int64_t> pages, const Move& move) {
  std::vector<absl::Status> statuses;
  statuses.reserve(keys.size());
  const size_t most = StagedPages::AtATime(pool);
  for (size_t first = 0; first < keys.size(); first += most) {
    const size_t count = std::min(most, keys.size() - first);
    StagedPages staged(pool, pages.subspan(first, count));
    for (absl::Status& status : move(keys.subspan(first, count), staged)) {
      statuses.push_back(std::move(status));
    }
  }
  return statuses;
}

}  // namespace

std::vector<absl::Status> KvStore::PutPages(std::span<const std::string_view> keys,
                                            const KvPool& pool, std::span<const int64_t> pages,
                                            Deadline deadline) {
  const absl::Status valid = CheckPages(keys, pool, pages);
  if (!valid.ok()) return std::vector<absl::Status>(keys.size(), valid);
  return DoPutPages(keys, pool, pages, deadline);
}

std::vector<absl::Status> KvStore::GetPages(std::span<const std::string_view> keys,
                                            const KvPool& pool, std::span<const int64_t> pages,
                                            Deadline deadline) {
  const absl::Status valid = CheckPages(keys, pool, pages);
  if (!valid.ok()) return std::vector<absl::Status>(keys.size(), valid);
  return DoGetPages(keys, pool, pages, deadline);
}

std::vector<absl::Status> KvStore::DoPutPages(std::span<const std::string_view> keys,
                                              const KvPool& pool, std::span<const int64_t> pages,
                                              Deadline deadline) {
  const auto put = [&](std::span<const std::string_view> some,
                       const std::vector<std::span<std::byte>>& items) {
    const std::vector<std::span<const std::byte>> parts(items.begin(), items.end());
    return PutBatch(ItemPerKey<PutItem>(some, ConstParts(parts)), deadline);
  };
  if (pool.memory().on_host()) return put(keys, ItemsOf(pool, pages));
  return Staged(keys, pool, pages, [&](const auto& some, StagedPages& staged) {
    const absl::Status copied = staged.FromPool();
    if (!copied.ok()) return std::vector<absl::Status>(some.size(), copied);
    return put(some, staged.Items());
  });
}

std::vector<absl::Status> KvStore::DoGetPages(std::span<const std::string_view> keys,
                                              const KvPool& pool, std::span<const int64_t> pages,
                                              Deadline deadline) {
  const auto get = [&](std::span<const std::string_view> some,
                       const std::vector<std::span<std::byte>>& items) {
    return GetBatch(ItemPerKey<GetItem>(some, Parts(items)), deadline);
  };
  if (pool.memory().on_host()) return get(keys, ItemsOf(pool, pages));
  return Staged(keys, pool, pages, [&](const auto& some, StagedPages& staged) {
    std::vector<absl::Status> statuses = get(some, staged.Items());
    const absl::Status copied = staged.ToPool(statuses);
    for (absl::Status& status : statuses) status.Update(copied);
    return statuses;
  });
}

absl::Status CheckKey(std::string_view key) {
  if (!key.empty() && static_cast<int64_t>(key.size()) <= KvStore::kMaxKeyBytes) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "store: a key of ", key.size(), " bytes; it must have 1 to ", KvStore::kMaxKeyBytes));
}

absl::Status CheckValueBytes(int64_t bytes, int64_t max_value_bytes) {
  if (bytes >= 1 && bytes <= max_value_bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("store: a value of ", bytes, " bytes; it must have 1 to ", max_value_bytes));
}

int64_t BytesOf(KvStore::ConstParts parts) { return Sum(parts); }
int64_t BytesOf(KvStore::Parts parts) { return Sum(parts); }

}  // namespace kvferry
