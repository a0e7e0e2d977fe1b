// Batches of a store of two tiers: answered from both, in order, and without either looking for
// all keys.

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/connector/tiered_stores.h"

namespace kvferry {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kNotFound = absl::StatusCode::kNotFound;
constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;

TEST_F(TieredStores, ABatchIsAnsweredFromBothTiers) {
  const Bytes large = ValueOf(2, 1, 5000);
  const std::span<const std::byte> in[] = {old_, large, new_};
  const std::vector<KvStore::PutItem> puts = {
      {"a", {&in[0], 1}}, {"large", {&in[1], 1}}, {"b", {&in[2], 1}}, {"", {&in[0], 1}}};
  const auto put = store_->PutBatch(puts, Soon());
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(IsOk(put[i]));
  EXPECT_TRUE(Fails(put[3], kInvalid));
  EXPECT_TRUE(Misses(*upper_, "large"));
  ASSERT_TRUE(IsOk(upper_->Erase("b", Soon())));  // As when it is evicted.

  Bytes outs[] = {Bytes(100), Bytes(5000), Bytes(100), Bytes(100), Bytes(7), Bytes(1)};
  std::vector<std::span<std::byte>> out(std::begin(outs), std::end(outs));
  const auto part = [&out](size_t i) { return std::span(out).subspan(i, 1); };
  const std::vector<KvStore::GetItem> gets = {{"a", part(0)}, {"large", part(1)}, {"b", part(2)},
                                              {"c", part(3)}, {"a", part(4)},     {"", part(5)}};
  const auto got = store_->GetBatch(gets, Soon());
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(IsOk(got[i]));
  EXPECT_TRUE(outs[0] == old_ && outs[1] == large && outs[2] == new_);
  EXPECT_TRUE(Fails(got[3], kNotFound));
  EXPECT_TRUE(Fails(got[4], kPrecondition, "100", "7"));
  EXPECT_TRUE(Fails(got[5], kInvalid));
  EXPECT_TRUE(Is(*upper_, "b", new_));  // Brought up.
  EXPECT_EQ(store_->stats().hits, 3);
  EXPECT_EQ(store_->stats().misses, 1);
  EXPECT_EQ(store_->stats().errors, 0);

  // The tier that was down must not answer a batch with an old value either.
  lower_->down = true;
  const std::vector<KvStore::PutItem> again = {{"a", {&in[2], 1}}, {"c", {&in[0], 1}}};
  for (const auto& status : store_->PutBatch(again, Soon())) EXPECT_TRUE(IsOk(status));
  lower_->down = false;
  for (const auto key : {"a", "c"}) ASSERT_TRUE(IsOk(upper_->Erase(key, Soon())));
  const auto late = store_->GetBatch(std::span(gets).first(1), Soon());
  EXPECT_TRUE(Fails(late[0], kNotFound));
}

// The bytes of the one must not come up under the key of the other.
TEST_F(TieredStores, WhatIsReadToTheSamePlaceIsNotBroughtUp) {
  for (const std::string_view key : {"a", "b", "c", "d"}) {
    ASSERT_TRUE(IsOk(Put(*lower_, key, ValueOf(key[0], 1, 100))));
  }
  Bytes out(400);
  const auto at = [&out](size_t begin, size_t bytes) {
    return std::span<std::byte>(out).subspan(begin, bytes);
  };
  // a and b overlap by a byte of one part, d by one of its own, c lies between them.
  const std::span<std::byte> a[] = {at(0, 50), at(60, 50)}, b[] = {at(109, 100)},
                             c[] = {at(209, 30), {}, at(239, 70)},
                             d[] = {at(310, 50), at(359, 40), at(399, 1), at(50, 9)};
  const std::vector<KvStore::GetItem> items = {{"d", d}, {"b", b}, {"a", a}, {"c", c}};
  for (const auto& status : store_->GetBatch(items, Soon())) EXPECT_TRUE(IsOk(status));
  EXPECT_TRUE(Is(*upper_, "c", ValueOf('c', 1, 100)));
  for (const std::string_view key : {"a", "b", "d"}) {
    EXPECT_TRUE(Misses(*upper_, key)) << key;
    EXPECT_TRUE(Is(*store_, key, ValueOf(key[0], 1, 100))) << key;
  }
}

// Also with one that ends long before it.
TEST_F(TieredStores, WhatWasReadIntoAnothersMemoryIsNotBroughtUpHoweverLongThatIs) {
  ASSERT_TRUE(IsOk(Put(*lower_, "a", ValueOf('a', 1, 900))));
  for (const std::string_view key : {"b", "c"}) {
    ASSERT_TRUE(IsOk(Put(*lower_, key, ValueOf(key[0], 1, 100))));
  }
  Bytes memory(900);
  const std::span<std::byte> all = memory;
  const std::span<std::byte> b = all.subspan(100, 100), c = all.subspan(500, 100);
  const std::vector<KvStore::GetItem> items = {{"c", {&c, 1}}, {"a", {&all, 1}}, {"b", {&b, 1}}};
  for (const auto& status : store_->GetBatch(items, Soon())) EXPECT_TRUE(IsOk(status));
  for (const std::string_view key : {"a", "b", "c"}) EXPECT_TRUE(Misses(*upper_, key)) << key;
}

// All keys at each gap would be 500 times 1000.
TEST_F(TieredStores, GapsDoNotMakeTheLowerTierLookForAllKeys) {
  std::vector<std::string> names;
  for (int i = 0; i < 1000; ++i) names.push_back(absl::StrCat("key", i));
  for (size_t i = 0; i < 500; ++i) {
    ASSERT_TRUE(IsOk(Put(i % 2 == 0 ? *upper_ : *lower_, names[i], old_)));
  }
  for (size_t i = 500; i < 1000; ++i) ASSERT_TRUE(IsOk(Put(*lower_, names[i], old_)));
  lower_->num_calls = 0;
  EXPECT_EQ(Must(store_->Exists(std::vector<std::string_view>(names.begin(), names.end()), Soon())),
            1000);
  EXPECT_LE(lower_->num_keys_asked, 1000);
  EXPECT_LE(lower_->num_calls, 250 + 10);
  lower_->num_calls = 0;
  EXPECT_EQ(Each(*store_, std::vector<std::string_view>(names.begin(), names.end())),
            std::vector<bool>(1000, true));
  EXPECT_EQ(lower_->num_calls, 1);
}

// With the same keys in another order, and often in each other's way.
TEST_F(TieredStores, BatchesOfTwoThreadsDoNotWaitForEachOther) {
  const auto run = [this](bool backwards) {
    for (uint64_t round = 0; round < 2000; ++round) {
      const Bytes value = ValueOf(1, round, 100);
      const std::span<const std::byte> in = value;
      std::vector<KvStore::PutItem> puts;
      for (const std::string_view key : {"a", "b", "c", "d"}) puts.push_back({key, {&in, 1}});
      if (backwards) std::ranges::reverse(puts);
      for (const auto& status : store_->PutBatch(puts, Soon())) ASSERT_TRUE(IsOk(status));
    }
  };
  std::thread other([&] { run(true); });
  run(false);
  other.join();
  for (const std::string_view key : {"a", "b", "c", "d"}) {
    EXPECT_TRUE(*upper_->GetBytes(key, Soon()) == *lower_->GetBytes(key, Soon()));
  }
}

// So many values of ten bytes, one batch of them.
struct ManyValues {
  explicit ManyValues(int count) {
    for (int i = 0; i < count; ++i) {
      names.push_back(absl::StrCat("key", i));
      values.push_back(ValueOf(i, 1, 10));
    }
    for (int i = 0; i < count; ++i) {
      ins.emplace_back(values[i]);
      outs.emplace_back(values[i]);
    }
    for (int i = 0; i < count; ++i) {
      puts.push_back({names[i], {&ins[i], 1}});
      gets.push_back({names[i], {&outs[i], 1}});
    }
  }
  std::vector<std::string_view> keys() const { return {names.begin(), names.end()}; }

  std::vector<std::string> names;
  std::vector<Bytes> values;
  std::vector<std::span<const std::byte>> ins;
  std::vector<std::span<std::byte>> outs;
  std::vector<KvStore::PutItem> puts;
  std::vector<KvStore::GetItem> gets;
};

// Also where some were above and others came up: those were used last, and are what comes after.
TEST_F(TieredStores, OfABatchThatCameUpInPartTheFirstIsDroppedLast) {
  ManyValues many(20);
  const auto upper = MakeHost(200), lower = MakeHost(1000);
  const auto store = Must(TieredStore::Create(upper, lower));
  for (const auto& status : store->PutBatch(many.puts, Soon())) ASSERT_TRUE(IsOk(status));
  for (int i = 10; i < 20; ++i) ASSERT_TRUE(IsOk(upper->Erase(many.names[i], Soon())));
  for (const auto& status : store->GetBatch(many.gets, Soon())) EXPECT_TRUE(IsOk(status));
  { const HostStore::Reservation others = Must(upper->Reserve(60)); }
  EXPECT_EQ(Exists(*upper, many.keys()), 14);
}

TEST_F(TieredStores, OfWhatIsAskedForPieceByPieceTheFirstIsDroppedLast) {
  ManyValues many(20);
  const auto upper = MakeHost(200), lower = MakeHost(1000);
  const auto store = Must(TieredStore::Create(upper, lower));
  for (const auto& status : store->PutBatch(many.puts, Soon())) ASSERT_TRUE(IsOk(status));
  for (const int gap : {5, 10}) ASSERT_TRUE(IsOk(upper->Erase(many.names[gap], Soon())));
  EXPECT_EQ(Exists(*store, many.keys()), 20);
  { const HostStore::Reservation others = Must(upper->Reserve(60)); }  // Two pages are free.
  std::vector<bool> left(20, true);
  left[5] = left[10] = left[16] = left[17] = left[18] = left[19] = false;
  EXPECT_EQ(Each(*upper, many.keys()), left);
}

}  // namespace
}  // namespace kvferry
