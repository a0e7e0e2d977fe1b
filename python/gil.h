#pragma once

// Python's lock, the GIL, in threads that are still there when the interpreter exits: daemon
// threads of Python's, and threads of ours. Up to Python 3.13 the interpreter ends such a thread
// where it asks for the GIL, by pthread_exit(): C++ functions are unwound as by an exception, with
// destructors that need the GIL, until a noexcept one aborts the process. From 3.14 on the thread
// stays where it is, for ever.
//
// What stays here is what this module calls itself. nanobind calls Python code too, in functions
// that are noexcept: of arrays given_array.h leaves it none, but a sequence's __getitem__ or an
// object's __index__ that are written in Python can still end a process that exits meanwhile.

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>

namespace kvferry {

[[noreturn]] void StayForEver();
// From the interpreter's exit on.
bool InterpreterExits();

// Returns what `call` returns, which is one call of Python's C API that may ask for the GIL, as
// running Python code does, and nothing else. At exit the thread stays in here, as from 3.14 on.
template <typename Call>
auto StayAtExit(Call call) {
  try {
    return call();
  } catch (...) {
    // No exception, which the C API has none of, but pthread_exit(). It cannot be foreseen: the
    // interpreter may begin to exit while the thread waits for the GIL.
    StayForEver();
  }
}

// The GIL is released while this lives; in place of nanobind's gil_scoped_release, in which
// threads do not stay at exit.
class ReleasedGil {
 public:
  ReleasedGil() : thread_(PyEval_SaveThread()) {}
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;
  ~ReleasedGil() {
    StayAtExit([this] { PyEval_RestoreThread(thread_); });
  }

 private:
  PyThreadState* const thread_;
};

// The GIL is held while this lives, on any thread; in place of nanobind's gil_scoped_acquire. False
// where another thread makes the interpreter exit: what needs the GIL is not to be done then. No
// thread stays in here, so that those of ours can be joined.
class HeldGil {
 public:
  HeldGil();
  HeldGil(const HeldGil&) = delete;
  HeldGil& operator=(const HeldGil&) = delete;
  ~HeldGil();
  explicit operator bool() const { return held_; }

 private:
  bool held_;
  PyGILState_STATE state_{};
};

// The same object, for whoever may let go of it on any thread. What nanobind makes of a Python
// object takes the GIL for that in its own way; this takes a HeldGil before, and without one the
// object stays.
template <typename T>
std::shared_ptr<T> ForAnyThread(std::shared_ptr<T> of_python) {
  T* object = of_python.get();
  auto* owner = new std::shared_ptr<T>(std::move(of_python));
  return {object, [owner](T*) {
            if (const HeldGil gil; gil) delete owner;
          }};
}

// Of the module: from the interpreter's exit on there is no HeldGil, and it waits for those that
// there are.
void BindGil();

}  // namespace kvferry
