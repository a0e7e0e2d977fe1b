#include "pool/casts.h"

#include <gtest/gtest.h>

#include "tests/pool/casts_suite.h"

namespace kvferry {
namespace {

CastBackend BackendWith(CpuKernels kernels) {
  return {BackendOf(kernels), [kernels](DType from, DType to, const std::byte* in, std::byte* out,
                                        int64_t n, float multiply, float divide) {
            CastBetween(from, to, kernels)(in, out, n, multiply, divide);
          }};
}

INSTANTIATE_TEST_SUITE_P(Kernels, Casts,
                         testing::Values(BackendWith(CpuKernels::kPortable),
                                         BackendWith(CpuKernels::kAvx2),
                                         BackendWith(CpuKernels::kAvx512)),
                         BackendName());

TEST(CastsOfBytes, BytesOfSomebodysOwnAreNoNumbers) {
  for (const CpuKernels kernels : kAllCpuKernels) {
    if (!CanRun(kernels)) continue;
    EXPECT_EQ(CastBetween(DType::kUint8, DType::kFloat32, kernels), nullptr);
    EXPECT_EQ(CastBetween(DType::kFloat32, DType::kUint8, kernels), nullptr);
  }
}

}  // namespace
}  // namespace kvferry
