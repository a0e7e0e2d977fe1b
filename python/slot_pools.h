#pragma once

#include <nanobind/nanobind.h>

namespace kvferry {

// ReqToTokenPool and TokenSlotAllocator.
void BindSlotPools(nanobind::module_& module);

}  // namespace kvferry
