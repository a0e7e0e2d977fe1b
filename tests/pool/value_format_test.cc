#include "pool/value_format.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "tests/pool/guarded_memory.h"
#include "tests/pool/naive_numbers.h"
#include "tests/support/kv_pattern.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

constexpr std::array kNumbers = {DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                 DType::kFloat8E4M3, DType::kFloat8E5M2};

KvLayout TwoTensors(DType first, DType second) {
  KvLayout layout{2, 3, first, "NHD", {{"k", 2, 5}, {"v", 1, 7}}};
  layout.tensors[1].dtype = second;
  return layout;
}

int64_t Upto(std::mt19937_64& random, int64_t most) {
  return static_cast<int64_t>(random() % (most + 1));
}

float RandomScale(std::mt19937_64& random) {
  return std::ldexp(1 + static_cast<float>(random() % 8) / 8, static_cast<int>(random() % 9) - 4);
}

class CastsOfValues : public testing::TestWithParam<std::tuple<DType, DType>> {
 protected:
  // All items of a buffer, cast.
  std::vector<std::byte> Cast(int64_t buffer, const PageRuns& items) const {
    const BufferInfo& from = pool_->buffer_infos()[buffer];
    std::vector<std::byte> packed(items.num_pages() * casts_->Bytes(buffer, from.item_bytes));
    EXPECT_TRUE(
        IsOk(casts_->Gather(pool_->memory(), items, {{{buffer, from, 0, packed}}}, *HostMemory())));
    return packed;
  }
  void ExpectCast(int64_t buffer, const PageRuns& items,
                  const std::vector<std::byte>& packed) const;

  const DType from_ = std::get<0>(GetParam()), to_ = std::get<1>(GetParam());
  // The second tensor is bytes of somebody's own.
  const KvLayout layout_ = TwoTensors(from_, DType::kUint8);
  std::shared_ptr<KvPool> pool_ = MakePatternPool(layout_, 24, 3);
  std::vector<float> scales_;
  ValueFormat wanted_{{to_, DType::kUint8}, {}};
  std::shared_ptr<const ValueCasts> casts_;
};

void CastsOfValues::ExpectCast(int64_t buffer, const PageRuns& items,
                               const std::vector<std::byte>& packed) const {
  const bool numbers = buffer < layout_.num_layers;
  const NaiveFormat& theirs = NaiveFormat::Of(from_);
  const NaiveFormat& ours = NaiveFormat::Of(to_);
  const std::byte* at = packed.data();
  for (const int64_t page : items.ToPages()) {
    const std::vector<std::byte> bytes = ReadPage(*pool_, buffer, page);
    if (!numbers) {
      ASSERT_TRUE(std::equal(bytes.begin(), bytes.end(), at));
      at += bytes.size();
      continue;
    }
    for (size_t i = 0; i < bytes.size(); i += theirs.bytes()) {
      const float value =
          theirs.Decode(bytes.data() + i) * scales_[buffer] / wanted_.scales[buffer];
      ASSERT_TRUE(ours.IsEncodingOf(value, at)) << value;
      at += ours.bytes();
    }
  }
  ASSERT_EQ(at, packed.data() + packed.size());
}

TEST_P(CastsOfValues, WindowsAgainstTheDefinitionOfTheFormats) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 20; ++round) {
    scales_.clear();
    wanted_.scales.clear();
    for (int64_t i = 0; i < layout_.num_buffers(); ++i) {
      scales_.push_back(RandomScale(random));
      wanted_.scales.push_back(RandomScale(random));
    }
    casts_ = Must(ValueCasts::Make(layout_, ValueFormatOf(layout_, scales_), wanted_));
    ASSERT_NE(casts_, nullptr);
    const std::string shape = std::vector<std::string>{"seq", "runs8", "rand"}[random() % 3];
    const PageRuns items =
        Must(PageRuns::FromPages(MakePages(shape, 1 + Upto(random, 23), 24, &random)));
    std::vector<std::vector<std::byte>> all;
    for (int64_t buffer = 0; buffer < layout_.num_buffers(); ++buffer) {
      all.push_back(Cast(buffer, items));
      ExpectCast(buffer, items, all.back());
    }
    // Several at a time, that begin and end anywhere, and nothing beside them is written.
    for (int i = 0; i < 20; ++i) {
      std::vector<std::vector<std::byte>> parts;
      std::vector<ValueCasts::Window> windows;
      for (int64_t buffer = 0; buffer < layout_.num_buffers(); ++buffer) {
        const auto size = static_cast<int64_t>(all[buffer].size());
        const int64_t offset = Upto(random, size);
        const int64_t bytes = Upto(random, size - offset);
        parts.emplace_back(bytes + 2, std::byte{0x5a});
        windows.push_back({buffer, pool_->buffer_infos()[buffer], offset,
                           std::span(parts.back()).subspan(1, bytes)});
      }
      ASSERT_TRUE(IsOk(casts_->Gather(pool_->memory(), items, windows, *HostMemory())));
      for (const ValueCasts::Window& window : windows) {
        const auto want = all[window.buffer].begin() + window.offset;
        ASSERT_TRUE(std::equal(window.packed.begin(), window.packed.end(), want));
        ASSERT_EQ(parts[window.buffer].front(), std::byte{0x5a});
        ASSERT_EQ(parts[window.buffer].back(), std::byte{0x5a});
      }
    }
  }
}

// What the device answers is passed on, or pages that nobody has written would go to the peer.
TEST_P(CastsOfValues, ADeviceThatFails) {
  GuardedMemory memory;
  pool_ = Must(KvPool::CreateIn(layout_, 24, {std::shared_ptr<void>(), &memory}));
  scales_.assign(layout_.num_buffers(), 0.5F);
  casts_ = Must(ValueCasts::Make(layout_, ValueFormatOf(layout_, scales_), wanted_));
  std::vector<std::byte> packed(5);
  memory.failure = absl::UnavailableError("it fell off the bus");
  EXPECT_TRUE(Fails(casts_->Gather(memory, PageRuns(PageRun{0, 2}),
                                   {{{0, pool_->buffer_infos()[0], 0, packed}}}, *HostMemory()),
                    absl::StatusCode::kUnavailable, "fell off"));
  pool_ = nullptr;  // Before its memory.
}

// Where the processor cannot write: the parts of values, too.
TEST_P(CastsOfValues, WindowsInTheMemoryOfThePages) {
  GuardedMemory memory;
  pool_ = Must(KvPool::CreateIn(layout_, 24, {std::shared_ptr<void>(), &memory}));
  FillPattern(*pool_, 3);
  scales_.assign(layout_.num_buffers(), 0.5F);
  wanted_.scales.assign(layout_.num_buffers(), 1);
  casts_ = Must(ValueCasts::Make(layout_, ValueFormatOf(layout_, scales_), wanted_));
  std::mt19937_64 random(2);
  const PageRuns items = Must(PageRuns::FromPages(MakePages("rand", 20, 24, &random)));
  for (int64_t buffer = 0; buffer < layout_.num_buffers(); ++buffer) {
    const std::vector<std::byte> all = Cast(buffer, items);
    const auto size = static_cast<int64_t>(all.size());
    for (int i = 0; i < 20; ++i) {
      const int64_t offset = Upto(random, size - 1);
      const int64_t bytes = 1 + Upto(random, size - offset - 1);
      const auto packed = Must(memory.Allocate(bytes));
      const std::span to(packed.get(), static_cast<size_t>(bytes));
      ASSERT_TRUE(IsOk(casts_->Gather(
          memory, items, {{{buffer, pool_->buffer_infos()[buffer], offset, to}}}, memory)));
      const auto want = all.begin() + offset;
      ASSERT_EQ(memory.Read(packed.get(), bytes), std::vector(want, want + bytes));
    }
  }
  pool_ = nullptr;  // Before its memory.
}

INSTANTIATE_TEST_SUITE_P(Numbers, CastsOfValues,
                         testing::Combine(testing::ValuesIn(kNumbers), testing::ValuesIn(kNumbers)),
                         [](const auto& instance) {
                           return std::string(DTypeName(std::get<0>(instance.param))) + "_" +
                                  std::string(DTypeName(std::get<1>(instance.param)));
                         });

TEST(ValueCasts, NoneWhereBytesMoveAsTheyAre) {
  const KvLayout layout = TwoTensors(DType::kFloat8E4M3, DType::kUint8);
  const std::vector<float> twos(4, 2), ones(4, 1);
  const auto none = [&](const std::vector<float>& scales, const ValueFormat& wanted) {
    return Must(ValueCasts::Make(layout, ValueFormatOf(layout, scales), wanted)) == nullptr;
  };
  const ValueFormat same = ValueFormatOf(layout, {});
  EXPECT_TRUE(none({}, {}));
  EXPECT_TRUE(none(twos, {})) << "nobody has said what theirs are";
  EXPECT_TRUE(none({}, same));
  EXPECT_TRUE(none(ones, same));
  EXPECT_TRUE(none(twos, ValueFormatOf(layout, twos)));
  // Of bytes of somebody's own a scale says nothing.
  EXPECT_TRUE(none(twos, {same.dtypes, {2, 2, 8, 8}}));
  EXPECT_FALSE(none(twos, same));
  EXPECT_FALSE(none({}, ValueFormatOf(layout, twos)));
  EXPECT_FALSE(none(twos, {same.dtypes, {2, 3, 2, 2}}));
  EXPECT_EQ(ValueFormatOf(layout, ones), same);
}

TEST(ValueCasts, WhatCannotBeAskedFor) {
  KvLayout layout = TwoTensors(DType::kBFloat16, DType::kUint8);
  const auto fails = [&](const ValueFormat& wanted, const std::string& why) {
    return Fails(ValueCasts::Make(layout, {}, wanted).status(), absl::StatusCode::kInvalidArgument,
                 why);
  };
  EXPECT_TRUE(fails({{DType::kFloat16}, {}}, "dtypes of 1 tensors asked of pages of 2"));
  EXPECT_TRUE(fails({{DType::kUint8, DType::kUint8}, {}},
                    "values of 'k' are not cast between bfloat16 and uint8"));
  EXPECT_TRUE(fails({{DType::kFloat16, DType::kFloat16}, {}},
                    "values of 'v' are not cast between uint8 and float16"));
  const ValueFormat same = ValueFormatOf(layout, {});
  EXPECT_TRUE(fails({same.dtypes, {1, 2}}, "2 scales, not one for each of 4 buffers"));
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float scale : {0.0F, -1.0F, infinity, std::nanf("")}) {
    EXPECT_TRUE(fails({same.dtypes, {1, 2, scale, 1}}, "the scale of buffer 2 is"));
  }
  layout.page_format = "engine's own";
  EXPECT_TRUE(fails({{DType::kFloat16, DType::kUint8}, {}}, "page_format engine's own"));
  EXPECT_EQ(Must(ValueCasts::Make(layout, {}, same)), nullptr);
}

TEST(ValueCasts, WhichLayoutsAreCastable) {
  const KvLayout one = TwoTensors(DType::kBFloat16, DType::kUint8);
  EXPECT_TRUE(IsOk(CheckCastable(one, TwoTensors(DType::kFloat8E5M2, DType::kUint8))));
  EXPECT_TRUE(Fails(CheckCastable(one, TwoTensors(DType::kBFloat16, DType::kFloat32)),
                    absl::StatusCode::kInvalidArgument, "'v'", "between uint8 and float32"));
  KvLayout own = one;
  own.page_format = "vllm-cpu-amx-HND";
  EXPECT_TRUE(IsOk(CheckCastable(own, own)));
  KvLayout other = own;
  other.dtype = DType::kFloat16;
  EXPECT_TRUE(Fails(CheckCastable(own, other), absl::StatusCode::kInvalidArgument,
                    "vllm-cpu-amx-HND is an arrangement of an engine's own"));
  other.page_format = "NHD";
  EXPECT_TRUE(Fails(CheckCastable(other, own), absl::StatusCode::kInvalidArgument,
                    "vllm-cpu-amx-HND is an arrangement of an engine's own"));
  // That they differ in more than dtypes is for others to say.
  KvLayout fewer = TwoTensors(DType::kFloat16, DType::kFloat16);
  fewer.tensors.pop_back();
  EXPECT_TRUE(IsOk(CheckCastable(one, fewer)));
  EXPECT_TRUE(IsOk(CheckCastable(fewer, one)));
}

}  // namespace
}  // namespace kvferry
