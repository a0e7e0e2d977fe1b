#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "base/clock.h"
#include "base/status.h"
#include "connector/prefill_endpoint.h"
#include "examples/two_node/line_socket.h"
#include "examples/two_node/pattern.h"
#include "examples/two_node/progress.h"
#include "examples/two_node/roles.h"
#include "examples/two_node/support.h"
#include "pool/kv_pool.h"

namespace kvferry::examples {
namespace {

constexpr auto kPollInterval = std::chrono::milliseconds(1);

// Instead of what was expected of it.
absl::Status DecodeSays(const std::string& line) {
  return absl::AbortedError(absl::StrCat("the decode side says: ", line.substr(0, 500)));
}

class Prefill {
 public:
  Prefill(const Options& options, std::shared_ptr<KvPool> pool,
          std::unique_ptr<PrefillEndpoint> endpoint, LineSocket decode)
      : options_(options),
        pool_(std::move(pool)),
        endpoint_(std::move(endpoint)),
        decode_(std::move(decode)) {}

  absl::Status Serve();

 private:
  Deadline Timeout() const { return DeadlineInMs(options_.timeout_ms); }
  // The decode side asks for the next request, and has got the last one intact.
  absl::Status ReceiveNext(Deadline deadline);
  absl::Status ServeRequest(int64_t index);
  // The ways of a request to the decode side; what `content` says of it goes along. Lease ids.
  absl::StatusOr<uint64_t> Publish(const PrefillEndpoint::Publication& publication,
                                   const std::string& content);
  absl::StatusOr<uint64_t> Push(const PrefillEndpoint::Publication& publication,
                                const std::string& content);
  absl::Status WriteLayers(uint64_t lease_id, const Pattern& pattern, const PageRuns& pages);
  absl::StatusOr<LeaseOutcome> WaitUntilEnded(uint64_t lease_id);
  void PrintSummary() const;

  const Options& options_;
  const std::shared_ptr<KvPool> pool_;
  const std::unique_ptr<PrefillEndpoint> endpoint_;
  LineSocket decode_;
  bool next_received_ = false;
  std::shared_ptr<PushHandle> push_;  // The last one.
  ProgressLine progress_;
  double cpu_seconds_ = 0;  // From publish until the lease has ended, all requests.
};

absl::Status Prefill::Serve() {
  for (int64_t i = 0; i < options_.requests; ++i) {
    KVFERRY_RETURN_IF_ERROR(ReceiveNext(Timeout()));
    next_received_ = false;
    KVFERRY_RETURN_IF_ERROR(ServeRequest(i));
  }
  KVFERRY_RETURN_IF_ERROR(ReceiveNext(Timeout()));
  KVFERRY_RETURN_IF_ERROR(decode_.Send(absl::StrFormat("end %.6f", cpu_seconds_), Timeout()));
  progress_.Clear();
  PrintSummary();
  return absl::OkStatus();
}

absl::Status Prefill::ReceiveNext(Deadline deadline) {
  if (next_received_) return absl::OkStatus();
  const absl::StatusOr<std::string> line = decode_.Receive(deadline);
  if (!line.ok()) return line.status();
  if (*line != "next") {
    return DecodeSays(*line);
  }
  next_received_ = true;
  return absl::OkStatus();
}

absl::Status Prefill::ServeRequest(int64_t index) {
  // A pattern of its own, so that what an earlier request left in a page does not pass for this
  // one's.
  const uint64_t salt = options_.seed * 0x9e3779b97f4a7c15 + index;
  KVFERRY_ASSIGN_OR_RETURN(
      const PageRuns pages,
      ChoosePages(options_.fragmentation, options_.pool_pages, options_.request_pages, salt));
  const Pattern pattern(salt);
  const bool streamed = options_.layer_delay_ms > 0;
  if (!streamed) pattern.FillPages(*pool_, pages);

  const double cpu_before = CpuSeconds();
  PrefillEndpoint::Publication publication;
  publication.pages = pages.ToPages();
  publication.num_tokens = pages.num_pages() * options_.layout.page_size;
  publication.ready_layers = streamed ? 0 : options_.layout.num_layers;
  const std::string content = absl::StrCat(salt, " ", FormatRuns(pages));
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t lease_id, options_.push ? Push(publication, content)
                                                                  : Publish(publication, content));
  progress_.Show(absl::StrFormat("prefill: request %d of %d is out", index + 1, options_.requests));
  if (streamed) KVFERRY_RETURN_IF_ERROR(WriteLayers(lease_id, pattern, pages));

  KVFERRY_ASSIGN_OR_RETURN(const LeaseOutcome outcome, WaitUntilEnded(lease_id));
  cpu_seconds_ += CpuSeconds() - cpu_before;
  if (outcome == LeaseOutcome::kFetched) return absl::OkStatus();
  const std::string why = push_ == nullptr ? absl::StrCat("its lease ", LeaseOutcomeName(outcome))
                                           : push_->status().ToString();
  return absl::AbortedError(
      absl::StrCat("request ", index + 1, " of ", options_.requests, " did not get there: ", why));
}

absl::StatusOr<uint64_t> Prefill::Publish(const PrefillEndpoint::Publication& publication,
                                          const std::string& content) {
  KVFERRY_ASSIGN_OR_RETURN(const Ticket ticket, endpoint_->Publish(publication));
  KVFERRY_RETURN_IF_ERROR(
      decode_.Send(absl::StrCat("ticket ", ticket.ToString(), " ", content), Timeout()));
  return ticket.lease_id;
}

absl::StatusOr<uint64_t> Prefill::Push(const PrefillEndpoint::Publication& publication,
                                       const std::string& content) {
  KVFERRY_RETURN_IF_ERROR(
      decode_.Send(absl::StrCat("register ", publication.pages.size()), Timeout()));
  KVFERRY_ASSIGN_OR_RETURN(const std::string line, decode_.Receive(Timeout()));
  absl::string_view text = line;
  if (!absl::ConsumePrefix(&text, "receive ")) return DecodeSays(line);
  KVFERRY_ASSIGN_OR_RETURN(const ReceiveTicket ticket, ReceiveTicket::Parse(text));
  KVFERRY_ASSIGN_OR_RETURN(push_, endpoint_->Push(ticket, publication, options_.timeout_ms));
  KVFERRY_RETURN_IF_ERROR(decode_.Send(absl::StrCat("pushed ", content), Timeout()));
  return push_->lease_id();
}

absl::Status Prefill::WriteLayers(uint64_t lease_id, const Pattern& pattern,
                                  const PageRuns& pages) {
  for (int64_t layer = 0; layer < options_.layout.num_layers; ++layer) {
    std::this_thread::sleep_for(std::chrono::milliseconds(options_.layer_delay_ms));
    pattern.FillLayer(*pool_, pages, layer);
    KVFERRY_RETURN_IF_ERROR(endpoint_->LayerReady(lease_id, layer));
  }
  return absl::OkStatus();
}

absl::StatusOr<LeaseOutcome> Prefill::WaitUntilEnded(uint64_t lease_id) {
  // A lease that nobody fetches expires by itself; a fetch ends at the decode side's deadline.
  const Deadline deadline = DeadlineInMs(options_.config.lease_ms + options_.timeout_ms);
  while (true) {
    for (const EndedLease& ended : endpoint_->TakeEnded()) {
      if (ended.lease_id == lease_id) return ended.outcome;
    }
    if (Clock::now() >= deadline) return absl::DeadlineExceededError("the lease has not ended");
    if (next_received_) {
      std::this_thread::sleep_for(kPollInterval);  // Its end is on its way to us.
      continue;
    }
    const absl::Status next = ReceiveNext(DeadlineIn(kPollInterval));
    if (!next.ok() && !absl::IsDeadlineExceeded(next)) {
      endpoint_->Release(lease_id, Timeout()).IgnoreError();
      return next;
    }
  }
}

void Prefill::PrintSummary() const {
  const double bytes = static_cast<double>(options_.requests) *
                       static_cast<double>(options_.request_pages * options_.layout.page_bytes());
  absl::PrintF("prefill: %d requests %s, %.1f MiB, %.3f CPU seconds per GB%s\n", options_.requests,
               options_.push ? "pushed" : "fetched", bytes / (1 << 20),
               cpu_seconds_ / (bytes * 1e-9),
               options_.layer_delay_ms > 0 ? " (with writing the layers)" : "");
}

// Waits for a decode side; anything else that connects is sent away.
absl::StatusOr<LineSocket> AcceptDecode(LineListener* listener, Deadline deadline) {
  while (true) {
    KVFERRY_ASSIGN_OR_RETURN(LineSocket socket, listener->Accept(deadline));
    const absl::StatusOr<std::string> greeting =
        socket.Receive(std::min(deadline, DeadlineInMs(1000)));
    if (!greeting.ok() || *greeting != kGreeting) continue;
    if (socket.Send(kGreeting, deadline).ok()) return socket;
  }
}

}  // namespace

absl::Status RunPrefill(const Options& options) {
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<KvPool> pool,
                           KvPool::Create(options.layout, options.pool_pages));
  KVFERRY_ASSIGN_OR_RETURN(LineListener listener, LineListener::Listen(options.address));
  Config config = options.config;
  const auto make_endpoint = [&] {
    return PrefillEndpoint::Create(pool, {config, options.model(), "prefill"});
  };
  // What is wrong with the configuration shows before a decode side comes.
  KVFERRY_ASSIGN_OR_RETURN(std::unique_ptr<PrefillEndpoint> endpoint, make_endpoint());
  absl::PrintF("prefill: %s, %d pages of %.1f KiB; tickets at %s:%d\n", options.layout.ToString(),
               options.pool_pages, static_cast<double>(options.layout.page_bytes()) / 1024,
               options.address.host, listener.port());
  std::fflush(stdout);

  KVFERRY_ASSIGN_OR_RETURN(LineSocket decode,
                           AcceptDecode(&listener, DeadlineInMs(options.timeout_ms)));
  // Only now it is known whom this side may dial, to push.
  if (options.push && config.allowed_hosts.empty()) {
    config.allowed_hosts = decode.peer_host();
    endpoint.reset();  // Its ports may be the same.
    KVFERRY_ASSIGN_OR_RETURN(endpoint, make_endpoint());
  }
  return Prefill(options, std::move(pool), std::move(endpoint), std::move(decode)).Serve();
}

}  // namespace kvferry::examples
