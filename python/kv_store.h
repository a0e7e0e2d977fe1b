#pragma once

#include <nanobind/nanobind.h>

namespace kvferry {

// HostStore and what other stores were built, block_keys, and the header of values.
void BindKvStore(nanobind::module_& module);

}  // namespace kvferry
