#pragma once

// Sessions of one sender with receivers, over a network that does nothing by itself: each thing
// that a thread, a lane or the network may do next is a step of its own, and whoever plays the
// world chooses which. All in one thread.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "transport/arena.h"
#include "transport/guards.h"
#include "transport/mapped/peers_memory.h"
#include "transport/outbox.h"
#include "transport/piece_copy.h"
#include "transport/pool_regions.h"
#include "transport/receiver.h"
#include "transport/sender.h"

namespace kvferry::simulated {

using Random = std::mt19937_64;
inline int64_t Below(int64_t end, Random& random) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(end));
}
inline bool OneIn(int64_t n, Random& random) { return Below(n, random) == 0; }

// How a link brings chunks: in one piece, as by UCX; part by part, as by TCP, straight from pages
// too; read where they lie, by who has mapped the sender's memory; or as lists of what is to be
// read from afar.
enum class Brings { kWhole, kInParts, kMapped, kFromAfar };
inline constexpr int64_t kNumBrings = 4;

struct Chunk {
  ChunkHeader header;
  ChunkSource source;
  SendDone done;  // Null once it has run.
  bool begun = false;
  std::span<const std::byte> payload{};  // Of what was filled; the sender's until `done`.
  uint64_t generation = 0;               // Of its slot, when it was sent to who maps it.
  // What has left the sender, and whether the rest of it is filler.
  std::vector<std::byte> bytes{};
  bool given_up = false;
  // At the receiver, part by part.
  std::unique_ptr<ChunkSink> sink{};
  bool arriving = false;
  size_t taken = 0;

  bool has_left() const { return begun && bytes.size() == header.bytes; }
};
using ChunkPtr = std::shared_ptr<Chunk>;

struct Session {
  struct Lane {
    std::deque<ChunkPtr> leaving;   // The first may have left in part.
    std::deque<ChunkPtr> arriving;  // Those that have begun to leave.
  };
  struct Landed {
    ChunkHeader header;
    absl::Status status;
  };
  // A chunk that the receiver reads from afar, piece by piece, and then the word that guards it.
  struct Read {
    ChunkHeader header;
    std::vector<std::byte> list;
    size_t pieces_read = 0;
    std::vector<std::byte> bytes{};
    std::optional<uint64_t> generation{};
  };

  size_t receiver;
  Brings brings;
  PeerKey at_sender, at_receiver;
  LinkId link;
  std::vector<Lane> lanes;
  bool sender_open = true, receiver_open = true;
  bool ready = false;  // To the receiver.
  std::deque<MessageBody> to_sender{}, to_receiver{};
  std::deque<CreditHeader> credits{};
  std::deque<std::pair<ChunkPtr, absl::Status>> sent{};  // That the sender is to hear of.
  std::deque<Landed> landed{};                           // What lanes have to tell the receiver.
  std::map<int64_t, ChunkPtr> reading{};                 // By slot: what the peer may read.
  std::deque<int64_t> read{};                            // Slots the peer is through with.
  bool reads_work = true;                                // From afar.
  std::vector<Read> reads{};                             // Under way, in whatever order.
};
using SessionPtr = std::shared_ptr<Session>;

class Network {
 public:
  // `pool`, `arena` and `guards` are the sender's and outlive this.
  Network(const KvPool& pool, Arena* arena, const Guards* guards, Random* random);

  SessionPtr Connect(size_t receiver, Brings brings, size_t lanes);
  const std::vector<SessionPtr>& sessions() const { return sessions_; }
  SessionPtr At(const PeerKey& peer) const;
  SessionPtr Of(LinkId link) const;

  // What they tell the sender, and the receiver, of. All return whether there was something to do.
  bool Leave(Session& session, size_t lane);  // A part of a chunk, or all of it.
  bool TellSent(Session& session);
  bool HearRead(Session& session);
  // `meanwhile` is called while a chunk is read out of the sender's memory.
  bool Arrive(Session& session, size_t lane, Receiver& receiver, PieceCopy* lanes_copy,
              const std::function<void()>& meanwhile);
  // Moves one of the reads from afar on.
  bool ReadOn(Session& session, Receiver& receiver);
  // No more can be read, and what is being read fails.
  bool BreakReads(Session& session, Receiver& receiver);
  // Flips a bit of what has left, if there is such a chunk.
  bool Corrupt(Session& session, size_t lane);
  // No more leaves, and what has not completes with an error.
  void CloseAtSender(Session& session);
  void CloseAtReceiver(Session& session);
  // Nobody uses them any more.
  void ForgetClosed();

  void Send(Session& session, const ChunkHeader& header, ChunkSource source, SendDone done);

 private:
  bool Begin(Session& session, Session::Lane& lane, const ChunkPtr& chunk);
  void Fill(Chunk& chunk, size_t most);
  bool ReadMapped(Session& session, const ChunkPtr& chunk, Receiver& receiver,
                  const std::function<void()>& meanwhile);
  const std::byte* InPool(uint64_t offset) const;
  bool ArriveInParts(Session& session, size_t lane, Chunk& chunk, Receiver& receiver,
                     PieceCopy* lanes_copy);

  Arena* const arena_;
  const Guards* const guards_;
  Random& random_;
  const PoolRegions regions_;
  mapped::PeersMemory memory_;
  mapped::PeersMemory::Found found_;
  std::vector<SessionPtr> sessions_;
  LinkId last_link_ = 0;
};

// Of the sender, or of a receiver.
class Links final : public Outbox, private ChunkLinks {
 public:
  // `crowded`: whether there is room seldom.
  Links(Network* network, bool is_sender, Random* random, bool crowded = false)
      : network_(*network), is_sender_(is_sender), random_(*random), crowded_(crowded) {}

  void Send(const PeerKey& peer, MessageBody body) override;
  bool HasRoom(const PeerKey& peer) override;
  ChunkLinks& data() override { return *this; }

 private:
  void SendChunk(LinkId link, const ChunkHeader& header, ChunkSource source,
                 SendDone done) override;
  bool LendsTo(LinkId link) const override;
  void SendCredit(LinkId link, const CreditHeader& header) override;
  ReadsPool PoolReads(LinkId link) const override;
  ReadCosts CostsOfReads(LinkId link) const override;
  void Read(LinkId link, const ChunkHeader& header, std::span<const std::byte> list) override;

  Network& network_;
  const bool is_sender_;
  Random& random_;
  const bool crowded_;
};

}  // namespace kvferry::simulated
