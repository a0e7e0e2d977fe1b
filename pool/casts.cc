#include "pool/casts.h"

namespace kvferry {

namespace casts_portable {
CastFn Find(DType from, DType to);
}
namespace casts_avx512 {
CastFn Find(DType from, DType to);
}

bool CanRun(CpuKernels kernels) {
  if (kernels == CpuKernels::kPortable) return true;
#ifdef KVFERRY_AVX512_KERNELS
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

CpuKernels BestCpuKernels() {
  static const CpuKernels best =
      CanRun(CpuKernels::kAvx512) ? CpuKernels::kAvx512 : CpuKernels::kPortable;
  return best;
}

CastFn CastBetween(DType from, DType to, CpuKernels kernels) {
#ifdef KVFERRY_AVX512_KERNELS
  if (kernels == CpuKernels::kAvx512) return casts_avx512::Find(from, to);
#endif
  (void)kernels;
  return casts_portable::Find(from, to);
}

}  // namespace kvferry
