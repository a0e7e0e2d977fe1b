#pragma once

// Servers of stores and their clients, which put, get and erase pages. Whatever comes together:
// what is got is whole, and of a put that no later one has replaced; every call ends in time; and
// no page of a client's is written, nor read, when its call has ended.

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/random_processes.h"
#include "tests/support/temp_folder.h"

namespace kvferry {

class RandomStores : public RandomProcesses {
 protected:
  void RunAtRandom();
  // Clients know servers by their addresses, so one that begins again has the same.
  std::string MoreConfig(const Process& process) override { return SamePort(process); }

 private:
  // What a put, or an erasure, has made of a key, or may have.
  struct Version {
    uint64_t seed = 0;  // 0: erased.
    int64_t page = 0;   // Of that seed.
    Deadline begun;
    std::optional<Deadline> done;  // When it is certain that it is there, or was.
  };
  using VersionPtr = std::shared_ptr<Version>;
  using Key = std::pair<int64_t, int64_t>;  // A server's, by its number.

  struct Call {
    Process* at = nullptr;
    std::string what;
    std::string number;
    std::vector<Key> keys;
    Pages pages;
    std::vector<VersionPtr> versions;  // One a key, but of a get.
    Deadline begun, due;
  };

  void Step() override;
  void OnStart(Process& process) override { ConnectToSources(process); }
  void OnEnd(const Process& process) override;
  void Drain() override;

  std::vector<Key> AnyKeys();
  void Put();
  void Get();
  void Erase();
  std::optional<Call> CallOf(const std::string& what, std::vector<Key> keys);
  void AddVersions(Call& call, uint64_t seed);
  void Begin(Call call);
  void LookForEnds();
  bool HasEnded(Call& call);
  // Whether a get that began then may find it.
  bool MayBeThere(const Key& key, const Version& version, Deadline begun) const;
  void ExpectAPut(const Call& call, size_t index);
  void ExpectServes(Process& client, int64_t server);

  const TempFolder files_;  // Of servers that keep some; later servers find them again.
  std::map<Key, std::vector<VersionPtr>> versions_;
  std::vector<Call> calls_;
  uint64_t last_seed_ = kUnwritten;
};

}  // namespace kvferry
