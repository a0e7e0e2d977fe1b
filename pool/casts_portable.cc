#include "pool/casts.h"

#define KVFERRY_CASTS_NAMESPACE casts_portable
#include "pool/casts_impl.h"
