#include "transport/fetch_handle.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace kvferry {

FetchHandle::FetchHandle(std::shared_ptr<const PageRuns> pages, int64_t num_layers,
                         int64_t total_bytes, std::function<void()> cancel,
                         std::function<void()> on_done)
    : Ending("the fetch"),
      num_layers_(num_layers),
      cancel_(std::move(cancel)),
      on_done_(std::move(on_done)),
      pages_(std::move(pages)) {
  report_.total_bytes = total_bytes;
}

int64_t FetchHandle::layers_done() const {
  MutexLock lock(&mutex_);
  return layers_done_;
}

absl::Status FetchHandle::WaitLayer(int64_t layer, Deadline deadline) const {
  if (layer < 0 || layer >= num_layers_) {
    return absl::OutOfRangeError(absl::StrCat("layer ", layer, " of ", num_layers_));
  }
  MutexLock lock(&mutex_);
  while (layers_done_ <= layer) {
    if (done_) return status_;
    if (!layer_arrived_.WaitUntil(&mutex_, deadline) && layers_done_ <= layer && !done_) {
      return too_early_;
    }
  }
  return absl::OkStatus();
}

std::vector<int64_t> FetchHandle::missing_pages() const {
  MutexLock lock(&mutex_);
  return done_ ? missing_pages_ : pages_->ToPages();
}

FetchReport FetchHandle::report() const {
  MutexLock lock(&mutex_);
  return report_;
}

void FetchHandle::Cancel() {
  if (!done()) cancel_();
}

void FetchHandle::SetLayersDone(int64_t layers) {
  MutexLock lock(&mutex_);
  layers_done_ = layers;
  layer_arrived_.NotifyAll();
}

void FetchHandle::Finish(const absl::Status& status, std::vector<int64_t> missing_pages,
                         const FetchReport& report) {
  std::shared_ptr<const PageRuns> pages;  // The last to hold the pool, perhaps: not under the lock.
  {
    MutexLock lock(&mutex_);
    if (status.ok()) layers_done_ = num_layers_;
    pages = std::move(pages_);
    missing_pages_ = std::move(missing_pages);
    report_ = report;
    End(status);
    layer_arrived_.NotifyAll();
  }
  // Let go of afterwards: it may hold whoever holds this.
  if (const auto on_done = std::exchange(on_done_, nullptr)) on_done();
}

}  // namespace kvferry
