#include "base/epoll.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <vector>

namespace kvferry {
namespace {

UniqueFd Readable() { return UniqueFd(eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK)); }

using Ids = std::vector<uint64_t>;

Ids ReadyIds(const Epoll& epoll) {
  std::array<epoll_event, 4> room;
  Ids ids;
  for (const epoll_event& event : epoll.Ready(room)) ids.push_back(event.data.u64);
  std::sort(ids.begin(), ids.end());
  return ids;
}

TEST(Epoll, NamesWhatIsReadyAsItWasAdded) {
  const absl::StatusOr<Epoll> epoll = Epoll::Create();
  ASSERT_TRUE(epoll.ok()) << epoll.status();
  const UniqueFd one = Readable();
  const UniqueFd other = Readable();
  const UniqueFd silent(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  EXPECT_EQ(ReadyIds(*epoll), Ids{});
  ASSERT_TRUE(epoll->Add(one.get(), EPOLLIN, 7).ok());
  ASSERT_TRUE(epoll->Add(other.get(), EPOLLIN, uint64_t{1} << 40).ok());
  ASSERT_TRUE(epoll->Add(silent.get(), EPOLLIN, 9).ok());
  EXPECT_EQ(ReadyIds(*epoll), (Ids{7, uint64_t{1} << 40}));
}

TEST(Epoll, WatchesForWhatItWasLastTold) {
  const absl::StatusOr<Epoll> epoll = Epoll::Create();
  ASSERT_TRUE(epoll.ok()) << epoll.status();
  const UniqueFd fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  ASSERT_TRUE(epoll->Add(fd.get(), EPOLLIN, 1).ok());
  EXPECT_EQ(ReadyIds(*epoll), Ids{});
  epoll->Change(fd.get(), EPOLLOUT, 2);
  EXPECT_EQ(ReadyIds(*epoll), Ids{2});
  epoll->Remove(fd.get());
  EXPECT_EQ(ReadyIds(*epoll), Ids{});
}

TEST(Epoll, ReportsNoMoreThanThereIsRoomFor) {
  const absl::StatusOr<Epoll> epoll = Epoll::Create();
  ASSERT_TRUE(epoll.ok()) << epoll.status();
  std::array<UniqueFd, 3> fds = {Readable(), Readable(), Readable()};
  for (const UniqueFd& fd : fds) ASSERT_TRUE(epoll->Add(fd.get(), EPOLLIN, 0).ok());
  std::array<epoll_event, 2> room;
  EXPECT_EQ(epoll->Ready(room).size(), 2U);
}

TEST(Epoll, WhatCannotBeWatchedIsAnError) {
  const absl::StatusOr<Epoll> epoll = Epoll::Create();
  ASSERT_TRUE(epoll.ok()) << epoll.status();
  EXPECT_TRUE(absl::IsResourceExhausted(epoll->Add(-1, EPOLLIN, 0)));
  EXPECT_TRUE(absl::IsResourceExhausted(Epoll().Add(Readable().get(), EPOLLIN, 0)));
  EXPECT_EQ(ReadyIds(Epoll()), Ids{});
}

}  // namespace
}  // namespace kvferry
