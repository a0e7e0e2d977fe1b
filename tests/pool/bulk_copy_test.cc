#include "pool/bulk_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace kvferry {
namespace {

// Every length and alignment around the lines that are stored whole.
TEST(BulkCopy, AsMemcpy) {
  std::mt19937_64 random(1);
  std::vector<std::byte> from(2048);
  for (std::byte& byte : from) byte = static_cast<std::byte>(random());
  for (size_t bytes = 0; bytes <= 700; ++bytes) {
    for (int i = 0; i < 20; ++i) {
      const size_t source = random() % 128;
      const size_t target = 64 + random() % 128;
      std::vector<std::byte> to(1024, std::byte{0x5a});
      std::vector<std::byte> want = to;
      std::copy_n(from.begin() + static_cast<ptrdiff_t>(source), bytes,
                  want.begin() + static_cast<ptrdiff_t>(target));
      BulkCopy(to.data() + target, from.data() + source, bytes);
      FinishBulkCopies();
      ASSERT_EQ(to, want) << bytes << " bytes from " << source << " to " << target;
    }
  }
}

}  // namespace
}  // namespace kvferry
