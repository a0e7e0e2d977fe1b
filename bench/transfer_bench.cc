// One side of a measured transfer (driver.h), or a GPU's plain copies beside it. Besides the
// driver's commands:
//
//   prefill   publish RUNS           {"ticket": TEXT}
//             push TICKET RUNS       {"seconds": from Push() until the handle is done,
//                                     "cpu": as below}
//             ended                  waits for the last lease's end: {"outcome": TEXT}
//             cpu                    as everywhere
//   decode    fetch TICKET RUNS      {"seconds": from Fetch() until the handle is done,
//                                     "cpu": this process's meanwhile}
//             receive RUNS           {"ticket": TEXT}, with --accept-pushes
//             received               waits for the last receive's end
//   both      metrics                the endpoint's
//   copies    copies BYTES           {"device_to_device": seconds of a plain copy, "to_host": ...,
//                                     "to_device": ...}, host memory being pinned; with --device

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status.h"
#include "bench/driver.h"
#include "connector/decode_endpoint.h"
#include "connector/prefill_endpoint.h"
#include "examples/two_node/layout_flags.h"
#include "examples/two_node/support.h"
#ifdef KVFERRY_BENCH_CUDA
#include "bench/peers/plain_cuda.h"
#include "pool/cuda/cuda_memory.h"
#endif

namespace kvferry::bench {
namespace {

constexpr int64_t kTimeoutMs = 60000;

struct Flags {
  std::string role;
  examples::LayoutFlags layout;
  int64_t pool_pages = 0;
  std::vector<std::string> settings;
  bool private_pool = false;
  std::optional<int> device;
  bool accept_pushes = false;
};

// Seconds, and CPU seconds of this process, from its making to Stop().
class Stopwatch {
 public:
  nlohmann::json Stop() const {
    const Deadline end = Clock::now();
    return {{"seconds", SecondsBetween(begin_, end)}, {"cpu", examples::CpuSeconds() - cpu_}};
  }

 private:
  const double cpu_ = examples::CpuSeconds();
  const Deadline begin_ = Clock::now();
};

nlohmann::json ToJson(const std::vector<std::pair<std::string, int64_t>>& metrics) {
  nlohmann::json json = nlohmann::json::object();
  for (const auto& [name, value] : metrics) json[name] = value;
  return json;
}

class PrefillSide {
 public:
  explicit PrefillSide(std::unique_ptr<PrefillEndpoint> endpoint)
      : endpoint_(std::move(endpoint)) {}

  Answer Publish(const Words& words) {
    KVFERRY_ASSIGN_OR_RETURN(const PageRuns pages, examples::ParseRuns(words[0]));
    PrefillEndpoint::Publication publication;
    publication.pages = pages.ToPages();
    publication.ready_layers = num_layers_;
    KVFERRY_ASSIGN_OR_RETURN(const Ticket ticket, endpoint_->Publish(publication));
    return nlohmann::json{{"ticket", ticket.ToString()}};
  }

  Answer Push(const Words& words) {
    KVFERRY_ASSIGN_OR_RETURN(const ReceiveTicket ticket, ReceiveTicket::Parse(words[0]));
    KVFERRY_ASSIGN_OR_RETURN(const PageRuns pages, examples::ParseRuns(words[1]));
    PrefillEndpoint::Publication publication;
    publication.pages = pages.ToPages();
    publication.ready_layers = num_layers_;
    const Stopwatch watch;
    KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<PushHandle> handle,
                             endpoint_->Push(ticket, publication, kTimeoutMs));
    KVFERRY_RETURN_IF_ERROR(handle->Wait(DeadlineInMs(2 * kTimeoutMs)));
    return watch.Stop();
  }

  Answer Ended(const Words& /*words*/) {
    const Deadline deadline = DeadlineInMs(kTimeoutMs);
    while (Clock::now() < deadline) {
      const std::vector<EndedLease> ended = endpoint_->TakeEnded();
      if (!ended.empty()) {
        return nlohmann::json{{"outcome", std::string(LeaseOutcomeName(ended.back().outcome))}};
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return absl::DeadlineExceededError("the lease has not ended");
  }

  int Serve(const std::shared_ptr<KvPool>& pool) {
    num_layers_ = pool->layout().num_layers;
    Driver driver(pool);
    driver.Add("publish", 1, [this](const Words& words) { return Publish(words); });
    driver.Add("push", 2, [this](const Words& words) { return Push(words); });
    driver.Add("ended", 0, [this](const Words& words) { return Ended(words); });
    driver.Add("metrics", 0,
               [this](const Words&) -> Answer { return ToJson(endpoint_->Metrics()); });
    return driver.Run();
  }

 private:
  const std::unique_ptr<PrefillEndpoint> endpoint_;
  int64_t num_layers_ = 0;
};

class DecodeSide {
 public:
  explicit DecodeSide(std::unique_ptr<DecodeEndpoint> endpoint) : endpoint_(std::move(endpoint)) {}

  Answer Fetch(const Words& words) {
    KVFERRY_ASSIGN_OR_RETURN(const Ticket ticket, Ticket::Parse(words[0]));
    KVFERRY_ASSIGN_OR_RETURN(const PageRuns runs, examples::ParseRuns(words[1]));
    const std::vector<int64_t> pages = runs.ToPages();
    const Stopwatch watch;
    KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<FetchHandle> handle,
                             endpoint_->Fetch(ticket, 0, pages, kTimeoutMs));
    KVFERRY_RETURN_IF_ERROR(handle->Wait(DeadlineInMs(2 * kTimeoutMs)));
    return watch.Stop();
  }

  Answer Receive(const Words& words) {
    KVFERRY_ASSIGN_OR_RETURN(const PageRuns runs, examples::ParseRuns(words[0]));
    KVFERRY_ASSIGN_OR_RETURN(DecodeEndpoint::Receiving receiving,
                             endpoint_->Receive({0, runs.ToPages(), 0, kTimeoutMs}));
    receive_ = std::move(receiving.handle);
    return nlohmann::json{{"ticket", receiving.ticket.ToString()}};
  }

  Answer Received(const Words& /*words*/) {
    if (receive_ == nullptr) return absl::FailedPreconditionError("received: no receive before it");
    KVFERRY_RETURN_IF_ERROR(receive_->Wait(DeadlineInMs(2 * kTimeoutMs)));
    return nlohmann::json::object();
  }

  int Serve(const std::shared_ptr<KvPool>& pool) {
    Driver driver(pool);
    driver.Add("fetch", 2, [this](const Words& words) { return Fetch(words); });
    driver.Add("receive", 1, [this](const Words& words) { return Receive(words); });
    driver.Add("received", 0, [this](const Words& words) { return Received(words); });
    driver.Add("metrics", 0,
               [this](const Words&) -> Answer { return ToJson(endpoint_->Metrics()); });
    return driver.Run();
  }

 private:
  const std::unique_ptr<DecodeEndpoint> endpoint_;
  std::shared_ptr<FetchHandle> receive_;
};

#ifdef KVFERRY_BENCH_CUDA
absl::StatusOr<std::shared_ptr<KvPool>> PoolOnDevice(const KvLayout& layout, int64_t num_pages,
                                                     int device) {
  return KvPool::CreateIn(layout, num_pages, CudaMemory(device));
}

Answer PlainCopies(int device, const Words& words) {
  KVFERRY_ASSIGN_OR_RETURN(const int64_t bytes, ParseNumber(words[0]));
  KVFERRY_ASSIGN_OR_RETURN(const PlainCudaCopies copies, MeasurePlainCuda(device, bytes));
  return nlohmann::json{{"device_to_device", copies.device_to_device},
                        {"to_host", copies.to_host},
                        {"to_device", copies.to_device}};
}
#else
absl::Status NoCuda() {
  return absl::UnimplementedError("--device: built without CUDA (-DKVFERRY_CUDA=ON)");
}
absl::StatusOr<std::shared_ptr<KvPool>> PoolOnDevice(const KvLayout&, int64_t, int) {
  return NoCuda();
}
Answer PlainCopies(int, const Words&) { return NoCuda(); }
#endif

absl::StatusOr<int> Run(const Flags& flags) {
  KVFERRY_ASSIGN_OR_RETURN(const Config config, examples::ConfigFromSettings(flags.settings));
  KVFERRY_ASSIGN_OR_RETURN(const KvLayout layout, flags.layout.Make());
  KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<KvPool> pool,
                           flags.device
                               ? PoolOnDevice(layout, flags.pool_pages, *flags.device)
                               : TouchedPool(layout, flags.pool_pages, flags.private_pool));
  if (flags.role == "copies") {
    if (!flags.device) return absl::InvalidArgumentError("--role copies needs --device");
    Driver driver(pool);
    driver.Add("copies", 1, [&](const Words& words) { return PlainCopies(*flags.device, words); });
    return driver.Run();
  }
  const EndpointOptions options{config, "bench", flags.role, flags.accept_pushes};
  if (flags.role == "prefill") {
    KVFERRY_ASSIGN_OR_RETURN(std::unique_ptr<PrefillEndpoint> endpoint,
                             PrefillEndpoint::Create(pool, options));
    return PrefillSide(std::move(endpoint)).Serve(pool);
  }
  KVFERRY_ASSIGN_OR_RETURN(std::unique_ptr<DecodeEndpoint> endpoint,
                           DecodeEndpoint::Create(pool, options));
  return DecodeSide(std::move(endpoint)).Serve(pool);
}

}  // namespace
}  // namespace kvferry::bench

int main(int argc, char** argv) {
  CLI::App app("One side of a measured transfer; bench/run.py and device.py drive it.");
  kvferry::bench::Flags flags;
  app.add_option("--role", flags.role, "prefill, decode or copies")
      ->required()
      ->check(CLI::IsMember({"prefill", "decode", "copies"}));
  app.add_option("--pool-pages", flags.pool_pages, "pages of the pool")->required();
  app.add_option("--config", flags.settings, "KEY=VALUE, may be repeated")->allow_extra_args(false);
  CLI::Option* private_pool =
      app.add_flag("--private-pool", flags.private_pool,
                   "in memory that peers cannot read in place, as an engine's is");
  app.add_option("--device", flags.device, "the pool lies on this GPU; default: in host memory")
      ->excludes(private_pool);
  app.add_flag("--accept-pushes", flags.accept_pushes, "decode: take pushes too");
  flags.layout.AddTo(&app);
  CLI11_PARSE(app, argc, argv);
  const absl::StatusOr<int> rc = kvferry::bench::Run(flags);
  return rc.ok() ? *rc : kvferry::bench::Fail("kvferry_bench_transfer", rc.status());
}
