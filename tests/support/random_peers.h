#pragma once

// Prefill and decode processes that do at random whatever they can: publish, announce, push, fetch
// all of a request or its end, by several, cancel, take back and publish again, stop for a while, end
// and die. Whatever comes together: every wait ends in time, what has arrived is what was published,
// pages that are their owner's again keep what they hold, and in the end nothing is left over.
//
// KVFERRY_RANDOM_SEED and KVFERRY_RANDOM_SECONDS make it another run, and a longer one; how things
// fall out in time is not repeated by a seed.

#include <gtest/gtest.h>

#include <deque>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/clock.h"
#include "tests/support/child_peer.h"

namespace kvferry {

class RandomPeers : public testing::Test {
 protected:
  using Pages = std::vector<int64_t>;

  // The pages of a pool that nobody uses.
  class FreePages {
   public:
    FreePages();
    bool Has(int64_t count) const { return count <= static_cast<int64_t>(free_.size()); }
    Pages Take(int64_t count, std::mt19937_64& random);
    void GiveBack(const Pages& pages) { free_.insert(free_.end(), pages.begin(), pages.end()); }
    const Pages& all() const { return free_; }

   private:
    Pages free_;
  };

  struct Process {
    Process(const std::string& its_role, int index);

    std::string role;  // A ChildPeer's.
    std::string name;
    std::unique_ptr<ChildPeer> peer;
    FreePages free;
    std::vector<std::string> held;  // By a decode side's pages: a hash of each.
    std::optional<Deadline> stopped_until;
    int64_t first_fds = 0;  // That were open when it had no peers yet.
  };

  struct Request {
    Process* at = nullptr;
    std::string lease;
    std::string ticket;
    uint64_t seed = 0;  // Of what its pages hold.
    int64_t num_pages = 0;
    Pages pages;  // None while it is announced only.
    int64_t ready_layers = 0;
    std::string push;  // The number of its handle, if it is one.
    Deadline ends_by;  // Once published, with all that may read it.
  };
  using RequestPtr = std::shared_ptr<Request>;

  struct Fetch {
    Process* at = nullptr;
    std::string number;
    std::string receive_ticket;       // If it is a receive.
    std::vector<RequestPtr> sources;  // What may arrive.
    int64_t first_page = 0;
    Pages pages;
    Deadline due;
  };

  // The whole test.
  void Run();

  // --- What another test does otherwise ---

  // Behind what is chosen at random: more members of the configuration, each with a comma before it.
  virtual std::string MoreConfig(const std::string& /*role*/) { return ""; }
  virtual std::string NetnsOf(const std::string& /*role*/) { return ""; }
  // About once a second; Mend() comes with every step, and must mend all from `now` = max() on.
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

  // --- Faults ---

  void Stop();
  void Continue(Deadline now);
  void Log(const std::string& line);

 private:
  void TearDown() override;

  std::string AnyConfig(const std::string& role);
  void Start(Process& process);
  std::string Ask(Process& process, const std::string& command);
  // Null when the one that chance picks does not run.
  Process* AnyRunning(std::vector<Process>& processes);
  RequestPtr AnyRequest();
  Fetch* AnyFetch();
  int64_t RequestsOf(const Process& process) const;
  int64_t FetchesOf(const Process& process) const;
  std::vector<Process*> All();

  // --- What pages hold ---

  std::vector<std::string> Hashes(Process& process, const Pages& pages);
  void Remember(Process& process, const Pages& pages);
  // They are nobody's but the caller's, and nothing has come late.
  void ExpectAsRemembered(Process& process, const Pages& pages);
  // Of one of the fetch's sources, from a page of theirs on, in layers [0, end_layer).
  testing::AssertionResult HoldASource(const Fetch& fetch, const Pages& pages, int64_t first_page,
                                       int64_t end_layer);

  // --- What a prefill process does ---

  void WriteLayers(const Request& request, uint64_t seed, int64_t first, int64_t end);
  // Pages for it, with as many layers written as it says are ready; false when there are too few.
  bool TakePages(Request& request);
  // At once written, so that whoever still reads them reads something else.
  void GivePagesBack(Request& request);
  RequestPtr NewRequest(Process& process);
  std::string PublishCommand(const Request& request);
  void Add(const RequestPtr& request);
  void Forget(const RequestPtr& request);
  void Publish();
  void Announce(const RequestPtr& request);
  void PublishAnnounced();
  void Push();
  void ReadyLayers();
  void TakeBack();

  // --- What a decode process does ---

  std::optional<Fetch> FetchOf(Process& process, int64_t num_pages);
  void Begin(const std::string& command, Fetch fetch);
  void FetchOne();
  void Receive();
  void Cancel();
  // Layers that have come are there, while the others are still under way.
  void LookAtLayers();

  // --- Ends ---

  // Whether it has ended; in time, and with what it says.
  bool HasEnded(Fetch& fetch);
  bool HasEnded(const RequestPtr& request);
  void LookForEnds();
  void EndProcess();
  void Quit(std::vector<Process>& processes);

  // --- All of it ---

  void Step();
  void Drain();
  void ExpectAtRest(Process& process, const std::vector<std::string>& gauges);
  void ExpectServes(Process& prefill, Process& decode);
  void ExpectNothingOfPeers(std::vector<Process>& processes);

  std::mt19937_64 random_;
  const Deadline begin_ = Clock::now();
  uint64_t last_seed_ = 1;
  std::deque<std::string> log_;  // The last lines.
  std::vector<Process> prefills_, decodes_;
  std::vector<RequestPtr> requests_;      // Of processes that live, not ended.
  std::vector<RequestPtr> past_tickets_;  // Some of those that have.
  std::vector<Fetch> fetches_;
  std::map<std::string, int64_t> ends_;  // How many fetches and leases ended how.
};

}  // namespace kvferry
