#pragma once

// Processes that do at random whatever they can, and stop for a while, end and die meanwhile. What
// they do, and what must hold then, is derived tests'.
//
// KVFERRY_RANDOM_SEED and KVFERRY_RANDOM_SECONDS make it another run, and a longer one; how things
// fall out in time is not repeated by a seed.

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "tests/support/child_peer.h"
#include "tests/support/free_pages.h"

namespace kvferry {

class RandomProcesses : public testing::Test {
 protected:
  using Pages = std::vector<int64_t>;
  static constexpr int64_t kTokens = 96 * 16;  // That a pool has room for.
  static constexpr int64_t kSlackMs = 10000;   // By which a wait may end late on a busy machine.
  static constexpr uint64_t kUnwritten = 1;    // The seed of what pages hold that are nobody's.

  struct Process {
    std::string role;  // A ChildPeer's.
    std::string name;
    std::unique_ptr<ChildPeer> peer{};
    PeerPages pages_are{};
    FreePages free{};
    std::vector<std::string> held{};  // By the pages of a target: a hash of each.
    std::optional<Deadline> stopped_until{};
    int64_t first_fds = 0;  // That were open when it had no peers yet.

    // That so many tokens take.
    int64_t PagesOf(int64_t tokens) const {
      return (tokens + pages_are.page_size - 1) / pages_are.page_size;
    }
  };

  // The whole test.
  void RunAtRandom(const std::string& source_role, int sources, const std::string& target_role,
                   int targets);

  // --- What they do ---

  // One of many things, on any of them.
  virtual void Step() = 0;
  // A process has just begun, or is no more, and what it had with it.
  virtual void OnStart(Process& /*process*/) {}
  virtual void OnEnd(const Process& process) = 0;
  // All of them run: ends what is under way, and says what must hold then.
  virtual void Drain() = 0;

  // --- What another test does otherwise ---

  // Behind what is chosen at random: more members of the configuration, each with a comma before
  // it.
  virtual std::string MoreConfig(const Process& /*process*/) { return ""; }
  virtual std::string NetnsOf(const Process& /*process*/) { return ""; }
  virtual PeerPages AnyPages() { return {}; }
  // Mend() comes before every step, and must mend all when `now` is max().
  virtual void Break() { Stop(); }
  virtual void Mend(Deadline now) { Continue(now); }

  // --- Chance ---

  int64_t UpTo(int64_t most) { return std::uniform_int_distribution<int64_t>(0, most)(random_); }
  bool OneIn(int64_t n) { return UpTo(n - 1) == 0; }
  // Short ones as often as long ones.
  int64_t AnyMs(int64_t most) { return most >> UpTo(5); }
  template <typename T>
  T& AnyOf(std::vector<T>& things) {
    return things[UpTo(static_cast<int64_t>(things.size()) - 1)];
  }
  int64_t AnyOf(std::initializer_list<int64_t> numbers) {
    return *(numbers.begin() + UpTo(static_cast<int64_t>(numbers.size()) - 1));
  }
  // One of those with a weight.
  template <typename Actions>
  auto AnyOfWeighted(const Actions& actions) {
    int64_t left = 0;
    for (const auto& [weight, action] : actions) left += weight;
    left = UpTo(left - 1);
    for (const auto& [weight, action] : actions) {
      left -= weight;
      if (left < 0) return action;
    }
    return actions.begin()->second;
  }

  // --- Processes ---

  std::string Ask(Process& process, const std::string& command);
  void Log(const std::string& line);  // Printed when the test has failed.
  // Null when the one that chance picks does not run.
  Process* AnyRunning(std::vector<Process>& processes);
  bool IsSource(const Process& process) const { return process.role == sources_[0].role; }
  // For MoreConfig(): a source listens where it did before it began again.
  std::string SamePort(const Process& process) const;
  // For OnStart(): a target is told where the sources are.
  void ConnectToSources(Process& process);
  void Stop();
  void Continue(Deadline now);
  void ExpectAtRest(Process& process, const std::vector<std::string>& gauges);
  // Of what has a process that it is `at`.
  template <typename Things>
  static int64_t CountAt(const Things& things, const Process& process) {
    return std::count_if(things.begin(), things.end(),
                         [&](const auto& thing) { return thing.at == &process; });
  }

  // --- Ends ---

  // What is under way is not late by more than anybody can be.
  static void ExpectNotLate(Deadline due, const std::string& what);
  void CountEnd(const std::string& how) { ++ends_[how]; }
  int64_t CountedEnds(const std::string& how) { return ends_[how]; }

  // --- What pages hold ---

  // Pages of a source as those of `seed` from the first on are, in layers [first, end).
  void Write(Process& source, uint64_t seed, const Pages& pages, int64_t first, int64_t end);
  // "OK" when pages of a target hold what the source's from `first_page` on were written with.
  // Behind `tokens` of all that is written anything may lie. With `half`, that half of their heads.
  std::string Holds(Process& target, uint64_t seed, const Pages& pages, int64_t first_page,
                    int64_t end_layer, int64_t tokens = kTokens, const std::string& half = "");
  // Pages of a source that are its own again: written at once, so that whoever still reads them
  // reads something else.
  void GiveBackSpent(Process& source, Pages& pages);
  static std::string Listed(const Pages& pages);
  // Of a target: what they hold now is theirs, and does not change until they are used again.
  void Remember(Process& target, const Pages& pages);
  void ExpectAsRemembered(Process& target, const Pages& pages);
  // For something to arrive in; none when there are too few.
  std::optional<Pages> TakeToFill(Process& target, int64_t count);
  void GiveBackFilled(Process& target, const Pages& pages);

  std::vector<Process> sources_, targets_;
  std::mt19937_64 random_;

 private:
  void TearDown() override;

  std::string AnyConfig(const Process& process);
  void Start(Process& process);
  void EndAny();
  std::vector<Process*> All();
  void Quit(std::vector<Process>& processes);
  void ExpectNothingOfPeers(std::vector<Process>& processes);
  static std::vector<std::string> Hashes(Process& process, const Pages& pages);

  const Deadline begin_ = Clock::now();
  std::deque<std::string> log_;          // The last lines.
  std::map<std::string, int64_t> ends_;  // Printed by a test that has passed.
};

}  // namespace kvferry
