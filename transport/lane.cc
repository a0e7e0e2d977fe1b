#include "transport/lane.h"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/thread.h"

namespace kvferry {
namespace {

constexpr int64_t kMaxSleepMs = 60000;

}  // namespace

Lane::Lane(Options options)
    : commands_(std::move(options.commands)),
      on_open_(std::move(options.on_open)),
      on_down_(std::move(options.on_down)),
      plane_(std::move(options.plane)),
      taker_(std::move(options.taker)) {}

absl::StatusOr<std::unique_ptr<Lane>> Lane::Create(Options options) {
  std::unique_ptr<Lane> lane(new Lane(std::move(options)));
  if (const int error = lane->work_.wake().error(); error != 0) {
    return absl::ResourceExhaustedError(absl::StrCat("lane: eventfd: ", std::strerror(error)));
  }
  KVFERRY_ASSIGN_OR_RETURN(lane->thread_, StartThread("lane", [raw = lane.get()] { raw->Run(); }));
  return lane;
}

Lane::~Lane() {
  Stop();
  if (thread_.joinable()) thread_.join();
}

void Lane::Stop() {
  stop_ = true;
  work_.wake().Wake();
}

void Lane::Connect(LinkId link, std::function<absl::StatusOr<LinkId>()> connect) {
  work_.Post([this, link, connect = std::move(connect)] {
    const absl::StatusOr<LinkId> own = connect();
    if (own.ok()) {
      own_links_.emplace(link, *own);
    } else {
      ReportDown(link, own.status());
    }
  });
}

void Lane::Close(LinkId link) {
  work_.Post([this, link] {
    const auto found = own_links_.find(link);
    if (found == own_links_.end()) return;
    plane_->Close(found->second);
    own_links_.erase(found);
  });
}

void Lane::SendChunk(LinkId link, const ChunkHeader& header, ChunkSource source, SendDone done) {
  work_.Post([this, link, header, source = std::move(source), done = std::move(done)] {
    Send(link, header, source, done);
  });
}

// ---------------------------------------------------------------- the lane's thread

void Lane::Run() {
  bool moved = false;
  while (!stop_) {
    if (Work() || (std::exchange(moved, false) && linger_.Await([this] { return Work(); }))) {
      moved = true;
      futile_wakes_.OnBusy();
    } else {
      Sleep();
    }
  }
  plane_.reset();
}

bool Lane::Work() {
  const bool worked = work_.Run();
  return plane_->Progress(this) || worked;
}

void Lane::Sleep() {
  const Deadline now = Clock::now();
  const Deadline next = plane_->Tick(now);
  if (!plane_->Arm()) return;
  const bool pause = futile_wakes_.Pause();
  const int64_t most_ms = pause ? FutileWakes::kPause.count() : kMaxSleepMs;
  pollfd fds[] = {{pause ? -1 : plane_->event_fd(), POLLIN, 0}, {work_.wake().get(), POLLIN, 0}};
  poll(fds, std::size(fds), static_cast<int>(std::min(most_ms, MsUntil(next, now))));
  if ((fds[0].revents & POLLIN) != 0) futile_wakes_.OnWake();
  if ((fds[1].revents & POLLIN) != 0) work_.wake().Drain();
}

void Lane::Send(LinkId link, const ChunkHeader& header, const ChunkSource& source,
                const SendDone& done) {
  auto tell = [this, done](const absl::Status& status) {
    commands_->Post([done, status] { done(status); });
  };
  const auto found = own_links_.find(link);
  if (found == own_links_.end()) return tell(absl::UnavailableError("the link is closed"));
  plane_->SendChunk(found->second, header, source, tell);
}

void Lane::ReportDown(LinkId link, const absl::Status& status) {
  commands_->Post([on_down = on_down_, link, status] { on_down(link, status); });
}

void Lane::OnChunk(const ChunkHeader& header, const Payload& payload, Intact intact) {
  taker_->OnChunk(header, payload, intact);
}

void Lane::OnChunkElsewhere(const ChunkHeader& header, std::span<const std::byte> /*list*/) {
  taker_->Refuse(header, absl::DataLossError(
                             "a list of where a chunk lies, which belongs on the first lane, came "
                             "over another one"));
}

std::unique_ptr<ChunkSink> Lane::OnChunkBegins(const ChunkHeader& header) {
  return taker_->OnChunkBegins(header);
}

void Lane::OnLinkOpen(LinkId own_link) {
  for (const auto& [link, own] : own_links_) {
    if (own != own_link) continue;
    commands_->Post([on_open = on_open_, link = link] { on_open(link); });
  }
}

void Lane::OnLinkDown(LinkId own_link, const absl::Status& status) {
  for (const auto& [link, own] : own_links_) {
    if (own != own_link) continue;
    ReportDown(link, status);
  }
}

}  // namespace kvferry
