#pragma once

#include <nanobind/nanobind.h>

namespace kvferry {

// LookupProducer, LookupConsumer and what they give out; kvferry.KVLookupBuffer is made of them.
void BindLookupBuffer(nanobind::module_& module);

}  // namespace kvferry
