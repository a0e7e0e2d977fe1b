#pragma once

#include <cstdlib>
#include <string_view>

#include "base/config.h"

namespace kvferry {

// Config() with the path that this run of the tests is for (OVER_UCX_TOO in tests/CMakeLists.txt).
inline Config TestConfig() {
  Config config;
  const char* mapped_path = std::getenv("KVFERRY_TEST_MAPPED_PATH");
  config.mapped_path = mapped_path == nullptr || std::string_view(mapped_path) != "false";
  return config;
}

}  // namespace kvferry
