#pragma once

#include <nanobind/nanobind.h>

namespace kvferry {

void BindGdnPool(nanobind::module_& module);

}  // namespace kvferry
