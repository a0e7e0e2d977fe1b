#include "transport/limited_line.h"

#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <string>

namespace kvferry {
namespace {

constexpr std::optional<std::string> kUnsaid;
const std::optional<std::string> kSaid = "";

TEST(LimitedLine, OneIn30SecondsAndItSaysHowManyWereNot) {
  LimitedLine line;
  const Deadline start = Clock::now();
  EXPECT_EQ(line.Next(start), kSaid);
  for (int i = 0; i < 1000; ++i) {
    EXPECT_EQ(line.Next(start + std::chrono::milliseconds(29 * i)), kUnsaid) << i;
  }
  EXPECT_EQ(line.Next(start + std::chrono::seconds(30)), " (1000 more since the last such line)");
  EXPECT_EQ(line.Next(start + std::chrono::seconds(59)), kUnsaid);
  EXPECT_EQ(line.Next(start + std::chrono::seconds(90)), " (1 more since the last such line)");
  EXPECT_EQ(line.Next(start + std::chrono::seconds(120)), kSaid);
}

TEST(LimitedLine, SomeAtOnce) {
  LimitedLine line(3);
  const Deadline start = Clock::now();
  for (const int64_t s : {0, 10, 20}) EXPECT_EQ(line.Next(start + std::chrono::seconds(s)), kSaid);
  EXPECT_EQ(line.Next(start + std::chrono::seconds(29)), kUnsaid);
  EXPECT_EQ(line.Next(start + std::chrono::seconds(30)), " (1 more since the last such line)");
  for (const int64_t s : {31, 32}) EXPECT_EQ(line.Next(start + std::chrono::seconds(s)), kSaid);
  EXPECT_EQ(line.Next(start + std::chrono::seconds(33)), kUnsaid);
}

}  // namespace
}  // namespace kvferry
