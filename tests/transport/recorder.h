#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "tests/transport/joined.h"
#include "transport/data_plane.h"

namespace kvferry {

// Remembers what data planes report.
struct Recorder : public DataEvents {
  void OnChunk(const ChunkHeader& header, Pieces payload, Intact intact) override {
    chunks.emplace_back(header, Joined(payload));
    if (before_intact) before_intact();
    whole.push_back(intact());
  }
  void OnChunkElsewhere(const ChunkHeader& header, std::span<const std::byte> list) override {
    elsewhere.emplace_back(header, std::vector<std::byte>(list.begin(), list.end()));
  }
  void OnReadFailed(const ChunkHeader& header, const absl::Status& status) override {
    failed.emplace_back(header, status);
  }
  void OnProbed(LinkId link) override { probed.push_back(link); }
  void OnCredit(const CreditHeader& header) override { credits.push_back(header); }
  void OnLinkDown(LinkId link, const absl::Status& status) override {
    down.emplace_back(link, status);
  }

  using Chunks = std::vector<std::pair<ChunkHeader, std::vector<std::byte>>>;
  Chunks chunks;
  std::vector<bool> whole;  // Of each chunk, whether it was intact.
  Chunks elsewhere;
  std::vector<std::pair<ChunkHeader, absl::Status>> failed;
  std::vector<LinkId> probed;
  std::vector<CreditHeader> credits;
  std::vector<std::pair<LinkId, absl::Status>> down;
  std::function<void()> before_intact;
};

}  // namespace kvferry
