#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "tests/transport/joined.h"
#include "transport/data_plane.h"

namespace kvferry {

// Remembers what data planes report.
struct Recorder : public DataEvents {
  void OnChunk(const ChunkHeader& header, const Payload& payload, Intact intact) override {
    chunks.emplace_back(header, Joined(payload));
    if (before_intact) before_intact();
    whole.push_back(intact());
  }
  // Parts end up in `chunks`, as one, when they have all come.
  std::unique_ptr<ChunkSink> OnChunkBegins(const ChunkHeader& header) override {
    ++begun;
    if (wants && !wants()) return nullptr;
    return std::make_unique<Sink>(this, header);
  }
  void OnChunkElsewhere(const ChunkHeader& header, std::span<const std::byte> list) override {
    elsewhere.emplace_back(header, std::vector<std::byte>(list.begin(), list.end()));
  }
  void OnReadFailed(const ChunkHeader& header, const absl::Status& status) override {
    failed.emplace_back(header, status);
  }
  void OnProbed(LinkId link) override { probed.push_back(link); }
  void OnCredit(const CreditHeader& header) override { credits.push_back(header); }
  void OnLinkMessage(const MessageHeader& header, std::span<const std::byte> bytes) override {
    messages.emplace_back(header.session, std::vector<std::byte>(bytes.begin(), bytes.end()));
  }
  void OnLinkDown(LinkId link, const absl::Status& status) override {
    down.emplace_back(link, status);
  }

  class Sink : public ChunkSink {
   public:
    Sink(Recorder* recorder, const ChunkHeader& header)
        : recorder_(recorder), header_(header), bytes_(header.bytes) {}
    bool prefers_fill() const override { return recorder_->prefers_fill; }
    bool Fill(absl::FunctionRef<int64_t(MutablePieces)> fill) override {
      if (recorder_->wants && !recorder_->wants()) return false;
      // In two pieces, as pages are.
      const std::span<std::byte> left = std::span(bytes_).subspan(got_);
      const std::span<std::byte> pieces[] = {left.first(left.size() / 2),
                                             left.subspan(left.size() / 2)};
      got_ += fill(pieces);
      return true;
    }
    bool Copy(std::span<const std::byte> bytes) override {
      if (recorder_->wants && !recorder_->wants()) return false;
      std::copy(bytes.begin(), bytes.end(), bytes_.begin() + static_cast<int64_t>(got_));
      got_ += bytes.size();
      return true;
    }
    void End() override {
      bytes_.resize(got_);
      recorder_->chunks.emplace_back(header_, std::move(bytes_));
    }

   private:
    Recorder* const recorder_;
    const ChunkHeader header_;
    std::vector<std::byte> bytes_;
    size_t got_ = 0;
  };

  bool prefers_fill = false;
  std::function<bool()> wants;  // Whether a chunk's bytes are still wanted; unset: yes.
  int begun = 0;
  using Chunks = std::vector<std::pair<ChunkHeader, std::vector<std::byte>>>;
  Chunks chunks;
  std::vector<bool> whole;  // Of each chunk, whether it was intact.
  Chunks elsewhere;
  std::vector<std::pair<ChunkHeader, absl::Status>> failed;
  std::vector<LinkId> probed;
  std::vector<CreditHeader> credits;
  std::vector<std::pair<uint64_t, std::vector<std::byte>>> messages;
  std::vector<std::pair<LinkId, absl::Status>> down;
  std::function<void()> before_intact;
};

}  // namespace kvferry
