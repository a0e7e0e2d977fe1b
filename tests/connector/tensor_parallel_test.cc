#include "connector/tensor_parallel.h"

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <set>
#include <vector>

#include "tests/support/status.h"

namespace kvferry {
namespace {

TEST(TensorParallel, HeadsOfARank) {
  EXPECT_EQ(Must(HeadsOfRank(8, 0, 1)), (HeadRange{0, 8}));
  EXPECT_EQ(Must(HeadsOfRank(8, 3, 4)), (HeadRange{6, 2}));
  // More ranks than heads: in vLLM ranks 2 and 3 of 8 both hold head 1 of 4.
  EXPECT_EQ(Must(HeadsOfRank(4, 2, 8)), (HeadRange{1, 1}));
  EXPECT_EQ(Must(HeadsOfRank(4, 3, 8)), (HeadRange{1, 1}));
  EXPECT_EQ(Must(HeadsOfRank(1, 3, 4)), (HeadRange{0, 1}));  // A latent.
  for (const auto& [heads, rank, size] : std::vector<std::array<int64_t, 3>>{
           {0, 0, 1}, {8, 0, 0}, {8, -1, 2}, {8, 2, 2}, {8, 0, 3}, {4, 0, 6}, {-8, 0, 2}}) {
    EXPECT_TRUE(Fails(HeadsOfRank(heads, rank, size), absl::StatusCode::kInvalidArgument,
                      "tensor-parallel rank"));
  }
  // Numbers that nobody has: they would take for ever to go through.
  constexpr int64_t kHuge = int64_t{1} << 62;
  constexpr int64_t kMost = kMaxTensorParallel;
  EXPECT_EQ(Must(HeadsOfRank(kMost, 1, kMost)), (HeadRange{1, 1}));
  for (const auto& [heads, size, prefill_size] : std::vector<std::array<int64_t, 3>>{
           {kHuge, 8, 4}, {8, kHuge, 4}, {8, 4, kHuge}, {2 * kMost, 8, 4}}) {
    EXPECT_TRUE(Fails(SharesFor(heads, 0, size, prefill_size), absl::StatusCode::kInvalidArgument,
                      "limit 1048576 of either"));
  }
  EXPECT_TRUE(Fails(SharesFor(8, 0, 2, 3), absl::StatusCode::kInvalidArgument, "of 3 with 8"));
  EXPECT_TRUE(Fails(SharesFor(8, 2, 2, 2), absl::StatusCode::kInvalidArgument, "rank 2 of 2"));
  EXPECT_TRUE(Fails(SharesFor(1, 0, 65, 1), absl::StatusCode::kInvalidArgument, "limit 64"));
}

// Every decode rank gets each of its heads once, from a rank that holds it; every prefill rank
// hears from as many readers as each of them says, or is let go by one.
TEST(TensorParallel, AllPairsOfSizes) {
  int pairs = 0;
  for (const int64_t heads : {1, 2, 3, 4, 6, 8, 12}) {
    for (int64_t prefill_size = 1; prefill_size <= 24; ++prefill_size) {
      for (int64_t size = 1; size <= 24; ++size) {
        if (!HeadsOfRank(heads, 0, size).ok() || !HeadsOfRank(heads, 0, prefill_size).ok())
          continue;
        ++pairs;
        std::map<int64_t, std::vector<LeaseReader>> readers;
        std::map<int64_t, int> let_go;
        for (int64_t rank = 0; rank < size; ++rank) {
          const HeadRange own = Must(HeadsOfRank(heads, rank, size));
          std::set<int64_t> got;
          for (const RankShare& share : Must(SharesFor(heads, rank, size, prefill_size))) {
            if (share.heads.count == 0) {
              ++let_go[share.rank];
              EXPECT_EQ(share.reader, LeaseReader());
              continue;
            }
            readers[share.rank].push_back(share.reader);
            const HeadRange theirs = Must(HeadsOfRank(heads, share.rank, prefill_size));
            for (int64_t head = share.heads.first; head < share.heads.first + share.heads.count;
                 ++head) {
              EXPECT_TRUE(got.insert(head).second);
              EXPECT_TRUE(head >= theirs.first && head < theirs.first + theirs.count);
              EXPECT_TRUE(head >= own.first && head < own.first + own.count);
            }
          }
          EXPECT_EQ(static_cast<int64_t>(got.size()), own.count);
        }
        for (int64_t rank = 0; rank < prefill_size; ++rank) {
          const std::vector<LeaseReader>& its = readers[rank];
          EXPECT_EQ(let_go[rank], its.empty() ? 1 : 0);
          std::set<int64_t> indexes;
          for (const LeaseReader& reader : its) {
            EXPECT_EQ(reader.of, static_cast<int64_t>(its.size()));
            EXPECT_TRUE(reader.index >= 0 && reader.index < reader.of);
            indexes.insert(reader.index);
          }
          EXPECT_EQ(indexes.size(), its.size());
        }
      }
    }
  }
  EXPECT_GT(pairs, 300);
}

// Of ranks that hold the same heads each one serves, not only the first.
TEST(TensorParallel, RanksWithTheSameHeadsShareTheReaders) {
  for (int64_t rank = 0; rank < 4; ++rank) {
    const std::vector<RankShare> shares = Must(SharesFor(2, rank, 4, 4));
    ASSERT_EQ(shares.size(), 1u);
    EXPECT_EQ(shares[0].rank, rank);
    EXPECT_EQ(shares[0].reader, LeaseReader());
  }
}

}  // namespace
}  // namespace kvferry
