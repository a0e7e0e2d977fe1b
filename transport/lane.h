#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/config.h"
#include "base/linger.h"
#include "transport/command_queue.h"
#include "transport/data_plane.h"
#include "transport/futile_wakes.h"

namespace kvferry {

// A further connection over UCX to each peer, with a thread of its own that gathers and sends, or
// receives and scatters, its share of the chunks: what one processor cannot move, several may.
//
// All methods are for the progress thread and return at once. Links are named as the progress
// thread names the session's first one.
class Lane final : private DataEvents {
 public:
  // `on_chunk` is called on the lane's thread. What else happens is posted to `commands`: `done`
  // of sends, and `on_down(link, status)`.
  struct Options {
    Config config;
    std::shared_ptr<CommandQueue> commands;
    TakeChunk on_chunk;
    std::function<void(LinkId, const absl::Status&)> on_down;
  };
  static absl::StatusOr<std::unique_ptr<Lane>> Create(Options options);
  // Waits for the thread, which waits for its links for a bounded time; Stop() several first.
  ~Lane() override;
  void Stop();

  const std::string& address() const { return address_; }
  void Connect(LinkId link, std::string address);
  void Close(LinkId link);
  void SendChunk(LinkId link, const ChunkHeader& header, ChunkLinks::Fill fill, SendDone done);

 private:
  explicit Lane(Options options) : options_(std::move(options)) {}

  // The lane's thread.
  void Run();
  bool Work();
  void Sleep();
  void Send(LinkId link, ChunkHeader header, const ChunkLinks::Fill& fill, const SendDone& done);
  void ReportDown(LinkId link, const absl::Status& status);
  void OnChunk(const ChunkHeader& header, Pieces payload, Intact intact) override;
  // Come over the first lane only.
  void OnChunkElsewhere(const ChunkHeader&, std::span<const std::byte>) override {}
  void OnReadFailed(const ChunkHeader&, const absl::Status&) override {}
  void OnProbed(LinkId) override {}
  void OnCredit(const CreditHeader& /*header*/) override {}
  void OnLinkDown(LinkId own_link, const absl::Status& status) override;

  const Options options_;
  std::string address_;
  CommandQueue work_;
  std::atomic<bool> stop_{false};

  // The lane's thread's alone, once it runs.
  std::unique_ptr<DataPlane> plane_;
  absl::flat_hash_map<LinkId, LinkId> own_links_;  // By the session's.
  FutileWakes futile_wakes_;
  Linger linger_;

  std::thread thread_;
};

}  // namespace kvferry
