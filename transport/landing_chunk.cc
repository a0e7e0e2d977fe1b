#include "transport/landing_chunk.h"

#include <algorithm>
#include <utility>

#include "base/status.h"

namespace kvferry {

LandingChunk::LandingChunk(const ChunkHeader& header, std::shared_ptr<Landing> landing,
                           PieceCopy* copy, Landed landed)
    : header_(header), landing_(std::move(landing)), copy_(copy), landed_(std::move(landed)) {
  if ((header.flags & kChunkHasChecksum) != 0) checksum_.emplace();
}

bool LandingChunk::prefers_fill() const { return landing_->plan().placed_by_list(); }

bool LandingChunk::Fill(absl::FunctionRef<int64_t(MutablePieces)> fill) {
  return landing_->Write([&] {
    thread_local std::vector<std::span<std::byte>> pieces;
    pieces.clear();
    landing_->plan().AppendPieces(static_cast<int64_t>(header_.offset) + got_, header_.bytes - got_,
                                  &pieces);
    Add(pieces, fill(pieces));
  });
}

void LandingChunk::Add(MutablePieces pieces, int64_t bytes) {
  got_ += bytes;
  if (!checksum_) return;
  for (const std::span<std::byte> piece : pieces) {
    const auto part = piece.first(std::min<size_t>(piece.size(), bytes));
    checksum_->Update(part);
    bytes -= static_cast<int64_t>(part.size());
  }
}

bool LandingChunk::Copy(std::span<const std::byte> bytes,
                        std::shared_ptr<const MovesUnderWay>* reading) {
  if (checksum_) checksum_->Update(bytes);
  const size_t before = under_way_.size();
  const bool wanted = landing_->Write([&] {
    if (copied_.ok()) copied_ = BeginCopy(bytes);
  });
  got_ += static_cast<int64_t>(bytes.size());
  if (under_way_.size() > before) *reading = under_way_.back();
  return wanted;
}

absl::Status LandingChunk::BeginCopy(std::span<const std::byte> bytes) {
  const int64_t at = static_cast<int64_t>(header_.offset) + got_;
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<const MovesUnderWay> moves,
                           copy_->Begin(landing_->plan(), at, {&bytes, 1}));
  if (moves == nullptr) return absl::OkStatus();
  landing_->AwaitAtClose(moves);
  under_way_.push_back(std::move(moves));
  return absl::OkStatus();
}

bool LandingChunk::settled() const {
  return std::ranges::all_of(under_way_, [](const auto& moves) { return moves->done(); });
}

absl::Status LandingChunk::Settle() {
  for (const auto& moves : under_way_) copied_.Update(landing_->plan().Settle(moves));
  under_way_.clear();
  return copied_;
}

void LandingChunk::End() {
  const absl::Status copied = Settle();
  landed_(header_,
          copied.ok() ? landing_->End(header_, checksum_ ? checksum_->Digest() : 0) : copied);
}

}  // namespace kvferry
