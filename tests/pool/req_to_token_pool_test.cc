#include "pool/req_to_token_pool.h"

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "tests/pool/guarded_memory.h"
#include "tests/pool/req_to_token_pool_suite.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

INSTANTIATE_TEST_SUITE_P(Memories, ReqToTokenPools,
                         testing::Values(HostBackend(), GuardedBackend()), BackendName());

TEST(ReqToToken, BadSizes) {
  for (const auto& [requests, context] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 4}, {-1, 4}, {4, 0}, {std::numeric_limits<int64_t>::max(), 4}, {4, -1}}) {
    EXPECT_TRUE(Fails(ReqToTokenPool::Create(requests, context), absl::StatusCode::kInvalidArgument,
                      "must lie in"));
  }
  EXPECT_TRUE(
      Fails(ReqToTokenPool::Create(ReqToTokenPool::kMaxRequests, ReqToTokenPool::kMaxContextTokens),
            absl::StatusCode::kResourceExhausted, "are available"));
}

TEST(ReqToToken, ADevicesTableIsNotLargerThanItsIndices) {
  const auto memory = std::make_shared<GuardedMemory>();
  EXPECT_TRUE(Fails(ReqToTokenPool::Create(1 << 16, 1 << 15, memory),
                    absl::StatusCode::kInvalidArgument, "a device's table", "is 2147483648",
                    "[1, 2147483647]"));
}

TEST(ReqToToken, WhatADeviceFailsWithIsPassedOn) {
  const auto memory = std::make_shared<GuardedMemory>();
  ReqToTokenPool pool = Must(ReqToTokenPool::Create(2, 4, memory));
  Must(pool.Allocate(1));
  memory->failure = absl::UnavailableError("gone");
  const std::vector<int32_t> values = {1};
  EXPECT_TRUE(Fails(pool.Write(0, 0, values), absl::StatusCode::kUnavailable, "gone"));
  EXPECT_TRUE(Fails(ReqToTokenPool::Create(2, 4, memory), absl::StatusCode::kUnavailable, "gone"));
}

}  // namespace
}  // namespace kvferry
