#include "pool/host_kv_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <new>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/host_memory.h"
#include "tests/pool/guarded_memory.h"
#include "tests/support/captured_log.h"
#include "tests/support/failing_new.h"
#include "tests/support/status.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;
constexpr auto kRange = absl::StatusCode::kOutOfRange;
constexpr auto kWrongState = absl::StatusCode::kFailedPrecondition;
using State = HostSlotState;
using Slots = std::vector<int32_t>;

std::shared_ptr<TokenKvPool> Device(int64_t tokens = 16, int64_t page_size = 4) {
  return Must(TokenKvPool::Create(KvLayout::Mha(3, page_size, 2, 4, DType::kFloat32), tokens));
}

std::unique_ptr<HostKvPool> Host(const std::shared_ptr<TokenKvPool>& device, double ratio = 2) {
  return Must(HostKvPool::Create(device, {.ratio_to_device = ratio}, 0));
}

// What each call needs and leads to: the header's table, written down again.
struct Call {
  absl::Status (HostKvPool::*call)(std::span<const int32_t>);
  std::set<State> from;
  State to;
};
const std::vector<Call>& Calls() {
  static const std::vector<Call> calls = {
      {&HostKvPool::ProtectWrite, {State::kReserved}, State::kProtected},
      {&HostKvPool::ProtectLoad, {State::kBackup}, State::kProtected},
      {&HostKvPool::CompleteIo, {State::kProtected}, State::kSynced},
      {&HostKvPool::MarkBackup, {State::kSynced}, State::kBackup},
      {&HostKvPool::MarkSynced, {State::kBackup}, State::kSynced},
      {&HostKvPool::Free, {State::kReserved, State::kSynced, State::kBackup}, State::kIdle},
  };
  return calls;
}

// The state of every slot, and the bytes of every token on either side. Knows nothing of runs,
// layers or where tensors lie.
class HostModel : public testing::TestWithParam<int64_t> {
 protected:
  using Row = std::vector<std::byte>;

  void SetUp() override {
    const Row zeros(static_cast<size_t>(device_->flat_bytes(1)));
    for (int64_t slot = 0; slot < device_->num_slots(); ++slot) on_device_.push_back(zeros);
    for (int64_t slot = 0; slot < pool_->host()->num_slots(); ++slot) on_host_.push_back(zeros);
    model_.resize(on_host_.size(), State::kIdle);
  }

  int64_t Upto(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }

  // Whole pages, mostly of one state so that calls succeed often; sometimes any slots at all.
  Slots Some(const std::set<State>& wanted) {
    const int64_t page_size = GetParam(), pages = pool_->num_tokens() / page_size;
    Slots slots;
    const bool any = Upto(10) == 0;
    for (int64_t i = Upto(4); i >= 0; --i) {
      const int64_t page = 1 + Upto(pages);
      if (!any && !wanted.contains(model_[page * page_size])) continue;
      for (int64_t s = 0; s < page_size; ++s) {
        slots.push_back(static_cast<int32_t>(page * page_size + s));
      }
    }
    if (Upto(30) == 0) slots.push_back(static_cast<int32_t>(Upto(pages * page_size + 20) - 5));
    if (Upto(30) == 0 && !slots.empty()) slots.pop_back();
    return slots;
  }
  // As many, each once; sometimes one that does not exist, or one more.
  Slots OnDevice(size_t count) {
    Slots slots(static_cast<size_t>(device_->num_slots()));
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), random_);
    slots.resize(count + (Upto(30) == 0 ? 1 : 0));
    if (Upto(30) == 0 && !slots.empty()) {
      slots[0] = static_cast<int32_t>(Upto(2) == 0 ? device_->num_slots() : -1);
    }
    return slots;
  }

  absl::StatusCode Expected(const std::set<State>& from, const Slots& slots) const {
    std::set<int32_t> before;
    for (const int32_t slot : slots) {
      if (slot < 0 || static_cast<size_t>(slot) >= model_.size()) return kRange;
      if (!before.insert(slot).second) return kInvalid;
      if (!from.contains(model_[slot])) return kWrongState;
    }
    return absl::StatusCode::kOk;
  }
  bool WholePages(const Slots& slots) const {
    std::map<int64_t, int64_t> pages;
    for (const int32_t slot : slots) ++pages[slot / GetParam()];
    return std::all_of(pages.begin(), pages.end(),
                       [](const auto& page) { return page.second == GetParam(); });
  }
  void Enter(State state, const Slots& slots) {
    for (const int32_t slot : slots) model_[slot] = state;
  }

  void RandomCall() {
    const Call& call = Calls()[static_cast<size_t>(Upto(static_cast<int64_t>(Calls().size())))];
    const Slots slots = Some(call.from);
    absl::StatusCode expected = Expected(call.from, slots);
    const bool frees = call.to == State::kIdle;
    if (expected == absl::StatusCode::kOk && frees && !WholePages(slots)) expected = kInvalid;
    const absl::Status status = (pool_.get()->*call.call)(slots);
    ASSERT_EQ(status.code(), expected) << status.ToString();
    if (status.ok()) Enter(call.to, slots);
  }

  void RandomAllocation() {
    const int64_t tokens = GetParam() * (1 + Upto(4));
    const int64_t free_tokens = pool_->num_free();
    const absl::StatusOr<Slots> slots = pool_->Allocate(tokens);
    ASSERT_EQ(slots.ok(), tokens <= free_tokens);
    if (!slots.ok()) return;
    for (const int32_t slot : *slots) ASSERT_EQ(model_[slot], State::kIdle);
    Enter(State::kReserved, *slots);
  }

  void RandomClear() {
    const bool allowed = std::find(model_.begin(), model_.end(), State::kProtected) == model_.end();
    const absl::Status status = pool_->Clear();
    ASSERT_EQ(status.code(), allowed ? absl::StatusCode::kOk : kWrongState);
    if (allowed) std::fill(model_.begin(), model_.end(), State::kIdle);
  }

  // Down or up, of lists that may not fit.
  void RandomTransfer() {
    const bool down = Upto(2) == 0;
    const std::set<State> from = {down ? State::kReserved : State::kBackup};
    const Slots host = Some(from), device = OnDevice(host.size());
    absl::StatusCode expected = Expected(from, host);
    if (expected == absl::StatusCode::kOk && device.size() != host.size()) expected = kInvalid;
    const bool exist = std::all_of(device.begin(), device.end(), [&](int32_t slot) {
      return slot >= 0 && slot < device_->num_slots();
    });
    if (expected == absl::StatusCode::kOk && !exist) expected = kRange;
    const absl::Status status = down ? pool_->BackUp(device, host) : pool_->Load(host, device);
    ASSERT_EQ(status.code(), expected) << status.ToString();
    ASSERT_EQ(device_->layers().ready(), device_->layers().num_layers());
    if (!status.ok()) return;
    Enter(State::kSynced, host);
    for (size_t i = 0; i < host.size(); ++i) {
      (down ? on_host_[host[i]] : on_device_[device[i]]) =
          down ? on_device_[device[i]] : on_host_[host[i]];
    }
    ++transfers_;
    ExpectRows(*pool_->host(), on_host_, host);
    ExpectRows(*device_, on_device_, device);
  }

  // What an engine computes.
  void RandomTokens() {
    const Slots slot = {static_cast<int32_t>(Upto(device_->num_slots()))};
    Row& row = on_device_[slot[0]];
    for (std::byte& value : row) value = static_cast<std::byte>(random_());
    ASSERT_TRUE(IsOk(device_->WriteFlat(slot, row)));
  }

  static void ExpectRows(const TokenKvPool& pool, const std::vector<Row>& rows,
                         const Slots& slots) {
    Row got(static_cast<size_t>(pool.flat_bytes(1)));
    for (const int32_t slot : slots) {
      ASSERT_TRUE(IsOk(pool.ReadFlat(Slots{slot}, got)));
      ASSERT_EQ(got, rows[slot]) << "slot " << slot;
    }
  }

  void ExpectAll() {
    Slots all(model_.size());
    std::iota(all.begin(), all.end(), 0);
    ExpectRows(*pool_->host(), on_host_, all);
    for (const int32_t slot : all) ASSERT_EQ(Must(pool_->StateOf(Slots{slot})), model_[slot]);
    const auto idle = std::count(model_.begin() + GetParam(), model_.end(), State::kIdle);
    ASSERT_EQ(pool_->num_free(), idle);
    all.resize(static_cast<size_t>(device_->num_slots()));
    ExpectRows(*device_, on_device_, all);
  }

  const std::shared_ptr<TokenKvPool> device_ =
      Must(TokenKvPool::Create(KvLayout::Mha(2, GetParam(), 1, 4, DType::kUint8), 8 * GetParam()));
  const std::unique_ptr<HostKvPool> pool_ = Host(device_);
  std::vector<State> model_;
  std::vector<Row> on_device_, on_host_;
  int64_t transfers_ = 0;
  std::mt19937_64 random_{3};
};

TEST_P(HostModel, AMillionCallsAgreeWithTheTable) {
  for (int i = 0; i < 1'000'000; ++i) {
    const int64_t what = Upto(100);
    if (what < 20) {
      RandomAllocation();
    } else if (what < 60) {
      RandomCall();
    } else if (what < 90) {
      RandomTransfer();
    } else if (what < 99) {
      RandomTokens();
    } else {
      RandomClear();
    }
    if (i % 256 == 0) ExpectAll();
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(transfers_, 100'000);
}

INSTANTIATE_TEST_SUITE_P(PageSizes, HostModel, testing::Values(1, 4));

TEST(HostPools, Sizes) {
  const auto device = Device(16, 4);
  const int64_t token_bytes = 3 * 2 * 2 * 4 * 4;
  const auto by_ratio = Host(device, 2.7);
  EXPECT_EQ(by_ratio->num_tokens(), 40);  // 43.2, in whole pages.
  EXPECT_EQ(by_ratio->bytes_per_token(), token_bytes);
  const auto by_bytes = Must(HostKvPool::Create(device, {.bytes = 9 * token_bytes + 5}, 0));
  EXPECT_EQ(by_bytes->num_tokens(), 8);
  // An MLA token counts in every layer.
  const auto mla = Must(TokenKvPool::Create(KvLayout::Mla(61, 1, 576, DType::kBFloat16), 4));
  EXPECT_EQ(Host(mla)->bytes_per_token(), 61 * 576 * 2);
}

TEST(HostPools, SizesThatCannotBe) {
  const auto device = Device();
  const auto create = [&](HostKvPool::Size size, int64_t keep_free = 0) {
    return HostKvPool::Create(device, size, keep_free).status();
  };
  EXPECT_TRUE(Fails(create({}), kInvalid, "give one of them"));
  EXPECT_TRUE(Fails(create({.ratio_to_device = 1, .bytes = 1000}), kInvalid, "give one of them"));
  EXPECT_TRUE(
      Fails(create({.ratio_to_device = -1}), kInvalid, "ratio_to_device (ratio in Python) -1"));
  EXPECT_TRUE(Fails(create({.ratio_to_device = 0.1}), kInvalid, "a page (4)"));
  EXPECT_TRUE(Fails(create({.ratio_to_device = 1e300}), kInvalid, "2147483647"));
  EXPECT_TRUE(Fails(create({.ratio_to_device = std::nan("")}), kInvalid, "nan"));
  EXPECT_TRUE(Fails(create({.bytes = -5}), kInvalid, "-5 bytes"));
  EXPECT_TRUE(Fails(create({.bytes = INT64_MAX}), kInvalid, "2147483647"));
  for (const int64_t negative : {int64_t{-1}, INT64_MIN}) {
    EXPECT_TRUE(Fails(create({.ratio_to_device = 1}, negative), kInvalid, "keep_free_bytes is -"));
  }
  // The last of the host's memory stays with the host.
  const int64_t available = Must(AvailableHostBytes());
  EXPECT_TRUE(Fails(create({.ratio_to_device = 1}, available + (int64_t{1} << 40)), kExhausted,
                    "(keep_free_bytes) are left to others"));
}

TEST(HostPools, ValuesOfALatentAreThoseOfThePoolAbove) {
  const auto device = Must(TokenKvPool::Create(KvLayout::Mla(1, 4, 12, DType::kUint8), 8, 8));
  EXPECT_EQ(Must(Host(device)->host()->Value(0, Clock::now())).head_dim, 8);
}

// Whoever has waited for it may use them.
TEST(HostPools, SlotsAreSettledWhenTheLastLayerIsThere) {
  constexpr int32_t kTokens = 1 << 15;
  const auto device = Device(kTokens);
  const auto pool = Host(device, 1);
  const Slots slots = Must(pool->Allocate(kTokens));
  ASSERT_TRUE(IsOk(pool->BackUp(slots, slots)));
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(IsOk(pool->MarkBackup(slots)));
    std::atomic<bool> over = false;
    State seen = State::kIdle;
    std::thread reader([&] {
      while (!over && device->layers().ready() == 3) std::this_thread::yield();
      EXPECT_TRUE(IsOk(device->layers().WaitFor(2, Soon())));
      seen = Must(pool->StateOf(slots));
    });
    EXPECT_TRUE(IsOk(pool->Load(slots, slots)));
    over = true;
    reader.join();
    ASSERT_EQ(seen, State::kSynced);
  }
}

TEST(HostPools, ARefusalWithoutMemoryForItsMessageChangesNothing) {
  const auto pool = Host(Device());
  const Slots slots = Must(pool->Allocate(8));
  const Slots twice = {4, 5, 4}, outside = {5, 4, 36};
  CallWithoutMemory(
      [&] { EXPECT_EQ(pool->ProtectWrite(twice).code(), kInvalid); },
      [&] {
        EXPECT_TRUE(Fails(pool->ProtectWrite(outside), absl::StatusCode::kOutOfRange, "slot 36"));
      });
  EXPECT_TRUE(IsOk(pool->ProtectWrite(slots)));
}

TEST(HostPools, ErrorsNameSlotAndStates) {
  const auto pool = Host(Device());
  const Slots slots = Must(pool->Allocate(8));
  EXPECT_TRUE(Fails(pool->ProtectLoad(slots), kWrongState, "ProtectLoad: slot 4 is reserved",
                    "must be backup"));
  ASSERT_TRUE(IsOk(pool->ProtectWrite(slots)));
  EXPECT_TRUE(Fails(pool->Free(slots), kWrongState, "slot 4 is protected",
                    "must be reserved or synced or backup"));
  EXPECT_TRUE(Fails(pool->Clear(), kWrongState, "8 slots are protected"));
  EXPECT_TRUE(Fails(pool->CompleteIo(Slots{4, 5, 4}), kInvalid, "slot 4 stands twice"));
  EXPECT_TRUE(Fails(pool->CompleteIo(Slots{36}), absl::StatusCode::kOutOfRange, "slot 36"));
  ASSERT_TRUE(IsOk(pool->CompleteIo(Slots{4, 5, 6, 7})));
  EXPECT_TRUE(Fails(pool->StateOf(slots), kInvalid, "slot 4 is synced but slot 8 is protected"));
  EXPECT_TRUE(Fails(pool->StateOf(Slots{}), kInvalid, "no slots"));
  EXPECT_TRUE(Fails(pool->Free(Slots{4, 5, 6}), kInvalid, "3 slots of 1 pages"));
  EXPECT_TRUE(Fails(pool->ProtectWrite(Slots{0}), kWrongState, "slot 0 is idle"));
  EXPECT_TRUE(Fails(pool->Allocate(64), kExhausted));
  ASSERT_TRUE(IsOk(pool->CompleteIo(Slots{8, 9, 10, 11})));
  ASSERT_TRUE(IsOk(pool->Clear()));
  EXPECT_EQ(pool->num_free(), 32);
}

Slots Iota(int32_t first, int32_t count) {
  Slots slots;
  for (int32_t i = 0; i < count; ++i) slots.push_back(first + i);
  return slots;
}

std::vector<std::byte> FlatOf(const TokenKvPool& pool, const Slots& slots) {
  std::vector<std::byte> flat(
      static_cast<size_t>(pool.flat_bytes(static_cast<int64_t>(slots.size()))));
  EXPECT_TRUE(IsOk(pool.ReadFlat(slots, flat)));
  return flat;
}

std::vector<std::byte> FillDevice(TokenKvPool& device, const Slots& slots) {
  std::vector<std::byte> flat(
      static_cast<size_t>(device.flat_bytes(static_cast<int64_t>(slots.size()))));
  for (size_t i = 0; i < flat.size(); ++i) flat[i] = static_cast<std::byte>(i * 31 + i / 251);
  EXPECT_TRUE(IsOk(device.WriteFlat(slots, flat)));
  return flat;
}

TEST(HostPools, TokensGoDownAndComeBackElsewhere) {
  const auto device = Device();
  const auto pool = Host(device);
  const Slots away = Iota(4, 8), back = Iota(12, 8);
  const std::vector<std::byte> bytes = FillDevice(*device, away);
  const Slots host = Must(pool->Allocate(8));
  ASSERT_TRUE(IsOk(pool->BackUp(away, host)));
  EXPECT_EQ(Must(pool->StateOf(host)), State::kSynced);
  EXPECT_EQ(FlatOf(*pool->host(), host), bytes);
  ASSERT_TRUE(IsOk(pool->MarkBackup(host)));
  ASSERT_TRUE(IsOk(pool->Load(host, back)));
  EXPECT_EQ(Must(pool->StateOf(host)), State::kSynced);
  EXPECT_EQ(FlatOf(*device, back), bytes);
  EXPECT_EQ(device->layers().ready(), 3);
}

TEST(HostPools, AFailedTransferLeavesTheStateItFound) {
  const auto device = Device();
  const auto pool = Host(device);
  const Slots host = Must(pool->Allocate(4));
  EXPECT_TRUE(Fails(pool->BackUp(Iota(4, 3), host), kInvalid, "3 rows"));
  EXPECT_EQ(Must(pool->StateOf(host)), State::kReserved);
  ASSERT_TRUE(IsOk(pool->BackUp(Iota(4, 4), host)));
  EXPECT_TRUE(Fails(pool->BackUp(Iota(4, 4), host), kWrongState, "synced"));
  ASSERT_TRUE(IsOk(pool->MarkBackup(host)));
  EXPECT_TRUE(Fails(pool->Load(host, Iota(18, 4)), absl::StatusCode::kOutOfRange, "slot 20"));
  EXPECT_TRUE(Fails(pool->Load(host, Iota(16, 3)), kInvalid, "4 rows to read but 3"));
  EXPECT_EQ(Must(pool->StateOf(host)), State::kBackup);
  // Neither was a load: every layer is as it was.
  EXPECT_EQ(device->layers().ready(), 3);
  EXPECT_TRUE(IsOk(device->Key(0, Clock::now())));
  ASSERT_TRUE(IsOk(pool->Load(host, Iota(16, 4))));
  EXPECT_TRUE(IsOk(device->Key(2, Clock::now())));
}

TEST(HostPools, ThePoolAboveMayLieOnADevice) {
  const auto memory = std::make_shared<GuardedMemory>();
  const auto device = Must(TokenKvPool::Create(KvLayout::Mha(3, 4, 2, 4, DType::kFloat32), 16,
                                               /*latent_value_dim=*/0, memory));
  const auto pool = Host(device);
  EXPECT_TRUE(pool->host()->memory().on_host());
  const std::vector<std::byte> bytes = FillDevice(*device, Iota(4, 8));
  const Slots host = Must(pool->Allocate(8));
  ASSERT_TRUE(IsOk(pool->BackUp(Iota(4, 8), host)));
  EXPECT_EQ(FlatOf(*pool->host(), host), bytes);
  ASSERT_TRUE(IsOk(pool->MarkBackup(host)));
  ASSERT_TRUE(IsOk(pool->Load(host, Iota(12, 8))));
  EXPECT_EQ(FlatOf(*device, Iota(12, 8)), bytes);

  // When it fails, states are as they were.
  ASSERT_TRUE(IsOk(pool->MarkBackup(host)));
  memory->failure = absl::InternalError("it fell off the bus");
  constexpr auto kInternal = absl::StatusCode::kInternal;
  EXPECT_TRUE(Fails(pool->Load(host, Iota(12, 8)), kInternal, "fell off"));
  EXPECT_EQ(Must(pool->StateOf(host)), State::kBackup);
  EXPECT_TRUE(Fails(device->Key(0, Soon()), kInternal, "fell off"));
  const Slots more = Must(pool->Allocate(4));
  EXPECT_TRUE(Fails(pool->BackUp(Iota(4, 4), more), kInternal, "fell off"));
  EXPECT_EQ(Must(pool->StateOf(more)), State::kReserved);
}

// A device at which something happens whenever it is to copy.
class HookedMemory : public GuardedMemory {
 public:
  absl::Status Run(std::span<const TokenCopy> copies, ThreadPool* threads) const override {
    before_run();
    return GuardedMemory::Run(copies, threads);
  }
  std::function<void()> before_run = [] {};
};

// With a copy of some slots on the host, in state backup.
class HookedTransfers : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(IsOk(pool_->BackUp(there_, host_)));
    ASSERT_TRUE(IsOk(pool_->MarkBackup(host_)));
  }

  const std::shared_ptr<HookedMemory> memory_ = std::make_shared<HookedMemory>();
  const std::shared_ptr<TokenKvPool> device_ =
      Must(TokenKvPool::Create(KvLayout::Mha(3, 4, 2, 4, DType::kFloat32), 16, 0, memory_));
  const std::unique_ptr<HostKvPool> pool_ = Host(device_);
  const Slots there_ = Iota(4, 8), host_ = Must(pool_->Allocate(8));
};

TEST_F(HookedTransfers, OneThatThrowsLeavesTheStateItFound) {
  const Slots more = Must(pool_->Allocate(8));
  memory_->before_run = [] { throw std::bad_alloc(); };
  EXPECT_THROW((void)pool_->BackUp(there_, more), std::bad_alloc);
  EXPECT_EQ(Must(pool_->StateOf(more)), State::kReserved);
  // In its second layer.
  memory_->before_run = [&] {
    if (device_->layers().ready() == 1) throw std::bad_alloc();
  };
  EXPECT_THROW((void)pool_->Load(host_, there_), std::bad_alloc);
  EXPECT_EQ(Must(pool_->StateOf(host_)), State::kBackup);
  EXPECT_TRUE(IsOk(device_->Key(0, Clock::now())));
  EXPECT_TRUE(Fails(device_->Key(1, Clock::now()), absl::StatusCode::kAborted, "broken off"));
  // Neither is in the way of anything.
  memory_->before_run = [] {};
  EXPECT_TRUE(IsOk(pool_->BackUp(there_, more)));
  EXPECT_TRUE(IsOk(pool_->Load(host_, there_)));
  EXPECT_TRUE(IsOk(pool_->Clear()));
}

// Else somebody could free them and have others in their place, and their states be taken for
// these.
TEST_F(HookedTransfers, SlotsOfALoadThatWasGivenUpAreNeverSynced) {
  LayerCounter& layers = device_->layers();
  // It takes a while to say so, in which the other one has its turn.
  const absl::Status enough = absl::CancelledError(std::string(4 << 20, '!'));
  memory_->before_run = [&] {
    if (layers.ready() == 2) layers.Fail(layers.last_load(), enough);
  };
  std::atomic<bool> over = false, were_synced = false;
  std::thread other([&] {
    while (!over) {
      if (pool_->MarkBackup(host_).ok()) were_synced = true;
    }
  });
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(Fails(pool_->Load(host_, there_), kWrongState, "given up", "!!!"));
    EXPECT_EQ(Must(pool_->StateOf(host_)), State::kBackup);
  }
  over = true;
  other.join();
  EXPECT_FALSE(were_synced);
}

// Whoever says that a transfer is over when it is not, and frees its slots, does so to itself: the
// transfer ends in an error, and what has become of the slots since stays as it is.
TEST_F(HookedTransfers, SlotsThatWereFreedMeanwhileAreLeftAlone) {
  const auto free_them = [this](const Slots& slots) {
    EXPECT_TRUE(IsOk(pool_->CompleteIo(slots)));
    EXPECT_TRUE(IsOk(pool_->Free(slots)));
  };
  const Slots more = Must(pool_->Allocate(8));
  memory_->before_run = [&] { free_them(more); };
  EXPECT_TRUE(Fails(pool_->BackUp(there_, more), kWrongState, "slot 12 is idle"));
  EXPECT_EQ(Must(pool_->StateOf(more)), State::kIdle);
  memory_->before_run = [&] {
    if (device_->layers().ready() == 2) free_them(host_);
  };
  EXPECT_TRUE(Fails(pool_->Load(host_, there_), kWrongState, "slot 4 is idle"));
  EXPECT_EQ(Must(pool_->StateOf(host_)), State::kIdle);
  EXPECT_FALSE(device_->Key(2, Clock::now()).ok());
  memory_->before_run = [] {};
  EXPECT_TRUE(IsOk(pool_->Clear()));
}

TEST(HostPools, WhatCannotBePinnedIsSlowerAndWorks) {
  const CapturedLog log;
  const auto memory = std::make_shared<GuardedMemory>();
  memory->pin_failure = absl::ResourceExhaustedError("too much is locked");
  const auto device =
      Must(TokenKvPool::Create(KvLayout::Mha(3, 4, 2, 4, DType::kFloat32), 16, 0, memory));
  const auto pool = Host(device);
  EXPECT_TRUE(log.Has({"host pool", "guarded memory", "too much is locked"})) << log.ToString();
  const std::vector<std::byte> bytes = FillDevice(*device, Iota(4, 8));
  const Slots host = Must(pool->Allocate(8));
  ASSERT_TRUE(IsOk(pool->BackUp(Iota(4, 8), host)));
  EXPECT_EQ(FlatOf(*pool->host(), host), bytes);
}

TEST(HostPools, ALoadWaitsItsTurn) {
  const auto device = Device();
  const auto pool = Host(device);
  const Slots host = Must(pool->Allocate(4));
  ASSERT_TRUE(IsOk(pool->BackUp(Iota(4, 4), host)));
  ASSERT_TRUE(IsOk(pool->MarkBackup(host)));
  ASSERT_TRUE(IsOk(device->layers().Begin().status()));  // Somebody else's.
  EXPECT_TRUE(Fails(pool->Load(host, Iota(8, 4)), kWrongState, "under way"));
  EXPECT_EQ(Must(pool->StateOf(host)), State::kBackup);
}

// Threads that back up, take back and free their own pages, on one pool.
TEST(HostPools, SeveralThreads) {
  const auto device = Device(64, 4);
  const auto pool = Host(device, 1);
  std::atomic<int64_t> wrong = 0;
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const Slots mine = Iota(4 + 16 * t, 16);
      for (int i = 0; i < 500; ++i) {
        const std::vector<std::byte> bytes = FillDevice(*device, mine);
        const absl::StatusOr<Slots> host = pool->Allocate(16);
        if (!host.ok() || !pool->BackUp(mine, *host).ok() ||
            FlatOf(*pool->host(), *host) != bytes || !pool->Free(*host).ok()) {
          ++wrong;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(pool->num_free(), 64);
}

}  // namespace
}  // namespace kvferry
