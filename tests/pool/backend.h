#pragma once

// What the suites that several kernel sets enrol in know of each.

#include <gtest/gtest.h>

#include <concepts>
#include <ostream>
#include <string>

#include "pool/casts.h"

namespace kvferry {

struct Backend {
  std::string name;
  std::string missing;  // Why it cannot run on this machine; empty when it can.
};

inline Backend BackendOf(CpuKernels kernels) {
  return {kernels == CpuKernels::kPortable ? "Portable" : "Avx512",
          CanRun(kernels) ? "" : "this processor has no AVX-512 (F, BW, DQ, VL)"};
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
