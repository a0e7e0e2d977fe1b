#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <new>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace kvferry {

// The eras of a client's changes (docs/wire_protocol.md): a server that has taken up a call of one
// carries out none of an earlier one. A later one begins where that matters, as it ends all other
// changes that are under way: with the first change of a key of which an earlier one may still
// come. Thread-safe.
class ChangeEras {
 public:
  // Of a call that changes these.
  uint64_t Of(std::span<const std::string_view> keys) {
    const MutexLock lock(&mutex_);
    for (const std::string_view key : keys) {
      if (abandoned_.contains(key)) {
        BeginNext();
        break;
      }
    }
    return era_;
  }

  // Nobody knows whether such a call of that era is over.
  void Abandon(uint64_t era, std::span<const std::string_view> keys) {
    const MutexLock lock(&mutex_);
    if (era != era_) return;  // Whatever comes next is of a later one.
    try {
      for (const std::string_view key : keys) abandoned_.emplace(key);
    } catch (const std::bad_alloc&) {
      return BeginNext();  // As if all keys were among them.
    }
    if (abandoned_.size() > kMaxKeys) BeginNext();
  }

 private:
  static constexpr size_t kMaxKeys = 65536;

  void BeginNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    ++era_;
    abandoned_.clear();
  }

  Mutex mutex_;
  uint64_t era_ ABSL_GUARDED_BY(mutex_) = 0;
  std::set<std::string, std::less<>> abandoned_ ABSL_GUARDED_BY(mutex_);  // In era_.
};

}  // namespace kvferry
