#pragma once

// Conversion of rows of numbers between the dtypes of KV caches.

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "pool/kv_layout.h"

namespace kvferry {

// out[i] = in[i] * multiply / divide for i in [0, n), computed in float32 and rounded once, to the
// nearest and ties to even. The fp8 formats saturate at their largest finite value, infinities too,
// as engines' KV caches do; float16 and bfloat16 overflow to infinity. NaN stays NaN. `in` and
// `out` need no alignment and must not overlap.
using CastFn = void (*)(const std::byte* in, std::byte* out, int64_t n, float multiply,
                        float divide);

// What values may be multiplied with or divided by: finite and above 0.
bool IsScale(float number);

// The same source, compiled for more and more of x86-64's vector instructions.
enum class CpuKernels : uint8_t { kPortable, kAvx2, kAvx512 };
inline constexpr std::array kAllCpuKernels = {CpuKernels::kPortable, CpuKernels::kAvx2,
                                              CpuKernels::kAvx512};

absl::string_view CpuKernelsName(CpuKernels kernels);
// What this machine can run, and this build holds.
bool CanRun(CpuKernels kernels);
// The last one that can run: bench/kernels_bench.cc shows each to be the faster for it.
CpuKernels BestCpuKernels();

// nullptr when one of the dtypes holds no numbers (uint8: bytes of somebody's own). CanRun(kernels)
// must be true.
CastFn CastBetween(DType from, DType to, CpuKernels kernels = BestCpuKernels());

}  // namespace kvferry
