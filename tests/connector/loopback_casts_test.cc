// Sides with values of other dtypes and scales: each value comes to where the decode side has its
// place, as the nearest that it can store, over every path, and nothing else changes.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/pool/naive_numbers.h"
#include "tests/support/endpoints.h"

namespace kvferry {
namespace {

constexpr int64_t kLayers = 3, kHeads = 2, kHeadDim = 72;
constexpr int64_t kComputed = 1, kOwn = 2;  // Seeds.

// One side's pages, any bytes in them: every value that there is, infinities and NaN too.
struct Side {
  DType dtype;
  std::vector<float> scales{};
  std::string format = "NHD";
  int64_t page_size = 16;

  KvLayout layout() const {
    KvLayout layout = KvLayout::Mha(kLayers, page_size, kHeads, kHeadDim, dtype);
    layout.page_format = format;
    layout.tensors.push_back({"label", kHeads, 8, DType::kUint8});  // Bytes of somebody's own.
    return layout;
  }
  float scale(int64_t buffer) const { return scales.empty() ? 1 : scales[buffer]; }
  EndpointOptions options(const std::string& name) const {
    EndpointOptions options{SmallChunks(), kTestModel, name, /*accept_pushes=*/name == "decode"};
    options.scales = scales;
    return options;
  }
};

// By buffer, K first.
std::vector<float> Scales(float first, float step) {
  std::vector<float> scales;
  for (int64_t i = 0; i < 3 * kLayers; ++i) scales.push_back(first + step * static_cast<float>(i));
  return scales;
}

// Where a value of a page of that side lies in it, in values.
int64_t PlaceOf(const Side& side, int64_t head_dim, int64_t token, int64_t head, int64_t dim) {
  const int64_t row = side.format == "HND" ? head * side.page_size + token : token * kHeads + head;
  return row * head_dim + dim;
}

class Pages {
 public:
  Pages(const Side& side, int64_t num_pages, uint64_t seed)
      : side_(side), pool_(MakePatternPool(side.layout(), num_pages, seed)) {}

  const std::shared_ptr<KvPool>& pool() const { return pool_; }
  // What is in one page of one buffer now.
  std::vector<std::byte> Page(int64_t buffer, int64_t page) const {
    return ReadPage(*pool_, buffer, page);
  }

  // Page pages[i] holds the tokens from (first_page + i) * page_size on of those that the pages
  // `of` of `from` hold, and all other pages are as they were.
  testing::AssertionResult Hold(const std::vector<int64_t>& pages, int64_t first_page,
                                const Pages& from, const std::vector<int64_t>& of) const {
    for (int64_t page = 0; page < pool_->num_pages(); ++page) {
      const auto at = std::find(pages.begin(), pages.end(), page);
      for (int64_t buffer = 0; buffer < pool_->layout().num_buffers(); ++buffer) {
        const int64_t first_token = (first_page + (at - pages.begin())) * side_.page_size;
        const bool right = at == pages.end() ? IsOwn(buffer, page)
                                             : HasTokens(buffer, page, first_token, from, of);
        if (!right) {
          return testing::AssertionFailure() << "buffer " << buffer << " page " << page
                                             << (at == pages.end() ? " not" : "") << " moved";
        }
      }
    }
    return testing::AssertionSuccess();
  }

 private:
  bool IsOwn(int64_t buffer, int64_t page) const {
    std::vector<std::byte> want(pool_->buffer_infos()[buffer].item_bytes);
    PatternBytes(kOwn, buffer, page, want);
    return Page(buffer, page) == want;
  }
  bool HasTokens(int64_t buffer, int64_t page, int64_t first_token, const Pages& from,
                 const std::vector<int64_t>& of) const {
    const Side& there = from.side_;
    const KvTensor& tensor = pool_->layout().tensors[buffer / kLayers];
    const bool numbers = tensor.dtype != DType::kUint8;
    const NaiveFormat& ours = NaiveFormat::Of(side_.dtype);
    const NaiveFormat& theirs = NaiveFormat::Of(there.dtype);
    const std::vector<std::byte> got = Page(buffer, page);
    bool right = true;
    for (int64_t token = 0; token < side_.page_size; ++token) {
      const int64_t of_request = first_token + token;
      const std::vector<std::byte> source = from.Page(buffer, of[of_request / there.page_size]);
      for (int64_t head = 0; head < kHeads; ++head) {
        for (int64_t dim = 0; dim < tensor.head_dim; ++dim) {
          const int64_t at = PlaceOf(side_, tensor.head_dim, token, head, dim);
          const int64_t source_at =
              PlaceOf(there, tensor.head_dim, of_request % there.page_size, head, dim);
          if (!numbers) {
            right &= got[at] == source[source_at];
            continue;
          }
          const float value = theirs.Decode(source.data() + source_at * theirs.bytes()) *
                              there.scale(buffer) / side_.scale(buffer);
          right &= ours.IsEncodingOf(value, got.data() + at * ours.bytes());
        }
      }
    }
    return right;
  }

  const Side side_;
  const std::shared_ptr<KvPool> pool_;
};

struct Pair {
  std::string name;
  Side prefill, decode;
};

std::vector<Pair> Pairs() {
  return {
      {"Bf16ToScaledE4m3", {DType::kBFloat16}, {DType::kFloat8E4M3, Scales(0.5F, 0.25F)}},
      {"ScaledE4m3ToBf16", {DType::kFloat8E4M3, Scales(0.125F, 0.5F)}, {DType::kBFloat16}},
      {"Fp32ToFp16InOtherPages", {DType::kFloat32}, {DType::kFloat16, {}, "HND", 32}},
      {"E5m2ToFp32InOtherPages", {DType::kFloat8E5M2, {}, "HND"}, {DType::kFloat32, {}, "NHD", 8}},
      {"E4m3OfAnotherScale",
       {DType::kFloat8E4M3, Scales(1, 0.5F)},
       {DType::kFloat8E4M3, Scales(0.75F, 0.25F)}},
  };
}

class ValuesMove : public testing::TestWithParam<Pair> {
 protected:
  const Side& there() const { return GetParam().prefill; }
  const Side& here() const { return GetParam().decode; }
  // Pages of the decode side that all tokens fill.
  int64_t num_here() const {
    return static_cast<int64_t>(of_.size()) * there().page_size / here().page_size;
  }
  std::vector<int64_t> Into(int64_t count) {
    return MakePages("rand", count, target_.pool()->num_pages(), &random_);
  }

  std::mt19937_64 random_{5};
  const std::vector<int64_t> of_ = {7, 2, 3, 4, 11, 0};
  const Pages computed_{there(), 12, kComputed};
  const Pages target_{here(), 16, kOwn};
  std::unique_ptr<PrefillEndpoint> prefill_ =
      Must(PrefillEndpoint::Create(computed_.pool(), there().options("prefill")));
  std::unique_ptr<DecodeEndpoint> decode_ =
      Must(DecodeEndpoint::Create(target_.pool(), here().options("decode")));
};

TEST_P(ValuesMove, LayerByLayerBehindAPrefix) {
  const std::vector<int64_t> into = Into(num_here() - 1);
  const Ticket ticket = Publish(*prefill_, *computed_.pool(), of_, 1);
  const auto handle = Fetch(*decode_, ticket, into, 1);
  ASSERT_TRUE(IsOk(handle->WaitLayer(0, Soon())));
  ASSERT_TRUE(IsOk(prefill_->AllLayersReady(ticket.lease_id)));
  ASSERT_TRUE(IsOk(handle->Wait(Soon())));
  EXPECT_TRUE(target_.Hold(into, 1, computed_, of_));
  EXPECT_EQ(EndedLeases(prefill_.get()).Wait(ticket.lease_id), "fetched");
  EXPECT_EQ(Metric(*prefill_, "transfers_cast"), 1);
  EXPECT_EQ(Metric(*prefill_, "chunks_in_place"), 0);
  EXPECT_EQ(Metric(*decode_, "bytes_received"),
            static_cast<int64_t>(into.size()) * target_.pool()->layout().page_bytes());
}

TEST_P(ValuesMove, Pushed) {
  const std::vector<int64_t> into = Into(num_here());
  const auto receive =
      Must(decode_->Receive({0, into, static_cast<int64_t>(of_.size()) * there().page_size, 0}));
  const auto push = Push(*prefill_, receive.ticket, *computed_.pool(), of_);
  ASSERT_TRUE(IsOk(push->Wait(Soon())));
  ASSERT_TRUE(IsOk(receive.handle->Wait(Soon())));
  EXPECT_TRUE(target_.Hold(into, 0, computed_, of_));
}

// The stream goes on where it stood, in the fetcher's bytes.
TEST_P(ValuesMove, PublishedAgain) {
  const std::vector<int64_t> into = Into(num_here());
  PrefillEndpoint::Publication publication;
  publication.pages = of_;
  publication.num_tokens = static_cast<int64_t>(of_.size()) * there().page_size;
  publication.lease_id = 77;
  publication.ready_layers = 2;
  const Ticket agreed{prefill_->address(), 0, 77, static_cast<int64_t>(of_.size()),
                      publication.num_tokens};
  const auto handle = Fetch(*decode_, agreed, into);
  Must(prefill_->Publish(publication));
  ASSERT_TRUE(IsOk(handle->WaitLayer(1, Soon())));
  ASSERT_TRUE(IsOk(prefill_->Unpublish(77, Soon())));
  publication.ready_layers = kLayers;
  Must(prefill_->Publish(publication));
  ASSERT_TRUE(IsOk(handle->Wait(Soon())));
  EXPECT_TRUE(target_.Hold(into, 0, computed_, of_));
}

TEST_P(ValuesMove, ACancelledFetchNamesItsPages) {
  const std::vector<int64_t> into = Into(num_here());
  const Ticket ticket = Publish(*prefill_, *computed_.pool(), of_, 1);
  const auto handle = Fetch(*decode_, ticket, into);
  ASSERT_TRUE(IsOk(handle->WaitLayer(0, Soon())));
  handle->Cancel();
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kCancelled));
  EXPECT_EQ(handle->missing_pages(), into);
}

INSTANTIATE_TEST_SUITE_P(Loopback, ValuesMove, testing::ValuesIn(Pairs()),
                         [](const auto& instance) { return instance.param.name; });

// What a checksum is of is what moves.
TEST(ValuesMoveOnce, WithChecksums) {
  const Side there{DType::kBFloat16}, here{DType::kFloat8E4M3, Scales(2, 1)};
  const Pages computed(there, 6, kComputed), target(here, 6, kOwn);
  EndpointOptions options = here.options("decode");
  options.config.checksum = true;
  const auto prefill = Must(PrefillEndpoint::Create(computed.pool(), there.options("prefill")));
  const auto decode = Must(DecodeEndpoint::Create(target.pool(), options));
  const Ticket ticket = Publish(*prefill, *computed.pool(), {5, 1, 2});
  ASSERT_TRUE(IsOk(Fetch(*decode, ticket, {0, 4, 3})->Wait(Soon())));
  EXPECT_TRUE(target.Hold({0, 4, 3}, 0, computed, {5, 1, 2}));
}

// Sides that say the same of their values are served as ever, whatever that is.
TEST(ValuesMoveOnce, EqualScalesAreNoReasonToCast) {
  const Side side{DType::kFloat8E4M3, Scales(2, 1)};
  const auto source = MakePatternPool(side.layout(), 6, kComputed);
  const auto target = MakePatternPool(side.layout(), 6, kOwn);
  const auto prefill = Must(PrefillEndpoint::Create(source, side.options("prefill")));
  const auto decode = Must(DecodeEndpoint::Create(target, side.options("decode")));
  ASSERT_TRUE(IsOk(Fetch(*decode, Publish(*prefill, *source, {5, 1, 2}), {0, 4, 3})->Wait(Soon())));
  EXPECT_TRUE(HoldsExactly(*target, kOwn, std::vector<int64_t>{0, 4, 3}, kComputed,
                           std::vector<int64_t>{5, 1, 2}));
  EXPECT_EQ(Metric(*prefill, "transfers_cast"), 0);
}

TEST(ValuesMoveOnce, ScalesThatCannotBe) {
  const Side side{DType::kFloat8E4M3};
  const auto pool = MakePatternPool(side.layout(), 6, kOwn);
  EndpointOptions options = side.options("decode");
  options.scales = {1, 2};
  EXPECT_TRUE(Fails(DecodeEndpoint::Create(pool, options).status(),
                    absl::StatusCode::kInvalidArgument, "2 scales, not one for each of 9 buffers",
                    "3 layers x 3 tensors"));
  options.scales = Scales(1, 1);
  options.scales[4] = 0;
  EXPECT_TRUE(Fails(PrefillEndpoint::Create(pool, options).status(),
                    absl::StatusCode::kInvalidArgument, "the scale of buffer 4 is 0"));
}

}  // namespace
}  // namespace kvferry
