#pragma once

// The control messages of docs/wire_protocol.md as plain values. Nothing here knows ZeroMQ or
// msgpack.

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "pool/kv_layout.h"
#include "pool/page_cut.h"
#include "pool/page_runs.h"
#include "pool/value_format.h"
#include "transport/fetch_source.h"
#include "transport/fields.h"
#include "transport/head_share.h"
#include "transport/read_costs.h"

namespace kvferry {

inline constexpr uint64_t kProtocolVersion = 1;

// Limits on what a peer may send; the decoder enforces them all.
inline constexpr size_t kMaxMessageBytes = 2 << 20;
inline constexpr size_t kMaxNameBytes = 128;
inline constexpr size_t kMaxModelBytes = 256;
inline constexpr size_t kMaxWorkerAddressBytes = 4096;
inline constexpr size_t kMaxLocalAddressBytes = 64;
inline constexpr size_t kMaxMoreLanes = 7;   // Beside the first.
inline constexpr size_t kMaxHostBytes = 46;  // Of a numeric address.
inline constexpr size_t kMaxDirectAddressBytes = 64 << 10;
inline constexpr size_t kMaxTextBytes = 1024;
inline constexpr size_t kMaxRuns = 65536;
inline constexpr size_t kMaxFunctionBytes = 32;

// How a peer is reached over plain TCP. A hello says how many connections its sender would make;
// the welcome where they go to, and what each side has to say on them first. Not for logs.
struct TcpAddress {
  int64_t lanes = 0;   // 0: not.
  std::string host{};  // Numeric.
  int64_t port = 0;
  std::string token{};   // Who connects says this,
  std::string answer{};  // and who is connected to this.
};
inline constexpr uint32_t kTcpVersion = 1;
inline constexpr size_t kTcpTokenBytes = 16;

// Where a peer's data planes are reached.
struct DataAddresses {
  std::string worker;                // UCX, from anywhere; empty: not.
  std::string local{};               // Shared memory, from this host; empty: not.
  std::vector<std::string> lanes{};  // UCX, further lanes.
  std::string direct{};              // Memory that can be read from afar; empty: none.
  TcpAddress tcp{};
  uint64_t session = 0;  // Named in messages that come over these planes; 0: none may.
};

struct HelloMsg {
  std::string name;
  std::string model;
  KvLayout layout;
  DataAddresses data;
  HeadShare heads{};
  bool converts = false;  // Says in a fetch which pages it wants, and serves those that others say.
  bool casts = false;     // The same of values.
};
struct WelcomeMsg {
  std::string name;
  DataAddresses data;
  int64_t silence_ms = 0;  // After which its sender takes the other side for dead; 0: not said.
};
struct RefuseMsg {
  uint64_t transfer_id = 0;  // 0: the session itself.
  absl::Status status;
};
// What one thread copies in about a millisecond: long against what is said about a chunk and the
// waking of those who help (decision 6 has figures), short enough for the reader's other peers.
inline constexpr int64_t kBytesInPlace = 8 << 20;

struct FetchMsg {
  uint64_t transfer_id = 0;
  uint64_t lease_id = 0;
  PageRuns positions;  // In the lease's page list, in pages of `form`.
  int64_t timeout_ms = 0;
  int64_t window_bytes = 0;
  int64_t chunk_bytes = 0;
  bool checksum = false;
  int64_t in_place_bytes = kBytesInPlace;  // Of a chunk that is read in place, at most.
  int64_t tail_bytes = 0;                  // Wanted behind the pages.
  // A fetch of the same lease that this one goes on with, as others may have done of which nothing
  // has come; 0: none.
  uint64_t replaces = 0;
  int64_t attempt = 0;     // Higher than theirs; 0 for the first.
  int64_t from_bytes = 0;  // Of the stream: what lies before has arrived.
  int64_t wait_ms = 0;     // For the lease to be published; 0: as the sender likes.
  ReadCosts reads{};       // Of the sender's memory, by the receiver.
  HeadRange heads{};       // Of the model's; a count of 0: all that the sender's pages hold.
  LeaseReader reader{};
  PageForm
      form{};  // Of the pages that are wanted and that `positions` count; {}: the sender's own.
  ValueFormat values{};  // That are wanted; {}: as the sender has them.

  // Whether this is another attempt of the same fetch, and a later one.
  bool GoesOnWith(const FetchMsg& earlier) const {
    if (lease_id != earlier.lease_id || replaces == 0) return false;
    return replaces == earlier.transfer_id ||
           (replaces == earlier.replaces && attempt > earlier.attempt);
  }
};
struct DoneMsg {
  uint64_t transfer_id = 0;
  uint64_t lease_id = 0;
  int64_t bytes = 0;
  LeaseReader reader{};
};
struct CancelMsg {
  uint64_t transfer_id = 0;
  std::string reason;
};
struct AbortMsg {
  uint64_t transfer_id = 0;
  absl::Status status;
  bool again = false;  // The lease will be published again.
};
struct CallMsg {
  uint64_t call_id = 0;
  std::string function;
  int64_t timeout_ms = 0;
  Fields args;
};
struct ReplyMsg {
  uint64_t call_id = 0;
  absl::Status status;
  Fields result;  // Empty after an error.
};
struct PingMsg {};
struct PongMsg {};
struct ByeMsg {};

using MessageBody = std::variant<HelloMsg, WelcomeMsg, RefuseMsg, FetchMsg, DoneMsg, CancelMsg,
                                 AbortMsg, CallMsg, ReplyMsg, PingMsg, PongMsg, ByeMsg>;

struct Message {
  uint64_t from_epoch = 0;
  uint64_t to_epoch = 0;
  MessageBody body;
};

}  // namespace kvferry
