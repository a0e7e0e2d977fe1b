#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/ending.h"
#include "pool/page_runs.h"

namespace kvferry {

// What happened to a fetch, for logs and metrics.
struct FetchReport {
  int64_t total_bytes = 0;
  int64_t bytes_done = 0;   // Scattered into local pages.
  double wait_seconds = 0;  // From Fetch() to the request leaving: hello and queueing.
  double move_seconds = 0;  // From there to the end.
};

// One fetch under way. Made by Node::Fetch; all methods are thread-safe.
//
// Until done() the local pages belong to the transfer: bytes may appear in them at any time. From
// done() on, whatever the status (OK: every byte is there), nothing will ever write to them again.
class FetchHandle : public Ending {
 public:
  // Layers [0, layers_done()) are complete in the local pages.
  int64_t layers_done() const;
  // Waits until layer `layer` is complete: OK; or the fetch failed: its status; or
  // DEADLINE_EXCEEDED. Needs no memory, either.
  absl::Status WaitLayer(int64_t layer, Deadline deadline) const;

  // Local page ids with at least one byte missing, in the order of the fetch; empty after success,
  // all of them while under way.
  std::vector<int64_t> missing_pages() const;
  FetchReport report() const;

  // Asks for the end; done() follows shortly, with CANCELLED unless the fetch ended before.
  void Cancel();

  // For the transport: the one that moves the data. `pages` are let go of at the end.
  FetchHandle(std::shared_ptr<const PageRuns> pages, int64_t num_layers, int64_t total_bytes,
              std::function<void()> cancel, std::function<void()> on_done = nullptr);
  void SetLayersDone(int64_t layers);
  void Finish(const absl::Status& status, std::vector<int64_t> missing_pages,
              const FetchReport& report);

 private:
  const int64_t num_layers_;
  const std::function<void()> cancel_;
  std::function<void()> on_done_;  // Finish() alone touches it.

  // Apart, so that who waits for the end is not woken for each layer: where cores are few, it would
  // take the one that moves the data.
  mutable CondVar layer_arrived_;
  int64_t layers_done_ ABSL_GUARDED_BY(mutex_) = 0;
  std::shared_ptr<const PageRuns> pages_ ABSL_GUARDED_BY(mutex_);  // Null once done.
  std::vector<int64_t> missing_pages_ ABSL_GUARDED_BY(mutex_);     // Once done.
  FetchReport report_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvferry
