#include "transport/tcp/tcp_incoming.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/config.h"
#include "base/log.h"
#include "base/slab.h"
#include "base/status.h"
#include "transport/message_cost.h"

namespace kvferry {
namespace {

// Of one turn, before it is the next connection's: as many as a mebibyte of the shortest chunks
// has.
constexpr int64_t kFramesATurn = 256;
// A message takes as long as so many, and a longer one as several messages.
constexpr int64_t kFramesOfAMessage = 4;

int64_t FramesOf(const TcpFrame& frame) {
  if (frame.kind != kTcpMessage) return 1;
  return kFramesOfAMessage * MessageCost(frame.payload_bytes);
}

iovec PartOf(std::span<std::byte> bytes) { return {bytes.data(), bytes.size()}; }

}  // namespace

absl::StatusOr<std::unique_ptr<TcpScratch>> TcpScratch::Create(const PoolMemory& pages) {
  const int parts = pages.on_host() ? 1 : 2;
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> bytes, MapSlab(parts * kBytes));
  absl::StatusOr<std::shared_ptr<const void>> pin =
      pages.Pin({bytes.get(), static_cast<size_t>(parts * kBytes)});
  if (!pin.ok()) {
    Log().warn("what arrives is copied once more on its way to {}: {}", pages.name(),
               pin.status().ToString());
  }
  return std::unique_ptr<TcpScratch>(
      new TcpScratch(std::move(bytes), pin.ok() ? *std::move(pin) : nullptr, parts));
}

TcpScratch::TcpScratch(std::shared_ptr<std::byte> bytes, std::shared_ptr<const void> pin, int parts)
    : bytes_(std::move(bytes)), pin_(std::move(pin)) {
  for (int part = 0; part < parts; ++part) parts_.push_back({bytes_.get() + part * kBytes});
}

TcpScratch::~TcpScratch() {
  for (filling_ = 0; filling_ < parts_.size(); ++filling_) Filling();
}

std::byte* TcpScratch::Filling() {
  Part& part = parts_[filling_];
  // How it went is told to whom the bytes belong.
  if (part.reading != nullptr) std::exchange(part.reading, nullptr)->Wait().IgnoreError();
  return part.begin;
}

void TcpScratch::ReadUntil(std::shared_ptr<const MovesUnderWay> reading) {
  if (reading == nullptr) return;
  parts_[filling_].reading = std::move(reading);
  filling_ = (filling_ + 1) % parts_.size();
}

TcpIncoming::~TcpIncoming() {
  if (scratch_->holder_ == this) scratch_->holder_ = nullptr;
}

absl::Status TcpIncoming::Read(int fd, int64_t max_bytes, DataEvents* events, Moved* moved) {
  *moved = {Moved::Result::kSome, 0};
  frames_left_ = kFramesATurn;
  while (moved->some() && moved->bytes < max_bytes && frames_left_ > 0) {
    Moved now;
    absl::Status status;
    if (!open()) {
      status = CheckFirstWords(fd, &now);
    } else if (payload_left_ > 0) {
      now = ReadPayload(fd);
      if (now.some()) status = OnBetween(events);
    } else {
      status = ReadBetween(fd, events, &now);
    }
    *moved = {now.result, moved->bytes + now.bytes, now.error};
    // Otherwise more comes while it is copied.
    if (!moved->some() || !status.ok() || (last_ != nullptr && last_->settled())) EndLast();
    KVFERRY_RETURN_IF_ERROR(status);
  }
  return absl::OkStatus();
}

absl::Status TcpIncoming::CheckFirstWords(int fd, Moved* moved) {
  std::array<std::byte, sizeof(TcpHello)> words;
  const iovec part = PartOf(std::span(words).first(std::min(words.size(), expected_.size())));
  *moved = ReceiveTcp(fd, {&part, 1});
  if (std::memcmp(words.data(), expected_.data(), moved->bytes) != 0) {
    return absl::PermissionDeniedError("the other side is not who the peer has said it would be");
  }
  expected_.erase(0, moved->bytes);
  return absl::OkStatus();
}

absl::Status TcpIncoming::ReadBetween(int fd, DataEvents* events, Moved* moved) {
  const iovec part = PartOf(std::span(between_).subspan(between_got_));
  *moved = ReceiveTcp(fd, {&part, 1});
  between_got_ += moved->bytes;
  return OnBetween(events);
}

absl::Status TcpIncoming::OnBetween(DataEvents* events) {
  if (payload_left_ > 0) return absl::OkStatus();
  if (payload_ == Payload::kMessage) {
    payload_ = Payload::kBytes;
    EndLast();  // What came first counts first.
    events->OnLinkMessage(message_, collected_);
  }
  if (!ended_ && between_got_ >= sizeof(TcpChunkEnd)) {
    TcpChunkEnd end;
    std::memcpy(&end, between_.data(), sizeof(end));
    OnEnd(end, events);
    ended_ = true;
  }
  return between_got_ == between_.size() ? OnFrame(events) : absl::OkStatus();
}

void TcpIncoming::OnEnd(TcpChunkEnd end, DataEvents* events) {
  EndLast();
  std::unique_ptr<ChunkSink> sink = std::move(sink_);
  if (end != kTcpWhole) return;  // The sender says why in a message.
  if (payload_ == Payload::kList) events->OnChunkElsewhere(header_, collected_);
  last_ = std::move(sink);
  if (last_ != nullptr && last_->settled()) EndLast();
}

void TcpIncoming::EndLast() {
  if (last_ != nullptr) std::exchange(last_, nullptr)->End();
}

absl::Status TcpIncoming::OnFrame(DataEvents* events) {
  TcpFrame frame;
  std::memcpy(&frame, between_.data() + sizeof(TcpChunkEnd), sizeof(frame));
  between_got_ = sizeof(TcpChunkEnd);  // Behind all but a chunk the next frame follows at once.
  collected_.clear();
  frames_left_ -= FramesOf(frame);
  if (frame.kind == kTcpChunk) return OnChunkFrame(frame, events);
  if (frame.kind == kTcpMessage) return OnMessageFrame(frame);
  if (frame.kind != kTcpCredit || frame.payload_bytes != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a frame of kind ", frame.kind, " with ", frame.payload_bytes, " bytes"));
  }
  events->OnCredit(frame.As<CreditHeader>());
  return absl::OkStatus();
}

absl::Status TcpIncoming::OnMessageFrame(const TcpFrame& frame) {
  if (frame.payload_bytes == 0 || frame.payload_bytes > kMaxMessageBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a message of ", frame.payload_bytes, " bytes, limit ", kMaxMessageBytes));
  }
  message_ = frame.As<MessageHeader>();
  payload_left_ = frame.payload_bytes;
  payload_ = Payload::kMessage;
  return absl::OkStatus();
}

absl::Status TcpIncoming::OnChunkFrame(const TcpFrame& frame, DataEvents* events) {
  const auto header = frame.As<ChunkHeader>();
  const bool listed = (header.flags & kChunkInPool) != 0;
  if (frame.payload_bytes == 0 || (listed ? frame.payload_bytes > Config::kMaxChunkBytes
                                          : frame.payload_bytes != header.bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat(frame.payload_bytes, " bytes for a chunk of ", header.bytes));
  }
  between_got_ = 0;
  ended_ = false;
  header_ = header;
  payload_left_ = frame.payload_bytes;
  payload_ = listed ? Payload::kList : Payload::kBytes;
  if (!listed) sink_ = events->OnChunkBegins(header);
  return absl::OkStatus();
}

int64_t TcpIncoming::Take(int64_t bytes) {
  const int64_t payload = std::min(bytes, payload_left_);
  payload_left_ -= payload;
  between_got_ += bytes - payload;
  return payload;
}

Moved TcpIncoming::ReadInto(int fd, MutablePieces pieces) {
  parts_.clear();
  int64_t bytes = 0;
  for (const std::span<std::byte> piece : pieces) {
    if (parts_.size() + 1 == kMaxParts) break;
    if (piece.empty()) continue;
    parts_.push_back(PartOf(piece));
    bytes += static_cast<int64_t>(piece.size());
  }
  if (bytes == payload_left_) parts_.push_back(PartOf(std::span(between_).subspan(between_got_)));
  return ReceiveTcp(fd, parts_);
}

Moved TcpIncoming::ReadPayload(int fd) {
  if (sink_ != nullptr && sink_->prefers_fill()) {
    Moved moved;
    const bool wanted = sink_->Fill([&](MutablePieces pieces) {
      moved = ReadInto(fd, pieces);
      return Take(moved.bytes);
    });
    if (wanted) return moved;
    sink_.reset();
  }
  return ReadIntoScratch(fd);
}

Moved TcpIncoming::ReadIntoScratch(int fd) {
  if (scratch_->holder_ != nullptr && scratch_->holder_ != this) scratch_->holder_->CopyOn();
  scratch_->holder_ = this;
  const std::span<std::byte> room(scratch_->Filling() + held_,
                                  std::min(TcpScratch::kBytes - held_, payload_left_));
  const Moved moved = ReadInto(fd, {&room, 1});
  held_ += Take(moved.bytes);
  if (held_ == TcpScratch::kBytes || payload_left_ == 0) CopyOn();
  return moved;
}

void TcpIncoming::CopyOn() {
  const std::span<const std::byte> payload(scratch_->Filling(), std::exchange(held_, 0));
  scratch_->holder_ = nullptr;
  if (payload_ != Payload::kBytes) {
    collected_.insert(collected_.end(), payload.begin(), payload.end());
  }
  if (sink_ == nullptr || payload.empty()) return;
  std::shared_ptr<const MovesUnderWay> reading;
  if (!sink_->Copy(payload, &reading)) sink_.reset();
  scratch_->ReadUntil(std::move(reading));
}

}  // namespace kvferry
