#include "transport/accept_pause.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include <cerrno>

#include "tests/support/captured_log.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

// The peer waits until a descriptor is closed, and accepting it fails ten times a second.
TEST(AcceptPause, DoesNotFillTheLog) {
  const CapturedLog log;
  const Epoll epoll = Must(Epoll::Create());
  const UniqueFd listener(eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK));
  AcceptPause pause = Must(AcceptPause::Create(epoll, listener.get()));
  for (int i = 0; i < 100; ++i) {
    pause.OnFailure(epoll, EMFILE);
    pause.OnTimer(epoll);
  }
  EXPECT_EQ(log.lines().size(), 1) << log.ToString();
  EXPECT_TRUE(log.Has({"the system refuses", "open files"})) << log.ToString();
}

}  // namespace
}  // namespace kvferry
