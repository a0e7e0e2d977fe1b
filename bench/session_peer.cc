#include "bench/session_peer.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/clock.h"
#include "base/status.h"
#include "bench/driver.h"
#include "bench/plain_sockets.h"
#include "connector/decode_endpoint.h"
#include "connector/prefill_endpoint.h"
#include "examples/two_node/support.h"

namespace kvferry::bench {
namespace {

constexpr int64_t kTimeoutMs = 60000;

absl::StatusOr<std::vector<Ticket>> ParseTickets(const std::string& words) {
  std::vector<Ticket> tickets;
  for (const absl::string_view word : absl::StrSplit(words, ',')) {
    KVFERRY_ASSIGN_OR_RETURN(tickets.emplace_back(), Ticket::Parse(word));
  }
  return tickets;
}

using Metrics = std::vector<std::pair<std::string, int64_t>>;
int64_t ValueOf(const Metrics& metrics, const std::string& name) {
  const auto found = std::ranges::find(metrics, name, &Metrics::value_type::first);
  return found == metrics.end() ? -1 : found->second;
}

class PrefillSide {
 public:
  PrefillSide(std::unique_ptr<PrefillEndpoint> endpoint, int64_t num_layers)
      : endpoint_(std::move(endpoint)), num_layers_(num_layers) {}

  void AddTo(Driver* driver) {
    driver->Add("publish", 3, [this](const Words& words) { return Publish(words); });
    driver->Add("layers", 1, [this](const Words& words) { return Layers(words); });
    driver->Add("ended", 1, [this](const Words& words) { return Ended(words); });
    driver->Add("metric", 1, [this](const Words& words) -> Answer {
      return nlohmann::json{{"value", ValueOf(endpoint_->Metrics(), words[0])}};
    });
  }

 private:
  Answer Publish(const Words& words) {
    KVFERRY_ASSIGN_OR_RETURN(const int64_t count, ParseNumber(words[0]));
    KVFERRY_ASSIGN_OR_RETURN(const PageRuns pages, examples::ParseRuns(words[1]));
    PrefillEndpoint::Publication publication;
    publication.pages = pages.ToPages();
    KVFERRY_ASSIGN_OR_RETURN(publication.ready_layers, ParseNumber(words[2]));
    nlohmann::json tickets = nlohmann::json::array();
    for (int64_t i = 0; i < count; ++i) {
      KVFERRY_ASSIGN_OR_RETURN(const Ticket ticket, endpoint_->Publish(publication));
      tickets.push_back(ticket.ToString());
      last_lease_ = ticket.lease_id;
    }
    return nlohmann::json{{"tickets", tickets}};
  }

  Answer Layers(const Words& words) {
    KVFERRY_ASSIGN_OR_RETURN(const int64_t every_ms, ParseNumber(words[0]));
    const Deadline begin = Clock::now();
    Deadline last{};
    for (int64_t layer = 0; layer < num_layers_; ++layer) {
      std::this_thread::sleep_until(begin + std::chrono::milliseconds(every_ms * (layer + 1)));
      last = Clock::now();
      KVFERRY_RETURN_IF_ERROR(endpoint_->LayerReady(last_lease_, layer));
    }
    return nlohmann::json{{"last", Nanoseconds(last)}};
  }

  Answer Ended(const Words& words) {
    KVFERRY_ASSIGN_OR_RETURN(int64_t left, ParseNumber(words[0]));
    const Deadline deadline = DeadlineInMs(kTimeoutMs);
    while (left > 0 && Clock::now() < deadline) {
      for (const EndedLease& lease : endpoint_->TakeEnded()) {
        if (lease.outcome != LeaseOutcome::kFetched) {
          return absl::InternalError(
              absl::StrCat("a lease ended as ", LeaseOutcomeName(lease.outcome)));
        }
        --left;
      }
      if (left > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (left == 0) return nlohmann::json::object();
    return absl::DeadlineExceededError(absl::StrCat(left, " leases have not ended"));
  }

  const std::unique_ptr<PrefillEndpoint> endpoint_;
  const int64_t num_layers_;
  uint64_t last_lease_ = 0;
};

class DecodeSide {
 public:
  explicit DecodeSide(std::vector<std::unique_ptr<DecodeEndpoint>> endpoints)
      : endpoints_(std::move(endpoints)) {}

  void AddTo(Driver* driver) {
    driver->Add("fetch", 2, [this](const Words& words) { return Fetch(words); });
    driver->Add("together", 2, [this](const Words& words) { return Together(words); });
    driver->Add("metric", 1, [this](const Words& words) -> Answer {
      int64_t sum = 0;
      for (const auto& endpoint : endpoints_) sum += ValueOf(endpoint->Metrics(), words[0]);
      return nlohmann::json{{"value", sum}};
    });
  }

 private:
  Answer Fetch(const Words& words) {
    KVFERRY_ASSIGN_OR_RETURN(const PageRuns runs, examples::ParseRuns(words[0]));
    KVFERRY_ASSIGN_OR_RETURN(const std::vector<Ticket> tickets, ParseTickets(words[1]));
    const std::vector<int64_t> pages = runs.ToPages();
    nlohmann::json seconds = nlohmann::json::array();
    Deadline end{};
    for (const Ticket& ticket : tickets) {
      const Deadline begin = Clock::now();
      KVFERRY_ASSIGN_OR_RETURN(const auto handle,
                               endpoints_[0]->Fetch(ticket, 0, pages, kTimeoutMs));
      KVFERRY_RETURN_IF_ERROR(handle->Wait(DeadlineInMs(2 * kTimeoutMs)));
      end = Clock::now();
      seconds.push_back(SecondsBetween(begin, end));
    }
    return nlohmann::json{{"seconds", seconds}, {"end", Nanoseconds(end)}};
  }

  Answer Together(const Words& words) {
    KVFERRY_ASSIGN_OR_RETURN(const int64_t when_ns, ParseNumber(words[0]));
    KVFERRY_ASSIGN_OR_RETURN(const std::vector<Ticket> tickets, ParseTickets(words[1]));
    if (tickets.size() != endpoints_.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat(tickets.size(), " tickets for ", endpoints_.size(), " endpoints"));
    }
    const Deadline when = PointInTime(when_ns);
    std::this_thread::sleep_until(when);
    std::vector<Deadline> begins;
    std::vector<std::shared_ptr<FetchHandle>> handles;
    for (size_t i = 0; i < tickets.size(); ++i) {
      std::vector<int64_t> pages(tickets[i].num_pages);
      std::iota(pages.begin(), pages.end(), static_cast<int64_t>(i) * tickets[i].num_pages);
      begins.push_back(Clock::now());
      KVFERRY_ASSIGN_OR_RETURN(handles.emplace_back(),
                               endpoints_[i]->Fetch(tickets[i], 0, pages, kTimeoutMs));
    }
    nlohmann::json seconds = nlohmann::json::array();
    for (size_t i = 0; i < handles.size(); ++i) {
      KVFERRY_RETURN_IF_ERROR(handles[i]->Wait(DeadlineInMs(2 * kTimeoutMs)));
      const FetchReport report = handles[i]->report();
      seconds.push_back(SecondsBetween(when, begins[i]) + report.wait_seconds +
                        report.move_seconds);
    }
    return nlohmann::json{{"seconds", seconds}};
  }

  const std::vector<std::unique_ptr<DecodeEndpoint>> endpoints_;
};

}  // namespace

void PeerFlags::AddTo(CLI::App* app) {
  app->add_option("--role", role, "prefill or decode, or a side of plain_sockets.h")
      ->required()
      ->check(CLI::IsMember({"prefill", "decode", "plain-sender", "plain-receivers"}));
  app->add_option("--pool-pages", pool_pages, "pages of the pool")->required();
  app->add_option("--endpoints", endpoints, "of a decode process");
  app->add_option("--config", settings, "KEY=VALUE, may be repeated")->allow_extra_args(false);
  layout.AddTo(app);
}

absl::StatusOr<int> ServePeer(const PeerFlags& flags) {
  KVFERRY_ASSIGN_OR_RETURN(const Config config, examples::ConfigFromSettings(flags.settings));
  KVFERRY_ASSIGN_OR_RETURN(const KvLayout layout, flags.layout.Make());
  KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<KvPool> pool,
                           TouchedPool(layout, flags.pool_pages));
  if (flags.role == "plain-sender") return ServePlainSender(pool);
  if (flags.role == "plain-receivers") return ServePlainReceivers(pool, flags.endpoints);
  const EndpointOptions options{config, "bench", flags.role};
  Driver driver(pool);
  if (flags.role == "prefill") {
    KVFERRY_ASSIGN_OR_RETURN(auto endpoint, PrefillEndpoint::Create(pool, options));
    PrefillSide side(std::move(endpoint), layout.num_layers);
    side.AddTo(&driver);
    return driver.Run();
  }
  std::vector<std::unique_ptr<DecodeEndpoint>> endpoints;
  for (int64_t i = 0; i < flags.endpoints; ++i) {
    KVFERRY_ASSIGN_OR_RETURN(endpoints.emplace_back(), DecodeEndpoint::Create(pool, options));
  }
  DecodeSide side(std::move(endpoints));
  side.AddTo(&driver);
  return driver.Run();
}

}  // namespace kvferry::bench
