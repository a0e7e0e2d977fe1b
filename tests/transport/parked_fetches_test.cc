#include "transport/parked_fetches.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace kvferry {
namespace {

class Parked : public testing::Test {
 protected:
  static Deadline At(int64_t ms) { return Deadline() + std::chrono::milliseconds(ms); }
  static ParkedFetch Of(uint64_t id, uint64_t lease, const PeerKey& peer, int64_t until_ms) {
    ParkedFetch parked{{}, peer, LinkId{1}, At(until_ms)};
    parked.fetch.transfer_id = id;
    parked.fetch.lease_id = lease;
    return parked;
  }
  static std::vector<uint64_t> Ids(const std::vector<ParkedFetch>& parked) {
    std::vector<uint64_t> ids;
    for (const ParkedFetch& one : parked) ids.push_back(one.fetch.transfer_id);
    return ids;
  }

  ParkedFetches parked_;
};

TEST_F(Parked, NothingIsThereAtFirst) {
  EXPECT_EQ(parked_.next_due(), Deadline::max());
  EXPECT_FALSE(parked_.Has(1));
  EXPECT_EQ(parked_.Find(1), nullptr);
  EXPECT_FALSE(parked_.Take(1).has_value());
  EXPECT_TRUE(parked_.TakeOfLease(1).empty());
  EXPECT_TRUE(parked_.TakeDue(At(1000)).empty());
}

// Beside a map by transfer.
TEST_F(Parked, RandomRun) {
  struct Known {
    uint64_t lease;
    PeerKey peer;
    int64_t until_ms;
  };
  std::mt19937_64 random(1);
  std::map<uint64_t, Known> model;
  const auto take = [&](const auto& matches) {
    std::vector<uint64_t> ids;
    for (const auto& [id, known] : model) {
      if (matches(id, known)) ids.push_back(id);
    }
    for (const uint64_t id : ids) model.erase(id);
    return ids;
  };
  for (int step = 0; step < 100000; ++step) {
    const uint64_t id = random() % 40, lease = random() % 8;
    const PeerKey peer = std::to_string(random() % 4);
    const int64_t ms = static_cast<int64_t>(random() % 1000);
    switch (random() % 8) {
      case 0: {
        const auto taken = parked_.Take(id);
        ASSERT_EQ(taken.has_value(), model.erase(id) == 1);
        if (taken) {
          ASSERT_EQ(taken->fetch.transfer_id, id);
        }
        break;
      }
      case 1: {
        ASSERT_EQ(Ids(parked_.TakeOfLease(lease)),
                  take([&](uint64_t, const Known& known) { return known.lease == lease; }));
        break;
      }
      case 2: {
        std::vector<uint64_t> ids = Ids(parked_.TakeDue(At(ms / 8)));
        std::sort(ids.begin(), ids.end());
        ASSERT_EQ(ids,
                  take([&](uint64_t, const Known& known) { return known.until_ms <= ms / 8; }));
        break;
      }
      case 3:
        if (random() % 8 != 0) break;
        parked_.ForgetPeer(peer);
        take([&](uint64_t, const Known& known) { return known.peer == peer; });
        break;
      default:
        if (parked_.Has(id)) break;
        parked_.Add(Of(id, lease, peer, ms));
        model[id] = {lease, peer, ms};
    }
    std::vector<uint64_t> of_lease;
    int64_t first = INT64_MAX;
    for (const auto& [known_id, known] : model) {
      const ParkedFetch* const found = parked_.Find(known_id);
      ASSERT_NE(found, nullptr);
      ASSERT_EQ(found->fetch.lease_id, known.lease);
      ASSERT_EQ(found->peer, known.peer);
      first = std::min(first, known.until_ms);
      if (known.lease == lease) of_lease.push_back(known_id);
    }
    ASSERT_EQ(parked_.IdsOfLease(lease), of_lease);
    ASSERT_EQ(parked_.Has(id), model.contains(id));
    ASSERT_EQ(parked_.next_due(), model.empty() ? Deadline::max() : At(first));
  }
}

}  // namespace
}  // namespace kvferry
