// Bytes that nobody of ours would send: they are refused with a clean status, at a bounded cost.

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstring>
#include <memory>
#include <random>

#include "tests/support/sanitized.h"
#include "tests/transport/sample_messages.h"
#include "transport/control/codec.h"

namespace kvferry {
namespace {

// Decodes from memory of exactly that size, so that AddressSanitizer sees a read past the end. A
// message that decodes must also encode and decode again to the same.
void Try(const std::string& bytes) {
  const std::unique_ptr<std::byte[]> exact(new std::byte[bytes.size()]);
  std::memcpy(exact.get(), bytes.data(), bytes.size());
  const absl::StatusOr<Message> decoded = DecodeMessage({exact.get(), bytes.size()});
  if (decoded.ok()) {
    const std::string encoded = EncodeMessage(*decoded);
    const absl::StatusOr<Message> again = DecodeMessage(std::as_bytes(std::span(encoded)));
    ASSERT_TRUE(IsOk(again));
    ASSERT_EQ(Describe(*again), Describe(*decoded));
    return;
  }
  ASSERT_TRUE(absl::IsInvalidArgument(decoded.status()) ||
              absl::IsFailedPrecondition(decoded.status()))
      << decoded.status();
  ASSERT_LT(decoded.status().message().size(), 2000u);
}

TEST(CodecHostile, EveryTruncation) {
  for (const auto& [name, message] : SampleMessages()) {
    const std::string bytes = EncodeMessage(message);
    for (size_t size = 0; size < bytes.size(); ++size) {
      const absl::StatusOr<Message> decoded =
          DecodeMessage(std::as_bytes(std::span(bytes)).first(size));
      ASSERT_TRUE(Fails(decoded, absl::StatusCode::kInvalidArgument)) << name << " cut to " << size;
      Try(bytes.substr(0, size));
    }
  }
}

TEST(CodecHostile, EveryMutationOfEveryByte) {
  for (const auto& [name, message] : SampleMessages()) {
    SCOPED_TRACE(name);
    const std::string bytes = EncodeMessage(message);
    for (size_t at = 0; at < bytes.size(); ++at) {
      for (int change = 1; change < 256; ++change) {
        std::string mutated = bytes;
        mutated[at] = static_cast<char>(mutated[at] ^ change);
        ASSERT_NO_FATAL_FAILURE(Try(mutated)) << "byte " << at << " ^ " << change;
      }
    }
  }
}

TEST(CodecHostile, RandomSplicesAndMutations) {
  std::mt19937_64 random(17);
  const auto samples = SampleMessages();
  for (int i = 0; i < 100000; ++i) {
    std::string bytes = EncodeMessage(samples[random() % samples.size()].second);
    const std::string other = EncodeMessage(samples[random() % samples.size()].second);
    const size_t changes = random() % 6;
    for (size_t j = 0; j < changes; ++j) {
      const size_t at = random() % (bytes.size() + 1);
      const size_t from = random() % other.size();
      const std::string piece = other.substr(from, random() % 12);
      switch (random() % 3) {
        case 0:
          bytes.insert(at, piece);
          break;
        case 1:
          bytes.replace(at, std::min(piece.size(), bytes.size() - at), piece);
          break;
        default:
          if (at < bytes.size()) bytes[at] = static_cast<char>(random());
      }
    }
    ASSERT_NO_FATAL_FAILURE(Try(bytes)) << "round " << i;
  }
}

std::string Repeat(const std::string& unit, size_t count) {
  std::string result;
  for (size_t i = 0; i < count; ++i) result += unit;
  return result;
}

int64_t PeakKib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

TEST(CodecHostile, BombsAreCheap) {
  const std::string array32("\xdd\xff\xff\xff\xff", 5);
  const std::string map32("\xdf\xff\xff\xff\xff", 5);
  const std::vector<std::pair<std::string, std::string>> bombs = {
      {"array32 of 2^32 - 1", array32},
      {"map32 of 2^32 - 1", map32},
      {"str32 of 2^32 - 1", std::string("\xdb\xff\xff\xff\xff", 5)},
      {"bin32 of 2^32 - 1", std::string("\xc6\xff\xff\xff\xff", 5)},
      {"ext32 of 2^32 - 1", std::string("\xc9\xff\xff\xff\xff\x01", 6)},
      {"nested array32", Repeat(array32, 1000)},
      {"nested map32", Repeat(map32, 1000)},
      {"a million arrays inside each other", Repeat("\x91", 1000000)},
      {"a million maps inside each other", Repeat("\x81\xa1k", 600000)},
      {"16 MiB of nils",
       std::string("\xdd\x00\xff\xff\xfb", 5) + std::string((16 << 20) - 5, '\xc0')},
      {"2 MiB of nils",
       std::string("\xdd\x00\x1f\xff\xfb", 5) + std::string((2 << 20) - 5, '\xc0')},
      {"arrays as large as allowed, in each other",
       Repeat(std::string("\xdd\x00\x02\x00\x00", 5), 4) + std::string(1 << 20, '\xc0')},
      {"a map of arrays as large as allowed",
       "\x88" + Repeat("\xa1"
                       "a" +
                           std::string("\xdd\x00\x02\x00\x00", 5) + std::string(1 << 17, '\xc0'),
                       8)},
  };
  const int64_t before = PeakKib();
  for (const auto& [name, bytes] : bombs) {
    EXPECT_TRUE(
        Fails(DecodeMessage(std::as_bytes(std::span(bytes))), absl::StatusCode::kInvalidArgument))
        << name;
  }
#ifndef KVFERRY_SANITIZED
  EXPECT_LT(PeakKib() - before, 100 << 10) << "KiB";
#else
  (void)before;
#endif
}

TEST(CodecHostile, TooLarge) {
  const std::string bytes(kMaxMessageBytes + 1, 'x');
  EXPECT_TRUE(Fails(DecodeMessage(std::as_bytes(std::span(bytes))),
                    absl::StatusCode::kInvalidArgument, "2097153 bytes, limit 2097152"));
}

}  // namespace
}  // namespace kvferry
