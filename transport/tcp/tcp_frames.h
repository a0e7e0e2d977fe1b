#pragma once

// Messages of docs/wire_protocol.md, "TCP"; the structs are their bytes.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "transport/data_plane.h"
#include "transport/messages.h"

namespace kvferry {

inline constexpr uint64_t kTcpMagic = 0x6b76666572727974;

// The first words of both sides.
struct TcpHello {
  uint64_t magic = kTcpMagic;
  uint32_t version = kTcpVersion;
  uint32_t lane = 0;
  std::array<char, kTcpTokenBytes> token{};

  static TcpHello With(const std::string& token, int64_t lane) {
    TcpHello hello;
    hello.lane = static_cast<uint32_t>(lane);
    token.copy(hello.token.data(), hello.token.size());
    return hello;
  }
  std::string Bytes() const { return {reinterpret_cast<const char*>(this), sizeof(*this)}; }
};
static_assert(sizeof(TcpHello) == 32);

enum TcpFrameKind : uint32_t { kTcpChunk = 1, kTcpCredit = 2, kTcpMessage = 3 };

struct TcpFrame {
  uint32_t kind = 0;
  uint32_t payload_bytes = 0;
  std::array<std::byte, sizeof(ChunkHeader)> header{};

  template <typename Header>
  static TcpFrame Of(TcpFrameKind kind, const Header& header, size_t payload_bytes) {
    static_assert(sizeof(Header) <= sizeof(ChunkHeader));
    TcpFrame frame{kind, static_cast<uint32_t>(payload_bytes)};
    std::memcpy(frame.header.data(), &header, sizeof(header));
    return frame;
  }
  template <typename Header>
  Header As() const {
    Header read;
    std::memcpy(&read, header.data(), sizeof(read));
    return read;
  }
};
static_assert(sizeof(TcpFrame) == 40);

// Behind the payload of a chunk.
using TcpChunkEnd = uint64_t;
inline constexpr TcpChunkEnd kTcpWhole = 1;
inline constexpr TcpChunkEnd kTcpGivenUp = 0;  // What has come is not all the chunk's.

}  // namespace kvferry
