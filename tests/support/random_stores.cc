#include "tests/support/random_stores.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

// Of a server; StoreServerPeer has room for 24, and some for 48 below.
constexpr int64_t kKeys = 40;
constexpr int64_t kMostKeys = 8, kMostCalls = 4;
constexpr int64_t kLongestCallMs = 3000;
constexpr int64_t kOutlastsMs = 1000;  // kv_store.h

}  // namespace

void RandomStores::RunAtRandom() {
  setenv("KVFERRY_TEST_STORES", files_.path().c_str(), 1);
  RandomProcesses::RunAtRandom("store-server", 4, "store-client", 3);
}

void RandomStores::Step() {
  static const std::array<std::pair<int64_t, void (RandomStores::*)()>, 4> kActions = {{
      {100, &RandomStores::Put},
      {150, &RandomStores::Get},
      {10, &RandomStores::Erase},
      {80, &RandomStores::LookForEnds},
  }};
  (this->*AnyOfWeighted(kActions))();
}

// Calls of a process that has died may have been carried out or not.
void RandomStores::OnEnd(const Process& process) {
  std::erase_if(calls_, [&](const Call& call) { return call.at == &process; });
}

std::vector<RandomStores::Key> RandomStores::AnyKeys() {
  const int64_t server = UpTo(static_cast<int64_t>(sources_.size()) - 1);
  const int64_t first = UpTo(kKeys - 1);
  const int64_t count = std::min(1 + UpTo(kMostKeys - 1), kKeys - first);
  std::vector<Key> keys;
  for (int64_t i = 0; i < count; ++i) keys.emplace_back(server, first + i);
  return keys;
}

// By a client that runs and has pages for it.
std::optional<RandomStores::Call> RandomStores::CallOf(const std::string& what,
                                                       std::vector<Key> keys) {
  Call call;
  call.at = AnyRunning(targets_);
  call.what = what;
  if (call.at == nullptr) return std::nullopt;
  if (CountAt(calls_, *call.at) >= kMostCalls) return std::nullopt;
  const std::optional<Pages> pages = TakeToFill(*call.at, static_cast<int64_t>(keys.size()));
  if (!pages) return std::nullopt;
  call.pages = *pages;
  call.keys = std::move(keys);
  return call;
}

void RandomStores::AddVersions(Call& call, uint64_t seed) {
  for (size_t i = 0; i < call.keys.size(); ++i) {
    call.versions.push_back(std::make_shared<Version>(
        Version{seed, static_cast<int64_t>(i), Clock::now(), std::nullopt}));
    versions_[call.keys[i]].push_back(call.versions.back());
  }
}

void RandomStores::Begin(Call call) {
  const int64_t timeout_ms = 100 + AnyMs(kLongestCallMs);
  const std::string keys = absl::StrJoin(call.keys, ",", [](std::string* out, const Key& key) {
    absl::StrAppend(out, "key", key.second);
  });
  // Instead of as pages.
  const bool as_values = call.what != "erase" && OneIn(4);
  call.begun = Clock::now();
  call.number =
      Ask(*call.at, absl::StrCat(call.what, as_values ? "_values " : " ", call.keys[0].first, " ",
                                 keys, " ", Listed(call.pages), " ", timeout_ms));
  call.due = DeadlineInMs(timeout_ms);
  int64_t number = 0;
  ASSERT_TRUE(absl::SimpleAtoi(call.number, &number)) << call.number;
  calls_.push_back(std::move(call));
}

void RandomStores::Put() {
  std::optional<Call> call = CallOf("put", AnyKeys());
  if (!call) return;
  const uint64_t seed = ++last_seed_;
  Write(*call->at, seed, call->pages, 0, kPeerLayers);
  AddVersions(*call, seed);
  Begin(*std::move(call));
}

void RandomStores::Get() {
  std::optional<Call> call = CallOf("get", AnyKeys());
  if (call) Begin(*std::move(call));
}

void RandomStores::Erase() {
  std::optional<Call> call = CallOf("erase", {AnyKeys()[0]});
  if (!call) return;
  AddVersions(*call, 0);
  Begin(*std::move(call));
}

void RandomStores::LookForEnds() {
  std::erase_if(calls_, [&](Call& call) { return HasEnded(call); });
}

bool RandomStores::HasEnded(Call& call) {
  if (call.at->stopped_until) return false;
  const std::string answer = call.at->peer->Ask(absl::StrCat("wait ", call.number, " 0"));
  if (answer == "PENDING") {
    ExpectNotLate(call.due + std::chrono::milliseconds(kOutlastsMs),
                  absl::StrCat(call.at->name, " call ", call.number));
    return false;
  }
  Log(absl::StrCat(call.at->name, " ", call.what, " ", call.number, " ends: ", answer));
  const std::vector<std::string> codes = absl::StrSplit(answer, ' ');
  EXPECT_EQ(codes.size(), call.keys.size()) << answer;
  for (size_t i = 0; i < std::min(codes.size(), call.keys.size()); ++i) {
    CountEnd(absl::StrCat(call.what, "_", codes[i]));
    if (codes[i] != "OK") continue;
    if (call.what == "get") {
      ExpectAPut(call, i);
    } else {
      call.versions[i]->done = Clock::now();
    }
  }
  // At once, so that whoever still reads them reads something else.
  if (call.what == "put") Write(*call.at, kUnwritten, call.pages, 0, kPeerLayers);
  GiveBackFilled(*call.at, call.pages);
  return true;
}

bool RandomStores::MayBeThere(const Key& key, const Version& version, Deadline begun) const {
  if (version.seed == 0) return false;
  if (!version.done) return true;  // Nobody knows when it was carried out.
  const std::vector<VersionPtr>& all = versions_.at(key);
  return std::none_of(all.begin(), all.end(), [&](const VersionPtr& later) {
    return later->done && *later->done < begun && *version.done < later->begun;
  });
}

void RandomStores::ExpectAPut(const Call& call, size_t index) {
  const Key& key = call.keys[index];
  std::string why;
  const std::vector<VersionPtr>& all = versions_[key];
  for (auto version = all.rbegin(); version != all.rend(); ++version) {
    if ((*version)->seed == 0) continue;
    const std::string answer =
        Holds(*call.at, (*version)->seed, {call.pages[index]}, (*version)->page, kPeerLayers);
    if (answer != "OK") {
      absl::StrAppend(&why, "; ", answer);
      continue;
    }
    EXPECT_TRUE(MayBeThere(key, **version, call.begun))
        << call.at->name << " get " << call.number << ": key " << key.second
        << " was put anew before it was asked for";
    return;
  }
  ADD_FAILURE() << call.at->name << " get " << call.number << ": key " << key.second
                << " holds nothing that was put" << why;
}

void RandomStores::Drain() {
  const auto ended = [&] {
    LookForEnds();
    return calls_.empty() || HasFailure();
  };
  EXPECT_TRUE(WaitFor(ended, DeadlineInMs(kLongestCallMs + kOutlastsMs + 2 * kSlackMs)));
  if (HasFailure()) return;
  for (Process& client : targets_) {
    for (size_t i = 0; i < sources_.size(); ++i) ExpectServes(client, static_cast<int64_t>(i));
  }
  for (Process& process : sources_) {
    ExpectAtRest(process, {"transfers_active", "fetches_active", "arena_chunks_taken"});
  }
  for (Process& process : targets_) {
    ExpectAtRest(process, {"transfers_active", "fetches_active", "arena_chunks_taken"});
  }
}

// With everybody up and nothing else to do.
void RandomStores::ExpectServes(Process& client, int64_t server) {
  const uint64_t seed = ++last_seed_;
  const std::optional<Pages> pages = TakeToFill(client, 2);
  ASSERT_TRUE(pages.has_value());
  Write(client, seed, {pages->at(0)}, 0, kPeerLayers);
  const auto call = [&](const std::string& what, int64_t page) {
    const std::string number =
        Ask(client, absl::StrCat(what, " ", server, " key0 ", page, " 20000"));
    return client.peer->Wait(number, 20000);
  };
  // Pages may be held for calls of processes that have died, and files that a server waited for
  // while it was stopped are left alone for some seconds (TierPatience).
  const auto room = [&](const std::string& what, int64_t page) {
    std::string code;
    const auto passes = [&] { return code == "RESOURCE_EXHAUSTED" || code == "UNAVAILABLE"; };
    WaitFor([&] { return code = call(what, page), !passes(); },
            DeadlineInMs(kLongestCallMs + kSlackMs));
    return code;
  };
  EXPECT_EQ(room("put", pages->at(0)), "OK") << client.name << " to " << server;
  EXPECT_EQ(room("get", pages->at(1)), "OK") << client.name << " from " << server;
  EXPECT_EQ(Holds(client, seed, {pages->at(1)}, 0, kPeerLayers), "OK");
  GiveBackFilled(client, *pages);
}

}  // namespace kvferry
