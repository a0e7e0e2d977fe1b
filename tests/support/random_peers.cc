#include "tests/support/random_peers.h"

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

constexpr int64_t kMostTokens = 24 * 16;                 // Of a request.
constexpr int64_t kMostRequests = 12, kMostFetches = 8;  // Of a process, at once.
constexpr int64_t kLongestLeaseMs = 2000, kLongestFetchMs = 4000;

// When a lease has ended that is published now: a fetch whose session ends has connect_timeout_ms
// (2,000) to go on over another one, or for somebody else to come meanwhile.
Deadline EndOfLease() { return DeadlineInMs(kLongestLeaseMs + 2000 + 2 * kLongestFetchMs); }

}  // namespace

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

// --- What a prefill process does ---

bool RandomPeers::TakePages(Request& request) {
  if (!request.at->free.Has(request.num_pages)) return false;
  request.pages = request.at->free.Take(request.num_pages, random_);
  request.ready_layers = OneIn(2) ? kPeerLayers : UpTo(kPeerLayers);
  Write(*request.at, request.seed, request.pages, 0, request.ready_layers);
  Write(*request.at, kUnwritten, request.pages, request.ready_layers, kPeerLayers);
  return true;
}

int64_t RandomPeers::AnyTokens() { return 1 + UpTo(kMostTokens - 1); }

RandomPeers::RequestPtr RandomPeers::NewRequest(Process& process, int64_t num_tokens) {
  auto request = std::make_shared<Request>();
  request->at = &process;
  request->seed = ++last_seed_;
  request->num_pages = process.PagesOf(num_tokens);
  request->num_tokens = request->num_pages * process.pages_are.page_size;
  return request;
}

std::string RandomPeers::PublishCommand(const Request& request) {
  return absl::StrCat("publish ", Listed(request.pages), " ", request.ready_layers, " ",
                      100 + AnyMs(kLongestLeaseMs));
}

void RandomPeers::Add(const RequestPtr& request) {
  request->due = EndOfLease();
  requests_.push_back(request);
}

void RandomPeers::Forget(const RequestPtr& request) {
  constexpr size_t kMostPast = 8;
  requests_.erase(std::find(requests_.begin(), requests_.end(), request));
  if (request->push.empty() && OneIn(2)) past_tickets_.push_back(request);
  if (past_tickets_.size() > kMostPast) past_tickets_.erase(past_tickets_.begin());
}

void RandomPeers::Publish() {
  Process* const process = AnyRunning(sources_);
  if (process == nullptr || RequestsOf(*process) >= kMostRequests) return;
  const RequestPtr request = NewRequest(*process, AnyTokens());
  request->by_halves = OneIn(3);
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
                                 "|", request->num_pages, "|", request->num_tokens);
  Add(request);
}

void RandomPeers::PublishAnnounced() {
  const RequestPtr request = AnyRequest();
  if (request == nullptr || !request->pages.empty() || !TakePages(*request)) return;
  const std::string answer =
      Ask(*request->at, absl::StrCat(PublishCommand(*request), " ", request->lease));
  EXPECT_EQ(LeaseOf(answer), request->lease) << answer;
  request->due = EndOfLease();
}

void RandomPeers::Push() {
  Fetch* const fetch = AnyFetch();
  Process* const process = AnyRunning(sources_);
  if (fetch == nullptr || process == nullptr || fetch->receive_ticket.empty()) return;
  if (RequestsOf(*process) >= kMostRequests) return;
  const int64_t pages = fetch->first_page + static_cast<int64_t>(fetch->pages.size());
  const RequestPtr request = NewRequest(*process, pages * fetch->at->pages_are.page_size);
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
  Write(*request->at, request->seed, request->pages, first, request->ready_layers);
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
    if (Ask(*request->at, "unpublish " + request->lease) == "OK")
      GiveBackSpent(*request->at, request->pages);
    return;
  }
  if (Ask(*request->at, "release " + request->lease) != "OK") return;
  EXPECT_NE(Ask(*request->at, absl::StrCat("ended ", request->lease, " 0")), "live");
  GiveBackSpent(*request->at, request->pages);
  Forget(request);
}

// --- What a decode process does ---

// Of a request of so many tokens, all pages or those from one on, if the process has room for them.
std::optional<RandomPeers::Fetch> RandomPeers::FetchOf(Process& process, int64_t num_tokens) {
  const int64_t num_pages = process.PagesOf(num_tokens);
  Fetch fetch;
  fetch.at = &process;
  fetch.first_page = OneIn(2) ? 0 : UpTo(num_pages - 1);
  if (CountAt(fetches_, process) >= kMostFetches) return std::nullopt;
  const std::optional<Pages> pages = TakeToFill(process, num_pages - fetch.first_page);
  if (!pages) return std::nullopt;
  fetch.pages = *pages;
  return fetch;
}

void RandomPeers::Begin(const std::string& command, Fetch fetch) {
  const int64_t timeout_ms = 20 + AnyMs(kLongestFetchMs);
  const std::string answer =
      Ask(*fetch.at, absl::StrCat(command, " ", Listed(fetch.pages), " ", timeout_ms, " ",
                                  fetch.first_page, fetch.half.empty() ? "" : " ", fetch.half));
  fetch.due = DeadlineInMs(timeout_ms);
  const std::vector<std::string> words = absl::StrSplit(answer, ' ');
  int64_t number = 0;
  ASSERT_TRUE(absl::SimpleAtoi(words[0], &number)) << answer;
  fetch.number = words[0];
  if (words.size() == 2) fetch.receive_ticket = words[1];
  fetches_.push_back(std::move(fetch));
}

void RandomPeers::FetchOne() {
  Process* const process = AnyRunning(targets_);
  std::vector<RequestPtr>& requests =
      !past_tickets_.empty() && OneIn(10) ? past_tickets_ : requests_;
  if (process == nullptr || requests.empty()) return;
  const RequestPtr request = AnyOf(requests);
  if (!request->push.empty()) return;
  std::optional<Fetch> fetch = FetchOf(*process, request->num_tokens);
  if (!fetch) return;
  fetch->sources.push_back(request);
  if (request->by_halves) fetch->half = absl::StrCat(UpTo(1));
  Begin("fetch " + request->ticket, *std::move(fetch));
}

void RandomPeers::Receive() {
  Process* const process = AnyRunning(targets_);
  if (process == nullptr) return;
  std::optional<Fetch> fetch = FetchOf(*process, AnyTokens());
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

testing::AssertionResult RandomPeers::HoldASource(const Fetch& fetch, const Pages& pages,
                                                  int64_t first_page, int64_t end_layer) {
  auto result = testing::AssertionFailure() << fetch.at->name << " fetch " << fetch.number;
  for (const RequestPtr& request : fetch.sources) {
    const std::string answer = Holds(*fetch.at, request->seed, pages, first_page, end_layer,
                                     request->num_tokens, fetch.half);
    if (answer == "OK") return testing::AssertionSuccess();
    result << "; " << answer;
  }
  return result;
}

bool RandomPeers::HasEnded(Fetch& fetch) {
  if (fetch.at->stopped_until) return false;
  const std::string status = fetch.at->peer->Wait(fetch.number, 0);
  if (status == "PENDING") {
    ExpectNotLate(fetch.due, absl::StrCat(fetch.at->name, " fetch ", fetch.number));
    return false;
  }
  Log(absl::StrCat(fetch.at->name, " fetch ", fetch.number, " ends: ", status));
  CountEnd(status.substr(0, status.find(':')));
  std::set<std::string> missing = absl::StrSplit(Ask(*fetch.at, "missing " + fetch.number), ' ');
  missing.erase("");
  EXPECT_EQ(missing.empty(), status == "OK") << status;
  for (size_t i = 0; i < fetch.pages.size(); ++i) {
    if (missing.contains(absl::StrCat(fetch.pages[i]))) continue;
    const int64_t page = fetch.first_page + static_cast<int64_t>(i);
    EXPECT_TRUE(HoldASource(fetch, {fetch.pages[i]}, page, kPeerLayers)) << status;
  }
  GiveBackFilled(*fetch.at, fetch.pages);
  return true;
}

bool RandomPeers::HasEnded(const RequestPtr& request) {
  if (request->at->stopped_until || request->pages.empty()) return false;
  const std::string ended = request->at->peer->Ask(absl::StrCat("ended ", request->lease, " 0"));
  if (ended == "live") {
    ExpectNotLate(request->due, absl::StrCat(request->at->name, " lease ", request->lease));
    return false;
  }
  Log(absl::StrCat(request->at->name, " lease ", request->lease, " ends: ", ended));
  CountEnd(ended);
  if (!request->push.empty()) {
    const std::string pushed = Ask(*request->at, absl::StrCat("pushed ", request->push, " 5000"));
    // All may have arrived, and nobody have said so in time; not the other way round.
    EXPECT_TRUE(pushed != "OK" || ended == "fetched") << ended;
    EXPECT_NE(pushed, "PENDING");
  }
  GiveBackSpent(*request->at, request->pages);
  return true;
}

void RandomPeers::LookForEnds() {
  std::erase_if(fetches_, [&](Fetch& fetch) { return HasEnded(fetch); });
  const std::vector<RequestPtr> requests = requests_;
  for (const RequestPtr& request : requests) {
    if (HasEnded(request)) Forget(request);
  }
}

// --- All of it ---

void RandomPeers::Step() {
  static const std::array<std::pair<int64_t, void (RandomPeers::*)()>, 10> kActions = {{
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
  }};
  (this->*AnyOfWeighted(kActions))();
}

void RandomPeers::OnEnd(const Process& process) {
  std::erase_if(fetches_, [&](const Fetch& fetch) { return fetch.at == &process; });
  std::erase_if(requests_, [&](const RequestPtr& request) { return request->at == &process; });
}

void RandomPeers::Drain() {
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
  if (HasFailure()) return;
  for (Process& prefill : sources_) {
    ExpectAtRest(prefill, {"transfers_active", "arena_chunks_taken", "leases_live"});
  }
  for (Process& decode : targets_) ExpectAtRest(decode, {"fetches_active"});
  for (Process& prefill : sources_) {
    for (Process& decode : targets_) ExpectServes(prefill, decode);
  }
}

void RandomPeers::ExpectServes(Process& prefill, Process& decode) {
  const RequestPtr request = NewRequest(prefill, AnyTokens());
  ASSERT_TRUE(TakePages(*request));
  Write(prefill, request->seed, request->pages, request->ready_layers, kPeerLayers);
  const std::string ticket = prefill.peer->Publish(request->pages, kPeerLayers, 60000);
  const std::optional<Pages> pages = TakeToFill(decode, decode.PagesOf(request->num_tokens));
  ASSERT_TRUE(pages.has_value());
  const std::string fetch = decode.peer->Fetch(ticket, *pages, 20000);
  EXPECT_EQ(decode.peer->Wait(fetch, 20000), "OK") << prefill.name << " to " << decode.name;
  EXPECT_EQ(Holds(decode, request->seed, *pages, 0, kPeerLayers, request->num_tokens), "OK");
  EXPECT_EQ(Ask(prefill, absl::StrCat("ended ", LeaseOf(ticket), " 20000")), "fetched");
  GiveBackFilled(decode, *pages);
  GiveBackSpent(*request->at, request->pages);
}

// --- Pages that are not alike ---

PeerPages RandomPeersOfOtherPages::AnyPages() {
  PeerPages pages;
  pages.page_size = AnyOf({8, 16, 24, 64});
  if (OneIn(2)) pages.order = "HND";
  static const std::array<const char*, 5> kDTypes = {"bfloat16", "float16", "float32",
                                                     "float8_e4m3fn", "float8_e5m2"};
  if (OneIn(2)) pages.dtype = kDTypes[UpTo(kDTypes.size() - 1)];
  if (OneIn(3)) pages.scale = OneIn(2) ? "2" : "0.5";
  return pages;
}

}  // namespace kvferry
