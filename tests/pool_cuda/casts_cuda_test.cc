#include <gtest/gtest.h>

#include "pool/cuda/token_copy_cuda.h"
#include "tests/pool/casts_suite.h"
#include "tests/pool_cuda/device.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

// One row of n values.
void CastOnDevice(DType from, DType to, const std::byte* in, std::byte* out, int64_t n,
                  float multiply, float divide) {
  const DeviceBytes source({in, static_cast<size_t>(n * DTypeBytes(from))});
  const DeviceBytes destination({out, static_cast<size_t>(n * DTypeBytes(to))});
  TokenView from_view = TokenView::Packed(source.data(), from, 1, 1, n);
  TokenView to_view = TokenView::Packed(destination.data(), to, 1, 1, n);
  from_view.scale = multiply;
  to_view.scale = divide;
  EXPECT_TRUE(
      IsOk(CopyTokensCuda(from_view, nullptr, to_view, nullptr, 1, nullptr, cudaStream_t{})));
  destination.CopyTo(out);
}

INSTANTIATE_TEST_SUITE_P(Kernels, Casts,
                         testing::Values(CastBackend{{"Cuda", MissingDevice()}, CastOnDevice}),
                         BackendName());

}  // namespace
}  // namespace kvferry
