#include "pool/cuda/page_copy_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "pool/page_copy.h"

namespace kvferry {
namespace {

// Device memory that is freed with the test.
class DeviceBytes {
 public:
  explicit DeviceBytes(size_t bytes) { EXPECT_EQ(cudaMalloc(&pointer_, bytes), cudaSuccess); }
  ~DeviceBytes() { cudaFree(pointer_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  template <typename T>
  T* as() const {
    return static_cast<T*>(pointer_);
  }

 private:
  void* pointer_ = nullptr;
};

template <typename T>
void ToDevice(const DeviceBytes& device, const std::vector<T>& host) {
  ASSERT_EQ(
      cudaMemcpy(device.as<T>(), host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice),
      cudaSuccess);
}

std::vector<std::byte> ToHost(const DeviceBytes& device, size_t bytes) {
  std::vector<std::byte> host(bytes);
  EXPECT_EQ(cudaMemcpy(host.data(), device.as<std::byte>(), bytes, cudaMemcpyDeviceToHost),
            cudaSuccess);
  return host;
}

std::vector<std::byte> RandomBytes(size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> result(bytes);
  std::generate(result.begin(), result.end(), [&] { return static_cast<std::byte>(random()); });
  return result;
}

class PageCopyCuda : public ::testing::TestWithParam<int64_t> {
 protected:
  static constexpr int64_t kPages = 300;

  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "this machine has no CUDA device";
    }
    std::mt19937 random(7);
    pages_.resize(kPages);
    std::iota(pages_.begin(), pages_.end(), 0);
    std::shuffle(pages_.begin(), pages_.end(), random);
    pages_.resize(kPages / 2);
  }

  std::vector<int64_t> pages_;
};

// The CPU's gather and scatter are the model; they have tests of their own.
TEST_P(PageCopyCuda, GathersWhatTheCpuGathers) {
  const int64_t item_bytes = GetParam();
  std::vector<std::byte> pool = RandomBytes(kPages * item_bytes, 1);
  std::vector<std::byte> want(pages_.size() * item_bytes);
  GatherPages({pool.data(), kPages * item_bytes, item_bytes}, *PageRuns::FromPages(pages_), 0,
              want);

  const DeviceBytes device_pool(pool.size());
  const DeviceBytes device_packed(want.size());
  const DeviceBytes device_pages(pages_.size() * sizeof(int64_t));
  ToDevice(device_pool, pool);
  ToDevice(device_pages, pages_);
  const BufferInfo buffer{device_pool.as<std::byte>(), kPages * item_bytes, item_bytes};
  ASSERT_TRUE(GatherPagesCuda(buffer, device_pages.as<int64_t>(),
                              static_cast<int64_t>(pages_.size()), device_packed.as<std::byte>(),
                              nullptr)
                  .ok());
  EXPECT_EQ(ToHost(device_packed, want.size()), want);
}

TEST_P(PageCopyCuda, ScattersWhatTheCpuScattersAndNothingElse) {
  const int64_t item_bytes = GetParam();
  std::vector<std::byte> want = RandomBytes(kPages * item_bytes, 2);
  const std::vector<std::byte> packed = RandomBytes(pages_.size() * item_bytes, 3);
  const DeviceBytes device_pool(want.size());
  ToDevice(device_pool, want);
  ScatterPages({want.data(), kPages * item_bytes, item_bytes}, *PageRuns::FromPages(pages_), 0,
               packed);

  const DeviceBytes device_packed(packed.size());
  const DeviceBytes device_pages(pages_.size() * sizeof(int64_t));
  ToDevice(device_packed, packed);
  ToDevice(device_pages, pages_);
  const BufferInfo buffer{device_pool.as<std::byte>(), kPages * item_bytes, item_bytes};
  ASSERT_TRUE(ScatterPagesCuda(buffer, device_pages.as<int64_t>(),
                               static_cast<int64_t>(pages_.size()), device_packed.as<std::byte>(),
                               nullptr)
                  .ok());
  EXPECT_EQ(ToHost(device_pool, want.size()), want);
}

TEST(PageCopyCudaArguments, NullPointersAndNegativeCountsAreRefused) {
  std::byte byte{};
  const int64_t page = 0;
  EXPECT_FALSE(GatherPagesCuda({nullptr, 1, 1}, &page, 1, &byte, nullptr).ok());
  EXPECT_FALSE(GatherPagesCuda({&byte, 1, 1}, &page, -1, &byte, nullptr).ok());
  EXPECT_TRUE(GatherPagesCuda({&byte, 1, 1}, &page, 0, &byte, nullptr).ok());
}

// Bytes of a page: a vector multiple, MLA's 1,152, and one that fits no vector.
INSTANTIATE_TEST_SUITE_P(ItemBytes, PageCopyCuda, ::testing::Values(32768, 1152, 37));

}  // namespace
}  // namespace kvferry
