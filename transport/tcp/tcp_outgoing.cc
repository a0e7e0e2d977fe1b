#include "transport/tcp/tcp_outgoing.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/ceil_div.h"

namespace kvferry {
namespace {

// Instead of what may not be read any more, up to where the other side expects the end of the
// chunk.
constexpr std::array<std::byte, 64 << 10> kFiller{};

// Of one turn: a mebibyte of the shortest ones.
constexpr int64_t kChunksATurn = 256;

iovec PartOf(const void* begin, size_t bytes) { return {const_cast<void*>(begin), bytes}; }

int64_t BytesOf(std::span<const iovec> parts) {
  int64_t bytes = 0;
  for (const iovec& part : parts) bytes += static_cast<int64_t>(part.iov_len);
  return bytes;
}

void Append(const TcpFrame& frame, std::string* words) {
  words->append(reinterpret_cast<const char*>(&frame), sizeof(frame));
}

template <typename T>
void AppendRest(const T& value, int64_t skip, std::vector<iovec>* parts) {
  const auto* begin = reinterpret_cast<const std::byte*>(&value);
  parts->push_back(PartOf(begin + skip, sizeof(value) - skip));
}

}  // namespace

void TcpOutgoing::AddChunk(const ChunkHeader& header, ChunkSource source, SendDone done) {
  chunks_.push_back({header, std::move(source), std::move(done)});
}

Moved TcpOutgoing::Write(int fd, bool open, int64_t max_bytes) {
  Moved all{Moved::Result::kSome, 0};
  chunks_left_ = kChunksATurn;
  while (all.some() && all.bytes < max_bytes && chunks_left_ > 0 && has_work(open)) {
    if (open) TakeFrames();
    const Moved moved = words_.empty() ? WriteChunk(fd, max_bytes - all.bytes) : WriteWords(fd);
    all = {moved.result, all.bytes + moved.bytes, moved.error};
  }
  written_ += all.bytes;
  return all;
}

// Messages that follow each other without end would keep all chunks from beginning.
void TcpOutgoing::TakeFrames() {
  if (!words_.empty() || !has_frames()) return;
  if (!chunks_.empty() && (chunks_.front().sent > 0 || said_ >= kMostSaid)) return;
  for (const auto& [transfer_id, bytes_done] : std::exchange(credits_, {})) {
    Append(TcpFrame::Of(kTcpCredit, CreditHeader{transfer_id, bytes_done}, 0), &words_);
  }
  if (!words_.empty()) return;
  words_ = std::move(frames_.front());
  frames_.pop_front();
  frames_bytes_ -= static_cast<int64_t>(words_.size());
}

absl::Status TcpOutgoing::AddMessage(const MessageHeader& header, std::string_view bytes) {
  if (waiting() > kMaxMessagesWaiting) {
    return absl::ResourceExhaustedError(
        absl::StrCat("tcp: ", waiting(), " bytes of messages wait, limit ", kMaxMessagesWaiting,
                     ", and the peer takes none"));
  }
  if (frames_.empty() || frames_.back().size() >= kFramesTogether) frames_.emplace_back();
  Append(TcpFrame::Of(kTcpMessage, header, bytes.size()), &frames_.back());
  frames_.back().append(bytes);
  frames_bytes_ += static_cast<int64_t>(sizeof(TcpFrame) + bytes.size());
  return absl::OkStatus();
}

Moved TcpOutgoing::WriteWords(int fd) {
  const iovec part = PartOf(words_.data(), words_.size());
  const Moved moved = SendTcp(fd, {&part, 1});
  words_.erase(0, moved.bytes);
  said_ += moved.bytes;
  return moved;
}

absl::Status TcpOutgoing::Begin(Chunk& chunk) {
  chunk.begun = true;
  size_t payload_bytes = chunk.header.bytes;
  if (const auto* fill = std::get_if<FillChunk>(&chunk.source)) {
    const absl::StatusOr<std::span<const std::byte>> payload = (*fill)(&chunk.header);
    if (!payload.ok()) return payload.status();
    chunk.payload = *payload;
    payload_bytes = payload->size();
  }
  chunk.frame = TcpFrame::Of(kTcpChunk, chunk.header, payload_bytes);
  return absl::OkStatus();
}

Moved TcpOutgoing::WriteChunk(int fd, int64_t max_bytes) {
  Chunk& chunk = chunks_.front();
  said_ = 0;
  if (const absl::Status begun = chunk.begun ? absl::OkStatus() : Begin(chunk); !begun.ok()) {
    FinishFirst(begun);
    return {Moved::Result::kSome, 0};
  }
  Moved moved;
  const int64_t from = std::max<int64_t>(0, chunk.payload_sent());
  const auto* lend = std::get_if<LendChunk>(&chunk.source);
  if (chunk.end == kTcpGivenUp) {
    moved = WriteFiller(fd, chunk, max_bytes);
  } else if (lend == nullptr || from >= chunk.frame.payload_bytes) {
    const auto rest = chunk.payload.subspan(std::min<size_t>(from, chunk.payload.size()));
    moved = WriteParts(fd, chunk, {&rest, 1}, max_bytes);
  } else if (!(*lend)(from, MostToList(max_bytes),
                      [&](Pieces payload) { moved = WriteParts(fd, chunk, payload, max_bytes); })) {
    if (chunk.sent == 0) {
      FinishFirst(absl::CancelledError("the transfer has ended"));
    } else {
      chunk.end = kTcpGivenUp;
    }
    return {Moved::Result::kSome, 0};
  }
  chunk.sent += moved.bytes;
  if (moved.some() && chunk.left() == 0) FinishFirst(absl::OkStatus());
  return moved;
}

// Whole steps, or the few bytes by which a message shortens a turn would take a call of their own.
int64_t TcpOutgoing::MostToList(int64_t max_bytes) const {
  return std::min(room_, RoundUp(max_bytes, kLeastListed));
}

void TcpOutgoing::NoteTaken(int64_t bytes, int64_t offered) {
  const bool full = bytes < offered;
  taken_ += bytes;
  room_ = std::clamp(taken_, full ? kLeastListed : room_, kMostListed);
  if (full) taken_ = 0;
}

Moved TcpOutgoing::WriteParts(int fd, const Chunk& chunk, Pieces payload, int64_t max_bytes) {
  parts_.clear();
  const int64_t into_payload = chunk.payload_sent();
  if (into_payload < 0) AppendRest(chunk.frame, chunk.sent, &parts_);
  int64_t bytes = 0;
  // Of the end, too, some may have gone.
  const int64_t into_end = std::max<int64_t>(0, into_payload - chunk.frame.payload_bytes);
  const int64_t payload_left =
      chunk.frame.payload_bytes + into_end - std::max<int64_t>(0, into_payload);
  for (const std::span<const std::byte> piece : payload) {
    if (parts_.size() + 1 == kMaxParts || bytes >= max_bytes) break;
    if (piece.empty()) continue;
    parts_.push_back(PartOf(piece.data(), piece.size()));
    bytes += static_cast<int64_t>(piece.size());
  }
  if (bytes == payload_left) AppendRest(chunk.end, into_end, &parts_);
  const Moved moved = SendTcp(fd, parts_);
  NoteTaken(moved.bytes, BytesOf(parts_));
  return moved;
}

// A chunk that is given up has begun: its frame, which says how much follows, may not have gone
// whole.
Moved TcpOutgoing::WriteFiller(int fd, const Chunk& chunk, int64_t max_bytes) {
  const int64_t from = std::max<int64_t>(0, chunk.payload_sent());
  const int64_t left = std::max<int64_t>(0, chunk.frame.payload_bytes - from);
  std::vector<std::span<const std::byte>> payload;
  for (int64_t at = 0; at < left; at += kFiller.size()) {
    payload.push_back(std::span(kFiller).first(std::min<size_t>(left - at, kFiller.size())));
  }
  return WriteParts(fd, chunk, payload, max_bytes);
}

void TcpOutgoing::FinishFirst(const absl::Status& status) {
  const SendDone done = std::move(chunks_.front().done);
  chunks_.pop_front();
  --chunks_left_;
  if (done) done(status);
}

void TcpOutgoing::Fail(const absl::Status& status) {
  while (!chunks_.empty()) FinishFirst(status);
  frames_.clear();
  frames_bytes_ = 0;
  credits_.clear();
  words_.clear();
}

}  // namespace kvferry
