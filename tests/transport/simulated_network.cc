#include "tests/transport/simulated_network.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/transport/joined.h"
#include "transport/direct_reads.h"

namespace kvferry::simulated {
namespace {

// Memory that somebody else owns.
std::shared_ptr<const std::byte> Borrowed(const std::byte* memory) {
  return {std::shared_ptr<const std::byte>(), memory};
}

}  // namespace

Network::Network(const KvPool& pool, Arena* arena, const Guards* guards, Random* random)
    : arena_(arena), guards_(guards), random_(*random), regions_(pool) {
  memory_.TakeArena(Borrowed(arena->memory().data()), arena->shape());
  for (const PoolRegions::Region& region : regions_.regions()) {
    memory_.AddPart(Borrowed(region.data()), region.size(), /*on_device=*/false);
  }
}

SessionPtr Network::Connect(size_t receiver, Brings brings, size_t lanes) {
  const LinkId link = ++last_link_;
  const bool has_lanes = brings == Brings::kWhole || brings == Brings::kInParts;
  sessions_.push_back(std::make_shared<Session>(
      Session{.receiver = receiver,
              .brings = brings,
              .at_sender = absl::StrCat("accepted:", link),
              .at_receiver = absl::StrCat("dialled:", link),
              .link = link,
              .lanes = std::vector<Session::Lane>(has_lanes ? lanes : 1)}));
  return sessions_.back();
}

SessionPtr Network::At(const PeerKey& peer) const {
  for (const SessionPtr& session : sessions_) {
    if (session->at_sender == peer || session->at_receiver == peer) return session;
  }
  return nullptr;
}

SessionPtr Network::Of(LinkId link) const {
  for (const SessionPtr& session : sessions_) {
    if (session->link == link) return session;
  }
  return nullptr;
}

void Network::Send(Session& session, const ChunkHeader& header, ChunkSource source, SendDone done) {
  const auto chunk = std::make_shared<Chunk>(
      Chunk{.header = header, .source = std::move(source), .done = std::move(done)});
  const size_t lane = Below(static_cast<int64_t>(session.lanes.size()), random_);
  session.lanes[lane].leaving.push_back(chunk);
  // The mapped plane asks at once; of the others a lane may be at it before the sender goes on.
  if (session.brings == Brings::kMapped || OneIn(4, random_)) {
    while (Leave(session, lane) && session.brings == Brings::kMapped) {
    }
  }
}

// ---------------------------------------------------------------- at the sender

bool Network::Begin(Session& session, Session::Lane& lane, const ChunkPtr& chunk) {
  if (const auto* fill = std::get_if<FillChunk>(&chunk->source)) {
    const absl::StatusOr<std::span<const std::byte>> payload = (*fill)(&chunk->header);
    if (!payload.ok()) {
      session.sent.emplace_back(chunk, payload.status());
      lane.leaving.pop_front();
      return false;
    }
    chunk->payload = *payload;
  }
  chunk->begun = true;
  return true;
}

// What the socket takes of it, or all of a page list's.
void Network::Fill(Chunk& chunk, size_t most) {
  const size_t from = chunk.bytes.size();
  if (chunk.given_up) {
    chunk.bytes.resize(from + most);
    return;
  }
  if (const auto* lend = std::get_if<LendChunk>(&chunk.source)) {
    const auto read = [&](Pieces pieces) {
      const std::vector<std::byte> all = Joined(pieces);
      chunk.bytes.insert(chunk.bytes.end(), all.begin(), all.begin() + std::min(most, all.size()));
    };
    chunk.given_up = !(*lend)(static_cast<int64_t>(from), static_cast<int64_t>(most), read);
    return;
  }
  chunk.bytes.insert(chunk.bytes.end(), chunk.payload.begin() + from,
                     chunk.payload.begin() + from + most);
}

bool Network::Leave(Session& session, size_t lane_index) {
  Session::Lane& lane = session.lanes[lane_index];
  if (!session.sender_open || lane.leaving.empty()) return false;
  const ChunkPtr chunk = lane.leaving.front();
  const bool begins = !chunk->begun;
  if (begins && !Begin(session, lane, chunk)) return true;
  if (session.brings == Brings::kMapped) {
    const int64_t slot = arena_->ChunkAt(chunk->payload.data());
    chunk->generation = arena_->Generation(slot);
    session.reading.emplace(slot, chunk);
    lane.arriving.push_back(chunk);
    lane.leaving.pop_front();
    return true;
  }
  if ((chunk->header.flags & kChunkInPool) != 0) {  // A list.
    chunk->bytes.assign(chunk->payload.begin(), chunk->payload.end());
    lane.arriving.push_back(chunk);
    session.sent.emplace_back(chunk, absl::OkStatus());
    lane.leaving.pop_front();
    return true;
  }
  const size_t left = chunk->header.bytes - chunk->bytes.size();
  const bool all = session.brings != Brings::kInParts || OneIn(2, random_);
  Fill(*chunk, all ? left : 1 + Below(static_cast<int64_t>(left), random_));
  if (begins && chunk->bytes.empty()) {  // The transfer had ended before anything left.
    session.sent.emplace_back(chunk, absl::CancelledError("the transfer has ended"));
    lane.leaving.pop_front();
    return true;
  }
  if (begins) lane.arriving.push_back(chunk);
  if (chunk->has_left()) {
    session.sent.emplace_back(chunk, absl::OkStatus());
    lane.leaving.pop_front();
  }
  return true;
}

bool Network::TellSent(Session& session) {
  if (session.sent.empty()) return false;
  const auto [chunk, status] = session.sent.front();
  session.sent.pop_front();
  chunk->payload = {};
  std::exchange(chunk->done, nullptr)(status);
  return true;
}

bool Network::HearRead(Session& session) {
  if (!session.sender_open || session.read.empty()) return false;
  const auto reading = session.reading.extract(session.read.front());
  session.read.pop_front();
  std::exchange(reading.mapped()->done, nullptr)(absl::OkStatus());
  return true;
}

void Network::CloseAtSender(Session& session) {
  const absl::Status closed = absl::UnavailableError("the link was closed");
  session.sender_open = false;
  for (auto& [slot, chunk] : std::exchange(session.reading, {})) {
    arena_->TakeFromReaders(slot);
    std::exchange(chunk->done, nullptr)(closed);
  }
  for (Session::Lane& lane : session.lanes) {
    for (const ChunkPtr& chunk : std::exchange(lane.leaving, {})) {
      session.sent.emplace_back(chunk, closed);
    }
    // What has left in part comes no further.
    if (session.brings != Brings::kMapped) {
      std::erase_if(lane.arriving, [](const ChunkPtr& chunk) { return chunk->done != nullptr; });
    }
  }
  session.to_sender.clear();
  session.credits.clear();
  session.read.clear();
}

// ---------------------------------------------------------------- at the receiver

void Network::CloseAtReceiver(Session& session) {
  session.receiver_open = session.ready = false;
  session.to_receiver.clear();
  for (Session::Lane& lane : session.lanes) lane.arriving.clear();
  session.reads.clear();
}

bool Network::ReadMapped(Session& session, const ChunkPtr& chunk, Receiver& receiver,
                         const std::function<void()>& meanwhile) {
  const std::byte* const arena = arena_->memory().data();
  const int64_t slot = arena_->ChunkAt(chunk->payload.data());
  const mapped::ChunkPacket packet{.header = chunk->header,
                                   .slot = static_cast<uint64_t>(slot),
                                   .generation = chunk->generation,
                                   .payload_bytes = chunk->payload.size()};
  const absl::StatusOr<Payload> found = memory_.Find(packet, &found_);
  const auto intact = [&] {
    const bool is = GenerationSeenByReader(arena, slot) == chunk->generation;
    meanwhile();
    return is;
  };
  if (found.ok()) {
    receiver.OnChunk(chunk->header, *found, intact);
  } else {
    EXPECT_FALSE(intact()) << "a list that nobody has changed: " << found.status().ToString();
    receiver.OnChunk(chunk->header, Payload(), [] { return false; });
  }
  if (session.sender_open) session.read.push_back(slot);
  return true;
}

bool Network::ArriveInParts(Session& session, size_t lane, Chunk& chunk, Receiver& receiver,
                            PieceCopy* lanes_copy) {
  if (!std::exchange(chunk.arriving, true)) {
    chunk.sink =
        lane == 0 ? receiver.OnChunkBegins(chunk.header)
                  : receiver.Begin(chunk.header, lanes_copy,
                                   [&session](const ChunkHeader& of, const absl::Status& status) {
                                     session.landed.push_back({of, status});
                                   });
  }
  const std::span<const std::byte> come = std::span(chunk.bytes).subspan(chunk.taken);
  const auto part = come.first(come.empty() ? 0 : 1 + Below(come.size(), random_));
  if (chunk.sink != nullptr && !part.empty()) {
    std::shared_ptr<const MovesUnderWay> reading;
    const bool wanted = chunk.sink->prefers_fill() ? chunk.sink->Fill([&](MutablePieces to) {
      size_t put = 0;
      for (const std::span<std::byte> piece : to) {
        const size_t bytes = std::min(piece.size(), part.size() - put);
        std::copy_n(part.begin() + put, bytes, piece.begin());
        put += bytes;
      }
      return static_cast<int64_t>(put);
    })
                                                   : chunk.sink->Copy(part, &reading);
    EXPECT_EQ(reading, nullptr) << "pages on the host are copied at once";
    if (!wanted) chunk.sink = nullptr;
  }
  chunk.taken += part.size();
  if (chunk.taken < chunk.header.bytes) return !part.empty();
  if (chunk.sink != nullptr && !chunk.given_up) chunk.sink->End();
  chunk.sink = nullptr;
  return true;
}

bool Network::Arrive(Session& session, size_t lane_index, Receiver& receiver, PieceCopy* lanes_copy,
                     const std::function<void()>& meanwhile) {
  Session::Lane& lane = session.lanes[lane_index];
  if (!session.receiver_open || lane.arriving.empty()) return false;
  const ChunkPtr chunk = lane.arriving.front();
  if (session.brings == Brings::kMapped) {
    lane.arriving.pop_front();
    return ReadMapped(session, chunk, receiver, meanwhile);
  }
  if (session.brings == Brings::kInParts) {
    const bool moved = ArriveInParts(session, lane_index, *chunk, receiver, lanes_copy);
    if (chunk->taken == chunk->header.bytes) lane.arriving.pop_front();
    return moved;
  }
  lane.arriving.pop_front();
  if ((chunk->header.flags & kChunkInPool) != 0) {
    receiver.OnChunkElsewhere(chunk->header, chunk->bytes);
    return true;
  }
  const std::span<const std::byte> bytes = chunk->bytes;
  const auto intact = [] { return true; };
  if (lane_index == 0) {
    receiver.OnChunk(chunk->header, Pieces(&bytes, 1), intact);
  } else {
    session.landed.push_back(
        {chunk->header, receiver.Land(chunk->header, Pieces(&bytes, 1), intact, lanes_copy)});
  }
  return true;
}

const std::byte* Network::InPool(uint64_t offset) const {
  for (const PoolRegions::Region& region : regions_.regions()) {
    if (offset < region.size()) return region.data() + offset;
    offset -= region.size();
  }
  ADD_FAILURE() << "a list names bytes behind the pool";
  return nullptr;
}

bool Network::ReadOn(Session& session, Receiver& receiver) {
  if (session.reads.empty()) return false;
  const auto at = session.reads.begin() + Below(session.reads.size(), random_);
  if (!session.reads_work) {
    const ChunkHeader header = at->header;
    session.reads.erase(at);
    receiver.OnReadFailed(header, absl::UnavailableError("the network reads no more"));
    return true;
  }
  if (at->pieces_read < at->list.size() / sizeof(PoolPiece) - 1) {
    PoolPiece piece;
    std::memcpy(&piece, at->list.data() + ++at->pieces_read * sizeof(piece), sizeof(piece));
    const std::byte* const from = InPool(piece.offset);
    at->bytes.insert(at->bytes.end(), from, from + piece.bytes);
    return true;
  }
  GuardHead guard;
  std::memcpy(&guard, at->list.data(), sizeof(guard));
  if (!at->generation.has_value()) {
    at->generation = guards_->Generation(static_cast<int64_t>(guard.index));
    return true;
  }
  const Session::Read read = std::move(*at);
  session.reads.erase(at);
  const std::span<const std::byte> bytes = read.bytes;
  receiver.OnChunk(read.header, Pieces(&bytes, 1),
                   [&] { return read.generation == guard.generation; });
  return true;
}

bool Network::BreakReads(Session& session, Receiver& receiver) {
  if (session.brings != Brings::kFromAfar || !std::exchange(session.reads_work, false)) {
    return false;
  }
  for (const Session::Read& read : std::exchange(session.reads, {})) {
    receiver.OnReadFailed(read.header, absl::UnavailableError("the network reads no more"));
  }
  return true;
}

bool Network::Corrupt(Session& session, size_t lane) {
  if (session.lanes[lane].arriving.empty()) return false;
  Chunk& chunk = *session.lanes[lane].arriving.front();
  const bool is_list = (chunk.header.flags & kChunkInPool) != 0;  // Which nothing sums up.
  if (is_list || chunk.bytes.size() <= chunk.taken) return false;
  chunk.bytes[chunk.taken + Below(chunk.bytes.size() - chunk.taken, random_)] ^= std::byte{4};
  return true;
}

void Network::ForgetClosed() {
  std::erase_if(sessions_, [](const SessionPtr& session) {
    return !session->sender_open && !session->receiver_open && session->sent.empty() &&
           session->landed.empty();
  });
}

// ---------------------------------------------------------------- what they are given

void Links::Send(const PeerKey& peer, MessageBody body) {
  const SessionPtr session = network_.At(peer);
  // What either side has closed takes nothing any more.
  if (session == nullptr || !session->sender_open || !session->receiver_open) return;
  (is_sender_ ? session->to_receiver : session->to_sender).push_back(std::move(body));
}

bool Links::HasRoom(const PeerKey& /*peer*/) { return !crowded_ || !OneIn(2, random_); }

void Links::SendChunk(LinkId link, const ChunkHeader& header, ChunkSource source, SendDone done) {
  const SessionPtr session = network_.Of(link);
  if (session == nullptr || !session->sender_open) {
    done(absl::UnavailableError("the link is closed"));
    return;
  }
  network_.Send(*session, header, std::move(source), std::move(done));
}

bool Links::LendsTo(LinkId link) const {
  const SessionPtr session = network_.Of(link);
  return session != nullptr && session->brings == Brings::kInParts;
}

void Links::SendCredit(LinkId link, const CreditHeader& header) {
  const SessionPtr session = network_.Of(link);
  if (session != nullptr && session->sender_open) session->credits.push_back(header);
}

ChunkLinks::ReadsPool Links::PoolReads(LinkId link) const {
  const SessionPtr session = network_.Of(link);
  if (session == nullptr) return ReadsPool::kNo;
  if (session->brings == Brings::kFromAfar) return ReadsPool::kFromAfar;
  return session->brings == Brings::kMapped ? ReadsPool::kOnThisHost : ReadsPool::kNo;
}

ReadCosts Links::CostsOfReads(LinkId link) const {
  const SessionPtr session = network_.Of(link);
  const bool reads =
      session != nullptr && session->brings == Brings::kFromAfar && session->reads_work;
  return reads ? ReadCosts{.read_ns = 100, .mib_ns = 1000} : ReadCosts();
}

void Links::Read(LinkId link, const ChunkHeader& header, std::span<const std::byte> list) {
  const SessionPtr session = network_.Of(link);
  ASSERT_NE(session, nullptr);
  session->reads.push_back({.header = header, .list = {list.begin(), list.end()}});
  session->reads.back().header.flags &= ~kChunkInPool;
}

}  // namespace kvferry::simulated
