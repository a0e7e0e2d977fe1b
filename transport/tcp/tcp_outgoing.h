#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "transport/data_plane.h"
#include "transport/tcp/tcp_frames.h"
#include "transport/tcp/tcp_socket.h"

namespace kvferry {

// What one connection has to send. A chunk's source is asked when it is its turn, so that what was
// gathered is still in the cache when the system copies it, and what ends before that is never
// sent. One thread's.
class TcpOutgoing {
 public:
  // Comes before everything else.
  void Say(std::string first_words) { words_ = std::move(first_words); }
  void AddChunk(const ChunkHeader& header, ChunkSource source, SendDone done);
  // These go before chunks that have not begun, but for one of them now and then. A credit takes
  // the place of one for the same transfer that waits: a peer that takes none may send chunk after
  // chunk.
  void AddCredit(const CreditHeader& header) { credits_[header.transfer_id] = header.bytes_done; }
  // RESOURCE_EXHAUSTED when more than kMaxMessagesWaiting do already.
  absl::Status AddMessage(const MessageHeader& header, std::string_view bytes);
  // Whether there is something to write: the first words, or once they are out (and the other side
  // has answered, `open`) anything.
  bool has_work(bool open) const {
    return !words_.empty() || (open && (has_frames() || !chunks_.empty()));
  }

  // Of everything but chunks and credits.
  int64_t waiting() const { return static_cast<int64_t>(words_.size()) + frames_bytes_; }
  int64_t written() const { return written_; }

  // Writes at most about `max_bytes` of that, and no more chunks than others may be kept waiting
  // for. Anything but kSome says that the socket takes no more. `done` of what has been sent is
  // called from here.
  Moved Write(int fd, bool open, int64_t max_bytes);
  // Whatever is left fails.
  void Fail(const absl::Status& status);

 private:
  struct Chunk {
    ChunkHeader header;
    ChunkSource source;
    SendDone done;
    bool begun = false;
    TcpFrame frame{};
    std::span<const std::byte> payload{};  // Of one that was filled.
    TcpChunkEnd end = kTcpWhole;
    int64_t sent = 0;  // Of the frame, the payload and the end, one after another.

    int64_t payload_sent() const { return sent - static_cast<int64_t>(sizeof(frame)); }
    int64_t payload_left() const { return frame.payload_bytes - payload_sent(); }
    int64_t left() const { return payload_left() + static_cast<int64_t>(sizeof(end)); }
  };

  bool has_frames() const { return !frames_.empty() || !credits_.empty(); }
  // What is to be said next, unless it is a chunk's turn.
  void TakeFrames();
  Moved WriteWords(int fd);
  Moved WriteChunk(int fd, int64_t max_bytes);
  static absl::Status Begin(Chunk& chunk);
  // What of the chunk's bytes has not been sent, as far as one call takes it; `payload` begins with
  // the first of its own.
  Moved WriteParts(int fd, const Chunk& chunk, Pieces payload, int64_t max_bytes);
  Moved WriteFiller(int fd, const Chunk& chunk, int64_t max_bytes);
  // How much of a chunk that is lent to ask for at once, of a turn's `max_bytes`.
  int64_t MostToList(int64_t max_bytes) const;
  void NoteTaken(int64_t bytes, int64_t offered);
  void FinishFirst(const absl::Status& status);

  // What is lent is listed and fetched from memory for as much as the socket took the last time,
  // until it was full: what it does not take would have to be fetched again.
  static constexpr int64_t kLeastListed = 64 << 10;
  static constexpr int64_t kMostListed = 1 << 20;
  // Small messages are written together, and after so much of them a chunk has its turn.
  static constexpr size_t kFramesTogether = 64 << 10;
  static constexpr int64_t kMostSaid = 1 << 20;

  std::string words_;               // Begun, perhaps.
  std::deque<std::string> frames_;  // To follow them: whole messages each.
  int64_t frames_bytes_ = 0;
  absl::flat_hash_map<uint64_t, uint64_t> credits_;  // By transfer; go before those.
  int64_t said_ = 0;                                 // Since the last chunk.
  int64_t written_ = 0;
  std::deque<Chunk> chunks_;
  int64_t chunks_left_ = 0;     // Of this turn.
  std::vector<iovec> parts_;    // Of the call that is being made.
  int64_t room_ = kMostListed;  // That the socket is likely to have.
  int64_t taken_ = 0;           // Since it was full.
};

}  // namespace kvferry
