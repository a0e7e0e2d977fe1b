#include "pool/block_tables.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/support/failing_new.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

using Ids = std::vector<int64_t>;
using Counts = std::vector<int64_t>;
using Row = std::vector<int32_t>;
using Preempted = std::vector<BlockTables::Preempted>;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;
constexpr int64_t kInt64Max = std::numeric_limits<int64_t>::max();

BlockTables Make(int64_t num_blocks, int64_t block_size, int64_t max_sequences) {
  return Must(BlockTables::Create({num_blocks, block_size, max_sequences, /*bytes_per_token=*/10}));
}

Row Table(const BlockTables& tables, const Ids& ids, ThreadPool* threads = nullptr) {
  const int64_t width = Must(tables.TableWidth(ids));
  Row table(ids.size() * width, -7);
  EXPECT_TRUE(IsOk(tables.WriteTable(ids, width, table, threads)));
  return table;
}

// All that a caller can see of these sequences.
std::string State(const BlockTables& tables, const Ids& ids) {
  const auto text = [](const Row& values) { return absl::StrJoin(values, " "); };
  return absl::StrCat(tables.num_free(), " ", tables.num_sequences(), " ",
                      tables.fragmented_bytes(), "; ", text(Table(tables, ids)), "; ",
                      text(Must(tables.TokenCounts(ids))), "; ",
                      text(Must(tables.BlockCounts(ids))));
}

TEST(BlockTables, BadOptions) {
  const auto fails = [](const BlockTables::Options& options, absl::string_view part) {
    EXPECT_TRUE(Fails(BlockTables::Create(options), kInvalid, part, "must lie in"));
  };
  for (const int64_t bad : {int64_t{0}, int64_t{-1}, std::numeric_limits<int64_t>::min(), kInt64Max,
                            int64_t{1} << 31}) {
    fails({bad, 4, 2, 1}, absl::StrCat("num_blocks is ", bad));
    fails({8, bad, 2, 1}, absl::StrCat("block_size is ", bad));
    fails({8, 4, bad, 1}, absl::StrCat("max_sequences is ", bad));
  }
  for (const int64_t bad : {int64_t{-1}, int64_t{8}, kInt64Max}) {
    fails({8, 4, 2, 1, bad}, absl::StrCat("reserved_blocks is ", bad));
  }
  fails({8, 4, 2, -1}, "bytes_per_token is -1");
  fails({8, 4, 2, kInt64Max / 32 + 1}, "bytes_per_token");
  fails({int64_t{1} << 30, int64_t{1} << 30, 2, 8}, "bytes_per_token");
  EXPECT_TRUE(IsOk(BlockTables::Create({8, 4, 2, kInt64Max / 32})));
  EXPECT_TRUE(IsOk(BlockTables::Create({int64_t{1} << 30, (int64_t{1} << 31) - 1, 2, 1})));
}

TEST(BlockTables, ASequenceFromEmptyToFreed) {
  BlockTables tables = Make(8, 4, 2);
  const int64_t id = Must(tables.Add(0));
  EXPECT_EQ(Must(tables.TableWidth(Ids{id})), 0);
  EXPECT_EQ(Table(tables, {id}), Row{});
  EXPECT_EQ(Must(tables.LastPositions(Ids{id})), Row{-1});
  EXPECT_EQ(tables.fragmented_bytes(), 0);
  EXPECT_TRUE(IsOk(tables.Grow(Ids{id}, Counts{6})));
  EXPECT_EQ(Table(tables, {id}), (Row{0, 1}));
  EXPECT_EQ(Must(tables.LastPositions(Ids{id})), Row{5});
  EXPECT_EQ(tables.fragmented_bytes(), 2 * 10);
  EXPECT_TRUE(IsOk(tables.Grow(Ids{id}, Counts{2})));
  EXPECT_EQ(Table(tables, {id}), (Row{0, 1}));
  EXPECT_EQ(tables.fragmented_bytes(), 0);
  EXPECT_TRUE(IsOk(tables.Grow(Ids{id}, Counts{1})));
  EXPECT_EQ(Table(tables, {id}), (Row{0, 1, 2}));  // Right behind.
  EXPECT_TRUE(IsOk(tables.Free(Ids{id})));
  EXPECT_EQ(tables.num_free(), 8);
  EXPECT_EQ(tables.num_sequences(), 0);
  EXPECT_TRUE(Fails(tables.TokenCounts(Ids{id}), kInvalid, "sequence 0 is not alive"));
}

TEST(BlockTables, BlocksMayBeKeptOutOfAllTables) {
  BlockTables tables = Must(BlockTables::Create(
      {.num_blocks = 8, .block_size = 4, .max_sequences = 2, .reserved_blocks = 2}));
  EXPECT_EQ(tables.num_free(), 6);
  EXPECT_TRUE(Fails(tables.Add(25), kExhausted, "6 of 8 are free"));
  const int64_t id = Must(tables.Add(20));
  EXPECT_EQ(Table(tables, {id}), (Row{2, 3, 4, 5, 6}));
  EXPECT_TRUE(IsOk(tables.FreeBlocks(id, Counts{0, 2})));
  EXPECT_EQ(Must(tables.Preempt(6, {})), (Preempted{{id, 20}}));
  EXPECT_EQ(tables.num_free(), 6);
  tables.Clear();
  EXPECT_EQ(Table(tables, {Must(tables.Add(24))}), (Row{2, 3, 4, 5, 6, 7}));
}

TEST(BlockTables, TablesArePaddedInTheCallersOrder) {
  BlockTables tables = Make(16, 4, 4);
  ASSERT_EQ(Must(tables.Add(5)), 0);
  ASSERT_EQ(Must(tables.Add(0)), 1);
  ASSERT_EQ(Must(tables.Add(12)), 2);
  const Row long_row = Table(tables, {2});
  const Row short_row = Table(tables, {0});
  Row want = long_row;
  want.insert(want.end(), {-1, -1, -1, short_row[0], short_row[1], -1});
  want.insert(want.end(), long_row.begin(), long_row.end());
  EXPECT_EQ(Table(tables, {2, 1, 0, 2}), want);
  EXPECT_EQ(Table(tables, {}), Row{});
  EXPECT_EQ(Must(tables.TokenCounts(Ids{2, 1, 0, 2})), (Row{12, 0, 5, 12}));

  Row wide(2 * 3 + 1, -7);  // Wider than needed, and a place behind the table.
  EXPECT_TRUE(IsOk(tables.WriteTable(Ids{0, 1}, 3, wide, nullptr)));
  EXPECT_EQ(wide, (Row{short_row[0], short_row[1], -1, -1, -1, -1, -7}));
}

TEST(BlockTables, BadTables) {
  BlockTables tables = Make(16, 4, 4);
  const int64_t id = Must(tables.Add(9));
  Row table(6, -7);
  const auto write = [&](const Ids& ids, int64_t width) {
    return tables.WriteTable(ids, width, table, nullptr);
  };
  EXPECT_TRUE(Fails(write({id}, 2), kInvalid, "width is 2 but must lie in [3, "));
  EXPECT_TRUE(Fails(write({id}, kInt64Max), kInvalid, "width"));
  EXPECT_TRUE(Fails(write({id}, -1), kInvalid, "width"));
  EXPECT_TRUE(Fails(write({id, id}, 4), kInvalid, "6 entries but must have 2 rows of 4"));
  EXPECT_TRUE(Fails(write({id}, int64_t{1} << 29), kInvalid, "6 entries"));
  EXPECT_TRUE(Fails(write({id}, (int64_t{1} << 29) + 1), kInvalid,  // Of blocks of 4 tokens.
                    "must lie in [3, 536870912]"));
  EXPECT_TRUE(Fails(write({id, 1}, 3), kInvalid, "sequence 1 is not alive"));
  EXPECT_EQ(table, Row(6, -7));
  for (const int64_t bad : {int64_t{-1}, int64_t{4}, kInt64Max}) {
    const std::string name = absl::StrCat("sequence ", bad, " is outside [0, max_sequences = 4)");
    EXPECT_TRUE(Fails(write({bad}, 3), kInvalid, name));
    EXPECT_TRUE(Fails(tables.TableWidth(Ids{bad}), kInvalid, name));
    EXPECT_TRUE(Fails(tables.TokenCounts(Ids{bad}), kInvalid, name));
    EXPECT_TRUE(Fails(tables.LastPositions(Ids{id, bad}), kInvalid, name));
    EXPECT_TRUE(Fails(tables.BlockCounts(Ids{bad, id}), kInvalid, name));
  }
}

TEST(BlockTables, FailuresChangeNothing) {
  BlockTables tables = Make(8, 4, 3);
  const Ids live = {Must(tables.Add(6)), Must(tables.Add(11))};
  const std::string before = State(tables, live);
  const auto fails = [&](const auto& result, absl::StatusCode code, const auto&... parts) {
    EXPECT_TRUE(Fails(result, code, parts...));
    EXPECT_EQ(State(tables, live), before);
  };
  fails(tables.Add(-1), kInvalid, "tokens is -1");
  fails(tables.Add(BlockTables::kMaxTokens + 1), kInvalid, "tokens");
  fails(tables.Add(kInt64Max), kInvalid, "tokens");
  fails(tables.Add(13), kExhausted, "needs 4 blocks of 4", "3 of 8 are free");
  fails(tables.Add(BlockTables::kMaxTokens), kExhausted, "3 of 8 are free");

  fails(tables.Grow(live, Counts{1}), kInvalid, "2 ids and 1 tokens");
  fails(tables.Grow(Ids{0, 2}, Counts{1, 1}), kInvalid, "sequence 2 is not alive");
  fails(tables.Grow(Ids{0, 3}, Counts{1, 1}), kInvalid, "sequence 3 is outside");
  fails(tables.Grow(Ids{0, 1, 0}, Counts{1, 1, 1}), kInvalid, "sequence 0 stands twice");
  fails(tables.Grow(live, Counts{1, -1}), kInvalid, "sequence 1 of 11 tokens", "by -1");
  fails(tables.Grow(live, Counts{1, kInt64Max}), kInvalid, "sequence 1 of 11 tokens");
  fails(tables.Grow(live, Counts{1, BlockTables::kMaxTokens - 10}), kInvalid, "sequence 1");
  fails(tables.Grow(live, Counts{7, 10}), kExhausted, "needs 5 blocks of 4", "3 of 8 are free");

  fails(tables.Free(Ids{0, 2}), kInvalid, "sequence 2 is not alive");
  fails(tables.Free(Ids{1, 0, 1}), kInvalid, "sequence 1 stands twice");
  fails(tables.Free(Ids{-1}), kInvalid, "sequence -1");
  fails(tables.FreeBlocks(2, Ids{}), kInvalid, "sequence 2 is not alive");
  fails(tables.FreeBlocks(1, Ids{0, 3}), kInvalid, "block 3 of sequence 1 is outside [0, 3)");
  fails(tables.FreeBlocks(1, Ids{2, -1}), kInvalid, "block -1 of sequence 1 is outside");
  fails(tables.FreeBlocks(1, Ids{0, 2, 0}), kInvalid, "block 0 of sequence 1 is already free");

  fails(tables.Preempt(-1, {}), kInvalid, "num_blocks is -1");
  fails(tables.Preempt(4, Ids{2}), kInvalid, "sequence 2 is not alive");
  fails(tables.Preempt(4, live), kExhausted, "4 blocks asked, 3 of 8", "2 kept");
  fails(tables.Preempt(7, Ids{0}), kExhausted, "7 blocks asked, 6 of 8");
  fails(tables.Preempt(kInt64Max, {}), kExhausted, "8 of 8");

  ASSERT_TRUE(IsOk(tables.Add(0)));
  EXPECT_TRUE(Fails(tables.Add(0), kExhausted, "all 3 sequences (max_sequences)"));
  EXPECT_EQ(tables.num_sequences(), 3);
  EXPECT_EQ(tables.num_free(), 3);
}

// Every second block is free, so that lists of blocks are long.
TEST(BlockTables, CallsThatFindNoMemoryForTheirListsChangeNothing) {
  constexpr int64_t kBlocks = 200, kHalf = kBlocks / 2;
  BlockTables tables = Make(kBlocks + 16, 2, 4);
  const int64_t small = Must(tables.Add(3));
  const int64_t large = Must(tables.Add(2 * kBlocks));
  ASSERT_TRUE(IsOk(tables.FreeBlocks(small, Ids{1})));  // It has lost its tail.
  Ids ids = {small, large}, even;
  for (int64_t place = 0; place < kBlocks; place += 2) even.push_back(place);
  const auto changes_nothing_without_memory = [&](const auto& call) {
    absl::Status status;
    CallWithoutMemory([&] { status = call(); },
                      [&, before = State(tables, ids)] { ASSERT_EQ(State(tables, ids), before); });
    EXPECT_TRUE(IsOk(status));
  };
  changes_nothing_without_memory([&] { return tables.FreeBlocks(large, even); });
  EXPECT_EQ(tables.num_free(), kHalf + 15);
  absl::StatusOr<int64_t> added;
  changes_nothing_without_memory([&] { return (added = tables.Add(kBlocks - 20)).status(); });
  EXPECT_EQ(tables.num_free(), 25);
  ASSERT_TRUE(IsOk(tables.Free(Ids{*added})));
  ids.push_back(Must(tables.Add(1)));
  // The small one has grown when there is no memory.
  const Ids grow = {small, ids.back()};
  const Counts more = {9, kBlocks - 20};
  changes_nothing_without_memory([&] { return tables.Grow(grow, more); });
  EXPECT_EQ(Must(tables.TokenCounts(ids)), (Row{12, 2 * kBlocks, kBlocks - 19}));
  absl::Status freed;
  {
    const FailingNew failing(0);
    freed = tables.Free(ids);  // Needs none.
  }
  ASSERT_TRUE(IsOk(freed));
  EXPECT_EQ(tables.num_free(), kBlocks + 16);
  const Row all = Table(tables, {Must(tables.Add(2 * (kBlocks + 16)))});
  EXPECT_EQ(std::set<int32_t>(all.begin(), all.end()).size(), all.size());
}

TEST(BlockTables, TheTokensOfASequenceAreLimitedEvenIfItsBlocksAreNot) {
  BlockTables tables = Must(BlockTables::Create({4, BlockTables::kMaxTokens, 2, 1}));
  const int64_t id = Must(tables.Add(BlockTables::kMaxTokens));
  EXPECT_EQ(Must(tables.LastPositions(Ids{id})), Row{std::numeric_limits<int32_t>::max() - 1});
  EXPECT_TRUE(Fails(tables.Grow(Ids{id}, Counts{1}), kInvalid, "cannot grow by 1", "[0, 0]"));
  EXPECT_TRUE(IsOk(tables.Grow(Ids{id}, Counts{0})));
}

TEST(BlockTables, AWindowSlides) {
  BlockTables tables = Make(8, 4, 2);
  const int64_t id = Must(tables.Add(13));
  EXPECT_TRUE(IsOk(tables.FreeBlocks(id, Ids{1, 0})));
  EXPECT_EQ(Table(tables, {id}), (Row{-1, -1, 2, 3}));
  EXPECT_EQ(Must(tables.BlockCounts(Ids{id})), Row{2});
  EXPECT_EQ(Must(tables.TokenCounts(Ids{id})), Row{13});
  EXPECT_EQ(tables.num_free(), 6);
  EXPECT_EQ(tables.fragmented_bytes(), 3 * 10);
  EXPECT_TRUE(IsOk(tables.Grow(Ids{id}, Counts{4})));
  EXPECT_EQ(Table(tables, {id}), (Row{-1, -1, 2, 3, 4}));
  EXPECT_TRUE(IsOk(tables.FreeBlocks(id, {})));
  // Without any block it lives on; its 17 tokens keep their places.
  EXPECT_TRUE(IsOk(tables.FreeBlocks(id, Ids{2, 4, 3})));
  EXPECT_EQ(Table(tables, {id}), Row(5, -1));
  EXPECT_EQ(tables.num_free(), 8);
  EXPECT_EQ(tables.fragmented_bytes(), 0);
  EXPECT_TRUE(IsOk(tables.Grow(Ids{id}, Counts{0})));
  EXPECT_EQ(tables.num_free(), 8);
  EXPECT_TRUE(IsOk(tables.Grow(Ids{id}, Counts{1})));  // Into a block in the place of the last.
  const Row row = Table(tables, {id});
  ASSERT_EQ(row.size(), 5);
  EXPECT_GE(row[4], 0);
  EXPECT_EQ(tables.num_free(), 7);
  EXPECT_EQ(tables.fragmented_bytes(), 2 * 10);
  EXPECT_TRUE(IsOk(tables.Free(Ids{id})));
  EXPECT_EQ(tables.num_free(), 8);
}

TEST(BlockTables, TheNewestArePreemptedFirst) {
  BlockTables tables = Make(10, 4, 5);
  ASSERT_EQ(Must(tables.Add(4)), 0);
  ASSERT_EQ(Must(tables.Add(4)), 1);
  ASSERT_EQ(Must(tables.Add(9)), 2);
  ASSERT_TRUE(IsOk(tables.Free(Ids{0})));
  ASSERT_EQ(Must(tables.Add(7)), 0);  // The newest that holds blocks, whatever its id.
  ASSERT_EQ(Must(tables.Add(0)), 3);
  ASSERT_EQ(tables.num_free(), 4);
  EXPECT_EQ(Must(tables.Preempt(0, {})), Preempted{});
  EXPECT_EQ(Must(tables.Preempt(4, {})), Preempted{});
  EXPECT_EQ(Must(tables.Preempt(5, {})), (Preempted{{0, 7}}));
  EXPECT_EQ(tables.num_free(), 6);
  EXPECT_EQ(Must(tables.Preempt(7, Ids{2, 2})), (Preempted{{1, 4}}));
  EXPECT_TRUE(Fails(tables.Preempt(8, Ids{2}), kExhausted));
  EXPECT_EQ(Must(tables.Preempt(10, Ids{3})), (Preempted{{2, 9}}));
  EXPECT_EQ(tables.num_free(), 10);
  EXPECT_EQ(tables.num_sequences(), 1);  // The empty one.
}

TEST(BlockTables, ClearStartsAgain) {
  BlockTables tables = Make(8, 4, 3);
  ASSERT_TRUE(IsOk(tables.Add(20)));
  ASSERT_TRUE(IsOk(tables.Add(3)));
  tables.Clear();
  EXPECT_EQ(tables.num_free(), 8);
  EXPECT_EQ(tables.num_sequences(), 0);
  EXPECT_EQ(tables.fragmented_bytes(), 0);
  EXPECT_TRUE(Fails(tables.Free(Ids{0}), kInvalid, "not alive"));
  EXPECT_EQ(Must(tables.Add(32)), 0);
}

TEST(BlockTables, ThreadsFillTheSameTable) {
  constexpr int64_t kSequences = 300;
  std::mt19937_64 random(3);
  BlockTables tables = Make(int64_t{1} << 20, 16, kSequences);
  Ids ids(kSequences);
  for (int64_t& id : ids) id = Must(tables.Add(static_cast<int64_t>(random() % 20000)));
  std::shuffle(ids.begin(), ids.end(), random);
  const Row alone = Table(tables, ids);
  for (const int64_t workers : {0, 1, 3}) {
    const auto threads = Must(ThreadPool::Create(workers));
    EXPECT_EQ(Table(tables, ids, threads.get()), alone) << workers;
  }
}

// ---------------------------------------------------------------- the step of a simple engine

// The rule that batch engines step by, a sequence a dull list of fills: who has ended gives its
// blocks back, who is still in its prompt waits, the others get a token.
struct NaiveBatch {
  int64_t block_size = 0;
  std::map<int64_t, std::vector<int64_t>> fills;  // Tokens in each block, by place in the batch.

  void Step(const std::vector<bool>& ended, const std::vector<bool>& in_prompt) {
    std::erase_if(fills,
                  [&](const auto& one) { return ended[one.first] && !in_prompt[one.first]; });
    for (auto& [place, blocks] : fills) {
      if (in_prompt[place]) continue;
      if (blocks.empty() || blocks.back() == block_size) blocks.push_back(0);
      ++blocks.back();
    }
  }
};

TEST(BlockTables, AStepOfABatchIsFreeAndGrow) {
  constexpr int64_t kBatch = 12;
  constexpr int64_t kBlock = 4;
  std::mt19937_64 random(5);
  BlockTables tables = Make(200, kBlock, kBatch);
  NaiveBatch naive{kBlock, {}};
  std::map<int64_t, int64_t> ids;  // By place in the batch.
  for (int64_t place = 0; place < kBatch; ++place) {
    const int64_t prompt = place % 10;  // Also none, and full blocks.
    ids[place] = Must(tables.Add(prompt));
    for (int64_t left = prompt; left > 0; left -= kBlock) {
      naive.fills[place].push_back(std::min(left, kBlock));
    }
    naive.fills.try_emplace(place);
  }
  for (int64_t step = 0; !ids.empty(); ++step) {
    std::vector<bool> ended(kBatch), in_prompt(kBatch);
    for (int64_t place = 0; place < kBatch; ++place) {
      ended[place] = random() % 20 == 0;
      in_prompt[place] = step < place % 5;
    }
    naive.Step(ended, in_prompt);
    Ids gone, growing;
    std::erase_if(ids, [&](const auto& one) {
      const auto [place, id] = one;
      if (in_prompt[place]) return false;
      (ended[place] ? gone : growing).push_back(id);
      return static_cast<bool>(ended[place]);
    });
    ASSERT_TRUE(IsOk(tables.Free(gone)));
    ASSERT_TRUE(IsOk(tables.Grow(growing, Counts(growing.size(), 1))));

    ASSERT_EQ(ids.size(), naive.fills.size());
    int64_t fragmented = 0, held = 0;
    for (const auto& [place, id] : ids) {
      const std::vector<int64_t>& fills = naive.fills.at(place);
      ASSERT_EQ(Table(tables, {id}).size(), fills.size());
      const int64_t tokens = std::reduce(fills.begin(), fills.end());
      ASSERT_EQ(Must(tables.LastPositions(Ids{id})), Row{static_cast<int32_t>(tokens - 1)});
      if (!fills.empty()) fragmented += kBlock - fills.back();
      held += static_cast<int64_t>(fills.size());
    }
    ASSERT_EQ(tables.fragmented_bytes(), fragmented * 10);
    ASSERT_EQ(tables.num_free(), 200 - held);
  }
}

// ---------------------------------------------------------------- against a naive model

// Rows in maps, blocks in a set, the order of adding as a list.
class Model {
 public:
  Model(int64_t num_blocks, int64_t block_size) : num_blocks_(num_blocks), block_size_(block_size) {
    for (int64_t block = 0; block < num_blocks; ++block) free_.insert(static_cast<int32_t>(block));
  }
  struct Sequence {
    int64_t tokens = 0;
    Row row;
  };
  std::map<int64_t, Sequence> live;
  std::vector<int64_t> order;  // Ids, the newest last.

  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  // Blocks that the next `tokens` tokens take, found token by token.
  int64_t Needs(const Sequence& sequence, int64_t tokens) const {
    int64_t needs = 0;
    auto entries = static_cast<int64_t>(sequence.row.size());
    bool lost = !sequence.row.empty() && sequence.row.back() == -1;
    for (int64_t token = sequence.tokens; token < sequence.tokens + tokens; ++token) {
      if (token / block_size_ < entries && !lost) continue;
      entries = token / block_size_ + 1;
      lost = false;
      ++needs;
    }
    return needs;
  }
  // The sequence has `tokens` more, and `row` is its new row: entries that were there are as
  // before, new ones were free, and lie right behind the one before if that block was free.
  void Grow(int64_t id, int64_t tokens, const Row& row) {
    Sequence& sequence = live[id];
    size_t kept = sequence.row.size();
    if (tokens > 0 && sequence.tokens % block_size_ != 0 && sequence.row.back() == -1) --kept;
    ASSERT_GE(row.size(), kept);
    ASSERT_TRUE(std::equal(row.begin(), row.begin() + kept, sequence.row.begin()));
    for (size_t i = kept; i < row.size(); ++i) {
      if (i > 0 && row[i - 1] >= 0 && free_.contains(row[i - 1] + 1)) {
        ASSERT_EQ(row[i], row[i - 1] + 1);
      }
      ASSERT_EQ(free_.erase(row[i]), 1) << row[i];
    }
    sequence.tokens += tokens;
    sequence.row = row;
    ASSERT_EQ(row.size(), (sequence.tokens + block_size_ - 1) / block_size_);
  }
  void FreeBlock(int64_t id, int64_t place) {
    free_.insert(std::exchange(live[id].row[place], -1));
  }
  void Free(int64_t id) {
    for (const int32_t block : live[id].row) {
      if (block >= 0) free_.insert(block);
    }
    live.erase(id);
    std::erase(order, id);
  }
  int64_t Held(int64_t id) const {
    const Row& row = live.at(id).row;
    return static_cast<int64_t>(row.size()) - std::count(row.begin(), row.end(), -1);
  }
  int64_t UnfilledPlaces() const {
    int64_t places = 0;
    for (const auto& [id, one] : live) {
      if (!one.row.empty() && one.row.back() >= 0) {
        places += (block_size_ - one.tokens % block_size_) % block_size_;
      }
    }
    return places;
  }
  void Clear() { *this = Model(num_blocks_, block_size_); }

 private:
  int64_t num_blocks_;
  int64_t block_size_;
  std::set<int32_t> free_;
};

class RandomOperations {
 public:
  RandomOperations(int64_t block_size, uint64_t seed)
      : random_(seed),
        tables_(Make(kBlocks, block_size, kSequences)),
        model_(kBlocks, block_size) {}

  void Run(int operations) {
    for (int i = 0; i < operations && !::testing::Test::HasFatalFailure(); ++i) {
      Once();
      ASSERT_EQ(tables_.num_free(), model_.num_free());
      ASSERT_EQ(tables_.num_sequences(), static_cast<int64_t>(model_.live.size()));
    }
  }

 private:
  static constexpr int64_t kBlocks = 40;
  static constexpr int64_t kSequences = 6;

  int64_t Random(int64_t below) { return static_cast<int64_t>(random_() % below); }
  int64_t AnyId() { return Random(kSequences + 2) - 1; }
  bool Alive(int64_t id) const { return model_.live.contains(id); }
  // Mostly of live sequences, each once; now and then anything.
  Ids SomeIds() {
    Ids ids;
    for (const auto& [id, one] : model_.live) {
      if (Random(2) == 0) ids.push_back(id);
    }
    if (Random(20) == 0) ids.push_back(AnyId());
    std::shuffle(ids.begin(), ids.end(), random_);
    return ids;
  }
  bool AliveAndOnce(const Ids& ids) const {
    return std::all_of(ids.begin(), ids.end(), [&](int64_t id) {
      return Alive(id) && std::count(ids.begin(), ids.end(), id) == 1;
    });
  }

  void Once() {
    const int64_t choice = Random(100);
    if (choice < 20) return Add();
    if (choice < 55) return Grow();
    if (choice < 65) return Free();
    if (choice < 80) return FreeBlocks();
    if (choice < 85) return Preempt();
    if (choice < 99) return Look();
    if (Random(20) == 0) {
      tables_.Clear();
      model_.Clear();
    }
  }
  void Add() {
    const int64_t tokens = Random(50) - 1;
    const auto id = tables_.Add(tokens);
    if (tokens < 0) {
      ASSERT_TRUE(absl::IsInvalidArgument(id.status()));
      return;
    }
    const bool fits = model_.Needs({}, tokens) <= model_.num_free();
    if (!fits || model_.live.size() == kSequences) {
      ASSERT_TRUE(absl::IsResourceExhausted(id.status())) << id.status();
      return;
    }
    ASSERT_TRUE(IsOk(id));
    ASSERT_TRUE(*id >= 0 && *id < kSequences && !Alive(*id)) << *id;
    model_.order.push_back(*id);
    model_.Grow(*id, tokens, Table(tables_, {*id}));
  }
  void Grow() {
    const Ids ids = SomeIds();
    Counts tokens;
    int64_t needs = 0;
    bool good = AliveAndOnce(ids);
    for (const int64_t id : ids) {
      tokens.push_back(Random(4) == 0 ? Random(20) - 1 : 1);
      good &= tokens.back() >= 0;
      if (Alive(id)) needs += model_.Needs(model_.live[id], tokens.back());
    }
    const absl::Status status = tables_.Grow(ids, tokens);
    if (!good) {
      ASSERT_TRUE(absl::IsInvalidArgument(status)) << status;
      return;
    }
    if (needs > model_.num_free()) {
      ASSERT_TRUE(absl::IsResourceExhausted(status)) << status;
      return;
    }
    ASSERT_TRUE(IsOk(status));
    for (size_t i = 0; i < ids.size(); ++i) {
      model_.Grow(ids[i], tokens[i], Table(tables_, {ids[i]}));
    }
  }
  void Free() {
    const Ids ids = Random(3) == 0 ? SomeIds() : Ids{AnyId()};
    const absl::Status status = tables_.Free(ids);
    if (!AliveAndOnce(ids)) {
      ASSERT_TRUE(absl::IsInvalidArgument(status)) << status;
      return;
    }
    ASSERT_TRUE(IsOk(status));
    for (const int64_t id : ids) model_.Free(id);
  }
  void FreeBlocks() {
    const int64_t id = AnyId();
    Ids places;
    bool good = Alive(id);
    if (good) {
      const Row& row = model_.live[id].row;
      const auto entries = static_cast<int64_t>(row.size());
      for (int64_t place = 0; place < entries; ++place) {
        if (row[place] >= 0 && Random(3) == 0) places.push_back(place);
      }
      std::shuffle(places.begin(), places.end(), random_);
      if (Random(8) == 0) {  // Outside, or perhaps freed already or twice.
        const int64_t any = Random(entries + 2) - 1;
        good = any >= 0 && any < entries && row[any] >= 0 && !std::ranges::count(places, any);
        places.push_back(any);
      }
    }
    const absl::Status status = tables_.FreeBlocks(id, places);
    if (!good) {
      ASSERT_TRUE(absl::IsInvalidArgument(status)) << status;
      return;
    }
    ASSERT_TRUE(IsOk(status));
    for (const int64_t place : places) model_.FreeBlock(id, place);
  }
  void Preempt() {
    const Ids keep = SomeIds();
    const int64_t blocks = Random(kBlocks + 3) - 1;
    const auto got = tables_.Preempt(blocks, keep);
    const bool alive = std::all_of(keep.begin(), keep.end(), [&](int64_t id) { return Alive(id); });
    if (blocks < 0 || !alive) {
      ASSERT_TRUE(absl::IsInvalidArgument(got.status()));
      return;
    }
    Preempted want;
    int64_t freed = model_.num_free();
    for (auto id = model_.order.rbegin(); id != model_.order.rend() && freed < blocks; ++id) {
      if (std::ranges::count(keep, *id) || model_.Held(*id) == 0) continue;
      freed += model_.Held(*id);
      want.push_back({*id, model_.live[*id].tokens});
    }
    if (freed < blocks) {
      ASSERT_TRUE(absl::IsResourceExhausted(got.status()));
      return;
    }
    ASSERT_TRUE(IsOk(got));
    ASSERT_EQ(*got, want);
    for (const auto& one : want) model_.Free(one.id);
  }
  // Also shows that failed calls changed nothing.
  void Look() {
    Ids ids;
    for (const auto& [id, one] : model_.live) ids.push_back(id);
    std::shuffle(ids.begin(), ids.end(), random_);
    size_t width = 0;
    for (const int64_t id : ids) width = std::max(width, model_.live[id].row.size());
    Row table, tokens, last, held;
    for (const int64_t id : ids) {
      const Model::Sequence& one = model_.live[id];
      table.insert(table.end(), one.row.begin(), one.row.end());
      table.resize(table.size() + width - one.row.size(), -1);
      tokens.push_back(static_cast<int32_t>(one.tokens));
      last.push_back(static_cast<int32_t>(one.tokens - 1));
      held.push_back(static_cast<int32_t>(model_.Held(id)));
    }
    ASSERT_EQ(Must(tables_.TableWidth(ids)), static_cast<int64_t>(width));
    ASSERT_EQ(Table(tables_, ids), table);
    ASSERT_EQ(Must(tables_.TokenCounts(ids)), tokens);
    ASSERT_EQ(Must(tables_.LastPositions(ids)), last);
    ASSERT_EQ(Must(tables_.BlockCounts(ids)), held);
    ASSERT_EQ(tables_.fragmented_bytes(), model_.UnfilledPlaces() * 10);
  }

  std::mt19937_64 random_;
  BlockTables tables_;
  Model model_;
};

TEST(BlockTables, AMillionRandomOperationsAgainstASet) {
  for (const int64_t block_size : {1, 4, 7, 16}) {
    SCOPED_TRACE(block_size);
    RandomOperations(block_size, block_size).Run(250000);
  }
}

}  // namespace
}  // namespace kvferry
