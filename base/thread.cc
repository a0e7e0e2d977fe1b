#include "base/thread.h"

#include <csignal>
#include <latch>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "base/status.h"

namespace kvferry {
namespace {

sigset_t AllButFaults() {
  sigset_t signals;
  sigfillset(&signals);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) {
    sigdelset(&signals, fault);
  }
  return signals;
}

// What the system's tools show: 15 characters at most, or it takes none.
std::string NameOf(absl::string_view what) {
  return absl::StrCat("kvf-", absl::StrReplaceAll(what.substr(0, 11), {{" ", "-"}, {",", ""}}));
}

// While it lives. A thread inherits the mask of the one that starts it.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    const sigset_t blocked = AllButFaults();
    pthread_sigmask(SIG_BLOCK, &blocked, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// Threads that run until it goes.
class HeldThreads {
 public:
  explicit HeldThreads(int count) : count_(count) { threads_.reserve(count); }
  ~HeldThreads() {
    end_.count_down();
    for (std::thread& thread : threads_) thread.join();
  }
  HeldThreads(const HeldThreads&) = delete;
  HeldThreads& operator=(const HeldThreads&) = delete;

  absl::Status Start() {
    while (threads_.size() < static_cast<size_t>(count_)) {
      const std::string what = absl::StrCat("thread ", threads_.size() + 1, " of ", count_);
      KVFERRY_ASSIGN_OR_RETURN(std::thread thread, StartThread(what, [this] { end_.wait(); }));
      threads_.push_back(std::move(thread));
    }
    return absl::OkStatus();
  }

 private:
  const int count_;
  std::latch end_{1};
  std::vector<std::thread> threads_;
};

}  // namespace

absl::StatusOr<std::thread> StartThread(const std::string& what, std::function<void()> run) {
  // First, as it may find no memory: a thread that runs cannot be left for that.
  const std::string name = NameOf(what);
  const SignalsBlocked blocked;
  try {  // std::thread has no other way to say it.
    std::thread thread(std::move(run));
    pthread_setname_np(thread.native_handle(), name.c_str());
    return thread;
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat(what, ": the system refused a thread: ", error.what()));
  }
}

absl::Status CheckThreadsStart(int count) { return HeldThreads(count).Start(); }

}  // namespace kvferry
