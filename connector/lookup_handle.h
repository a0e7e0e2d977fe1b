#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/ending.h"

namespace kvferry {

// What a lookup brought.
struct LookupResult {
  std::vector<int32_t> tokens;  // Of the entry.
  // How many of the query's tokens they cover, from the first; all of them for a query without.
  int64_t num_matched = 0;
  // Of the consumer's pool, with the KV of the tokens that match, in order. (After a failure too:
  // what had been chosen by then.)
  std::vector<int64_t> pages;
  // What the entry was inserted with, behind its KV; null: nothing.
  std::shared_ptr<std::byte> hidden;
  int64_t hidden_bytes = 0;
};

// One lookup under way. Made by LookupConsumer::DropSelect; all methods are thread-safe.
//
// Until done() the pages belong to the lookup; from then on nothing writes to them.
class LookupHandle : public Ending {
 public:
  // Empty until done().
  LookupResult result() const;
  // Asks for the end; done() follows shortly, with CANCELLED unless it ended before. An entry that
  // was on its way can be found again. One of which every byte has come is delivered, unless its
  // producer cannot be asked for it: then it can be found again, or, if the producer had given it
  // away already, is lost.
  void Cancel();

  // For the consumer.
  LookupHandle(std::function<void()> cancel, std::function<void()> on_done)
      : Ending("the lookup"), cancel_(std::move(cancel)), on_done_(std::move(on_done)) {}
  void Finish(const absl::Status& status, LookupResult result);

 private:
  const std::function<void()> cancel_;
  std::function<void()> on_done_;  // Finish() alone touches it.
  LookupResult result_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvferry
