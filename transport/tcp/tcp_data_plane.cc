#include "transport/tcp/tcp_data_plane.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace kvferry {
namespace {

// Of one link and direction, before it is the next one's turn.
constexpr int64_t kBytesATurn = 1 << 20;
constexpr auto kDialInterval = std::chrono::milliseconds(100);
// As often as a peer's silence is found out late by no more than a quarter.
constexpr int64_t kLooksATimeout = 4;
constexpr absl::string_view kIsItOpen = "; is that port (data_port) open to the other side?";

}  // namespace

absl::StatusOr<std::unique_ptr<TcpDataPlane>> TcpDataPlane::Create(const PoolMemory& pages) {
  KVFERRY_ASSIGN_OR_RETURN(Epoll epoll, Epoll::Create());
  KVFERRY_ASSIGN_OR_RETURN(std::unique_ptr<TcpScratch> scratch, TcpScratch::Create(pages));
  return std::unique_ptr<TcpDataPlane>(new TcpDataPlane(std::move(epoll), std::move(scratch)));
}

TcpDataPlane::TcpDataPlane(Epoll epoll, std::unique_ptr<TcpScratch> scratch)
    : epoll_(std::move(epoll)), scratch_(std::move(scratch)) {}

TcpDataPlane::~TcpDataPlane() {
  while (!links_.empty()) Close(links_.begin()->first);
}

LinkId TcpDataPlane::Await(Deadline ready_by) {
  auto link = std::make_unique<Link>(scratch_.get());
  link->ready_by = ready_by;
  links_.emplace(next_link_, std::move(link));
  return next_link_++;
}

absl::StatusOr<LinkId> TcpDataPlane::Open(TcpConnection connection, Deadline ready_by) {
  const LinkId link = Await(ready_by);
  if (const absl::Status status = Join(link, std::move(connection)); !status.ok()) {
    links_.erase(link);
    return status;
  }
  return link;
}

absl::Status TcpDataPlane::Join(LinkId id, TcpConnection connection) {
  const auto found = links_.find(id);
  if (found == links_.end() || found->second->has_socket()) {
    return absl::FailedPreconditionError("tcp: nobody waits for this connection");
  }
  found->second->connection = std::move(connection);
  return Begin(id, *found->second);
}

absl::Status TcpDataPlane::Begin(LinkId id, Link& link) {
  TcpConnection& connection = link.connection;
  link.outgoing.Say(connection.say);
  link.incoming.Expect(connection.expect);
  if (!link.has_socket()) {
    absl::StatusOr<UniqueFd> socket = connection.dial();
    if (absl::IsDeadlineExceeded(socket.status()) && DialLater(link, socket.status().message())) {
      return absl::OkStatus();
    }
    KVFERRY_RETURN_IF_ERROR(socket.status());
    connection.socket = *std::move(socket);
  }
  return epoll_.Add(connection.socket.get(), EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, id);
}

bool TcpDataPlane::DialLater(Link& link, absl::string_view why) {
  if (link.connection.dial == nullptr || link.ready()) return false;
  link.connection.socket = UniqueFd();
  link.no_way = std::string(why);
  link.dial_at = Clock::now() + kDialInterval;
  new_deadline_ = true;
  return true;
}

void TcpDataPlane::SendChunk(LinkId id, const ChunkHeader& header, ChunkSource source,
                             SendDone done) {
  const auto found = links_.find(id);
  if (found == links_.end()) return done(absl::UnavailableError("tcp: the link is closed"));
  found->second->outgoing.AddChunk(header, std::move(source), std::move(done));
  if (found->second->has_work()) ready_.insert(id);
}

void TcpDataPlane::SendCredit(LinkId id, const CreditHeader& header) {
  const auto found = links_.find(id);
  if (found == links_.end()) return;  // Nobody is left to use it.
  found->second->outgoing.AddCredit(header);
  if (found->second->has_work()) ready_.insert(id);
}

absl::Status TcpDataPlane::SendMessage(LinkId id, const MessageHeader& header,
                                       std::string_view bytes) {
  const auto found = links_.find(id);
  if (found == links_.end()) return absl::UnavailableError("tcp: the link is closed");
  KVFERRY_RETURN_IF_ERROR(found->second->outgoing.AddMessage(header, bytes));
  if (found->second->has_work()) ready_.insert(id);
  return absl::OkStatus();
}

Backlog TcpDataPlane::BacklogOf(LinkId id) const {
  const auto found = links_.find(id);
  if (found == links_.end()) return {};
  const TcpOutgoing& outgoing = found->second->outgoing;
  return {outgoing.waiting(), outgoing.written(), found->second->ready()};
}

void TcpDataPlane::Close(LinkId id) {
  auto node = links_.extract(id);
  if (node.empty()) return;
  ready_.erase(id);
  if (node.mapped()->has_socket()) epoll_.HangUp(node.mapped()->connection.socket.get());
  node.mapped()->outgoing.Fail(absl::UnavailableError("tcp: the link was closed"));
}

void TcpDataPlane::Look() {
  Epoll::Room room;
  for (const epoll_event& event : epoll_.Ready(room)) {
    const auto found = links_.find(event.data.u64);
    if (found == links_.end()) continue;
    // What is broken is found out by reading.
    found->second->readable |= (event.events & ~uint32_t{EPOLLOUT}) != 0;
    found->second->writable |= (event.events & EPOLLOUT) != 0;
    if (found->second->has_work()) ready_.insert(found->first);
  }
}

bool TcpDataPlane::Progress(DataEvents* events) {
  Look();
  bool moved = false;
  const std::vector<LinkId> ready(ready_.begin(), ready_.end());
  for (const LinkId id : ready) {
    const auto found = links_.find(id);
    if (found != links_.end()) moved |= Serve(id, *found->second, events);
  }
  const auto down = std::exchange(down_, {});
  for (const auto& [id, status] : down) {
    if (links_.contains(id)) events->OnLinkDown(id, status);
  }
  return moved || !down.empty();
}

bool TcpDataPlane::Serve(LinkId id, Link& link, DataEvents* events) {
  const int fd = link.connection.socket.get();
  int64_t bytes = 0;
  if (link.readable) {
    Moved moved;
    const bool was_open = link.ready();
    const absl::Status status = link.incoming.Read(fd, kBytesATurn, events, &moved);
    bytes += moved.bytes;
    link.readable = moved.some();
    if (!was_open && link.ready()) {
      // Not before: connect_timeout_ms has better words for a connection that is never made.
      if (link.connection.silence_ms > 0) {
        LimitSilence(link.connection.socket, link.connection.silence_ms);
      }
      events->OnLinkOpen(id);
    }
    Note(id, link, moved, status);
  }
  if (link.may_write()) {
    const Moved moved = link.outgoing.Write(fd, link.incoming.open(), kBytesATurn);
    bytes += moved.bytes;
    link.writable = moved.some();
    if (link.connection.unheard_ms > 0 && link.look_at == Deadline::max()) LookLater(link);
    Note(id, link, moved, absl::OkStatus());
  }
  if (!link.has_work()) ready_.erase(id);
  return bytes > 0;
}

void TcpDataPlane::Note(LinkId id, Link& link, const Moved& moved, const absl::Status& status) {
  if (status.ok() && moved.result != Moved::Result::kBroken) return;
  // It is silent until it is closed.
  epoll_.Remove(link.connection.socket.get());
  link.readable = link.writable = false;
  const std::string& where = link.connection.where;
  if (!status.ok()) {
    down_.emplace_back(id, absl::Status(status.code(), absl::StrCat("tcp: dropped ", where, ": ",
                                                                    status.message())));
    return;
  }
  const bool silence = IsSilence(moved.error);
  const std::string words = absl::StrCat(
      "tcp: the connection to ", where,
      " ended: ", moved.error == 0 ? "closed by the other side" : std::strerror(moved.error),
      moved.error == ECONNREFUSED ? kIsItOpen : "");
  if (silence && DialLater(link, words)) return;
  down_.emplace_back(id, link.ready() && silence ? absl::DeadlineExceededError(words)
                                                 : absl::UnavailableError(words));
}

// Returns when to ask again.
Deadline TcpDataPlane::DialIfDue(LinkId id, Link& link, Deadline now) {
  if (link.has_socket() || link.connection.dial == nullptr) return link.ready_by;
  if (link.dial_at <= now) {
    const absl::Status begun = Begin(id, link);
    if (!begun.ok()) {
      link.ready_by = Deadline::max();  // Never.
      down_.emplace_back(id, begun);
    }
  }
  return link.has_socket() ? link.ready_by : std::min(link.ready_by, link.dial_at);
}

void TcpDataPlane::LookLater(Link& link) {
  link.look_at =
      Clock::now() + std::chrono::milliseconds(link.connection.unheard_ms) / kLooksATimeout;
  new_deadline_ = true;
}

// Returns when to ask again. What is sent again is heard with the first acknowledgement of any of
// it.
Deadline TcpDataPlane::LookIfDue(LinkId id, Link& link, Deadline now) {
  if (link.look_at > now) return link.look_at;
  link.look_at = Deadline::max();
  const Unacknowledged left = WhatIsUnacknowledged(link.connection.socket);
  if (left.bytes == 0) return link.look_at;  // Until something is written.
  const int64_t heard_bytes = link.outgoing.written() - left.bytes;
  if (!left.sent_again || heard_bytes != std::exchange(link.heard_bytes, heard_bytes)) {
    link.heard_until = now;
  }
  const int64_t limit_ms = link.connection.unheard_ms;
  if (now - link.heard_until < std::chrono::milliseconds(limit_ms)) {
    LookLater(link);
    return link.look_at;
  }
  link.connection.unheard_ms = 0;  // Once.
  down_.emplace_back(
      id, absl::DeadlineExceededError(absl::StrCat(
              "tcp: of ", left.bytes, " bytes to ", link.connection.where,
              " nothing was acknowledged for heartbeat_timeout_ms (", limit_ms,
              "), though they were sent again; does the way there pass packets of this length?")));
  return link.look_at;
}

Deadline TcpDataPlane::Tick(Deadline now) {
  Deadline next = Deadline::max();
  for (const auto& [id, link] : links_) {
    if (link->ready()) next = std::min(next, LookIfDue(id, *link, now));
    if (link->ready() || link->ready_by == Deadline::max()) continue;
    if (link->ready_by > now) {
      next = std::min(next, DialIfDue(id, *link, now));
      continue;
    }
    link->ready_by = Deadline::max();  // Once.
    const std::string& where = link->connection.where;
    down_.emplace_back(
        id, absl::UnavailableError(absl::StrCat(
                "tcp: no connection for data ",
                where.empty() ? "came from the peer" : absl::StrCat("to ", where),
                " within connect_timeout_ms",
                link->no_way.empty() ? "" : absl::StrCat(" (", link->no_way, ")"), kIsItOpen)));
  }
  return next;
}

}  // namespace kvferry
