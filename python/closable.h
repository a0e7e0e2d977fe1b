#pragma once

#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/close_once.h"
#include "base/mutex.h"
#include "python/gil.h"
#include "python/heard_signals.h"
#include "python/maker.h"
#include "python/status_error.h"

namespace kvferry {

// What has threads, and Python may close early: by close() or with its last owner. Using it
// afterwards is an error, not a crash; calls under way go on with theirs. Of threads that close it
// at once one does, and the others wait until it has, as do those that find it closed: what they
// share with it, as pages, is nobody else's before.
//
// It ends with the last of the calls that are under way: close() waits for that too, unless they
// are such that may take long and need not end (waits_for_calls). A signal's handler that closes it
// while its own thread is in such a call has it closed behind that.
template <typename T, bool waits_for_calls = true>
class Closable {
 public:
  // `what` it is, in the singular, for errors; it takes an s.
  Closable(std::unique_ptr<T> made, const char* what)
      : what_(what), made_(Living(std::move(made))) {}
  Closable(const Closable&) = delete;
  Closable& operator=(const Closable&) = delete;
  ~Closable() { Close(); }

  // What call(object) gives, which runs without the GIL. Where it is the last that has the object,
  // which was closed meanwhile, it ends here: that joins threads, takes leave of servers, gives
  // gigabytes back, and keeps no thread of Python's from running. In the main thread handlers of
  // signals run while it waits, and what one raises is raised when it has ended.
  template <typename Call>
  auto CallWithoutGil(const Call& call) const {
    std::shared_ptr<T> held = get();
    HeardSignals signals(this);
    auto result = [&] {
      const ReleasedGil nogil;
      const std::shared_ptr<T> object = std::move(held);
      return call(*object);
    }();
    if (signals.Raise()) ThrowClosed();
    return result;
  }
  // With the GIL held, as Close(). The result outlives a Close() on another thread, which waits for
  // it: it is to be let go of before the GIL is taken back, and before Python makes anything, whose
  // garbage collection may close this on this very thread.
  std::shared_ptr<T> get() const {
    maker_.CheckIsHere(what_);
    {
      const MutexLock lock(&mutex_);
      if (made_ != nullptr) return made_;
    }
    {
      const ReleasedGil nogil;
      close_once_.Wait();
    }
    ThrowClosed();
  }
  void Close() {
    // In the child of a fork, where whoever was closing it is not, it is left to its maker.
    if (!maker_.IsHere()) return;
    if constexpr (waits_for_calls) {
      if (HeardSignals::CloseBehindCall(this, [this] { Close(); })) return;
    }
    const ReleasedGil nogil;  // Joins threads.
    close_once_.Run([this] {
      std::shared_ptr<T> made;
      {
        const MutexLock lock(&mutex_);
        made.swap(made_);
      }
      // Where calls under way would keep it open, and wait.
      if constexpr (requires { made->Close(); }) made->Close();
      made.reset();
      if constexpr (waits_for_calls) life_->WaitUntilOver();
    });
  }

 private:
  // Of the object.
  class Life {
   public:
    void End() {
      const MutexLock lock(&mutex_);
      is_over_ = true;
      ended_.NotifyAll();
    }
    // Not at exit, where threads may have stayed in a call for ever (gil.h), and nobody uses again
    // what the object shares.
    void WaitUntilOver() {
      const MutexLock lock(&mutex_);
      while (!is_over_ && !InterpreterExits()) ended_.WaitAwhile(&mutex_);
    }

   private:
    Mutex mutex_;
    CondVar ended_;
    bool is_over_ ABSL_GUARDED_BY(mutex_) = false;
  };

  [[noreturn]] void ThrowClosed() const {
    throw StatusError(absl::FailedPreconditionError(absl::StrCat("the ", what_, " is closed")));
  }

  std::shared_ptr<T> Living(std::unique_ptr<T> made) const {
    T* const object = made.get();
    return {object, [owner = LeftByForks(std::move(made)), life = life_](T*) mutable {
              owner.reset();
              life->End();
            }};
  }

  const Maker maker_;
  const char* const what_;
  const std::shared_ptr<Life> life_ = std::make_shared<Life>();
  mutable CloseOnce close_once_;
  mutable Mutex mutex_;
  std::shared_ptr<T> made_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvferry
