#include "transport/landing.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/status.h"

namespace kvferry {

Landing::Landing(std::shared_ptr<const StreamPlan> plan, std::shared_ptr<FetchHandle> handle,
                 int64_t prefix, int64_t max_chunk_bytes, bool checksum, Metrics* metrics)
    : plan_(std::move(plan)),
      handle_(std::move(handle)),
      max_chunk_bytes_(max_chunk_bytes),
      checksum_(checksum),
      metrics_(metrics),
      claimed_(prefix),
      arrived_(prefix) {}

absl::Status Landing::CheckBounds(const ChunkHeader& header) const {
  const auto total = static_cast<uint64_t>(plan_->total_bytes());
  if (header.bytes == 0 || header.offset > total || header.bytes > total - header.offset) {
    return absl::DataLossError(absl::StrCat("a chunk covers bytes ", header.offset, " + ",
                                            header.bytes, " of a stream of ", total));
  }
  if (header.bytes > max_chunk_bytes_) {
    return absl::DataLossError(absl::StrCat("a chunk of ", header.bytes, " bytes, where ",
                                            max_chunk_bytes_, " were asked for at most"));
  }
  // A tail lies in no pool, and who took it for part of one on a device would read that on the
  // host.
  if ((header.flags & kChunkInPool) != 0 &&
      header.offset + header.bytes > static_cast<uint64_t>(plan_->pages_bytes())) {
    return absl::DataLossError(absl::StrCat("a chunk in a pool covers bytes ", header.offset, " + ",
                                            header.bytes, " of pages of ", plan_->pages_bytes()));
  }
  if (checksum_ && (header.flags & kChunkHasChecksum) == 0) {
    return absl::DataLossError("a chunk came without the checksum that was asked for");
  }
  return absl::OkStatus();
}

absl::Status Landing::CheckSum(const ChunkHeader& header, uint64_t checksum) const {
  if ((header.flags & kChunkHasChecksum) == 0 || checksum == header.checksum) {
    return absl::OkStatus();
  }
  ++metrics_->checksum_failures;
  return absl::DataLossError(
      absl::StrCat("the checksum of the chunk at byte ", header.offset, " does not match"));
}

absl::Status Landing::Claim(int64_t begin, int64_t end) {
  const MutexLock lock(&mutex_);
  return claimed_.Add(begin, end);
}

absl::Status Landing::Arrived(int64_t begin, int64_t end) {
  const MutexLock lock(&mutex_);
  const int64_t layers_before = plan_->LayersIn(arrived_.prefix());
  KVFERRY_RETURN_IF_ERROR(arrived_.Add(begin, end));
  // Not when the chunk is reported: its fetch may have ended by then.
  metrics_->bytes_received += end - begin;
  const int64_t layers = plan_->LayersIn(arrived_.prefix());
  // Under the lock, so that the number never falls.
  if (layers != layers_before) handle_->SetLayersDone(layers);
  return absl::OkStatus();
}

absl::Status Landing::Accept(const ChunkHeader& header, const Payload& payload,
                             ChunkTaker::Intact intact, PieceCopy* copy) {
  const auto taken_back = [&] {
    return absl::UnavailableError(
        absl::StrCat("the sender gave the transfer up: it took the "
                     "chunk at byte ",
                     header.offset, " back before it was read"));
  };
  const Gate::Pass pass(&gate_);
  if (!pass.open()) return absl::CancelledError("the fetch has ended");
  if (!intact()) return taken_back();
  KVFERRY_RETURN_IF_ERROR(CheckBounds(header));
  const auto* pieces = std::get_if<Pieces>(&payload);
  if (pieces != nullptr && (header.flags & kChunkHasChecksum) != 0) {
    const uint64_t checksum = Xxh3(*pieces);
    // It was read where the sender may change it: only of what stayed does the sum say anything.
    if (!intact()) return taken_back();
    KVFERRY_RETURN_IF_ERROR(CheckSum(header, checksum));
  }
  const auto begin = static_cast<int64_t>(header.offset);
  const int64_t end = begin + header.bytes;
  KVFERRY_RETURN_IF_ERROR(Claim(begin, end));
  KVFERRY_RETURN_IF_ERROR(pieces != nullptr
                              ? copy->Run(*plan_, begin, *pieces)
                              : plan_->ScatterRuns(begin, std::get<PlacedRuns>(payload)));
  if (!intact()) return taken_back();
  return Arrived(begin, end);
}

absl::Status Landing::Begin(const ChunkHeader& header) {
  const Gate::Pass pass(&gate_);
  if (!pass.open()) return absl::CancelledError("the fetch has ended");
  KVFERRY_RETURN_IF_ERROR(CheckBounds(header));
  const auto begin = static_cast<int64_t>(header.offset);
  return Claim(begin, begin + header.bytes);
}

bool Landing::Write(absl::FunctionRef<void()> write) {
  const Gate::Pass pass(&gate_);
  if (pass.open()) write();
  return pass.open();
}

void Landing::AwaitAtClose(std::shared_ptr<const MovesUnderWay> moves) {
  const MutexLock lock(&mutex_);
  std::erase_if(under_way_, [](const auto& before) { return before->done(); });
  under_way_.push_back(std::move(moves));
}

void Landing::Close() {
  gate_.Close();
  std::vector<std::shared_ptr<const MovesUnderWay>> left;
  {
    const MutexLock lock(&mutex_);
    left.swap(under_way_);
  }
  for (const auto& moves : left) {
    const absl::Status status = moves->Wait();
    if (!status.ok()) Log().warn("a fetch that has ended: {}", status.ToString());
  }
}

absl::Status Landing::End(const ChunkHeader& header, uint64_t checksum) {
  const Gate::Pass pass(&gate_);
  if (!pass.open()) return absl::CancelledError("the fetch has ended");
  KVFERRY_RETURN_IF_ERROR(CheckSum(header, checksum));
  const auto begin = static_cast<int64_t>(header.offset);
  return Arrived(begin, begin + header.bytes);
}

int64_t Landing::num_bytes() const {
  const MutexLock lock(&mutex_);
  return arrived_.num_bytes();
}

int64_t Landing::prefix() const {
  const MutexLock lock(&mutex_);
  return arrived_.prefix();
}

std::vector<std::pair<int64_t, int64_t>> Landing::Gaps() const {
  const MutexLock lock(&mutex_);
  return arrived_.Gaps(plan_->total_bytes());
}

}  // namespace kvferry
