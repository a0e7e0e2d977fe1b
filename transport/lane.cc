#include "transport/lane.h"

#include <poll.h>

#include <cerrno>
#include <cstring>
#include <iterator>
#include <span>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "transport/ucx/ucx_data_plane.h"

namespace kvferry {
namespace {

constexpr int kMaxSleepMs = 60000;

}  // namespace

absl::StatusOr<std::unique_ptr<Lane>> Lane::Create(Options options) {
  std::unique_ptr<Lane> lane(new Lane(std::move(options)));
  if (lane->work_.wake().get() < 0) {
    return absl::ResourceExhaustedError(absl::StrCat("lane: eventfd: ", std::strerror(errno)));
  }
  KVFERRY_ASSIGN_OR_RETURN(lane->plane_, MakeUcxDataPlane(lane->options_.config));
  lane->address_ = lane->plane_->address();
  lane->thread_ = std::thread([raw = lane.get()] { raw->Run(); });
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

void Lane::Connect(LinkId link, std::string address) {
  work_.Post([this, link, address = std::move(address)] {
    const absl::StatusOr<LinkId> own = plane_->Connect(address);
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

void Lane::SendChunk(LinkId link, const ChunkHeader& header, ChunkLinks::Fill fill, SendDone done) {
  work_.Post([this, link, header, fill = std::move(fill), done = std::move(done)] {
    Send(link, header, fill, done);
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
  if (!plane_->Arm()) return;
  const bool pause = futile_wakes_.Pause();
  pollfd fds[] = {{pause ? -1 : plane_->event_fd(), POLLIN, 0}, {work_.wake().get(), POLLIN, 0}};
  poll(fds, std::size(fds), pause ? static_cast<int>(FutileWakes::kPause.count()) : kMaxSleepMs);
  if ((fds[0].revents & POLLIN) != 0) futile_wakes_.OnWake();
  if ((fds[1].revents & POLLIN) != 0) work_.wake().Drain();
}

void Lane::Send(LinkId link, ChunkHeader header, const ChunkLinks::Fill& fill,
                const SendDone& done) {
  auto tell = [this, done](const absl::Status& status) {
    options_.commands->Post([done, status] { done(status); });
  };
  const auto found = own_links_.find(link);
  if (found == own_links_.end()) return tell(absl::UnavailableError("ucx: the link is closed"));
  const absl::StatusOr<std::span<const std::byte>> payload = fill(&header);
  if (!payload.ok()) return tell(payload.status());
  plane_->SendChunk(found->second, header, *payload, tell);
}

void Lane::ReportDown(LinkId link, const absl::Status& status) {
  options_.commands->Post([on_down = options_.on_down, link, status] { on_down(link, status); });
}

void Lane::OnChunk(const ChunkHeader& header, Pieces payload, Intact intact) {
  options_.on_chunk(header, payload, intact);
}

void Lane::OnLinkDown(LinkId own_link, const absl::Status& status) {
  for (const auto& [link, own] : own_links_) {
    if (own != own_link) continue;
    ReportDown(link, status);
  }
}

}  // namespace kvferry
