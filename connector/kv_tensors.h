#pragma once

// Keys and values of a request as two tensors [layers, tokens, heads, dim], and as pages of a pool.

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pool/kv_pool.h"
#include "pool/page_runs.h"

namespace kvferry {

// Bytes of each of the two tensors. INVALID_ARGUMENT unless the layout has two tensors of one shape
// and dtype in page format NHD or HND, as KvLayout::Mha makes.
absl::StatusOr<int64_t> KvTensorBytes(const KvLayout& layout, int64_t num_tokens);

// INVALID_ARGUMENT as above, or naming the tensor that is of another size.
absl::Status CheckTensors(const KvLayout& layout, int64_t num_tokens,
                          std::span<const std::byte> key, std::span<const std::byte> value);

// Token i lies in page i / page_size of the list. INVALID_ARGUMENT as above or when the pages are
// too few; nothing is copied then.
absl::Status CopyTensorsToPages(std::span<const std::byte> key, std::span<const std::byte> value,
                                int64_t num_tokens, const KvPool& pool, const PageRuns& pages);
absl::Status CopyPagesToTensors(const KvPool& pool, const PageRuns& pages, int64_t num_tokens,
                                std::span<std::byte> key, std::span<std::byte> value);

}  // namespace kvferry
