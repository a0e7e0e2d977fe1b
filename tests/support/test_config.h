#pragma once

#include <cstdlib>
#include <string_view>

#include "base/config.h"

namespace kvferry {

// The path that this run of the tests is for (EVERY_PATH in tests/CMakeLists.txt).
enum class TestPath { kInPlace, kArena, kUcx };

inline TestPath PathUnderTest() {
  const char* name = std::getenv("KVFERRY_TEST_PATH");
  const std::string_view path = name == nullptr ? "" : name;
  return path == "ucx" ? TestPath::kUcx : path == "arena" ? TestPath::kArena : TestPath::kInPlace;
}

// Config() for that path.
inline Config TestConfig() {
  Config config;
  if (PathUnderTest() == TestPath::kInPlace) config.same_host_path = "in_place";
  if (PathUnderTest() == TestPath::kUcx) {
    config.same_host_path = "ucx";
    config.lanes = 2;
  }
  return config;
}

}  // namespace kvferry
