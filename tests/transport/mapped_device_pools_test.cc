// Pools on devices, which peers on this host map in parts.

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/support/captured_log.h"
#include "tests/support/status.h"
#include "tests/transport/mapped_planes.h"

namespace kvferry {
namespace {

// A side whose pool lies on a device.
struct DeviceSide : Side {
  explicit DeviceSide(const std::vector<PoolMemory::SharedPart>& parts) { Offer(parts); }
  explicit DeviceSide(int64_t num_parts) { Offer(Parts(num_parts)); }

  void Offer(const std::vector<PoolMemory::SharedPart>& parts) {
    plane = Must(MakeMappedDataPlane(arena.get(), {nullptr, parts, &memory}, kAnswerTimeoutMs));
  }
  // The pool, in as many parts: the last bytes are the first part.
  std::vector<PoolMemory::SharedPart> Parts(int64_t num_parts) const {
    std::vector<PoolMemory::SharedPart> parts;
    for (int64_t i = num_parts - 1; i >= 0; --i) {
      const auto bytes = static_cast<size_t>(kPoolBytes / num_parts);
      parts.push_back(Must(memory.Share({pool.data.get() + i * bytes, bytes}))[0]);
    }
    return parts;
  }

  NamedMemory memory;
};

TEST(MappedDevicePools, PiecesLieInAnyOfTheParts) {
  constexpr int64_t kParts = 8, kPartBytes = kPoolBytes / kParts;
  DeviceSide a(kParts), b(0);
  for (int64_t i = 0; i < kPoolBytes; ++i) a.pool.data.get()[i] = static_cast<std::byte>(i / 100);
  const LinkId link = Must(a.plane->Connect(b.plane->address()));
  EXPECT_FALSE(a.plane->ReadsPool(link));
  ASSERT_TRUE(ProgressBoth(a, b, [&] { return a.plane->ReadsPool(link); }));
  EXPECT_FALSE(a.plane->ReadsPool(link + 1));
  // In one part, over the border of two, over several whole ones.
  const std::vector<PoolPiece> pieces = {{10, 20}, {kPartBytes - 5, 11}, {100, 40000}};
  a.SendInPool(link, pieces, 40031);
  ASSERT_TRUE(ProgressBoth(a, b, [&] { return a.done.size() == 1; }));
  ASSERT_EQ(b.events.chunks.size(), 1u);
  std::vector<std::byte> want;
  for (const PoolPiece& piece : pieces) {
    for (uint64_t at = piece.offset; at < piece.offset + piece.bytes; ++at) {
      const uint64_t part = kParts - 1 - at / kPartBytes;
      want.push_back(a.pool.data.get()[part * kPartBytes + at % kPartBytes]);
    }
  }
  EXPECT_EQ(b.events.chunks[0].second, want);
}

TEST(MappedDevicePools, RunsAtPlaces) {
  constexpr int64_t kParts = 4, kPartBytes = kPoolBytes / kParts;
  DeviceSide a(kParts), b(0);
  for (int64_t i = 0; i < kPoolBytes; ++i) {
    a.pool.data.get()[i] = static_cast<std::byte>(i * i / 300);
  }
  const LinkId link = Must(a.plane->Connect(b.plane->address()));
  ASSERT_TRUE(ProgressBoth(a, b, [&] { return a.plane->ReadsPool(link); }));
  // Up to the end of a part; items of other sizes in another one; the same ones again.
  const std::vector<PoolPiece> places = {
      {kPartBytes - 190, 10}, {3 * kPartBytes, 100}, {kPartBytes + 7, 1}, {kPartBytes + 7, 1}};
  const std::vector<PoolPiece> runs = {{18, 1}, {0, 3}, {5, 1}};
  std::vector<PoolPiece> entries = places;
  entries.insert(entries.end(), runs.begin(), runs.end());
  a.SendList(link, ListOf(entries, places.size()), 5 * 112);
  ASSERT_TRUE(ProgressBoth(a, b, [&] { return a.done.size() == 1; }));
  std::vector<std::byte> want;
  for (const PoolPiece& place : places) {
    for (const PoolPiece& run : runs) {
      for (uint64_t i = 0; i < run.bytes * place.bytes; ++i) {
        const uint64_t at = place.offset + run.offset * place.bytes + i;
        const uint64_t part = kParts - 1 - at / kPartBytes;
        want.push_back(a.pool.data.get()[part * kPartBytes + at % kPartBytes]);
      }
    }
  }
  // The same again, of which nothing is left of the first time.
  a.SendList(link, ListOf(entries, places.size()), 5 * 112);
  ASSERT_TRUE(ProgressBoth(a, b, [&] { return a.done.size() == 2; }));
  ASSERT_EQ(b.events.chunks.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(b.events.chunks[i].second, want);
    EXPECT_TRUE(b.events.whole[i]);
  }
  EXPECT_TRUE(b.events.down.empty());
}

// Each is dropped, whatever its numbers come to where they overflow.
TEST(MappedDevicePools, HostilePlaces) {
  struct Case {
    uint64_t places;
    std::vector<PoolPiece> entries;
    uint32_t bytes;
    std::string why;
  };
  constexpr uint64_t kHalf = uint64_t{1} << 63, kAll = UINT64_MAX, kPart = kPoolBytes / 2;
  const std::vector<Case> cases = {
      {65537, {{0, 1}, {0, 1}}, 1, "65537 places"},
      {3, {{0, 1}, {0, 1}}, 2, "3 places in a list of 3"},
      {kAll, {{0, 1}, {0, 1}}, 1, "places in a list"},
      {1, {{0, 1}}, 1, "places without runs"},
      {1, {{0, 1}, {0, 0}}, 0, "items 0 + 0"},
      {1, {{0, 1}, {0, 1}, {0, 0}}, 1, "items 0 + 0"},
      {1, {{0, 1}, {kAll, 1}}, 1, "+ 1 after 0"},
      {1, {{0, 1}, {0, kAll}}, 1, "after 0 of a chunk of 1"},
      {1, {{0, 1}, {0, 1}, {0, kAll}}, 1, "after 1 of a chunk of 1"},
      {1, {{0, 1}, {0, 6}, {0, 6}}, 11, "items 0 + 6 after 6"},
      {1, {{0, 0}, {0, 1}}, 1, "items of 0 bytes"},
      {1, {{0, kHalf}, {0, 2}}, 2, "2 items of 9223372036854775808 bytes"},
      {2, {{0, 10}, {0, kHalf}, {0, 2}}, 20, "0 left"},
      {1, {{0, 10}, {0, 2}}, 19, "2 items of 10 bytes"},
      {1, {{0, 10}, {0, 2}}, 21, "places of 20 bytes for a chunk of 21"},
      {2, {{0, 10}, {0, 10}, {0, 2}}, 39, "19 left"},
      {2, {{0, 10}, {0, 10}, {0, 2}}, 41, "places of 40 bytes"},
      {1, {{kPoolBytes, 1}, {0, 1}}, 1, "of a pool's part"},
      {1, {{kAll, 1}, {0, 1}}, 1, "of a pool's part"},
      {1, {{kAll, 1}, {1, 1}}, 1, "of a pool's part"},
      {1, {{0, 1}, {kPart, 1}}, 1, "of a pool's part"},
      {1, {{0, 2}, {kPart / 2, 1}}, 2, "of a pool's part"},
      {1, {{kPart - 10, 1}, {0, 11}}, 11, "of a pool's part"},
      {2, {{0, 1}, {kPart - 10, 1}, {10, 1}, {0, 1}}, 4, "of a pool's part"},
      // Ends at byte 2^64.
      {1, {{0, uint64_t{1} << 31}, {(uint64_t{1} << 33) - 1, 1}}, 1U << 31, "of a pool's part"},
  };
  for (const Case& c : cases) {
    CapturedLog log;
    DeviceSide a(2), b(0);
    const LinkId link = Must(a.plane->Connect(b.plane->address()));
    ASSERT_TRUE(ProgressBoth(a, b, [&] { return a.plane->ReadsPool(link); }));
    a.SendList(link, ListOf(c.entries, c.places), c.bytes);
    EXPECT_TRUE(ProgressBoth(a, b, [&] { return !a.events.down.empty(); })) << c.why;
    EXPECT_TRUE(log.Has({"dropped a peer on this host", c.why})) << c.why << log.ToString();
    EXPECT_TRUE(b.events.chunks.empty());
  }
}

// A pool on the host takes copies of what lies on a device in any case: that it cannot map it is no
// news, and nothing that other settings of containers would change.
TEST(MappedDevicePools, OfWhichAPoolOnTheHostSaysNothing) {
  const CapturedLog log;
  DeviceSide a(8);
  Side host;
  host.plane =
      Must(MakeMappedDataPlane(host.arena.get(), {.memory = HostMemory().get()}, kAnswerTimeoutMs));
  const LinkId link = Must(a.plane->Connect(host.plane->address()));
  a.Send(link, 1);
  ASSERT_TRUE(ProgressBoth(a, host, [&] { return a.done.size() == 1; }));
  EXPECT_FALSE(a.plane->ReadsPool(link));
  EXPECT_TRUE(log.lines().empty()) << log.ToString();
}

TEST(MappedDevicePools, WhoCannotMapThemGetsCopies) {
  DeviceSide a(0), other(0);
  std::vector<PoolMemory::SharedPart> parts = a.Parts(8);
  parts[5].name = "of another device";
  a.Offer(parts);
  Side host;
  const LinkId to_other = Must(a.plane->Connect(other.plane->address()));
  const LinkId to_host = Must(a.plane->Connect(host.plane->address()));
  a.Send(to_other, 1);
  a.Send(to_host, 2);
  ASSERT_TRUE(StepUntil([&] { a.Progress(), other.Progress(), host.Progress(); },
                        [&] { return a.done.size() == 2; }));
  EXPECT_TRUE(IsOk(a.done[0]));
  EXPECT_TRUE(IsOk(a.done[1]));
  EXPECT_FALSE(a.plane->ReadsPool(to_other));
  EXPECT_FALSE(a.plane->ReadsPool(to_host));
  EXPECT_EQ(other.events.chunks.size(), 1u);
  // And is not sent pieces of them.
  a.SendInPool(to_other, {{0, 10}}, 10);
  EXPECT_TRUE(ProgressBoth(a, other, [&] { return a.events.down.size() == 1; }));
}

// Each is dropped: what such a peer says is not to be believed.
TEST(MappedDevicePools, HostileParts) {
  const auto is_dropped = [](const std::vector<PoolMemory::SharedPart>& parts, const auto& send) {
    DeviceSide a(parts), b(0);
    const LinkId link = Must(a.plane->Connect(b.plane->address()));
    ProgressBoth(a, b, [&] { return a.plane->ReadsPool(link) || !a.events.down.empty(); });
    if (a.events.down.empty()) send(a, link);
    return ProgressBoth(a, b, [&] { return !a.events.down.empty(); });
  };
  const auto nothing = [](DeviceSide&, LinkId) {};
  static std::byte memory[100];
  const auto part = [&](int64_t bytes) {
    return PoolMemory::SharedPart{Must(NamedMemory().Share(memory))[0].name, bytes};
  };
  EXPECT_TRUE(is_dropped({part(0)}, nothing));
  EXPECT_TRUE(is_dropped({part(-1)}, nothing));
  EXPECT_TRUE(is_dropped({part(int64_t{1} << 45), part(1)}, nothing));
  EXPECT_TRUE(is_dropped({{"", 1}}, nothing));
  EXPECT_TRUE(is_dropped({part(100)}, [](DeviceSide& a, LinkId link) {
    a.SendInPool(link, {{90, 11}}, 11);
  }));
  EXPECT_TRUE(is_dropped({part(100)}, [](DeviceSide& a, LinkId link) {
    a.SendInPool(link, {{UINT64_MAX, 2}}, 2);
  }));
  EXPECT_TRUE(is_dropped({part(100)}, [](DeviceSide& a, LinkId link) {
    const std::vector<PoolPiece> pieces = ListOf({{0, 10}});
    const auto list = std::as_bytes(std::span(pieces));
    const auto chunk = a.arena->Bytes(a.arena->Take());
    std::copy(list.begin(), list.end(), chunk.begin());
    a.plane->SendPayload(link, {1, 0, 0, 10, kChunkInPool | kChunkHasChecksum},
                         chunk.first(list.size()), [](const absl::Status&) {});
  }));
}

}  // namespace
}  // namespace kvferry
