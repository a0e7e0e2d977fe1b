#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "transport/data_plane.h"
#include "transport/tcp/tcp_frames.h"
#include "transport/tcp/tcp_socket.h"

namespace kvferry {

// What comes over one connection. The payload of a chunk goes to where its ChunkSink says, as it comes:
// there is no buffer of a whole chunk. One thread's.
class TcpIncoming {
 public:
  // Memory that all connections of a thread use in turn.
  using Scratch = std::vector<std::byte>;
  static constexpr size_t kScratchBytes = 256 << 10;

  // What the other side has to say first.
  void Expect(std::string first_words) { expected_ = std::move(first_words); }
  // Whether it has said it.
  bool open() const { return expected_.empty(); }

  // Reads at most about `max_bytes` and tells `events` what they were. Anything but kSome says that
  // nothing more has come. INVALID_ARGUMENT or PERMISSION_DENIED: this is no peer.
  absl::Status Read(int fd, int64_t max_bytes, DataEvents* events, Scratch* scratch, Moved* moved);

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
  Moved ReadPayload(int fd, Scratch* scratch);
  Moved ReadInto(int fd, MutablePieces pieces);
  // Bytes that arrived, of which the last ones may be between_'s; returns how many were the payload's.
  int64_t Take(int64_t bytes);

  std::string expected_;
  ChunkHeader header_;
  int64_t payload_left_ = 0;
  std::unique_ptr<ChunkSink> sink_;  // Null: nobody wants it.
  // A list says where the chunk's bytes lie.
  enum class Payload { kBytes, kList, kMessage } payload_ = Payload::kBytes;
  std::vector<std::byte> collected_;  // Of a list or a message.
  MessageHeader message_;
  std::array<std::byte, kBetweenBytes> between_{};
  size_t between_got_ = sizeof(TcpChunkEnd);  // Where no chunk is before the next frame.
  bool ended_ = true;                         // The end in `between_` was seen to.
  std::vector<iovec> parts_;                  // Of the call that is being made.
};

}  // namespace kvferry
