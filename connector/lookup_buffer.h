#pragma once

// What both sides of a lookup buffer share: lookup_producer.h keeps entries, lookup_consumer.h
// takes them. docs/wire_protocol.md, "Functions", has what they say to each other.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/ceil_div.h"

namespace kvferry {

// Of an entry or a query: what fits in a message.
inline constexpr int64_t kMaxLookupTokens = 262144;
// Of the hidden states of an entry.
inline constexpr int64_t kMaxLookupHiddenBytes = int64_t{1} << 32;
inline constexpr int64_t kMaxLookupPartition = int64_t{1} << 31;

inline constexpr char kLookupFunction[] = "lookup";
inline constexpr char kLookupTakeFunction[] = "lookup_take";
inline constexpr char kLookupBackFunction[] = "lookup_back";

// The tokens whose KV an entry has, or a query wants: those that `roi` (region of interest, one
// bool a token; none: all) marks. INVALID_ARGUMENT naming both lengths when they differ, or when
// the result is empty or longer than kMaxLookupTokens.
absl::StatusOr<std::vector<int32_t>> SelectTokens(std::span<const int32_t> tokens,
                                                  const std::optional<std::vector<bool>>& roi);

// INVALID_ARGUMENT unless 0 <= partition <= kMaxLookupPartition.
absl::Status CheckPartition(int64_t partition);

// Pages that hold so many tokens.
inline int64_t PagesOfTokens(int64_t num_tokens, int64_t page_size) {
  return CeilDiv(num_tokens, page_size);
}

// Little-endian int32.
std::string PackTokens(std::span<const int32_t> tokens);
// INVALID_ARGUMENT for bytes that are no list of 1 to kMaxLookupTokens tokens.
absl::StatusOr<std::vector<int32_t>> UnpackTokens(std::string_view bytes);

}  // namespace kvferry
