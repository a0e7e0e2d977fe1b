#include "connector/copy_pages.h"

#include "absl/strings/str_cat.h"
#include "base/interrupt.h"
#include "base/status.h"

namespace kvferry {

absl::StatusOr<std::unique_ptr<CopyPages>> CopyPages::Create(int64_t num_pages,
                                                             int64_t copy_pages) {
  if (copy_pages < 0 || copy_pages > num_pages) {
    return absl::InvalidArgumentError(absl::StrCat("lookup: copy_pages is ", copy_pages,
                                                   " (tensor_pages in Python) but the pool has ",
                                                   num_pages));
  }
  std::optional<PageAllocator> pages;
  if (copy_pages > 0) {
    KVFERRY_ASSIGN_OR_RETURN(pages, PageAllocator::Create(num_pages, num_pages - copy_pages));
  }
  return std::unique_ptr<CopyPages>(new CopyPages(std::move(pages), copy_pages));
}

absl::Status CopyPages::WaitForTurn(int64_t count, Deadline deadline) {
  const auto place = waiting_.insert(waiting_.end(), count);
  bool is_late = false;
  while (!closed_ && !is_late && (waiting_.begin() != place || pages_->num_free() < count)) {
    is_late = !WaitOrLook(changed_, &mutex_, deadline);
  }
  waiting_.erase(place);
  changed_.NotifyAll();  // The next one may be served now.
  if (closed_) return absl::CancelledError("lookup: the buffer was closed");
  if (!is_late) return absl::OkStatus();
  return absl::DeadlineExceededError(absl::StrCat("lookup: ", count,
                                                  " pages for a copy did not get free in time; ",
                                                  pages_->num_free(), " of ", total_, " are"));
}

absl::StatusOr<PageRuns> CopyPages::Allocate(int64_t count, Deadline deadline) {
  if (count > total_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("lookup: a copy of ", count, " pages can never fit: copy_pages is ", total_,
                     " (tensor_pages in Python); give it more, or use the calls for pages"));
  }
  const MutexLock lock(&mutex_);
  KVFERRY_RETURN_IF_ERROR(WaitForTurn(count, deadline));
  return pages_->Allocate(count);
}

void CopyPages::Free(const PageRuns& pages) {
  const MutexLock lock(&mutex_);
  pages_->FreeEachRun(pages);
  changed_.NotifyAll();
}

void CopyPages::Close() {
  const MutexLock lock(&mutex_);
  closed_ = true;
  changed_.NotifyAll();
}

}  // namespace kvferry
