// Whole transfers in one process, over real UCX and ZeroMQ: every byte of every page is checked,
// and so is every page that nobody asked for.

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <tuple>

#include "tests/support/endpoints.h"

namespace kvferry {
namespace {

constexpr uint64_t kSourceSeed = 1;
constexpr uint64_t kOwnSeed = 2;
constexpr int64_t kPoolPages = 96;

class Move : public testing::TestWithParam<std::tuple<std::string, std::string, int64_t>> {};

TEST_P(Move, EveryByteAndNoOther) {
  const auto& [layout_name, shape, first_page] = GetParam();
  std::mt19937_64 random(7);
  const KvLayout layout = LayoutNamed(layout_name);
  const auto source = MakePatternPool(layout, kPoolPages, kSourceSeed);
  const auto target = MakePatternPool(layout, kPoolPages + 3, kOwnSeed);
  const auto prefill = MakePrefill(source, SmallChunks());
  const auto decode = MakeDecode(target, SmallChunks());

  const std::vector<int64_t> published = MakePages(shape, 40, kPoolPages, &random);
  const std::vector<int64_t> local = MakePages(shape, 40 - first_page, kPoolPages, &random);
  const Ticket ticket = Publish(*prefill, *source, published);
  const auto handle = Fetch(*decode, ticket, local, first_page);
  ASSERT_TRUE(IsOk(handle->Wait(Soon())));

  const std::vector<int64_t> wanted(published.begin() + first_page, published.end());
  EXPECT_TRUE(HoldsExactly(*target, kOwnSeed, local, kSourceSeed, wanted));
  EXPECT_TRUE(IsUntouched(*source, kSourceSeed));
  EXPECT_EQ(handle->layers_done(), layout.num_layers);
  EXPECT_TRUE(handle->missing_pages().empty());
  const int64_t mapped = PathIsOverANetwork() ? 0 : 1;
  EXPECT_EQ(Metric(*prefill, "peers_mapped"), mapped);
  EXPECT_EQ(Metric(*decode, "peers_mapped"), mapped);
  // Small pages are cheaper to gather.
  const bool in_place = PathReadsThePool() && layout_name != "odd";
  EXPECT_EQ(Metric(*prefill, "chunks_in_place") > 0, in_place);
  const FetchReport report = handle->report();
  EXPECT_EQ(report.total_bytes, static_cast<int64_t>(local.size()) * layout.page_bytes());
  EXPECT_EQ(report.bytes_done, report.total_bytes);
  EXPECT_EQ(EndedLeases(prefill.get()).Wait(ticket.lease_id), "fetched");
}

INSTANTIATE_TEST_SUITE_P(Loopback, Move,
                         testing::Combine(testing::Values("mha", "fused", "mla", "odd"),
                                          testing::Values("seq", "runs8", "rand"),
                                          testing::Values(0, 13, 39)),
                         [](const auto& instance) {
                           return std::get<0>(instance.param) + "_" + std::get<1>(instance.param) +
                                  "_from" + std::to_string(std::get<2>(instance.param));
                         });

// Both sides use as many lanes as the one that has fewer.
class Lanes : public testing::TestWithParam<std::pair<int64_t, int64_t>> {};

TEST_P(Lanes, ShareATransfer) {
  Config prefill_config = SmallChunks();
  prefill_config.same_host_path = "network";
  prefill_config.network_path = "packed";
  prefill_config.lanes = GetParam().first;
  Config decode_config = prefill_config;
  decode_config.lanes = GetParam().second;
  const KvLayout layout = KvLayout::Mha(8, 16, 8, 64, DType::kBFloat16);
  const auto source = MakePatternPool(layout, kPoolPages, kSourceSeed);
  const auto target = MakePatternPool(layout, kPoolPages, kOwnSeed);
  const auto prefill = MakePrefill(source, prefill_config);
  const auto decode = MakeDecode(target, decode_config);
  std::mt19937_64 random(3);
  for (int round = 0; round < 8; ++round) {
    FillPattern(*target, kOwnSeed);
    const std::vector<int64_t> published = MakePages("rand", 40, kPoolPages, &random);
    const std::vector<int64_t> local = MakePages("rand", 40, kPoolPages, &random);
    const auto handle = Fetch(*decode, Publish(*prefill, *source, published), local);
    ASSERT_TRUE(IsOk(handle->Wait(Soon())));
    ASSERT_TRUE(HoldsExactly(*target, kOwnSeed, local, kSourceSeed, published));
  }
  const bool shared = std::min(GetParam().first, GetParam().second) > 1;
  EXPECT_EQ(Metric(*prefill, "chunks_in_lanes") > 0, shared);
  EXPECT_EQ(Metric(*decode, "chunks_dropped"), 0);
}

INSTANTIATE_TEST_SUITE_P(Loopback, Lanes,
                         testing::Values(std::pair{1, 1}, std::pair{2, 2}, std::pair{1, 3},
                                         std::pair{4, 1}, std::pair{4, 2}, std::pair{3, 8}),
                         [](const auto& instance) {
                           return std::to_string(instance.param.first) + "_and_" +
                                  std::to_string(instance.param.second);
                         });

// Chunk and window sizes that do not divide anything, on sides that disagree about them.
class Chunks : public testing::TestWithParam<std::tuple<int64_t, int64_t, int64_t>> {};

TEST_P(Chunks, AnySizesAgree) {
  const auto& [prefill_chunk, decode_chunk, credits] = GetParam();
  Config prefill_config = SmallChunks();
  prefill_config.chunk_bytes = prefill_chunk;
  Config decode_config = SmallChunks();
  decode_config.chunk_bytes = decode_chunk;
  decode_config.credits_per_transfer = credits;
  // A layer is 20480 bytes; no chunk size here divides it.
  const KvLayout layout = KvLayout::Mha(6, 16, 2, 32, DType::kBFloat16);
  const auto source = MakePatternPool(layout, 10, kSourceSeed);
  const auto target = MakePatternPool(layout, 10, kOwnSeed);
  const auto prefill = MakePrefill(source, prefill_config);
  const auto decode = MakeDecode(target, decode_config);
  const std::vector<int64_t> pages = {9, 1, 2, 3, 0};
  const auto handle = Fetch(*decode, Publish(*prefill, *source, pages), pages);
  ASSERT_TRUE(IsOk(handle->Wait(Soon())));
  EXPECT_TRUE(HoldsExactly(*target, kOwnSeed, pages, kSourceSeed, pages));
}

INSTANTIATE_TEST_SUITE_P(Loopback, Chunks,
                         testing::Combine(testing::Values(4 << 10, 13001, 256 << 10),
                                          testing::Values(4 << 10, 13001, 256 << 10),
                                          testing::Values(1, 2, 3, 5, 16)),
                         [](const auto& instance) {
                           return "prefill" + std::to_string(std::get<0>(instance.param)) +
                                  "_decode" + std::to_string(std::get<1>(instance.param)) +
                                  "_credits" + std::to_string(std::get<2>(instance.param));
                         });

TEST(Loopback, ArenaOfOneChunkMovesARequestManyTimesItsSize) {
  Config config = SmallChunks();
  config.chunk_bytes = config.arena_bytes = 64 << 10;
  const KvLayout layout = KvLayout::Mha(8, 16, 8, 64, DType::kBFloat16);
  const auto source = MakePatternPool(layout, 128, kSourceSeed);  // 32 MiB
  const auto target = MakePatternPool(layout, 128, kOwnSeed);
  const auto prefill = MakePrefill(source, config);
  const auto decode = MakeDecode(target, config);
  std::mt19937_64 random(3);
  const std::vector<int64_t> pages = MakePages("rand", 128, 128, &random);
  const auto handle = Fetch(*decode, Publish(*prefill, *source, pages), pages);
  ASSERT_TRUE(IsOk(handle->Wait(Soon())));
  EXPECT_TRUE(HoldsPages(*target, pages, kSourceSeed, pages, 0, 8));
  EXPECT_EQ(Metric(*prefill, "arena_chunks"), 1);
}

TEST(Loopback, ChecksumsHoldAndAreAskedForByTheDecodeSide) {
  Config checked = SmallChunks();
  checked.checksum = true;
  const auto source = MakePatternPool(SmallLayout(), 32, kSourceSeed);
  const auto target = MakePatternPool(SmallLayout(), 32, kOwnSeed);
  const auto prefill = MakePrefill(source, SmallChunks());
  const auto decode = MakeDecode(target, checked);
  const std::vector<int64_t> pages = {31, 0, 7, 8, 9};
  const auto handle = Fetch(*decode, Publish(*prefill, *source, pages), pages);
  ASSERT_TRUE(IsOk(handle->Wait(Soon())));
  EXPECT_TRUE(HoldsExactly(*target, kOwnSeed, pages, kSourceSeed, pages));
  EXPECT_EQ(Metric(*decode, "checksum_failures"), 0);
}

TEST(Loopback, ManyFetchesAtOnce) {
  constexpr int64_t kFetches = 32;
  constexpr int64_t kPagesEach = 12;
  const auto source = MakePatternPool(SmallLayout(), kFetches * kPagesEach, kSourceSeed);
  const auto target = MakePatternPool(SmallLayout(), kFetches * kPagesEach, kOwnSeed);
  Config config = SmallChunks();
  config.arena_bytes = 64 << 10;  // Sixteen chunks for thirty-two transfers.
  const auto prefill = MakePrefill(source, config);
  const auto decode = MakeDecode(target, config);
  std::mt19937_64 random(11);
  const auto from = MakePages("rand", kFetches * kPagesEach, kFetches * kPagesEach, &random);
  const auto to = MakePages("rand", kFetches * kPagesEach, kFetches * kPagesEach, &random);
  std::vector<std::shared_ptr<FetchHandle>> handles;
  std::vector<uint64_t> leases;
  for (int64_t i = 0; i < kFetches; ++i) {
    const auto part = [&](const std::vector<int64_t>& all) {
      return std::vector<int64_t>(all.begin() + i * kPagesEach, all.begin() + (i + 1) * kPagesEach);
    };
    const Ticket ticket = Publish(*prefill, *source, part(from));
    leases.push_back(ticket.lease_id);
    handles.push_back(Fetch(*decode, ticket, part(to)));
  }
  for (const auto& handle : handles) EXPECT_TRUE(IsOk(handle->Wait(Soon())));
  EXPECT_TRUE(HoldsExactly(*target, kOwnSeed, to, kSourceSeed, from));
  EndedLeases ended(prefill.get());
  for (const uint64_t lease : leases) EXPECT_EQ(ended.Wait(lease), "fetched");
  EXPECT_TRUE(WaitFor([&] { return Metric(*prefill, "arena_chunks_taken") == 0; }, Soon()));
}

TEST(Loopback, SeveralPrefillAndDecodeEndpointsCrosswise) {
  constexpr int kSides = 3;
  constexpr int64_t kPagesEach = 10;
  std::vector<std::shared_ptr<KvPool>> sources;
  std::vector<std::shared_ptr<KvPool>> targets;
  std::vector<std::unique_ptr<PrefillEndpoint>> prefills;
  std::vector<std::unique_ptr<DecodeEndpoint>> decodes;
  for (int i = 0; i < kSides; ++i) {
    sources.push_back(MakePatternPool(SmallLayout(), kSides * kPagesEach, 100 + i));
    targets.push_back(MakePatternPool(SmallLayout(), kSides * kPagesEach, 200 + i));
    prefills.push_back(MakePrefill(sources[i], SmallChunks()));
    decodes.push_back(MakeDecode(targets[i], SmallChunks()));
  }
  const auto block = [](int64_t index) {  // The pages of one pairing, last first.
    std::vector<int64_t> pages;
    for (int64_t i = kPagesEach - 1; i >= 0; --i) pages.push_back(index * kPagesEach + i);
    return pages;
  };
  std::vector<std::shared_ptr<FetchHandle>> handles;
  for (int p = 0; p < kSides; ++p) {
    for (int d = 0; d < kSides; ++d) {
      handles.push_back(Fetch(*decodes[d], Publish(*prefills[p], *sources[p], block(d)), block(p)));
    }
  }
  for (const auto& handle : handles) ASSERT_TRUE(IsOk(handle->Wait(Soon())));
  for (int p = 0; p < kSides; ++p) {
    for (int d = 0; d < kSides; ++d) {
      EXPECT_TRUE(HoldsPages(*targets[d], block(p), 100 + p, block(d), 0, SmallLayout().num_layers))
          << "prefill " << p << " decode " << d;
    }
  }
}

TEST(Loopback, EmptyFetchEndsTheLeaseAsFetched) {
  const auto source = MakePatternPool(SmallLayout(), 8, kSourceSeed);
  const auto target = MakePatternPool(SmallLayout(), 8, kOwnSeed);
  const auto prefill = MakePrefill(source, SmallChunks());
  const auto decode = MakeDecode(target, SmallChunks());
  const Ticket ticket = Publish(*prefill, *source, {1, 2, 3}, 0);
  ASSERT_TRUE(IsOk(Fetch(*decode, ticket, {}, 3)->Wait(Soon())));
  EXPECT_EQ(EndedLeases(prefill.get()).Wait(ticket.lease_id), "fetched");
  EXPECT_TRUE(IsUntouched(*target, kOwnSeed));
  EXPECT_EQ(Metric(*prefill, "chunks_sent"), 0);
}

// The session is opened once and kept.
TEST(Loopback, OneSessionServesOneFetchAfterAnother) {
  const auto source = MakePatternPool(SmallLayout(), 16, kSourceSeed);
  const auto target = MakePatternPool(SmallLayout(), 16, kOwnSeed);
  const auto prefill = MakePrefill(source, SmallChunks());
  const auto decode = MakeDecode(target, SmallChunks());
  for (int64_t i = 0; i < 50; ++i) {
    const std::vector<int64_t> from = {i % 16, (i + 5) % 16};
    const std::vector<int64_t> to = {(i + 9) % 16, (i + 2) % 16};
    FillPattern(*target, kOwnSeed);
    ASSERT_TRUE(IsOk(Fetch(*decode, Publish(*prefill, *source, from), to)->Wait(Soon())));
    ASSERT_TRUE(HoldsExactly(*target, kOwnSeed, to, kSourceSeed, from)) << "fetch " << i;
  }
  EXPECT_EQ(Metric(*prefill, "peers"), 1);
  EXPECT_EQ(Metric(*prefill, "peers_lost"), 0);
  EXPECT_TRUE(WaitFor([&] { return Metric(*prefill, "transfers_ok") == 50; }, Soon()));
}

}  // namespace
}  // namespace kvferry
