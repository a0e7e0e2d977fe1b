#include "pool/casts.h"

#include <cmath>

namespace kvferry {

namespace casts_portable {
CastFn Find(DType from, DType to);
}
namespace casts_avx2 {
CastFn Find(DType from, DType to);
}
namespace casts_avx512 {
CastFn Find(DType from, DType to);
}

bool IsScale(float number) { return std::isfinite(number) && number > 0; }

absl::string_view CpuKernelsName(CpuKernels kernels) {
  switch (kernels) {
    case CpuKernels::kPortable:
      return "portable";
    case CpuKernels::kAvx2:
      return "AVX2";
    case CpuKernels::kAvx512:
      return "AVX-512";
  }
  return "unknown";
}

bool CanRun(CpuKernels kernels) {
#ifdef KVFERRY_X86_KERNELS
  switch (kernels) {
    case CpuKernels::kPortable:
      return true;
    case CpuKernels::kAvx2:
      return __builtin_cpu_supports("avx2");
    case CpuKernels::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return kernels == CpuKernels::kPortable;
}

CpuKernels BestCpuKernels() {
  static const CpuKernels best = [] {
    CpuKernels found = CpuKernels::kPortable;
    for (const CpuKernels kernels : kAllCpuKernels) found = CanRun(kernels) ? kernels : found;
    return found;
  }();
  return best;
}

CastFn CastBetween(DType from, DType to, CpuKernels kernels) {
#ifdef KVFERRY_X86_KERNELS
  if (kernels == CpuKernels::kAvx512) return casts_avx512::Find(from, to);
  if (kernels == CpuKernels::kAvx2) return casts_avx2::Find(from, to);
#endif
  (void)kernels;
  return casts_portable::Find(from, to);
}

}  // namespace kvferry
