#pragma once

#include <cstdlib>
#include <string_view>

#include "base/config.h"

namespace kvferry {

// The path that this run of the tests is for (EVERY_PATH in tests/CMakeLists.txt).
enum class TestPath { kInPlace, kArena, kTcp, kUcx, kDirect };

inline std::string_view NameOfPath() {
  const char* name = std::getenv("KVFERRY_TEST_PATH");
  return name == nullptr ? "" : name;
}

// "device_tcp" is "tcp" with pools on a device.
inline bool PoolsLieOnADevice() { return NameOfPath().starts_with("device_"); }

inline TestPath PathUnderTest() {
  std::string_view path = NameOfPath();
  if (PoolsLieOnADevice()) path.remove_prefix(std::string_view("device_").size());
  if (path == "tcp") return TestPath::kTcp;
  if (path == "ucx") return TestPath::kUcx;
  if (path == "direct") return TestPath::kDirect;
  return path == "arena" ? TestPath::kArena : TestPath::kInPlace;
}

inline bool PathIsOverANetwork() {
  return PathUnderTest() == TestPath::kTcp || PathUnderTest() == TestPath::kUcx ||
         PathUnderTest() == TestPath::kDirect;
}
// Whether pages are read where they lie, if they are not too small for it.
inline bool PathReadsThePool() {
  return PathUnderTest() == TestPath::kInPlace || PathUnderTest() == TestPath::kDirect;
}

// One-sided reads where there is no network for them: by process_vm_readv(2).
inline void ReadDirectly(Config* config) {
  config->same_host_path = "network";
  config->network_path = "direct";
  config->direct_tls = "posix,cma";
}

// Config() for that path; over TCP with a key, as between hosts.
inline Config TestConfig() {
  Config config;
  if (PathUnderTest() == TestPath::kInPlace) config.same_host_path = "in_place";
  // Between processes the device's; within one, which cannot map its own device memory, the host's.
  if (PathUnderTest() == TestPath::kArena && PoolsLieOnADevice()) config.same_host_path = "arena";
  if (PathUnderTest() == TestPath::kTcp || PathUnderTest() == TestPath::kUcx) {
    config.same_host_path = "network";
    config.lanes = 2;
  }
  if (PathUnderTest() == TestPath::kTcp) config.key_file = KVFERRY_TEST_KEY;
  if (PathUnderTest() == TestPath::kUcx) config.ucx_tls = "tcp";
  if (PathUnderTest() == TestPath::kDirect) ReadDirectly(&config);
  return config;
}

}  // namespace kvferry
