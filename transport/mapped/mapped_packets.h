#pragma once

// What passes through the sockets between processes of one host.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "transport/data_plane.h"
#include "transport/mapped/unix_socket.h"

namespace kvferry::mapped {

// Messages of docs/wire_protocol.md; the structs are their bytes.
enum Kind : uint32_t {
  kHello = 1,
  kChunk = 2,
  kCredit = 3,
  kRead = 4,
  kMessage = 5,
  kPoolPart = 6,
  kReadsPool = 7,
  kAnswer = 8,
};

using Token = std::array<char, 16>;
inline constexpr uint64_t kMagic = 0x6b7666657272792f;
inline constexpr uint8_t kVersion = 5;

struct Head {
  uint32_t kind = 0;
  uint32_t zero = 0;
};
struct HelloPacket {
  Head head{kHello};
  uint64_t magic = kMagic;
  uint64_t version = kVersion;
  Token token{};
  uint64_t num_chunks = 0;
  uint64_t chunk_bytes = 0;
  uint64_t pool_bytes = 0;  // 0: there is no pool to read by its fd.
};
struct ChunkPacket {
  Head head{kChunk};
  ChunkHeader header;
  uint64_t slot = 0;
  uint64_t generation = 0;
  uint64_t payload_bytes = 0;
};
struct CreditPacket {
  Head head{kCredit};
  CreditHeader header;
};
struct ReadPacket {
  Head head{kRead};
  uint64_t slot = 0;
};
static_assert(sizeof(HelloPacket) == 64 && sizeof(ChunkPacket) == 64);
// The bytes of this part follow.
struct MessagePacket {
  Head head{kMessage};
  MessageHeader header;
  uint64_t bytes_after = 0;  // Of the message, in parts to come.
};
// The part's name follows.
struct PoolPartPacket {
  Head head{kPoolPart};
  uint64_t bytes = 0;
  uint64_t parts_after = 0;  // To come.
};
struct ReadsPoolPacket {
  Head head{kReadsPool};
};
// To a hello.
enum Taken : uint64_t { kMapped = 0, kCannot = 1, kNotNow = 2 };
struct AnswerPacket {
  Head head{kAnswer};
  uint64_t taken = kMapped;
};
static_assert(sizeof(CreditPacket) == 24 && sizeof(ReadPacket) == 16);
static_assert(sizeof(PoolPartPacket) == 24 && sizeof(ReadsPoolPacket) == 8);
static_assert(sizeof(AnswerPacket) == 16);
static_assert(sizeof(MessagePacket) == 24);
inline constexpr size_t kMaxPartBytes = kMaxPacketBytes - sizeof(MessagePacket);

// Of messages without anything behind them.
template <typename T>
bool Parse(const Packet& packet, T* message) {
  if (packet.size != sizeof(T)) return false;
  std::memcpy(message, packet.bytes, sizeof(T));
  return true;
}

}  // namespace kvferry::mapped
