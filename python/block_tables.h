#pragma once

#include <nanobind/nanobind.h>

namespace kvferry {

// ThreadPool and BlockTables.
void BindBlockTables(nanobind::module_& module);

}  // namespace kvferry
