#pragma once

// A store of two tiers, and short words for what is asked of them.

#include <gtest/gtest.h>

#include <memory>
#include <string_view>
#include <vector>

#include "connector/store/host_store.h"
#include "connector/store/tiered_store.h"
#include "tests/connector/fake_store.h"
#include "tests/connector/store_values.h"
#include "tests/support/status.h"
#include "tests/support/wait_for.h"

namespace kvferry {

inline int64_t Exists(KvStore& store, const std::vector<std::string_view>& keys) {
  return Must(store.Exists(keys, Soon()));
}

inline std::vector<bool> Each(KvStore& store, const std::vector<std::string_view>& keys) {
  return Must(store.ExistsEach(keys, Soon()));
}

// Of pages of ten bytes.
inline std::shared_ptr<HostStore> MakeHost(int64_t bytes) {
  return Must(HostStore::Create({Must(HostStore::FlatLayout(10)), bytes, 0}));
}

// Tiers that can be told to be down, and two values of which one is older.
class TieredStores : public testing::Test {
 protected:
  const std::shared_ptr<FakeStore> upper_ = std::make_shared<FakeStore>(1000);
  const std::shared_ptr<FakeStore> lower_ = std::make_shared<FakeStore>(10000);
  const std::unique_ptr<TieredStore> store_ = Must(TieredStore::Create(upper_, lower_));
  const Bytes old_ = ValueOf(1, 1, 100);
  const Bytes new_ = ValueOf(1, 2, 100);

  testing::AssertionResult Is(KvStore& store, std::string_view key, const Bytes& want) {
    const auto got = store.GetBytes(key, Soon());
    if (!got.ok()) return testing::AssertionFailure() << got.status();
    return *got == want ? testing::AssertionSuccess()
                        : testing::AssertionFailure() << "other bytes";
  }
  bool Misses(KvStore& store, std::string_view key) {
    return absl::IsNotFound(store.GetBytes(key, Soon()).status());
  }
};

}  // namespace kvferry
