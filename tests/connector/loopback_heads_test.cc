// Sides with different numbers of tensor-parallel ranks: every rank gets its heads of every page,
// from whoever has them, and nothing else changes.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "connector/tensor_parallel.h"
#include "tests/support/endpoints.h"

namespace kvferry {
namespace {

constexpr int64_t kPoolPages = 40;
constexpr int64_t kComputed = 1, kOwn = 2;  // Seeds.

struct Shape {
  std::string format;
  int64_t total_heads;
  int64_t prefill_size;
  int64_t decode_size;
  int64_t head_dim = 32;
};

std::string NameOf(const Shape& shape) {
  std::string name = shape.format + "_" + std::to_string(shape.total_heads) + "heads_" +
                     std::to_string(shape.prefill_size) + "to" + std::to_string(shape.decode_size);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

// One rank's pool. What a model has computed depends on the head and not on who holds it.
class Rank {
 public:
  Rank(const Shape& shape, int64_t rank, int64_t size, int64_t seed)
      : total_heads_(shape.total_heads), heads_(Must(HeadsOfRank(shape.total_heads, rank, size))) {
    KvLayout layout = KvLayout::Mha(3, 8, heads_.count, shape.head_dim, DType::kBFloat16);
    layout.page_format = shape.format;
    pool_ = MakePatternPool(layout, kPoolPages, 0);
    for (int64_t page = 0; page < kPoolPages; ++page) Write(page, seed, page);
  }

  const std::shared_ptr<KvPool>& pool() const { return pool_; }
  HeadShare share() const { return {heads_.first, total_heads_}; }

  void Write(int64_t page, int64_t seed, int64_t of_page) const {
    for (int64_t buffer = 0; buffer < pool_->layout().num_buffers(); ++buffer) {
      const std::vector<std::byte> bytes = PageOf(seed, buffer, of_page);
      const BufferInfo& info = pool_->buffer_infos()[buffer];
      const BytesMove move{bytes.data(), info.address + page * info.item_bytes, info.item_bytes};
      EXPECT_TRUE(IsOk(pool_->memory().MoveApart({&move, 1})));
    }
  }
  // Page `page` has these heads of what the model computed for `of_page`, and its own others.
  testing::AssertionResult Holds(int64_t page, HeadRange computed, int64_t of_page) const {
    for (int64_t buffer = 0; buffer < pool_->layout().num_buffers(); ++buffer) {
      const std::vector<std::byte> got = ReadPage(*pool_, buffer, page);
      std::vector<std::byte> want = PageOf(kOwn, buffer, page);
      Fill(computed, kComputed, buffer, of_page, &want);
      if (got != want) {
        return testing::AssertionFailure() << "buffer " << buffer << " page " << page;
      }
    }
    return testing::AssertionSuccess();
  }
  HeadRange heads() const { return heads_; }

 private:
  std::vector<std::byte> PageOf(int64_t seed, int64_t buffer, int64_t page) const {
    std::vector<std::byte> bytes(pool_->buffer_infos()[buffer].item_bytes);
    Fill(heads_, seed, buffer, page, &bytes);
    return bytes;
  }
  void Fill(HeadRange heads, int64_t seed, int64_t buffer, int64_t page,
            std::vector<std::byte>* bytes) const {
    const int64_t tokens = pool_->layout().page_size;
    const int64_t row = static_cast<int64_t>(bytes->size()) / tokens / heads_.count;
    const bool nhd = pool_->layout().page_format == "NHD";
    for (int64_t head = heads.first; head < heads.first + heads.count; ++head) {
      for (int64_t token = 0; token < tokens; ++token) {
        const int64_t local = head - heads_.first;
        const int64_t place = nhd ? token * heads_.count + local : local * tokens + token;
        PatternBytes(seed, buffer, (page * total_heads_ + head) * tokens + token,
                     std::span(*bytes).subspan(place * row, row));
      }
    }
  }

  int64_t total_heads_;
  HeadRange heads_;
  std::shared_ptr<KvPool> pool_;
};

class PrefillSide {
 public:
  PrefillSide(const Shape& shape, const Config& config) {
    for (int64_t i = 0; i < shape.prefill_size; ++i) {
      ranks.emplace_back(shape, i, shape.prefill_size, kComputed);
      EndpointOptions options{config, kTestModel, "prefill"};
      options.heads = ranks.back().share();
      endpoints.push_back(Must(PrefillEndpoint::Create(ranks.back().pool(), options)));
      ended.emplace_back(endpoints.back().get());
    }
  }
  void Publish(const std::vector<int64_t>& pages, int64_t ready_layers) {
    for (size_t i = 0; i < ranks.size(); ++i) {
      tickets.push_back(kvferry::Publish(*endpoints[i], *ranks[i].pool(), pages, ready_layers));
    }
  }

  std::vector<Rank> ranks;
  std::vector<std::unique_ptr<PrefillEndpoint>> endpoints;
  std::vector<EndedLeases> ended;
  std::vector<Ticket> tickets;
};

std::unique_ptr<DecodeEndpoint> DecodeOf(const Rank& rank, const Config& config) {
  EndpointOptions options{config, kTestModel, "decode"};
  options.heads = rank.share();
  return Must(DecodeEndpoint::Create(rank.pool(), options));
}

class Heads : public testing::TestWithParam<Shape> {};

TEST_P(Heads, EachRankGetsItsOwn) {
  const Shape& shape = GetParam();
  std::mt19937_64 random(3);
  constexpr int64_t kCount = 24, kFirst = 5;
  const std::vector<int64_t> published = MakePages("runs8", kCount, kPoolPages, &random);
  const std::vector<int64_t> local = MakePages("rand", kCount - kFirst, kPoolPages, &random);
  PrefillSide prefill(shape, SmallChunks());
  prefill.Publish(published, /*ready_layers=*/1);

  std::vector<Rank> ranks;
  std::vector<std::unique_ptr<DecodeEndpoint>> decodes;
  std::vector<std::shared_ptr<FetchHandle>> handles;
  for (int64_t i = 0; i < shape.decode_size; ++i) {
    ranks.emplace_back(shape, i, shape.decode_size, kOwn);
    decodes.push_back(DecodeOf(ranks.back(), SmallChunks()));
    for (const RankShare& share :
         Must(SharesFor(shape.total_heads, i, shape.decode_size, shape.prefill_size))) {
      const Ticket& ticket = prefill.tickets[share.rank];
      const DecodeEndpoint::Part part{share.heads, share.reader};
      const bool wanted = share.heads.count != 0;
      handles.push_back(Must(decodes.back()->Fetch(
          ticket, wanted ? kFirst : 0, wanted ? local : std::vector<int64_t>(), 0, part)));
      if (wanted) {
        EXPECT_TRUE(IsOk(handles.back()->WaitLayer(0, Soon())));
      }
    }
  }
  for (size_t i = 0; i < prefill.ranks.size(); ++i) {
    const absl::Status ready = prefill.endpoints[i]->AllLayersReady(prefill.tickets[i].lease_id);
    EXPECT_TRUE(ready.ok() || absl::IsFailedPrecondition(ready)) << ready;  // Let go already.
  }
  for (const auto& handle : handles) EXPECT_TRUE(IsOk(handle->Wait(Soon())));
  for (const Rank& rank : ranks) {
    for (int64_t page = 0; page < kPoolPages; ++page) {
      const auto at = std::find(local.begin(), local.end(), page);
      const bool moved = at != local.end();
      EXPECT_TRUE(rank.Holds(page, moved ? rank.heads() : HeadRange(),
                             moved ? published[kFirst + (at - local.begin())] : 0));
    }
  }
  for (size_t i = 0; i < prefill.ended.size(); ++i) {
    EXPECT_EQ(prefill.ended[i].Wait(prefill.tickets[i].lease_id), "fetched") << i;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Loopback, Heads,
    testing::Values(Shape{"NHD", 4, 1, 2}, Shape{"HND", 4, 1, 2}, Shape{"NHD", 4, 2, 1},
                    Shape{"HND", 4, 2, 1}, Shape{"an-engines-HND", 8, 2, 4}, Shape{"HND", 8, 8, 2},
                    // No side's pages are whole multiples of the other's.
                    Shape{"HND", 6, 2, 3}, Shape{"NHD", 6, 3, 2},
                    // Heads that several ranks hold.
                    Shape{"HND", 2, 4, 1}, Shape{"HND", 2, 1, 4}, Shape{"NHD", 2, 4, 4},
                    // A latent: every rank has all of it.
                    Shape{"NHD", 1, 2, 1, 72}, Shape{"NHD", 1, 1, 3, 72}, Shape{"HND", 4, 2, 2}),
    [](const auto& instance) { return NameOf(instance.param); });

class HeadsOfOthers : public testing::Test {
 protected:
  const Shape shape_{"HND", 4, 2, 1};
};

TEST_F(HeadsOfOthers, ATicketOfTheWrongRankIsRefused) {
  PrefillSide prefill(shape_, SmallChunks());
  prefill.Publish({1, 2, 3}, -1);
  const Rank rank(shape_, 0, 1, kOwn);
  const auto decode = DecodeOf(rank, SmallChunks());
  const auto handle = Must(decode->Fetch(prefill.tickets[1], 0, {{4, 5, 6}}, 0, {{0, 2}, {}}));
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kOutOfRange,
                    "heads [0, 0 + 2) asked, of pages that hold [2, 2 + 2)"));
  EXPECT_EQ(handle->missing_pages(), (std::vector<int64_t>{4, 5, 6}));
  // All that the local pages hold is more than one rank has.
  EXPECT_TRUE(Fails(Must(decode->Fetch(prefill.tickets[0], 0, {{4, 5, 6}}, 0))->Wait(Soon()),
                    absl::StatusCode::kOutOfRange, "heads [0, 0 + 4) asked"));
  for (int64_t page = 0; page < kPoolPages; ++page) EXPECT_TRUE(rank.Holds(page, {}, 0));
  // The lease is as good as before.
  const auto right = Must(decode->Fetch(prefill.tickets[1], 0, {{4, 5, 6}}, 0, {{2, 2}, {}}));
  EXPECT_TRUE(IsOk(right->Wait(Soon())));
  EXPECT_TRUE(rank.Holds(4, {2, 2}, 1));
}

TEST_F(HeadsOfOthers, WhatCannotBeIsRefusedHere) {
  const Rank rank(shape_, 1, 2, kOwn);  // Heads 2 and 3.
  const auto decode = DecodeOf(rank, SmallChunks());
  const auto fetch = [&](const DecodeEndpoint::Part& part) {
    return decode->Fetch({"tcp://127.0.0.1:1", 1, 1, 3, 0}, 0, {{4, 5, 6}}, 0, part).status();
  };
  for (const HeadRange heads :
       {HeadRange{1, 1}, HeadRange{3, 2}, HeadRange{-2, 1}, HeadRange{2, -1}, HeadRange{2, 0}}) {
    EXPECT_FALSE(fetch({heads, {}}).ok()) << heads.first << " " << heads.count;
  }
  for (const LeaseReader reader : {LeaseReader{0, 0}, LeaseReader{2, 2}, LeaseReader{-1, 2},
                                   LeaseReader{0, LeaseReader::kMax + 1}}) {
    EXPECT_TRUE(Fails(fetch({{2, 1}, reader}), absl::StatusCode::kInvalidArgument, "reader"));
  }
  for (const HeadShare share :
       {HeadShare{-1, 4}, HeadShare{3, 4}, HeadShare{0, 1}, HeadShare{0, -1}, HeadShare{2, 0},
        HeadShare{0, KvLayout::kMaxHeads + 1}}) {
    EndpointOptions options{SmallChunks(), kTestModel, "decode"};
    options.heads = share;
    EXPECT_TRUE(Fails(DecodeEndpoint::Create(rank.pool(), options),
                      absl::StatusCode::kInvalidArgument, "heads"));
  }
}

// Of another model, or of a side that does not say which heads it holds: refused before anything
// moves.
TEST_F(HeadsOfOthers, OtherNumbersOfHeadsInAllAreRefused) {
  PrefillSide prefill(shape_, SmallChunks());
  prefill.Publish({1, 2, 3}, -1);
  const Rank eight({"HND", 8, 1, 2}, 0, 2, kOwn);
  const auto other = DecodeOf(eight, SmallChunks());
  EXPECT_TRUE(Fails(Fetch(*other, prefill.tickets[0], {4, 5, 6})->Wait(Soon()),
                    absl::StatusCode::kFailedPrecondition, "heads of the model: 4 here, 8 there"));
  const Rank rank(shape_, 0, 2, kOwn);
  const auto silent = MakeDecode(rank.pool(), SmallChunks());
  EXPECT_TRUE(Fails(Fetch(*silent, prefill.tickets[0], {4, 5, 6})->Wait(Soon()),
                    absl::StatusCode::kFailedPrecondition, "heads of the model: 4 here, 2 there"));
  EXPECT_EQ(Metric(*prefill.endpoints[0], "hellos_refused"), 2);
}

// The engine's own order of values within a page: whole pages move, some heads of them cannot.
TEST_F(HeadsOfOthers, PagesThatDoNotSayWhereHeadsLie) {
  Shape shape = shape_;
  shape.format = "engine's own";
  PrefillSide prefill(shape, SmallChunks());
  prefill.Publish({1, 2, 3}, -1);
  const Rank rank(shape, 0, 2, kOwn);
  const auto decode = DecodeOf(rank, SmallChunks());
  EXPECT_TRUE(IsOk(Fetch(*decode, prefill.tickets[0], {4, 5, 6})->Wait(Soon())));
  prefill.Publish({1, 2, 3}, -1);
  EXPECT_TRUE(Fails(decode->Fetch(prefill.tickets[2], 0, {{4, 5, 6}}, 0, {{0, 1}, {}}),
                    absl::StatusCode::kInvalidArgument, "does not say where heads lie"));
}

// One of two readers gives up, or dies: the other is served, and it may come again.
TEST_F(HeadsOfOthers, AReaderThatGoesDoesNotEndTheLease) {
  const Shape shape{"HND", 4, 1, 2};
  PrefillSide prefill(shape, SmallChunks());
  prefill.Publish({1, 2, 3}, /*ready_layers=*/1);
  const Rank first(shape, 0, 2, kOwn), second(shape, 1, 2, kOwn);
  const auto one = DecodeOf(first, SmallChunks());
  auto two = DecodeOf(second, SmallChunks());
  const DecodeEndpoint::Part part_one{{0, 2}, {0, 2}}, part_two{{2, 2}, {1, 2}};
  const auto whole = Must(one->Fetch(prefill.tickets[0], 0, {{4, 5, 6}}, 0, part_one));
  const auto broken = Must(two->Fetch(prefill.tickets[0], 0, {{7, 8, 9}}, 0, part_two));
  EXPECT_TRUE(IsOk(broken->WaitLayer(0, Soon())));
  two.reset();
  EXPECT_FALSE(IsOk(broken->Wait(Soon())));
  ASSERT_TRUE(IsOk(prefill.endpoints[0]->AllLayersReady(prefill.tickets[0].lease_id)));
  EXPECT_TRUE(IsOk(whole->Wait(Soon())));
  EXPECT_TRUE(first.Holds(4, {0, 2}, 1));
  EXPECT_FALSE(prefill.ended[0].Contains(prefill.tickets[0].lease_id));

  two = DecodeOf(second, SmallChunks());
  const auto again = Must(two->Fetch(prefill.tickets[0], 0, {{7, 8, 9}}, 0, part_two));
  EXPECT_TRUE(IsOk(again->Wait(Soon())));
  EXPECT_TRUE(second.Holds(7, {2, 2}, 1));
  EXPECT_EQ(prefill.ended[0].Wait(prefill.tickets[0].lease_id), "fetched");
}

// A side that registers its pages first gets those of a rank like itself only.
TEST_F(HeadsOfOthers, PushesOfOtherHeadsAreRefused) {
  const Rank rank(shape_, 0, 1, kOwn);
  EndpointOptions options{SmallChunks(), kTestModel, "decode", true};
  options.heads = rank.share();
  const auto decode = Must(DecodeEndpoint::Create(rank.pool(), options));
  PrefillSide prefill(shape_, SmallChunks());
  const auto receive = Receive(*decode, {4, 5, 6});
  const auto push =
      Push(*prefill.endpoints[0], receive.ticket, *prefill.ranks[0].pool(), {1, 2, 3});
  EXPECT_TRUE(Fails(receive.handle->Wait(Soon()), absl::StatusCode::kOutOfRange, "heads"));
  EXPECT_FALSE(IsOk(push->Wait(Soon())));
  for (int64_t page = 0; page < kPoolPages; ++page) EXPECT_TRUE(rank.Holds(page, {}, 0));
}

}  // namespace
}  // namespace kvferry
