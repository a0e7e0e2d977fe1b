#include "tests/support/random_peers.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <numeric>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "tests/support/test_config.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

constexpr int kPrefills = 2, kDecodes = 3;
constexpr int64_t kPages = 96, kMostPages = 24;          // Of a process's pool, and of a request.
constexpr int64_t kMostRequests = 12, kMostFetches = 8;  // Of a process, at once.
constexpr int64_t kMostLanes = 3;
constexpr int64_t kLongestLeaseMs = 4000, kLongestFetchMs = 8000, kLongestStopMs = 2500;
// By which a wait may end late: the machine is busy, and so is the one who asks.
constexpr int64_t kSlackMs = 10000;
constexpr uint64_t kUnwritten = 1;  // The seed of what pages hold that are not a request's yet.

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  int64_t value = otherwise;
  if (text != nullptr && !absl::SimpleAtoi(text, &value)) ADD_FAILURE() << name << "=" << text;
  return value;
}

std::string Listed(const std::vector<int64_t>& pages) { return absl::StrJoin(pages, ","); }

}  // namespace

RandomPeers::FreePages::FreePages() : free_(kPages) { std::iota(free_.begin(), free_.end(), 0); }

RandomPeers::Pages RandomPeers::FreePages::Take(int64_t count, std::mt19937_64& random) {
  std::shuffle(free_.begin(), free_.end(), random);
  const Pages taken(free_.end() - count, free_.end());
  free_.resize(free_.size() - count);
  return taken;
}

RandomPeers::Process::Process(const std::string& its_role, int index)
    : role(its_role), name(absl::StrCat(role, " ", index)) {}

void RandomPeers::TearDown() {
  if (!HasFailure()) return;
  for (const std::string& line : log_) std::cerr << line << "\n";
}

void RandomPeers::Log(const std::string& line) {
  constexpr size_t kMostLines = 400;
  const auto ms = static_cast<int64_t>(SecondsBetween(begin_, Clock::now()) * 1000);
  log_.push_back(absl::StrCat(ms, " ", line));
  if (log_.size() > kMostLines) log_.pop_front();
}

std::string RandomPeers::Ask(Process& process, const std::string& command) {
  const std::string answer = process.peer->Ask(command);
  Log(absl::StrCat(process.name, ": ", command, " -> ", answer));
  EXPECT_NE(answer, "") << process.name << " does not answer: " << command;
  return answer;
}

std::string RandomPeers::AnyConfig(const std::string& role) {
  const int64_t chunk_bytes = AnyOf({4 << 10, 16 << 10, 256 << 10});
  return absl::StrCat(
      R"({"chunk_bytes": )", chunk_bytes, R"(, "arena_bytes": )",
      chunk_bytes * AnyOf({16, 64, 128}), R"(, "credits_per_transfer": )", AnyOf({2, 16, 256}),
      R"(, "checksum": )", OneIn(3) ? "true" : "false", R"(, "lanes": )", 1 + UpTo(kMostLanes - 1),
      R"(, "copy_threads": )", 1 + UpTo(1),
      R"(, "heartbeat_interval_ms": 200, "heartbeat_timeout_ms": 1000)",
      R"(, "connect_timeout_ms": 2000, "publish_grace_ms": 200)", MoreConfig(role), "}");
}

void RandomPeers::Start(Process& process) {
  process.free = {};
  process.stopped_until.reset();
  ChildPeer::Options options = PeerOptions(process.role, AnyConfig(process.role), kPages);
  options.seed = kUnwritten;
  options.netns = NetnsOf(process.role);
  process.peer = std::make_unique<ChildPeer>(options);
  process.first_fds = process.peer->num_fds();
  Log(absl::StrCat(process.name, " begins: ", options.config_json));
  if (process.role == "prefill") return;
  process.held.assign(kPages, "");
  Remember(process, process.free.all());
}

RandomPeers::Process* RandomPeers::AnyRunning(std::vector<Process>& processes) {
  Process& process = AnyOf(processes);
  return process.stopped_until ? nullptr : &process;
}

RandomPeers::RequestPtr RandomPeers::AnyRequest() {
  if (requests_.empty()) return nullptr;
  const RequestPtr& request = AnyOf(requests_);
  return request->at->stopped_until ? nullptr : request;
}

RandomPeers::Fetch* RandomPeers::AnyFetch() {
  if (fetches_.empty()) return nullptr;
  Fetch& fetch = AnyOf(fetches_);
  return fetch.at->stopped_until ? nullptr : &fetch;
}

int64_t RandomPeers::RequestsOf(const Process& process) const {
  return std::count_if(requests_.begin(), requests_.end(),
                       [&](const RequestPtr& request) { return request->at == &process; });
}

int64_t RandomPeers::FetchesOf(const Process& process) const {
  return std::count_if(fetches_.begin(), fetches_.end(),
                       [&](const Fetch& fetch) { return fetch.at == &process; });
}

std::vector<RandomPeers::Process*> RandomPeers::All() {
  std::vector<Process*> all;
  for (Process& process : prefills_) all.push_back(&process);
  for (Process& process : decodes_) all.push_back(&process);
  return all;
}

// --- What pages hold ---

std::vector<std::string> RandomPeers::Hashes(Process& process, const Pages& pages) {
  std::vector<std::string> hashes = absl::StrSplit(process.peer->Ask("hash " + Listed(pages)), ',');
  EXPECT_EQ(hashes.size(), pages.size()) << process.name;
  hashes.resize(pages.size());
  return hashes;
}

void RandomPeers::Remember(Process& process, const Pages& pages) {
  const std::vector<std::string> hashes = Hashes(process, pages);
  for (size_t i = 0; i < pages.size(); ++i) process.held[pages[i]] = hashes[i];
}

void RandomPeers::ExpectAsRemembered(Process& process, const Pages& pages) {
  const std::vector<std::string> hashes = Hashes(process, pages);
  for (size_t i = 0; i < pages.size(); ++i) {
    EXPECT_EQ(hashes[i], process.held[pages[i]])
        << process.name << ": page " << pages[i] << " was written after its fetch had ended";
  }
}

testing::AssertionResult RandomPeers::HoldASource(const Fetch& fetch, const Pages& pages,
                                                  int64_t first_page, int64_t end_layer) {
  auto result = testing::AssertionFailure() << fetch.at->name << " fetch " << fetch.number;
  for (const RequestPtr& request : fetch.sources) {
    const std::string answer = fetch.at->peer->Ask(
        absl::StrCat("holds ", request->seed, " ", first_page, " ", end_layer, " ", Listed(pages)));
    if (answer == "OK") return testing::AssertionSuccess();
    result << "; " << answer;
  }
  return result;
}

// --- What a prefill process does ---

void RandomPeers::WriteLayers(const Request& request, uint64_t seed, int64_t first, int64_t end) {
  if (first == end) return;
  EXPECT_EQ(Ask(*request.at,
                absl::StrCat("write ", seed, " ", first, " ", end, " ", Listed(request.pages))),
            "OK");
}

bool RandomPeers::TakePages(Request& request) {
  if (!request.at->free.Has(request.num_pages)) return false;
  request.pages = request.at->free.Take(request.num_pages, random_);
  request.ready_layers = OneIn(2) ? kPeerLayers : UpTo(kPeerLayers);
  WriteLayers(request, request.seed, 0, request.ready_layers);
  WriteLayers(request, kUnwritten, request.ready_layers, kPeerLayers);
  return true;
}

void RandomPeers::GivePagesBack(Request& request) {
  request.at->free.GiveBack(request.pages);
  WriteLayers(request, kUnwritten, 0, kPeerLayers);
  request.pages.clear();
}

RandomPeers::RequestPtr RandomPeers::NewRequest(Process& process) {
  auto request = std::make_shared<Request>();
  request->at = &process;
  request->seed = ++last_seed_;
  request->num_pages = 1 + UpTo(kMostPages - 1);
  return request;
}

std::string RandomPeers::PublishCommand(const Request& request) {
  return absl::StrCat("publish ", Listed(request.pages), " ", request.ready_layers, " ",
                      100 + AnyMs(kLongestLeaseMs));
}

void RandomPeers::Add(const RequestPtr& request) {
  request->ends_by = DeadlineInMs(kLongestLeaseMs + kLongestFetchMs + kSlackMs);
  requests_.push_back(request);
}

void RandomPeers::Forget(const RequestPtr& request) {
  constexpr size_t kMostPast = 8;
  requests_.erase(std::find(requests_.begin(), requests_.end(), request));
  if (request->push.empty() && OneIn(2)) past_tickets_.push_back(request);
  if (past_tickets_.size() > kMostPast) past_tickets_.erase(past_tickets_.begin());
}

void RandomPeers::Publish() {
  Process* const process = AnyRunning(prefills_);
  if (process == nullptr || RequestsOf(*process) >= kMostRequests) return;
  const RequestPtr request = NewRequest(*process);
  if (OneIn(4)) return Announce(request);
  if (!TakePages(*request)) return;
  request->ticket = Ask(*process, PublishCommand(*request));
  request->lease = LeaseOf(request->ticket);
  ASSERT_NE(request->lease, "");
  Add(request);
}

// With a ticket that both sides have agreed on.
void RandomPeers::Announce(const RequestPtr& request) {
  request->lease = absl::StrCat(absl::Hex(random_() | 1));
  request->ticket = absl::StrCat("kvferry1|", request->at->peer->address(), "|0|", request->lease,
                                 "|", request->num_pages, "|0");
  Add(request);
}

void RandomPeers::PublishAnnounced() {
  const RequestPtr request = AnyRequest();
  if (request == nullptr || !request->pages.empty() || !TakePages(*request)) return;
  const std::string answer =
      Ask(*request->at, absl::StrCat(PublishCommand(*request), " ", request->lease));
  EXPECT_EQ(LeaseOf(answer), request->lease) << answer;
  request->ends_by = DeadlineInMs(kLongestLeaseMs + kLongestFetchMs + kSlackMs);
}

void RandomPeers::Push() {
  Fetch* const fetch = AnyFetch();
  Process* const process = AnyRunning(prefills_);
  if (fetch == nullptr || process == nullptr || fetch->receive_ticket.empty()) return;
  if (RequestsOf(*process) >= kMostRequests) return;
  const RequestPtr request = NewRequest(*process);
  request->num_pages = fetch->first_page + static_cast<int64_t>(fetch->pages.size());
  if (!TakePages(*request)) return;
  fetch->sources.push_back(request);
  const std::string answer =
      Ask(*process, absl::StrCat("push ", fetch->receive_ticket, " ", Listed(request->pages), " ",
                                 request->ready_layers, " ", 20 + AnyMs(kLongestFetchMs)));
  const std::vector<std::string> words = absl::StrSplit(answer, ' ');
  ASSERT_EQ(words.size(), 2) << answer;
  request->push = words[0];
  request->lease = words[1];
  Add(request);
}

void RandomPeers::ReadyLayers() {
  const RequestPtr request = AnyRequest();
  if (request == nullptr || request->pages.empty() || request->ready_layers == kPeerLayers) return;
  const int64_t first = request->ready_layers;
  request->ready_layers += 1 + UpTo(kPeerLayers - first - 1);
  WriteLayers(*request, request->seed, first, request->ready_layers);
  // Refused when the lease has ended meanwhile.
  Ask(*request->at, absl::StrCat("layer ", request->lease, " ", request->ready_layers - 1));
}

void RandomPeers::TakeBack() {
  const RequestPtr request = AnyRequest();
  if (request == nullptr) return;
  if (request->pages.empty()) {
    EXPECT_EQ(Ask(*request->at, "give_up " + request->lease), "OK");
    return Forget(request);
  }
  if (!request->push.empty()) {
    EXPECT_EQ(Ask(*request->at, "cancel_push " + request->push), "OK");
    return;
  }
  // Refused when the lease has ended meanwhile.
  if (OneIn(2)) {
    if (Ask(*request->at, "unpublish " + request->lease) == "OK") GivePagesBack(*request);
    return;
  }
  if (Ask(*request->at, "release " + request->lease) != "OK") return;
  EXPECT_NE(Ask(*request->at, absl::StrCat("ended ", request->lease, " 0")), "live");
  GivePagesBack(*request);
  Forget(request);
}

// --- What a decode process does ---

// Of a request of so many pages, all or those from one on, if the process has room for them.
std::optional<RandomPeers::Fetch> RandomPeers::FetchOf(Process& process, int64_t num_pages) {
  Fetch fetch;
  fetch.at = &process;
  fetch.first_page = OneIn(2) ? 0 : UpTo(num_pages - 1);
  const int64_t count = num_pages - fetch.first_page;
  if (FetchesOf(process) >= kMostFetches || !process.free.Has(count)) return std::nullopt;
  fetch.pages = process.free.Take(count, random_);
  ExpectAsRemembered(process, fetch.pages);
  return fetch;
}

void RandomPeers::Begin(const std::string& command, Fetch fetch) {
  const int64_t timeout_ms = 20 + AnyMs(kLongestFetchMs);
  const std::string answer = Ask(*fetch.at, absl::StrCat(command, " ", Listed(fetch.pages), " ",
                                                         timeout_ms, " ", fetch.first_page));
  fetch.due = DeadlineInMs(timeout_ms);
  const std::vector<std::string> words = absl::StrSplit(answer, ' ');
  int64_t number = 0;
  ASSERT_TRUE(absl::SimpleAtoi(words[0], &number)) << answer;
  fetch.number = words[0];
  if (words.size() == 2) fetch.receive_ticket = words[1];
  fetches_.push_back(std::move(fetch));
}

void RandomPeers::FetchOne() {
  Process* const process = AnyRunning(decodes_);
  std::vector<RequestPtr>& requests =
      !past_tickets_.empty() && OneIn(10) ? past_tickets_ : requests_;
  if (process == nullptr || requests.empty()) return;
  const RequestPtr request = AnyOf(requests);
  if (!request->push.empty()) return;
  std::optional<Fetch> fetch = FetchOf(*process, request->num_pages);
  if (!fetch) return;
  fetch->sources.push_back(request);
  Begin("fetch " + request->ticket, *std::move(fetch));
}

void RandomPeers::Receive() {
  Process* const process = AnyRunning(decodes_);
  if (process == nullptr) return;
  std::optional<Fetch> fetch = FetchOf(*process, 1 + UpTo(kMostPages - 1));
  if (fetch) Begin("receive", *std::move(fetch));
}

void RandomPeers::Cancel() {
  Fetch* const fetch = AnyFetch();
  if (fetch == nullptr) return;
  EXPECT_EQ(Ask(*fetch->at, "cancel " + fetch->number), "OK");
}

void RandomPeers::LookAtLayers() {
  Fetch* const fetch = AnyFetch();
  if (fetch == nullptr) return;
  int64_t layers = 0;
  ASSERT_TRUE(absl::SimpleAtoi(Ask(*fetch->at, "layers " + fetch->number), &layers));
  if (layers == 0) return;
  EXPECT_TRUE(HoldASource(*fetch, fetch->pages, fetch->first_page, layers));
}

// --- Ends ---

bool RandomPeers::HasEnded(Fetch& fetch) {
  if (fetch.at->stopped_until) return false;
  const std::string status = fetch.at->peer->Wait(fetch.number, 0);
  if (status == "PENDING") {
    EXPECT_LT(Clock::now(), fetch.due + std::chrono::milliseconds(kSlackMs))
        << fetch.at->name << " fetch " << fetch.number << " hangs";
    return false;
  }
  Log(absl::StrCat(fetch.at->name, " fetch ", fetch.number, " ends: ", status));
  ++ends_[status.substr(0, status.find(':'))];
  std::set<std::string> missing = absl::StrSplit(Ask(*fetch.at, "missing " + fetch.number), ' ');
  missing.erase("");
  EXPECT_EQ(missing.empty(), status == "OK") << status;
  for (size_t i = 0; i < fetch.pages.size(); ++i) {
    if (missing.contains(absl::StrCat(fetch.pages[i]))) continue;
    const int64_t page = fetch.first_page + static_cast<int64_t>(i);
    EXPECT_TRUE(HoldASource(fetch, {fetch.pages[i]}, page, kPeerLayers)) << status;
  }
  Remember(*fetch.at, fetch.pages);
  fetch.at->free.GiveBack(fetch.pages);
  return true;
}

bool RandomPeers::HasEnded(const RequestPtr& request) {
  if (request->at->stopped_until || request->pages.empty()) return false;
  const std::string ended = request->at->peer->Ask(absl::StrCat("ended ", request->lease, " 0"));
  if (ended == "live") {
    EXPECT_LT(Clock::now(), request->ends_by)
        << request->at->name << " lease " << request->lease << " does not end";
    return false;
  }
  Log(absl::StrCat(request->at->name, " lease ", request->lease, " ends: ", ended));
  ++ends_[ended];
  if (!request->push.empty()) {
    const std::string pushed = Ask(*request->at, absl::StrCat("pushed ", request->push, " 5000"));
    // All may have arrived, and nobody have said so in time; not the other way round.
    EXPECT_TRUE(pushed != "OK" || ended == "fetched") << ended;
    EXPECT_NE(pushed, "PENDING");
  }
  GivePagesBack(*request);
  return true;
}

void RandomPeers::LookForEnds() {
  std::erase_if(fetches_, [&](Fetch& fetch) { return HasEnded(fetch); });
  const std::vector<RequestPtr> requests = requests_;
  for (const RequestPtr& request : requests) {
    if (HasEnded(request)) Forget(request);
  }
}

// --- Faults ---

void RandomPeers::Stop() {
  const std::vector<Process*> all = All();
  Process& process = *all[UpTo(static_cast<int64_t>(all.size()) - 1)];
  if (process.stopped_until) return;
  const int64_t ms = 10 + AnyMs(kLongestStopMs);
  process.peer->Signal(SIGSTOP);
  Log(absl::StrCat(process.name, " stops for ", ms));
  process.stopped_until = DeadlineInMs(ms);
}

void RandomPeers::Continue(Deadline now) {
  for (Process* const process : All()) {
    if (!process->stopped_until || now < *process->stopped_until) continue;
    Log(process->name + " goes on");
    process->peer->Signal(SIGCONT);
    process->stopped_until.reset();
  }
}

void RandomPeers::EndProcess() {
  const std::vector<Process*> all = All();
  Process& process = *all[UpTo(static_cast<int64_t>(all.size()) - 1)];
  if (process.stopped_until || OneIn(2)) {
    Log(process.name + " is killed");
    process.peer->Kill();
  } else {
    Log(process.name + " quits");
    EXPECT_TRUE(process.peer->Quit()) << process.name;
  }
  std::erase_if(fetches_, [&](const Fetch& fetch) { return fetch.at == &process; });
  std::erase_if(requests_, [&](const RequestPtr& request) { return request->at == &process; });
  Start(process);
}

void RandomPeers::Quit(std::vector<Process>& processes) {
  for (Process& process : processes) EXPECT_TRUE(process.peer->Quit()) << process.name;
}

// --- All of it ---

void RandomPeers::Step() {
  struct Action {
    int64_t weight;
    void (RandomPeers::*act)();
  };
  static constexpr std::array<Action, 11> kActions = {{
      {100, &RandomPeers::Publish},
      {60, &RandomPeers::PublishAnnounced},
      {60, &RandomPeers::Push},
      {250, &RandomPeers::ReadyLayers},
      {5, &RandomPeers::TakeBack},
      {120, &RandomPeers::FetchOne},
      {50, &RandomPeers::Receive},
      {3, &RandomPeers::Cancel},
      {50, &RandomPeers::LookAtLayers},
      {100, &RandomPeers::LookForEnds},
      {2, &RandomPeers::Break},
  }};
  int64_t left = 0;
  for (const Action& action : kActions) left += action.weight;
  left = UpTo(left - 1);
  for (const Action& action : kActions) {
    left -= action.weight;
    if (left < 0) return (this->*action.act)();
  }
}

void RandomPeers::Drain() {
  Mend(Deadline::max());
  const std::vector<RequestPtr> requests = requests_;
  for (const RequestPtr& request : requests) {
    if (!request->pages.empty()) continue;
    EXPECT_EQ(Ask(*request->at, "give_up " + request->lease), "OK");
    Forget(request);
  }
  // Each says for itself that it hangs, before this does.
  const auto ended = [&] {
    LookForEnds();
    return (fetches_.empty() && requests_.empty()) || HasFailure();
  };
  EXPECT_TRUE(WaitFor(ended, DeadlineInMs(kLongestLeaseMs + kLongestFetchMs + 2 * kSlackMs)));
}

void RandomPeers::ExpectAtRest(Process& process, const std::vector<std::string>& gauges) {
  for (const std::string& gauge : gauges) {
    EXPECT_TRUE(WaitFor([&] { return process.peer->Metric(gauge) == 0; }, Soon()))
        << process.name << ": " << gauge << " is " << process.peer->Metric(gauge);
  }
}

void RandomPeers::ExpectServes(Process& prefill, Process& decode) {
  const RequestPtr request = NewRequest(prefill);
  ASSERT_TRUE(TakePages(*request));
  WriteLayers(*request, request->seed, request->ready_layers, kPeerLayers);
  const std::string ticket = prefill.peer->Publish(request->pages, kPeerLayers, 60000);
  Fetch fetch;
  fetch.at = &decode;
  fetch.sources = {request};
  fetch.pages = decode.free.Take(request->num_pages, random_);
  ExpectAsRemembered(decode, fetch.pages);
  fetch.number = decode.peer->Fetch(ticket, fetch.pages, 20000);
  EXPECT_EQ(decode.peer->Wait(fetch.number, 20000), "OK") << prefill.name << " to " << decode.name;
  EXPECT_TRUE(HoldASource(fetch, fetch.pages, 0, kPeerLayers));
  EXPECT_EQ(Ask(prefill, absl::StrCat("ended ", LeaseOf(ticket), " 20000")), "fetched");
  Remember(decode, fetch.pages);
  decode.free.GiveBack(fetch.pages);
  GivePagesBack(*request);
}

// All they had dealings with are gone, and what was opened for them is closed.
void RandomPeers::ExpectNothingOfPeers(std::vector<Process>& processes) {
  // A UCX worker keeps the timer that it begins to need with its first peer.
  const bool ucx = PathUnderTest() == TestPath::kUcx || PathUnderTest() == TestPath::kDirect;
  for (Process& process : processes) {
    ExpectAtRest(process, {"peers", "peers_mapped"});
    const int64_t most = process.first_fds + (ucx ? kMostLanes : 0);
    EXPECT_TRUE(WaitFor([&] { return process.peer->num_fds() <= most; }, Soon()))
        << process.name << " had " << process.first_fds << " files open, and has "
        << process.peer->num_fds();
  }
}

void RandomPeers::Run() {
  const int64_t seed = FromEnvironment("KVFERRY_RANDOM_SEED", 1);
  const Deadline end = DeadlineInMs(FromEnvironment("KVFERRY_RANDOM_SECONDS", 8) * 1000);
  random_.seed(static_cast<uint64_t>(seed));
  for (int i = 0; i < kPrefills; ++i) prefills_.emplace_back("prefill", i);
  for (int i = 0; i < kDecodes; ++i) decodes_.emplace_back("receiver", i);
  for (Process* const process : All()) Start(*process);
  Deadline next_end = DeadlineInMs(1000);
  while (Clock::now() < end && !HasFailure()) {
    Mend(Clock::now());
    Step();
    if (Clock::now() < next_end) continue;
    EndProcess();
    next_end = DeadlineInMs(200 + AnyMs(5000));
  }
  if (!HasFailure()) Drain();
  if (HasFailure()) return;
  for (Process& process : prefills_) {
    ExpectAtRest(process, {"transfers_active", "arena_chunks_taken", "leases_live"});
  }
  for (Process& process : decodes_) {
    ExpectAtRest(process, {"fetches_active"});
    ExpectAsRemembered(process, process.free.all());
  }
  for (Process& prefill : prefills_) {
    for (Process& decode : decodes_) ExpectServes(prefill, decode);
  }
  const bool prefills_first = OneIn(2);
  Quit(prefills_first ? prefills_ : decodes_);
  ExpectNothingOfPeers(prefills_first ? decodes_ : prefills_);
  Quit(prefills_first ? decodes_ : prefills_);
  for (const auto& [how, count] : ends_) std::cerr << how << ": " << count << "\n";
  EXPECT_GT(ends_["OK"], 0);
}

}  // namespace kvferry
