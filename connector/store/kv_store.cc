#include "connector/store/kv_store.h"

#include <algorithm>
#include <unordered_set>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/interrupt.h"
#include "connector/store/in_pieces.h"
#include "connector/store/staged_pages.h"

namespace kvferry {
namespace {

template <typename Parts>
int64_t Sum(Parts parts) {
  int64_t bytes = 0;
  for (const auto& part : parts) bytes += static_cast<int64_t>(part.size());
  return bytes;
}

// Whether a call of a batch has come to the end of its time, so that the next ones need not be
// made: a thousand that are each late at once are late together.
bool TookAllTime(const absl::Status& status, Deadline deadline) {
  return absl::IsDeadlineExceeded(status) && (Clock::now() >= deadline || Interrupted());
}

}  // namespace

// Of two puts of a key the second one comes after all of the first.
std::vector<absl::Status> KvStore::PutBatch(std::span<const PutItem> items, Deadline deadline) {
  const std::vector<std::string_view> keys = KeysOf(items);
  std::vector<absl::Status> statuses(items.size());
  for (size_t begin = 0, count = 0; begin < items.size(); begin += count) {
    count = CountDistinct(std::span(keys).subspan(begin));
    PutDistinct(items.subspan(begin, count), std::span(statuses).subspan(begin, count), deadline);
  }
  return statuses;
}

// Last to first, as what is put or used last is dropped last.
void KvStore::PutDistinct(std::span<const PutItem> items, std::span<absl::Status> statuses,
                          Deadline deadline) {
  for (size_t i = items.size(); i-- > 0;) {
    const bool is_late = i + 1 < items.size() && TookAllTime(statuses[i + 1], deadline);
    statuses[i] = is_late ? statuses[i + 1] : Put(items[i].key, items[i].value, deadline);
  }
}

// What a deadline cuts off are the last items, without which the first are of use.
std::vector<absl::Status> KvStore::GetBatch(std::span<const GetItem> items, Deadline deadline) {
  std::vector<std::string_view> keys;
  std::vector<absl::Status> statuses;
  for (const GetItem& item : items) {
    keys.push_back(item.key);
    const bool is_late = !statuses.empty() && TookAllTime(statuses.back(), deadline);
    statuses.push_back(is_late ? statuses.back() : Get(item.key, item.out, deadline));
  }
  UseLastToFirst(keys, statuses, deadline);
  return statuses;
}

void KvStore::UseLastToFirst(std::span<const std::string_view> keys,
                             std::span<const absl::Status> got, Deadline deadline) {
  std::vector<std::string_view> there;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (got[i].ok()) there.push_back(keys[i]);
  }
  if (there.size() < 2) return;
  if (absl::IsUnavailable(got.back()) || absl::IsDeadlineExceeded(got.back())) return;
  ExistsEach(there, deadline).IgnoreError();
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
                                 std::span<const int64_t> pages, bool last_first,
                                 const Move& move) {
  return InPieces(keys.size(), StagedPages::AtATime(pool), last_first,
                  [&](size_t first, size_t count) {
                    auto staged = StagedPages::Create(pool, pages.subspan(first, count));
                    if (!staged.ok()) return std::vector(count, staged.status());
                    return move(keys.subspan(first, count), *staged);
                  });
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
  // The first piece is to be the youngest, but of two values of one key the later one stays.
  const bool last_first = CountDistinct(keys) == keys.size();
  return Staged(keys, pool, pages, last_first, [&](const auto& some, StagedPages& staged) {
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
  // First to last, as GetBatch.
  auto got = Staged(keys, pool, pages, false, [&](const auto& some, StagedPages& staged) {
    std::vector<absl::Status> statuses = get(some, staged.Items());
    const absl::Status copied = staged.ToPool(statuses);
    for (absl::Status& status : statuses) status.Update(copied);
    return statuses;
  });
  // Which made those of the last piece the ones that were used last.
  if (keys.size() > StagedPages::AtATime(pool)) UseLastToFirst(keys, got, deadline);
  return got;
}

size_t CountDistinct(std::span<const std::string_view> keys) {
  std::unordered_set<std::string_view> seen;  // Abseil's is broken by a growth without memory.
  const auto again = std::ranges::find_if(
      keys, [&seen](std::string_view key) { return !seen.insert(key).second; });
  return static_cast<size_t>(again - keys.begin());
}

std::vector<std::string_view> KeysOf(std::span<const KvStore::PutItem> items) {
  std::vector<std::string_view> keys;
  keys.reserve(items.size());
  for (const KvStore::PutItem& item : items) keys.push_back(item.key);
  return keys;
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
