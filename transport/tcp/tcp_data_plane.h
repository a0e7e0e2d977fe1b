#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "base/epoll.h"
#include "base/unique_fd.h"
#include "transport/data_plane.h"
#include "transport/tcp/tcp_incoming.h"
#include "transport/tcp/tcp_outgoing.h"

namespace kvferry {

// A connection that is made, being made or to be made, and what proves to each side who the other
// is.
struct TcpConnection {
  UniqueFd socket;     // Invalid: `dial` makes it.
  std::string say;     // First.
  std::string expect;  // First, before anything else counts.
  std::string where;   // It leads, for errors.
  // How long nothing may get through once both have said so (LimitSilence); 0: for ever. Whoever
  // dialled watches, and can dial again; the other side would cut it off from what still works.
  int64_t silence_ms = 0;
  // As DialTcp, and again while there is no way to the other side; null: that side has dialled.
  std::function<absl::StatusOr<UniqueFd>()> dial{};
  // How long the other side may acknowledge nothing of what is sent to it again and again; 0: for
  // ever. For whoever was dialled: its words may be all that is lost, as long packets are on a way
  // that is too narrow for them, and then nobody else is missed. A peer that takes no more is
  // another matter.
  int64_t unheard_ms = 0;
};

// A data plane over TCP sockets (docs/wire_protocol.md, "TCP"): the pages of a chunk may be sent
// from where they lie, and what arrives goes into pages as it comes. A link is one connection; who
// connects is the caller's affair (TcpDoor, DialTcp).
class TcpDataPlane final : public DataPlane {
 public:
  // `pages`: where what arrives goes to.
  static absl::StatusOr<std::unique_ptr<TcpDataPlane>> Create(
      const PoolMemory& pages = *HostMemory());
  ~TcpDataPlane() override;

  // A link on that connection, or on one that Join() will bring; sends wait for it. It is down if
  // the peer has not proven who it is by `ready_by`.
  absl::StatusOr<LinkId> Open(TcpConnection connection, Deadline ready_by);
  LinkId Await(Deadline ready_by);
  absl::Status Join(LinkId link, TcpConnection connection);

  void SendChunk(LinkId link, const ChunkHeader& header, ChunkSource source,
                 SendDone done) override;
  void SendCredit(LinkId link, const CreditHeader& header) override;
  bool carries_messages() const override { return true; }
  absl::Status SendMessage(LinkId link, const MessageHeader& header,
                           std::string_view bytes) override;
  Backlog BacklogOf(LinkId link) const override;
  void Close(LinkId link) override;
  bool Progress(DataEvents* events) override;
  int event_fd() const override { return epoll_.fd(); }
  bool Arm() override { return ready_.empty() && down_.empty(); }
  Deadline Tick(Deadline now) override;
  // Whether there is a deadline that the last Tick() did not know of.
  bool TakeNewDeadline() { return std::exchange(new_deadline_, false); }

 private:
  struct Link {
    explicit Link(TcpScratch* scratch) : incoming(scratch) {}

    TcpConnection connection{};  // Without a socket that is still to come.
    Deadline ready_by{};
    Deadline dial_at{};    // Where it is ours to dial, and there is no socket.
    std::string no_way{};  // Why there was none the last time.
    TcpOutgoing outgoing{};
    TcpIncoming incoming;
    // What the socket has told us of; the system tells of changes only (EPOLLET).
    bool readable = false;
    bool writable = false;
    // Of what is written with unheard_ms: when to look whether it is heard, how much was the last
    // time, and since when no more is.
    Deadline look_at = Deadline::max();
    int64_t heard_bytes = -1;
    Deadline heard_until{};

    bool has_socket() const { return connection.socket.valid(); }
    bool ready() const { return has_socket() && incoming.open(); }
    bool may_write() const { return writable && outgoing.has_work(incoming.open()); }
    bool has_work() const { return readable || may_write(); }
  };

  TcpDataPlane(Epoll epoll, std::unique_ptr<TcpScratch> scratch);
  // Dials if that is to be done, and begins with the first words.
  absl::Status Begin(LinkId id, Link& link);
  // There is no way to the other side. False: it is not to be dialled again.
  bool DialLater(Link& link, absl::string_view why);
  Deadline DialIfDue(LinkId id, Link& link, Deadline now);
  // Whether what was written is heard.
  void LookLater(Link& link);
  Deadline LookIfDue(LinkId id, Link& link, Deadline now);
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
  bool new_deadline_ = false;
};

}  // namespace kvferry
