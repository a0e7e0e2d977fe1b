#pragma once

// Endpoints with test settings, and short words for what tests do with them.

#include <future>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "connector/decode_endpoint.h"
#include "connector/prefill_endpoint.h"
#include "tests/support/kv_pattern.h"
#include "tests/support/status.h"
#include "tests/support/test_config.h"
#include "tests/support/wait_for.h"
#include "transport/node.h"

namespace kvferry {

inline constexpr char kTestModel[] = "test/model";

inline KvLayout SmallLayout() { return KvLayout::Mha(4, 16, 2, 32, DType::kBFloat16); }

// "fused", "mla", "odd", else SmallLayout().
inline KvLayout LayoutNamed(const std::string& name) {
  if (name == "fused") return KvLayout::Fused(5, 16, 3, 24, DType::kFloat32);
  if (name == "mla") return KvLayout::Mla(7, 8, 72, DType::kBFloat16);
  if (name == "odd") {  // Tensors of different sizes, none of them a multiple of eight bytes.
    return {3, 5, DType::kUint8, "engine's own", {{"k", 1, 7}, {"v", 3, 13}, {"scale", 1, 1}}};
  }
  return SmallLayout();
}

// Small chunks, so that small transfers have many of them.
inline Config SmallChunks() {
  Config config = TestConfig();
  config.chunk_bytes = 4 << 10;
  config.arena_bytes = 1 << 20;
  return config;
}

inline std::unique_ptr<PrefillEndpoint> MakePrefill(std::shared_ptr<const KvPool> pool,
                                                    const Config& config,
                                                    const std::string& model = kTestModel) {
  return Must(PrefillEndpoint::Create(std::move(pool), {config, model, "prefill"}));
}
inline std::unique_ptr<DecodeEndpoint> MakeDecode(std::shared_ptr<const KvPool> pool,
                                                  const Config& config,
                                                  const std::string& model = kTestModel) {
  return Must(DecodeEndpoint::Create(std::move(pool), {config, model, "decode"}));
}

// One that prefill endpoints can push to.
inline std::unique_ptr<DecodeEndpoint> MakePushedDecode(std::shared_ptr<const KvPool> pool,
                                                        const Config& config) {
  return Must(DecodeEndpoint::Create(std::move(pool), {config, kTestModel, "decode", true}));
}

// Publishes with `ready_layers` layers final; -1 for all of them.
inline Ticket Publish(PrefillEndpoint& prefill, const KvPool& pool,
                      const std::vector<int64_t>& pages, int64_t ready_layers = -1,
                      int64_t lease_ms = 0) {
  PrefillEndpoint::Publication publication;
  publication.pages = pages;
  publication.num_tokens = static_cast<int64_t>(pages.size()) * pool.layout().page_size;
  publication.ready_layers = ready_layers < 0 ? pool.layout().num_layers : ready_layers;
  publication.lease_ms = lease_ms;
  return Must(prefill.Publish(publication));
}

inline std::shared_ptr<FetchHandle> Fetch(DecodeEndpoint& decode, const Ticket& ticket,
                                          const std::vector<int64_t>& pages, int64_t first_page = 0,
                                          int64_t timeout_ms = 0) {
  return Must(decode.Fetch(ticket, first_page, pages, timeout_ms));
}

inline DecodeEndpoint::Receiving Receive(DecodeEndpoint& decode, std::vector<int64_t> pages,
                                         int64_t first_page = 0, int64_t timeout_ms = 0) {
  return Must(decode.Receive({first_page, std::move(pages), 0, timeout_ms}));
}

// As Publish().
inline std::shared_ptr<PushHandle> Push(PrefillEndpoint& prefill, const ReceiveTicket& ticket,
                                        const KvPool& pool, const std::vector<int64_t>& pages,
                                        int64_t ready_layers = -1, int64_t timeout_ms = 0) {
  PrefillEndpoint::Publication publication;
  publication.pages = pages;
  publication.num_tokens = static_cast<int64_t>(pages.size()) * pool.layout().page_size;
  publication.ready_layers = ready_layers < 0 ? pool.layout().num_layers : ready_layers;
  return Must(prefill.Push(ticket, publication, timeout_ms));
}

inline int PortOf(const std::string& address) {
  return std::stoi(address.substr(address.rfind(':') + 1));
}

inline std::future<absl::StatusOr<Fields>> BeginCall(Node& node, const std::string& address,
                                                     const std::string& function, Fields args,
                                                     Deadline deadline = Soon()) {
  const auto reply = std::make_shared<std::promise<absl::StatusOr<Fields>>>();
  Must(node.Call({address, function, std::move(args), deadline},
                 [reply](absl::StatusOr<Fields> said) { reply->set_value(std::move(said)); }));
  return reply->get_future();
}

template <typename Endpoint>
int64_t Metric(const Endpoint& endpoint, const std::string& name) {
  for (const auto& [key, value] : endpoint.Metrics()) {
    if (key == name) return value;
  }
  ADD_FAILURE() << "no metric " << name;
  return -1;
}

// Collects what TakeEnded() reports; each lease must be reported once.
class EndedLeases {
 public:
  explicit EndedLeases(PrefillEndpoint* prefill) : prefill_(prefill) {}

  // How the lease ended, waiting for it; "still live" after the deadline.
  std::string Wait(uint64_t lease_id, Deadline deadline = Soon()) {
    WaitFor([&] { return Take().contains(lease_id); }, deadline);
    const auto found = ended_.find(lease_id);
    return found == ended_.end() ? "still live" : found->second;
  }
  bool Contains(uint64_t lease_id) { return Take().contains(lease_id); }

 private:
  const std::map<uint64_t, std::string>& Take() {
    for (const EndedLease& lease : prefill_->TakeEnded()) {
      const bool first =
          ended_.emplace(lease.lease_id, std::string(LeaseOutcomeName(lease.outcome))).second;
      EXPECT_TRUE(first) << "lease " << lease.lease_id << " was reported twice";
    }
    return ended_;
  }

  PrefillEndpoint* prefill_;
  std::map<uint64_t, std::string> ended_;
};

}  // namespace kvferry
