#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "pool/pool_memory.h"
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
  void OnLinkOpen(LinkId link) override { open.push_back(link); }
  void OnCredit(const CreditHeader& header) override { credits.push_back(header); }
  void OnLinkMessage(const MessageHeader& header, std::span<const std::byte> bytes) override {
    messages.emplace_back(header.session, std::vector<std::byte>(bytes.begin(), bytes.end()));
  }
  void OnLinkDown(LinkId link, const absl::Status& status) override {
    down.emplace_back(link, status);
  }

  // Reads what it copies when somebody waits for it, and not before.
  class LateCopy : public MovesUnderWay {
   public:
    LateCopy(std::span<const std::byte> from, std::shared_ptr<std::vector<std::byte>> to, size_t at)
        : from_(from), to_(std::move(to)), at_(static_cast<int64_t>(at)) {}
    bool done() const override { return done_; }
    absl::Status Wait() const override {
      if (!done_) std::copy(from_.begin(), from_.end(), to_->begin() + at_);
      done_ = true;
      return absl::OkStatus();
    }

   private:
    const std::span<const std::byte> from_;
    const std::shared_ptr<std::vector<std::byte>> to_;
    const int64_t at_;
    mutable bool done_ = false;
  };

  class Sink : public ChunkSink {
   public:
    Sink(Recorder* recorder, const ChunkHeader& header)
        : recorder_(recorder),
          header_(header),
          bytes_(std::make_shared<std::vector<std::byte>>(header.bytes)) {}
    bool prefers_fill() const override { return recorder_->prefers_fill; }
    bool Fill(absl::FunctionRef<int64_t(MutablePieces)> fill) override {
      if (recorder_->wants && !recorder_->wants()) return false;
      // In two pieces, as pages are.
      const std::span<std::byte> left = std::span(*bytes_).subspan(got_);
      const std::span<std::byte> pieces[] = {left.first(left.size() / 2),
                                             left.subspan(left.size() / 2)};
      got_ += fill(pieces);
      return true;
    }
    bool Copy(std::span<const std::byte> bytes,
              std::shared_ptr<const MovesUnderWay>* reading) override {
      if (recorder_->wants && !recorder_->wants()) return false;
      auto copy = std::make_shared<LateCopy>(bytes, bytes_, got_);
      got_ += bytes.size();
      if (recorder_->copies_late) {
        *reading = copy;
        copies_.push_back(copy);
        recorder_->copies.push_back(std::move(copy));
        return true;
      }
      return copy->Wait().ok();
    }
    bool settled() const override {
      return std::ranges::all_of(copies_, [](const auto& copy) { return copy->done(); });
    }
    void End() override {
      for (const auto& copy : copies_) ASSERT_TRUE(copy->Wait().ok());
      bytes_->resize(got_);
      recorder_->begun_at_end.push_back(recorder_->begun);
      recorder_->copies_at_end.push_back(recorder_->copies.size());
      recorder_->chunks.emplace_back(header_, std::move(*bytes_));
    }

   private:
    Recorder* const recorder_;
    const ChunkHeader header_;
    const std::shared_ptr<std::vector<std::byte>> bytes_;
    std::vector<std::shared_ptr<const LateCopy>> copies_;
    size_t got_ = 0;
  };

  bool prefers_fill = false;
  std::function<bool()> wants;  // Whether a chunk's bytes are still wanted; unset: yes.
  bool copies_late = false;     // What is not filled.
  std::vector<std::shared_ptr<const LateCopy>> copies;
  int begun = 0;
  // Of each of `chunks` that came in parts.
  std::vector<int> begun_at_end;
  std::vector<size_t> copies_at_end;
  using Chunks = std::vector<std::pair<ChunkHeader, std::vector<std::byte>>>;
  Chunks chunks;
  std::vector<bool> whole;  // Of each chunk, whether it was intact.
  Chunks elsewhere;
  std::vector<std::pair<ChunkHeader, absl::Status>> failed;
  std::vector<LinkId> open;
  std::vector<LinkId> probed;
  std::vector<CreditHeader> credits;
  std::vector<std::pair<uint64_t, std::vector<std::byte>>> messages;
  std::vector<std::pair<LinkId, absl::Status>> down;
  std::function<void()> before_intact;
};

}  // namespace kvferry
