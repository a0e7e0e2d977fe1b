#include "transport/lane.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "tests/support/status.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

// What a lane's thread does with its plane, and what the test has that say.
struct Seen {
  Mutex mutex;
  std::vector<LinkId> sent ABSL_GUARDED_BY(mutex), closed ABSL_GUARDED_BY(mutex);
  // What Progress() reports once Arm() has refused so many times more.
  std::map<LinkId, absl::Status> down ABSL_GUARDED_BY(mutex);
  int refusals ABSL_GUARDED_BY(mutex) = 0;
  // Lists that it reports, and of which transfers some have been refused.
  std::vector<ChunkHeader> listed ABSL_GUARDED_BY(mutex);
  std::vector<std::pair<uint64_t, absl::Status>> refused ABSL_GUARDED_BY(mutex);
};

class FakePlane final : public DataPlane {
 public:
  explicit FakePlane(Seen* seen) : seen_(seen) {}

  void SendChunk(LinkId link, const ChunkHeader& /*header*/, ChunkSource /*source*/,
                 SendDone done) override {
    {
      const MutexLock lock(&seen_->mutex);
      seen_->sent.push_back(link);
    }
    done(absl::OkStatus());
  }
  void SendCredit(LinkId /*link*/, const CreditHeader& /*header*/) override {}
  void Close(LinkId link) override {
    const MutexLock lock(&seen_->mutex);
    seen_->closed.push_back(link);
  }
  bool Progress(DataEvents* events) override {
    std::map<LinkId, absl::Status> down;
    std::vector<ChunkHeader> listed;
    {
      const MutexLock lock(&seen_->mutex);
      if (seen_->refusals == 0) down.swap(seen_->down);
      listed.swap(seen_->listed);
    }
    for (const auto& [link, status] : down) events->OnLinkDown(link, status);
    for (const ChunkHeader& header : listed) events->OnChunkElsewhere(header, {});
    return !down.empty() || !listed.empty();
  }
  int event_fd() const override { return never_.get(); }
  bool Arm() override {
    const MutexLock lock(&seen_->mutex);
    if (seen_->refusals == 0) return true;
    --seen_->refusals;
    return false;
  }

 private:
  Seen* const seen_;
  const WakeFd never_;
};

// Takes no chunks.
class NoTaker final : public LaneTaker {
 public:
  explicit NoTaker(Seen* seen) : seen_(seen) {}
  void OnChunk(const ChunkHeader&, const Payload&, Intact) override {}
  std::unique_ptr<ChunkSink> OnChunkBegins(const ChunkHeader&) override { return nullptr; }
  void Refuse(const ChunkHeader& header, const absl::Status& status) override {
    const MutexLock lock(&seen_->mutex);
    seen_->refused.emplace_back(header.transfer_id, status);
  }

 private:
  Seen* const seen_;
};

// The test's thread is the progress thread.
class LaneAlone : public testing::Test {
 protected:
  template <typename Condition>
  bool RunUntil(const Condition& condition) {
    return WaitFor([&] { return commands_->Run(), condition(); }, Soon());
  }
  void Connect(LinkId link, const absl::StatusOr<LinkId>& own) {
    lane_->Connect(link, [own] { return own; });
  }
  // What comes of a chunk.
  absl::Status Send(LinkId link) {
    std::vector<absl::Status> done;
    lane_->SendChunk(link, ChunkHeader(), FillChunk(),
                     [&done](const absl::Status& status) { done.push_back(status); });
    EXPECT_TRUE(RunUntil([&] { return !done.empty(); }));
    return done.at(0);
  }
  std::vector<LinkId> Sent() {
    const MutexLock lock(&seen_.mutex);
    return seen_.sent;
  }

  using Links = std::vector<LinkId>;
  Seen seen_;
  const std::shared_ptr<CommandQueue> commands_ = std::make_shared<CommandQueue>();
  Links open_;
  std::vector<std::pair<LinkId, absl::Status>> down_;
  std::unique_ptr<Lane> lane_ = Must(Lane::Create(
      {std::make_unique<FakePlane>(&seen_), commands_, std::make_unique<NoTaker>(&seen_),
       [this](LinkId link) { open_.push_back(link); },
       [this](LinkId link, const absl::Status& status) { down_.emplace_back(link, status); }}));
};

// Or the session would wait for its chunks until its deadline.
TEST_F(LaneAlone, AConnectionThatIsNotMadeIsDown) {
  Connect(7, absl::UnavailableError("nobody listens there"));
  ASSERT_TRUE(RunUntil([&] { return !down_.empty(); }));
  EXPECT_EQ(down_[0].first, 7u);
  EXPECT_TRUE(Fails(down_[0].second, absl::StatusCode::kUnavailable, "nobody listens"));
  EXPECT_TRUE(Fails(Send(7), absl::StatusCode::kUnavailable));
}

TEST_F(LaneAlone, LinksHaveTheNamesOfTheirSessions) {
  Connect(7, 70);
  Connect(8, 80);
  EXPECT_TRUE(IsOk(Send(8)));
  EXPECT_TRUE(IsOk(Send(7)));
  EXPECT_EQ(Sent(), (Links{80, 70}));
  lane_->Close(8);
  EXPECT_TRUE(Fails(Send(8), absl::StatusCode::kUnavailable, "closed"));
  EXPECT_TRUE(IsOk(Send(7)));
  EXPECT_EQ(Sent(), (Links{80, 70, 70}));
  const MutexLock lock(&seen_.mutex);
  EXPECT_EQ(seen_.closed, Links{80});
}

// What a plane still has to say before it may be slept on is heard though nobody wakes the thread.
TEST_F(LaneAlone, OneThatBreaksTakesNoOthersWithIt) {
  Connect(7, 70);
  Connect(8, 80);
  {
    const MutexLock lock(&seen_.mutex);
    seen_.down = {{80, absl::UnavailableError("it is gone")}};
    seen_.refusals = 3;
  }
  EXPECT_TRUE(IsOk(Send(7)));
  ASSERT_TRUE(RunUntil([&] { return !down_.empty(); }));
  EXPECT_TRUE(IsOk(Send(7)));  // Behind whatever else there was to say.
  ASSERT_EQ(down_.size(), 1u);
  EXPECT_EQ(down_[0].first, 8u);
  EXPECT_TRUE(Fails(down_[0].second, absl::StatusCode::kUnavailable, "it is gone"));
}

// Its fetch would wait for it until the deadline.
TEST_F(LaneAlone, ListsAreRefused) {
  {
    const MutexLock lock(&seen_.mutex);
    seen_.listed = {{77, 0, 0, 100, kChunkInPool}};
  }
  Connect(7, 70);  // Wakes it.
  const auto is_refused = [&] {
    const MutexLock lock(&seen_.mutex);
    return !seen_.refused.empty();
  };
  ASSERT_TRUE(RunUntil(is_refused));
  const MutexLock lock(&seen_.mutex);
  EXPECT_EQ(seen_.refused[0].first, 77u);
  EXPECT_TRUE(Fails(seen_.refused[0].second, absl::StatusCode::kDataLoss, "the first lane"));
}

}  // namespace
}  // namespace kvferry
