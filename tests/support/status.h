#pragma once

// Assertions on absl::Status and absl::StatusOr.

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "base/status.h"

namespace kvferry {

template <typename T>
::testing::AssertionResult IsOk(const T& result) {
  const absl::Status& status = internal::AsStatus(result);
  if (status.ok()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << status.ToString();
}

// The code, and every one of `parts` in the message.
template <typename T, typename... Parts>
::testing::AssertionResult Fails(const T& result, absl::StatusCode code, const Parts&... parts) {
  const absl::Status& status = internal::AsStatus(result);
  if (status.code() != code) {
    return ::testing::AssertionFailure()
           << "want " << absl::StatusCodeToString(code) << ", got " << status.ToString();
  }
  for (const absl::string_view part : {absl::string_view(parts)..., absl::string_view()}) {
    if (!absl::StrContains(status.message(), part)) {
      return ::testing::AssertionFailure() << "no '" << part << "' in: " << status.ToString();
    }
  }
  return ::testing::AssertionSuccess();
}

// The value of a StatusOr, or a failed test and the end of this process: for arranging, not for
// asserting.
template <typename T>
T Must(absl::StatusOr<T> result) {
  if (!result.ok()) {
    ADD_FAILURE() << result.status().ToString();
    std::abort();
  }
  return std::move(result).value();
}

}  // namespace kvferry
