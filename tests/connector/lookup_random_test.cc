// Random inserts and lookups over loopback beside a dictionary, from eight threads.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <numeric>
#include <random>
#include <thread>

#include "base/mutex.h"
#include "tests/support/lookup_buffers.h"

namespace kvferry {
namespace {

using Tokens = std::vector<int32_t>;
using Pages = std::vector<int64_t>;
constexpr int64_t kProducers = 4, kConsumers = 4;
constexpr int64_t kPages = 16;         // Of each producer.
constexpr int64_t kMaxEntryPages = 3;  // Of an entry.
constexpr int32_t kGroups = 8;
constexpr int64_t kRunMs = 2500;

// What was inserted and is not delivered yet, by its number.
class Dictionary {
 public:
  struct Entry {
    Tokens tokens;
    int64_t producer;
    Pages pages;
  };
  int32_t Add(Entry entry, int32_t group) {
    const MutexLock lock(&mutex_);
    const int32_t number = next_++;
    entry.tokens[0] = group;
    if (entry.tokens.size() == 1) entry.tokens.push_back(0);
    entry.tokens[1] = number;
    entries_[number] = std::move(entry);
    return number;
  }
  Entry Get(int32_t number) const {
    const MutexLock lock(&mutex_);
    return entries_.at(number);
  }
  // Some entry's tokens.
  std::optional<Tokens> Any(uint64_t random) const {
    const MutexLock lock(&mutex_);
    if (entries_.empty()) return std::nullopt;
    const auto step = static_cast<ptrdiff_t>(random % entries_.size());
    return std::next(entries_.begin(), step)->second.tokens;
  }
  // The entry, the first time that it is delivered.
  std::optional<Entry> Deliver(int32_t number) {
    const MutexLock lock(&mutex_);
    auto entry = entries_.extract(number);
    if (entry.empty()) return std::nullopt;
    ++delivered_;
    return std::move(entry.mapped());
  }
  bool empty() const {
    const MutexLock lock(&mutex_);
    return entries_.empty();
  }
  int64_t delivered() const {
    const MutexLock lock(&mutex_);
    return delivered_;
  }

 private:
  mutable Mutex mutex_;
  int32_t next_ ABSL_GUARDED_BY(mutex_) = 1;
  int64_t delivered_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int32_t, Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

// Inserts from one producer until time is up; its pages go round.
void Produce(Dictionary& dictionary, LookupProducer& producer, int64_t index, Deadline end) {
  std::mt19937_64 random(static_cast<uint64_t>(index));
  Pages free(kPages);
  std::iota(free.begin(), free.end(), 0);
  std::map<uint64_t, Pages> lent;
  while (Clock::now() < end) {
    for (const GoneEntry& gone : producer.TakeGone()) {
      ASSERT_TRUE(gone.fetched);
      const Pages& pages = lent.at(gone.entry);
      free.insert(free.end(), pages.begin(), pages.end());
      lent.erase(gone.entry);
    }
    const auto num_pages = 1 + static_cast<int64_t>(random() % kMaxEntryPages);
    if (static_cast<int64_t>(free.size()) < num_pages) {
      std::this_thread::yield();
      continue;
    }
    std::shuffle(free.begin(), free.end(), random);
    const Pages pages(free.end() - num_pages, free.end());
    free.resize(free.size() - pages.size());
    const auto num_tokens = 16 * (num_pages - 1) + 2 + static_cast<int64_t>(random() % 15);
    Tokens tokens(static_cast<size_t>(num_tokens), 7);
    const int32_t number =
        dictionary.Add({tokens, index, pages}, static_cast<int32_t>(random() % kGroups));
    tokens = dictionary.Get(number).tokens;
    lent[Must(producer.Insert(tokens, std::nullopt, pages, Soon()))] = pages;
  }
}

// What a query may be: anything, a group, an entry that is there or was a moment ago, longer ones.
std::optional<Tokens> RandomQuery(const Dictionary& dictionary, std::mt19937_64& random) {
  switch (random() % 4) {
    case 0:
      return std::nullopt;
    case 1:
      return Tokens{static_cast<int32_t>(random() % kGroups)};
    case 2: {
      auto tokens = dictionary.Any(random());
      if (tokens) tokens->push_back(99);
      return tokens;
    }
    default:
      return dictionary.Any(random());
  }
}

void CheckDelivered(Dictionary& dictionary, const std::optional<Tokens>& query,
                    const LookupResult& result, const KvPool& pool) {
  const auto entry = dictionary.Deliver(result.tokens.at(1));
  ASSERT_TRUE(entry) << "entry " << result.tokens[1] << " was delivered twice";
  ASSERT_EQ(result.tokens, entry->tokens);
  const size_t matched =
      query ? std::min(query->size(), entry->tokens.size()) : entry->tokens.size();
  ASSERT_EQ(result.num_matched, static_cast<int64_t>(matched));
  if (query) {
    ASSERT_TRUE(std::equal(query->begin(), query->begin() + static_cast<ptrdiff_t>(matched),
                           entry->tokens.begin()));
  }
  ASSERT_EQ(result.pages.size(), (matched + 15) / 16);
  const Pages source(entry->pages.begin(),
                     entry->pages.begin() + static_cast<ptrdiff_t>(result.pages.size()));
  ASSERT_TRUE(HoldsPages(pool, result.pages, static_cast<uint64_t>(entry->producer), source, 0,
                         pool.layout().num_layers));
}

// Looks up until time is up and nothing is left; sometimes it gives up or has too few pages.
void Consume(Dictionary& dictionary, LookupConsumer& consumer, const KvPool& pool, int64_t index,
             Deadline end) {
  std::mt19937_64 random(static_cast<uint64_t>(100 + index));
  const Pages pages = {3 * index, 3 * index + 1, 3 * index + 2};
  const Deadline last = end + std::chrono::seconds(20);
  while (Clock::now() < end || !dictionary.empty()) {
    ASSERT_LT(Clock::now(), last) << "entries are lost";
    const bool ended = Clock::now() >= end;
    const auto query = ended ? std::nullopt : RandomQuery(dictionary, random);
    const bool few = !ended && random() % 8 == 0;
    const auto handle = Must(consumer.DropSelect(Lookup(query, few ? Pages{pages[0]} : pages, 20)));
    if (!ended && random() % 8 == 0) handle->Cancel();
    const absl::Status status = handle->Wait(Soon());
    if (status.ok()) {
      CheckDelivered(dictionary, query, handle->result(), pool);
    } else {
      ASSERT_TRUE(absl::IsDeadlineExceeded(status) || absl::IsCancelled(status) ||
                  (few && absl::IsResourceExhausted(status)))
          << status;
    }
  }
}

TEST(RandomLookups, EachEntryIsDeliveredOnceAndWhole) {
  Dictionary dictionary;
  std::vector<std::unique_ptr<LookupProducer>> producers;
  std::vector<std::string> addresses;
  for (int64_t p = 0; p < kProducers; ++p) {
    LookupProducer::Options options =
        ProducerOptions(MakePatternPool(SmallLayout(), kPages, static_cast<uint64_t>(p)));
    options.max_bytes /= 2;
    options.reply_lease_ms = 200;  // So short that some end.
    producers.push_back(Must(LookupProducer::Create(options)));
    addresses.push_back(producers.back()->address());
  }
  const auto pool = MakePatternPool(SmallLayout(), 3 * kConsumers, 77);
  std::vector<std::unique_ptr<LookupConsumer>> consumers;
  consumers.reserve(2);
  for (int i = 0; i < 2; ++i) {
    consumers.push_back(Must(LookupConsumer::Create(ConsumerOptions(pool, addresses))));
  }
  const Deadline end = DeadlineInMs(kRunMs);
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < kProducers; ++i) {
    threads.emplace_back([&, i] { Produce(dictionary, *producers[i], i, end); });
  }
  for (int64_t i = 0; i < kConsumers; ++i) {
    threads.emplace_back([&, i] { Consume(dictionary, *consumers[i % 2], *pool, i, end); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(dictionary.empty());
  EXPECT_GT(dictionary.delivered(), 20);
  std::printf("delivered %ld entries\n", static_cast<long>(dictionary.delivered()));
  for (const auto& producer : producers) {
    EXPECT_TRUE(WaitFor([&] { return producer->num_entries() + producer->bytes() == 0; }, Soon()));
  }
}

}  // namespace
}  // namespace kvferry
