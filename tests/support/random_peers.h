#pragma once

// Prefill and decode processes that publish, announce, push, fetch all of a request or its end, by
// several, cancel, take back and publish again. Whatever comes together: every wait ends in time,
// what has arrived is what was published, pages that are their owner's again keep what they hold,
// and in the end nothing is left over.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/random_processes.h"

namespace kvferry {

// Whose pages are alike.
class RandomPeers : public RandomProcesses {
 protected:
  void RunAtRandom() { RandomProcesses::RunAtRandom("prefill", 2, "receiver", 3); }
  // A prefill process that begins again is another one at the address that old tickets name.
  std::string MoreConfig(const Process& process) override { return SamePort(process); }

 private:
  struct Request {
    Process* at = nullptr;
    std::string lease;
    std::string ticket;
    uint64_t seed = 0;  // Of what its pages hold.
    int64_t num_pages = 0;
    int64_t num_tokens = 0;  // That these have.
    Pages pages;             // None while it is announced only.
    int64_t ready_layers = 0;
    std::string push;        // The number of its handle, if it is one.
    bool by_halves = false;  // Two fetch it, each half of the heads.
    Deadline due;            // By which it has ended, with all that may read it.
  };
  using RequestPtr = std::shared_ptr<Request>;

  struct Fetch {
    Process* at = nullptr;
    std::string number;
    std::string receive_ticket;       // If it is a receive.
    std::vector<RequestPtr> sources;  // What may arrive.
    int64_t first_page = 0;
    Pages pages;
    std::string half;  // "0" or "1" of a request that is fetched by halves; empty: all of it.
    Deadline due;
  };

  void Step() override;
  void OnEnd(const Process& process) override;
  void Drain() override;

  // Null when chance picks one whose process does not run.
  RequestPtr AnyRequest();
  Fetch* AnyFetch();
  int64_t RequestsOf(const Process& process) const;

  // --- What a prefill process does ---

  // Pages for it, with as many layers written as it says are ready; false when there are too few.
  bool TakePages(Request& request);
  RequestPtr NewRequest(Process& process, int64_t num_tokens);
  int64_t AnyTokens();
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

  std::optional<Fetch> FetchOf(Process& process, int64_t num_tokens);
  void Begin(const std::string& command, Fetch fetch);
  void FetchOne();
  void Receive();
  void Cancel();
  // Layers that have come are there, while the others are still under way.
  void LookAtLayers();

  // --- Ends ---

  // One of the fetch's sources.
  testing::AssertionResult HoldASource(const Fetch& fetch, const Pages& pages, int64_t first_page,
                                       int64_t end_layer);
  // Whether it has ended; in time, and with what it says.
  bool HasEnded(Fetch& fetch);
  bool HasEnded(const RequestPtr& request);
  void LookForEnds();
  void ExpectServes(Process& prefill, Process& decode);

  uint64_t last_seed_ = kUnwritten;
  std::vector<RequestPtr> requests_;      // Of processes that live, not ended.
  std::vector<RequestPtr> past_tickets_;  // Some of those that have.
  std::vector<Fetch> fetches_;
};

// Each with pages of its own size, order and dtype, another time that it begins with others.
class RandomPeersOfOtherPages : public RandomPeers {
 protected:
  PeerPages AnyPages() override;
};

}  // namespace kvferry
