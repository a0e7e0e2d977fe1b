#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pool/pool_memory.h"
#include "transport/data_plane.h"
#include "transport/tcp/tcp_frames.h"
#include "transport/tcp/tcp_socket.h"

namespace kvferry {

class TcpIncoming;

// Memory of a thread, in which one of its connections at a time gathers what is copied on from
// here. Of two parts where a device copies: it reads one while the other is filled.
class TcpScratch {
 public:
  // Of a part: a whole chunk's, by default. A receiver that copies on whatever has come falls
  // behind the sender while that sends, and what waits in the socket meanwhile leaves the cache;
  // one that copies a chunk on while the sender gathers the next one does not
  // (docs/decisions/0010-straight-from-pages.md).
  static constexpr int64_t kBytes = 1 << 20;

  // On the way to pages in `pages`, by whose device it is reached where that can be had. On the
  // host's it takes no room until it is used. RESOURCE_EXHAUSTED when the system refuses it.
  static absl::StatusOr<std::unique_ptr<TcpScratch>> Create(const PoolMemory& pages);
  ~TcpScratch();
  TcpScratch(const TcpScratch&) = delete;
  TcpScratch& operator=(const TcpScratch&) = delete;

 private:
  friend class TcpIncoming;
  struct Part {
    std::byte* begin;
    std::shared_ptr<const MovesUnderWay> reading{};  // Null: nobody does.
  };

  TcpScratch(std::shared_ptr<std::byte> bytes, std::shared_ptr<const void> pin, int parts);
  // The part that is filled, when nobody reads it any more.
  std::byte* Filling();
  // What was in it is read until then, unless that is null: the next part is filled from here on.
  void ReadUntil(std::shared_ptr<const MovesUnderWay> reading);

  const std::shared_ptr<std::byte> bytes_;
  const std::shared_ptr<const void> pin_;  // Goes first.
  std::vector<Part> parts_;
  size_t filling_ = 0;
  TcpIncoming* holder_ = nullptr;  // Whose bytes lie in the part that is filled.
};

// What comes over one connection. The payload of a chunk goes to where its ChunkSink says: at once,
// or by way of the scratch when that is full, the chunk is whole, or another connection needs it. A
// chunk that a device is still copying then has its end when that is done or when nothing more
// comes meanwhile. One thread's.
class TcpIncoming {
 public:
  // `scratch` must outlive this.
  explicit TcpIncoming(TcpScratch* scratch) : scratch_(scratch) {}
  ~TcpIncoming();
  TcpIncoming(const TcpIncoming&) = delete;
  TcpIncoming& operator=(const TcpIncoming&) = delete;

  // What the other side has to say first.
  void Expect(std::string first_words) { expected_ = std::move(first_words); }
  // Whether it has said it.
  bool open() const { return expected_.empty(); }

  // Reads at most about `max_bytes`, and no more messages and other frames than others may be kept
  // waiting for, and tells `events` what they were. Anything but kSome says that nothing more has
  // come. INVALID_ARGUMENT or PERMISSION_DENIED: this is no peer.
  absl::Status Read(int fd, int64_t max_bytes, DataEvents* events, Moved* moved);

 private:
  // A chunk's end and the frame that follows it, which come together.
  static constexpr size_t kBetweenBytes = sizeof(TcpChunkEnd) + sizeof(TcpFrame);

  absl::Status CheckFirstWords(int fd, Moved* moved);
  absl::Status ReadBetween(int fd, DataEvents* events, Moved* moved);
  // What `between_` holds up to now.
  absl::Status OnBetween(DataEvents* events);
  absl::Status OnFrame(DataEvents* events);
  absl::Status OnChunkFrame(const TcpFrame& frame, DataEvents* events);
  absl::Status OnMessageFrame(const TcpFrame& frame);
  void OnEnd(TcpChunkEnd end, DataEvents* events);
  void EndLast();
  Moved ReadPayload(int fd);
  Moved ReadIntoScratch(int fd);
  // What lies in the scratch, which anybody may have then.
  void CopyOn();
  Moved ReadInto(int fd, MutablePieces pieces);
  // Bytes that arrived, of which the last ones may be between_'s; returns how many were the
  // payload's.
  int64_t Take(int64_t bytes);

  TcpScratch* const scratch_;
  int64_t held_ = 0;  // Bytes of the payload in it.
  std::string expected_;
  ChunkHeader header_;
  int64_t payload_left_ = 0;
  std::unique_ptr<ChunkSink> sink_;  // Null: nobody wants it.
  std::unique_ptr<ChunkSink> last_;  // Of the chunk before, until it has had its end.
  // A list says where the chunk's bytes lie.
  enum class Payload { kBytes, kList, kMessage } payload_ = Payload::kBytes;
  std::vector<std::byte> collected_;  // Of a list or a message.
  MessageHeader message_;
  std::array<std::byte, kBetweenBytes> between_{};
  int64_t frames_left_ = 0;                   // Of this turn.
  size_t between_got_ = sizeof(TcpChunkEnd);  // Where no chunk is before the next frame.
  bool ended_ = true;                         // The end in `between_` was seen to.
  std::vector<iovec> parts_;                  // Of the call that is being made.
};

}  // namespace kvferry
