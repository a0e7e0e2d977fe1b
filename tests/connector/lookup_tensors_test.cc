// Entries that are brought as tensors, and the pages that hold their copies.

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <numeric>
#include <thread>

#include "connector/copy_pages.h"
#include "connector/kv_tensors.h"
#include "tests/pool/guarded_memory.h"
#include "tests/support/failing_new.h"
#include "tests/support/lookup_buffers.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

using Tokens = std::vector<int32_t>;
using Pages = std::vector<int64_t>;
using Bytes = std::vector<std::byte>;
using Code = absl::StatusCode;

Bytes RandomBytes(int64_t count, uint64_t seed) {
  Bytes bytes(static_cast<size_t>(count));
  PatternBytes(seed, 0, 0, bytes);
  return bytes;
}

// [layers, tokens, heads, dim], read value by value from a pool's pages.
Bytes NaiveTensor(const KvPool& pool, int64_t tensor, const Pages& pages, int64_t num_tokens) {
  const KvLayout& layout = pool.layout();
  const int64_t heads = layout.tensors[tensor].num_heads;
  const int64_t head_bytes = layout.tensors[tensor].head_dim * DTypeBytes(layout.dtype);
  Bytes bytes;
  for (int64_t layer = 0; layer < layout.num_layers; ++layer) {
    for (int64_t token = 0; token < num_tokens; ++token) {
      const Bytes page =
          ReadPage(pool, layout.buffer_index(layer, tensor), pages[token / layout.page_size]);
      const int64_t place = token % layout.page_size;
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t at =
            layout.page_format == "NHD" ? place * heads + head : head * layout.page_size + place;
        const auto from = page.begin() + at * head_bytes;
        bytes.insert(bytes.end(), from, from + head_bytes);
      }
    }
  }
  return bytes;
}

void GoToPagesAndBack(const std::shared_ptr<const PoolMemory>& memory) {
  for (const std::string format : {"NHD", "HND"}) {
    SCOPED_TRACE(format);
    KvLayout layout = SmallLayout();
    layout.page_format = format;
    const auto pool = Must(KvPool::CreateIn(layout, 8, memory));
    const Pages pages = {6, 2, 3};
    for (const int64_t num_tokens : {1, 16, 33, 48}) {
      const int64_t size = Must(KvTensorBytes(layout, num_tokens));
      const Bytes key = RandomBytes(size, 2), value = RandomBytes(size, 3);
      const PageRuns runs = Must(PageRuns::FromPages(pages));
      ASSERT_TRUE(IsOk(CopyTensorsToPages(key, value, num_tokens, *pool, runs)));
      EXPECT_EQ(NaiveTensor(*pool, 0, pages, num_tokens), key);
      EXPECT_EQ(NaiveTensor(*pool, 1, pages, num_tokens), value);
      Bytes got_key(key.size()), got_value(value.size());
      ASSERT_TRUE(IsOk(CopyPagesToTensors(*pool, runs, num_tokens, got_key, got_value)));
      EXPECT_EQ(got_key, key);
      EXPECT_EQ(got_value, value);
    }
  }
}

TEST(KvTensors, ToPagesAndBack) { GoToPagesAndBack(HostMemory()); }
TEST(KvTensors, ToPagesOfADeviceAndBack) { GoToPagesAndBack(std::make_shared<GuardedMemory>()); }

TEST(KvTensors, BadInput) {
  const auto pool = MakePatternPool(SmallLayout(), 8, 1);
  const PageRuns pages = Must(PageRuns::FromPages(Pages{1, 2}));
  const Bytes tensor = RandomBytes(Must(KvTensorBytes(SmallLayout(), 32)), 2);
  const std::span<const std::byte> bytes = tensor;
  EXPECT_TRUE(Fails(CopyTensorsToPages(bytes.first(5), bytes, 32, *pool, pages),
                    Code::kInvalidArgument, "key has 5 bytes", std::to_string(bytes.size())));
  EXPECT_TRUE(Fails(CopyTensorsToPages(bytes, bytes.first(6), 32, *pool, pages),
                    Code::kInvalidArgument, "value has 6 bytes"));
  const Bytes longer = RandomBytes(Must(KvTensorBytes(SmallLayout(), 33)), 2);
  EXPECT_TRUE(Fails(CopyTensorsToPages(longer, longer, 33, *pool, pages), Code::kInvalidArgument,
                    "2 pages of 16 tokens for 33"));
  EXPECT_TRUE(
      Fails(CopyTensorsToPages(bytes, bytes, 32, *pool, Must(PageRuns::FromPages(Pages{7, 8}))),
            Code::kOutOfRange, "8"));
  EXPECT_TRUE(IsUntouched(*pool, 1));
  const auto unlike = [](KvTensor key, KvTensor value) {
    return KvLayout{1, 16, DType::kBFloat16, "NHD", {std::move(key), std::move(value)}};
  };
  // More heads, and as many bytes in other heads or of another dtype.
  for (const KvLayout& layout :
       {KvLayout::Mla(1, 16, 8, DType::kBFloat16), unlike({"k", 2, 8}, {"v", 1, 8}),
        unlike({"k", 2, 8}, {"v", 1, 16}), unlike({"k", 2, 8}, {"v", 4, 8, DType::kUint8})}) {
    EXPECT_TRUE(Fails(KvTensorBytes(layout, 1), Code::kInvalidArgument, "two equal tensors"));
  }
}

// Whether somebody waits for more than the `free` pages that there are: they are that one's then.
bool WaitsFor(CopyPages& pages, int64_t free) {
  const absl::StatusOr<PageRuns> got = pages.Allocate(free, Clock::now());
  if (got.ok()) pages.Free(*got);
  return !got.ok();
}

// Which nothing else would tell it: no page gets free.
TEST(CopiedPages, GoToWhoWaitsBehindOneThatIsLate) {
  const auto pages = Must(CopyPages::Create(4, 4));
  const PageRuns first = Must(pages->Allocate(3, Soon()));
  std::atomic<bool> late = false;
  std::thread waiting([&] {
    EXPECT_TRUE(Fails(pages->Allocate(4, DeadlineInMs(300)), Code::kDeadlineExceeded));
    late = true;
  });
  ASSERT_TRUE(WaitFor([&] { return WaitsFor(*pages, 1) || late; }, Soon()));
  const Deadline soon = Soon();
  EXPECT_TRUE(IsOk(pages->Allocate(1, soon)));
  EXPECT_LT(Clock::now(), soon);
  waiting.join();
}

TEST(CopiedPages, AreHandedOutInTurn) {
  const auto pages = Must(CopyPages::Create(10, 4));
  const PageRuns first = Must(pages->Allocate(3, Soon()));
  EXPECT_TRUE(IsOk(first.CheckWithin(10)));
  EXPECT_GE(first.PageAt(0), 6);
  EXPECT_TRUE(
      Fails(pages->Allocate(2, DeadlineInMs(1)), Code::kDeadlineExceeded, "2 pages", "1 of 4"));
  EXPECT_TRUE(
      Fails(pages->Allocate(5, Soon()), Code::kResourceExhausted, "5 pages", "copy_pages is 4"));
  absl::StatusOr<PageRuns> second;
  const Deadline soon = Soon();
  std::atomic<bool> ended = false;
  std::thread waiting([&] {
    second = pages->Allocate(4, soon);
    ended = true;
  });
  ASSERT_TRUE(WaitFor([&] { return WaitsFor(*pages, 1); }, Soon()));
  EXPECT_FALSE(WaitFor([&] { return ended.load(); }, DeadlineInMs(20)));  // Asleep again by then.
  pages->Free(first);
  waiting.join();
  EXPECT_LT(Clock::now(), soon);  // It was told.
  ASSERT_TRUE(IsOk(second));
  EXPECT_TRUE(Fails(pages->Allocate(1, DeadlineInMs(1)), Code::kDeadlineExceeded, "0 of 4"));
  pages->Free(*second);
  const PageRuns third = Must(pages->Allocate(3, Soon()));
  const Deadline later = Soon();
  ended = false;
  std::thread closed([&] {
    EXPECT_TRUE(Fails(pages->Allocate(4, later), Code::kCancelled, "closed"));
    ended = true;
  });
  ASSERT_TRUE(WaitFor([&] { return WaitsFor(*pages, 1); }, Soon()));
  EXPECT_FALSE(WaitFor([&] { return ended.load(); }, DeadlineInMs(20)));
  pages->Close();
  closed.join();
  EXPECT_LT(Clock::now(), later);
  pages->Free(third);
  EXPECT_TRUE(Fails(pages->Allocate(1, Soon()), Code::kCancelled));
  EXPECT_TRUE(Fails(CopyPages::Create(4, -1), Code::kInvalidArgument, "copy_pages is -1"));
  EXPECT_TRUE(Fails(Must(CopyPages::Create(4, 0))->Allocate(1, Soon()), Code::kResourceExhausted));
}

// Or nobody else would ever have one.
TEST(CopiedPages, WhoFindsNoMemoryHasNoTurnAnyMore) {
  const auto pages = Must(CopyPages::Create(4, 4));
  const PageRuns all = Must(pages->Allocate(4, Soon()));
  const Deadline at_once = Clock::now();
  CallWithoutMemory([&] { EXPECT_FALSE(pages->Allocate(1, at_once).ok()); }, [] {});
  pages->Free(all);
  CallWithoutMemory([&] { EXPECT_TRUE(pages->Allocate(1, at_once).ok()); }, [] {});
  EXPECT_TRUE(IsOk(pages->Allocate(3, DeadlineInMs(1000))));
}

class LookupTensors : public testing::Test {
 protected:
  void Start(int64_t copy_pages, int64_t max_pages) {
    LookupProducer::Options options = ProducerOptions(their_pool_);
    options.copy_pages = copy_pages;
    options.max_bytes = max_pages * their_pool_->layout().page_bytes() + 200;
    producer_ = Must(LookupProducer::Create(options));
    consumer_ = Must(LookupConsumer::Create(ConsumerOptions(pool_, {producer_->address()})));
  }
  absl::Status Insert(const Tokens& tokens, uint64_t seed, int64_t timeout_ms = 20000) {
    const int64_t bytes = TensorBytes(tokens);
    return producer_->InsertTensors(tokens, std::nullopt, RandomBytes(bytes, seed),
                                    RandomBytes(bytes, seed + 1), DeadlineInMs(timeout_ms),
                                    RandomBytes(100, seed + 2));
  }
  void ExpectTaken(const Tokens& tokens, uint64_t seed) {
    const auto handle = Must(consumer_->DropSelect(Lookup(tokens, {1, 2, 5})));
    ASSERT_TRUE(IsOk(handle->Wait(Soon())));
    const int64_t bytes = TensorBytes(tokens);
    Bytes key(static_cast<size_t>(bytes)), value(static_cast<size_t>(bytes));
    ASSERT_TRUE(IsOk(CopyPagesToTensors(*pool_, Must(PageRuns::FromPages(handle->result().pages)),
                                        static_cast<int64_t>(tokens.size()), key, value)));
    EXPECT_EQ(key, RandomBytes(bytes, seed));
    EXPECT_EQ(value, RandomBytes(bytes, seed + 1));
    const LookupResult result = handle->result();
    EXPECT_EQ(Bytes(result.hidden.get(), result.hidden.get() + result.hidden_bytes),
              RandomBytes(100, seed + 2));
  }
  static int64_t TensorBytes(const Tokens& tokens) {
    return Must(KvTensorBytes(SmallLayout(), static_cast<int64_t>(tokens.size())));
  }

  const std::shared_ptr<KvPool> their_pool_ = MakePatternPool(SmallLayout(), 16, 11);
  const std::shared_ptr<KvPool> pool_ = MakePatternPool(SmallLayout(), 16, 22);
  std::unique_ptr<LookupProducer> producer_;
  std::unique_ptr<LookupConsumer> consumer_;
};

TEST_F(LookupTensors, AreCopiedAndDelivered) {
  Start(8, 16);
  EXPECT_EQ(producer_->num_own_pages(), 8);
  const Tokens tokens(40, 7);
  for (uint64_t seed = 1; seed < 40; seed += 2) {  // Pages go round.
    ASSERT_TRUE(IsOk(Insert(tokens, seed)));
    ExpectTaken(tokens, seed);
  }
  EXPECT_TRUE(producer_->TakeGone().empty());
  EXPECT_TRUE(
      Fails(producer_->Insert(Tokens{1}, std::nullopt, Pages{8}, Soon()), Code::kOutOfRange, "8"));
}

TEST_F(LookupTensors, WaitForPagesAndRoom) {
  Start(4, 2);
  ASSERT_TRUE(IsOk(Insert(Tokens(32, 1), 1)));
  // No room, but pages: it can be found while it waits.
  std::thread inserting([&] { EXPECT_TRUE(IsOk(Insert(Tokens(20, 2), 3))); });
  ExpectTaken(Tokens(20, 2), 3);
  inserting.join();
  EXPECT_TRUE(Fails(Insert(Tokens(20, 3), 5, 10), Code::kDeadlineExceeded, "no room"));
  EXPECT_TRUE(Fails(Insert(Tokens(33, 3), 5), Code::kResourceExhausted, "can never fit"));
  std::thread waiting([&] { EXPECT_TRUE(IsOk(Insert(Tokens(20, 4), 7))); });
  ExpectTaken(Tokens(32, 1), 1);
  waiting.join();
  ExpectTaken(Tokens(20, 4), 7);
}

TEST_F(LookupTensors, BadTensorsChangeNothing) {
  Start(4, 16);
  const Bytes bytes(10);
  EXPECT_TRUE(Fails(producer_->InsertTensors(Tokens{1}, std::nullopt, bytes, bytes, Soon()),
                    Code::kInvalidArgument, "key has 10 bytes"));
  EXPECT_TRUE(Fails(Insert(Tokens(80, 1), 1), Code::kResourceExhausted, "5 pages"));
  EXPECT_EQ(producer_->num_entries(), 0);
  EXPECT_TRUE(IsUntouched(*their_pool_, 11));
}

TEST_F(LookupTensors, ClosingEndsTheWaitForPages) {
  Start(2, 16);
  ASSERT_TRUE(IsOk(Insert(Tokens(32, 1), 1)));
  std::thread waiting([&] { EXPECT_TRUE(Fails(Insert(Tokens(20, 4), 7), Code::kCancelled)); });
  producer_->Close();
  waiting.join();
}

}  // namespace
}  // namespace kvferry
