#pragma once

// ReqToTokenPool: every kind of memory enrols here with
//   INSTANTIATE_TEST_SUITE_P(Where, ReqToTokenPools, testing::Values(backend, ...), BackendName());
// in one file of its binary, and must agree with a map of rows.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <span>
#include <vector>

#include "pool/req_to_token_pool.h"
#include "tests/pool/memory_backend.h"
#include "tests/support/status.h"

namespace kvferry {

class ReqToTokenPools : public testing::TestWithParam<MemoryBackend> {
 protected:
  using Slots = std::vector<int64_t>;
  using Values = std::vector<int32_t>;
  static constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  static constexpr auto kOutOfRange = absl::StatusCode::kOutOfRange;
  static constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

  void SetUp() override {
    if (!GetParam().missing.empty()) GTEST_SKIP() << GetParam().missing;
  }

  static ReqToTokenPool Create(int64_t num_requests, int64_t max_context_tokens) {
    return Must(ReqToTokenPool::Create(num_requests, max_context_tokens, GetParam().memory));
  }

  static Values Table(const ReqToTokenPool& pool) {
    const std::span<const int32_t> table = pool.table();
    const std::vector<std::byte> bytes = GetParam().read(
        reinterpret_cast<const std::byte*>(table.data()), static_cast<int64_t>(table.size_bytes()));
    Values values(table.size());
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
};

TEST_P(ReqToTokenPools, ErrorsChangeNothing) {
  ReqToTokenPool pool = Create(4, 8);
  EXPECT_EQ(Must(pool.Allocate(3)), (Slots{0, 1, 2}));
  EXPECT_TRUE(Fails(pool.Allocate(2), absl::StatusCode::kResourceExhausted, "1 of 4 free"));
  EXPECT_TRUE(Fails(pool.Allocate(0), kInvalid));
  for (const Slots& bad : {Slots{3}, Slots{4}, Slots{-1}, Slots{1, 0, 1}, Slots{0, 3}}) {
    EXPECT_TRUE(Fails(pool.Free(bad), kInvalid, "slot"));
  }
  EXPECT_EQ(pool.num_free(), 1);
  const Values four = {5, 6, 7, 8};
  EXPECT_TRUE(Fails(pool.Write(3, 0, four), kInvalid, "slot 3 is not allocated"));
  EXPECT_TRUE(Fails(pool.Write(4, 0, four), kInvalid, "slot 4 is outside [0, 4)"));
  EXPECT_TRUE(Fails(pool.Write(0, 5, four), kOutOfRange, "5 + 4"));
  EXPECT_TRUE(Fails(pool.Write(0, -1, four), kOutOfRange));
  EXPECT_TRUE(Fails(pool.Write(0, kHuge, four), kOutOfRange));
  const auto batch = [&](const Slots& slots, const Slots& firsts, const Slots& counts) {
    return pool.WriteBatch(slots, firsts, counts, four);
  };
  EXPECT_TRUE(Fails(batch({0, 1}, {0}, {2, 2}), kInvalid, "2 slots, 1 firsts and 2 counts"));
  EXPECT_TRUE(Fails(batch({0}, {0}, {2, 2}), kInvalid, "1 slots, 1 firsts and 2 counts"));
  EXPECT_TRUE(Fails(batch({0, 1}, {0, 0}, {2, 1}), kInvalid, "add up to 3", "4 token slots"));
  EXPECT_TRUE(Fails(batch({0, 1}, {0, 0}, {2, 3}), kInvalid, "add up to 5"));
  EXPECT_TRUE(Fails(batch({0, 3}, {0, 0}, {2, 2}), kInvalid, "slot 3"));
  EXPECT_TRUE(Fails(batch({0, 1}, {0, 7}, {2, 2}), kOutOfRange, "7 + 2"));
  EXPECT_TRUE(Fails(batch({0, 1}, {0, 4}, {5, -1}), kOutOfRange, "4 + -1"));
  EXPECT_TRUE(Fails(batch({0, 1}, {0, 0}, {2, kHuge}), kOutOfRange));
  EXPECT_EQ(Table(pool), Values(32));
  EXPECT_TRUE(IsOk(pool.Write(0, 8, {})));
  EXPECT_TRUE(IsOk(pool.WriteBatch({}, {}, {}, {})));
  EXPECT_TRUE(IsOk(pool.Free(Slots{2, 0, 1})));
  EXPECT_EQ(pool.num_free(), 4);
}

TEST_P(ReqToTokenPools, ABatchLiesRowByRow) {
  ReqToTokenPool pool = Create(3, 4);
  Must(pool.Allocate(3));
  const Values values = {1, 2, 3, 4, 5, 6, 7};
  EXPECT_TRUE(
      IsOk(pool.WriteBatch(Slots{2, 0, 1, 2}, Slots{1, 0, 4, 0}, Slots{2, 4, 0, 1}, values)));
  EXPECT_EQ(Table(pool), (Values{3, 4, 5, 6, 0, 0, 0, 0, 7, 1, 2, 0}));
}

TEST_P(ReqToTokenPools, RandomOperationsAgainstAMap) {
  constexpr int64_t kRequests = 12;
  constexpr int64_t kContext = 16;
  std::mt19937_64 random(1);
  ReqToTokenPool pool = Create(kRequests, kContext);
  std::set<int64_t> live;
  Values model(kRequests * kContext);  // Rows keep their contents.
  const int operations = GetParam().slow ? 100000 : 1000000;
  for (int operation = 0; operation < operations; ++operation) {
    ASSERT_EQ(pool.num_free(), kRequests - static_cast<int64_t>(live.size()));
    const auto any_slot = [&] { return static_cast<int64_t>(random() % (kRequests + 2)) - 1; };
    const uint64_t choice = random() % 1000;
    if (choice < 300) {
      const auto count = static_cast<int64_t>(random() % 5);
      const bool good = count > 0 && count <= pool.num_free();
      const auto got = pool.Allocate(count);
      ASSERT_EQ(got.ok(), good);
      if (!good) continue;
      ASSERT_EQ(got->size(), count);
      for (const int64_t one : *got) ASSERT_TRUE(live.insert(one).second);
    } else if (choice < 600) {
      Slots slots(1 + random() % 2);
      std::generate(slots.begin(), slots.end(), any_slot);
      bool good = slots.size() == 1 || slots[0] != slots[1];
      for (const int64_t one : slots) good &= live.contains(one);
      ASSERT_EQ(pool.Free(slots).ok(), good);
      if (!good) continue;
      for (const int64_t one : slots) live.erase(one);
    } else if (choice < 995) {
      // Few of them bad, so that batches go through; no slot twice, whose order is not promised.
      Slots slots(live.begin(), live.end());
      std::shuffle(slots.begin(), slots.end(), random);
      slots.resize(std::min<size_t>(slots.size(), random() % 4));
      if (random() % 8 == 0) slots.push_back(any_slot());
      Slots firsts, counts;
      Values values;
      bool good = true;
      for (size_t i = 0; i < slots.size(); ++i) {
        firsts.push_back(static_cast<int64_t>(random() % (kContext + 1)));
        counts.push_back(static_cast<int64_t>(random() % 4));
        good &= live.contains(slots[i]) && firsts[i] + counts[i] <= kContext;
        for (int64_t at = 0; at < counts[i]; ++at) values.push_back(static_cast<int>(random()));
      }
      if (std::set<int64_t>(slots.begin(), slots.end()).size() != slots.size()) continue;
      if (slots.size() == 1) {
        ASSERT_EQ(pool.Write(slots[0], firsts[0], values).ok(), good);
      } else {
        ASSERT_EQ(pool.WriteBatch(slots, firsts, counts, values).ok(), good);
      }
      if (!good) continue;
      auto next = values.begin();
      for (size_t i = 0; i < slots.size(); next += counts[i], ++i) {
        std::copy_n(next, counts[i], model.begin() + slots[i] * kContext + firsts[i]);
      }
    } else if (choice < 998) {
      ASSERT_EQ(Table(pool), model) << "operation " << operation;
    } else {
      pool.Clear();
      live.clear();
    }
  }
  EXPECT_EQ(Table(pool), model);
}

}  // namespace kvferry
