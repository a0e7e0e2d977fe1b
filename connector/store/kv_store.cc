#include "connector/store/kv_store.h"

#include "absl/strings/str_cat.h"

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
