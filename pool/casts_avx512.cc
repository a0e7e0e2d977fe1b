// Compiled with AVX-512 switched on: nothing here may run before CanRun() has said so.

#include "pool/casts.h"

#define KVFERRY_CASTS_NAMESPACE casts_avx512
#include "pool/casts_impl.h"
