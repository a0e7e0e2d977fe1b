#pragma once

// A node and a wire that only remember what they were told, for the sender and the receiver alone.
// Tests then are the network: what was sent can be dropped, doubled, reordered or forged.

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "tests/transport/joined.h"
#include "transport/outbox.h"

namespace kvferry {

struct SentChunk {
  LinkId link;
  ChunkHeader header;
  std::vector<std::byte> payload;
  SendDone done;  // Not called yet unless the fake completes at once.
};

class FakeLinks : public ChunkLinks {
 public:
  void SendChunk(LinkId link, const ChunkHeader& header, ChunkSource source,
                 SendDone done) override {
    later.push_back({link, header, std::move(source), std::move(done)});
    if (fill_at_once) FillLater();
  }
  // As a lane does when its thread comes to it.
  void FillLater() {
    for (Unfilled& chunk : std::exchange(later, {})) {
      const absl::StatusOr<std::vector<std::byte>> payload = Take(chunk);
      if (!payload.ok()) {
        chunk.done(payload.status());
        continue;
      }
      chunks.push_back({chunk.link, chunk.header, *payload, std::move(chunk.done)});
      if (complete_at_once) Complete(chunks.size() - 1, absl::OkStatus());
    }
  }
  void SendCredit(LinkId, const CreditHeader& header) override { credits.push_back(header); }
  ReadsPool PoolReads(LinkId) const override { return reads_pool; }
  ReadCosts CostsOfReads(LinkId) const override { return costs_of_reads; }
  void Read(LinkId link, const ChunkHeader& header, std::span<const std::byte> list) override {
    reads.push_back({link, header, {list.begin(), list.end()}, nullptr});
  }

  void Complete(size_t index, const absl::Status& status) {
    std::exchange(chunks[index].done, nullptr)(status);
  }

  struct Unfilled {
    LinkId link;
    ChunkHeader header;
    ChunkSource source;
    SendDone done;
  };
  static absl::StatusOr<std::vector<std::byte>> Take(Unfilled& chunk) {
    if (const auto* fill = std::get_if<FillChunk>(&chunk.source)) {
      const absl::StatusOr<std::span<const std::byte>> payload = (*fill)(&chunk.header);
      if (!payload.ok()) return payload.status();
      return std::vector<std::byte>(payload->begin(), payload->end());
    }
    std::vector<std::byte> bytes;
    const bool lent = std::get<LendChunk>(chunk.source)(
        0, chunk.header.bytes, [&](Pieces payload) { bytes = Joined(payload); });
    if (!lent) return absl::CancelledError("not lent");
    return bytes;
  }
  bool LendsTo(LinkId) const override { return lends; }
  std::vector<Unfilled> later;
  std::vector<SentChunk> chunks;
  std::vector<CreditHeader> credits;
  bool fill_at_once = true;
  bool complete_at_once = true;
  bool lends = false;
  std::vector<SentChunk> reads;  // Asked for; nobody reads.
  ReadCosts costs_of_reads;
  ReadsPool reads_pool = ReadsPool::kNo;
};

class FakeOutbox : public Outbox {
 public:
  void Send(const PeerKey& peer, MessageBody body) override {
    sent.emplace_back(peer, std::move(body));
  }
  bool HasRoom(const PeerKey&) override {
    ++asked_for_room;
    return static_cast<int>(sent.size()) < room;
  }
  FakeLinks& data() override { return data_; }

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
  int room = 1 << 30;  // For so many messages in all, to whomever.
  int asked_for_room = 0;

 private:
  FakeLinks data_;
};

}  // namespace kvferry
