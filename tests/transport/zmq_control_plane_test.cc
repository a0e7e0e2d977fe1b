// The control plane by itself, where the system gives it nothing.

#include "transport/control/zmq_control_plane.h"

#include <gtest/gtest.h>

#include "base/config.h"
#include "tests/support/files.h"
#include "tests/support/sanitized.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

class WithoutFiles : public testing::Test {
 protected:
  void SetUp() override {
#ifdef KVFERRY_SANITIZED
    GTEST_SKIP() << "UBSan looks at objects through a pipe, for which there is no descriptor";
#endif
  }
};

// ZeroMQ aborts the process where there is no descriptor for its threads.
TEST_F(WithoutFiles, ThereIsNoControlPlane) {
  int made = 0;
  for (int free = 0; free < 32; ++free) {
    const FileLimit limit(free);
    const absl::StatusOr<std::unique_ptr<ControlPlane>> plane =
        MakeZmqControlPlane(Config(), /*listen=*/false);
    if (plane.ok()) ++made;
    if (plane.ok()) continue;
    EXPECT_EQ(made, 0) << free;
    EXPECT_TRUE(absl::IsResourceExhausted(plane.status())) << plane.status();
  }
  EXPECT_GT(made, 0);
}

TEST_F(WithoutFiles, DialsAreNoBadAddresses) {
  const std::unique_ptr<ControlPlane> plane = Must(MakeZmqControlPlane(Config(), /*listen=*/false));
  for (int free = 0; free < 16; ++free) {
    const FileLimit limit(free);
    const absl::Status status = plane->Dial("tcp://127.0.0.1:1").status();
    EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << free << " " << status;
    if (free == 0) {
      EXPECT_TRUE(Fails(status, absl::StatusCode::kResourceExhausted, "open files"));
    }
  }
  EXPECT_TRUE(IsOk(plane->Dial("tcp://127.0.0.1:1").status()));
  EXPECT_TRUE(Fails(plane->Dial("127.0.0.1").status(), absl::StatusCode::kInvalidArgument));
}

TEST(ZmqControlPlane, APeerThatWasHungUpIsNone) {
  Config config;
  config.listen_host = "127.0.0.1";
  const std::unique_ptr<ControlPlane> plane = Must(MakeZmqControlPlane(config, /*listen=*/true));
  const PeerKey peer = Must(plane->Dial("tcp://127.0.0.1:1"));
  plane->Hangup(peer);
  EXPECT_TRUE(
      Fails(plane->Send(peer, {1, 2, PingMsg{}}), absl::StatusCode::kUnavailable, "no such peer"));
}

}  // namespace
}  // namespace kvferry
