#pragma once

#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace kvferry {

// Calls about the same key take turns, with a deadline to the waiting. Thread-safe; turns must end
// before this does.
class KeyTurns {
 public:
  class Turn {
   public:
    Turn(Turn&& other) noexcept
        : turns_(std::exchange(other.turns_, nullptr)), key_(std::move(other.key_)) {}
    Turn& operator=(Turn&&) = delete;
    ~Turn() {
      if (turns_ != nullptr) turns_->End(key_);
    }

   private:
    friend class KeyTurns;
    Turn(KeyTurns* turns, std::string key) : turns_(turns), key_(std::move(key)) {}

    KeyTurns* turns_;
    std::string key_;
  };

  // DEADLINE_EXCEEDED when others had the turn until then.
  absl::StatusOr<Turn> Take(std::string_view key, Deadline deadline) {
    std::string name(key);  // Before it is taken: without memory nobody would end the turn.
    MutexLock lock(&mutex_);
    while (!taken_.emplace(key).second) {
      if (!ended_.WaitUntil(&mutex_, deadline) && taken_.contains(name)) {
        return absl::DeadlineExceededError("others were at the same key until the deadline");
      }
    }
    return Turn(this, std::move(name));
  }

 private:
  void End(const std::string& key) {
    MutexLock lock(&mutex_);
    taken_.erase(key);
    ended_.NotifyAll();
  }

  Mutex mutex_;
  CondVar ended_;
  // Abseil's sets are broken by a growth for which there is no memory.
  std::set<std::string, std::less<>> taken_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvferry
