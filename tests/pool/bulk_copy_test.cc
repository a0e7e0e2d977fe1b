#include "pool/bulk_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <span>
#include <vector>

namespace kvferry {
namespace {

// Every alignment around the lines that are stored whole, in buffers of kRoom bytes.
constexpr size_t kRoom = 8192;
template <typename Copy>
void ExpectAsMemcpy(size_t bytes, const Copy& copy) {
  std::mt19937_64 random(bytes);
  std::vector<std::byte> from(kRoom);
  for (std::byte& byte : from) byte = static_cast<std::byte>(random());
  for (int i = 0; i < 20; ++i) {
    const size_t source = random() % 128;
    const size_t target = 64 + random() % 128;
    std::vector<std::byte> to(kRoom, std::byte{0x5a});
    std::vector<std::byte> want = to;
    std::copy_n(from.begin() + static_cast<ptrdiff_t>(source), bytes,
                want.begin() + static_cast<ptrdiff_t>(target));
    copy(to.data() + target, from.data() + source, bytes);
    FinishBulkCopies();
    ASSERT_EQ(to, want) << bytes << " bytes from " << source << " to " << target;
  }
}

// Every length around those where the ways of copying change.
template <typename Copy>
void ExpectAsMemcpy(const Copy& copy) {
  for (size_t bytes = 0; bytes <= 700; ++bytes) ExpectAsMemcpy(bytes, copy);
  for (size_t bytes = 900; bytes <= 1200; bytes += 7) ExpectAsMemcpy(bytes, copy);
  for (size_t bytes = 2040; bytes <= 2060; ++bytes) ExpectAsMemcpy(bytes, copy);
  for (size_t bytes = 2500; bytes <= 7000; bytes += 501) ExpectAsMemcpy(bytes, copy);
}

TEST(BulkCopy, AsMemcpy) {
  ExpectAsMemcpy(
      [](std::byte* to, const std::byte* from, size_t bytes) { BulkCopy(to, from, bytes); });
}

TEST(BulkCopy, AsMemcpyWhateverComesNext) {
  const std::vector<std::byte> next(kRoom);
  for (const size_t next_bytes : {1, 63, 64, 200, 1024, 8192}) {
    ExpectAsMemcpy([&](std::byte* to, const std::byte* from, size_t bytes) {
      BulkCopy(to, from, bytes, std::span(next).first(next_bytes));
    });
  }
}

}  // namespace
}  // namespace kvferry
