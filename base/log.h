#pragma once

#include <spdlog/logger.h>

namespace kvferry {

// The process-wide logger "kvferry" (stderr). Level from KVFERRY_LOG = trace | debug | info | warn
// | error | off, default warn, read at first use. A message stays on one line. Thread-safe.
spdlog::logger& Log();

}  // namespace kvferry
