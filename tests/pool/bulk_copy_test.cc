#include "pool/bulk_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <span>
#include <vector>

namespace kvferry {
namespace {

// Every alignment around the lines that are stored whole, in buffers of kRoom bytes.
constexpr size_t kRoom = 24 << 10;
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
  for (size_t bytes = 2500; bytes <= 20000; bytes += 501) ExpectAsMemcpy(bytes, copy);
}

TEST(BulkCopy, AsMemcpy) {
  ExpectAsMemcpy(
      [](std::byte* to, const std::byte* from, size_t bytes) { BulkCopy(to, from, bytes); });
}

// Pieces of all lengths from all over to all over, until some must wait and long after.
template <void (*kCopy)(std::byte*, const std::byte*, size_t)>
void ExpectCopiedAhead(size_t most_bytes) {
  std::mt19937_64 random(most_bytes);
  std::vector<std::byte> from(1 << 20);
  for (std::byte& byte : from) byte = static_cast<std::byte>(random());
  std::vector<std::byte> to(from.size());
  std::vector<std::byte> want = to;
  CopyAhead<kCopy> copies;
  for (size_t at = 0; at + most_bytes < to.size();) {
    const size_t bytes = random() % (most_bytes + 1);
    const size_t source = random() % (from.size() - most_bytes);
    copies.Add(to.data() + at, std::span(from).subspan(source, bytes));
    std::copy_n(from.begin() + static_cast<ptrdiff_t>(source), bytes,
                want.begin() + static_cast<ptrdiff_t>(at));
    at += bytes + random() % 3;
  }
  copies.Finish();
  FinishBulkCopies();
  EXPECT_EQ(to, want);
  copies.Finish();  // Of nothing.
  EXPECT_EQ(to, want);
}

TEST(CopyAhead, EveryPieceOnce) {
  for (const size_t most_bytes : {1, 100, 300, 2048, 5000, 70000}) {
    SCOPED_TRACE(most_bytes);
    ExpectCopiedAhead<PlainCopy>(most_bytes);
    ExpectCopiedAhead<BulkCopy>(most_bytes);
  }
}

}  // namespace
}  // namespace kvferry
