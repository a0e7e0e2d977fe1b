#include "connector/store/store_wire.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace kvferry {
namespace {

constexpr size_t kLengthBytes = 2;

absl::Status NoKeys(std::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("store: a list of keys that ", std::string(what)));
}

// What a server means by it, of one key.
std::string_view MeaningOf(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kNotFound:
      return "no such entry there";
    case absl::StatusCode::kFailedPrecondition:
      return "the value there has another length than a page, put as bytes or with another layout; "
             "or the tier below is set up otherwise than the server was told";
    case absl::StatusCode::kPermissionDenied:
      return "the tier below refuses the server: look at its password and rights there";
    case absl::StatusCode::kResourceExhausted:
      return "no room there now: entries that are pinned or being read or put take all of it, or a "
             "tier below is full; try again, unpin entries or give the server more";
    case absl::StatusCode::kDeadlineExceeded:
      return "the deadline passed there: others were before this, or the tier below did not answer";
    case absl::StatusCode::kUnavailable:
      return "the tier below cannot be asked now";
    case absl::StatusCode::kDataLoss:
      return "the value there is damaged";
    default:
      return "";
  }
}

}  // namespace

absl::StatusOr<std::string> PackKeys(std::span<const std::string_view> keys) {
  std::string packed;
  for (const std::string_view key : keys) {
    KVFERRY_RETURN_IF_ERROR(CheckKey(key));
    packed.push_back(static_cast<char>(key.size() & 0xff));
    packed.push_back(static_cast<char>(key.size() >> 8));
    packed += key;
  }
  return packed;
}

absl::StatusOr<std::vector<std::string>> UnpackKeys(std::string_view packed) {
  std::vector<std::string> keys;
  while (!packed.empty()) {
    if (keys.size() == kMaxKeysPerCall) {
      return NoKeys(absl::StrCat("has more than ", kMaxKeysPerCall, "; ask in several calls"));
    }
    if (packed.size() < kLengthBytes) return NoKeys("ends inside a length");
    const size_t bytes =
        static_cast<uint8_t>(packed[0]) | static_cast<size_t>(static_cast<uint8_t>(packed[1])) << 8;
    packed.remove_prefix(kLengthBytes);
    if (packed.size() < bytes) return NoKeys("ends inside a key");
    keys.emplace_back(packed.substr(0, bytes));
    KVFERRY_RETURN_IF_ERROR(CheckKey(keys.back()));
    packed.remove_prefix(bytes);
  }
  return keys;
}

std::string PackCodes(std::span<const absl::Status> statuses) {
  std::string packed;
  for (const absl::Status& status : statuses) packed.push_back(static_cast<char>(status.code()));
  return packed;
}

absl::StatusOr<std::vector<absl::Status>> UnpackCodes(std::string_view packed, size_t count) {
  if (packed.size() != count) {
    return absl::InternalError(
        absl::StrCat("store: the server answered for ", packed.size(), " of ", count, " keys"));
  }
  std::vector<absl::Status> statuses;
  for (const char byte : packed) {
    const auto code = static_cast<absl::StatusCode>(static_cast<uint8_t>(byte));
    if (code > absl::StatusCode::kUnauthenticated) {
      return absl::InternalError(absl::StrCat(
          "store: the server answered with a status of no meaning, ", static_cast<int>(code)));
    }
    const std::string_view meaning = MeaningOf(code);
    statuses.emplace_back(code,
                          absl::StrCat("store: the server says ", absl::StatusCodeToString(code),
                                       meaning.empty() ? "" : ": ", std::string(meaning)));
  }
  return statuses;
}

absl::Status OfTransfer(const absl::Status& ended) {
  if (!absl::IsNotFound(ended) && !absl::IsFailedPrecondition(ended)) return ended;
  return absl::UnavailableError(ended.message());
}

}  // namespace kvferry
