#pragma once

#include <algorithm>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/interrupt.h"
#include "base/mutex.h"
#include "base/status.h"

namespace kvferry {

// Calls about the same key take turns, with a deadline to the waiting. Thread-safe; turns must end
// before this does.
class KeyTurns {
  // Abseil's sets are broken by a growth for which there is no memory.
  using Taken = std::set<std::string, std::less<>>;

 public:
  class Turn {
   public:
    Turn(Turn&& other) noexcept : turns_(std::exchange(other.turns_, nullptr)), key_(other.key_) {}
    Turn& operator=(Turn&&) = delete;
    ~Turn() {
      if (turns_ != nullptr) turns_->End(key_);
    }

   private:
    friend class KeyTurns;
    Turn(KeyTurns* turns, Taken::iterator key) : turns_(turns), key_(key) {}

    KeyTurns* turns_;
    Taken::iterator key_;
  };

  // DEADLINE_EXCEEDED when others had the turn until then, or until the caller was interrupted.
  absl::StatusOr<Turn> Take(std::string_view key, Deadline deadline) {
    MutexLock lock(&mutex_);
    for (;;) {
      const auto [place, is_mine] = taken_.emplace(key);
      if (is_mine) return Turn(this, place);
      if (!WaitOrLook(ended_, &mutex_, deadline) && taken_.contains(key)) {
        return absl::DeadlineExceededError("others were at the same key until the deadline");
      }
    }
  }
  // Of all these keys, each once, in one order: two batches cannot wait for each other.
  absl::StatusOr<std::vector<Turn>> TakeEach(std::vector<std::string_view> keys,
                                             Deadline deadline) {
    std::ranges::sort(keys);
    // clang 14 has no ranges::unique.
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    std::vector<Turn> turns;
    turns.reserve(keys.size());
    for (const std::string_view key : keys) {
      KVFERRY_ASSIGN_OR_RETURN(Turn turn, Take(key, deadline));
      turns.push_back(std::move(turn));
    }
    return turns;
  }

 private:
  void End(Taken::iterator key) {
    MutexLock lock(&mutex_);
    taken_.erase(key);
    ended_.NotifyAll();
  }

  Mutex mutex_;
  CondVar ended_;
  Taken taken_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvferry
