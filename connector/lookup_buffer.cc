#include "connector/lookup_buffer.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check_range.h"
#include "base/packed_numbers.h"
#include "base/status.h"

namespace kvferry {
namespace {

absl::Status CheckCount(size_t count) {
  if (count >= 1 && count <= static_cast<size_t>(kMaxLookupTokens)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "lookup: ", count, " tokens are selected but there must be 1 to ", kMaxLookupTokens));
}

}  // namespace

absl::StatusOr<std::vector<int32_t>> SelectTokens(std::span<const int32_t> tokens,
                                                  const std::optional<std::vector<bool>>& roi) {
  if (roi && roi->size() != tokens.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "lookup: roi has ", roi->size(), " values but there are ", tokens.size(), " tokens"));
  }
  std::vector<int32_t> selected;
  if (!roi) {
    selected.assign(tokens.begin(), tokens.end());
  } else {
    for (size_t i = 0; i < tokens.size(); ++i) {
      if ((*roi)[i]) selected.push_back(tokens[i]);
    }
  }
  KVFERRY_RETURN_IF_ERROR(CheckCount(selected.size()));
  return selected;
}

absl::Status CheckPartition(int64_t partition) {
  return CheckRange("lookup", "partition", partition, 0, kMaxLookupPartition);
}

std::string PackTokens(std::span<const int32_t> tokens) { return PackNumbers(tokens); }

absl::StatusOr<std::vector<int32_t>> UnpackTokens(std::string_view bytes) {
  std::optional<std::vector<int32_t>> tokens = UnpackNumbers<int32_t>(bytes);
  if (!tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("lookup: ", bytes.size(), " bytes of tokens, not a multiple of 4"));
  }
  KVFERRY_RETURN_IF_ERROR(CheckCount(tokens->size()));
  return *std::move(tokens);
}

}  // namespace kvferry
