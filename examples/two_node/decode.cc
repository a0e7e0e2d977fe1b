#include <algorithm>
#include <cstdio>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/clock.h"
#include "base/status.h"
#include "connector/decode_endpoint.h"
#include "examples/two_node/line_socket.h"
#include "examples/two_node/pattern.h"
#include "examples/two_node/progress.h"
#include "examples/two_node/roles.h"
#include "examples/two_node/support.h"
#include "pool/kv_pool.h"

namespace kvferry::examples {
namespace {

// What a request consists of.
struct Content {
  uint64_t salt = 0;
  PageRuns pages;  // On the prefill side.
};

absl::Status NotUnderstood(absl::string_view line) {
  return absl::InvalidArgumentError(
      absl::StrCat("the prefill side said '", line.substr(0, 80), "', which is no request"));
}

// "SALT RUNS", of so many pages.
absl::StatusOr<Content> ParseContent(absl::string_view text, int64_t num_pages) {
  const std::vector<absl::string_view> words = absl::StrSplit(text, ' ');
  Content content;
  if (words.size() != 2 || !absl::SimpleAtoi(words[0], &content.salt)) return NotUnderstood(text);
  KVFERRY_ASSIGN_OR_RETURN(content.pages, ParseRuns(words[1]));
  if (content.pages.num_pages() != num_pages) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the prefill side lists ", content.pages.num_pages(), " pages of ", num_pages));
  }
  return content;
}

double MiB(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

class Decode {
 public:
  Decode(const Options& options, std::shared_ptr<KvPool> pool,
         std::unique_ptr<DecodeEndpoint> endpoint, LineSocket prefill)
      : options_(options),
        pool_(std::move(pool)),
        endpoint_(std::move(endpoint)),
        prefill_(std::move(prefill)) {}

  absl::Status Run();

 private:
  Deadline Timeout() const { return DeadlineInMs(options_.timeout_ms); }
  // One request, by the rest of the line that it begins with.
  absl::Status TakeOne(absl::string_view line);
  absl::Status FetchOne(absl::string_view ticket_and_content);
  absl::Status ReceiveOne(absl::string_view num_pages);
  absl::StatusOr<PageRuns> ChooseOwnPages(int64_t count) const;
  // Waits for what began then, and compares.
  absl::Status Finish(const FetchHandle& handle, Deadline begin, double cpu_before,
                      const PageRuns& local, const Content& content);
  absl::Status WaitAndShow(const FetchHandle& handle, double* first_layer_ms);
  void PrintSummary(double prefill_cpu_seconds) const;

  const Options& options_;
  const std::shared_ptr<KvPool> pool_;
  const std::unique_ptr<DecodeEndpoint> endpoint_;
  LineSocket prefill_;
  ProgressLine progress_;

  int64_t bytes_ = 0;
  double cpu_seconds_ = 0;  // From fetch or receive to done, all requests.
  std::vector<double> ms_;  // Of each request, from fetch or receive to done.
  std::vector<double> first_layer_ms_;
};

absl::Status Decode::Run() {
  while (true) {
    KVFERRY_RETURN_IF_ERROR(prefill_.Send("next", Timeout()));
    const absl::StatusOr<std::string> line = prefill_.Receive(Timeout());
    if (!line.ok()) return line.status();
    absl::string_view rest = *line;
    if (absl::ConsumePrefix(&rest, "end ")) {
      double prefill_cpu_seconds = 0;
      if (!absl::SimpleAtod(rest, &prefill_cpu_seconds)) {
        return absl::InvalidArgumentError("the prefill side's last line is not a number");
      }
      progress_.Clear();
      PrintSummary(prefill_cpu_seconds);
      return absl::OkStatus();
    }
    if (const absl::Status status = TakeOne(*line); !status.ok()) {
      prefill_.Send(absl::StrCat("failed: ", status.ToString()), Timeout())
          .IgnoreError();  // What failed is worth more than this.
      return absl::Status(status.code(),
                          absl::StrCat("request ", ms_.size() + 1, ": ", status.message()));
    }
  }
}

absl::Status Decode::TakeOne(absl::string_view line) {
  absl::string_view rest = line;
  if (absl::ConsumePrefix(&rest, "ticket ")) return FetchOne(rest);
  if (absl::ConsumePrefix(&rest, "register ")) return ReceiveOne(rest);
  return NotUnderstood(line);
}

absl::StatusOr<PageRuns> Decode::ChooseOwnPages(int64_t count) const {
  // Pages of its own, also when both sides were started with the same flags.
  return ChoosePages(options_.fragmentation, options_.pool_pages, count,
                     ~options_.seed + ms_.size());
}

absl::Status Decode::FetchOne(absl::string_view ticket_and_content) {
  if (options_.push) {
    return absl::FailedPreconditionError(
        "the prefill side publishes; start that side with --push too, or this one without");
  }
  const std::pair<absl::string_view, absl::string_view> words =
      absl::StrSplit(ticket_and_content, absl::MaxSplits(' ', 1));
  KVFERRY_ASSIGN_OR_RETURN(const Ticket ticket, Ticket::Parse(words.first));
  KVFERRY_ASSIGN_OR_RETURN(const Content content, ParseContent(words.second, ticket.num_pages));
  KVFERRY_ASSIGN_OR_RETURN(const PageRuns local, ChooseOwnPages(ticket.num_pages));

  const double cpu_before = CpuSeconds();
  const Deadline begin = Clock::now();
  KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<FetchHandle> handle,
                           endpoint_->Fetch(ticket, 0, local.ToPages(), options_.timeout_ms));
  return Finish(*handle, begin, cpu_before, local, content);
}

absl::Status Decode::ReceiveOne(absl::string_view num_pages) {
  if (!options_.push) {
    return absl::FailedPreconditionError(
        "the prefill side pushes; start this side with --push too");
  }
  int64_t count = 0;
  if (!absl::SimpleAtoi(num_pages, &count)) return NotUnderstood(num_pages);
  KVFERRY_ASSIGN_OR_RETURN(const PageRuns local, ChooseOwnPages(count));

  const double cpu_before = CpuSeconds();
  const Deadline begin = Clock::now();
  KVFERRY_ASSIGN_OR_RETURN(
      const DecodeEndpoint::Receiving receiving,
      endpoint_->Receive({.pages = local.ToPages(), .timeout_ms = options_.timeout_ms}));
  KVFERRY_RETURN_IF_ERROR(
      prefill_.Send(absl::StrCat("receive ", receiving.ticket.ToString()), Timeout()));
  KVFERRY_ASSIGN_OR_RETURN(const std::string line, prefill_.Receive(Timeout()));
  const absl::string_view text = absl::StripPrefix(line, "pushed ");
  if (text.size() == line.size()) return NotUnderstood(line);
  KVFERRY_ASSIGN_OR_RETURN(const Content content, ParseContent(text, count));
  return Finish(*receiving.handle, begin, cpu_before, local, content);
}

absl::Status Decode::Finish(const FetchHandle& handle, Deadline begin, double cpu_before,
                            const PageRuns& local, const Content& content) {
  double first_layer_ms = 0;
  KVFERRY_RETURN_IF_ERROR(WaitAndShow(handle, &first_layer_ms));
  ms_.push_back(SecondsBetween(begin, Clock::now()) * 1e3);
  first_layer_ms_.push_back(first_layer_ms);
  cpu_seconds_ += CpuSeconds() - cpu_before;
  bytes_ += handle.report().bytes_done;

  KVFERRY_RETURN_IF_ERROR(Pattern(content.salt).Verify(*pool_, local, content.pages));
  ZeroPages(*pool_, local);
  return absl::OkStatus();
}

absl::Status Decode::WaitAndShow(const FetchHandle& handle, double* first_layer_ms) {
  const Deadline begin = Clock::now();
  // The fetch ends by its own deadline; this one is for the unthinkable.
  const Deadline deadline = DeadlineInMs(2 * options_.timeout_ms);
  bool first = true;
  while (Clock::now() < deadline) {
    const Deadline soon = DeadlineInMs(100);
    const absl::Status status = first ? handle.WaitLayer(0, soon) : handle.Wait(soon);
    if (handle.done()) {
      if (first) *first_layer_ms = SecondsBetween(begin, Clock::now()) * 1e3;
      return handle.status();
    }
    if (first && status.ok()) {
      first = false;
      *first_layer_ms = SecondsBetween(begin, Clock::now()) * 1e3;
    }
    progress_.Show(absl::StrFormat("decode: %d requests, %.1f MiB; this one: layer %d of %d",
                                   ms_.size(), MiB(bytes_), handle.layers_done(),
                                   options_.layout.num_layers));
  }
  return absl::DeadlineExceededError("the fetch has not ended");
}

void Decode::PrintSummary(double prefill_cpu_seconds) const {
  if (ms_.empty()) return;
  std::vector<double> sorted = ms_;
  std::sort(sorted.begin(), sorted.end());
  const double total_ms = std::accumulate(sorted.begin(), sorted.end(), 0.0);
  const double first_layers_ms =
      std::accumulate(first_layer_ms_.begin(), first_layer_ms_.end(), 0.0);
  const auto count = static_cast<double>(sorted.size());
  const double gigabytes = static_cast<double>(bytes_) * 1e-9;
  absl::PrintF(
      "decode: %d requests, %.1f MiB, every byte verified: %.2f GB/s; a request: mean %.2f, "
      "p50 %.2f, max %.2f ms (first layer after %.2f); CPU seconds per GB: decode %.3f, "
      "prefill %.3f\n",
      sorted.size(), MiB(bytes_), gigabytes / (total_ms * 1e-3), total_ms / count,
      sorted[sorted.size() / 2], sorted.back(), first_layers_ms / count, cpu_seconds_ / gigabytes,
      prefill_cpu_seconds / gigabytes);
}

// The config of a decode side that reaches prefill as this connection does.
Config ConfigFor(const Options& options, const LineSocket& prefill) {
  Config config = options.config;
  // Whoever named the host on the command line trusts it; tickets have it as a number.
  if (config.allowed_hosts.empty()) {
    config.allowed_hosts = absl::StrCat(options.address.host, ",", prefill.peer_host());
  }
  config.listen_host = prefill.local_host();
  return config;
}

}  // namespace

absl::Status RunDecode(const Options& options) {
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<KvPool> pool,
                           KvPool::Create(options.layout, options.pool_pages));
  const Deadline deadline = DeadlineInMs(options.timeout_ms);
  KVFERRY_ASSIGN_OR_RETURN(LineSocket prefill, LineSocket::Connect(options.address, deadline));
  KVFERRY_RETURN_IF_ERROR(prefill.Send(kGreeting, deadline));
  KVFERRY_ASSIGN_OR_RETURN(const std::string greeting, prefill.Receive(deadline));
  if (greeting != kGreeting) {
    return absl::FailedPreconditionError(absl::StrCat(
        "no two_node prefill side listens at ", options.address.host, ":", options.address.port));
  }
  KVFERRY_ASSIGN_OR_RETURN(
      std::unique_ptr<DecodeEndpoint> endpoint,
      DecodeEndpoint::Create(pool, {ConfigFor(options, prefill), options.model(), "decode",
                                    /*accept_pushes=*/options.push}));
  return Decode(options, std::move(pool), std::move(endpoint), std::move(prefill)).Run();
}

}  // namespace kvferry::examples
