#pragma once

// What every KvStore must do. A backend enrols with
//   INSTANTIATE_TEST_SUITE_P(Where, StoreConformance, testing::Values(backend, ...),
//                            BackendName());
// in one file of its binary.

#include <gtest/gtest.h>
#include <algorithm>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "connector/store/kv_store.h"
#include "tests/connector/store_values.h"
#include "tests/pool/backend.h"
#include "tests/support/status.h"
#include "tests/support/wait_for.h"

namespace kvferry {

struct StoreBackend : Backend {
  struct Size {
    int64_t max_value_bytes = 0;
    int64_t capacity_bytes = 0;  // Of values; at least this much fits, and if `evicts` not twice.
  };
  // A fresh store without entries. What it stands on (folder, server) lives as long as it does.
  std::function<std::shared_ptr<KvStore>(const Size&)> make;
  bool pins = true;
  bool evicts = false;  // Keeps to its capacity by dropping entries that are not pinned.
  // Persists: lets go of the store, and makes another one of the same data and size.
  std::function<std::shared_ptr<KvStore>(std::shared_ptr<KvStore>)> reopen = nullptr;
  int64_t random_operations = 1000000;
};

class StoreConformance : public testing::TestWithParam<StoreBackend> {
 protected:
  static constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  static constexpr auto kNotFound = absl::StatusCode::kNotFound;
  static constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;
  static constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;
  static constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
  static constexpr int64_t kMaxValueBytes = 1 << 20;
  static constexpr int64_t kRandomBytes = 4 << 10;  // Of values of random calls, at most.
  static constexpr StoreBackend::Size kRoomy = {kMaxValueBytes, 16 << 20};
  static constexpr StoreBackend::Size kTight = {12 << 10, 256 << 10};
  static constexpr StoreBackend::Size kTiny = {kRandomBytes, 32 << 10};

  void SetUp() override {
    if (!GetParam().missing.empty()) GTEST_SKIP() << GetParam().missing;
  }
  static std::shared_ptr<KvStore> Make(const StoreBackend::Size& size = kRoomy) {
    return GetParam().make(size);
  }

  static absl::Status Put(KvStore& store, std::string_view key, std::span<const std::byte> value) {
    return store.Put(key, {&value, 1}, Soon());
  }
  static absl::StatusOr<Bytes> Get(KvStore& store, std::string_view key, size_t bytes) {
    Bytes value(bytes);
    const std::span<std::byte> out = value;
    KVFERRY_RETURN_IF_ERROR(store.Get(key, {&out, 1}, Soon()));
    return value;
  }
  static testing::AssertionResult Has(KvStore& store, std::string_view key, const Bytes& want) {
    const absl::StatusOr<Bytes> got = Get(store, key, want.size());
    if (!got.ok()) return testing::AssertionFailure() << got.status();
    const absl::StatusOr<Bytes> all = store.GetBytes(key, Soon());
    if (!all.ok()) return testing::AssertionFailure() << all.status();
    if (*got == want && *all == want) return testing::AssertionSuccess();
    return testing::AssertionFailure() << "other bytes than were put";
  }
  static testing::AssertionResult Misses(KvStore& store, std::string_view key) {
    const auto got = Fails(Get(store, key, 1), kNotFound);
    return got ? Fails(store.GetBytes(key, Soon()), kNotFound) : got;
  }
  static int64_t Exists(KvStore& store, const std::vector<std::string_view>& keys) {
    return Must(store.Exists(keys, Soon()));
  }

  class RandomCalls;
};

TEST_P(StoreConformance, WhatWasPutIsThereUntilErased) {
  const auto store = Make();
  EXPECT_FALSE(store->name().empty());
  EXPECT_EQ(store->max_value_bytes(), kMaxValueBytes);
  EXPECT_TRUE(Misses(*store, "a"));
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 100))));
  ASSERT_TRUE(IsOk(Put(*store, "b", ValueOf(2, 1, 200))));
  EXPECT_TRUE(Has(*store, "a", ValueOf(1, 1, 100)));
  EXPECT_TRUE(Has(*store, "b", ValueOf(2, 1, 200)));
  EXPECT_TRUE(IsOk(store->Erase("a", Soon())));
  EXPECT_TRUE(IsOk(store->Erase("a", Soon())));  // Also when it is gone.
  EXPECT_TRUE(Misses(*store, "a"));
  EXPECT_TRUE(Has(*store, "b", ValueOf(2, 1, 200)));
}

TEST_P(StoreConformance, AReplacedValueIsGone) {
  const auto store = Make();
  for (const int64_t bytes : {100, 5000, 5000, 3, 70000, 1}) {
    const Bytes value = ValueOf(1, static_cast<uint64_t>(bytes), bytes);
    ASSERT_TRUE(IsOk(Put(*store, "a", value)));
    EXPECT_TRUE(Has(*store, "a", value));
  }
  EXPECT_EQ(Exists(*store, {"a", "b"}), 1);
}

TEST_P(StoreConformance, ValuesOfAnyLengthInAnyParts) {
  const auto store = Make();
  std::mt19937_64 random(3);
  for (const int64_t bytes : {int64_t{1}, int64_t{2}, int64_t{7}, int64_t{4095}, int64_t{4096},
                              int64_t{4097}, int64_t{65537}, kMaxValueBytes - 1, kMaxValueBytes}) {
    SCOPED_TRACE(bytes);
    const Bytes value = ValueOf(1, 1, bytes);
    const std::string key = absl::StrCat("key ", bytes);
    ASSERT_TRUE(
        IsOk(store->Put(key, SplitAtRandom(std::span<const std::byte>(value), random), Soon())));
    Bytes out(value.size());
    ASSERT_TRUE(IsOk(store->Get(key, SplitAtRandom(std::span<std::byte>(out), random), Soon())));
    EXPECT_TRUE(out == value);
    EXPECT_TRUE(Has(*store, key, value));
  }
}

TEST_P(StoreConformance, AGetOfAnotherLengthNamesBoth) {
  const auto store = Make();
  const Bytes value = ValueOf(1, 1, 1234);
  ASSERT_TRUE(IsOk(Put(*store, "a", value)));
  EXPECT_TRUE(Fails(Get(*store, "a", 1235), kPrecondition, "1234", "1235"));
  EXPECT_TRUE(Fails(Get(*store, "a", 7), kPrecondition, "1234", "7"));
  EXPECT_TRUE(Fails(Get(*store, "a", 0), kPrecondition, "1234", "0"));
  EXPECT_TRUE(Has(*store, "a", value));
}

TEST_P(StoreConformance, KeysAreAnyBytes) {
  const auto store = Make();
  using namespace std::string_view_literals;
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all.push_back(static_cast<char>(byte));
  const std::vector<std::string_view> keys = {
      "\0"sv, "\0\0"sv, "a\0"sv,   "a\0b"sv, "a\nb"sv,     "a\r\n"sv,
      "\n"sv, " "sv,    "%s %b"sv, "*"sv,    "\xff\xfe"sv, std::string_view(all),
  };
  for (size_t i = 0; i < keys.size(); ++i) {
    ASSERT_TRUE(IsOk(Put(*store, keys[i], ValueOf(i, 1, 50)))) << i;
  }
  EXPECT_EQ(Exists(*store, keys), std::ssize(keys));
  for (size_t i = 0; i < keys.size(); ++i) EXPECT_TRUE(Has(*store, keys[i], ValueOf(i, 1, 50)));
  EXPECT_TRUE(Misses(*store, "a"));
  EXPECT_TRUE(IsOk(store->Erase("a\0b"sv, Soon())));
  EXPECT_TRUE(Misses(*store, "a\0b"sv));
  EXPECT_TRUE(Has(*store, "a\0"sv, ValueOf(2, 1, 50)));
}

TEST_P(StoreConformance, BadKeysAreNamedAndChangeNothing) {
  const auto store = Make();
  const std::string good(256, 'x'), long_key(257, 'x');
  const Bytes value = ValueOf(1, 1, 10);
  ASSERT_TRUE(IsOk(Put(*store, good, value)));
  for (const std::string_view key : {std::string_view(), std::string_view(long_key)}) {
    const std::string bytes = absl::StrCat(key.size(), " bytes");
    EXPECT_TRUE(Fails(Put(*store, key, value), kInvalid, bytes, "1 to 256"));
    EXPECT_TRUE(Fails(Get(*store, key, 10), kInvalid, bytes));
    EXPECT_TRUE(Fails(store->GetBytes(key, Soon()), kInvalid, bytes));
    EXPECT_TRUE(Fails(store->Erase(key, Soon()), kInvalid, bytes));
    const std::vector<std::string_view> keys = {good, key};
    EXPECT_TRUE(Fails(store->Exists(keys, Soon()), kInvalid, bytes));
    EXPECT_TRUE(Fails(store->ExistsEach(keys, Soon()), kInvalid, bytes));
    EXPECT_TRUE(Fails(store->Pin(key, Soon()), GetParam().pins ? kInvalid : kUnimplemented));
    EXPECT_TRUE(Fails(store->Unpin(key, Soon()), GetParam().pins ? kInvalid : kUnimplemented));
  }
  EXPECT_TRUE(Has(*store, good, value));
  EXPECT_EQ(store->stats().puts, 1);
}

TEST_P(StoreConformance, BadValuesAreNamedAndChangeNothing) {
  const auto store = Make();
  const Bytes value = ValueOf(1, 1, 10);
  ASSERT_TRUE(IsOk(Put(*store, "a", value)));
  EXPECT_TRUE(Fails(Put(*store, "a", {}), kInvalid, "0 bytes", absl::StrCat(kMaxValueBytes)));
  EXPECT_TRUE(Fails(store->Put("a", {}, Soon()), kInvalid, "0 bytes"));  // Not even a part.
  const Bytes large(static_cast<size_t>(kMaxValueBytes) + 1);
  EXPECT_TRUE(Fails(Put(*store, "a", large), kInvalid, absl::StrCat(kMaxValueBytes + 1, " bytes"),
                    absl::StrCat(kMaxValueBytes)));
  EXPECT_TRUE(Fails(Put(*store, "b", large), kInvalid));
  EXPECT_TRUE(Has(*store, "a", value));
  EXPECT_TRUE(Misses(*store, "b"));
  EXPECT_EQ(store->stats().puts, 1);
}

TEST_P(StoreConformance, ExistsCountsUpToTheFirstGap) {
  const auto store = Make();
  EXPECT_EQ(Exists(*store, {}), 0);
  EXPECT_EQ(Exists(*store, {"a"}), 0);
  for (const std::string_view key : {"a", "b", "d"}) {
    ASSERT_TRUE(IsOk(Put(*store, key, ValueOf(1, 1, 10))));
  }
  EXPECT_EQ(Exists(*store, {"a", "b", "c", "d"}), 2);
  EXPECT_EQ(Exists(*store, {"a", "a", "b", "d"}), 4);
  EXPECT_EQ(Exists(*store, {"c", "a"}), 0);
}

TEST_P(StoreConformance, ExistsEachAnswersKeyByKey) {
  const auto store = Make();
  const auto each = [&](const std::vector<std::string_view>& keys) {
    return Must(store->ExistsEach(keys, Soon()));
  };
  EXPECT_EQ(each({}), std::vector<bool>());
  for (const std::string_view key : {"a", "b", "d"}) {
    ASSERT_TRUE(IsOk(Put(*store, key, ValueOf(1, 1, 10))));
  }
  EXPECT_EQ(each({"c", "a", "b", "c", "d", "a"}),
            std::vector<bool>({false, true, true, false, true, true}));
}

TEST_P(StoreConformance, BatchesAnswerItemByItem) {
  const auto store = Make();
  const Bytes first = ValueOf(1, 1, 100), second = ValueOf(2, 1, 5000);
  const std::span<const std::byte> first_part = first, second_part = second;
  const std::vector<KvStore::PutItem> puts = {{"a", {&first_part, 1}},
                                              {"", {&first_part, 1}},
                                              {"b", {&second_part, 1}},
                                              {"c", {}},
                                              {"a", {&second_part, 1}}};
  const std::vector<absl::Status> put = store->PutBatch(puts, Soon());
  ASSERT_EQ(put.size(), 5);
  EXPECT_TRUE(IsOk(put[0]));
  EXPECT_TRUE(Fails(put[1], kInvalid));
  EXPECT_TRUE(IsOk(put[2]));
  EXPECT_TRUE(Fails(put[3], kInvalid));
  EXPECT_TRUE(IsOk(put[4]));  // In order: it is the later one that stays.

  Bytes outs[4] = {Bytes(5000), Bytes(10), Bytes(5000), Bytes(99)};
  std::vector<std::span<std::byte>> parts(std::begin(outs), std::end(outs));
  const auto out = [&parts](size_t i) { return std::span(parts).subspan(i, 1); };
  const std::vector<KvStore::GetItem> gets = {
      {"b", out(0)}, {"c", out(1)}, {"a", out(2)}, {"a", out(3)}};
  const std::vector<absl::Status> got = store->GetBatch(gets, Soon());
  ASSERT_EQ(got.size(), 4);
  EXPECT_TRUE(IsOk(got[0]));
  EXPECT_TRUE(outs[0] == second);
  EXPECT_TRUE(Fails(got[1], kNotFound));
  EXPECT_TRUE(IsOk(got[2]));
  EXPECT_TRUE(outs[2] == second);
  EXPECT_TRUE(Fails(got[3], kPrecondition, "5000", "99"));
  EXPECT_TRUE(store->PutBatch({}, Soon()).empty());
  EXPECT_TRUE(store->GetBatch({}, Soon()).empty());
}

// Of any length, with keys that come twice, more than one batch may carry in one piece, and beside
// single calls, which see the same.
TEST_P(StoreConformance, BatchesAgreeWithAMap) {
  const auto store = Make();
  std::mt19937_64 random(11);
  std::map<std::string, Bytes> model;
  for (uint64_t round = 1; round <= 30; ++round) {
    std::vector<std::string> keys(random() % 40);
    for (std::string& key : keys) key = absl::StrCat("key ", random() % 50);
    std::vector<Bytes> values;
    std::vector<std::span<const std::byte>> in;
    for (size_t i = 0; i < keys.size(); ++i) {
      values.push_back(ValueOf(i, round, 1 + static_cast<int64_t>(random() % 200000)));
    }
    in.assign(values.begin(), values.end());
    std::vector<KvStore::PutItem> puts;
    for (size_t i = 0; i < keys.size(); ++i) puts.push_back({keys[i], {&in[i], 1}});
    for (const absl::Status& status : store->PutBatch(puts, Soon())) ASSERT_TRUE(IsOk(status));
    for (size_t i = 0; i < keys.size(); ++i) model[keys[i]] = values[i];
    const std::string erased = absl::StrCat("key ", random() % 50);
    ASSERT_TRUE(IsOk(store->Erase(erased, Soon())));
    model.erase(erased);

    for (std::string& key : keys) key = absl::StrCat("key ", random() % 50);
    std::vector<Bytes> outs;
    outs.reserve(keys.size());
    for (const std::string& key : keys) {
      outs.emplace_back(model.contains(key) ? model[key].size() : 9);
    }
    std::vector<std::span<std::byte>> out(outs.begin(), outs.end());
    std::vector<KvStore::GetItem> gets;
    for (size_t i = 0; i < keys.size(); ++i) gets.push_back({keys[i], {&out[i], 1}});
    const std::vector<absl::Status> got = store->GetBatch(gets, Soon());
    ASSERT_EQ(got.size(), keys.size());
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto want = model.find(keys[i]);
      if (want == model.end()) {
        ASSERT_TRUE(Fails(got[i], kNotFound));
        continue;
      }
      ASSERT_TRUE(IsOk(got[i]));
      ASSERT_TRUE(outs[i] == want->second);
      if (i == 0) {
        ASSERT_TRUE(Has(*store, keys[i], want->second));
      }
    }
  }
}

// More than there is room for: of what was put the first are there, and nothing else.
TEST_P(StoreConformance, ABatchLargerThanTheStore) {
  if (!GetParam().evicts) return;  // This backend does not evict.
  const auto store = Make(kTight);
  const int64_t count = 2 * kTight.capacity_bytes / kTight.max_value_bytes;
  std::vector<std::string> keys;
  std::vector<Bytes> values;
  for (int64_t i = 0; i < count; ++i) {
    keys.push_back(absl::StrCat("key ", i));
    values.push_back(ValueOf(static_cast<uint64_t>(i), 1, kTight.max_value_bytes));
  }
  const std::vector<std::span<const std::byte>> in(values.begin(), values.end());
  std::vector<KvStore::PutItem> puts;
  for (int64_t i = 0; i < count; ++i) puts.push_back({keys[i], {&in[i], 1}});
  const std::vector<absl::Status> put = store->PutBatch(puts, Soon());
  EXPECT_LE(store->stats().bytes, store->stats().capacity_bytes);
  const std::vector<std::string_view> views(keys.begin(), keys.end());
  const int64_t there = Exists(*store, views);
  EXPECT_GE(there, count / 4);
  EXPECT_LT(there, count);
  for (int64_t i = 0; i < count; ++i) {
    if (i < there) {
      EXPECT_TRUE(IsOk(put[i])) << i;
      EXPECT_TRUE(Has(*store, keys[i], values[i])) << i;
    } else {
      EXPECT_TRUE(put[i].ok() || absl::IsResourceExhausted(put[i])) << put[i];
      EXPECT_TRUE(Misses(*store, keys[i])) << i;
    }
  }
}

// A block is of no use without those before it: of a batch the last ones go first, whether it was
// put or got last.
TEST_P(StoreConformance, OfABatchTheFirstIsDroppedLast) {
  if (!GetParam().evicts) return;  // This backend does not evict.
  const int64_t fit = kTight.capacity_bytes / kTight.max_value_bytes;
  const Bytes value = ValueOf(1, 1, kTight.max_value_bytes);
  const std::span<const std::byte> in = value;
  std::vector<std::string> keys;
  for (int64_t i = 0; i < fit; ++i) keys.push_back(absl::StrCat("key ", i));
  const std::vector<std::string_view> views(keys.begin(), keys.end());
  std::vector<KvStore::PutItem> puts;
  for (const std::string_view key : views) puts.push_back({key, {&in, 1}});
  int64_t cut = 0;
  for (const bool gets : {false, true}) {
    for (int64_t others = fit / 3; others <= fit; others += fit / 3) {
      SCOPED_TRACE(testing::Message() << others << (gets ? " others, got" : " others"));
      const auto store = Make(kTight);
      for (const absl::Status& status : store->PutBatch(puts, Soon())) ASSERT_TRUE(IsOk(status));
      if (gets) {
        std::vector<Bytes> outs(keys.size(), Bytes(value.size()));
        const std::vector<std::span<std::byte>> out(outs.begin(), outs.end());
        std::vector<KvStore::GetItem> items;
        for (size_t i = 0; i < keys.size(); ++i) items.push_back({keys[i], {&out[i], 1}});
        for (const absl::Status& status : store->GetBatch(items, Soon())) EXPECT_TRUE(IsOk(status));
      }
      for (int64_t i = 0; i < others; ++i) {
        ASSERT_TRUE(IsOk(Put(*store, absl::StrCat("other ", i), value)));
      }
      const std::vector<bool> there = Must(store->ExistsEach(views, Soon()));
      EXPECT_TRUE(std::is_sorted(there.begin(), there.end(), std::greater<>()));
      cut += there.front() && !there.back() ? 1 : 0;
    }
  }
  EXPECT_GT(cut, 0);
}

TEST_P(StoreConformance, PinsAreCounted) {
  const auto store = Make();
  if (!GetParam().pins) {
    ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 10))));
    EXPECT_TRUE(Fails(store->Pin("a", Soon()), kUnimplemented));
    EXPECT_TRUE(Fails(store->Unpin("a", Soon()), kUnimplemented));
    return;
  }
  EXPECT_TRUE(Fails(store->Pin("a", Soon()), kNotFound));
  EXPECT_TRUE(Fails(store->Unpin("a", Soon()), kPrecondition));
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 10))));
  EXPECT_TRUE(Fails(store->Unpin("a", Soon()), kPrecondition));
  EXPECT_TRUE(IsOk(store->Pin("a", Soon())));
  EXPECT_TRUE(IsOk(store->Pin("a", Soon())));
  EXPECT_EQ(store->stats().pinned, 1);
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 2, 9000))));  // Replaced, and still pinned.
  EXPECT_TRUE(Has(*store, "a", ValueOf(1, 2, 9000)));
  EXPECT_TRUE(IsOk(store->Unpin("a", Soon())));
  EXPECT_EQ(store->stats().pinned, 1);
  EXPECT_TRUE(IsOk(store->Unpin("a", Soon())));
  EXPECT_EQ(store->stats().pinned, 0);
  EXPECT_TRUE(Fails(store->Unpin("a", Soon()), kPrecondition));
  EXPECT_TRUE(IsOk(store->Pin("a", Soon())));
  EXPECT_TRUE(IsOk(store->Erase("a", Soon())));
  EXPECT_TRUE(Misses(*store, "a"));
  EXPECT_EQ(store->stats().pinned, 0);
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 3, 10))));  // Another entry: not pinned.
  EXPECT_TRUE(Fails(store->Unpin("a", Soon()), kPrecondition));
}

TEST_P(StoreConformance, StatsCount) {
  const auto store = Make();
  const KvStore::Stats none = store->stats();
  EXPECT_EQ(none.puts + none.hits + none.misses + none.evictions + none.errors, 0);
  EXPECT_TRUE(none.entries == 0 || none.entries == -1);
  EXPECT_TRUE(none.bytes == 0 || none.bytes == -1);
  for (const std::string_view key : {"a", "b", "a"}) {
    ASSERT_TRUE(IsOk(Put(*store, key, ValueOf(1, 1, 1000))));
  }
  EXPECT_TRUE(Has(*store, "a", ValueOf(1, 1, 1000)));  // Two gets.
  EXPECT_TRUE(Misses(*store, "c"));                    // Two as well.
  const KvStore::Stats some = store->stats();
  EXPECT_EQ(some.puts, 3);
  EXPECT_EQ(some.hits, 2);
  EXPECT_EQ(some.misses, 2);
  EXPECT_EQ(some.errors, 0);
  EXPECT_TRUE(some.entries == 2 || (some.entries == -1 && none.entries == -1)) << some.entries;
  EXPECT_TRUE(some.bytes >= 2000 || (some.bytes == -1 && none.bytes == -1)) << some.bytes;
  for (const std::string_view key : {"a", "b"}) EXPECT_TRUE(IsOk(store->Erase(key, Soon())));
  EXPECT_EQ(store->stats().entries, none.entries);
  EXPECT_EQ(store->stats().bytes, none.bytes);
}

TEST_P(StoreConformance, AFullStoreDropsWhatIsNotPinned) {
  if (!GetParam().evicts) return;  // This backend does not evict.
  const auto store = Make(kTight);
  const auto key = [](int i) { return absl::StrCat("key ", i); };
  const auto value = [](int i) {
    return ValueOf(static_cast<uint64_t>(i), 1, kTight.max_value_bytes);
  };
  const int fit = static_cast<int>(kTight.capacity_bytes / kTight.max_value_bytes);
  ASSERT_TRUE(IsOk(Put(*store, key(0), value(0))));
  if (GetParam().pins) {
    ASSERT_TRUE(IsOk(store->Pin(key(0), Soon())));
  }
  for (int i = 1; i < 4 * fit; ++i) {
    ASSERT_TRUE(IsOk(Put(*store, key(i), value(i)))) << i;
    EXPECT_TRUE(Has(*store, key(i), value(i))) << i;  // The newest is there.
    EXPECT_LE(store->stats().bytes, store->stats().capacity_bytes);
  }
  EXPECT_GT(store->stats().evictions, 0);
  int there = 0;
  for (int i = 0; i < 4 * fit; ++i) {
    const absl::StatusOr<Bytes> got = store->GetBytes(key(i), Soon());
    EXPECT_TRUE(got.ok() ? *got == value(i) : absl::IsNotFound(got.status())) << i;
    there += got.ok() ? 1 : 0;
    if (i == 0 && GetParam().pins) {
      EXPECT_TRUE(IsOk(got));
    }
  }
  EXPECT_GE(there, fit / 2);
  EXPECT_LT(there, 2 * fit);
}

TEST_P(StoreConformance, WhatIsPinnedMakesNoRoom) {
  if (!GetParam().evicts || !GetParam().pins) return;  // This backend does not evict or pin.
  const auto store = Make(kTight);
  const auto key = [](int i) { return absl::StrCat("key ", i); };
  const auto value = [](int i) {
    return ValueOf(static_cast<uint64_t>(i), 1, kTight.max_value_bytes);
  };
  int pinned = 0;
  absl::Status put = Put(*store, key(0), value(0));
  while (put.ok() && pinned < 1000) {
    ASSERT_TRUE(IsOk(store->Pin(key(pinned), Soon())));
    ++pinned;
    put = Put(*store, key(pinned), value(pinned));
  }
  EXPECT_TRUE(Fails(put, kExhausted, "pinned"));
  EXPECT_TRUE(Misses(*store, key(pinned)));
  for (int i = 0; i < pinned; ++i) EXPECT_TRUE(Has(*store, key(i), value(i)));
  EXPECT_EQ(store->stats().evictions, 0);
  EXPECT_TRUE(IsOk(store->Unpin(key(0), Soon())));
  EXPECT_TRUE(IsOk(Put(*store, key(pinned), value(pinned))));
  EXPECT_TRUE(Misses(*store, key(0)));
}

TEST_P(StoreConformance, ReopenedItHasWhatItHad) {
  if (!GetParam().reopen) return;  // This backend does not persist.
  auto store = Make();
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 100))));
  ASSERT_TRUE(IsOk(Put(*store, "b", ValueOf(2, 1, 100000))));
  ASSERT_TRUE(IsOk(Put(*store, "b", ValueOf(2, 2, 70000))));
  ASSERT_TRUE(IsOk(Put(*store, "c", ValueOf(3, 1, 10))));
  ASSERT_TRUE(IsOk(store->Erase("c", Soon())));
  const KvStore::Stats before = store->stats();
  store = GetParam().reopen(std::move(store));
  EXPECT_EQ(store->stats().entries, before.entries);
  EXPECT_EQ(store->stats().bytes, before.bytes);
  EXPECT_TRUE(Has(*store, "a", ValueOf(1, 1, 100)));
  EXPECT_TRUE(Has(*store, "b", ValueOf(2, 2, 70000)));
  EXPECT_TRUE(Misses(*store, "c"));
}

// Random calls, each applied to a std::map as well. Where entries may be dropped, the map learns
// of it when one is missed; what is pinned may not be.
class StoreConformance::RandomCalls {
 public:
  RandomCalls(KvStore& store, bool may_drop) : store_(store), may_drop_(may_drop) {}

  void Run(int64_t operations) {
    for (int64_t i = 0; i < operations && !testing::Test::HasFatalFailure(); ++i) {
      const uint64_t key = Upto(kKeys);
      switch (Upto(GetParam().pins ? 10 : 8)) {
        case 0:
        case 1:
        case 2:
          PutOne(key);
          break;
        case 3:
        case 4:
          GetOne(key);
          break;
        case 5:
          GetAll(key);
          break;
        case 6:
          ExistsSome();
          break;
        case 7:
          ASSERT_TRUE(IsOk(store_.Erase(Name(key), Soon())));
          if (model_.erase(key) != 0) num_pinned_ -= pins_.erase(key);
          break;
        case 8:
          PinOne(key);
          break;
        default:
          UnpinOne(key);
      }
    }
  }

  void CheckAll() {
    for (uint64_t key = 0; key < kKeys; ++key) GetAll(key);
    const KvStore::Stats stats = store_.stats();
    if (stats.entries >= 0) {
      EXPECT_EQ(stats.entries, std::ssize(model_));
    }
    if (stats.pinned >= 0) {
      EXPECT_EQ(stats.pinned, static_cast<int64_t>(num_pinned_));
    }
    EXPECT_EQ(stats.errors, 0);
  }

 private:
  static constexpr uint64_t kKeys = 100;
  static constexpr uint64_t kMaxPinned = 5;  // So that there is always something to drop.

  uint64_t Upto(uint64_t n) { return random_() % n; }
  static std::string Name(uint64_t key) { return absl::StrCat(key % 7, "/", key); }
  Bytes Value(uint64_t key) const {
    return ValueOf(key, model_.at(key).first, model_.at(key).second);
  }
  // Of a key that the model has.
  bool MayBeGone(uint64_t key) const { return may_drop_ && !pins_.contains(key); }

  void PutOne(uint64_t key) {
    const auto bytes = static_cast<int64_t>(1 + Upto(Upto(4) == 0 ? kRandomBytes : 200));
    const Bytes value = ValueOf(key, ++version_, bytes);
    ASSERT_TRUE(IsOk(store_.Put(Name(key), SplitAtRandom(std::span(value), random_), Soon())));
    model_[key] = {version_, bytes};
  }

  void GetOne(uint64_t key) {
    const auto it = model_.find(key);
    Bytes out(it == model_.end() ? 1 + Upto(9) : static_cast<size_t>(it->second.second));
    const absl::Status got = store_.Get(Name(key), SplitAtRandom(std::span(out), random_), Soon());
    Compare(key, got, out);
  }

  void GetAll(uint64_t key) {
    const absl::StatusOr<Bytes> got = store_.GetBytes(Name(key), Soon());
    Compare(key, got.status(), got.ok() ? *got : Bytes());
  }

  void Compare(uint64_t key, const absl::Status& status, const Bytes& got) {
    if (!model_.contains(key)) {
      ASSERT_TRUE(Fails(status, kNotFound)) << key;
    } else if (status.ok()) {
      ASSERT_TRUE(got == Value(key)) << key;
    } else {
      ASSERT_TRUE(Fails(status, kNotFound)) << key;
      ASSERT_TRUE(MayBeGone(key)) << "it may not be dropped: " << key;
      model_.erase(key);
    }
  }

  void ExistsSome() {
    std::vector<uint64_t> keys(Upto(6));
    std::vector<std::string> names;
    for (uint64_t& key : keys) {
      key = Upto(kKeys);
      names.push_back(Name(key));
    }
    const std::vector<std::string_view> views(names.begin(), names.end());
    const std::vector<bool> each = Must(store_.ExistsEach(views, Soon()));
    const int64_t there = Must(store_.Exists(views, Soon()));
    ASSERT_EQ(each.size(), keys.size());
    ASSERT_EQ(there, std::find(each.begin(), each.end(), false) - each.begin());
    for (size_t i = 0; i < keys.size(); ++i) {
      if (each[i]) {
        ASSERT_TRUE(model_.contains(keys[i])) << keys[i];
      } else if (model_.contains(keys[i])) {
        ASSERT_TRUE(MayBeGone(keys[i])) << keys[i];
        model_.erase(keys[i]);
      }
    }
  }

  void PinOne(uint64_t key) {
    if (num_pinned_ >= kMaxPinned) return;
    const absl::Status pinned = store_.Pin(Name(key), Soon());
    if (pinned.ok()) {
      ASSERT_TRUE(model_.contains(key));
      num_pinned_ += pins_[key]++ == 0 ? 1 : 0;
      return;
    }
    ASSERT_TRUE(Fails(pinned, kNotFound));
    if (!model_.contains(key)) return;
    ASSERT_TRUE(MayBeGone(key)) << key;
    model_.erase(key);
  }

  void UnpinOne(uint64_t key) {
    const absl::Status unpinned = store_.Unpin(Name(key), Soon());
    const auto it = pins_.find(key);
    if (it == pins_.end()) {
      ASSERT_TRUE(Fails(unpinned, kPrecondition)) << key;
      return;
    }
    ASSERT_TRUE(IsOk(unpinned)) << key;
    if (--it->second > 0) return;
    pins_.erase(it);
    --num_pinned_;
  }

  KvStore& store_;
  const bool may_drop_;
  std::mt19937_64 random_{7};
  uint64_t version_ = 0;
  std::map<uint64_t, std::pair<uint64_t, int64_t>> model_;  // Version and bytes.
  std::map<uint64_t, int64_t> pins_;
  uint64_t num_pinned_ = 0;
};

TEST_P(StoreConformance, RandomCallsAgreeWithAMap) {
  const auto store = Make();
  RandomCalls calls(*store, false);
  calls.Run(GetParam().random_operations);
  calls.CheckAll();
}

TEST_P(StoreConformance, RandomCallsToAFullStoreAgreeWithAMap) {
  if (!GetParam().evicts) return;  // This backend does not evict.
  const auto store = Make(kTiny);
  RandomCalls calls(*store, true);
  calls.Run(GetParam().random_operations);
  calls.CheckAll();
  if (GetParam().random_operations >= 10000) {
    EXPECT_GT(store->stats().evictions, 0);
  }
}

// Every get is one put's bytes, whoever puts, gets and erases meanwhile.
TEST_P(StoreConformance, EightThreadsSeeWholeValues) {
  const auto store = Make(GetParam().evicts ? kTight : kRoomy);
  std::atomic<int64_t> wrong = 0, found = 0;
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < 8; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937_64 random(thread);
      for (int64_t i = 0; i < GetParam().random_operations / 40; ++i) {
        const uint64_t key = random() % 40;
        const std::string name = absl::StrCat("key ", key);
        const uint64_t version = random();
        absl::Status status;
        if (const uint64_t what = random() % 8; what < 3) {
          status = Put(*store, name, WholeValue(key, version));
        } else if (what == 3) {
          status = store->Erase(name, Soon());
        } else {
          const absl::StatusOr<Bytes> got =
              what < 6 ? store->GetBytes(name, Soon())
                       : Get(*store, name, static_cast<size_t>(WholeValueBytes(version)));
          status = got.status();
          found += got.ok() ? 1 : 0;
          if (got.ok() && !IsWholeValue(key, *got)) ++wrong;
        }
        if (!status.ok() && !absl::IsNotFound(status) && !absl::IsFailedPrecondition(status)) {
          ++wrong;
          ADD_FAILURE() << status;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(found, 0);
  EXPECT_EQ(store->stats().errors, 0);
}

}  // namespace kvferry
