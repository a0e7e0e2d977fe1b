#pragma once

// What a fork does to objects with threads and connections: the child has the objects without
// their threads, and shares their connections and memory with its parent.

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "python/status_error.h"

namespace kvferry {

// The process that made an object.
class Maker {
 public:
  bool IsHere() const { return pid_ == getpid(); }
  // Raises FAILED_PRECONDITION in any other process; `what` takes an s.
  void CheckIsHere(const char* what) const {
    if (IsHere()) return;
    throw StatusError(absl::FailedPreconditionError(
        absl::StrCat("made in process ", pid_, "; ", what, "s do not survive a fork")));
  }

 private:
  const pid_t pid_ = getpid();
};

// The object, which only its maker destroys: elsewhere its destructor would wait for threads that
// are not there, and take leave of the maker's peers.
template <typename T>
std::shared_ptr<T> LeftByForks(std::unique_ptr<T> made) {
  return {made.release(), [maker = Maker()](T* object) {
            if (maker.IsHere()) {
              delete object;
            } else {
              nanobind::set_leak_warnings(false);  // Of what the object keeps.
            }
          }};
}

}  // namespace kvferry
