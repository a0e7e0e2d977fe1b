#pragma once

// A node and a wire that only remember what they were told, for the sender and the receiver alone.
// Tests then are the network: what was sent can be dropped, doubled, reordered or forged.

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "transport/outbox.h"

namespace kvferry {

struct SentChunk {
  LinkId link;
  ChunkHeader header;
  std::vector<std::byte> payload;
  DataPlane::SendDone done;  // Not called yet unless the fake completes at once.
};

class FakeDataPlane : public DataPlane {
 public:
  const std::string& address() const override { return address_; }
  absl::StatusOr<LinkId> Connect(const std::string&) override { return LinkId{1}; }
  void Close(LinkId) override {}
  void SendChunk(LinkId link, const ChunkHeader& header, std::span<const std::byte> payload,
                 SendDone done) override {
    chunks.push_back({link, header, {payload.begin(), payload.end()}, std::move(done)});
    if (complete_at_once) Complete(chunks.size() - 1, absl::OkStatus());
  }
  void SendCredit(LinkId, const CreditHeader& header) override { credits.push_back(header); }
  bool ReadsPool(LinkId) const override { return reads_pool; }
  bool Progress(DataEvents*) override { return false; }
  int event_fd() const override { return -1; }
  bool Arm() override { return true; }

  void Complete(size_t index, const absl::Status& status) {
    std::exchange(chunks[index].done, nullptr)(status);
  }

  std::vector<SentChunk> chunks;
  std::vector<CreditHeader> credits;
  bool complete_at_once = true;
  bool reads_pool = false;

 private:
  const std::string address_ = "fake";
};

class FakeOutbox : public Outbox {
 public:
  void Send(const PeerKey& peer, MessageBody body) override {
    sent.emplace_back(peer, std::move(body));
  }
  FakeDataPlane& data() override { return data_; }

  // The last message of that type, or null.
  template <typename Body>
  const Body* Last() const {
    for (auto it = sent.rbegin(); it != sent.rend(); ++it) {
      if (const auto* body = std::get_if<Body>(&it->second)) return body;
    }
    return nullptr;
  }
  template <typename Body>
  int Count() const {
    int count = 0;
    for (const auto& [peer, body] : sent) count += std::holds_alternative<Body>(body) ? 1 : 0;
    return count;
  }

  std::vector<std::pair<PeerKey, MessageBody>> sent;

 private:
  FakeDataPlane data_;
};

}  // namespace kvferry
