// Sides with pages of other sizes, and with values in the other order: every token of every head
// comes to where the decode side has its place, over every path, and nothing else changes.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "connector/tensor_parallel.h"
#include "tests/support/endpoints.h"

namespace kvferry {
namespace {

constexpr int64_t kLayers = 3, kTotalHeads = 4;
constexpr int64_t kComputed = 1, kOwn = 2;  // Seeds.

int64_t DivideUp(int64_t number, int64_t by) { return (number + by - 1) / by; }

KvLayout Layout(const std::string& format, int64_t page_size, int64_t num_heads, int64_t head_dim) {
  KvLayout layout = KvLayout::Mha(kLayers, page_size, num_heads, head_dim, DType::kBFloat16);
  layout.page_format = format;
  return layout;
}

// One rank's pool. What a model has computed depends on the token and the head and not on where
// they lie.
class Rank {
 public:
  Rank(const KvLayout& layout, HeadRange heads, int64_t num_pages)
      : heads_(heads), pool_(MakePatternPool(layout, num_pages, kOwn)) {}

  const std::shared_ptr<KvPool>& pool() const { return pool_; }
  int64_t page_size() const { return pool_->layout().page_size; }
  HeadShare share() const { return {heads_.first, kTotalHeads}; }
  HeadRange heads() const { return heads_; }

  // Page pages[i] gets the tokens from i * page_size on, in these layers.
  void Compute(const std::vector<int64_t>& pages, int64_t first_layer = 0,
               int64_t end_layer = kLayers) const {
    for (int64_t buffer = 0; buffer < pool_->layout().num_buffers(); ++buffer) {
      const int64_t layer = buffer % kLayers;
      if (layer < first_layer || layer >= end_layer) continue;
      for (size_t i = 0; i < pages.size(); ++i) {
        std::vector<std::byte> bytes = ReadPage(*pool_, buffer, pages[i]);
        ForEachRow(&bytes, [&](int64_t token, int64_t head, std::span<std::byte> row) {
          PatternRow(buffer, static_cast<int64_t>(i) * page_size() + token, head, row);
        });
        const BufferInfo& info = pool_->buffer_infos()[buffer];
        const BytesMove move{bytes.data(), info.address + pages[i] * info.item_bytes,
                             info.item_bytes};
        EXPECT_TRUE(IsOk(pool_->memory().MoveApart({&move, 1})));
      }
    }
  }
  // Page pages[i] holds the tokens from (first_page + i) * page_size on that were computed, of all
  // heads; behind the `held` tokens of the lease whichever of those of the same head. All other
  // pages are as they were, and so are the layers from `end_layer` on.
  testing::AssertionResult Holds(const std::vector<int64_t>& pages, int64_t first_page,
                                 int64_t held, int64_t end_layer = kLayers) const {
    for (int64_t page = 0; page < pool_->num_pages(); ++page) {
      const auto at = std::find(pages.begin(), pages.end(), page);
      for (int64_t buffer = 0; buffer < pool_->layout().num_buffers(); ++buffer) {
        const bool moved = at != pages.end() && buffer % kLayers < end_layer;
        const int64_t first_token = (first_page + (at - pages.begin())) * page_size();
        const bool right = moved ? HasTokens(buffer, page, first_token, held) : IsOwn(buffer, page);
        if (!right) {
          return testing::AssertionFailure()
                 << pool_->layout().ToString() << ": buffer " << buffer << " page " << page
                 << (moved ? " moved" : " not moved");
        }
      }
    }
    return testing::AssertionSuccess();
  }

 private:
  template <typename Fn>
  void ForEachRow(std::vector<std::byte>* page, const Fn& fn) const {
    const KvLayout& layout = pool_->layout();
    const int64_t tokens = layout.page_size, heads = heads_.count;
    const int64_t row = static_cast<int64_t>(page->size()) / tokens / heads;
    for (int64_t token = 0; token < tokens; ++token) {
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t place =
            layout.page_format == "HND" ? head * tokens + token : token * heads + head;
        fn(token, heads_.first + head, std::span(*page).subspan(place * row, row));
      }
    }
  }
  static void PatternRow(int64_t buffer, int64_t token, int64_t head, std::span<std::byte> row) {
    PatternBytes(kComputed, buffer, token * kTotalHeads + head, row);
  }
  bool HasTokens(int64_t buffer, int64_t page, int64_t first_token, int64_t held) const {
    bool right = true;
    std::vector<std::byte> bytes = ReadPage(*pool_, buffer, page);
    ForEachRow(&bytes, [&](int64_t token, int64_t head, std::span<std::byte> got) {
      std::vector<std::byte> want(got.size());
      const auto is = [&](int64_t of_token) {
        PatternRow(buffer, of_token, head, want);
        return std::equal(got.begin(), got.end(), want.begin());
      };
      const int64_t wanted = first_token + token;
      if (wanted < held) {
        right &= is(wanted);
        return;
      }
      bool of_lease = false;
      for (int64_t other = held - 1; other >= 0 && !of_lease; --other) of_lease = is(other);
      right &= of_lease;
    });
    return right;
  }
  bool IsOwn(int64_t buffer, int64_t page) const {
    std::vector<std::byte> want(pool_->buffer_infos()[buffer].item_bytes);
    PatternBytes(kOwn, buffer, page, want);
    return ReadPage(*pool_, buffer, page) == want;
  }

  HeadRange heads_;
  std::shared_ptr<KvPool> pool_;
};

EndpointOptions OptionsOf(const Rank& rank, const Config& config, const std::string& name) {
  EndpointOptions options{config, kTestModel, name, /*accept_pushes=*/name == "decode"};
  options.heads = rank.share();
  return options;
}

// Pages of the two sides, and a prompt that ends in the middle of one on either.
struct Sizes {
  int64_t prefill;
  int64_t decode;
  int64_t prefill_pages;

  int64_t held() const { return prefill * prefill_pages; }
  int64_t num_tokens() const { return held() - std::min<int64_t>(3, prefill - 1); }
  int64_t decode_pages() const { return DivideUp(num_tokens(), decode); }
};

// A pool of some more pages than are used, and which of them are.
struct Pages {
  Pages(int64_t count, std::mt19937_64* random)
      : in_pool(count + 9), used(MakePages("rand", count, in_pool, random)) {}
  int64_t in_pool;
  std::vector<int64_t> used;
};

using Shape = std::tuple<Sizes, int64_t>;

std::string NameOf(const Shape& shape) {
  const auto& [sizes, head_dim] = shape;
  return std::to_string(sizes.prefill) + "to" + std::to_string(sizes.decode) + "_dim" +
         std::to_string(head_dim);
}

class PagesMove : public testing::TestWithParam<Shape> {
 protected:
  Rank RankOf(const std::string& format, int64_t page_size, int64_t rank, int64_t size,
              int64_t num_pages) const {
    const HeadRange heads = Must(HeadsOfRank(kTotalHeads, rank, size));
    return {Layout(format, page_size, heads.count, head_dim_), heads, num_pages};
  }
  PrefillEndpoint::Publication Publication(const std::vector<int64_t>& pages) const {
    PrefillEndpoint::Publication publication;
    publication.pages = pages;
    publication.num_tokens = sizes_.num_tokens();
    publication.ready_layers = 1;
    return publication;
  }
  // In each order of either side.
  template <typename Fn>
  void InEachOrder(const Fn& fn) {
    for (const std::string from : {"NHD", "HND"}) {
      for (const std::string into : {"NHD", "HND"}) {
        SCOPED_TRACE(testing::Message() << from << " to " << into);
        from_ = from;
        into_ = into;
        fn();
      }
    }
  }
  // From every rank of a prefill side into every one of a decode side, layer by layer.
  void Move(int64_t prefill_size, int64_t decode_size, int64_t first_page);
  void Push();

  const Sizes sizes_ = std::get<0>(GetParam());
  const int64_t head_dim_ = std::get<1>(GetParam());
  std::string from_, into_;
  std::mt19937_64 random_{5};
};

void PagesMove::Move(int64_t prefill_size, int64_t decode_size, int64_t first_page) {
  SCOPED_TRACE(testing::Message() << prefill_size << " to " << decode_size);
  const Pages there(sizes_.prefill_pages, &random_);
  std::vector<Rank> computed;
  std::vector<std::unique_ptr<PrefillEndpoint>> prefills;
  std::vector<Ticket> tickets;
  for (int64_t i = 0; i < prefill_size; ++i) {
    computed.push_back(RankOf(from_, sizes_.prefill, i, prefill_size, there.in_pool));
    computed.back().Compute(there.used, 0, 1);
    prefills.push_back(Must(PrefillEndpoint::Create(
        computed.back().pool(), OptionsOf(computed.back(), SmallChunks(), "prefill"))));
    tickets.push_back(Must(prefills.back()->Publish(Publication(there.used))));
    EXPECT_EQ(tickets.back().num_pages, sizes_.prefill_pages);
  }
  const Pages here(sizes_.decode_pages() - first_page, &random_);
  std::vector<Rank> ranks;
  std::vector<std::unique_ptr<DecodeEndpoint>> decodes;
  std::vector<std::shared_ptr<FetchHandle>> handles;
  for (int64_t i = 0; i < decode_size; ++i) {
    ranks.push_back(RankOf(into_, sizes_.decode, i, decode_size, here.in_pool));
    decodes.push_back(Must(DecodeEndpoint::Create(
        ranks.back().pool(), OptionsOf(ranks.back(), SmallChunks(), "decode"))));
    for (const RankShare& share : Must(SharesFor(kTotalHeads, i, decode_size, prefill_size))) {
      handles.push_back(Must(decodes.back()->Fetch(tickets[share.rank], first_page, here.used, 0,
                                                   {share.heads, share.reader})));
      EXPECT_TRUE(IsOk(handles.back()->WaitLayer(0, Soon())));
    }
  }
  for (const Rank& rank : ranks) EXPECT_TRUE(rank.Holds(here.used, first_page, sizes_.held(), 1));
  for (int64_t i = 0; i < prefill_size; ++i) {
    computed[i].Compute(there.used, 1);
    EXPECT_TRUE(IsOk(prefills[i]->AllLayersReady(tickets[i].lease_id)));
  }
  for (const auto& handle : handles) {
    EXPECT_TRUE(IsOk(handle->Wait(Soon())));
    EXPECT_TRUE(handle->missing_pages().empty());
  }
  for (const Rank& rank : ranks) EXPECT_TRUE(rank.Holds(here.used, first_page, sizes_.held()));
  for (int64_t i = 0; i < prefill_size; ++i) {
    EXPECT_EQ(EndedLeases(prefills[i].get()).Wait(tickets[i].lease_id), "fetched");
    EXPECT_TRUE(computed[i].Holds(there.used, 0, sizes_.held()));
    // Rows of a head are long enough to be named one by one, or not.
    if (PathReadsThePool() && head_dim_ == 128) {
      EXPECT_GT(Metric(*prefills[i], "chunks_in_place"), 0);
    }
  }
}

TEST_P(PagesMove, AllHeads) {
  InEachOrder([&] { Move(1, 1, 0); });
}
TEST_P(PagesMove, BehindAPrefix) {
  InEachOrder([&] { Move(1, 1, 1); });
}
TEST_P(PagesMove, SomeHeadsOfOneForSeveral) {
  InEachOrder([&] { Move(1, 2, 1); });
}
TEST_P(PagesMove, HeadsOfSeveralForOne) {
  InEachOrder([&] { Move(4, 1, 0); });
}
TEST_P(PagesMove, Pushed) {
  InEachOrder([&] { Push(); });
}

void PagesMove::Push() {
  const HeadRange all{0, kTotalHeads};
  const Pages there(sizes_.prefill_pages, &random_), here(sizes_.decode_pages() - 1, &random_);
  const Rank computed(Layout(from_, sizes_.prefill, kTotalHeads, head_dim_), all, there.in_pool);
  const Rank rank(Layout(into_, sizes_.decode, kTotalHeads, head_dim_), all, here.in_pool);
  const auto prefill =
      Must(PrefillEndpoint::Create(computed.pool(), OptionsOf(computed, SmallChunks(), "prefill")));
  const auto decode =
      Must(DecodeEndpoint::Create(rank.pool(), OptionsOf(rank, SmallChunks(), "decode")));
  computed.Compute(there.used, 0, 1);
  // Whether or not both say how many tokens.
  for (const int64_t tokens : {sizes_.num_tokens(), int64_t{0}}) {
    const auto receive = Must(decode->Receive({1, here.used, tokens, 0}));
    EXPECT_EQ(receive.ticket.num_pages, sizes_.decode_pages());
    const auto push = Must(prefill->Push(receive.ticket, Publication(there.used), 0));
    ASSERT_TRUE(IsOk(receive.handle->WaitLayer(0, Soon())));
    computed.Compute(there.used, 1);
    ASSERT_TRUE(IsOk(prefill->AllLayersReady(push->lease_id())));
    ASSERT_TRUE(IsOk(push->Wait(Soon())));
    ASSERT_TRUE(IsOk(receive.handle->Wait(Soon())));
    EXPECT_TRUE(rank.Holds(here.used, 1, sizes_.held()));
  }
}

INSTANTIATE_TEST_SUITE_P(Loopback, PagesMove,
                         testing::Combine(testing::Values(Sizes{16, 64, 5}, Sizes{64, 16, 2},
                                                          Sizes{48, 32, 3}, Sizes{1, 16, 70},
                                                          Sizes{16, 1, 4}, Sizes{16, 16, 4}),
                                          testing::Values(128, 24)),
                         [](const auto& instance) { return NameOf(instance.param); });

// Pages of 16 tokens here, of 64 there.
class OtherPages : public testing::Test {
 protected:
  static constexpr HeadRange kAll{0, kTotalHeads};

  Ticket PublishPages(const std::vector<int64_t>& pages, int64_t ready_layers = kLayers) {
    return kvferry::Publish(*prefill_, *computed_.pool(), pages, ready_layers);
  }

  Rank computed_{Layout("NHD", 16, kTotalHeads, 32), kAll, 12};
  Rank rank_{Layout("HND", 64, kTotalHeads, 32), kAll, 6};
  std::unique_ptr<PrefillEndpoint> prefill_ = Must(
      PrefillEndpoint::Create(computed_.pool(), OptionsOf(computed_, SmallChunks(), "prefill")));
  std::unique_ptr<DecodeEndpoint> decode_ =
      Must(DecodeEndpoint::Create(rank_.pool(), OptionsOf(rank_, SmallChunks(), "decode")));
};

// The decode side knows no sizes but its own; the prefill side says what there is.
TEST_F(OtherPages, MoreThanTheLeaseHoldsIsRefusedWithBothCounts) {
  const Ticket ticket = PublishPages({1, 2, 3, 4, 5});
  EXPECT_TRUE(Fails(Must(decode_->Fetch(ticket, 1, {{0, 2}}, 0))->Wait(Soon()),
                    absl::StatusCode::kOutOfRange, "refused by",
                    "outside 5 pages of 16 tokens, which are 2 of 64"));
  EXPECT_TRUE(Fails(decode_->Fetch(ticket, 5, {{0}}, 0).status(), absl::StatusCode::kOutOfRange,
                    "5 pages"));
  EXPECT_TRUE(rank_.Holds({}, 0, 0));
  computed_.Compute({1, 2, 3, 4, 5});
  EXPECT_TRUE(IsOk(Must(decode_->Fetch(ticket, 1, {{3}}, 0))->Wait(Soon())));
  EXPECT_TRUE(rank_.Holds({3}, 1, 80));
}

// The other way round the ticket's pages are fewer than those that are fetched.
TEST_F(OtherPages, MorePagesThanTheTicketHas) {
  const auto prefill =
      Must(PrefillEndpoint::Create(rank_.pool(), OptionsOf(rank_, SmallChunks(), "prefill")));
  const auto decode =
      Must(DecodeEndpoint::Create(computed_.pool(), OptionsOf(computed_, SmallChunks(), "decode")));
  rank_.Compute({4, 2});
  PrefillEndpoint::Publication publication;
  publication.pages = {4, 2};
  publication.num_tokens = 70;
  publication.ready_layers = kLayers;
  const Ticket ticket = Must(prefill->Publish(publication));
  EXPECT_TRUE(Fails(decode->Fetch(ticket, 3, {{0, 1, 2}}, 0).status(),
                    absl::StatusCode::kOutOfRange, "5 pages"));
  EXPECT_TRUE(IsOk(Must(decode->Fetch(ticket, 1, {{8, 3, 0, 5}}, 0))->Wait(Soon())));
  EXPECT_TRUE(computed_.Holds({8, 3, 0, 5}, 1, 128));
  // All that the last page holds may be had, if the ticket does not say that there is less.
  Ticket whole = Must(prefill->Publish(publication));
  whole.num_tokens = 128;
  EXPECT_TRUE(IsOk(Must(decode->Fetch(whole, 6, {{9, 10}}, 0))->Wait(Soon())));
  EXPECT_TRUE(computed_.Holds({8, 3, 0, 5, -1, 9, 10}, 1, 128));
}

TEST_F(OtherPages, ACancelledFetchNamesItsOwnPages) {
  const Ticket ticket = PublishPages({1, 2, 3, 4, 5}, 1);
  const auto handle = Must(decode_->Fetch(ticket, 0, {{5, 1}}, 0));
  ASSERT_TRUE(IsOk(handle->WaitLayer(0, Soon())));
  handle->Cancel();
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kCancelled));
  EXPECT_EQ(handle->missing_pages(), (std::vector<int64_t>{5, 1}));
  // The lease goes on.
  computed_.Compute({1, 2, 3, 4, 5});
  ASSERT_TRUE(IsOk(prefill_->AllLayersReady(ticket.lease_id)));
  EXPECT_TRUE(IsOk(Must(decode_->Fetch(ticket, 0, {{5, 1}}, 0))->Wait(Soon())));
  EXPECT_TRUE(rank_.Holds({5, 1}, 0, 80));
}

// A request that is taken back and comes again goes on where its stream stood, which is in the
// fetcher's pages.
TEST_F(OtherPages, ARequestThatIsPublishedAgainGoesOn) {
  const std::vector<int64_t> pages = {1, 2, 3, 4, 5};
  computed_.Compute(pages);
  PrefillEndpoint::Publication publication;
  publication.pages = pages;
  publication.num_tokens = 80;
  publication.lease_id = 77;
  publication.ready_layers = 2;
  const Ticket agreed{prefill_->address(), 0, 77, 5, 80};
  const auto handle = Must(decode_->Fetch(agreed, 0, {{5, 1}}, 0));
  Must(prefill_->Publish(publication));
  ASSERT_TRUE(IsOk(handle->WaitLayer(1, Soon())));
  ASSERT_TRUE(IsOk(prefill_->Unpublish(77, Soon())));
  std::reverse(publication.pages.begin(), publication.pages.end());
  computed_.Compute(publication.pages);
  publication.ready_layers = kLayers;
  Must(prefill_->Publish(publication));
  EXPECT_TRUE(IsOk(handle->Wait(Soon())));
  EXPECT_TRUE(rank_.Holds({5, 1}, 0, 80));
}

// A receive of so many pages is one of a range of tokens, and so is a push.
TEST_F(OtherPages, PushesThatCannotBeOfTheSameRequest) {
  computed_.Compute({0, 1, 2, 3, 4, 5, 6, 7, 8});
  const auto push = [&](int64_t receive_tokens, int64_t pages, int64_t tokens) {
    const auto receive = Must(decode_->Receive({0, {5, 1}, receive_tokens, 0}));
    PrefillEndpoint::Publication publication;
    publication.pages.resize(pages);
    std::iota(publication.pages.begin(), publication.pages.end(), 0);
    publication.num_tokens = tokens;
    publication.ready_layers = kLayers;
    const absl::Status status = Must(prefill_->Push(receive.ticket, publication, 0))->Wait(Soon());
    EXPECT_EQ(receive.handle->done(), status.ok());
    receive.handle->Cancel();
    EXPECT_EQ(receive.handle->Wait(Soon()).ok(), status.ok());
    return status;
  };
  // Two of 64 are 65 to 128 tokens: 5 to 8 of 16.
  EXPECT_TRUE(Fails(push(0, 4, 0), absl::StatusCode::kFailedPrecondition,
                    "is of 2 pages (64 tokens each), the push of 4 (16 tokens each)"));
  EXPECT_TRUE(Fails(push(0, 9, 0), absl::StatusCode::kFailedPrecondition, "the push of 9"));
  EXPECT_TRUE(Fails(push(80, 5, 79), absl::StatusCode::kFailedPrecondition,
                    "is of 80 tokens, the push of 79"));
  // Both say as many tokens, and only one of them has pages for those.
  EXPECT_TRUE(Fails(push(80, 9, 80), absl::StatusCode::kFailedPrecondition, "the push of 9"));
  for (int64_t pages = 5; pages <= 8; ++pages) EXPECT_TRUE(IsOk(push(0, pages, 0)));
  EXPECT_TRUE(IsOk(push(80, 5, 80)));
}

// A latent has one head, whatever the order is called, and tensors of several numbers of heads have
// theirs token by token.
TEST(OtherPagesOf, LatentsAndTensorsThatDifferInHeads) {
  const auto moved = [](const KvLayout& from, const KvLayout& into) {
    const auto source = MakePatternPool(from, 10, kComputed);
    const auto target = MakePatternPool(into, 10, kOwn);
    const auto prefill = MakePrefill(source, SmallChunks());
    const auto decode = MakeDecode(target, SmallChunks());
    const Ticket ticket = Publish(*prefill, *source, {7, 2, 5, 0});
    KVFERRY_RETURN_IF_ERROR(Fetch(*decode, ticket, {3, 1})->Wait(Soon()));
    for (int64_t buffer = 0; buffer < from.num_buffers(); ++buffer) {
      std::vector<std::byte> want, got;
      for (const int64_t page : {7, 2, 5, 0}) {
        const auto bytes = ReadPage(*source, buffer, page);
        want.insert(want.end(), bytes.begin(), bytes.end());
      }
      for (const int64_t page : {3, 1}) {
        const auto bytes = ReadPage(*target, buffer, page);
        got.insert(got.end(), bytes.begin(), bytes.end());
      }
      EXPECT_EQ(got, want) << "buffer " << buffer;
    }
    return absl::OkStatus();
  };
  for (const auto& [from, into] : std::vector<std::pair<std::string, std::string>>{
           {"ND", "ND"}, {"NHD", "NHD"}, {"NHD", "HND"}, {"ND", "NHD"}}) {
    KvLayout latent = KvLayout::Mla(3, 8, 72, DType::kBFloat16), large = latent;
    large.page_size = 16;
    latent.page_format = from;
    large.page_format = into;
    EXPECT_TRUE(IsOk(moved(latent, large))) << from << " to " << into;
  }
  KvLayout odd = LayoutNamed("odd"), large = odd;
  large.page_size = 10;
  EXPECT_TRUE(Fails(moved(odd, large), absl::StatusCode::kFailedPrecondition,
                    "page_size: 5 here, 10 there",
                    "engine's own is an arrangement of an engine's own"));
  odd.page_format = large.page_format = "NHD";
  EXPECT_TRUE(IsOk(moved(odd, large)));
  odd.page_format = large.page_format = "HND";
  EXPECT_TRUE(Fails(moved(odd, large), absl::StatusCode::kFailedPrecondition,
                    "page_size: 5 here, 10 there", "tensors differ in heads"));
}

}  // namespace
}  // namespace kvferry
