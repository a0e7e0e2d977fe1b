#include "pool/gdn_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "tests/pool/gdn_pool_suite.h"
#include "tests/pool/guarded_memory.h"
#include "tests/support/failing_new.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

using Slots = std::vector<int64_t>;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

INSTANTIATE_TEST_SUITE_P(Memories, GdnPools, testing::Values(HostBackend(), GuardedBackend()),
                         BackendName());

TEST(Gdn, SizesOfQwen3Next) {
  // Qwen3-Next-80B-A3B: 36 linear layers, 32 V heads and 16 K heads of 128, a kernel of 4.
  const GdnShape shape{36, 32, 128, 128, 2 * 16 * 128 + 32 * 128, 4, DType::kBFloat16};
  EXPECT_EQ(shape.recurrent_item_bytes(), 2 << 20);
  EXPECT_EQ(shape.conv_item_bytes(), 8192 * 3 * 2);
  const GdnPool pool = Must(GdnPool::Create(shape, 16, 3));
  EXPECT_EQ(pool.num_slots(), 20);
  EXPECT_EQ(pool.bytes(), 36 * 20 * ((int64_t{2} << 20) + 49152));
}

TEST(Gdn, AKvPoolOfBytesAdoptsTheStates) {
  const GdnPool pool = Must(GdnPool::Create(SmallGdnShape(), 4, 2));
  const KvLayout layout{3, 1, DType::kUint8, "GDN", {{"recurrent", 1, 24}, {"conv", 1, 10}}};
  const auto states = Must(KvPool::Adopt(layout, pool.buffer_infos(), nullptr));
  EXPECT_EQ(states->num_pages(), 7);
  EXPECT_EQ(states->page(2, 1, 5).data(), pool.conv_state(2).data() + 5 * 10);
}

TEST(Gdn, BadShapes) {
  const auto fails = [](auto change, absl::string_view message) {
    GdnShape shape = SmallGdnShape();
    change(shape);
    return Fails(GdnPool::Create(shape, 4), kInvalid, message);
  };
  for (const int64_t bad : {int64_t{0}, int64_t{-1}, kHuge}) {
    EXPECT_TRUE(fails([&](GdnShape& shape) { shape.num_layers = bad; }, "num_layers is"));
    EXPECT_TRUE(fails([&](GdnShape& shape) { shape.num_v_heads = bad; }, "num_v_heads is"));
    EXPECT_TRUE(fails([&](GdnShape& shape) { shape.head_k_dim = bad; }, "head_k_dim is"));
    EXPECT_TRUE(fails([&](GdnShape& shape) { shape.head_v_dim = bad; }, "head_v_dim is"));
    EXPECT_TRUE(fails([&](GdnShape& shape) { shape.conv_dim = bad; }, "conv_dim is"));
    EXPECT_TRUE(fails([&](GdnShape& shape) { shape.conv_kernel_size = bad; }, "conv_kernel_size"));
  }
  EXPECT_TRUE(fails([](GdnShape& shape) { shape.conv_kernel_size = 1; }, "[2, 65536]"));
  for (const DType bad : {DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kUint8, DType{99}}) {
    EXPECT_TRUE(fails([&](GdnShape& shape) { shape.conv_dtype = bad; }, "conv_dtype is"));
  }
}

TEST(Gdn, SizesThatOverflow) {
  GdnShape shape = SmallGdnShape();
  shape.num_v_heads = KvLayout::kMaxHeads;
  shape.head_k_dim = shape.head_v_dim = KvLayout::kMaxHeadDim;
  EXPECT_TRUE(Fails(GdnPool::Create(shape, 1), kInvalid, "bytes of a recurrent state is 2882303"));
  shape = SmallGdnShape();
  shape.conv_dim = GdnShape::kMaxConvDim;
  shape.conv_kernel_size = GdnShape::kMaxConvKernelSize;
  EXPECT_TRUE(Fails(GdnPool::Create(shape, 1), kInvalid, "bytes of a conv state is"));
  shape = SmallGdnShape();
  shape.num_layers = KvLayout::kMaxLayers;
  shape.num_v_heads = shape.head_k_dim = 1 << 15;  // Items of 2^32 bytes: in all 2^69.
  shape.head_v_dim = 1;
  EXPECT_TRUE(Fails(GdnPool::Create(shape, GdnPool::kMaxSlots, GdnPool::kMaxSlots), kInvalid,
                    "the recurrent states, 4096 layers x 33554433 slots x 4294967296 bytes"));
  shape = SmallGdnShape();
  shape.conv_dim = 1 << 20;
  shape.conv_kernel_size = 1 << 8;
  EXPECT_TRUE(Fails(GdnPool::Create(shape, 1 << 20), kInvalid, "the conv states"));
}

TEST(Gdn, BadSlotCounts) {
  for (const int64_t bad : {int64_t{0}, int64_t{-1}, GdnPool::kMaxSlots + 1, kHuge}) {
    EXPECT_TRUE(Fails(GdnPool::Create(SmallGdnShape(), bad), kInvalid, "max_requests is"));
  }
  for (const int64_t bad : {int64_t{-1}, GdnPool::kMaxSlots + 1, kHuge}) {
    EXPECT_TRUE(Fails(GdnPool::Create(SmallGdnShape(), 4, bad), kInvalid, "max_track_slots is"));
  }
}

TEST(Gdn, StatesThatDoNotFitAreNotAdopted) {
  std::vector<std::byte> recurrent(3 * 7 * 24), conv(3 * 7 * 10);
  const auto adopt = [&](int64_t max_requests, std::span<std::byte> some_recurrent,
                         std::span<std::byte> some_conv) {
    return GdnPool::Adopt(SmallGdnShape(), max_requests, some_recurrent, some_conv, nullptr);
  };
  EXPECT_EQ(Must(adopt(6, recurrent, conv)).max_track_slots(), 0);
  EXPECT_TRUE(Fails(adopt(0, recurrent, conv), kInvalid, "max_requests is 0"));
  EXPECT_TRUE(Fails(adopt(kHuge, recurrent, conv), kInvalid, "max_requests is"));
  EXPECT_TRUE(Fails(adopt(7, recurrent, conv), kInvalid,
                    "504 bytes, are 7 slots; padding and max_requests = 7 are 8"));
  EXPECT_TRUE(Fails(adopt(4, {}, conv), kInvalid, "0 bytes, are 0 slots"));
  EXPECT_TRUE(Fails(adopt(4, std::span(recurrent).first(503), conv), kInvalid,
                    "the recurrent states of 503 bytes: they have to have 432"));
  EXPECT_TRUE(Fails(adopt(4, recurrent, std::span(conv).first(200)), kInvalid,
                    "the conv states of 200 bytes: they have to have 210"));
  EXPECT_TRUE(Fails(adopt(4, recurrent, {static_cast<std::byte*>(nullptr), conv.size()}), kInvalid,
                    "the conv states of 210 bytes"));
  EXPECT_TRUE(Fails(adopt(4, recurrent, std::span(recurrent).last(210)), kInvalid,
                    "the recurrent states and the conv states overlap"));
  GdnShape shape = SmallGdnShape();
  shape.num_layers = 0;
  EXPECT_TRUE(Fails(GdnPool::Adopt(shape, 4, recurrent, conv, nullptr), kInvalid, "num_layers"));
  // Of 4 and 2 bytes a slot; nobody looks at them.
  shape = {.num_layers = 1,
           .num_v_heads = 1,
           .head_k_dim = 1,
           .head_v_dim = 1,
           .conv_dim = 1,
           .conv_kernel_size = 2};
  const auto slots = static_cast<size_t>(GdnPool::kMaxSlots + 3);
  EXPECT_TRUE(Fails(
      GdnPool::Adopt(shape, 1, {recurrent.data(), slots * 4}, {conv.data(), slots * 2}, nullptr),
      kInvalid, "max_track_slots is 16777217"));
}

TEST(Gdn, MemoryThatCannotBeHad) {
  GdnShape shape = SmallGdnShape();
  shape.num_v_heads = shape.head_k_dim = 1 << 15;
  shape.head_v_dim = 1;
  // 15 TiB, which a machine that promises too much would give.
  EXPECT_TRUE(Fails(GdnPool::Create(shape, 1300), absl::StatusCode::kResourceExhausted,
                    "bytes of memory wanted", "are available"));
}

// Copies of several waves are all planned before one runs.
TEST(Gdn, ACopyThatThereIsNoMemoryForChangesNothing) {
  const std::pair<Slots, Slots> lists[] = {{{1, 2}, {2, 1}},               // A swap,
                                           {{1, 2, 3}, {2, 3, 4}},         // a chain,
                                           {{1, 2, 3, 3}, {2, 3, 1, 5}}};  // a circle, read.
  for (const auto& [sources, destinations] : lists) {
    GdnPool pool = Must(GdnPool::Create(SmallGdnShape(), 6));
    std::vector<float> before(pool.recurrent_state(0).size());
    std::iota(before.begin(), before.end(), 1.0F);
    for (int64_t layer = 0; layer < 3; ++layer) {
      std::copy(before.begin(), before.end(), pool.recurrent_state(layer).begin());
    }
    absl::Status copied;
    CallWithoutMemory([&] { copied = pool.Copy(sources, destinations); },
                      [&] {
                        for (int64_t layer = 0; layer < 3; ++layer) {
                          const std::span<float> now = pool.recurrent_state(layer);
                          EXPECT_TRUE(std::equal(now.begin(), now.end(), before.begin()));
                        }
                      });
    EXPECT_TRUE(IsOk(copied));
    const int64_t item = SmallGdnShape().recurrent_item_bytes() / 4;
    for (size_t i = 0; i < sources.size(); ++i) {
      EXPECT_EQ(pool.recurrent_state(2)[destinations[i] * item], before[sources[i] * item]);
    }
  }
}

// A device waits for each call.
TEST(Gdn, CopiesTakeFewCallsOfTheMemory) {
  const auto memory = std::make_shared<GuardedMemory>();
  GdnPool pool = Must(GdnPool::Create(SmallGdnShape(), 8, 0, memory));
  const auto calls = [&](const Slots& sources, const Slots& destinations) {
    const int64_t before = memory->num_runs;
    EXPECT_TRUE(IsOk(pool.Copy(sources, destinations)));
    return memory->num_runs - before;
  };
  EXPECT_EQ(calls({1, 2, 3, 3}, {4, 5, 6, 7}), 1);
  EXPECT_EQ(calls({1, 2, 3, 4}, {5, 6, 1, 2}), 2);  // Saved, and overwritten.
  EXPECT_EQ(calls({1, 2}, {2, 1}), 3);
  EXPECT_EQ(calls({1, 0}, {1, 0}), 0);
  const int64_t before = memory->num_runs;
  EXPECT_TRUE(IsOk(pool.Reset(Slots{1, 2, 3})));
  EXPECT_EQ(memory->num_runs - before, 1);
}

TEST(Gdn, WhatADeviceAnswersIsPassedOn) {
  const auto memory = std::make_shared<GuardedMemory>();
  GdnPool pool = Must(GdnPool::Create(SmallGdnShape(), 4, 0, memory));
  memory->failure = absl::UnavailableError("it fell off the bus");
  constexpr auto kUnavailable = absl::StatusCode::kUnavailable;
  EXPECT_TRUE(Fails(GdnPool::Create(SmallGdnShape(), 4, 0, memory), kUnavailable, "fell off"));
  EXPECT_TRUE(Fails(pool.Reset(Slots{1}), kUnavailable, "fell off"));
  EXPECT_TRUE(Fails(pool.Copy(Slots{1}, Slots{2}), kUnavailable, "fell off"));
  EXPECT_TRUE(Fails(pool.Copy(Slots{1, 2}, Slots{2, 1}), kUnavailable, "fell off"));
  // Bad arguments never get so far.
  EXPECT_TRUE(Fails(pool.Reset(Slots{5}), kInvalid, "is outside [0, 5)"));
}

}  // namespace
}  // namespace kvferry
