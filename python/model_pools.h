#pragma once

#include <nanobind/nanobind.h>

namespace kvferry {

void BindModelPools(nanobind::module_& module);

}  // namespace kvferry
