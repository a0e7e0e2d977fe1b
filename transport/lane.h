#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/linger.h"
#include "transport/command_queue.h"
#include "transport/data_plane.h"
#include "transport/futile_wakes.h"

namespace kvferry {

// What takes the chunks of a lane, on its thread.
class LaneTaker : public ChunkTaker {
 public:
  // One that contradicts what was asked for, and was not taken.
  virtual void Refuse(const ChunkHeader& header, const absl::Status& status) = 0;
};

// A further connection to each peer, with a thread of its own that gathers and sends, or receives
// and scatters, its share of the chunks: what one processor cannot move, several may.
//
// All methods are for the progress thread and return at once. Links are named as the progress
// thread names the session's first one.
class Lane final : private DataEvents {
 public:
  // `plane` is used by the lane's thread alone from now on, and `taker` is called on it. What else
  // happens is posted to `commands`: `done` of sends, `on_open(link)` once who was dialled has
  // answered, and `on_down(link, status)`.
  struct Options {
    std::unique_ptr<DataPlane> plane;
    std::shared_ptr<CommandQueue> commands;
    std::unique_ptr<LaneTaker> taker;
    std::function<void(LinkId)> on_open;
    std::function<void(LinkId, const absl::Status&)> on_down;
  };
  static absl::StatusOr<std::unique_ptr<Lane>> Create(Options options);
  // Waits for the thread, which waits for its links for a bounded time; Stop() several first.
  ~Lane() override;
  void Stop();

  // `connect` makes the plane's own link, on the lane's thread.
  void Connect(LinkId link, std::function<absl::StatusOr<LinkId>()> connect);
  void Close(LinkId link);
  void SendChunk(LinkId link, const ChunkHeader& header, ChunkSource source, SendDone done);

 private:
  explicit Lane(Options options);

  // The lane's thread.
  void Run();
  bool Work();
  void Sleep();
  void Send(LinkId link, const ChunkHeader& header, const ChunkSource& source,
            const SendDone& done);
  void ReportDown(LinkId link, const absl::Status& status);
  void OnChunk(const ChunkHeader& header, const Payload& payload, Intact intact) override;
  std::unique_ptr<ChunkSink> OnChunkBegins(const ChunkHeader& header) override;
  // These come over the first lane only.
  void OnChunkElsewhere(const ChunkHeader& header, std::span<const std::byte> list) override;
  void OnReadFailed(const ChunkHeader&, const absl::Status&) override {}
  void OnProbed(LinkId) override {}
  void OnCredit(const CreditHeader& /*header*/) override {}
  void OnLinkMessage(const MessageHeader&, std::span<const std::byte>) override {}
  void OnLinkOpen(LinkId own_link) override;
  void OnLinkDown(LinkId own_link, const absl::Status& status) override;

  const std::shared_ptr<CommandQueue> commands_;
  const std::function<void(LinkId)> on_open_;
  const std::function<void(LinkId, const absl::Status&)> on_down_;
  CommandQueue work_;
  std::atomic<bool> stop_{false};

  // The lane's thread's alone, once it runs.
  std::unique_ptr<DataPlane> plane_;
  const std::unique_ptr<LaneTaker> taker_;
  absl::flat_hash_map<LinkId, LinkId> own_links_;  // By the session's.
  FutileWakes futile_wakes_;
  Linger linger_;

  std::thread thread_;
};

}  // namespace kvferry
