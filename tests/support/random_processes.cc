#include "tests/support/random_processes.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "tests/support/from_environment.h"
#include "tests/support/test_config.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

constexpr int64_t kMostLanes = 3;
constexpr int64_t kLongestStopMs = 2500;
constexpr int64_t kLongestBetweenBreaksMs = 2000, kLongestBetweenEndsMs = 5000;

}  // namespace

void RandomProcesses::TearDown() {
  if (!HasFailure()) return;
  for (const std::string& line : log_) std::cerr << line << "\n";
}

void RandomProcesses::Log(const std::string& line) {
  constexpr size_t kMostLines = 400;
  const auto ms = static_cast<int64_t>(SecondsBetween(begin_, Clock::now()) * 1000);
  log_.push_back(absl::StrCat(ms, " ", line));
  if (log_.size() > kMostLines) log_.pop_front();
}

// --- Processes ---

std::string RandomProcesses::Ask(Process& process, const std::string& command) {
  const std::string answer = process.peer->Ask(command);
  Log(absl::StrCat(process.name, ": ", command, " -> ", answer));
  EXPECT_NE(answer, "") << process.name << " does not answer: " << command;
  return answer;
}

std::string RandomProcesses::AnyConfig(const Process& process) {
  const int64_t chunk_bytes = AnyOf({4 << 10, 16 << 10, 256 << 10});
  return absl::StrCat(
      R"({"chunk_bytes": )", chunk_bytes, R"(, "arena_bytes": )",
      chunk_bytes * AnyOf({16, 64, 128}), R"(, "credits_per_transfer": )", AnyOf({2, 16, 256}),
      R"(, "checksum": )", OneIn(3) ? "true" : "false", R"(, "lanes": )", 1 + UpTo(kMostLanes - 1),
      R"(, "copy_threads": )", 1 + UpTo(1),
      R"(, "heartbeat_interval_ms": 200, "heartbeat_timeout_ms": 1000)",
      R"(, "connect_timeout_ms": 2000, "publish_grace_ms": 200)", MoreConfig(process), "}");
}

void RandomProcesses::Start(Process& process) {
  process.pages_are = AnyPages();
  const int64_t num_pages = process.PagesOf(kTokens);
  process.free = FreePages(num_pages);
  process.stopped_until.reset();
  ChildPeer::Options options = PeerOptions(process.role, AnyConfig(process), num_pages);
  options.seed = kUnwritten;
  options.netns = NetnsOf(process);
  options.pages_are = process.pages_are;
  process.peer = std::make_unique<ChildPeer>(options);
  Log(absl::StrCat(process.name, " begins: ", options.config_json, " ",
                   process.pages_are.ToString()));
  OnStart(process);
  process.first_fds = process.peer->num_fds();
  if (IsSource(process)) return;
  process.held.assign(num_pages, "");
  Remember(process, process.free.all());
}

std::string RandomProcesses::SamePort(const Process& process) const {
  if (!IsSource(process)) return "";
  // Below those that the system gives away; another test that runs now has another process id.
  constexpr int64_t kFirstPort = 10000, kPortsEach = 8, kTests = 2500;
  const int64_t port = kFirstPort + getpid() % kTests * kPortsEach + (&process - sources_.data());
  return absl::StrCat(R"(, "listen_port": )", port);
}

void RandomProcesses::ConnectToSources(Process& process) {
  if (IsSource(process)) return;
  std::vector<std::string> addresses;
  for (const Process& source : sources_) addresses.push_back(source.peer->address());
  EXPECT_EQ(Ask(process, "connect " + absl::StrJoin(addresses, ",")), "OK");
}

RandomProcesses::Process* RandomProcesses::AnyRunning(std::vector<Process>& processes) {
  Process& process = AnyOf(processes);
  return process.stopped_until ? nullptr : &process;
}

std::vector<RandomProcesses::Process*> RandomProcesses::All() {
  std::vector<Process*> all;
  for (Process& process : sources_) all.push_back(&process);
  for (Process& process : targets_) all.push_back(&process);
  return all;
}

void RandomProcesses::Stop() {
  std::vector<Process*> all = All();
  Process& process = *AnyOf(all);
  if (process.stopped_until) return;
  const int64_t ms = 10 + AnyMs(kLongestStopMs);
  process.peer->Signal(SIGSTOP);
  Log(absl::StrCat(process.name, " stops for ", ms));
  process.stopped_until = DeadlineInMs(ms);
}

void RandomProcesses::Continue(Deadline now) {
  for (Process* const process : All()) {
    if (!process->stopped_until || now < *process->stopped_until) continue;
    Log(process->name + " goes on");
    process->peer->Signal(SIGCONT);
    process->stopped_until.reset();
  }
}

void RandomProcesses::EndAny() {
  std::vector<Process*> all = All();
  Process& process = *AnyOf(all);
  if (process.stopped_until || OneIn(2)) {
    Log(process.name + " is killed");
    process.peer->Kill();
  } else {
    Log(process.name + " quits");
    EXPECT_TRUE(process.peer->Quit()) << process.name;
  }
  OnEnd(process);
  Start(process);
}

void RandomProcesses::Quit(std::vector<Process>& processes) {
  for (Process& process : processes) EXPECT_TRUE(process.peer->Quit()) << process.name;
}

void RandomProcesses::ExpectAtRest(Process& process, const std::vector<std::string>& gauges) {
  for (const std::string& gauge : gauges) {
    EXPECT_TRUE(WaitFor([&] { return process.peer->Metric(gauge) == 0; }, Soon()))
        << process.name << ": " << gauge << " is " << process.peer->Metric(gauge);
  }
}

void RandomProcesses::ExpectNotLate(Deadline due, const std::string& what) {
  EXPECT_LT(Clock::now(), due + std::chrono::milliseconds(kSlackMs)) << what << " hangs";
}

// All they had dealings with are gone, and what was opened for them is closed.
void RandomProcesses::ExpectNothingOfPeers(std::vector<Process>& processes) {
  // A UCX worker keeps the timer that it begins to need with its first peer; and of nodes that do
  // not listen, ZeroMQ begins the two threads with that one, each of which has two.
  const bool ucx = PathUnderTest() == TestPath::kUcx || PathUnderTest() == TestPath::kDirect;
  for (Process& process : processes) {
    ExpectAtRest(process, {"peers", "peers_mapped"});
    const int64_t silent = process.role == "consumer"       ? 1
                           : process.role == "store-client" ? static_cast<int64_t>(sources_.size())
                                                            : 0;
    const int64_t of_libraries = 4 * silent + (ucx ? kMostLanes * std::max<int64_t>(1, silent) : 0);
    const int64_t most = process.first_fds + of_libraries;
    EXPECT_TRUE(WaitFor([&] { return process.peer->num_fds() <= most; }, Soon()))
        << process.name << " had " << process.first_fds << " files open, and has "
        << process.peer->num_fds();
  }
}

// --- What pages hold ---

std::string RandomProcesses::Listed(const Pages& pages) { return absl::StrJoin(pages, ","); }

void RandomProcesses::Write(Process& source, uint64_t seed, const Pages& pages, int64_t first,
                            int64_t end) {
  if (first == end) return;
  EXPECT_EQ(Ask(source, absl::StrCat("write ", seed, " ", first, " ", end, " ", Listed(pages))),
            "OK");
}

void RandomProcesses::GiveBackSpent(Process& source, Pages& pages) {
  Write(source, kUnwritten, pages, 0, kPeerLayers);
  source.free.GiveBack(pages);
  pages.clear();
}

std::string RandomProcesses::Holds(Process& target, uint64_t seed, const Pages& pages,
                                   int64_t first_page, int64_t end_layer, int64_t tokens,
                                   const std::string& half) {
  return target.peer->Ask(absl::StrCat("holds ", seed, " ", first_page, " ", end_layer, " ",
                                       Listed(pages), " ", tokens, half.empty() ? "" : " ", half));
}

std::vector<std::string> RandomProcesses::Hashes(Process& process, const Pages& pages) {
  std::vector<std::string> hashes =
      absl::StrSplit(process.peer->Ask("hash " + Listed(pages)), ',', absl::SkipEmpty());
  EXPECT_EQ(hashes.size(), pages.size()) << process.name;
  hashes.resize(pages.size());
  return hashes;
}

void RandomProcesses::Remember(Process& target, const Pages& pages) {
  const std::vector<std::string> hashes = Hashes(target, pages);
  for (size_t i = 0; i < pages.size(); ++i) target.held[pages[i]] = hashes[i];
}

void RandomProcesses::ExpectAsRemembered(Process& target, const Pages& pages) {
  const std::vector<std::string> hashes = Hashes(target, pages);
  for (size_t i = 0; i < pages.size(); ++i) {
    EXPECT_EQ(hashes[i], target.held[pages[i]])
        << target.name << ": page " << pages[i] << " was written when nothing was to come";
  }
}

std::optional<RandomProcesses::Pages> RandomProcesses::TakeToFill(Process& target, int64_t count) {
  if (!target.free.Has(count)) return std::nullopt;
  Pages pages = target.free.Take(count, random_);
  ExpectAsRemembered(target, pages);
  return pages;
}

void RandomProcesses::GiveBackFilled(Process& target, const Pages& pages) {
  Remember(target, pages);
  target.free.GiveBack(pages);
}

void RandomProcesses::RunAtRandom(const std::string& source_role, int sources,
                                  const std::string& target_role, int targets) {
  const int64_t seed = FromEnvironment("KVFERRY_RANDOM_SEED", 1);
  const Deadline end = DeadlineInMs(FromEnvironment("KVFERRY_RANDOM_SECONDS", 5) * 1000);
  random_.seed(static_cast<uint64_t>(seed));
  for (int i = 0; i < sources; ++i) {
    sources_.push_back({source_role, absl::StrCat(source_role, " ", i)});
  }
  for (int i = 0; i < targets; ++i) {
    targets_.push_back({target_role, absl::StrCat(target_role, " ", i)});
  }
  for (Process* const process : All()) Start(*process);
  Deadline next_break = DeadlineInMs(500), next_end = DeadlineInMs(1000);
  while (Clock::now() < end && !HasFailure()) {
    Mend(Clock::now());
    Step();
    if (Clock::now() >= next_break) {
      Break();
      next_break = DeadlineInMs(100 + AnyMs(kLongestBetweenBreaksMs));
    }
    if (Clock::now() >= next_end) {
      EndAny();
      next_end = DeadlineInMs(200 + AnyMs(kLongestBetweenEndsMs));
    }
  }
  Mend(Deadline::max());
  if (!HasFailure()) Drain();
  if (HasFailure()) return;
  for (Process& target : targets_) ExpectAsRemembered(target, target.free.all());
  const bool sources_first = OneIn(2);
  Quit(sources_first ? sources_ : targets_);
  ExpectNothingOfPeers(sources_first ? targets_ : sources_);
  Quit(sources_first ? targets_ : sources_);
  for (const auto& [how, count] : ends_) std::cerr << how << ": " << count << "\n";
}

}  // namespace kvferry
