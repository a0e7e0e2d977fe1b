// Compiled with AVX2 switched on: nothing here may run before CanRun() has said so.

#include "pool/casts.h"

#define KVFERRY_CASTS_NAMESPACE casts_avx2
#include "pool/casts_impl.h"
