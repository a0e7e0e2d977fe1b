#pragma once

// Producers and consumers of lookup buffers that insert, look up and cancel. Whatever comes
// together: no entry is delivered twice, each comes whole, every lookup ends in time, what was not
// delivered is still there, but for what a consumer that died or gave up may have been given, and a
// producer that died had.

#include <map>
#include <string>
#include <vector>

#include "tests/support/random_processes.h"

namespace kvferry {

class RandomLookups : public RandomProcesses {
 protected:
  void RunAtRandom() { RandomProcesses::RunAtRandom("producer", 2, "consumer", 3); }
  // Consumers know producers by their addresses, so one that begins again has the same.
  std::string MoreConfig(const Process& process) override { return SamePort(process); }

 private:
  using Tokens = std::vector<int64_t>;

  struct Entry {
    Process* at = nullptr;  // Null when that process has ended.
    std::string id;         // Of that process.
    Tokens tokens;          // The second is its number.
    Pages pages;            // None when it has left the buffer.
    bool delivered = false;
  };
  struct Lookup {
    Process* at = nullptr;
    std::string number;
    Tokens query;  // None: any entry.
    Pages pages;
    Deadline due;
  };

  void Step() override;
  void OnStart(Process& process) override { ConnectToSources(process); }
  void OnEnd(const Process& process) override;
  void Drain() override;

  void Insert();
  Tokens AnyQuery();
  void LookUp();
  void Begin(Process& process, const Tokens& query, int64_t num_pages, int64_t timeout_ms);
  void Cancel();
  void LookForEnds();
  bool HasEnded(Lookup& lookup);
  void Delivered(const Lookup& lookup);
  void LookForGone(Entry& entry);

  std::map<int64_t, Entry> entries_;  // By number.
  std::vector<Lookup> lookups_;
  int64_t may_be_lost_ = 0;  // Lookups that may have been given an entry nobody has seen.
};

}  // namespace kvferry
