#pragma once

// What the suites that several kernel sets enrol in know of each.

#include <gtest/gtest.h>

#include <algorithm>
#include <concepts>
#include <iterator>
#include <ostream>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "pool/casts.h"

namespace kvferry {

struct Backend {
  std::string name;
  std::string missing;  // Why it cannot run on this machine; empty when it can.
};

inline Backend BackendOf(CpuKernels kernels) {
  const absl::string_view name = CpuKernelsName(kernels);
  std::string plain;  // gtest takes letters and digits only.
  std::copy_if(name.begin(), name.end(), std::back_inserter(plain), absl::ascii_isalnum);
  return {plain, CanRun(kernels) ? "" : absl::StrCat("this processor has no ", name)};
}

// Names instances of a suite after their backends.
struct BackendName {
  template <typename ParamType>
  std::string operator()(const testing::TestParamInfo<ParamType>& info) const {
    return info.param.name;
  }
};

// GoogleTest shows a backend's bytes otherwise.
template <std::derived_from<Backend> AnyBackend>
void PrintTo(const AnyBackend& backend, std::ostream* out) {
  *out << backend.name;
}

}  // namespace kvferry
