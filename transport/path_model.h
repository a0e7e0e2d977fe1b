#pragma once

#include <array>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "transport/read_costs.h"

namespace kvferry {

// The ways to a peer that may read the pool, on this host or from afar: it takes the pages from
// where they lie, or chunks that this side has gathered in the arena; or, where no model is asked,
// in the device's.
enum class PageWay { kInPlace, kArena, kDeviceArena };

// What copying costs one processor: seconds a byte, and seconds more for each piece.
struct CopyCost {
  double byte_seconds = 0;
  double piece_seconds = 0;

  double PerByte(int64_t piece_bytes) const {
    return byte_seconds + piece_seconds / static_cast<double>(piece_bytes);
  }
};

// The three copies that a transfer between two processes of one host consists of.
struct CopyCosts {
  CopyCost page_to_page;
  CopyCost gather;   // From pages into a chunk.
  CopyCost scatter;  // From a chunk into pages.
};

// Of this machine, measured by copying for about ten milliseconds, of this thread's time on a
// processor, in 8 MiB of its own; all zero when that memory is refused. Thread-safe.
CopyCosts MeasureCopyCosts();
// The same, measured once a process.
const CopyCosts& MeasuredCopyCosts();

// Which way is quicker, for transfers of a size and a fragmentation: from what copies cost at
// first, then more and more from the transfers themselves. Not thread-safe.
class PathModel {
 public:
  struct Work {
    int64_t bytes;        // Of all pages; positive.
    int64_t piece_bytes;  // That lie together, on average; positive.
  };

  // Of peers on this host.
  explicit PathModel(const CopyCosts& costs);
  // Of one that reads from afar. The two ways have less in common there: what one takes says
  // nothing of the other, which is therefore tried sooner, unless it is expected to be far worse.
  PathModel(const CopyCosts& costs, const ReadCosts& reads);

  // In place, unless the arena saves more than 15 % of the time, or half of it while one of them
  // was never tried: it takes a second processor and copies everything twice. One choice in
  // kTryEvery is the other way, if that was never tried or is within a factor of two, so that it is
  // known what it takes, and what is worse is tried more seldom, for it may have had a bad time;
  // but none of those transfers of which nothing can be learnt (`can_tell`).
  PageWay Choose(const Work& work, bool can_tell = true);
  // What a transfer took that had this node to itself. Of the way that was never tried it says how
  // much more than copies a transfer takes.
  void Observe(PageWay way, const Work& work, double seconds);
  // What Choose goes by.
  double ExpectedSeconds(PageWay way, const Work& work) const;

  static constexpr int kTryEvery = 32;

 private:
  struct Class {
    std::array<double, 2> byte_seconds{};  // By PageWay, of the first two.
    std::array<int64_t, 2> seen{};         // Transfers.
    uint64_t choices = 0;
  };
  // 256 bytes and less, doubling, to 64 KiB and more; up to 1 MiB, 32 MiB, more.
  static constexpr int kPieceClasses = 9;
  static constexpr int kSizeClasses = 3;

  static int ClassOf(const Work& work);
  static uint64_t TryEvery(double times_worse);
  // Seconds a byte of both ways, for pieces of so many bytes.
  void Expect(absl::FunctionRef<std::array<double, 2>(int64_t)> costs);

  const bool afar_ = false;
  std::array<Class, kPieceClasses * kSizeClasses> classes_;
};

}  // namespace kvferry
