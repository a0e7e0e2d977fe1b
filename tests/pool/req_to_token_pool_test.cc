#include "pool/req_to_token_pool.h"

#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <random>

#include "tests/support/status.h"

namespace kvferry {
namespace {

using Slots = std::vector<int64_t>;

TEST(ReqToToken, BadSizes) {
  for (const auto& [requests, context] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 4}, {-1, 4}, {4, 0}, {std::numeric_limits<int64_t>::max(), 4}, {4, -1}}) {
    EXPECT_TRUE(Fails(ReqToTokenPool::Create(requests, context), absl::StatusCode::kInvalidArgument,
                      "must lie in"));
  }
  EXPECT_TRUE(
      Fails(ReqToTokenPool::Create(ReqToTokenPool::kMaxRequests, ReqToTokenPool::kMaxContextTokens),
            absl::StatusCode::kResourceExhausted));
}

TEST(ReqToToken, ErrorsChangeNothing) {
  ReqToTokenPool pool = Must(ReqToTokenPool::Create(4, 8));
  EXPECT_EQ(Must(pool.Allocate(3)), (Slots{0, 1, 2}));
  EXPECT_TRUE(Fails(pool.Allocate(2), absl::StatusCode::kResourceExhausted, "1 of 4 free"));
  EXPECT_TRUE(Fails(pool.Allocate(0), absl::StatusCode::kInvalidArgument));
  for (const Slots& bad : {Slots{3}, Slots{4}, Slots{-1}, Slots{1, 0, 1}, Slots{0, 3}}) {
    EXPECT_TRUE(Fails(pool.Free(bad), absl::StatusCode::kInvalidArgument, "slot"));
  }
  EXPECT_EQ(pool.num_free(), 1);
  const std::vector<int32_t> four = {5, 6, 7, 8};
  EXPECT_TRUE(Fails(pool.Write(3, 0, four), absl::StatusCode::kInvalidArgument, "slot 3"));
  EXPECT_TRUE(Fails(pool.Write(0, 5, four), absl::StatusCode::kOutOfRange, "5 + 4"));
  EXPECT_TRUE(Fails(pool.Write(0, -1, four), absl::StatusCode::kOutOfRange));
  EXPECT_TRUE(Fails(pool.Write(0, std::numeric_limits<int64_t>::max(), four),
                    absl::StatusCode::kOutOfRange));
  for (const int32_t entry : pool.table()) ASSERT_EQ(entry, 0);
  EXPECT_TRUE(IsOk(pool.Write(0, 8, {})));
  EXPECT_TRUE(IsOk(pool.Free(Slots{2, 0, 1})));
  EXPECT_EQ(pool.num_free(), 4);
}

TEST(ReqToToken, AMillionRandomOperationsAgainstAMap) {
  constexpr int64_t kRequests = 12;
  constexpr int64_t kContext = 16;
  std::mt19937_64 random(1);
  ReqToTokenPool pool = Must(ReqToTokenPool::Create(kRequests, kContext));
  std::map<int64_t, std::vector<int32_t>> live;  // Rows by allocated slot.
  std::map<int64_t, std::vector<int32_t>> rows;  // Of all slots: they keep their contents.
  for (int64_t slot = 0; slot < kRequests; ++slot) rows[slot].resize(kContext);
  for (int operation = 0; operation < 1000000; ++operation) {
    ASSERT_EQ(pool.num_free(), kRequests - static_cast<int64_t>(live.size()));
    const auto slot = static_cast<int64_t>(random() % (kRequests + 2)) - 1;
    const uint64_t choice = random() % 100;
    if (choice < 30) {
      const auto count = static_cast<int64_t>(random() % 5);
      const auto got = pool.Allocate(count);
      ASSERT_EQ(got.ok(), count > 0 && count <= kRequests - static_cast<int64_t>(live.size()));
      if (!got.ok()) continue;
      ASSERT_EQ(got->size(), count);
      for (const int64_t one : *got) ASSERT_TRUE(live.try_emplace(one).second);
    } else if (choice < 60) {
      const Slots slots =
          random() % 3 == 0 ? Slots{slot, static_cast<int64_t>(random() % kRequests)} : Slots{slot};
      bool good = slots.size() == 1 || slots[0] != slots[1];
      for (const int64_t one : slots) good &= live.contains(one);
      ASSERT_EQ(pool.Free(slots).ok(), good);
      if (!good) continue;
      for (const int64_t one : slots) live.erase(one);
    } else if (choice < 99) {
      std::vector<int32_t> values(random() % 6);
      for (int32_t& value : values) value = static_cast<int32_t>(random());
      const auto first = static_cast<int64_t>(random() % (kContext + 2)) - 1;
      const bool good = live.contains(slot) && first >= 0 &&
                        first + static_cast<int64_t>(values.size()) <= kContext;
      ASSERT_EQ(pool.Write(slot, first, values).ok(), good);
      if (!good) continue;
      std::copy(values.begin(), values.end(), rows[slot].begin() + first);
      const auto row = pool.row(slot);
      ASSERT_TRUE(std::equal(row.begin(), row.end(), rows[slot].begin(), rows[slot].end()));
    } else {
      pool.Clear();
      live.clear();
    }
  }
}

}  // namespace
}  // namespace kvferry
