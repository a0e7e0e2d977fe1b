#pragma once

#include <nanobind/nanobind.h>

namespace kvferry {

// PrefillEndpoint, DecodeEndpoint, their tickets and handles.
void BindEndpoints(nanobind::module_& module);

}  // namespace kvferry
