#pragma once

// Device memory of tests.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace kvferry {

// Why tests that need a GPU skip here; empty when there is one.
inline std::string MissingDevice() {
  int devices = 0;
  const bool none = cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0;
  return none ? "this machine has no CUDA device" : "";
}

// Also for who looks at it from another stream than the default one: cudaMemcpy from memory that is
// not pinned may return before the bytes are there.
inline void CopyToDevice(void* to, const void* from, size_t bytes) {
  EXPECT_EQ(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
}

// A test that is skipped without a GPU, and has random numbers of its own.
class DeviceTest : public testing::Test {
 protected:
  explicit DeviceTest(uint32_t seed = 1) : random_(seed) {}

  void SetUp() override {
    const std::string missing = MissingDevice();
    if (!missing.empty()) GTEST_SKIP() << missing;
  }

  std::vector<std::byte> RandomBytes(int64_t bytes) {
    std::vector<std::byte> result(static_cast<size_t>(bytes));
    std::generate(result.begin(), result.end(), [&] { return static_cast<std::byte>(random_()); });
    return result;
  }

  std::mt19937_64 random_;
};

// A copy of host memory on the device, as far from alignment as the original.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::span<const std::byte> host)
      : offset_(reinterpret_cast<uintptr_t>(host.data()) % 16), bytes_(host.size()) {
    EXPECT_EQ(cudaMalloc(&pointer_, bytes_ + 16), cudaSuccess);
    CopyToDevice(data(), host.data(), bytes_);
  }
  template <typename T>
  explicit DeviceBytes(const std::vector<T>& host) : DeviceBytes(std::as_bytes(std::span(host))) {}
  ~DeviceBytes() { cudaFree(pointer_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(pointer_) + offset_; }
  const int32_t* slots() const { return reinterpret_cast<const int32_t*>(data()); }
  int64_t* counter() const { return reinterpret_cast<int64_t*>(data()); }

  // Waits for what runs on the default stream.
  void CopyTo(std::byte* host) const {
    EXPECT_EQ(cudaMemcpy(host, data(), bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
  }
  template <typename T = std::byte>
  std::vector<T> ToHost() const {
    std::vector<T> host(bytes_ / sizeof(T));
    CopyTo(reinterpret_cast<std::byte*>(host.data()));
    return host;
  }

 private:
  const size_t offset_, bytes_;
  void* pointer_ = nullptr;
};

}  // namespace kvferry
