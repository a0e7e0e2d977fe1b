#include "base/thread.h"

#include <csignal>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"

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

}  // namespace

absl::StatusOr<std::thread> StartThread(const std::string& what, std::function<void()> run) {
  // A thread inherits the mask of the one that starts it.
  const sigset_t blocked = AllButFaults();
  sigset_t before;
  pthread_sigmask(SIG_BLOCK, &blocked, &before);
  absl::StatusOr<std::thread> thread;
  try {  // std::thread has no other way to say it.
    thread = std::thread(std::move(run));
    pthread_setname_np(thread->native_handle(), NameOf(what).c_str());
  } catch (const std::system_error& error) {
    thread = absl::ResourceExhaustedError(
        absl::StrCat(what, ": the system refused a thread: ", error.what()));
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace kvferry
