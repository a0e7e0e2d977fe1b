// Lookup buffers: lookups a second at 10^2, 10^4 and 10^6 entries, and beside 10^2 and 10^4 lookups
// that wait, which take turns; the tables have medians of the rounds, and every answer is compared
// with what was put.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <functional>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "bench/must.h"
#include "connector/lookup_consumer.h"
#include "connector/lookup_producer.h"
#include "connector/lookup_table.h"

namespace kvferry::bench {
namespace {

constexpr int64_t kTokens = 256;
constexpr int64_t kLookupsARound = 20000;

double Seconds(const std::function<void()>& fn) {
  const Deadline begin = Clock::now();
  fn();
  return SecondsBetween(begin, Clock::now());
}

struct Spread {
  double median, min, max;
};
Spread Of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {values[values.size() / 2], values.front(), values.back()};
}

// ---------------------------------------------------------------- lookups

// Prompts that share their first half with nine others, as those of one conversation or system
// prompt do.
LookupTable::Tokens PromptOf(int64_t entry) {
  LookupTable::Tokens tokens(kTokens);
  std::mt19937 head(static_cast<uint32_t>(entry / 10));
  std::mt19937 rest(static_cast<uint32_t>(entry) + 0x9e3779b9U);
  for (int64_t i = 0; i < kTokens; ++i) {
    tokens[i] = static_cast<int32_t>((i < kTokens / 2 ? head() : rest()) % 150000);
  }
  return tokens;
}

class FilledTable {
 public:
  explicit FilledTable(int64_t entries)
      : table_(Must(LookupTable::Create({.max_bytes = entries}))) {
    for (int64_t entry = 0; entry < entries; ++entry) {
      Must(table_->Insert(PromptOf(entry), 1, nullptr, DeadlineInMs(1000)));
    }
    std::mt19937_64 random(1);
    for (int64_t i = 0; i < kLookupsARound; ++i) queries_.push_back(PromptOf(random() % entries));
  }
  // Takes entries and puts them back: microseconds each.
  double Round() {
    const double seconds = Seconds([&] {
      for (LookupTable::Tokens& query : queries_) {
        auto taken = table_->TryTake(query);
        wrong_ += !taken.ok() || taken->tokens() != query;
        if (!taken.ok()) continue;
        LookupTable::Tokens tokens = taken->tokens();
        taken = absl::NotFoundError("");  // Gives its bytes back.
        Must(table_->Insert(std::move(tokens), 1, nullptr, DeadlineInMs(1000)));
      }
    });
    return seconds / kLookupsARound * 1e6;
  }
  int64_t wrong() const { return wrong_; }

 private:
  std::shared_ptr<LookupTable> table_;
  std::vector<LookupTable::Tokens> queries_;
  int64_t wrong_ = 0;
};

// A producer and a consumer: the same over the transport, with the page moved.
class FilledBuffer {
 public:
  explicit FilledBuffer(int64_t entries) {
    const KvLayout layout = KvLayout::Mha(1, kTokens, 1, 4, DType::kUint8);
    pool_ = Must(KvPool::Create(layout, 1));
    Config config;
    config.max_leases = 1 << 24;
    producer_ = Must(LookupProducer::Create({.config = config,
                                             .model = "bench",
                                             .name = "producer",
                                             .pool = pool_,
                                             .max_bytes = entries * layout.page_bytes()}));
    consumer_ = Must(LookupConsumer::Create({.config = config,
                                             .model = "bench",
                                             .name = "consumer",
                                             .pool = Must(KvPool::Create(layout, 1)),
                                             .producers = {producer_->address()}}));
    for (int64_t entry = 0; entry < entries; ++entry) Insert(PromptOf(entry));
    std::mt19937_64 random(1);
    for (int64_t i = 0; i < kMovesARound; ++i) queries_.push_back(PromptOf(random() % entries));
  }
  double Round() {
    const double seconds = Seconds([&] {
      for (const LookupTable::Tokens& query : queries_) {
        LookupConsumer::Request request;
        request.tokens = query;
        request.pages = {0};
        request.deadline = DeadlineInMs(10000);
        const auto handle = Must(consumer_->DropSelect(std::move(request)));
        Must(handle->Wait(DeadlineInMs(20000)));
        wrong_ += handle->result().tokens != query;
        Insert(query);
      }
    });
    producer_->TakeGone();
    return seconds / kMovesARound * 1e6;
  }
  int64_t wrong() const { return wrong_; }

 private:
  static constexpr int64_t kMovesARound = 500;
  void Insert(const LookupTable::Tokens& tokens) {
    const int64_t page = 0;
    Must(producer_->Insert(tokens, std::nullopt, {&page, 1}, DeadlineInMs(10000)).status());
  }

  std::shared_ptr<KvPool> pool_;
  std::unique_ptr<LookupProducer> producer_;
  std::unique_ptr<LookupConsumer> consumer_;
  std::vector<LookupTable::Tokens> queries_;
  int64_t wrong_ = 0;
};

// A consumer of eight producers, at each of which so many of its lookups wait for what never comes:
// one that finds its entry at one of them, over and over.
class WaitingLookups {
 public:
  explicit WaitingLookups(int64_t waiting) {
    const KvLayout layout = KvLayout::Mha(1, kTokens, 1, 4, DType::kUint8);
    pool_ = Must(KvPool::Create(layout, 1));
    Config config;
    config.max_leases = 1 << 24;
    config.max_calls_per_peer = 1 << 20;
    std::vector<std::string> addresses;
    for (int i = 0; i < kProducers; ++i) {
      producers_.push_back(Must(LookupProducer::Create({.config = config,
                                                        .model = "bench",
                                                        .name = "producer",
                                                        .pool = pool_,
                                                        .max_bytes = layout.page_bytes()})));
      addresses.push_back(producers_.back()->address());
    }
    consumer_ = Must(LookupConsumer::Create({.config = config,
                                             .model = "bench",
                                             .name = "consumer",
                                             .pool = Must(KvPool::Create(layout, 1)),
                                             .producers = addresses}));
    for (int64_t i = 0; i < waiting; ++i) Ask({static_cast<int32_t>(i), 7});
    for (const auto& producer : producers_) {
      while (producer->num_waiting() < waiting) std::this_thread::yield();
    }
  }
  double Round() {
    LookupTable::Tokens query = PromptOf(1);
    query[0] = -1;
    const int64_t page = 0;
    const double seconds = Seconds([&] {
      for (int i = 0; i < kMovesARound; ++i) {
        const auto& producer = producers_[static_cast<size_t>(i % kProducers)];
        Must(producer->Insert(query, std::nullopt, {&page, 1}, DeadlineInMs(10000)).status());
        const auto handle = Ask(query);
        Must(handle->Wait(DeadlineInMs(20000)));
        wrong_ += handle->result().tokens != query;
        producer->TakeGone();
      }
    });
    return seconds / kMovesARound * 1e6;
  }
  int64_t wrong() const { return wrong_; }

 private:
  static constexpr int kProducers = 8;
  static constexpr int kMovesARound = 200;

  std::shared_ptr<LookupHandle> Ask(LookupTable::Tokens tokens) {
    LookupConsumer::Request request;
    request.tokens = std::move(tokens);
    request.pages = {0};
    request.deadline = DeadlineInMs(600000);
    return Must(consumer_->DropSelect(std::move(request)));
  }

  std::shared_ptr<KvPool> pool_;
  std::vector<std::unique_ptr<LookupProducer>> producers_;
  std::unique_ptr<LookupConsumer> consumer_;
  int64_t wrong_ = 0;
};

template <typename Filled>
int64_t Lookups(const char* what, const char* of, const std::vector<int64_t>& sizes, int rounds) {
  std::vector<std::unique_ptr<Filled>> tables;
  tables.reserve(sizes.size());
  for (const int64_t size : sizes) tables.push_back(std::make_unique<Filled>(size));
  std::vector<std::vector<double>> us(sizes.size());
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < sizes.size(); ++i) us[i].push_back(tables[i]->Round());
  }
  std::printf("lookups of %lld tokens, %s; target: flat within 2x\n\n",
              static_cast<long long>(kTokens), what);
  std::printf("| %s | us | us min-max | lookups/s | x of the first |\n|---|---|---|---|---|\n", of);
  int64_t wrong = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const Spread spread = Of(us[i]);
    std::printf("| %lld | %.2f | %.2f-%.2f | %.0f | %.2f |\n", static_cast<long long>(sizes[i]),
                spread.median, spread.min, spread.max, 1e6 / spread.median,
                spread.median / Of(us[0]).median);
    wrong += tables[i]->wrong();
  }
  return wrong;
}

int Main(int argc, char** argv) {
  CLI::App app("Lookups a second by number of entries and of lookups that wait.");
  int rounds = 9;
  app.add_option("--reps", rounds, "of which the median counts")->check(CLI::Range(1, 1000));
  CLI11_PARSE(app, argc, argv);
  const std::vector<int64_t> entries = {100, 10000, 1000000};
  int64_t wrong =
      Lookups<FilledTable>("taken out of the table and put back", "entries", entries, rounds);
  std::printf("\n");
  wrong += Lookups<FilledBuffer>("fetched by another node and inserted again", "entries", entries,
                                 rounds);
  std::printf("\n");
  // A producer lets 65,536 of all its consumers wait.
  wrong += Lookups<WaitingLookups>("while others of the same consumer wait at eight producers",
                                   "waiting", {100, 10000}, rounds);
  if (wrong == 0) return 0;
  std::printf("\nWRONG: %lld answers were not what was put\n", static_cast<long long>(wrong));
  return 1;
}

}  // namespace
}  // namespace kvferry::bench

int main(int argc, char** argv) { return kvferry::bench::Main(argc, argv); }
