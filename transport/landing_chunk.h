#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "base/hash.h"
#include "transport/data_plane.h"
#include "transport/landing.h"
#include "transport/piece_copy.h"

namespace kvferry {

// One chunk that comes part by part, on its way into the pages of a live fetch. One thread's.
class LandingChunk final : public ChunkSink {
 public:
  using Landed = std::function<void(const ChunkHeader&, const absl::Status&)>;

  // Of a chunk that `landing` has begun. `copy` and what `landed` needs outlive this; `landed` is
  // called from End().
  LandingChunk(const ChunkHeader& header, std::shared_ptr<Landing> landing, PieceCopy* copy,
               Landed landed);

  bool prefers_fill() const override;
  bool Fill(absl::FunctionRef<int64_t(MutablePieces)> fill) override;
  bool Copy(std::span<const std::byte> bytes,
            std::shared_ptr<const MovesUnderWay>* reading) override;
  bool settled() const override;
  void End() override;

 private:
  void Add(MutablePieces pieces, int64_t bytes);
  // Copied, or at least begun.
  absl::Status BeginCopy(std::span<const std::byte> bytes);
  // The first error of all parts.
  absl::Status Settle();

  const ChunkHeader header_;
  const std::shared_ptr<Landing> landing_;
  PieceCopy* const copy_;
  const Landed landed_;
  int64_t got_ = 0;
  absl::Status copied_{};                                          // The first that went wrong.
  std::vector<std::shared_ptr<const MovesUnderWay>> under_way_{};  // In order.
  std::optional<Xxh3Stream> checksum_;  // Of what has come, if the chunk has one.
};

}  // namespace kvferry
