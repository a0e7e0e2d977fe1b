#pragma once

// Early return on a failed absl::Status or absl::StatusOr. Every API of kvferry that can fail
// returns one of the two; no exception crosses a kvferry function.

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvferry::internal {
inline const absl::Status& AsStatus(const absl::Status& status) { return status; }
template <typename T>
const absl::Status& AsStatus(const absl::StatusOr<T>& result) {
  return result.status();
}
}  // namespace kvferry::internal

#define KVFERRY_RETURN_IF_ERROR(expr)                           \
  do {                                                          \
    if (auto kvferry_status_ = (expr); !kvferry_status_.ok()) { \
      return ::kvferry::internal::AsStatus(kvferry_status_);    \
    }                                                           \
  } while (false)

#define KVFERRY_CONCAT_INNER_(a, b) a##b
#define KVFERRY_CONCAT_(a, b) KVFERRY_CONCAT_INNER_(a, b)
#define KVFERRY_ASSIGN_OR_RETURN(lhs, expr) \
  KVFERRY_ASSIGN_OR_RETURN_IMPL_(KVFERRY_CONCAT_(kvferry_result_, __LINE__), lhs, expr)
#define KVFERRY_ASSIGN_OR_RETURN_IMPL_(result, lhs, expr) \
  auto result = (expr);                                   \
  if (!result.ok()) return result.status();               \
  lhs = std::move(result).value()
