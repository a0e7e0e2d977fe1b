#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "connector/store/kv_store.h"
#include "transport/fields.h"

namespace kvferry {

// The calls between RemoteStore and StoreServer (docs/wire_protocol.md, "Functions").
namespace store_call {
inline constexpr char kExists[] = "store.exists";
inline constexpr char kExistsEach[] = "store.exists_each";
inline constexpr char kErase[] = "store.erase";
inline constexpr char kPin[] = "store.pin";
inline constexpr char kUnpin[] = "store.unpin";
inline constexpr char kStats[] = "store.stats";
inline constexpr char kGet[] = "store.get";
inline constexpr char kPut[] = "store.put";
inline constexpr char kGetPages[] = "store.get_pages";
inline constexpr char kPutPages[] = "store.put_pages";
}  // namespace store_call

// What a server has under way as bytes, and not in place, all of it together; and so the longest
// value that is moved in this way.
inline constexpr int64_t kMaxStagedBytes = 256 << 20;

// Of the longest key in a list of keys.
inline constexpr size_t kMaxPackedKeyBytes = 2 + KvStore::kMaxKeyBytes;

// Of one call; more go in several, between which others have their turn.
inline constexpr size_t kMaxKeysPerCall = 4096;
static_assert(kMaxKeysPerCall * kMaxPackedKeyBytes + 4096 <= Fields::kMaxTotalBytes,
              "a call takes that many of the longest keys, and its other fields");

// Keys as one byte string: each a u16 of its length, little-endian, and its bytes. INVALID_ARGUMENT
// for a bad key, bytes that are no list of keys, or one of more than kMaxKeysPerCall.
absl::StatusOr<std::string> PackKeys(std::span<const std::string_view> keys);
absl::StatusOr<std::vector<std::string>> UnpackKeys(std::string_view packed);

// The codes of statuses, a byte each. Unpacked ones say what the code means of a key, and no more.
// INTERNAL for another number of them, or a code of no meaning.
std::string PackCodes(std::span<const absl::Status> statuses);
absl::StatusOr<std::vector<absl::Status>> UnpackCodes(std::string_view packed, size_t count);

// How a transfer between the two ended, as a store says it. What a transfer says with NOT_FOUND and
// FAILED_PRECONDITION, of leases, processes and sessions, is UNAVAILABLE: a store would mean a miss
// by them, or another length.
absl::Status OfTransfer(const absl::Status& ended);

}  // namespace kvferry
