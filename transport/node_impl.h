#pragma once

// Inside of Node: node.cc has the public calls and the progress thread, node_sessions.cc what is
// said between hello and goodbye.

#include <unistd.h>

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/linger.h"
#include "base/log.h"
#include "base/random.h"
#include "base/thread_pool.h"
#include "transport/arena.h"
#include "transport/backlog.h"
#include "transport/calls.h"
#include "transport/command_queue.h"
#include "transport/control_plane.h"
#include "transport/data_planes.h"
#include "transport/device_arena.h"
#include "transport/futile_wakes.h"
#include "transport/guards.h"
#include "transport/limited_line.h"
#include "transport/metrics.h"
#include "transport/node.h"
#include "transport/outbox.h"
#include "transport/receiver.h"
#include "transport/sender.h"
#include "transport/sessions.h"

namespace kvferry {

class NodeImpl final : public Node, public ControlEvents, public DataEvents, public Outbox {
 public:
  explicit NodeImpl(Options options) : options_(std::move(options)), epoch_(RandomId()) {}
  ~NodeImpl() override;
  absl::Status Init();

  uint64_t epoch() const override { return epoch_; }
  const std::string& listen_address() const override { return listen_address_; }
  absl::StatusOr<std::shared_ptr<FetchHandle>> Fetch(FetchRequest request) override;
  void StartAwaited(uint64_t await_id, const PeerKey& peer, uint64_t lease_id) override;
  void EndAwaited(uint64_t await_id, const absl::Status& why) override;
  absl::StatusOr<uint64_t> Call(CallRequest request, Calls::OnReply on_reply) override;
  void CancelCall(uint64_t id) override;
  void Reply(const CallKey& call, absl::StatusOr<Fields> reply) override;
  void LeaseChanged(uint64_t lease_id) override;
  absl::Status AbortLease(uint64_t lease_id, const absl::Status& why, Again again,
                          Deadline deadline) override;
  void AbortLease(uint64_t lease_id, const absl::Status& why, Again again,
                  std::function<void()> then) override;
  std::vector<std::pair<std::string, int64_t>> Metrics() const override {
    return metrics_.Snapshot();
  }

 private:
  // Any thread.
  absl::Status CheckFetch(const FetchRequest& request) const;

  // The progress thread.
  void Run();
  bool Work();
  void Sleep(Deadline until);
  Deadline Tick(Deadline now);
  bool HasReadySession();
  void SayGoodbye();
  void PinArena();
  const SharedMemory* SharedPool() const;
  MappedPool PoolForPeers();
  std::vector<PoolMemory::SharedPart> PoolParts() const;
  void MakeDeviceArena();
  // What peers may read from afar, with guards_ if that is wanted.
  absl::StatusOr<DirectReads::Readable> MakeReadable();

  // ControlEvents, DataEvents, Outbox.
  void OnMessage(const PeerKey& peer, Message message) override;
  void OnMalformed(const PeerKey& peer, const absl::Status& status) override;
  void OnAttemptFailed(const PeerKey& peer, Attempt failed) override;
  void OnMade(const PeerKey& peer) override;
  void OnMadeAgain(const PeerKey& peer) override;
  void OnStranger() override;
  void OnChunk(const ChunkHeader& header, const Payload& payload, Intact intact) override;
  void OnChunkElsewhere(const ChunkHeader& header, std::span<const std::byte> list) override;
  void OnReadFailed(const ChunkHeader& header, const absl::Status& status) override;
  void OnProbed(LinkId link) override;
  void OnLinkOpen(LinkId link) override;
  void OnCredit(const CreditHeader& header) override;
  void OnLinkMessage(const MessageHeader& header, std::span<const std::byte> bytes) override;
  std::unique_ptr<ChunkSink> OnChunkBegins(const ChunkHeader& header) override;
  class TakerOfLane;
  void OnLinkDown(LinkId link, const absl::Status& status) override;
  void Send(const PeerKey& peer, MessageBody body) override;
  bool HasRoom(const PeerKey& peer) override;
  std::string WhyUnreachable(const PeerKey& peer) override;
  bool GoesByLink(const Session* session) const;
  // Of the way by which a session's messages go.
  Backlog BacklogOf(const PeerKey& peer, const Session& session) const;
  // A long one that has no room becomes an error.
  void ShortenReply(const PeerKey& peer, const Session& session, ReplyMsg* reply);
  void NoteCrowded(const PeerKey& peer, const Backlog& backlog);
  // What has waited for room there, where there is some again.
  void AskMore();
  // Ends crowded sessions whose peers take nothing; returns when to be called again at the latest.
  Deadline EndCrowded(Deadline now);
  // By the control plane, past whatever is on its way over the link.
  void SendAside(const PeerKey& peer, MessageBody body);
  // What came over links since the last call.
  void HearLinks();
  ChunkLinks& data() override { return *data_; }

  // The session with the process of that epoch (0: any) at the address; dials where there is none.
  // awaits_anyone: for a call that may have come before the process that is to serve it.
  absl::StatusOr<PeerKey> SessionFor(const std::string& address, uint64_t epoch,
                                     bool awaits_anyone);
  void SendHello(const PeerKey& peer);
  // Of a session whose hello has had no answer in time.
  absl::Status NotGreeted(const Session& session) const;
  absl::Status JoinSession(Receiver::Fetch& fetch);
  void StartFetch(Receiver::Fetch fetch);
  // Whatever waits for the session, once it is known how the peer's pages can be had.
  void RequestWaiting(const PeerKey& peer, const Session& session);
  // What follows from JoinSession().
  void RequestOrCancel(uint64_t fetch_id, const absl::Status& joined, const PeerKey& peer);
  void StartCall(uint64_t id, const std::string& address, Calls::Call call);
  void OnHello(const PeerKey& peer, uint64_t epoch, const HelloMsg& hello);
  absl::Status CheckHello(const HelloMsg& hello, uint64_t epoch) const;
  absl::Status CheckRoomFor(uint64_t epoch) const;
  // Whether each side can make pages of the other's page size and order out of its own.
  absl::Status CheckConverts(const HelloMsg& hello) const;
  // The same of values and their dtypes.
  absl::Status CheckCasts(const HelloMsg& hello) const;
  // Why no pages can be exchanged with that peer; empty: they can.
  std::string DifferenceFrom(const HelloMsg& hello) const;
  void CountPeers();
  // The peer has given the session up, and may go on over another one.
  void OnGivenUp(const PeerKey& peer, const absl::Status& status);
  void OnWelcome(const PeerKey& peer, Session& session, uint64_t epoch, const WelcomeMsg& welcome);
  // Of a dialled session that learns its peer's epoch and another one to the same address one of
  // the two ends; whether that is `peer`'s own.
  bool EndTwin(const PeerKey& peer, const Session& session);
  // With what the peer has offered, or what is left of that.
  void LinkTo(const PeerKey& peer);
  void OnLinked(const PeerKey& peer);
  // What follows on each side: who was dialled says welcome, who has dialled asks.
  void WelcomePeer(const PeerKey& peer, const Session& session);
  void OnConnected(const PeerKey& peer, const Session& session);
  // The link has not come about.
  void OnNotLinked(const PeerKey& peer, const absl::Status& status);
  void RefuseHello(const PeerKey& peer, const std::string& name, const absl::Status& status);
  void BeginOverNetwork(const PeerKey& peer, const absl::Status& status);
  void OnSessionMessage(const PeerKey& peer, Session& session, MessageBody body);
  void RefuseSession(const PeerKey& peer, const absl::Status& status);
  void DropSession(const PeerKey& peer, const absl::Status& status,
                   LogLevel level = LogLevel::kWarn);
  void LeaveToMaker();
  // A peer did that for heartbeat_timeout_ms, as shows from `seen`.
  void TakeForDead(const PeerKey& peer, const char* did, const std::string& seen);
  // As DropSession(), but what was created after `since` and can go on does so, on another session.
  void DropAndMove(const PeerKey& peer, const absl::Status& status, Deadline since,
                   LogLevel level = LogLevel::kWarn);
  void DropAndBeginAgain(const PeerKey& peer, const absl::Status& status);
  void GiveUpAndBeginAgain(const PeerKey& peer, const absl::Status& status);

  const Options options_;
  const pid_t maker_ = getpid();
  const uint64_t epoch_;
  std::string listen_address_;

  kvferry::Metrics metrics_;
  // Shared with handles, which may outlive the node.
  const std::shared_ptr<CommandQueue> commands_ = std::make_shared<CommandQueue>();
  std::atomic<bool> stop_{false};

  // From here on: the progress thread's alone, once it runs. The arenas and the guards outlive
  // the data plane, which may still be sending from it, and the copy threads the receiver.
  std::unique_ptr<Arena> arena_;
  std::shared_ptr<const void> arena_pin_;      // Null where no device has to reach it.
  std::unique_ptr<DeviceArena> device_arena_;  // Null: not on a device, or it has no room for it.
  std::unique_ptr<Guards> guards_;             // Null: no peer reads from afar.
  std::unique_ptr<ControlPlane> control_;
  std::unique_ptr<DataPlanes> data_;
  std::unique_ptr<Sender> sender_;
  std::unique_ptr<ThreadPool> copy_threads_;
  std::unique_ptr<ThreadPool> lane_copies_;  // No threads: a lane copies on its own.
  std::unique_ptr<Receiver> receiver_;
  std::unique_ptr<Calls> calls_;
  Sessions sessions_;
  // Addresses to which hellos are to offer no shared memory, while the process of that epoch is
  // there.
  absl::flat_hash_map<std::string, uint64_t> unmapped_;
  std::vector<std::pair<PeerKey, absl::Status>>
      lost_;  // Found while sending; dropped when it is safe.
  std::vector<std::pair<MessageHeader, std::vector<std::byte>>> heard_;  // Over links.
  // Sessions with so many messages on their way that others wait, or with a link that is not open
  // yet, how much their peers had taken when that was last looked at, and since when no more.
  struct Crowded {
    int64_t taken;
    Deadline since;
  };
  absl::flat_hash_map<PeerKey, Crowded> crowded_;
  LimitedLine strangers_;
  LimitedLine malformed_{LimitedLine::kSome}, refused_{LimitedLine::kSome},
      ended_{LimitedLine::kSome};
  Deadline next_control_{};
  Deadline next_tick_{};
  bool tick_now_ = false;
  bool moved_ = false;  // Bytes, since the thread last looked for more of them.
  FutileWakes futile_wakes_;
  Linger linger_;

  std::thread thread_;
};

}  // namespace kvferry
