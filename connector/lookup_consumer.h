#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/config.h"
#include "connector/lookup_buffer.h"
#include "connector/lookup_handle.h"
#include "pool/kv_pool.h"

namespace kvferry {

class LookupQueries;

// The consuming side of a lookup buffer: finds entries of LookupProducers by their tokens and moves
// them into its own pool. An entry goes to one consumer. Any number of lookups are under way at
// once, and none waits for another. Thread-safe; no method blocks but Close() and the destructor,
// for a bounded time.
class LookupConsumer {
 public:
  struct Options {
    Config config;
    std::string model;  // Producers must name the same.
    std::string name;   // For their logs.
    std::shared_ptr<const KvPool> pool;
    std::vector<std::string> producers;  // Addresses; they need not be up yet.
    int64_t partition = 0;
  };

  // INVALID_ARGUMENT for a bad option or no producer; PERMISSION_DENIED for one whose host is not
  // in config.allowed_hosts.
  static absl::StatusOr<std::unique_ptr<LookupConsumer>> Create(const Options& options);
  ~LookupConsumer() { Close(); }

  // Ends all lookups with CANCELLED: from then on no page is written. Called on several threads, it
  // returns on each of them when that is done.
  void Close();

  struct Request {
    // None: any entry, the oldest first. Else the entry with the longest match with tokens[roi].
    std::optional<std::vector<int32_t>> tokens;
    std::optional<std::vector<bool>> roi;
    // Where the KV goes: as many of these as the matching tokens fill, in order; all of the entry
    // where there is no query. Too few: RESOURCE_EXHAUSTED naming both numbers, and the entry can
    // be found again.
    std::vector<int64_t> pages;
    // Called instead where it is set, when it is known how many pages are needed; on the progress
    // thread: it must not block. Its error ends the lookup, and the entry can be found again.
    // Called again if that entry has gone to another consumer after all and the next one is found:
    // then the pages that it gave before are its own again.
    std::function<absl::StatusOr<std::vector<int64_t>>(int64_t num_pages)> allocate;
    Deadline deadline;
    // Called once, when the handle is done(): on the progress thread, or on one that cancels or
    // closes. Must not block or throw, or close or destroy the consumer.
    std::function<void()> on_done;
  };

  // Asks all producers at once; the first that finds an entry serves it. How the handle ends:
  //
  //   OK                    every byte is in the pages, and the entry is gone from its producer
  //   DEADLINE_EXCEEDED     no matching entry came in time; the message says what kept producers
  //                         from answering. One that is not up or has restarted is asked again
  //                         until then.
  //   FAILED_PRECONDITION, INVALID_ARGUMENT, PERMISSION_DENIED, UNIMPLEMENTED
  //                         all producers refuse for good, as for another model or partition
  //   UNAVAILABLE, ...      the fetch of a found entry failed, as when its producer died
  //
  // Every byte may be here and the lookup fail nevertheless: when its producer does not say in time
  // that the entry is not somebody else's. No entry is ever delivered to two. For this answer a
  // lookup waits until its deadline, and for 2 s from the last byte at least: it ends so long after
  // its deadline at the latest.
  //
  // Errors here mean that nothing was started: INVALID_ARGUMENT for tokens as SelectTokens() says,
  // a roi without tokens or a deadline more than config.max_fetch_timeout_ms away; OUT_OF_RANGE for
  // a page that is not in the pool; RESOURCE_EXHAUSTED for too many lookups at once; CANCELLED once
  // the consumer is closed or closing.
  absl::StatusOr<std::shared_ptr<LookupHandle>> DropSelect(Request request);

  // Of the node; empty once it is closed or closing.
  std::vector<std::pair<std::string, int64_t>> Metrics() const;

 private:
  explicit LookupConsumer(std::shared_ptr<LookupQueries> queries) : queries_(std::move(queries)) {}

  const std::shared_ptr<LookupQueries> queries_;
};

}  // namespace kvferry
