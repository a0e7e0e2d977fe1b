#pragma once

#include <nanobind/nanobind.h>

namespace kvferry {

// RemoteStore and StoreServer; after BindKvStore.
void BindRemoteStore(nanobind::module_& module);

}  // namespace kvferry
