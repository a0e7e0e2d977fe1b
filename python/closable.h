#pragma once

#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/close_once.h"
#include "base/mutex.h"
#include "python/gil.h"
#include "python/maker.h"
#include "python/status_error.h"

namespace kvferry {

// What has threads, and Python may close early: by close() or with its last owner. Using it
// afterwards is an error, not a crash; calls under way go on with theirs. Of threads that close it
// at once one does, and the others wait until it has.
template <typename T>
class Closable {
 public:
  // `what` it is, in the singular, for errors; it takes an s.
  Closable(std::unique_ptr<T> made, const char* what)
      : what_(what), made_(LeftByForks(std::move(made))) {}
  Closable(const Closable&) = delete;
  Closable& operator=(const Closable&) = delete;
  ~Closable() { Close(); }

  // With the GIL held, as Close(). The result outlives a Close() on another thread.
  std::shared_ptr<T> get() const {
    maker_.CheckIsHere(what_);
    const MutexLock lock(&mutex_);
    if (made_ == nullptr) {
      throw StatusError(absl::FailedPreconditionError(absl::StrCat("the ", what_, " is closed")));
    }
    return made_;
  }
  void Close() {
    // In the child of a fork, where whoever was closing it is not, it is left to its maker.
    if (!maker_.IsHere()) return;
    const ReleasedGil nogil;  // Joins threads.
    close_once_.Run([this] {
      std::shared_ptr<T> made;
      {
        const MutexLock lock(&mutex_);
        made.swap(made_);
      }
      // Where calls under way would keep it open, and wait.
      if constexpr (requires { made->Close(); }) made->Close();
    });
  }

 private:
  const Maker maker_;
  const char* const what_;
  CloseOnce close_once_;
  mutable Mutex mutex_;
  std::shared_ptr<T> made_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvferry
