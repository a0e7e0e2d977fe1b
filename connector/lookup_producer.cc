#include "connector/lookup_producer.h"

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "connector/kv_tensors.h"

namespace kvferry {
namespace {

absl::Status CheckOptions(const LookupProducer::Options& options) {
  if (options.pool == nullptr) return absl::InvalidArgumentError("lookup: no pool");
  KVFERRY_RETURN_IF_ERROR(CheckPartition(options.partition));
  if (options.reply_lease_ms >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "lookup: reply_lease_ms is ", options.reply_lease_ms, " but must be at least 1"));
}

absl::StatusOr<std::shared_ptr<LookupEntry>> NewEntry(std::vector<std::byte> hidden) {
  if (static_cast<int64_t>(hidden.size()) > kMaxLookupHiddenBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "lookup: ", hidden.size(), " bytes of hidden states, limit ", kMaxLookupHiddenBytes));
  }
  auto entry = std::make_shared<LookupEntry>();
  if (!hidden.empty()) {
    entry->hidden = std::make_shared<const std::vector<std::byte>>(std::move(hidden));
  }
  return entry;
}

absl::Status CheckOpen(const Gate::Pass& pass) {
  return pass.open() ? absl::OkStatus() : absl::CancelledError("lookup: the buffer was closed");
}

}  // namespace

LookupProducer::LookupProducer(const Options& options, std::shared_ptr<LookupTable> table,
                               std::unique_ptr<CopyPages> copies)
    : options_(options),
      table_(std::move(table)),
      copies_(std::move(copies)),
      service_({options.config, options.partition, options.pool->layout().num_layers,
                options.reply_lease_ms},
               table_) {}

absl::StatusOr<std::unique_ptr<LookupProducer>> LookupProducer::Create(const Options& options) {
  KVFERRY_RETURN_IF_ERROR(CheckOptions(options));
  KVFERRY_ASSIGN_OR_RETURN(
      std::shared_ptr<LookupTable> table,
      LookupTable::Create({.max_bytes = options.max_bytes, .max_tokens = kMaxLookupTokens}));
  KVFERRY_ASSIGN_OR_RETURN(std::unique_ptr<CopyPages> copies,
                           CopyPages::Create(options.pool->num_pages(), options.copy_pages));
  std::unique_ptr<LookupProducer> producer(
      new LookupProducer(options, std::move(table), std::move(copies)));
  Node::Options node;
  node.config = options.config;
  node.model = options.model;
  node.name = options.name;
  node.pool = options.pool;
  node.source = &producer->service_;
  node.handler = &producer->service_;
  node.listen = true;
  KVFERRY_ASSIGN_OR_RETURN(std::unique_ptr<Node> started, Node::Start(std::move(node)));
  producer->service_.Attach(started.get());
  producer->address_ = started->listen_address();
  const MutexLock lock(&producer->mutex_);
  producer->node_ = std::move(started);
  return producer;
}

void LookupProducer::Close() {
  close_once_.Run([this] {
    copies_->Close();
    table_->Close();
    gate_.Close();
    std::shared_ptr<Node> node;
    {
      const MutexLock lock(&mutex_);
      node = std::move(node_);
    }
    service_.Close();
    node.reset();
    service_.DropLeased();  // Nobody reads their pages any more.
  });
}

// ---------------------------------------------------------------- inserts

absl::StatusOr<PageRuns> LookupProducer::CheckPages(std::span<const int64_t> pages,
                                                    int64_t num_tokens) const {
  const int64_t page_size = options_.pool->layout().page_size;
  const int64_t needed = PagesOfTokens(num_tokens, page_size);
  if (static_cast<int64_t>(pages.size()) != needed) {
    return absl::InvalidArgumentError(absl::StrCat("lookup: ", pages.size(), " pages for ",
                                                   num_tokens, " tokens, which fill ", needed,
                                                   " of ", page_size));
  }
  KVFERRY_ASSIGN_OR_RETURN(PageRuns runs, PageRuns::FromPages(pages));
  KVFERRY_RETURN_IF_ERROR(runs.CheckWithin(num_own_pages()));
  return runs;
}

absl::Status LookupProducer::CheckGone() const {
  const MutexLock lock(&gone_->mutex);
  const auto count = static_cast<int64_t>(gone_->entries.size());
  if (count < options_.config.max_leases) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("max_leases (", options_.config.max_leases,
                                                   "): ", count,
                                                   " entries are gone and have not been taken"));
}

int64_t LookupProducer::BytesOf(int64_t num_pages, size_t hidden_bytes) const {
  return num_pages * options_.pool->layout().page_bytes() + static_cast<int64_t>(hidden_bytes);
}

absl::Status LookupProducer::Keep(LookupTable::Tokens tokens,
                                  const std::shared_ptr<LookupEntry>& entry, Deadline deadline) {
  const size_t hidden_bytes = entry->hidden ? entry->hidden->size() : 0;
  return table_->Insert(std::move(tokens), BytesOf(entry->pages.num_pages(), hidden_bytes), entry,
                        deadline);
}

absl::StatusOr<uint64_t> LookupProducer::Insert(std::span<const int32_t> tokens,
                                                const std::optional<std::vector<bool>>& roi,
                                                std::span<const int64_t> pages, Deadline deadline,
                                                std::vector<std::byte> hidden) {
  const Gate::Pass pass(&gate_);
  KVFERRY_RETURN_IF_ERROR(CheckOpen(pass));
  KVFERRY_ASSIGN_OR_RETURN(LookupTable::Tokens selected, SelectTokens(tokens, roi));
  KVFERRY_ASSIGN_OR_RETURN(auto entry, NewEntry(std::move(hidden)));
  KVFERRY_ASSIGN_OR_RETURN(entry->pages, CheckPages(pages, static_cast<int64_t>(selected.size())));
  KVFERRY_RETURN_IF_ERROR(CheckGone());
  entry->id = next_entry_++;
  entry->on_gone = [gone = gone_](const LookupEntry& left) {
    const MutexLock lock(&gone->mutex);
    gone->entries.push_back({left.id, left.fetched});
  };
  const uint64_t id = entry->id;
  absl::Cleanup never_in = [&] { entry->on_gone = nullptr; };
  KVFERRY_RETURN_IF_ERROR(Keep(std::move(selected), entry, deadline));
  std::move(never_in).Cancel();
  return id;
}

absl::Status LookupProducer::InsertTensors(std::span<const int32_t> tokens,
                                           const std::optional<std::vector<bool>>& roi,
                                           std::span<const std::byte> key,
                                           std::span<const std::byte> value, Deadline deadline,
                                           std::vector<std::byte> hidden) {
  const Gate::Pass pass(&gate_);
  KVFERRY_RETURN_IF_ERROR(CheckOpen(pass));
  KVFERRY_ASSIGN_OR_RETURN(LookupTable::Tokens selected, SelectTokens(tokens, roi));
  const KvPool& pool = *options_.pool;
  const auto num_tokens = static_cast<int64_t>(selected.size());
  KVFERRY_RETURN_IF_ERROR(CheckTensors(pool.layout(), num_tokens, key, value));
  const int64_t num_pages = PagesOfTokens(num_tokens, pool.layout().page_size);
  // Before it waits for pages.
  KVFERRY_RETURN_IF_ERROR(table_->CheckInsert(selected, BytesOf(num_pages, hidden.size())));
  KVFERRY_ASSIGN_OR_RETURN(auto entry, NewEntry(std::move(hidden)));
  std::function<void(const LookupEntry&)> free = [copies = copies_](const LookupEntry& left) {
    copies->Free(left.pages);
  };
  KVFERRY_ASSIGN_OR_RETURN(entry->pages, copies_->Allocate(num_pages, deadline));
  entry->on_gone = std::move(free);
  KVFERRY_RETURN_IF_ERROR(CopyTensorsToPages(key, value, num_tokens, pool, entry->pages));
  return Keep(std::move(selected), entry, deadline);
}

std::vector<GoneEntry> LookupProducer::TakeGone() {
  const MutexLock lock(&gone_->mutex);
  return std::exchange(gone_->entries, {});
}

std::vector<std::pair<std::string, int64_t>> LookupProducer::Metrics() const {
  std::vector<std::pair<std::string, int64_t>> metrics;
  {
    const MutexLock lock(&mutex_);
    if (node_ != nullptr) metrics = node_->Metrics();
  }
  metrics.emplace_back("lookup_entries", num_entries());
  metrics.emplace_back("lookup_waiting", num_waiting());
  metrics.emplace_back("lookup_bytes", bytes());
  metrics.emplace_back("lookup_leased", service_.num_leased());
  return metrics;
}

}  // namespace kvferry
