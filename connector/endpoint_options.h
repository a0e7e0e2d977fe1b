#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/config.h"
#include "pool/kv_pool.h"
#include "transport/node.h"

namespace kvferry {

struct EndpointOptions {
  Config config;
  std::string model;  // What the KV belongs to; both sides must name the same.
  std::string name;   // For the peer's logs.
  // Of a decode endpoint: listen, so that prefill processes can push (DecodeEndpoint::Receive).
  bool accept_pushes = false;
  // Which of the model's KV heads the pool holds, of a tensor-parallel rank
  // (connector/tensor_parallel.h). The other side may have another number of ranks; it says at each
  // fetch which heads it wants.
  HeadShare heads{};
  // Whether the other side's pages may be of another size and order, if both sides say so. Not for
  // an owner who takes numbers of the other side's pages for numbers of its own.
  bool converts_pages = true;
  // Of what the pool stores, by KvLayout::buffer_index: a value stands for itself times this, as in
  // caches that keep x / scale (fp8). Empty: 1. The other side's dtypes and scales may be others:
  // its pages get what these stand for, rounded once (pool/casts.h).
  std::vector<float> scales{};
};

// What both kinds of endpoints have their nodes do. Who answers peers is theirs to say.
Node::Options NodeOptionsOf(const EndpointOptions& options, std::shared_ptr<const KvPool> pool);

// The timeout of a transfer that was asked for, 0 being the configured one. INVALID_ARGUMENT, with
// `what` it is of, unless it lies in [0, max_fetch_timeout_ms].
absl::StatusOr<int64_t> TimeoutMs(absl::string_view what, int64_t timeout_ms, const Config& config);

}  // namespace kvferry
