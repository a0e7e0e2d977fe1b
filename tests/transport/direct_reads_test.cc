// One-sided reads by themselves: a reader and a process that can be read, progressed by hand. They
// are one process here, which makes no difference to process_vm_readv(2).

#include "transport/direct_reads.h"

#include <gtest/gtest.h>
#include <ucp/api/ucp_version.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <span>

#include "base/config.h"
#include "tests/support/captured_log.h"
#include "tests/support/status.h"
#include "tests/support/test_config.h"
#include "tests/support/wait_for.h"
#include "tests/transport/recorder.h"
#include "transport/guards.h"
#include "transport/ucx/direct_address.h"
#include "transport/ucx/ucx_direct_reads.h"

namespace kvferry {
namespace {

constexpr LinkId kLink = 7;
constexpr size_t kMemoryBytes = 256 << 10;

Config DirectConfig() {
  Config config;
  ReadDirectly(&config);
  config.chunk_bytes = 64 << 10;
  return config;
}

#if UCP_API_VERSION < UCP_VERSION(1, 22)

TEST(DirectReads, AreRefusedByAUcxThatMayEmulateThem) {
  EXPECT_TRUE(Fails(MakeUcxDirectReads(DirectConfig(), {}).status(),
                    absl::StatusCode::kFailedPrecondition, "1.22 or newer", "network_path"));
}

#else

class Direct : public testing::Test {
 protected:
  Direct() {
    std::mt19937_64 random(1);
    for (auto* memory : {&first_, &second_}) {
      for (std::byte& byte : *memory) byte = static_cast<std::byte>(random());
    }
  }
  void Connect() {
    ASSERT_TRUE(IsOk(reader_->Connect(kLink, owner_->address())));
    EXPECT_TRUE(reader_->Probing(kLink));
    EXPECT_FALSE(reader_->Costs(kLink).possible());
    ASSERT_TRUE(ProgressUntil([&] { return !at_reader_.probed.empty(); }));
  }
  template <typename Predicate>
  bool ProgressUntil(const Predicate& holds) {
    return StepUntil(
        [&] {
          if (owner_ != nullptr) owner_->Progress(&at_owner_);
          reader_->Progress(&at_reader_);
        },
        holds);
  }
  std::vector<std::byte> ListOf(const std::vector<PoolPiece>& pieces) const {
    const GuardHead head{static_cast<uint64_t>(guard_), guards_->Generation(guard_)};
    const auto begin = std::as_bytes(std::span(&head, 1));
    std::vector<std::byte> list(begin.begin(), begin.end());
    const auto rest = std::as_bytes(std::span(pieces));
    list.insert(list.end(), rest.begin(), rest.end());
    return list;
  }
  void Read(const std::vector<PoolPiece>& pieces, uint32_t bytes, uint64_t id = 1) {
    reader_->Read(kLink, {id, 0, 0, bytes, kChunkInPool | kChunkHasChecksum}, ListOf(pieces));
  }
  // The owner's memory, in the order in which it is told of.
  std::vector<std::byte> Row() const {
    std::vector<std::byte> row = first_;
    row.insert(row.end(), second_.begin(), second_.end());
    return row;
  }
  static std::vector<std::byte> Cut(const std::vector<std::byte>& row,
                                    const std::vector<PoolPiece>& pieces) {
    std::vector<std::byte> cut;
    for (const PoolPiece& piece : pieces) {
      cut.insert(cut.end(), row.begin() + static_cast<ptrdiff_t>(piece.offset),
                 row.begin() + static_cast<ptrdiff_t>(piece.offset + piece.bytes));
    }
    return cut;
  }
  absl::Status FailureOf(const std::vector<std::byte>& list, uint32_t bytes) {
    at_reader_.failed.clear();
    reader_->Read(kLink, {1, 0, 0, bytes, kChunkInPool}, list);
    EXPECT_TRUE(ProgressUntil([&] { return !at_reader_.failed.empty(); }));
    return at_reader_.failed.empty() ? absl::OkStatus() : at_reader_.failed[0].second;
  }

  std::vector<std::byte> first_ = std::vector<std::byte>(kMemoryBytes);
  std::vector<std::byte> second_ = std::vector<std::byte>(kMemoryBytes);
  const std::unique_ptr<Guards> guards_ = Must(Guards::Create());
  const int64_t guard_ = guards_->Take();
  std::unique_ptr<DirectReads> owner_ =
      Must(MakeUcxDirectReads(DirectConfig(), {guards_->memory(), {first_, second_}}));
  std::unique_ptr<DirectReads> reader_ = Must(MakeUcxDirectReads(DirectConfig(), {}));
  Recorder at_owner_;
  Recorder at_reader_;
};

TEST_F(Direct, AProbeSaysWhatReadsTake) {
  EXPECT_TRUE(reader_->address().empty());
  Connect();
  EXPECT_EQ(at_reader_.probed, std::vector<LinkId>{kLink});
  EXPECT_FALSE(reader_->Probing(kLink));
  const ReadCosts costs = reader_->Costs(kLink);
  EXPECT_TRUE(costs.possible());
  EXPECT_GT(costs.mib_ns, costs.read_ns);
}

// As where packets to it go nowhere.
TEST_F(Direct, AProbeThatTakesTooLongIsGivenUp) {
  ASSERT_TRUE(IsOk(reader_->Connect(kLink, owner_->address())));
  reader_->Progress(&at_reader_);  // It has a slot.
  EXPECT_LT(reader_->Tick(Clock::now()), DeadlineInMs(5000));
  EXPECT_TRUE(reader_->Probing(kLink));
  const Deadline by = DeadlineInMs(5000);
  EXPECT_EQ(reader_->Tick(by), Deadline::max());
  EXPECT_FALSE(reader_->Probing(kLink));
  EXPECT_FALSE(reader_->Arm());  // Somebody waits to hear of it.
  EXPECT_TRUE(at_reader_.probed.empty());
  reader_->Progress(&at_reader_);
  EXPECT_EQ(at_reader_.probed, std::vector<LinkId>{kLink});
  // What it would have found out does not count any more, and its slot is free again.
  ASSERT_TRUE(ProgressUntil([&] { return reader_->Arm(); }));
  EXPECT_EQ(at_reader_.probed.size(), 1u);
  EXPECT_FALSE(reader_->Costs(kLink).possible());
}

// It waits for those of peers that do not answer, and is not held against its own.
TEST_F(Direct, AProbeThatHasNotBegunInTimeGoesOn) {
  constexpr LinkId kProbes = 8;
  for (LinkId link = 1; link <= kProbes + 1; ++link) {
    ASSERT_TRUE(IsOk(reader_->Connect(link, owner_->address())));
  }
  reader_->Progress(&at_reader_);  // All but the last have a slot.
  reader_->Tick(DeadlineInMs(5000));
  EXPECT_FALSE(reader_->Probing(kProbes + 1));
  reader_->Progress(&at_reader_);
  EXPECT_EQ(at_reader_.probed.size(), kProbes + 1);
  EXPECT_FALSE(reader_->Costs(kProbes + 1).possible());
  ASSERT_TRUE(ProgressUntil([&] { return reader_->Costs(kProbes + 1).possible(); }));
  EXPECT_FALSE(reader_->Costs(1).possible());
  EXPECT_EQ(at_reader_.probed.size(), kProbes + 1);  // Nothing is said twice.
}

// Those who do not answer hold slots until UCX gives them up.
TEST_F(Direct, ManyProbesLeaveRoomForReads) {
  Connect();
  for (LinkId link = kLink + 1; link < kLink + 40; ++link) {
    ASSERT_TRUE(IsOk(reader_->Connect(link, owner_->address())));
  }
  Read({{0, 1000}}, 1000);
  reader_->Progress(&at_reader_);  // All that there is room for begins.
  ASSERT_TRUE(ProgressUntil([&] { return !at_reader_.chunks.empty(); }));
  EXPECT_EQ(at_reader_.probed.size(), 1u) << "it waited for probes";
  ASSERT_TRUE(ProgressUntil([&] { return at_reader_.probed.size() == 40; }));
}

TEST_F(Direct, PiecesComeInTheirOrder) {
  Connect();
  const std::vector<PoolPiece> pieces = {{4096, 1000},
                                         {0, 1},
                                         {kMemoryBytes - 5, 5},
                                         {kMemoryBytes, 5},
                                         {2 * kMemoryBytes - 3000, 3000}};
  Read(pieces, 4011);
  ASSERT_TRUE(ProgressUntil([&] { return !at_reader_.chunks.empty(); }));
  EXPECT_EQ(at_reader_.chunks[0].first.flags, kChunkHasChecksum);
  EXPECT_EQ(at_reader_.chunks[0].first.bytes, 4011u);
  EXPECT_EQ(at_reader_.chunks[0].second, Cut(Row(), pieces));
  EXPECT_TRUE(at_reader_.whole[0]);
}

TEST_F(Direct, ManyMoreChunksThanThereIsRoomForAtOnce) {
  Connect();
  std::mt19937_64 random(2);
  std::vector<std::vector<PoolPiece>> chunks(100);
  for (size_t i = 0; i < chunks.size(); ++i) {
    for (int j = 0; j < 300; ++j) chunks[i].push_back({random() % (kMemoryBytes - 200), 200});
    Read(chunks[i], 300 * 200, i);
  }
  ASSERT_TRUE(ProgressUntil([&] { return at_reader_.chunks.size() == chunks.size(); }));
  for (const auto& [header, bytes] : at_reader_.chunks) {
    EXPECT_EQ(bytes, Cut(Row(), chunks[header.transfer_id])) << header.transfer_id;
  }
  EXPECT_TRUE(reader_->Arm());
}

// Reads of one peer may take as long as its network card tries: another's begin beside them.
TEST_F(Direct, PeersAreReadBesideEachOther) {
  Connect();
  ASSERT_TRUE(IsOk(reader_->Connect(kLink + 1, owner_->address())));
  ASSERT_TRUE(ProgressUntil([&] { return at_reader_.probed.size() == 2; }));
  constexpr uint64_t kLast = 100;
  const std::vector<PoolPiece> pieces(1000, {0, 60});
  for (uint64_t id = 0; id < 20; ++id) Read(pieces, 60000, id);
  reader_->Read(kLink + 1, {kLast, 0, 0, 60000, kChunkInPool}, ListOf(pieces));
  ASSERT_TRUE(ProgressUntil([&] { return at_reader_.chunks.size() == 21; }));
  const auto last =
      std::find_if(at_reader_.chunks.begin(), at_reader_.chunks.end(),
                   [](const auto& chunk) { return chunk.first.transfer_id == kLast; });
  EXPECT_LT(last - at_reader_.chunks.begin(), 4);
}

TEST_F(Direct, WhatIsReadAfterTheGuardWasRaisedDoesNotCount) {
  Connect();
  const std::vector<std::byte> list = ListOf({{0, 100}});
  guards_->RaiseAndGiveBack(guard_);
  reader_->Read(kLink, {1, 0, 0, 100, kChunkInPool}, list);
  ASSERT_TRUE(ProgressUntil([&] { return !at_reader_.chunks.empty(); }));
  EXPECT_FALSE(at_reader_.whole[0]);
}

// The guard is read last: raised between the bytes and it, they do not count either. The owner of
// the memory runs between any two rounds of the reader here, so one of a thousand rounds is between
// them.
TEST_F(Direct, AGuardRaisedInTheMiddleIsSeen) {
  Connect();
  int stale = 0;
  for (int rounds = 0; rounds < 60; ++rounds) {
    at_reader_.chunks.clear();
    at_reader_.whole.clear();
    const int64_t guard = guards_->Take();
    std::fill(first_.begin(), first_.begin() + 1000, std::byte{1});
    const GuardHead head{static_cast<uint64_t>(guard), guards_->Generation(guard)};
    std::vector<std::byte> list = ListOf({{0, 1000}});
    std::memcpy(list.data(), &head, sizeof(head));
    reader_->Read(kLink, {1, 0, 0, 1000, kChunkInPool}, list);
    for (int i = 0; i < rounds; ++i) reader_->Progress(&at_reader_);
    guards_->RaiseAndGiveBack(guard);
    std::fill(first_.begin(), first_.begin() + 1000, std::byte{2});
    ASSERT_TRUE(ProgressUntil([&] { return !at_reader_.chunks.empty(); }));
    if (!at_reader_.whole[0]) {
      ++stale;
      continue;
    }
    EXPECT_EQ(at_reader_.chunks[0].second, std::vector<std::byte>(1000, std::byte{1})) << rounds;
  }
  EXPECT_GT(stale, 0);
  EXPECT_LT(stale, 60);
}

TEST_F(Direct, ListsThatMakeNoSenseAreRefused) {
  Connect();
  const auto refused = [&](const std::vector<PoolPiece>& pieces, uint32_t bytes,
                           absl::string_view what) {
    return Fails(FailureOf(ListOf(pieces), bytes), absl::StatusCode::kInvalidArgument, what);
  };
  EXPECT_TRUE(Fails(FailureOf({}, 100), absl::StatusCode::kInvalidArgument, "in 0 bytes"));
  EXPECT_TRUE(refused({}, 100, "0 bytes for its 100"));
  EXPECT_TRUE(refused({{0, 99}}, 100, "99 bytes for its 100"));
  EXPECT_TRUE(refused({{0, 101}}, 100, "other bytes"));
  EXPECT_TRUE(refused({{0, 0}, {0, 100}}, 100, "other bytes"));
  EXPECT_TRUE(refused({{0, UINT64_MAX}}, 100, "other bytes"));
  EXPECT_TRUE(refused({{0, 65537}}, 65537, "for its 65537"));
  EXPECT_TRUE(refused({{kMemoryBytes - 1, 2}}, 2, "no memory of the peer's"));
  EXPECT_TRUE(refused({{2 * kMemoryBytes - 1, 2}}, 2, "no memory of the peer's"));
  EXPECT_TRUE(refused({{UINT64_MAX, 2}}, 2, "no memory of the peer's"));
  std::vector<std::byte> list = ListOf({{0, 100}});
  list.resize(list.size() - 1);
  EXPECT_TRUE(Fails(FailureOf(list, 100), absl::StatusCode::kInvalidArgument, "31 bytes"));
  list = ListOf({{0, 100}});
  const GuardHead beyond{Guards::kNumWords, 0};
  std::memcpy(list.data(), &beyond, sizeof(beyond));
  EXPECT_TRUE(Fails(FailureOf(list, 100), absl::StatusCode::kInvalidArgument, "guard 4096"));
  EXPECT_TRUE(Fails(FailureOf(ListOf(std::vector<PoolPiece>(65536, {0, 1})), 65536),
                    absl::StatusCode::kResourceExhausted, "65537 pieces", "limit 65536"));
  EXPECT_TRUE(at_reader_.chunks.empty());
}

// Nor is any memory kept for them, and what is said of one transfer is said once.
TEST_F(Direct, WhatThereIsNoRoomForIsRefused) {
  Connect();
  constexpr uint64_t kRoom = 16384, kMore = 1000;
  for (uint64_t id = 0; id < kRoom + 2 * kMore; ++id) {
    Read({{id % 1000, 1}}, 1, std::min(id, kRoom + kMore - 1));
  }
  EXPECT_FALSE(reader_->Arm());
  reader_->Progress(&at_reader_);
  ASSERT_EQ(at_reader_.failed.size(), kMore);
  for (const auto& [header, status] : at_reader_.failed) {
    EXPECT_GE(header.transfer_id, kRoom);
    EXPECT_EQ(header.flags, kChunkHasChecksum);
    ASSERT_TRUE(Fails(status, absl::StatusCode::kResourceExhausted, "limit 16384"));
  }
  ASSERT_TRUE(ProgressUntil([&] { return at_reader_.chunks.size() == kRoom; }));
  EXPECT_TRUE(reader_->Costs(kLink).possible());
}

TEST_F(Direct, ListsHaveNoMoreRoomThanTheirShare) {
  Connect();
  const std::vector<std::byte> longest = ListOf(std::vector<PoolPiece>(65535, {0, 1}));
  int lists = 0;
  for (; at_reader_.failed.empty() && lists < 1000; ++lists) {
    reader_->Read(kLink, {1, 0, 0, 65535, kChunkInPool}, longest);
    if (lists % 50 == 49) reader_->Progress(&at_reader_);
  }
  EXPECT_LT(lists, 250);
  ASSERT_FALSE(at_reader_.failed.empty());
  EXPECT_TRUE(Fails(at_reader_.failed[0].second, absl::StatusCode::kResourceExhausted,
                    "in lists of", "bytes, limit 134217728"));
  // With the link their memory goes, too.
  reader_->Close(kLink);
  ASSERT_TRUE(ProgressUntil([&] { return reader_->Arm(); }));
  EXPECT_TRUE(at_reader_.chunks.empty());
}

// Whatever became of them.
TEST_F(Direct, ListsThatHaveHadTheirTurnTakeNoRoom) {
  Connect();
  std::vector<std::byte> longest = ListOf(std::vector<PoolPiece>(65535, {0, 1}));
  const GuardHead beyond{Guards::kNumWords, 0};
  std::memcpy(longest.data(), &beyond, sizeof(beyond));
  for (int i = 0; i < 300; ++i) {
    ASSERT_TRUE(Fails(FailureOf(longest, 65535), absl::StatusCode::kInvalidArgument, "guard"));
  }
}

// Who came first may have more than what is everybody's share by now.
TEST_F(Direct, ListsOfAllPeersHaveABoundTogether) {
  const std::vector<std::byte> mebibyte = ListOf(std::vector<PoolPiece>(65535, {0, 1}));
  const auto fill = [&](LinkId link) {
    EXPECT_TRUE(IsOk(reader_->Connect(link, owner_->address())));
    for (uint64_t id = 0; id < 200; ++id) {
      reader_->Read(link, {1000 * link + id, 0, 0, 65535, kChunkInPool}, mebibyte);
    }
  };
  for (const LinkId link : {1, 2, 3}) fill(link);
  reader_->Progress(&at_reader_);
  EXPECT_EQ(at_reader_.failed.size(), 3 * 200u - 256);
  // With their links they are gone, and nothing more is said of them.
  at_reader_.failed.clear();
  fill(4);
  for (const LinkId link : {1, 2, 3, 4}) reader_->Close(link);
  reader_->Progress(&at_reader_);
  EXPECT_TRUE(at_reader_.failed.empty());
  fill(5);
  reader_->Progress(&at_reader_);
  EXPECT_EQ(at_reader_.failed.size(), 200u - 128);
}

TEST_F(Direct, OfALinkThatIsClosedNothingMoreIsHeard) {
  Connect();
  for (int i = 0; i < 40; ++i) Read({{0, 60000}}, 60000);
  reader_->Progress(&at_reader_);
  const size_t before = at_reader_.chunks.size();
  reader_->Close(kLink);
  EXPECT_FALSE(reader_->Costs(kLink).possible());
  Read({{0, 100}}, 100);  // Of no peer any more.
  ASSERT_TRUE(IsOk(reader_->Connect(kLink + 1, owner_->address())));
  ASSERT_TRUE(ProgressUntil([&] { return at_reader_.probed.size() == 2; }));
  EXPECT_EQ(at_reader_.chunks.size(), before);
  EXPECT_TRUE(at_reader_.failed.empty());
}

TEST_F(Direct, APeerThatCannotBeReadIsSaidSo) {
  const CapturedLog log;
  Config config = DirectConfig();
  config.direct_tls = "posix";  // Has no reads of memory that is not its own.
  owner_ = Must(MakeUcxDirectReads(config, {guards_->memory(), {first_, second_}}));
  reader_ = Must(MakeUcxDirectReads(config, {}));
  ASSERT_TRUE(IsOk(reader_->Connect(kLink, owner_->address())));
  ASSERT_TRUE(ProgressUntil([&] { return !at_reader_.probed.empty(); }));
  EXPECT_FALSE(reader_->Costs(kLink).possible());
  EXPECT_TRUE(log.Has({"cannot be read", "comes packed"})) << log.ToString();
}

TEST_F(Direct, AddressesAreCheckedBeforeUcxSeesThem) {
  const std::string good = owner_->address();
  EXPECT_TRUE(IsOk(DirectAddress::Decode(good)));
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_FALSE(DirectAddress::Decode(good.substr(0, size)).ok()) << size;
  }
  EXPECT_FALSE(DirectAddress::Decode(good + "x").ok());
  const auto with = [&](size_t at, uint32_t value) {
    std::string bad = good;
    std::memcpy(bad.data() + at, &value, sizeof(value));
    return DirectAddress::Decode(bad).status();
  };
  EXPECT_TRUE(Fails(with(0, 2), absl::StatusCode::kInvalidArgument, "version 2"));
  EXPECT_TRUE(Fails(with(4, 1), absl::StatusCode::kInvalidArgument, "1 memories"));
  EXPECT_TRUE(Fails(with(4, 1025), absl::StatusCode::kInvalidArgument, "1025 memories"));
  EXPECT_TRUE(Fails(with(8, 5000), absl::StatusCode::kInvalidArgument, "5000 bytes"));
  EXPECT_TRUE(Fails(with(16 + 12, 1 << 20), absl::StatusCode::kInvalidArgument, "bytes"));
  EXPECT_TRUE(Fails(with(16 + 16, 5000), absl::StatusCode::kInvalidArgument, "key of 5000"));
  EXPECT_TRUE(Fails(reader_->Connect(kLink, good.substr(1)), absl::StatusCode::kInvalidArgument,
                    "direct address"));
  DirectAddress small = Must(DirectAddress::Decode(good));
  small.memories[0].bytes = 63;  // A probe reads as much as 64.
  EXPECT_TRUE(Fails(reader_->Connect(kLink, small.Encode()), absl::StatusCode::kInvalidArgument,
                    "without guards"));
}

#endif

}  // namespace
}  // namespace kvferry
