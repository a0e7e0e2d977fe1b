#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "pool/kv_layout.h"

namespace kvferry {

// What KV depends on besides tokens. KV of another scope never has the same key.
struct KeyScope {
  std::string model;  // Name and revision, or a fingerprint of the weights. Not empty.
  KvLayout layout;
  // Tensor-parallel rank, pipeline stage: which part of the KV. Not negative.
  int64_t partition = 0;
  std::string salt;  // Keeps tenants apart.
};

// Keys of the full blocks of `page_size` tokens that `tokens` begin with, 32 bytes each. The key of
// a block stands for all tokens up to its end: two prompts share the keys of the blocks of their
// common prefix and no others. With `parent`, the key of the block before, the tokens go on where
// that block ended. Tokens that fill no block have no key.
//
//   scope = SHA-256(str("kvferry block scope 1") str(model) i64(num_layers) i64(page_size)
//                   str(dtype) str(page_format) i64(number of tensors)
//                   and for each tensor str(name) i64(num_heads) i64(head_dim) str(its dtype)
//                   i64(partition) str(salt))
//   key   = SHA-256(str("kvferry block key 1") scope str(parent key, empty for the first block)
//                   i64(number of tokens) and each token as i32)
//
// with i64 and i32 little-endian, str(s) = i64(length of s) s, and dtypes by name (DTypeName). A
// cryptographic hash, because prompts come from strangers: nobody can make a prompt that is given
// another one's KV.
//
// INVALID_ARGUMENT for a scope without a model, with a bad layout or a negative partition, for
// page_size outside [1, KvLayout::kMaxPageSize], and for a parent that is not 32 bytes.
// Thread-safe.
absl::StatusOr<std::vector<std::string>> BlockKeys(
    std::span<const int32_t> tokens, int64_t page_size, const KeyScope& scope,
    std::optional<std::string_view> parent = std::nullopt);

}  // namespace kvferry
