#include "connector/lookup_consumer.h"

#include "base/status.h"
#include "connector/lookup_queries.h"
#include "transport/ticket.h"

namespace kvferry {
namespace {

absl::Status CheckOptions(const LookupConsumer::Options& options) {
  if (options.pool == nullptr) return absl::InvalidArgumentError("lookup: no pool");
  if (options.producers.empty()) return absl::InvalidArgumentError("lookup: no producers");
  for (const std::string& address : options.producers) {
    KVFERRY_RETURN_IF_ERROR(CheckHostAllowed(address, options.config));
  }
  return CheckPartition(options.partition);
}

}  // namespace

absl::StatusOr<std::unique_ptr<LookupConsumer>> LookupConsumer::Create(const Options& options) {
  KVFERRY_RETURN_IF_ERROR(CheckOptions(options));
  auto queries = std::make_shared<LookupQueries>(options);
  KVFERRY_RETURN_IF_ERROR(queries->Start());
  return std::unique_ptr<LookupConsumer>(new LookupConsumer(std::move(queries)));
}

void LookupConsumer::Close() { queries_->Close(); }

absl::StatusOr<std::shared_ptr<LookupHandle>> LookupConsumer::DropSelect(Request request) {
  return queries_->Add(std::move(request));
}

std::vector<std::pair<std::string, int64_t>> LookupConsumer::Metrics() const {
  return queries_->Metrics();
}

}  // namespace kvferry
