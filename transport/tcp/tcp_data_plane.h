#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/epoll.h"
#include "base/unique_fd.h"
#include "transport/data_plane.h"
#include "transport/tcp/tcp_incoming.h"
#include "transport/tcp/tcp_outgoing.h"

namespace kvferry {

// A connection that is made, or being made, and what proves to each side who the other is.
struct TcpConnection {
  UniqueFd socket;
  std::string say;     // First.
  std::string expect;  // First, before anything else counts.
  std::string where;   // It leads, for errors.
  // How long nothing may get through once both have said so (LimitSilence); 0: for ever. Whoever
  // dialled watches, and can dial again; the other side would cut it off from what still works.
  int64_t silence_ms = 0;
};

// A data plane over TCP sockets (docs/wire_protocol.md, "TCP"): the pages of a chunk may be sent from
// where they lie, and what arrives goes into pages as it comes. A link is one connection; who connects
// is the caller's affair (TcpDoor, DialTcp).
class TcpDataPlane final : public DataPlane {
 public:
  // `pages`: where what arrives goes to.
  static absl::StatusOr<std::unique_ptr<TcpDataPlane>> Create(
      const PoolMemory& pages = *HostMemory());
  ~TcpDataPlane() override;

  // A link on that connection, or on one that Join() will bring; sends wait for it. It is down if the
  // peer has not proven who it is by `ready_by`.
  absl::StatusOr<LinkId> Open(TcpConnection connection, Deadline ready_by);
  LinkId Await(Deadline ready_by);
  absl::Status Join(LinkId link, TcpConnection connection);

  void SendChunk(LinkId link, const ChunkHeader& header, ChunkSource source,
                 SendDone done) override;
  void SendCredit(LinkId link, const CreditHeader& header) override;
  bool carries_messages() const override { return true; }
  absl::Status SendMessage(LinkId link, const MessageHeader& header,
                           std::string_view bytes) override;
  void Close(LinkId link) override;
  bool Progress(DataEvents* events) override;
  int event_fd() const override { return epoll_.fd(); }
  bool Arm() override { return ready_.empty() && down_.empty(); }
  Deadline Tick(Deadline now) override;

 private:
  struct Link {
    explicit Link(TcpScratch* scratch) : incoming(scratch) {}

    UniqueFd socket{};  // Invalid: still to come.
    std::string where{};
    Deadline ready_by{};
    int64_t silence_ms = 0;  // To be set when it is ready; 0: it is.
    TcpOutgoing outgoing{};
    TcpIncoming incoming;
    // What the socket has told us of; the system tells of changes only (EPOLLET).
    bool readable = false;
    bool writable = false;

    bool ready() const { return socket.valid() && incoming.open(); }
    bool may_write() const { return writable && outgoing.has_work(incoming.open()); }
    bool has_work() const { return readable || may_write(); }
  };

  TcpDataPlane(Epoll epoll, std::unique_ptr<TcpScratch> scratch);
  void Look();
  bool Serve(LinkId id, Link& link, DataEvents* events);
  // Reading or writing has come to this.
  void Note(LinkId id, Link& link, const Moved& moved, const absl::Status& status);

  const Epoll epoll_;
  const std::unique_ptr<TcpScratch> scratch_;
  LinkId next_link_ = 1;
  absl::flat_hash_map<LinkId, std::unique_ptr<Link>> links_;
  absl::flat_hash_set<LinkId> ready_;                  // Links with something to do.
  std::vector<std::pair<LinkId, absl::Status>> down_;  // Reported by the next Progress().
};

}  // namespace kvferry
