#pragma once

#include <nanobind/nanobind.h>

namespace kvferry {

// TokenKvPool, LayerCounter, HostKvPool and BlockCache.
void BindTokenPools(nanobind::module_& module);

}  // namespace kvferry
