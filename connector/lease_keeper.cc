#include "connector/lease_keeper.h"

#include <bit>
#include <cstring>
#include <string_view>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace kvferry {

namespace keep_call {

static_assert(std::endian::native == std::endian::little);  // As the numbers are on the wire.

Fields ArgsFor(absl::Span<const uint64_t> lease_ids) {
  std::string bytes(lease_ids.size() * sizeof(uint64_t), '\0');
  if (!bytes.empty()) std::memcpy(bytes.data(), lease_ids.data(), bytes.size());
  return Fields().Set(kLeases, std::move(bytes));
}

absl::StatusOr<std::vector<uint64_t>> LeasesOf(const Fields& args) {
  KVFERRY_ASSIGN_OR_RETURN(const std::string_view bytes,
                           args.Bytes(kLeases, kMaxLeases * sizeof(uint64_t)));
  if (bytes.size() % sizeof(uint64_t) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("keep: leases: ", bytes.size(), " bytes are no list of 64-bit numbers"));
  }
  std::vector<uint64_t> lease_ids(bytes.size() / sizeof(uint64_t));
  if (!bytes.empty()) std::memcpy(lease_ids.data(), bytes.data(), bytes.size());
  return lease_ids;
}

}  // namespace keep_call

void LeaseKeeper::OnCall(const CallKey& call, const std::string& function, const Fields& args,
                         Deadline /*deadline*/) {
  if (function == keep_call::kKeep) return node_.get().Reply(call, Keep(args));
  node_.get().Reply(call, absl::UnimplementedError(absl::StrCat("a prefill side has no function '",
                                                                absl::CEscape(function), "'")));
}

absl::StatusOr<Fields> LeaseKeeper::Keep(const Fields& args) {
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<uint64_t> lease_ids, keep_call::LeasesOf(args));
  return Fields().Set(keep_call::kKept,
                      static_cast<uint64_t>(leases_->Keep(lease_ids, DeadlineInMs(lease_ms_))));
}

}  // namespace kvferry
