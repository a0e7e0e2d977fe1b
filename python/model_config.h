#pragma once

#include <nanobind/nanobind.h>

namespace kvferry {

void BindModelConfig(nanobind::module_& module);

}  // namespace kvferry
