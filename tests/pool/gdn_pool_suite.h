#pragma once

// GdnPool: every kind of memory enrols here with
//   INSTANTIATE_TEST_SUITE_P(Where, GdnPools, testing::Values(backend, ...), BackendName());
// in one file of its binary, and must agree with arrays of bytes.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "pool/gdn_pool.h"
#include "tests/pool/memory_backend.h"
#include "tests/support/status.h"

namespace kvferry {

inline GdnShape SmallGdnShape() {
  return {.num_layers = 3,
          .num_v_heads = 2,
          .head_k_dim = 1,
          .head_v_dim = 3,
          .conv_dim = 5,
          .conv_kernel_size = 2,
          .conv_dtype = DType::kBFloat16};
}

class GdnPools : public testing::TestWithParam<MemoryBackend> {
 protected:
  using Slots = std::vector<int64_t>;
  using Bytes = std::vector<std::byte>;
  static constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  static constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

  void SetUp() override {
    if (!GetParam().missing.empty()) GTEST_SKIP() << GetParam().missing;
  }

  static GdnPool Create(int64_t max_requests, int64_t max_track_slots = 0,
                        const GdnShape& shape = SmallGdnShape()) {
    return Must(GdnPool::Create(shape, max_requests, max_track_slots, GetParam().memory));
  }

  // All bytes of both kinds.
  static Bytes Contents(const GdnPool& pool) {
    Bytes bytes;
    const auto append = [&](const std::byte* states, int64_t size) {
      const Bytes all = GetParam().read(states, size);
      bytes.insert(bytes.end(), all.begin(), all.end());
    };
    const int64_t slots = pool.shape().num_layers * pool.num_slots();
    append(pool.recurrent_memory().get(), slots * pool.shape().recurrent_item_bytes());
    append(pool.conv_memory().get(), slots * pool.shape().conv_item_bytes());
    return bytes;
  }

  // Every item of a slot holds `value` in all its bytes.
  static void Fill(const GdnPool& pool, int64_t slot, uint8_t value) {
    for (const BufferInfo& info : pool.buffer_infos()) {
      GetParam().write(info.address + slot * info.item_bytes,
                       Bytes(static_cast<size_t>(info.item_bytes), std::byte{value}));
    }
  }
  static void FillAll(const GdnPool& pool) {
    for (int64_t slot = 0; slot < pool.num_slots(); ++slot) Fill(pool, slot, slot + 1);
  }
  // What Fill() wrote to each slot; 255 where items of a slot differ.
  static std::vector<int> Values(const GdnPool& pool) {
    std::vector<int> values(pool.num_slots(), -1);
    for (const BufferInfo& info : pool.buffer_infos()) {
      const Bytes bytes = GetParam().read(info.address, info.bytes);
      for (int64_t at = 0; at < info.bytes; ++at) {
        const auto byte = std::to_integer<int>(bytes[at]);
        int& value = values[at / info.item_bytes];
        value = value == -1 || value == byte ? byte : 255;
      }
    }
    return values;
  }
};

TEST_P(GdnPools, LayersOfAKindLieOneBehindTheOther) {
  const GdnPool pool = Create(4, 2);
  const std::vector<BufferInfo> infos = pool.buffer_infos();
  ASSERT_EQ(infos.size(), 6);
  for (int64_t layer = 0; layer < 3; ++layer) {
    EXPECT_EQ(infos[layer].item_bytes, 2 * 1 * 3 * 4);
    EXPECT_EQ(infos[layer].bytes, 7 * 24);
    EXPECT_EQ(infos[layer].address, pool.recurrent_memory().get() + layer * 7 * 24);
    EXPECT_EQ(reinterpret_cast<std::byte*>(pool.recurrent_state(layer).data()),
              infos[layer].address);
    EXPECT_EQ(pool.recurrent_state(layer).size_bytes(), 7 * 24);
    EXPECT_EQ(infos[3 + layer].item_bytes, 5 * 1 * 2);
    EXPECT_EQ(infos[3 + layer].address, pool.conv_memory().get() + layer * 7 * 10);
    EXPECT_EQ(pool.conv_state(layer).data(), infos[3 + layer].address);
    EXPECT_EQ(pool.conv_state(layer).size(), 7 * 10);
  }
  EXPECT_EQ(pool.bytes(), 3 * 7 * (24 + 10));
  EXPECT_EQ(Contents(pool), Bytes(static_cast<size_t>(pool.bytes())));
}

TEST_P(GdnPools, AnEnginesStatesAreAdopted) {
  const std::optional<GdnPool> theirs = Create(4, 2);
  FillAll(*theirs);
  const int64_t items = int64_t{3} * 7;
  const auto owner = std::make_shared<int>();
  std::optional<GdnPool> pool = Must(GdnPool::Adopt(
      SmallGdnShape(), 4, {theirs->recurrent_memory().get(), static_cast<size_t>(items * 24)},
      {theirs->conv_memory().get(), static_cast<size_t>(items * 10)}, owner, GetParam().memory));
  EXPECT_EQ(pool->max_track_slots(), 2);
  EXPECT_EQ(pool->bytes(), theirs->bytes());
  EXPECT_EQ(Values(*pool), (std::vector<int>{1, 2, 3, 4, 5, 6, 7}));
  EXPECT_TRUE(IsOk(pool->Copy(Slots{1, 2}, Slots{2, 1})));
  EXPECT_TRUE(IsOk(pool->Reset(Slots{4})));
  EXPECT_EQ(Must(pool->AllocateTrackSlot()), 5);
  EXPECT_EQ(Values(*theirs), (std::vector<int>{1, 3, 2, 4, 0, 6, 7}));

  std::array memories = {pool->recurrent_memory(), pool->conv_memory()};
  pool.reset();
  EXPECT_EQ(owner.use_count(), 3) << "what is taken from a pool keeps its memory";
  for (std::shared_ptr<std::byte>& memory : memories) memory.reset();
  EXPECT_EQ(owner.use_count(), 1);
}

TEST_P(GdnPools, TrackSlots) {
  GdnPool pool = Create(4, 2);
  EXPECT_EQ(pool.max_requests(), 4);
  EXPECT_EQ(pool.max_track_slots(), 2);
  EXPECT_EQ(Must(pool.AllocateTrackSlot()), 5);
  EXPECT_EQ(Must(pool.AllocateTrackSlot()), 6);
  EXPECT_TRUE(Fails(pool.AllocateTrackSlot(), absl::StatusCode::kResourceExhausted, "all 2"));
  for (const int64_t bad : {int64_t{0}, int64_t{4}, int64_t{7}, int64_t{-1}, kHuge}) {
    EXPECT_TRUE(Fails(pool.FreeTrackSlot(bad), kInvalid, "is no track slot", "2 from 5"));
  }
  EXPECT_TRUE(IsOk(pool.FreeTrackSlot(5)));
  EXPECT_TRUE(Fails(pool.FreeTrackSlot(5), kInvalid, "track slot 5 is not allocated"));
  EXPECT_EQ(pool.num_free_track_slots(), 1);
  EXPECT_EQ(Must(pool.AllocateTrackSlot()), 5);
  FillAll(pool);
  const Bytes before = Contents(pool);
  pool.Clear();
  EXPECT_EQ(pool.num_free_track_slots(), 2);
  EXPECT_EQ(Contents(pool), before);
  GdnPool without = Create(4);
  EXPECT_TRUE(Fails(without.AllocateTrackSlot(), absl::StatusCode::kResourceExhausted));
}

TEST_P(GdnPools, ResetZeroesTheseSlotsInAllLayers) {
  GdnPool pool = Create(4, 1);
  ASSERT_EQ(Must(pool.AllocateTrackSlot()), 5);
  FillAll(pool);
  EXPECT_TRUE(IsOk(pool.Reset(Slots{3, 5, 3})));
  EXPECT_EQ(Values(pool), (std::vector<int>{1, 2, 3, 0, 5, 0}));
  EXPECT_TRUE(IsOk(pool.Reset(Slots{0})));
  EXPECT_TRUE(IsOk(pool.Reset({})));
  EXPECT_EQ(Values(pool), (std::vector<int>{0, 2, 3, 0, 5, 0}));
}

// Zeros are as many as either kind needs.
TEST_P(GdnPools, AStateOfEitherKindMayBeTheLarger) {
  GdnShape large_conv = SmallGdnShape(), large_recurrent = SmallGdnShape();
  large_conv.conv_dim = 8192;
  large_recurrent.num_v_heads = 1024;
  for (const GdnShape& shape : {large_conv, large_recurrent}) {
    GdnPool pool = Create(2, 0, shape);
    FillAll(pool);
    EXPECT_TRUE(IsOk(pool.Reset(Slots{1})));
    EXPECT_EQ(Values(pool), (std::vector<int>{1, 0, 3}));
  }
}

TEST_P(GdnPools, CopiesReadAsBeforeTheCall) {
  GdnPool pool = Create(6);
  const auto copied = [&](const Slots& sources, const Slots& destinations) {
    FillAll(pool);
    EXPECT_TRUE(IsOk(pool.Copy(sources, destinations)));
    return Values(pool);
  };
  using Got = std::vector<int>;
  EXPECT_EQ(copied({}, {}), (Got{1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(copied({1, 1, 1}, {2, 4, 6}), (Got{1, 2, 2, 4, 2, 6, 2}));        // A fork.
  EXPECT_EQ(copied({1, 2, 3}, {2, 3, 4}), (Got{1, 2, 2, 3, 4, 6, 7}));        // A chain,
  EXPECT_EQ(copied({3, 2, 1}, {4, 3, 2}), (Got{1, 2, 2, 3, 4, 6, 7}));        // either way.
  EXPECT_EQ(copied({1, 2}, {2, 1}), (Got{1, 3, 2, 4, 5, 6, 7}));              // A swap.
  EXPECT_EQ(copied({1, 2, 3, 3}, {2, 3, 1, 5}), (Got{1, 4, 2, 3, 5, 4, 7}));  // A circle, read.
  EXPECT_EQ(copied({1, 2, 4, 5}, {2, 1, 5, 4}), (Got{1, 3, 2, 4, 6, 5, 7}));  // Two circles.
  EXPECT_EQ(copied({3, 3}, {3, 4}), (Got{1, 2, 3, 4, 4, 6, 7}));              // To itself.
  EXPECT_EQ(copied({0, 5, 0, 2}, {0, 0, 0, 6}), (Got{1, 2, 3, 4, 5, 6, 3}));  // Padding.
}

TEST_P(GdnPools, BadListsChangeNothing) {
  GdnPool pool = Create(4, 2);
  ASSERT_EQ(Must(pool.AllocateTrackSlot()), 5);
  FillAll(pool);
  const Bytes before = Contents(pool);
  for (const int64_t bad : {int64_t{-1}, int64_t{7}, kHuge, -kHuge - 1}) {
    EXPECT_TRUE(Fails(pool.Reset(Slots{1, bad}), kInvalid, "is outside [0, 7)"));
    EXPECT_TRUE(Fails(pool.Copy(Slots{1, bad}, Slots{2, 3}), kInvalid, "is outside [0, 7)"));
    EXPECT_TRUE(Fails(pool.Copy(Slots{1, 2}, Slots{2, bad}), kInvalid, "is outside [0, 7)"));
    EXPECT_TRUE(Fails(pool.Copy(Slots{1, bad}, Slots{2, 0}), kInvalid, "is outside [0, 7)"));
  }
  EXPECT_TRUE(Fails(pool.Reset(Slots{1, 6}), kInvalid, "track slot 6 is not allocated"));
  EXPECT_TRUE(Fails(pool.Copy(Slots{1, 6}, Slots{5, 2}), kInvalid, "track slot 6 is not"));
  EXPECT_TRUE(Fails(pool.Copy(Slots{1, 1}, Slots{5, 6}), kInvalid, "track slot 6 is not"));
  EXPECT_TRUE(Fails(pool.Copy(Slots{1, 2}, Slots{3}), kInvalid, "2 sources but 1 destinations"));
  EXPECT_TRUE(Fails(pool.Copy(Slots{}, Slots{3}), kInvalid, "0 sources but 1 destinations"));
  EXPECT_TRUE(Fails(pool.Copy(Slots{1, 2}, Slots{3, 3}), kInvalid,
                    "slot 3 is the destination of two copies"));
  EXPECT_TRUE(Fails(pool.Copy(Slots{3, 2}, Slots{3, 3}), kInvalid, "slot 3 is the destination"));
  EXPECT_TRUE(Fails(pool.Copy(Slots{1, 0}, Slots{2, 3}), kInvalid,
                    "copy 1 takes padding (slot 0) to slot 3"));
  EXPECT_EQ(Contents(pool), before);
  EXPECT_EQ(pool.num_free_track_slots(), 1);
}

TEST_P(GdnPools, TheMemoryOutlivesThePool) {
  std::shared_ptr<std::byte> memory;
  {
    const GdnPool pool = Create(4);
    FillAll(pool);
    memory = pool.conv_memory();
  }
  EXPECT_EQ(GetParam().read(memory.get() + 10, 1)[0], std::byte{2});
}

// One array of bytes a buffer, and the set of allocated track slots.
struct GdnModel {
  using Slots = std::vector<int64_t>;

  std::vector<std::vector<std::byte>> buffers;
  std::vector<int64_t> item_bytes;
  std::set<int64_t> tracks;

  std::byte* item(size_t buffer, int64_t slot) {
    return buffers[buffer].data() + slot * item_bytes[buffer];
  }
  void Set(int64_t slot, uint64_t value) {
    for (size_t i = 0; i < buffers.size(); ++i) {
      for (int64_t at = 0; at < item_bytes[i]; ++at) {
        item(i, slot)[at] = static_cast<std::byte>(value * 31 + i * 7 + at);
      }
    }
  }
  void Reset(const Slots& slots) {
    for (size_t i = 0; i < buffers.size(); ++i) {
      for (const int64_t slot : slots) std::fill_n(item(i, slot), item_bytes[i], std::byte{0});
    }
  }
  void Copy(const Slots& sources, const Slots& destinations) {
    GdnModel old = *this;
    for (size_t i = 0; i < buffers.size(); ++i) {
      for (size_t at = 0; at < sources.size(); ++at) {
        if (destinations[at] == 0) continue;
        std::copy_n(old.item(i, sources[at]), item_bytes[i], item(i, destinations[at]));
      }
    }
  }
  std::vector<std::byte> Contents() const {
    std::vector<std::byte> all;
    for (const auto& buffer : buffers) all.insert(all.end(), buffer.begin(), buffer.end());
    return all;
  }
};

TEST_P(GdnPools, RandomOperationsAgainstArrays) {
  constexpr int64_t kRequests = 5;
  constexpr int64_t kTracks = 3;
  constexpr int64_t kSlots = 1 + kRequests + kTracks;
  const GdnShape shape{2, 1, 1, 2, 1, 3, DType::kFloat16};
  GdnPool pool = Create(kRequests, kTracks, shape);
  GdnModel model;
  for (const BufferInfo& info : pool.buffer_infos()) {
    model.buffers.emplace_back(info.bytes);
    model.item_bytes.push_back(info.item_bytes);
  }
  std::mt19937_64 random(1);
  const auto usable = [&](int64_t slot) {
    return slot >= 0 && slot < kSlots && (slot <= kRequests || model.tracks.contains(slot));
  };
  const auto some_slots = [&](size_t count) {  // Now and then one that is out of range.
    Slots slots(count);
    for (int64_t& slot : slots) {
      slot = random() % 40 == 0 ? kSlots : static_cast<int64_t>(random() % kSlots);
    }
    return slots;
  };
  const auto all_usable = [&](const Slots& slots) {
    return std::all_of(slots.begin(), slots.end(), usable);
  };
  int64_t copies = 0;
  const int operations = GetParam().slow ? 100000 : 1000000;
  for (int operation = 0; operation < operations; ++operation) {
    const uint64_t choice = random() % 100;
    if (choice < 30) {
      const int64_t slot = some_slots(1)[0];
      if (!usable(slot)) continue;
      const uint64_t value = random();
      model.Set(slot, value);
      const std::vector<BufferInfo> infos = pool.buffer_infos();
      for (size_t i = 0; i < infos.size(); ++i) {
        GetParam().write(infos[i].address + slot * infos[i].item_bytes,
                         {model.item(i, slot), static_cast<size_t>(infos[i].item_bytes)});
      }
    } else if (choice < 40) {
      const Slots slots = some_slots(random() % 3);
      ASSERT_EQ(pool.Reset(slots).ok(), all_usable(slots));
      if (all_usable(slots)) model.Reset(slots);
    } else if (choice < 75) {
      const Slots sources = some_slots(random() % 6);
      Slots destinations = some_slots(sources.size());
      if (random() % 2 == 0 && all_usable(sources)) {  // Among themselves: circles and chains.
        destinations = sources;
        std::shuffle(destinations.begin(), destinations.end(), random);
      }
      bool good = all_usable(sources) && all_usable(destinations);
      for (size_t i = 0; i < sources.size(); ++i) {
        if (destinations[i] == 0) continue;
        good &= sources[i] != 0;
        good &= std::count(destinations.begin(), destinations.end(), destinations[i]) == 1;
      }
      ASSERT_EQ(pool.Copy(sources, destinations).ok(), good);
      if (good) model.Copy(sources, destinations);
      copies += good && sources.size() > 2;
    } else if (choice < 87) {
      const auto slot = pool.AllocateTrackSlot();
      ASSERT_EQ(slot.ok(), static_cast<int64_t>(model.tracks.size()) < kTracks);
      if (!slot.ok()) continue;
      ASSERT_GT(*slot, kRequests);
      ASSERT_LT(*slot, kSlots);
      ASSERT_TRUE(model.tracks.insert(*slot).second);
    } else if (choice < 99) {
      const int64_t slot = some_slots(1)[0];
      ASSERT_EQ(pool.FreeTrackSlot(slot).ok(), model.tracks.erase(slot) == 1);
    } else {
      pool.Clear();
      model.tracks.clear();
    }
    ASSERT_EQ(pool.num_free_track_slots(), kTracks - static_cast<int64_t>(model.tracks.size()));
    ASSERT_EQ(Contents(pool), model.Contents());
  }
  EXPECT_GT(copies, operations * 3 / 100);  // The lists above are not all refused.
}

}  // namespace kvferry
