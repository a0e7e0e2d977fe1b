#include "transport/landing_chunk.h"

#include <algorithm>
#include <utility>

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

bool LandingChunk::Copy(std::span<const std::byte> bytes) {
  if (checksum_) checksum_->Update(bytes);
  const bool wanted = landing_->Write([&] {
    if (!copied_.ok()) return;
    const int64_t at = static_cast<int64_t>(header_.offset) + got_;
    copied_ = copy_->Run(landing_->plan(), at, {&bytes, 1});
  });
  got_ += static_cast<int64_t>(bytes.size());
  return wanted;
}

void LandingChunk::End() {
  landed_(header_,
          copied_.ok() ? landing_->End(header_, checksum_ ? checksum_->Digest() : 0) : copied_);
}

}  // namespace kvferry
