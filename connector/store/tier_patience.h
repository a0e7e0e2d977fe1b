#pragma once

#include <algorithm>
#include <chrono>

#include "base/clock.h"

namespace kvferry {

// How long a tier is waited for, and when it is not asked at all, by what it has said before: see
// TieredStore. Not thread-safe.
class TierPatience {
 public:
  // Longer than a tier that works keeps anybody, and less than it takes to find that a host does
  // not answer. By how long was waited and not by calls: a deadline that was nearly over says
  // nothing of a tier.
  static constexpr auto kPatience = std::chrono::milliseconds(500);
  // As vLLM's connector leaves a store alone (SILENCE_S).
  static constexpr auto kSilence = std::chrono::seconds(5);
  static constexpr int kSilencePerTrial = 4;
  // One that is back is asked again before long, however long it was away.
  static constexpr auto kMostSilence = std::chrono::seconds(30);
  static constexpr Clock::duration kMostTrial = Clock::duration(kMostSilence) / kSilencePerTrial;

  // It is not asked before that.
  Deadline silent_until() const { return silent_until_; }
  // Until when a call waits for it that begins now and has until `deadline`.
  Deadline WaitUntil(Deadline now, Deadline deadline) const {
    return trial_ > Clock::duration() ? std::min(deadline, now + trial_) : deadline;
  }
  // What a call that began then has come to.
  void Heard(Deadline begin, Deadline now, bool answered) {
    const Deadline uncounted = std::min(now, std::max(begin, counted_until_));
    counted_until_ = now;
    if (answered) {
      waited_ = trial_ = {};
      silent_until_ = {};
      return;
    }
    waited_ += now - uncounted;
    if (waited_ < kPatience) return;
    waited_ = {};
    // A caller in a hurry has not waited for all of a trial.
    const Clock::duration tried = std::min(trial_, now - begin);
    silent_until_ =
        now + std::clamp<Clock::duration>(kSilencePerTrial * tried, kSilence, kMostSilence);
    // One that is back but slow needs longer than the first trial, once it is asked for much.
    if (trial_ <= tried) trial_ = std::clamp<Clock::duration>(2 * trial_, kPatience, kMostTrial);
  }

 private:
  Clock::duration waited_{};  // In vain, since it last answered.
  Deadline counted_until_{};  // Calls wait side by side: that counts once.
  Deadline silent_until_{};
  Clock::duration trial_{};  // Calls wait no longer, if above 0.
};

}  // namespace kvferry
