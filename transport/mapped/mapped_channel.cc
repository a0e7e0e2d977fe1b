#include "transport/mapped/mapped_channel.h"

#include <sys/epoll.h>

#include <cstring>
#include <utility>

namespace kvferry::mapped {
namespace {

// Of memory that a packet takes while it waits, beside its bytes.
constexpr int64_t kPacketOverhead = 64;

int64_t RoomOf(std::span<const std::byte> packet) {
  return static_cast<int64_t>(packet.size()) + kPacketOverhead;
}

int64_t RoomOfMessage(std::span<const std::byte> packet) {
  Head head;
  std::memcpy(&head, packet.data(), sizeof(head));
  return head.kind == kMessage ? RoomOf(packet) : 0;
}

}  // namespace

Channel::Channel(uint64_t id, UniqueFd socket, Epoll* epoll, std::vector<uint64_t>* failed)
    : id_(id), socket_(std::move(socket)), epoll_(epoll), failed_(failed) {}

absl::Status Channel::Watch() const { return epoll_->Add(socket_.get(), EPOLLIN, id_); }

SocketResult Channel::SendNow(std::span<const std::byte> packet) {
  const SocketResult result = SendPacket(socket_, packet);
  if (result == SocketResult::kOk) backlog_.taken += RoomOf(packet);
  if (result == SocketResult::kBroken) broken_ = true;
  return result;
}

void Channel::PushBytes(std::span<const std::byte> packet) {
  if (broken_) return;
  if (!waits()) {
    const SocketResult result = SendNow(packet);
    if (broken_) failed_->push_back(id_);
    if (result != SocketResult::kWouldBlock) return;
  }
  unsent_.emplace_back(packet.begin(), packet.end());
  backlog_.waiting += RoomOfMessage(packet);
  AwaitRoom(true);
}

void Channel::PushCredit(const CreditHeader& credit) {
  // To a peer that takes nothing, and sends chunk after chunk, there would be more and more.
  if (waits()) {
    credits_[credit.transfer_id] = credit.bytes_done;
  } else {
    Push(CreditPacket{.header = credit});
  }
}

// In turn: there may always be some of either.
void Channel::Flush() {
  SocketResult result = SocketResult::kOk;
  while (waits() && result == SocketResult::kOk) {
    if (!credits_.empty()) result = FlushCredit();
    if (unsent_.empty() || result != SocketResult::kOk) continue;
    result = SendNow(unsent_.front());
    if (result != SocketResult::kOk) break;
    backlog_.waiting -= RoomOfMessage(unsent_.front());
    unsent_.pop_front();
  }
  AwaitRoom(waits());
}

SocketResult Channel::FlushCredit() {
  auto credit = credits_.upper_bound(last_credited_);
  if (credit == credits_.end()) credit = credits_.begin();
  const CreditPacket packet{.header = {credit->first, credit->second}};
  const SocketResult result = SendNow(std::as_bytes(std::span(&packet, 1)));
  if (result != SocketResult::kOk) return result;
  last_credited_ = credit->first;
  credits_.erase(credit);
  return result;
}

void Channel::AwaitRoom(bool await) {
  if (std::exchange(awaits_room_, await) == await) return;
  epoll_->Change(socket_.get(), EPOLLIN | (await ? EPOLLOUT : 0U), id_);
}

}  // namespace kvferry::mapped
