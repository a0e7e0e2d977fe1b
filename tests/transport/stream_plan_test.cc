#include "transport/stream_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <set>

#include "absl/strings/str_cat.h"
#include "tests/pool/guarded_memory.h"
#include "tests/support/kv_pattern.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

// The stream of docs/wire_protocol.md, a byte at a time: where each byte lies, and its page's
// position.
struct Naive {
  std::vector<std::byte*> bytes;
  std::vector<int64_t> position;  // -1 in the tail.
};

Naive Expand(const KvPool& pool, const std::vector<int64_t>& pages, std::vector<std::byte>& tail) {
  Naive naive;
  for (int64_t layer = 0; layer < pool.layout().num_layers; ++layer) {
    for (int64_t tensor = 0; tensor < pool.layout().num_tensors(); ++tensor) {
      for (size_t i = 0; i < pages.size(); ++i) {
        for (std::byte& byte : pool.page(layer, tensor, pages[i])) {
          naive.bytes.push_back(&byte);
          naive.position.push_back(static_cast<int64_t>(i));
        }
      }
    }
  }
  for (std::byte& byte : tail) {
    naive.bytes.push_back(&byte);
    naive.position.push_back(-1);
  }
  return naive;
}

StreamTail TailOf(std::vector<std::byte>& tail) {
  return {tail.data(), static_cast<int64_t>(tail.size())};
}

std::vector<std::byte> RandomTail(std::mt19937_64& random) {
  std::vector<std::byte> tail(random() % 3 == 0 ? 0 : random() % 100);
  for (std::byte& byte : tail) byte = static_cast<std::byte>(random());
  return tail;
}

KvLayout RandomLayout(std::mt19937_64& random) {
  const auto upto = [&](int64_t max) { return 1 + static_cast<int64_t>(random() % max); };
  KvLayout layout{upto(4), upto(4), DType::kUint8, "NHD", {}};
  const int64_t tensors = upto(3);
  for (int64_t i = 0; i < tensors; ++i) layout.tensors.push_back({"t", upto(3), upto(9)});
  return layout;
}

// Where layers end, against counting bytes.
void ExpectLayers(const StreamPlan& plan, int64_t page_bytes, int64_t total) {
  for (int64_t bytes = 0; bytes <= total; ++bytes) {
    int64_t layers = 0;
    while (layers < plan.num_layers() && (layers + 1) * plan.layer_bytes() <= bytes) ++layers;
    ASSERT_EQ(plan.LayersIn(bytes), layers) << bytes;
    if (bytes == total) break;
    const int64_t own_end = bytes >= page_bytes ? total : (layers + 1) * plan.layer_bytes();
    for (const int64_t most : {int64_t{1}, plan.layer_bytes(), 2 * plan.layer_bytes() + 1, total}) {
      int64_t end = own_end;
      while (end < page_bytes && end + plan.layer_bytes() <= bytes + most) {
        end += plan.layer_bytes();
      }
      if (bytes + most >= total) end = total;
      ASSERT_EQ(plan.LayersEnd(bytes, most), end) << bytes << " " << most;
    }
  }
  ASSERT_EQ(plan.BytesOfLayers(plan.num_layers() - 1), page_bytes - plan.layer_bytes());
  ASSERT_EQ(plan.BytesOfLayers(plan.num_layers()), total);  // The tail needs all of them.
}

class Plans : public testing::TestWithParam<uint64_t> {};

// A sender's plan of a receiver's values counts bytes as the receiver's own plan does, and any
// window of it is that part of the whole; what it is made of is ValueCasts' matter.
TEST_P(Plans, OfOtherValuesAreThoseOfTheOtherSide) {
  std::mt19937_64 random(GetParam());
  constexpr std::array kNumbers = {DType::kFloat32, DType::kBFloat16, DType::kFloat8E5M2};
  for (int round = 0; round < 40; ++round) {
    KvLayout own = RandomLayout(random), other = own;
    for (int64_t i = 0; i < own.num_tensors(); ++i) {
      own.tensors[i].dtype = kNumbers[random() % 3];
      other.tensors[i].dtype = kNumbers[random() % 3];
    }
    other.tensors[0].dtype =
        own.tensors[0].dtype == DType::kFloat32 ? DType::kFloat8E4M3 : DType::kFloat32;
    const auto pool = MakePatternPool(own, 20, 7), target = MakePatternPool(other, 20, 8);
    const auto pages = MakePages("runs8", 1 + static_cast<int64_t>(random() % 16), 20, &random);
    const PageRuns runs = Must(PageRuns::FromPages(pages));
    std::vector<std::byte> tail = RandomTail(random);
    const auto casts = Must(ValueCasts::Make(own, {}, ValueFormatOf(other, {})));
    const StreamPlan plan = Must(StreamPlan::CreateIn(
        {}, pool, runs, PageRuns(PageRun{0, runs.num_pages()}), TailOf(tail), {}, casts));
    const StreamPlan into = Must(StreamPlan::Create(target, runs, TailOf(tail)));
    ASSERT_TRUE(plan.casts());
    ASSERT_FALSE(plan.sent_by_list());
    ASSERT_EQ(plan.total_bytes(), into.total_bytes());
    ASSERT_EQ(plan.min_item_bytes(), into.min_item_bytes());
    ExpectLayers(plan, into.pages_bytes(), into.total_bytes());
    for (int64_t at = 0; at < into.pages_bytes(); ++at) {
      ASSERT_EQ(plan.TensorEnd(at), into.TensorEnd(at));
    }
    std::vector<std::byte> whole(plan.total_bytes());
    ASSERT_TRUE(IsOk(plan.Gather(0, whole)));
    ASSERT_TRUE(std::equal(tail.begin(), tail.end(), whole.begin() + into.pages_bytes()));
    for (int window = 0; window < 30; ++window) {
      const int64_t offset = static_cast<int64_t>(random() % whole.size());
      const int64_t bytes = static_cast<int64_t>(random() % (whole.size() - offset + 1));
      std::vector<std::byte> packed(bytes);
      ASSERT_TRUE(IsOk(plan.Gather(offset, packed)));
      ASSERT_TRUE(std::equal(packed.begin(), packed.end(), whole.begin() + offset));
    }
  }
}

TEST_P(Plans, WindowsAgainstAByteLoop) {
  std::mt19937_64 random(GetParam());
  for (int round = 0; round < 40; ++round) {
    const KvLayout layout = RandomLayout(random);
    const auto pool = MakePatternPool(layout, 20, 7);
    const std::string shape = std::vector<std::string>{"seq", "runs8", "rand"}[random() % 3];
    const auto pages = MakePages(shape, 1 + static_cast<int64_t>(random() % 16), 20, &random);
    std::vector<std::byte> tail = RandomTail(random);
    const StreamPlan plan =
        Must(StreamPlan::Create(pool, Must(PageRuns::FromPages(pages)), TailOf(tail)));
    const Naive naive = Expand(*pool, pages, tail);
    const auto total = static_cast<int64_t>(naive.bytes.size());
    ASSERT_EQ(plan.total_bytes(), total);
    const int64_t page_bytes = total - static_cast<int64_t>(tail.size());
    ASSERT_EQ(plan.tail_bytes(), static_cast<int64_t>(tail.size()));
    ASSERT_EQ(plan.layer_bytes() * layout.num_layers, page_bytes);
    ExpectLayers(plan, page_bytes, total);

    for (int window = 0; window < 30; ++window) {
      const int64_t offset = static_cast<int64_t>(random() % total);
      const int64_t bytes = static_cast<int64_t>(random() % (total - offset + 1));
      std::vector<std::byte> packed(bytes);
      ASSERT_TRUE(IsOk(plan.Gather(offset, packed)));
      for (int64_t i = 0; i < bytes; ++i) ASSERT_EQ(packed[i], *naive.bytes[offset + i]) << i;

      std::vector<std::span<std::byte>> pieces;
      plan.AppendPieces(offset, bytes, &pieces);
      size_t at = offset;
      for (size_t i = 0; i < pieces.size(); ++i) {
        ASSERT_FALSE(pieces[i].empty());
        const bool inner = i > 0 && i + 1 < pieces.size() &&
                           at + pieces[i].size() <= static_cast<size_t>(page_bytes);
        if (inner) {
          ASSERT_GE(static_cast<int64_t>(pieces[i].size()), plan.min_item_bytes());
        }
        for (std::byte& byte : pieces[i]) ASSERT_EQ(&byte, naive.bytes[at++]);
      }
      ASSERT_EQ(at, static_cast<size_t>(offset + bytes));

      // Scattering into a pool of another pattern changes the window and nothing else.
      const auto target = MakePatternPool(layout, 20, 8);
      std::vector<std::byte> target_tail(tail.size(), std::byte{0x5a});
      std::vector<std::byte> expected_tail = target_tail;
      const StreamPlan into =
          Must(StreamPlan::Create(target, Must(PageRuns::FromPages(pages)), TailOf(target_tail)));
      const auto expected = MakePatternPool(layout, 20, 8);
      const Naive want = Expand(*expected, pages, expected_tail);
      for (int64_t i = 0; i < bytes; ++i) *want.bytes[offset + i] = packed[i];
      ASSERT_TRUE(IsOk(into.Scatter(offset, packed)));
      ASSERT_EQ(target_tail, expected_tail);
      for (int64_t buffer = 0; buffer < layout.num_buffers(); ++buffer) {
        const BufferInfo& a = target->buffer_infos()[buffer];
        const BufferInfo& b = expected->buffer_infos()[buffer];
        ASSERT_EQ(std::memcmp(a.address, b.address, a.bytes), 0) << "buffer " << buffer;
      }
    }
  }
}

// The stream of some heads is that of the pages that they have become, and what is missing of it is
// told in the pages that the owner knows.
TEST_P(Plans, SomeHeads) {
  std::mt19937_64 random(GetParam() + 200);
  for (int round = 0; round < 60; ++round) {
    const int64_t num_heads = 2 + static_cast<int64_t>(random() % 5);
    KvLayout layout{2, 3, DType::kUint8, round % 2 == 0 ? "NHD" : "HND", {{"k", num_heads, 4}}};
    layout.tensors.push_back({"v", num_heads, 7});
    const auto pool = MakePatternPool(layout, 20, 7);
    const auto pages = MakePages("rand", 1 + static_cast<int64_t>(random() % 16), 20, &random);
    const PageRuns runs = Must(PageRuns::FromPages(pages));
    HeadRange heads{static_cast<int64_t>(random() % num_heads), 1};
    heads.count += static_cast<int64_t>(random() % (num_heads - heads.first));
    std::vector<std::byte> tail = RandomTail(random);
    const StreamPlan plan = Must(StreamPlan::Create(pool, runs, TailOf(tail), heads));
    const PageCut slice = Must(CutPages(pool, runs, heads));
    const Naive naive = Expand(*slice.pool, slice.items.ToPages(), tail);
    const auto total = static_cast<int64_t>(naive.bytes.size());
    ASSERT_EQ(plan.total_bytes(), total);
    ASSERT_EQ(plan.pages().ToPages(), pages);
    ExpectLayers(plan, total - static_cast<int64_t>(tail.size()), total);
    for (int window = 0; window < 10; ++window) {
      const int64_t offset = static_cast<int64_t>(random() % total);
      const int64_t bytes = static_cast<int64_t>(random() % (total - offset + 1));
      std::vector<std::byte> packed(bytes);
      ASSERT_TRUE(IsOk(plan.Gather(offset, packed)));
      std::set<int64_t> touched;
      for (int64_t i = 0; i < bytes; ++i) {
        ASSERT_EQ(packed[i], *naive.bytes[offset + i]) << i;
        const int64_t item = naive.position[offset + i];
        if (item >= 0) touched.insert(item / slice.items_a_page);
      }
      std::vector<int64_t> want;
      for (const int64_t position : touched) want.push_back(pages[position]);
      ASSERT_EQ(plan.PagesTouchedBy(std::vector{std::pair(offset, offset + bytes)}), want);
    }
  }
}

TEST_P(Plans, PagesTouchedAgainstAByteLoop) {
  std::mt19937_64 random(GetParam() + 100);
  for (int round = 0; round < 60; ++round) {
    const KvLayout layout = RandomLayout(random);
    const auto pool = MakePatternPool(layout, 20, 7);
    const auto pages = MakePages("rand", 1 + static_cast<int64_t>(random() % 16), 20, &random);
    std::vector<std::byte> tail = RandomTail(random);
    const StreamPlan plan =
        Must(StreamPlan::Create(pool, Must(PageRuns::FromPages(pages)), TailOf(tail)));
    const Naive naive = Expand(*pool, pages, tail);
    const auto total = static_cast<int64_t>(naive.bytes.size());
    // Gaps as ByteRanges makes them: in order, not touching each other.
    std::vector<std::pair<int64_t, int64_t>> gaps;
    std::set<int64_t> touched;
    for (int64_t at = 0; at < total;) {
      const int64_t begin = at + static_cast<int64_t>(random() % (total / 2 + 1));
      if (begin >= total) break;
      const int64_t end = begin + 1 + static_cast<int64_t>(random() % (total - begin));
      gaps.emplace_back(begin, end);
      for (int64_t i = begin; i < end; ++i) touched.insert(naive.position[i]);
      at = end + 1;
    }
    std::vector<int64_t> want;
    want.reserve(touched.size());
    for (const int64_t position : touched) {
      if (position >= 0) want.push_back(pages[position]);
    }
    ASSERT_EQ(plan.PagesTouchedBy(gaps), want);
  }
}

INSTANTIATE_TEST_SUITE_P(StreamPlan, Plans, testing::Range<uint64_t>(1, 6));

TEST(StreamPlan, PagesOutsideThePool) {
  const auto pool = MakePatternPool(KvLayout::Mla(2, 4, 8, DType::kUint8), 10, 1);
  const auto create = [&](std::vector<int64_t> pages) {
    return StreamPlan::Create(pool, Must(PageRuns::FromPages(pages))).status();
  };
  EXPECT_TRUE(IsOk(create({9, 0})));
  EXPECT_TRUE(Fails(create({10}), absl::StatusCode::kOutOfRange, "10 pages"));
  EXPECT_TRUE(Fails(create({8, 9, 10}), absl::StatusCode::kOutOfRange));
  EXPECT_TRUE(Fails(create(std::vector<int64_t>(11, 3)), absl::StatusCode::kOutOfRange));
  EXPECT_TRUE(Fails(StreamPlan::Create(pool, PageRuns(), {nullptr, -1}),
                    absl::StatusCode::kOutOfRange, "a tail of -1 bytes"));
  EXPECT_TRUE(Fails(StreamPlan::Create(pool, PageRuns(), {nullptr, StreamPlan::kMaxTailBytes + 1}),
                    absl::StatusCode::kOutOfRange, "limit 1099511627776"));
}

TEST(StreamPlan, ATailBehindPagesOnADeviceIsOnTheHost) {
  const KvLayout layout = KvLayout::Mha(2, 4, 2, 8, DType::kFloat16);
  const auto pool = Must(KvPool::CreateIn(layout, 4, std::make_shared<GuardedMemory>()));
  std::vector<std::byte> tail(100);
  const PageRuns pages = Must(PageRuns::FromPages(std::vector<int64_t>{3, 1}));
  const StreamPlan plan = Must(StreamPlan::Create(pool, pages, TailOf(tail)));
  std::vector<std::byte> stream(plan.total_bytes());
  for (size_t i = 0; i < stream.size(); ++i) stream[i] = static_cast<std::byte>(i % 251);
  ASSERT_TRUE(IsOk(plan.Scatter(0, stream)));
  EXPECT_TRUE(std::equal(tail.begin(), tail.end(), stream.end() - 100));
  std::vector<std::byte> again(stream.size());
  ASSERT_TRUE(IsOk(plan.Gather(0, again)));
  EXPECT_EQ(again, stream);
}

// Wherever the pool lies, which has nothing in the stream.
TEST(StreamPlan, ATailThatIsAllThereIsIsOnePieceOnTheHost) {
  const KvLayout layout = KvLayout::Mha(2, 4, 2, 8, DType::kFloat16);
  const auto there = Must(KvPool::CreateIn(layout, 4, std::make_shared<GuardedMemory>()));
  for (const auto& pool : {MakePatternPool(layout, 4, 1), there}) {
    std::vector<std::byte> tail(StreamPlan::kMinPlacedBytes);
    const auto plan = [&](int64_t bytes, const PageRuns& pages) {
      return Must(StreamPlan::Create(pool, pages, StreamTail{tail.data(), bytes}));
    };
    EXPECT_FALSE(plan(StreamPlan::kMinSentBytes - 1, {}).sent_by_list());
    EXPECT_TRUE(plan(StreamPlan::kMinSentBytes, {}).sent_by_list());
    EXPECT_FALSE(plan(StreamPlan::kMinPlacedBytes - 1, {}).placed_by_list());
    EXPECT_TRUE(plan(StreamPlan::kMinPlacedBytes, {}).placed_by_list());
    const StreamPlan with_pages = plan(StreamPlan::kMinPlacedBytes, PageRuns(PageRun{0, 1}));
    EXPECT_FALSE(with_pages.sent_by_list() || with_pages.placed_by_list());
  }
}

// As on the host, and never touched by the processor; a failure is passed on, as nobody else's.
TEST(StreamPlan, PoolsOnADevice) {
  std::mt19937_64 random(7);
  const auto memory = std::make_shared<GuardedMemory>();
  for (int round = 0; round < 40; ++round) {
    const KvLayout layout = RandomLayout(random);
    const auto host = MakePatternPool(layout, 20, 7);
    const auto there = Must(KvPool::CreateIn(layout, 20, memory));
    FillPattern(*there, 7);
    const PageRuns runs = Must(PageRuns::FromPages(
        MakePages("rand", 1 + static_cast<int64_t>(random() % 20), 20, &random)));
    std::vector<std::byte> tail = RandomTail(random);
    const StreamPlan plan = Must(StreamPlan::Create(there, runs, TailOf(tail)));
    const StreamPlan like = Must(StreamPlan::Create(host, runs, TailOf(tail)));
    EXPECT_FALSE(plan.sent_by_list() || plan.placed_by_list());
    for (int window = 0; window < 10; ++window) {
      const int64_t offset = static_cast<int64_t>(random() % plan.total_bytes());
      std::vector<std::byte> got(1 + random() % (plan.total_bytes() - offset)), want(got.size());
      const int64_t runs_before = memory->num_runs;
      ASSERT_TRUE(IsOk(plan.Gather(offset, got)));
      EXPECT_EQ(memory->num_runs, runs_before + 1);
      ASSERT_TRUE(IsOk(like.Gather(offset, want)));
      ASSERT_EQ(got, want);
      std::generate(got.begin(), got.end(), [&] { return static_cast<std::byte>(random()); });
      ASSERT_TRUE(IsOk(plan.Scatter(offset, got)));
      ASSERT_TRUE(IsOk(like.Scatter(offset, got)));
      for (int64_t buffer = 0; buffer < layout.num_buffers(); ++buffer) {
        const BufferInfo& info = host->buffer_infos()[buffer];
        ASSERT_EQ(memory->Read(there->buffer_infos()[buffer].address, info.bytes),
                  std::vector<std::byte>(info.address, info.address + info.bytes));
      }
    }
  }
}

// Whole tensors out of another pool on the device, against gathering them and scattering that:
// pages in any order on both sides, tensors of several sizes, all heads or some, whichever number
// of them a side has.
class Placed : public testing::TestWithParam<uint64_t> {
 protected:
  // The tensors that begin at `offset`, as their owner's device has them.
  struct Tensors {
    std::vector<PageRun> runs;
    std::vector<ItemsPlace> places;
    int64_t bytes = 0;

    operator PlacedRuns() const { return {runs, places}; }  // NOLINT(google-explicit-constructor)
  };
  static Tensors TensorsAt(const StreamPlan& plan, int64_t offset, int64_t bytes, int64_t most) {
    const StreamTensors found = plan.TensorsIn(offset, bytes, most);
    Tensors tensors;
    tensors.bytes = found.bytes;
    for (const PageRun& run : plan.items().runs()) tensors.runs.push_back(run);
    for (int64_t i = 0; i < found.count; ++i) {
      const BufferInfo& buffer = plan.tensor(found.first + i);
      tensors.places.push_back({buffer.address, buffer.item_bytes});
    }
    return tensors;
  }
  KvLayout Layout(int64_t num_heads, int64_t page_size, const std::string& format) {
    KvLayout layout{layers_, page_size, DType::kUint8, format, {{"k", num_heads, 6}}};
    if (both_) layout.tensors.push_back({"v", num_heads, 15});
    return layout;
  }
  std::shared_ptr<KvPool> Pool(const KvLayout& layout, uint64_t seed) {
    auto pool = Must(KvPool::CreateIn(layout, 40, memory_));
    FillPattern(*pool, seed);
    return pool;
  }
  PageRuns Pages(int64_t count) {
    const std::string shape = std::vector<std::string>{"seq", "runs8", "rand"}[random_() % 3];
    return Must(PageRuns::FromPages(MakePages(shape, count, 40, &random_)));
  }
  std::vector<std::byte> All(const KvPool& pool) {
    std::vector<std::byte> all;
    for (const BufferInfo& buffer : pool.buffer_infos()) {
      const std::vector<std::byte> one = memory_->Read(buffer.address, buffer.bytes);
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }

  std::mt19937_64 random_{GetParam()};
  const std::shared_ptr<GuardedMemory> memory_ = std::make_shared<GuardedMemory>();
  int64_t layers_ = 1;
  bool both_ = true;
};

TEST_P(Placed, AsGatheredAndScattered) {
  for (int round = 0; round < 120; ++round) {
    layers_ = 1 + static_cast<int64_t>(random_() % 4);
    both_ = random_() % 4 != 0;
    const int64_t page_size = 1 + static_cast<int64_t>(random_() % 4);
    const std::string format = random_() % 2 == 0 ? "NHD" : "HND";
    // `heads` of what either side has.
    const int64_t heads = 1 + static_cast<int64_t>(random_() % 6);
    const auto side = [&](uint64_t seed, const PageRuns& pages) {
      const auto before = static_cast<int64_t>(random_() % 5);
      const int64_t all = before + heads + static_cast<int64_t>(random_() % 5);
      const bool some = random_() % 2 == 0;
      auto pool = Pool(Layout(some ? all : heads, page_size, format), seed);
      return Must(StreamPlan::Create(std::move(pool), pages, {},
                                     some ? HeadRange{before, heads} : HeadRange()));
    };
    const int64_t count = 1 + static_cast<int64_t>(random_() % 30);
    const StreamPlan from = side(7, Pages(count)), to = side(8, Pages(count));
    ASSERT_EQ(from.total_bytes(), to.total_bytes());
    std::vector<std::byte> stream(static_cast<size_t>(to.total_bytes())), got(stream.size());
    for (int64_t offset = 0; offset < to.total_bytes();) {
      const auto bytes =
          static_cast<int64_t>(random_() % static_cast<uint64_t>(to.total_bytes() + 1));
      const Tensors tensors =
          TensorsAt(from, offset, bytes, 1 + static_cast<int64_t>(random_() % 5));
      ASSERT_LE(tensors.bytes, bytes);
      if (tensors.bytes == 0) continue;
      const int64_t before = memory_->num_runs;
      ASSERT_TRUE(IsOk(to.ScatterRuns(offset, tensors)));
      ASSERT_EQ(memory_->num_runs, before + 1);
      ASSERT_TRUE(IsOk(from.Gather(0, stream)));
      ASSERT_TRUE(IsOk(to.Gather(0, got)));
      ASSERT_TRUE(std::equal(got.begin(), got.begin() + offset + tensors.bytes, stream.begin()))
          << round << " at " << offset;
      offset += tensors.bytes;
    }
  }
}

// The sender's pages of any size and order, cut as the receiver has them: the items of the two
// sides need not be of the same tokens or heads, only of the same bytes.
TEST_P(Placed, PagesOfAnotherForm) {
  const std::vector<int64_t> sizes = {1, 2, 3, 4, 6, 8};
  const auto size = [&] { return sizes[random_() % sizes.size()]; };
  const auto upto = [&](int64_t max) { return 1 + static_cast<int64_t>(random_() % max); };
  for (int round = 0; round < 200; ++round) {
    layers_ = upto(3);
    both_ = random_() % 4 != 0;
    const int64_t heads = upto(4), before = static_cast<int64_t>(random_() % 3);
    const bool some = random_() % 2 == 0;
    const KvLayout ours = Layout(heads, size(), random_() % 2 == 0 ? "NHD" : "HND");
    const KvLayout theirs =
        Layout(some ? before + heads + 1 : heads, size(), random_() % 2 == 0 ? "NHD" : "HND");
    const PageRuns lease = Pages(upto(16));
    const int64_t there = PagesIn(lease.num_pages(), theirs, FormOf(ours));
    const int64_t first = static_cast<int64_t>(random_() % there);
    const int64_t count = std::min<int64_t>(upto(there - first), 40);
    const StreamPlan to = Must(StreamPlan::Create(Pool(ours, 8), Pages(count)));
    const StreamPlan from = Must(
        StreamPlan::CreateIn(FormOf(ours), Pool(theirs, 7), lease, PageRuns(PageRun{first, count}),
                             {}, some ? HeadRange{before, heads} : HeadRange()));
    ASSERT_EQ(from.total_bytes(), to.total_bytes());
    const Tensors all = TensorsAt(from, 0, from.total_bytes(), 9);
    ASSERT_EQ(all.bytes, from.total_bytes());
    ASSERT_TRUE(IsOk(to.ScatterRuns(0, all)));
    std::vector<std::byte> stream(static_cast<size_t>(to.total_bytes())), got(stream.size());
    ASSERT_TRUE(IsOk(from.Gather(0, stream)));
    ASSERT_TRUE(IsOk(to.Gather(0, got)));
    ASSERT_EQ(got, stream) << theirs.ToString() << " into " << ours.ToString();
  }
}

// Nothing but the tensors is written.
TEST_P(Placed, NothingElseIsWritten) {
  layers_ = 3;
  for (int round = 0; round < 40; ++round) {
    const KvLayout layout = Layout(2, 3, "NHD");
    const auto source = Pool(layout, 7), target = Pool(layout, 8), like = Pool(layout, 8);
    const PageRuns there = Pages(12), here = Pages(12);
    const StreamPlan from = Must(StreamPlan::Create(source, there));
    const StreamPlan to = Must(StreamPlan::Create(target, here));
    const StreamPlan expected = Must(StreamPlan::Create(like, here));
    const int64_t offset = from.TensorEnd(static_cast<int64_t>(random_() % from.layer_bytes()));
    const Tensors tensors = TensorsAt(from, offset, from.layer_bytes(), 9);
    std::vector<std::byte> packed(static_cast<size_t>(tensors.bytes));
    ASSERT_TRUE(IsOk(from.Gather(offset, packed)));
    ASSERT_TRUE(IsOk(expected.Scatter(offset, packed)));
    ASSERT_TRUE(IsOk(to.ScatterRuns(offset, tensors)));
    ASSERT_EQ(All(*target), All(*like));
  }
}

// A list that is not this stream's writes nothing.
TEST_P(Placed, OtherTensors) {
  layers_ = 2;
  const auto source = Pool(Layout(2, 3, "NHD"), 7), target = Pool(Layout(2, 3, "NHD"), 8);
  const PageRuns pages = Pages(12);
  const StreamPlan from = Must(StreamPlan::Create(source, pages));
  std::vector<std::byte> tail(100);
  const StreamPlan to = Must(StreamPlan::Create(target, pages, TailOf(tail)));
  const std::vector<std::byte> before = All(*target);
  const auto refused = [&](int64_t offset, const Tensors& tensors) {
    return Fails(to.ScatterRuns(offset, tensors), absl::StatusCode::kDataLoss,
                 absl::StrCat("other tensors than those at byte ", offset)) &&
           All(*target) == before;
  };
  const Tensors all = TensorsAt(from, 0, from.total_bytes(), 9);
  ASSERT_EQ(all.places.size(), 4u);
  const int64_t k_bytes = from.TensorEnd(0);
  EXPECT_TRUE(refused(1, all));
  EXPECT_TRUE(refused(k_bytes, all)) << "one too many";
  EXPECT_TRUE(refused(from.total_bytes(), all)) << "in the tail";
  EXPECT_TRUE(refused(k_bytes, TensorsAt(from, 0, from.total_bytes(), 1))) << "K for V";
  Tensors more = all;
  more.runs.push_back({0, 1});
  EXPECT_TRUE(refused(0, more));
  Tensors fewer = all;
  fewer.runs.back().count -= 1;
  EXPECT_TRUE(refused(0, fewer));
  Tensors other = all;
  other.places[1].item_bytes += 1;
  EXPECT_TRUE(refused(0, other));
  std::swap(other.places[0], other.places[1]);
  EXPECT_TRUE(refused(0, other));
  other.places[0].item_bytes = int64_t{1} << 32;
  EXPECT_TRUE(refused(0, other));
  Tensors longer = all;  // Items that are two of ours each, or would be.
  longer.runs = {{0, pages.num_pages() / 2}};
  for (ItemsPlace& place : longer.places) place.item_bytes *= 2;
  longer.places[1].item_bytes += 1;
  EXPECT_TRUE(refused(0, longer));
  EXPECT_TRUE(IsOk(to.ScatterRuns(0, all)));
}

INSTANTIATE_TEST_SUITE_P(StreamPlan, Placed, testing::Range<uint64_t>(1, 4));

// Against counting: from where a tensor begins, what is whole in so many bytes.
TEST(StreamPlan, TensorsOfAStream) {
  KvLayout layout = KvLayout::Mha(3, 1, 1, 8, DType::kUint8);
  layout.tensors[1].head_dim = 5;
  const auto pool = MakePatternPool(layout, 10, 1);
  const StreamPlan plan = Must(StreamPlan::Create(pool, PageRuns(PageRun{2, 4})));
  const std::vector<int64_t> ends = {32, 52, 84, 104, 136, 156};
  ASSERT_EQ(plan.total_bytes(), ends.back());
  for (int64_t offset = 0; offset < 156; ++offset) {
    const auto next = std::upper_bound(ends.begin(), ends.end(), offset);
    EXPECT_EQ(plan.TensorEnd(offset), *next);
    const bool begins = offset == 0 || std::binary_search(ends.begin(), ends.end(), offset);
    for (int64_t bytes = 0; bytes <= 156; ++bytes) {
      for (const int64_t most : {-1, 0, 2, 9}) {
        const StreamTensors found = plan.TensorsIn(offset, bytes, most);
        const auto last =
            begins ? std::upper_bound(ends.begin(), ends.end(), offset + bytes) : next;
        const int64_t count = std::clamp<int64_t>(last - next, 0, std::max<int64_t>(most, 0));
        ASSERT_EQ(found.count, count);
        ASSERT_EQ(found.bytes, count == 0 ? 0 : *(next + count - 1) - offset);
        if (count > 0) {
          ASSERT_EQ(found.first, next - ends.begin());
        }
      }
    }
  }
  EXPECT_EQ(plan.TensorsIn(156, 10, 10).count, 0);
  for (int64_t index = 0; index < 6; ++index) {
    EXPECT_EQ(&plan.tensor(index), &pool->buffer(index / 2, index % 2));
  }
}

TEST(StreamPlan, WhatFailsOnADeviceIsNobodyElsesFault) {
  const auto memory = std::make_shared<GuardedMemory>();
  const auto pool = Must(KvPool::CreateIn(KvLayout::Mla(2, 4, 8, DType::kUint8), 10, memory));
  const StreamPlan plan = Must(StreamPlan::Create(pool, PageRuns(PageRun{1, 2})));
  std::vector<std::byte> bytes(10);
  memory->failure = absl::UnavailableError("fell off the bus");
  EXPECT_TRUE(Fails(plan.Gather(3, bytes), absl::StatusCode::kInternal,
                    "pages in guarded memory could not be copied: fell off the bus"));
  EXPECT_TRUE(Fails(plan.Scatter(3, bytes), absl::StatusCode::kInternal, "fell off the bus"));
  const PageRun run{0, 2};
  const ItemsPlace place{bytes.data(), 32};
  EXPECT_TRUE(Fails(plan.ScatterRuns(0, {{&run, 1}, {&place, 1}}), absl::StatusCode::kInternal,
                    "fell off the bus"));
}

TEST(StreamPlan, NoPages) {
  const auto pool = MakePatternPool(KvLayout::Mla(2, 4, 8, DType::kUint8), 10, 1);
  const StreamPlan plan = Must(StreamPlan::Create(pool, PageRuns()));
  EXPECT_EQ(plan.total_bytes(), 0);
  EXPECT_TRUE(plan.PagesTouchedBy({}).empty());
}

}  // namespace
}  // namespace kvferry
