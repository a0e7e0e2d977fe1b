#pragma once

// Every tunable of kvferry, in one place: set in code, from JSON (an engine's
// kv_connector_extra_config) or from KVFERRY_<FIELD> environment variables, then validated once.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvferry {

struct Config {
  static constexpr int64_t kMaxChunkBytes = 4 << 20;  // Of chunk_bytes.

  // --- Control plane ---
  // Address that a prefill endpoint, or a decode endpoint that accepts pushes, binds and hands out
  // in its tickets: a numeric one or the name of an interface, and not that of all interfaces. Port
  // 0 takes a free one.
  std::string listen_host = "127.0.0.1";
  int64_t listen_port = 0;
  // Hosts that an endpoint may be sent to by a ticket, to fetch or to push (tickets can travel
  // through HTTP clients): addresses as tickets have them, networks, "*" (base/host_list.h). Empty:
  // loopback, and listen_host if that is an address.
  std::string allowed_hosts;
  // A file with the deployment's key, 64 hexadecimal digits (openssl rand -hex 32), the same for
  // all endpoints: only those that have it get a session, and what they say to set it up is
  // encrypted. Chunks of KV, and messages beside them, are not. Empty: none.
  std::string key_file;
  // Listening off loopback without a key has to be asked for, and with UCX, which asks nobody for
  // one, in any case.
  bool allow_insecure_network = false;

  // --- Data plane --- Port that an endpoint which listens takes connections for chunks on, all of
  // its peers' and lanes'. Port 0 takes a free one.
  int64_t data_port = 0;
  // Network interface for chunks, e.g. "eth0". Empty: that of listen_host; with ucx_tls "lo" when
  // listen_host is loopback, else UCX's choice.
  std::string net_device;
  // Congestion control of the connections for chunks, such as "cubic" or "dctcp": what suits the
  // network between the nodes may not be the host's default. Empty: the default. Not with ucx_tls.
  std::string tcp_congestion_control;
  // UCX transports (UCX_TLS) that chunks go over, such as rc; only plain active messages are used.
  // Empty: none, chunks go over TCP without UCX. The same on both sides.
  std::string ucx_tls;
  // How KV comes to peers over a network: "packed", in chunks that this side has gathered, over
  // any; "direct", they read it out of this side's pool with one-sided reads, where the network has
  // them; "auto", the quicker one for each transfer. Direct reads have not been run on RDMA
  // hardware yet.
  std::string network_path = "packed";
  // UCX transports for those reads, of a UCX context of their own. Never tcp: UCX would emulate.
  std::string direct_tls = "rc";
  // Connections to each peer over a network, each with a thread of its own: one for as many threads
  // as may work on transfers. Both sides use the smaller number.
  int64_t lanes = 1;
  // How KV comes to peers on this host: "in_place", they copy out of this side's pool, where it
  // lies in memory that kvferry made, else as "arena"; "arena", out of chunks gathered in shared
  // memory, or where both pools lie on GPUs, on the sender's; "network", as to peers on other
  // hosts; "auto", the quicker one of the first two for each transfer, between GPUs the first where
  // it can be.
  std::string same_host_path = "auto";
  int64_t copy_threads = 1;        // That copy what a peer on this host has in a shared pool.
  int64_t chunk_bytes = 1 << 20;   // Packed path: bytes of one chunk.
  int64_t arena_bytes = 64 << 20;  // Packed path: all chunks being gathered or sent, all peers.
  // Of a GPU's memory, where the pool lies in it: chunks for peers on this host that can map them,
  // but cannot have the pages as they lie in the pool (other dtypes on the two sides, memory
  // without handles). 0: none, such pages go through the arena.
  int64_t device_arena_bytes = 64 << 20;
  int64_t credits_per_transfer = 16;  // Chunks a sender may have unacknowledged per transfer.
  bool checksum = false;              // XXH3 of each chunk, verified before it counts as arrived.

  // --- Time ---
  int64_t heartbeat_interval_ms = 1000;
  int64_t heartbeat_timeout_ms = 10000;   // Silence after which a peer is taken for dead.
  int64_t connect_timeout_ms = 10000;     // A hello without an answer.
  int64_t lease_ms = 60000;               // A published request nobody fetches.
  int64_t publish_grace_ms = 1000;        // A fetch may precede its publish by this much.
  int64_t fetch_timeout_ms = 30000;       // Default deadline of a fetch.
  int64_t max_fetch_timeout_ms = 600000;  // Longest deadline that a peer may ask for.
  // Spinning after the last activity, before the thread sleeps; it yields to threads that are
  // ready. It pays only where cores are idle: a peer on this host may be waiting for the very core.
  // While bytes move, the thread looks for more for some microseconds in any case (base/linger.h).
  int64_t busy_poll_us = 0;

  // --- Limits: reaching one is answered with RESOURCE_EXHAUSTED ---
  int64_t max_peers = 256;
  int64_t max_fetches_per_peer = 1024;  // Those that wait for their lease among them.
  int64_t max_calls_per_peer = 1024;    // Questions that wait for an answer, as a lookup does.
  int64_t max_leases = 65536;

  // Parses a JSON object into a copy of `base`. An unknown key or a value of the wrong type is
  // INVALID_ARGUMENT naming the key and listing the right ones. Does not validate ranges.
  static absl::StatusOr<Config> FromJson(absl::string_view json, const Config& base);
  // Sets one field from text, as environment variables have it. Errors as of FromJson(); nothing
  // changes then.
  absl::Status Set(absl::string_view key, const std::string& text);
  // Overrides fields of `base` from KVFERRY_LISTEN_HOST, KVFERRY_LEASE_MS, ... .
  static absl::StatusOr<Config> FromEnv(const Config& base);
  // Checks ranges and relations; the message names the field, its value and the limit.
  absl::Status Validate() const;
  // Names of all fields, as JSON keys.
  static std::vector<std::string> FieldNames();
};

// A host to listen at that stands for all of the machine's addresses, and so for none to connect
// to.
bool IsEveryInterface(absl::string_view host);
// True for 127.0.0.0/8, ::1 and localhost.
bool IsLoopbackHost(absl::string_view host);

}  // namespace kvferry
