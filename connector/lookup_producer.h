#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/close_once.h"
#include "base/config.h"
#include "base/mutex.h"
#include "connector/copy_pages.h"
#include "connector/lookup_buffer.h"
#include "connector/lookup_service.h"
#include "connector/lookup_table.h"
#include "pool/kv_pool.h"
#include "transport/gate.h"
#include "transport/node.h"

namespace kvferry {

// An entry that has left a lookup buffer for good.
struct GoneEntry {
  uint64_t entry = 0;
  bool fetched = false;  // Else the buffer was closed.

  bool operator==(const GoneEntry&) const = default;
};

// The producing side of a lookup buffer: entries of KV by their tokens, kept in this process until
// consumers (lookup_consumer.h) look them up and fetch them. Each is delivered to one of them and
// never to two: one whose consumer dies or gives up on the way is found again, as the newest; it is
// lost if that happens after this side has given it away and before the consumer has heard so.
// Serves any number of consumers. Thread-safe; inserts wait for room up to their deadline.
class LookupProducer {
 public:
  struct Options {
    Config config;      // Listens on its listen_host:listen_port.
    std::string model;  // Consumers must name the same.
    std::string name;   // For their logs.
    std::shared_ptr<const KvPool> pool;
    int64_t max_bytes = 0;  // Of the KV and hidden states of all entries.
    int64_t partition = 0;  // Consumers must name the same: a tensor-parallel rank.
    // In which a consumer that found an entry begins to fetch it, and comes back for it after its
    // session broke. So long an entry is not found by others when its consumer has died.
    int64_t reply_lease_ms = 5000;
    // The last pages of the pool, for InsertTensors. More than max_bytes is worth, so that entries
    // that wait for room have pages too: only those can be found.
    int64_t copy_pages = 0;
  };

  // INVALID_ARGUMENT for a bad option; UNAVAILABLE when the address is taken.
  static absl::StatusOr<std::unique_ptr<LookupProducer>> Create(const Options& options);
  ~LookupProducer() { Close(); }

  // "tcp://host:port" for consumers.
  const std::string& address() const { return address_; }
  // Pages of the pool that are the caller's: [0, n).
  int64_t num_own_pages() const { return options_.pool->num_pages() - options_.copy_pages; }

  // Offers the KV of tokens[roi] (no roi: all), which lies in `pages` in order, with nothing
  // copied. Returns when the entry is kept or taken; from then on the pages must keep their bytes
  // until TakeGone() names the entry. `hidden` travels with it, whatever it is; empty: none.
  //
  // INVALID_ARGUMENT for tokens as SelectTokens() says or another number of pages than they fill,
  // or more than kMaxLookupHiddenBytes;
  // OUT_OF_RANGE for a page outside [0, num_own_pages()); RESOURCE_EXHAUSTED at once for more than
  // max_bytes, or when config.max_leases entries are gone and not taken; DEADLINE_EXCEEDED without
  // room in time; CANCELLED after Close(). The entry is not in the buffer then.
  absl::StatusOr<uint64_t> Insert(std::span<const int32_t> tokens,
                                  const std::optional<std::vector<bool>>& roi,
                                  std::span<const int64_t> pages, Deadline deadline,
                                  std::vector<std::byte> hidden = {});

  // The same with key and value [layers, tokens of roi, heads, dim], which are copied (into
  // copy_pages: it waits for them as for bytes) and the caller's again when this returns. Such
  // entries are not in TakeGone(). INVALID_ARGUMENT also for other sizes, or a layout that
  // KvTensorBytes() refuses.
  absl::Status InsertTensors(std::span<const int32_t> tokens,
                             const std::optional<std::vector<bool>>& roi,
                             std::span<const std::byte> key, std::span<const std::byte> value,
                             Deadline deadline, std::vector<std::byte> hidden = {});

  // Entries that left since the last call, oldest first: their pages are the caller's again. Each
  // is named once.
  std::vector<GoneEntry> TakeGone();

  // Drops all entries, cancels inserts and lookups that wait, and ends transfers, within bounded
  // time. After it no page is read any more. Called on several threads, it returns on each of them
  // when that is done.
  void Close();

  int64_t num_entries() const { return table_->num_entries(); }
  int64_t num_waiting() const { return table_->num_waiting(); }  // Lookups.
  int64_t bytes() const { return table_->bytes(); }
  // Of the node, and "lookup_entries", "lookup_waiting", "lookup_bytes", "lookup_leased".
  std::vector<std::pair<std::string, int64_t>> Metrics() const;

 private:
  // Entries that are gone, shared with those that will be.
  struct Gone {
    Mutex mutex;
    std::vector<GoneEntry> entries ABSL_GUARDED_BY(mutex);
  };

  LookupProducer(const Options& options, std::shared_ptr<LookupTable> table,
                 std::unique_ptr<CopyPages> copies);

  absl::StatusOr<PageRuns> CheckPages(std::span<const int64_t> pages, int64_t num_tokens) const;
  absl::Status CheckGone() const;
  int64_t BytesOf(int64_t num_pages, size_t hidden_bytes) const;
  absl::Status Keep(LookupTable::Tokens tokens, const std::shared_ptr<LookupEntry>& entry,
                    Deadline deadline);

  const Options options_;
  const std::shared_ptr<LookupTable> table_;
  const std::shared_ptr<CopyPages> copies_;
  const std::shared_ptr<Gone> gone_ = std::make_shared<Gone>();
  CloseOnce close_once_;
  LookupService service_;
  std::string address_;
  std::atomic<uint64_t> next_entry_ = 1;

  Gate gate_;  // Inserts are inside.
  mutable Mutex mutex_;
  std::shared_ptr<Node> node_ ABSL_GUARDED_BY(mutex_);  // Its thread uses service_.
};

}  // namespace kvferry
