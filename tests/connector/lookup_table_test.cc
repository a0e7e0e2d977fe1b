#include "connector/lookup_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <map>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "tests/support/failing_new.h"
#include "tests/support/status.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

using Tokens = LookupTable::Tokens;
using Taken = LookupTable::Taken;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;
constexpr auto kLate = absl::StatusCode::kDeadlineExceeded;
constexpr auto kCancelled = absl::StatusCode::kCancelled;

Deadline Now() { return Clock::now(); }

std::shared_ptr<LookupTable> Table(int64_t max_bytes = 1000) {
  return Must(LookupTable::Create({.max_bytes = max_bytes}));
}

LookupTable::Payload Number(int64_t number) { return std::make_shared<int64_t>(number); }
int64_t NumberOf(const Taken& taken) { return *static_cast<int64_t*>(taken.payload().get()); }

// Asks, and waits for the answer.
absl::StatusOr<Taken> Take(LookupTable& table, std::optional<Tokens> tokens, Deadline deadline) {
  const auto answer = std::make_shared<std::promise<absl::StatusOr<Taken>>>();
  std::future<absl::StatusOr<Taken>> answered = answer->get_future();
  const absl::Status asked =
      table
          .Ask(std::move(tokens), deadline,
               [answer](absl::StatusOr<Taken> taken) { answer->set_value(std::move(taken)); })
          .status();
  if (!asked.ok()) return asked;
  // It comes from here then, or is on its way from another thread.
  if (answered.wait_until(deadline) != std::future_status::ready) table.Expire(deadline);
  return answered.get();
}

TEST(LookupTables, AnEntryGoesToOneConsumer) {
  const auto table = Table();
  ASSERT_TRUE(IsOk(table->Insert({1, 2, 3}, 10, Number(7), Now())));
  EXPECT_EQ(table->bytes(), 10);
  {
    const Taken taken = Must(Take(*table, Tokens{1, 2, 3, 4}, Now()));
    EXPECT_EQ(NumberOf(taken), 7);
    EXPECT_EQ(taken.num_matched(), 3);
    EXPECT_EQ(taken.tokens(), (Tokens{1, 2, 3}));
    EXPECT_EQ(table->num_entries(), 0);
    EXPECT_EQ(table->bytes(), 10);  // Until it has been moved.
    EXPECT_TRUE(Fails(table->TryTake(Tokens{1, 2, 3}), absl::StatusCode::kNotFound));
  }
  EXPECT_EQ(table->bytes(), 0);
}

// ---------------------------------------------------------------- without memory

// Whatever it needs: a first child of a node, one more of few and of many, and a place where
// entries part.
TEST(LookupTables, AnInsertThatFindsNoMemoryChangesNothing) {
  const auto table = Table(1 << 20);
  std::vector<Tokens> entries = {{1, 2, 3}, {1, 2, 3}, {1, 2}, {1, 2, 3, 4}, {1, 5, 6}, {1, 5, 7}};
  for (int32_t first = 2; first < 200; ++first) entries.push_back({first, first});
  for (size_t i = 0; i < entries.size(); ++i) {
    SCOPED_TRACE(i);
    const auto number = Number(static_cast<int64_t>(i));
    CallWithoutMemory([&] { ASSERT_TRUE(IsOk(table->Insert(entries[i], 1, number, Now()))); },
                      [&] {
                        ASSERT_EQ(table->num_entries(), i);
                        EXPECT_EQ(table->bytes(), i);
                        EXPECT_EQ(number.use_count(), 1);
                      });
  }
  for (size_t i = 0; i < entries.size(); ++i) {
    const Taken taken = Must(table->TryTake(std::nullopt));
    EXPECT_EQ(NumberOf(taken), i);
    EXPECT_EQ(taken.tokens(), entries[i]);
  }
}

TEST(LookupTables, AnInsertThatWaitsForRoomAndFindsNoMemoryChangesNothing) {
  const auto table = Table(1);
  ASSERT_TRUE(IsOk(table->Insert({1}, 1, Number(1), Now())));
  const Deadline at_once = Now();
  CallWithoutMemory([&] { EXPECT_FALSE(table->Insert({2}, 1, Number(2), at_once).ok()); },
                    [&] {
                      ASSERT_EQ(table->num_entries(), 1);
                      EXPECT_EQ(table->bytes(), 1);
                    });
  EXPECT_EQ(NumberOf(Must(table->TryTake(std::nullopt))), 1);
  EXPECT_TRUE(IsOk(table->Insert({3}, 1, Number(3), Now())));
}

// For some tokens, or for any.
TEST(LookupTables, AQueryThatFindsNoMemoryIsNone) {
  const auto table = Table();
  for (int32_t number = 0; number < 40; ++number) {
    SCOPED_TRACE(number);
    const std::optional<Tokens> tokens =
        number % 2 == 0 ? std::optional(Tokens{number}) : std::nullopt;
    const Deadline deadline = Soon();
    CallWithoutMemory([&] { ASSERT_TRUE(IsOk(table->Ask(tokens, deadline, [](const auto&) {}))); },
                      [&] { EXPECT_EQ(table->num_waiting(), number); });
  }
  for (int32_t number = 0; number < 40; number += 2) {
    ASSERT_TRUE(IsOk(table->Insert({number}, 1, Number(number), Now())));
  }
  EXPECT_EQ(table->num_waiting(), 20);
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(IsOk(table->Insert({100}, 1, Number(0), Now())));
  EXPECT_EQ(table->num_waiting(), 0);
  EXPECT_EQ(table->num_entries(), 0);
  EXPECT_EQ(table->Expire(Now()), std::nullopt);  // No deadline is left of any.
}

// Whoever asks next has it.
TEST(LookupTables, ATakeThatFindsNoMemoryTakesNothing) {
  const auto table = Table();
  ASSERT_TRUE(IsOk(table->Insert({1}, 1, Number(7), Now())));
  const auto expect_there = [&] {
    EXPECT_EQ(table->num_entries(), 1);
    EXPECT_EQ(table->bytes(), 1);
  };
  absl::StatusOr<Taken> taken = absl::UnknownError("not taken");
  CallWithoutMemory([&] { taken = table->TryTake(std::nullopt); }, expect_there);
  table->PutBack(Must(std::move(taken)));
  const Deadline deadline = Soon();
  absl::StatusOr<Taken> answer = absl::UnknownError("not answered");
  const auto take = [&](absl::StatusOr<Taken> given) { answer = std::move(given); };
  CallWithoutMemory([&] { EXPECT_TRUE(IsOk(table->Ask(Tokens{1}, deadline, take))); },
                    expect_there);
  EXPECT_EQ(NumberOf(Must(std::move(answer))), 7);
  EXPECT_EQ(table->num_entries() + table->bytes(), 0);
}

// It may ask the table.
TEST(LookupTables, WhatThereWasNoRoomForGoesOutsideOfTheLock) {
  const auto table = Table(1);
  ASSERT_TRUE(IsOk(table->Insert({1}, 1, Number(1), Now())));
  int64_t seen = 0;
  const auto asks = [&](void*) { seen = table->num_entries(); };
  EXPECT_TRUE(Fails(table->Insert({2}, 1, LookupTable::Payload(nullptr, asks), Now()), kLate));
  EXPECT_EQ(seen, 1);
}

// ---------------------------------------------------------------- queries and room

TEST(LookupTables, WithoutTokensTheOldestGoes) {
  const auto table = Table();
  for (const int32_t n : {5, 3, 4}) ASSERT_TRUE(IsOk(table->Insert({n}, 1, Number(n), Now())));
  for (const int32_t n : {5, 3, 4}) {
    EXPECT_EQ(NumberOf(Must(Take(*table, std::nullopt, Now()))), n);
  }
  EXPECT_TRUE(Fails(Take(*table, std::nullopt, Now()), kLate, "no matching entry"));
}

TEST(LookupTables, AQueryThatWaitsDoesNotHoldUpOthers) {
  const auto table = Table();
  std::vector<int64_t> got;
  const auto note = [&got](absl::StatusOr<Taken> taken) {
    got.push_back(taken.ok() ? NumberOf(*taken) : -1);
  };
  ASSERT_TRUE(IsOk(table->Ask(Tokens{9}, Soon(), note)));
  ASSERT_TRUE(IsOk(table->Ask(Tokens{8, 1}, Soon(), note)));
  ASSERT_TRUE(IsOk(table->Ask(std::nullopt, Soon(), note)));
  EXPECT_EQ(table->num_waiting(), 3);
  ASSERT_TRUE(IsOk(table->Insert({8, 1, 2}, 1, Number(8), Now())));
  EXPECT_EQ(got, (std::vector<int64_t>{8}));
  ASSERT_TRUE(IsOk(table->Insert({7}, 1, Number(7), Now())));  // To whoever takes anything.
  ASSERT_TRUE(IsOk(table->Insert({9}, 1, Number(9), Now())));
  EXPECT_EQ(got, (std::vector<int64_t>{8, 7, 9}));
  EXPECT_EQ(table->num_entries() + table->num_waiting() + table->bytes(), 0);
}

// The deadlock of an older buffer: it is full, and the entry that is asked for waits for room.
TEST(LookupTables, AnEntryThatWaitsForRoomCanBeTaken) {
  const auto table = Table(10);
  ASSERT_TRUE(IsOk(table->Insert({1}, 10, Number(1), Now())));
  absl::Status inserted = absl::UnknownError("still waiting");
  const Deadline soon = Soon();
  std::thread producer([&] { inserted = table->Insert({2}, 8, Number(2), soon); });
  ASSERT_TRUE(WaitFor([&] { return table->num_entries() == 2; }, soon));
  const Taken taken = Must(Take(*table, Tokens{2}, Soon()));
  producer.join();
  EXPECT_LT(Now(), soon);  // It was told.
  EXPECT_EQ(NumberOf(taken), 2);
  EXPECT_TRUE(IsOk(inserted));
  EXPECT_EQ(table->bytes(), 10);  // Only the other one's.
}

TEST(LookupTables, AWaitingQueryIsServedByAFullTable) {
  const auto table = Table(10);
  ASSERT_TRUE(IsOk(table->Insert({1}, 10, Number(1), Now())));
  int64_t got = 0;
  ASSERT_TRUE(IsOk(
      table->Ask(Tokens{2}, Soon(), [&](absl::StatusOr<Taken> taken) { got = NumberOf(*taken); })));
  EXPECT_TRUE(IsOk(table->Insert({2}, 8, Number(2), Now())));
  EXPECT_EQ(got, 2);
}

TEST(LookupTables, InsertWaitsForRoomUpToItsDeadline) {
  const auto table = Table(10);
  ASSERT_TRUE(IsOk(table->Insert({1}, 6, Number(1), Now())));
  EXPECT_TRUE(Fails(table->Insert({2}, 5, Number(2), Now()), kLate, "5 bytes", "6 of 10"));
  EXPECT_EQ(table->num_entries(), 1);
  EXPECT_TRUE(Fails(table->TryTake(Tokens{2}), absl::StatusCode::kNotFound));
  std::optional<Taken> taken = Must(Take(*table, Tokens{1}, Now()));
  EXPECT_FALSE(table->Insert({2}, 5, Number(2), Now()).ok());  // It is still being moved.
  std::thread producer([&] { EXPECT_TRUE(IsOk(table->Insert({2}, 5, Number(2), Soon()))); });
  taken.reset();
  producer.join();
  EXPECT_EQ(table->bytes(), 5);
}

TEST(LookupTables, RoomGoesToWhoWaitsFirst) {
  const auto table = Table(10);
  ASSERT_TRUE(IsOk(table->Insert({1}, 8, Number(1), Now())));
  std::thread first([&] { EXPECT_TRUE(IsOk(table->Insert({2}, 5, Number(2), Soon()))); });
  ASSERT_TRUE(WaitFor([&] { return table->num_entries() == 2; }, Soon()));
  // A short one would fit; a stream of them would keep the long one out for ever.
  EXPECT_TRUE(Fails(table->Insert({3}, 1, Number(3), Now()), kLate, "8 of 10"));
  Must(table->TryTake(Tokens{1}));
  first.join();
  EXPECT_TRUE(IsOk(table->Insert({3}, 1, Number(3), Now())));
}

// Which nothing else would tell it: no room is made.
TEST(LookupTables, WhoWaitsBehindOneThatIsLateIsServed) {
  const auto table = Table(10);
  ASSERT_TRUE(IsOk(table->Insert({1}, 8, Number(1), Now())));
  std::atomic<bool> late = false;
  std::thread first([&] {
    EXPECT_TRUE(Fails(table->Insert({2}, 5, Number(2), DeadlineInMs(300)), kLate));
    late = true;
  });
  ASSERT_TRUE(WaitFor([&] { return table->num_entries() == 2 || late; }, Soon()));
  const Deadline soon = Soon();
  EXPECT_TRUE(IsOk(table->Insert({3}, 1, Number(3), soon)));
  EXPECT_LT(Now(), soon);
  first.join();
}

TEST(LookupTables, WhatCanNeverFitIsRefusedAtOnce) {
  const auto table =
      Must(LookupTable::Create({.max_bytes = 10, .max_waiting = 1, .max_tokens = 3}));
  EXPECT_TRUE(Fails(table->Insert({1}, 11, nullptr, Soon()), kExhausted, "11 bytes",
                    "can never fit", "10"));
  EXPECT_TRUE(Fails(table->Insert({}, 1, nullptr, Soon()), kInvalid, "0 tokens"));
  EXPECT_TRUE(
      Fails(table->Insert({1, 2, 3, 4}, 1, nullptr, Soon()), kInvalid, "4 tokens", "1 to 3"));
  EXPECT_TRUE(Fails(table->Insert({1}, -1, nullptr, Soon()), kInvalid, "-1 bytes"));
  EXPECT_TRUE(Fails(Take(*table, Tokens{}, Soon()), kInvalid, "0 tokens"));
  EXPECT_TRUE(Fails(table->TryTake(Tokens{1, 2, 3, 4}), kInvalid, "4 tokens"));
  ASSERT_TRUE(IsOk(table->Ask(Tokens{1}, Soon(), [](const auto&) {})));
  EXPECT_TRUE(Fails(table->Ask(Tokens{2}, Soon(), [](const auto&) { ADD_FAILURE(); }), kExhausted,
                    "1 queries wait"));
  EXPECT_TRUE(Fails(LookupTable::Create({.max_bytes = 0}), kInvalid, "max_bytes is 0"));
  EXPECT_TRUE(Fails(LookupTable::Create({.max_bytes = 1, .max_waiting = -1}), kInvalid,
                    "max_waiting is -1"));
  EXPECT_TRUE(Fails(LookupTable::Create({.max_bytes = 1, .max_waiting_bytes = 0}), kInvalid,
                    "max_waiting_bytes is 0"));
}

TEST(LookupTables, QueriesWaitWithSoManyBytesOfTokens) {
  const auto table = Must(LookupTable::Create({.max_bytes = 10, .max_waiting_bytes = 20}));
  const auto unanswered = [](const absl::StatusOr<Taken>& taken) {
    EXPECT_TRUE(Fails(taken, kCancelled));  // By the end of this test.
  };
  ASSERT_TRUE(IsOk(table->Insert({9, 9}, 1, Number(9), Now())));
  const uint64_t three = Must(table->Ask(Tokens{1, 2, 3}, Soon(), unanswered));
  Must(table->Ask(Tokens{4, 5}, Soon(), unanswered));
  EXPECT_TRUE(Fails(table->Ask(Tokens{6}, Soon(), unanswered), kExhausted, "4 bytes of tokens",
                    "20 of 20"));
  const uint64_t any = Must(table->Ask(std::nullopt, Soon(), [](const auto&) {}));
  EXPECT_EQ(any, 0);  // Answered at once.
  EXPECT_TRUE(table->Withdraw(three));
  EXPECT_TRUE(IsOk(table->Ask(Tokens{6, 7, 8}, Soon(), [](const auto&) {})));
  ASSERT_TRUE(IsOk(table->Insert({6}, 1, Number(6), Now())));
  EXPECT_TRUE(IsOk(table->Ask(Tokens{6, 7, 8}, Soon(), [](const auto&) {})));
}

TEST(LookupTables, MissesAreAnsweredAtTheirDeadline) {
  const auto table = Table();
  const Deadline start = Now();
  const auto in = [&](int64_t ms) { return start + std::chrono::milliseconds(ms); };
  std::vector<int> answered;
  for (const int ms : {30, 10, 20}) {
    ASSERT_TRUE(IsOk(table->Ask(ms == 10 ? std::nullopt : std::optional(Tokens{ms}), in(ms),
                                [&answered, ms](const absl::StatusOr<Taken>& taken) {
                                  EXPECT_TRUE(Fails(taken, kLate));
                                  answered.push_back(ms);
                                })));
  }
  EXPECT_EQ(table->Expire(in(5)), in(10));
  EXPECT_EQ(table->Expire(in(20)), in(30));
  EXPECT_EQ(answered, (std::vector<int>{10, 20}));
  EXPECT_EQ(table->Expire(in(40)), std::nullopt);
  EXPECT_EQ(answered.size(), 3);
}

TEST(LookupTables, CloseEndsEverythingThatWaits) {
  const auto table = Table(10);
  ASSERT_TRUE(IsOk(table->Insert({1}, 10, Number(1), Now())));
  absl::Status producer_status, consumer_status;
  const Deadline soon = Soon();
  std::thread producer([&] { producer_status = table->Insert({2}, 5, Number(2), soon); });
  std::thread consumer([&] { consumer_status = Take(*table, Tokens{3}, Soon()).status(); });
  ASSERT_TRUE(
      WaitFor([&] { return table->num_entries() == 2 && table->num_waiting() == 1; }, Soon()));
  table->Close();
  producer.join();
  consumer.join();
  EXPECT_LT(Now(), soon);  // Both were told.
  EXPECT_TRUE(Fails(producer_status, kCancelled, "closed"));
  EXPECT_TRUE(Fails(consumer_status, kCancelled, "closed"));
  EXPECT_TRUE(Fails(table->Insert({1}, 1, nullptr, Soon()), kCancelled));
  EXPECT_TRUE(Fails(table->TryTake(std::nullopt), kCancelled));
  // Nobody would end it.
  EXPECT_TRUE(Fails(table->Ask(Tokens{3}, Soon(), [](const auto&) {}), kCancelled));
}

TEST(LookupTables, AQueryThatIsWithdrawnGetsNothing) {
  const auto table = Table();
  const uint64_t query =
      Must(table->Ask(Tokens{1}, Soon(), [](const auto&) { ADD_FAILURE() << "answered"; }));
  const uint64_t any =
      Must(table->Ask(std::nullopt, Soon(), [](const auto&) { ADD_FAILURE() << "answered"; }));
  EXPECT_TRUE(table->Withdraw(query) && table->Withdraw(any));
  EXPECT_FALSE(table->Withdraw(query));
  EXPECT_EQ(table->num_waiting(), 0);
  ASSERT_TRUE(IsOk(table->Insert({1}, 10, Number(1), Now())));
  EXPECT_EQ(Must(table->Ask(Tokens{1}, Soon(), [](const auto&) {})), 0);  // Answered at once.
  EXPECT_FALSE(table->Withdraw(0));
}

TEST(LookupTables, WhatComesBackIsFoundAgain) {
  const auto table = Table(10);
  ASSERT_TRUE(IsOk(table->Insert({1}, 6, Number(1), Now())));
  ASSERT_TRUE(IsOk(table->Insert({2}, 4, Number(2), Now())));
  table->PutBack(Must(table->TryTake(Tokens{1})));
  EXPECT_EQ(table->bytes(), 10);
  EXPECT_EQ(NumberOf(Must(table->TryTake(std::nullopt))), 2);  // 1 is the newest now.
  Taken taken = Must(table->TryTake(Tokens{1}));
  int64_t got = 0;
  ASSERT_TRUE(IsOk(table->Ask(Tokens{1, 5}, Soon(), [&](absl::StatusOr<Taken> answer) {
    got = NumberOf(*answer);
    EXPECT_EQ(answer->num_matched(), 1);
    EXPECT_EQ(table->bytes(), 6);  // It counts until it has been moved, still.
  })));
  table->PutBack(std::move(taken));
  EXPECT_EQ(got, 1);
  EXPECT_EQ(table->bytes() + table->num_entries(), 0);
}

TEST(LookupTables, WhatComesBackNeedsNoRoom) {
  const auto table = Table(10);
  std::optional<Taken> straight;
  ASSERT_TRUE(IsOk(table->Ask(Tokens{1}, Soon(), [&](absl::StatusOr<Taken> answer) {
    straight.emplace(*std::move(answer));
  })));
  ASSERT_TRUE(IsOk(table->Insert({1}, 10, Number(1), Now())));
  ASSERT_TRUE(IsOk(table->Insert({2}, 10, Number(2), Now())));
  table->PutBack(*std::move(straight));
  EXPECT_EQ(table->bytes(), 20);
  EXPECT_TRUE(Fails(table->Insert({3}, 1, Number(3), Now()), kLate, "20 of 10"));
  EXPECT_EQ(NumberOf(Must(table->TryTake(Tokens{1}))), 1);
  EXPECT_EQ(table->bytes(), 10);
  Taken taken = Must(table->TryTake(Tokens{2}));
  table->Close();
  table->PutBack(std::move(taken));
  EXPECT_EQ(table->bytes() + table->num_entries(), 0);
}

TEST(LookupTables, TakenEntriesOutliveTheTable) {
  std::optional<Taken> taken;
  {
    const auto table = Table();
    ASSERT_TRUE(IsOk(table->Insert({1}, 10, Number(4), Now())));
    taken = Must(Take(*table, Tokens{1}, Now()));
  }
  EXPECT_EQ(NumberOf(*taken), 4);
  taken.reset();
}

// A list of entries and one of queries, searched one by one: a million calls.
TEST(LookupTables, RandomCallsAgreeWithLists) {
  const auto table = Table(1 << 30);
  std::mt19937_64 random(12);
  const auto upto = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  const auto tokens = [&] {
    Tokens made(static_cast<size_t>(1 + upto(5)));
    for (int32_t& token : made) token = static_cast<int32_t>(upto(2));
    return made;
  };
  const auto matched = [](const Tokens& a, const Tokens& b) {
    const size_t n = std::min(a.size(), b.size());
    return std::equal(a.begin(), a.begin() + static_cast<ptrdiff_t>(n), b.begin())
               ? static_cast<int64_t>(n)
               : 0;
  };
  std::map<int64_t, Tokens> entries;  // By age.
  std::map<int64_t, std::optional<Tokens>> queries;
  int64_t next = 0;
  for (int i = 0; i < 1000000; ++i) {
    if (upto(2) == 0) {
      if (entries.size() > 10) continue;
      const Tokens made = tokens();
      int64_t best = 0;
      bool any = false;
      for (const auto& [id, query] : queries) {
        any |= !query;
        if (query) best = std::max(best, matched(*query, made));
      }
      const int64_t number = next++;
      const int64_t waited = static_cast<int64_t>(queries.size());
      ASSERT_TRUE(IsOk(table->Insert(made, 1, Number(number), Now())));
      if (best == 0 && !any) {
        entries[number] = made;
      } else {
        ASSERT_EQ(static_cast<int64_t>(queries.size()), waited - 1) << "nobody got it";
      }
    } else {
      const std::optional<Tokens> query = upto(6) == 0 ? std::nullopt : std::optional(tokens());
      int64_t best = 0;
      for (const auto& [number, entry] : entries) {
        best = std::max(best, query ? matched(entry, *query) : 1);
      }
      if (best == 0 && queries.size() > 6) continue;
      const int64_t id = next++;
      queries[id] = query;
      ASSERT_TRUE(IsOk(table->Ask(query, Soon(), [&, id](absl::StatusOr<Taken> taken) {
        if (absl::IsCancelled(taken.status())) return;  // By the end of this test.
        ASSERT_TRUE(IsOk(taken));
        const auto asked = queries.find(id);
        ASSERT_NE(asked, queries.end()) << "answered twice";
        if (asked->second) {
          ASSERT_EQ(taken->num_matched(), matched(taken->tokens(), *asked->second));
          ASSERT_GT(taken->num_matched(), 0);
        }
        const auto entry = entries.find(NumberOf(*taken));
        if (entry != entries.end()) {  // Else it came just now.
          if (asked->second) {
            ASSERT_EQ(taken->num_matched(), best);
          } else {
            ASSERT_EQ(entry, entries.begin()) << "not the oldest";
          }
          entries.erase(entry);
        }
        queries.erase(asked);
      })));
    }
    ASSERT_EQ(table->num_entries(), static_cast<int64_t>(entries.size()));
    ASSERT_EQ(table->num_waiting(), static_cast<int64_t>(queries.size()));
    ASSERT_EQ(table->bytes(), static_cast<int64_t>(entries.size()));
  }
  table->Close();  // Queries that still wait refer to this test.
}

// Every entry arrives once, whoever produces and whoever consumes, in a table that is mostly full.
TEST(LookupTables, EightThreadsExactlyOnce) {
  constexpr int64_t kPerProducer = 10000;
  const auto table = Table(64);
  std::vector<std::atomic<int>> delivered(4 * kPerProducer);
  std::atomic<int64_t> left = 4 * kPerProducer;
  std::atomic<int64_t> wrong = 0;
  std::vector<std::thread> threads;
  for (int64_t p = 0; p < 4; ++p) {
    threads.emplace_back([&, p] {
      std::mt19937_64 random(static_cast<uint64_t>(p));
      for (int64_t i = 0; i < kPerProducer; ++i) {
        const int64_t number = p * kPerProducer + i;
        const auto token = static_cast<int32_t>(random() % 16);
        if (!table
                 ->Insert({token, static_cast<int32_t>(number)},
                          1 + static_cast<int64_t>(random() % 16), Number(number), Soon())
                 .ok()) {
          ++wrong;
        }
      }
    });
    threads.emplace_back([&, p] {
      std::mt19937_64 random(static_cast<uint64_t>(100 + p));
      while (left > 0) {
        std::optional<Tokens> query;
        if (random() % 2 != 0) query = Tokens{static_cast<int32_t>(random() % 16)};
        const absl::StatusOr<Taken> taken = Take(*table, query, DeadlineInMs(1));
        if (!taken.ok()) {
          wrong += taken.status().code() == kLate ? 0 : 1;
          continue;
        }
        wrong += query && taken->tokens()[0] != (*query)[0] ? 1 : 0;
        ++delivered[static_cast<size_t>(NumberOf(*taken))];
        --left;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_TRUE(
      std::all_of(delivered.begin(), delivered.end(), [](const auto& n) { return n == 1; }));
  EXPECT_EQ(table->bytes(), 0);
}

}  // namespace
}  // namespace kvferry
