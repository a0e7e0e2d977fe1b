#include "connector/lease_keeper.h"

#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/packed_numbers.h"
#include "base/status.h"

namespace kvferry {

namespace keep_call {

Fields ArgsFor(absl::Span<const uint64_t> lease_ids) {
  return Fields().Set(kLeases, PackNumbers(std::span(lease_ids.data(), lease_ids.size())));
}

absl::StatusOr<std::vector<uint64_t>> LeasesOf(const Fields& args) {
  KVFERRY_ASSIGN_OR_RETURN(const std::string_view bytes,
                           args.Bytes(kLeases, kMaxLeases * sizeof(uint64_t)));
  std::optional<std::vector<uint64_t>> lease_ids = UnpackNumbers<uint64_t>(bytes);
  if (lease_ids) return *std::move(lease_ids);
  return absl::InvalidArgumentError(
      absl::StrCat("keep: leases: ", bytes.size(), " bytes are no list of 64-bit numbers"));
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
