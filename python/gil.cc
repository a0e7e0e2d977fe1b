#include "python/gil.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace nb = nanobind;

namespace kvferry {
namespace {

// HeldGils that have the GIL or wait for it.
std::atomic<int> g_num_held = 0;
// The thread that makes the interpreter exit; none before.
std::atomic<std::thread::id> g_exits_on;

bool ExitsOnAnother() {
  const std::thread::id exits_on = g_exits_on;
  return exits_on != std::thread::id() && exits_on != std::this_thread::get_id();
}

bool IsOnlyThread() {
  PyThreadState* newest = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
  return PyThreadState_Next(newest) == nullptr;
}

// Python calls this before it ends threads that ask for the GIL.
void BeginExit() {
  g_exits_on = std::this_thread::get_id();
  // Daemon threads keep what they use, which is no mistake that nanobind should report.
  if (!IsOnlyThread()) nb::set_leak_warnings(false);
  const ReleasedGil nogil;  // For those that wait for it.
  // Bounded: they run finalizers of the user's.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (g_num_held > 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

void StayForEver() {
  for (;;) pause();
}

bool InterpreterExits() { return g_exits_on.load() != std::thread::id(); }

HeldGil::HeldGil() {
  ++g_num_held;  // Before the question: BeginExit() looks only after it has changed the answer.
  held_ = nb::is_alive() && !ExitsOnAnother();
  if (held_) {
    state_ = PyGILState_Ensure();
  } else {
    --g_num_held;
  }
}

HeldGil::~HeldGil() {
  if (!held_) return;
  PyGILState_Release(state_);
  --g_num_held;
}

void BindGil() {
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&BeginExit));
  // Other threads, and what they hold, are not in the child of a fork.
  pthread_atfork(nullptr, nullptr, [] { g_num_held = 0; });
}

}  // namespace kvferry
