// Lookup buffers between processes, and kill -9 of either side.

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/support/child_peer.h"
#include "tests/support/status.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

using Numbers = std::vector<int64_t>;

// A killed peer is noticed at once, and nothing here waits for a heartbeat. One small chunk at a
// time makes a transfer long enough to be caught in the middle.
constexpr char kSlow[] =
    R"({"chunk_bytes": 4096, "credits_per_transfer": 1, "heartbeat_timeout_ms": 600000})";

Numbers Count(int64_t first, int64_t count) {
  Numbers numbers(static_cast<size_t>(count));
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

class Consumer : public ChildPeer {
 public:
  Consumer(const std::string& producers, int64_t num_pages, const std::string& config = kSlow)
      : ChildPeer(PeerOptions("consumer", config, num_pages)) {
    EXPECT_EQ(Ask("connect " + producers), "OK");
  }
  std::string Lookup(const std::string& tokens, const Numbers& pages, int64_t ms) {
    return Ask(absl::StrCat("lookup ", tokens, " ", absl::StrJoin(pages, ","), " ", ms));
  }
};

std::string Insert(ChildPeer& producer, const Numbers& tokens, const Numbers& pages) {
  return producer.Ask(
      absl::StrCat("insert ", absl::StrJoin(tokens, ","), " ", absl::StrJoin(pages, ",")));
}

bool Waits(ChildPeer& producer, int64_t lookups) {
  return WaitFor([&] { return producer.Metric("lookup_waiting") == lookups; }, Soon());
}

// Three processes: whoever gets an entry, it is one of them, and every byte is there.
TEST(LookupProcesses, EachEntryOnce) {
  constexpr int64_t kEntries = 48;
  ChildPeer producer(PeerOptions("producer", "{}", 128));
  Consumer one(producer.address(), 128, "{}"), other(producer.address(), 128, "{}");
  Consumer* const consumers[] = {&one, &other};
  const auto insert = [&](int64_t i) {
    Numbers tokens(30, i);
    tokens[1] = 7;
    Insert(producer, tokens, {2 * i + 1, 2 * i});
  };
  // Both ask for everything, in part before it is there.
  std::vector<std::string> lookups[2];
  for (int64_t i = 0; i < kEntries; ++i) {
    for (const int c : {0, 1}) {
      lookups[c].push_back(consumers[c]->Lookup(absl::StrCat(i, ",7"), {2 * i, 2 * i + 1}, 8000));
    }
    if (i >= kEntries / 2) insert(i - kEntries / 2);
  }
  for (int64_t i = kEntries / 2; i < kEntries; ++i) insert(i);
  Numbers source[2], pages[2];
  int64_t delivered = 0;
  for (int64_t i = 0; i < kEntries; ++i) {
    bool got = false;
    for (const int c : {0, 1}) {
      const std::string status = consumers[c]->Wait(lookups[c][i], 20000);
      if (status != "OK") {
        EXPECT_TRUE(absl::StartsWith(status, "DEADLINE_EXCEEDED")) << status;
        continue;
      }
      EXPECT_FALSE(got) << "entry " << i << " was delivered twice";
      got = true;
      ++delivered;
      // The query's two tokens lie in the first page.
      source[c].push_back(2 * i + 1);
      pages[c].push_back(2 * i);
    }
  }
  EXPECT_EQ(delivered, kEntries);
  for (const int c : {0, 1}) EXPECT_EQ(consumers[c]->Verify(11, source[c], pages[c]), "OK");
  EXPECT_EQ(producer.Metric("lookup_entries"), 0);
}

// The entry comes back, and another consumer gets it.
TEST(LookupProcesses, AConsumerIsKilledInTheMiddle) {
  ChildPeer producer(PeerOptions("producer", kSlow, 128));
  const Numbers pages = Count(0, 128);
  // A victim may be through before it is killed, and then has the entry: that is another round.
  int64_t in_the_middle = 0;
  for (int round = 0; round < 50 && in_the_middle < 3; ++round) {
    SCOPED_TRACE(round);
    const int64_t failed = producer.Metric("transfers_failed");
    const std::string entry = Insert(producer, Count(0, 128 * 16), pages);
    {
      Consumer victim(producer.address(), 128);
      const int64_t sent = producer.Metric("bytes_sent");
      victim.Lookup("any", pages, 60000);  // 16 MiB.
      // The third chunk is sent when the second has come: by then every lane is connected.
      const int64_t third = sent + 2 * 4096 + 1;
      ASSERT_TRUE(WaitFor([&] { return producer.Metric("bytes_sent") >= third; }, Soon()));
      victim.Kill();
      ASSERT_TRUE(WaitFor([&] { return producer.Metric("transfers_active") == 0; }, Soon()));
    }
    if (producer.Metric("transfers_failed") == failed) {
      // If it was through and had not said so, the entry comes back, and takes the next one's room.
      ASSERT_TRUE(WaitFor([&] { return producer.Metric("lookup_leased") == 0; }, Soon()));
      if (producer.Metric("lookup_entries") > 0) {
        Consumer next(producer.address(), 128);
        EXPECT_EQ(next.Wait(next.Lookup("any", pages, 20000), 20000), "OK");
      }
      continue;
    }
    ++in_the_middle;
    Consumer other(producer.address(), 128);
    EXPECT_EQ(other.Wait(other.Lookup("0,1,2", {0}, 20000), 20000), "OK");
    EXPECT_EQ(other.Verify(11, {0}, {0}), "OK");
    EXPECT_EQ(producer.Ask("gone " + entry + " 10000"), "fetched");
  }
  EXPECT_EQ(in_the_middle, 3);
  EXPECT_EQ(producer.Metric("transfers_active"), 0);
  EXPECT_EQ(producer.Metric("lookup_leased"), 0);
  EXPECT_TRUE(producer.alive());
}

TEST(LookupProcesses, AConsumerIsKilledWhileItWaits) {
  ChildPeer producer(PeerOptions("producer", kSlow, 128));
  {
    Consumer victim(producer.address(), 128);
    // A session first: this is not about one that is being set up.
    Insert(producer, {9}, {1});
    ASSERT_EQ(victim.Wait(victim.Lookup("9", {0}, 20000), 20000), "OK");
    victim.Lookup("1,2", {0}, 60000);
    victim.Lookup("any", {0}, 60000);
    ASSERT_TRUE(Waits(producer, 2));
    victim.Kill();
  }
  ASSERT_TRUE(Waits(producer, 0));
  Insert(producer, {1, 2}, {5});
  EXPECT_EQ(producer.Metric("lookup_entries"), 1);
  Consumer other(producer.address(), 128);
  EXPECT_EQ(other.Wait(other.Lookup("1,2", {3}, 20000), 20000), "OK");
  EXPECT_EQ(other.Verify(11, {5}, {3}), "OK");
}

TEST(LookupProcesses, AProducerIsKilledInTheMiddle) {
  // In more runs than a chunk's list has room for: else a device's tensors would all be one chunk.
  constexpr int64_t kPages = 300;
  ChildPeer survivor(PeerOptions("producer", kSlow, kPages));
  Numbers pages = Count(0, kPages);
  std::reverse(pages.begin(), pages.end());
  // A victim may be through before it is killed: that is another round.
  for (int round = 0; round < 10; ++round) {
    SCOPED_TRACE(round);
    ChildPeer victim(PeerOptions("producer", kSlow, kPages));
    Consumer consumer(survivor.address() + "," + victim.address(), kPages);
    Insert(victim, Count(0, kPages * 16), pages);
    const std::string moving = consumer.Lookup("0,1,2", {9}, 20000);
    EXPECT_EQ(consumer.Wait(moving, 20000), "OK");
    Insert(victim, Count(0, kPages * 16), pages);
    const int64_t received = consumer.Metric("bytes_received");
    const std::string broken = consumer.Lookup("any", pages, 60000);
    const std::string missing = consumer.Lookup("77", {9}, 5000);
    const std::string waiting = consumer.Lookup("88", {9}, 60000);
    ASSERT_TRUE(Waits(survivor, 2));
    ASSERT_TRUE(
        WaitFor([&] { return consumer.Metric("bytes_received") > received + 4096; }, Soon()));
    victim.Kill();
    // At once: its deadline is at 60 s.
    if (!absl::StartsWith(consumer.Wait(broken, 15000), "UNAVAILABLE")) continue;
    const std::string late = consumer.Wait(missing, 20000);
    EXPECT_TRUE(absl::StartsWith(late, "DEADLINE_EXCEEDED: lookup: no matching entry came in time"))
        << late;
    EXPECT_TRUE(absl::StrContains(late, "UNAVAILABLE")) << late;
    // The others go on with whoever is left.
    ASSERT_EQ(consumer.Ask("reset"), "OK");
    Insert(survivor, {88}, {4});
    EXPECT_EQ(consumer.Wait(waiting, 20000), "OK");
    EXPECT_EQ(consumer.Verify(11, {4}, {9}), "OK");
    EXPECT_TRUE(consumer.alive());
    return;
  }
  ADD_FAILURE() << "no victim was caught in the middle";
}

}  // namespace
}  // namespace kvferry
