#pragma once

// Both sides of a lookup buffer as processes of their own.

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/process/peer_words.h"
#include "tests/support/lookup_buffers.h"

namespace kvferry {

class ProducerPeer {
 public:
  ProducerPeer(const std::shared_ptr<KvPool>& pool, const Config& config) {
    LookupProducer::Options options = ProducerOptions(pool);
    options.config = config;
    options.reply_lease_ms = 200;
    producer_ = Must(LookupProducer::Create(options));
  }

  std::string Greeting() const { return absl::StrCat("ready ", producer_->address()); }

  std::string Handle(const Words& words) {
    if (words[0] == "insert") {  // TOKENS PAGES
      const auto entry = producer_->Insert(Numbers<int32_t>(words[1]), std::nullopt,
                                           Numbers(words[2]), DeadlineInMs(20000));
      return entry.ok() ? absl::StrCat(*entry) : Answer(entry.status());
    }
    if (words[0] == "gone") {  // ENTRY MS: how it left, waiting for it.
      const auto entry = static_cast<uint64_t>(Number(words[1]));
      WaitFor([&] { return TakeGone().contains(entry); }, DeadlineInMs(Number(words[2])));
      return gone_.contains(entry) ? gone_[entry] : "here";
    }
    if (words[0] == "metric") return absl::StrCat(Metric(*producer_, words[1]));
    return "what?";
  }

 private:
  std::map<uint64_t, std::string>& TakeGone() {
    for (const GoneEntry& gone : producer_->TakeGone()) {
      std::string& how = gone_[gone.entry];
      how = !how.empty() ? "gone twice" : gone.fetched ? "fetched" : "dropped";
    }
    return gone_;
  }

  std::unique_ptr<LookupProducer> producer_;
  std::map<uint64_t, std::string> gone_;
};

class ConsumerPeer {
 public:
  ConsumerPeer(std::shared_ptr<KvPool> pool, const Config& config, uint64_t seed)
      : pool_(std::move(pool)), config_(config), seed_(seed) {}

  std::string Greeting() const { return "ready"; }

  std::string Handle(const Words& words) {
    if (words[0] == "connect") {  // ADDRESS,ADDRESS,...
      LookupConsumer::Options options = ConsumerOptions(pool_, absl::StrSplit(words[1], ','));
      options.config = config_;
      consumer_ = Must(LookupConsumer::Create(options));
      return "OK";
    }
    if (words[0] == "lookup") {  // TOKENS|any PAGES MS
      std::optional<std::vector<int32_t>> tokens;
      if (words[1] != "any") tokens = Numbers<int32_t>(words[1]);
      const auto handle =
          consumer_->DropSelect(Lookup(tokens, Numbers(words[2]), Number(words[3])));
      if (!handle.ok()) return Answer(handle.status());
      handles_.push_back(*handle);
      return absl::StrCat(handles_.size() - 1);
    }
    if (words[0] == "wait") {  // LOOKUP MS
      const LookupHandle& handle = *handles_[Number(words[1])];
      handle.Wait(DeadlineInMs(Number(words[2]))).IgnoreError();
      return handle.done() ? Answer(handle.status()) : "PENDING";
    }
    if (words[0] == "cancel") {
      handles_[Number(words[1])]->Cancel();
      return "OK";
    }
    if (words[0] == "result") {  // How many tokens match, pages, tokens.
      const LookupResult result = handles_[Number(words[1])]->result();
      return absl::StrCat(result.num_matched, " ", absl::StrJoin(result.pages, ","), " ",
                          absl::StrJoin(result.tokens, ","));
    }
    if (words[0] == "metric") return absl::StrCat(Metric(*consumer_, words[1]));
    if (words[0] == "verify") return Verify(*pool_, seed_, words);
    if (words[0] == "reset") {
      FillPattern(*pool_, seed_);
      return "OK";
    }
    return "what?";
  }

 private:
  const std::shared_ptr<KvPool> pool_;
  const Config config_;
  const uint64_t seed_;
  std::unique_ptr<LookupConsumer> consumer_;
  std::vector<std::shared_ptr<LookupHandle>> handles_;
};

}  // namespace kvferry
