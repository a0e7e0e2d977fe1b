#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/random.h"
#include "connector/endpoint_options.h"
#include "connector/lease_table.h"
#include "connector/store/change_eras.h"
#include "connector/store/key_turns.h"
#include "connector/store/kv_store.h"
#include "transport/node.h"

namespace kvferry {

// A store in another process (StoreServer). Pages of the own pool are moved in place, straight
// from the one pool into the other; values of any other kind are copied once on each side.
//
// A server that is down, was restarted or has given the session up: UNAVAILABLE, or
// DEADLINE_EXCEEDED when it does not even answer; the next call finds it again. Before it says
// UNAVAILABLE a call is made anew, over another session, twice at most and within its deadline: it
// may be carried out more than once. Pin and Unpin, which are counted, are made anew only if the
// server has not heard of them; else the error says that they may have been carried out, as that of
// an Erase whose sessions all ended under it does, and as may whatever ends with DEADLINE_EXCEEDED;
// but not any more once a later Put, Erase, Pin or Unpin of the same key by this store has
// succeeded: that waits until the one before has ended. Pins stay when the client goes.
//
// Pages beyond what the server's memory takes at a time go in several rounds. RESOURCE_EXHAUSTED
// for a page that is got: it may be in a tier below, but others keep what is above occupied.
//
// stats() waits for the server for up to a second; without an answer it is one error and nothing
// else.
class RemoteStore : public KvStore {
 public:
  struct Options {
    EndpointOptions endpoint;  // As at the server: config, model; name for its logs.
    std::string address;       // "tcp://host:port"
    // The pool whose pages are moved in place; of the layout of the server's.
    std::shared_ptr<const KvPool> pool;
    int64_t max_value_bytes = 64 << 20;  // 256 MiB at most: no server moves more as bytes.
  };
  // Does not wait for the server. INVALID_ARGUMENT for options that cannot work, PERMISSION_DENIED
  // for a host that allowed_hosts does not admit; errors of Node::Start().
  static absl::StatusOr<std::unique_ptr<RemoteStore>> Create(Options options);

  std::string_view name() const override { return "remote"; }
  int64_t max_value_bytes() const override { return options_.max_value_bytes; }
  absl::Status Put(std::string_view key, ConstParts value, Deadline deadline) override;
  absl::Status Get(std::string_view key, Parts out, Deadline deadline) override;
  absl::StatusOr<std::vector<std::byte>> GetBytes(std::string_view key, Deadline deadline) override;
  absl::StatusOr<int64_t> Exists(std::span<const std::string_view> keys,
                                 Deadline deadline) override;
  absl::StatusOr<std::vector<bool>> ExistsEach(std::span<const std::string_view> keys,
                                               Deadline deadline) override;
  absl::Status Erase(std::string_view key, Deadline deadline) override;
  absl::Status Pin(std::string_view key, Deadline deadline) override;
  absl::Status Unpin(std::string_view key, Deadline deadline) override;
  bool pins_for_sure() const override { return false; }
  Stats stats() const override;
  std::vector<std::pair<std::string, int64_t>> Metrics() const { return node_->Metrics(); }

 protected:
  std::vector<absl::Status> DoPutPages(std::span<const std::string_view> keys, const KvPool& pool,
                                       std::span<const int64_t> pages, Deadline deadline) override;
  std::vector<absl::Status> DoGetPages(std::span<const std::string_view> keys, const KvPool& pool,
                                       std::span<const int64_t> pages, Deadline deadline) override;

 private:
  explicit RemoteStore(Options options)
      : options_(std::move(options)), leases_(options_.endpoint.config) {}

  // One attempt. UNAVAILABLE with a CutOff: the session has ended.
  absl::StatusOr<Fields> Ask(const std::string& function, const Fields& args,
                             Deadline deadline) const;
  // One attempt of a call that changes these keys, once all others of them have ended, as one may
  // overtake another on the way. No attempt to change them before this one is carried out after it,
  // whatever session it was made over. ABORTED with CutOff::kNotAsked where one of a later era has
  // come before it.
  absl::StatusOr<Fields> AskToChange(const std::string& function,
                                     std::span<const std::string_view> keys, const Fields& args,
                                     Deadline deadline);
  // Of as many keys as one call takes. Made anew when the session ends under it.
  absl::StatusOr<Fields> AskAbout(const std::string& function,
                                  std::span<const std::string_view> keys, Deadline deadline) const;
  // Made anew after errors for which `may_try_again` holds.
  absl::Status ChangeOne(const std::string& function, std::string_view key,
                         bool (*may_try_again)(const absl::Status&), Deadline deadline);
  // A value on its way: what the server has leased.
  struct Offer {
    Ticket ticket;
    int64_t bytes = 0;
  };
  absl::StatusOr<Offer> AskForValue(std::string_view key, Deadline deadline);
  // What a call said of each of its keys. `again`: those without room found none beside the others,
  // and may be asked for when these are done.
  struct Round {
    std::vector<absl::Status> statuses;
    bool again = false;
  };
  static absl::StatusOr<Round> ReadRound(const Fields& reply, size_t num_keys);
  // Fetches to its end, whatever that is: nothing is written afterwards. UNAVAILABLE with a CutOff:
  // it may be asked for anew.
  absl::Status Fetch(const Ticket& ticket, const std::vector<int64_t>& pages, StreamTail tail,
                     Deadline deadline);
  void Decline(const Ticket& ticket);
  // Takes a lease back: nothing of it is read afterwards. Without memory for that the process ends,
  // as the pages' owner would write into what is read.
  void Withdraw(uint64_t lease_id);
  // The rest are one attempt each.
  absl::Status GetOnce(std::string_view key, Parts out, Deadline deadline);
  absl::StatusOr<std::vector<std::byte>> GetBytesOnce(std::string_view key, Deadline deadline);
  absl::Status PutOnce(std::string_view key, const Fields& args,
                       std::shared_ptr<const std::vector<std::byte>> value, Deadline deadline);
  absl::StatusOr<Round> PutSomePages(std::span<const std::string_view> keys,
                                     std::span<const int64_t> pages, Deadline deadline);
  absl::StatusOr<Round> GetSomePages(std::span<const std::string_view> keys,
                                     std::span<const int64_t> pages, Deadline deadline);

  const Options options_;
  LeaseTable leases_;
  const uint64_t id_ = RandomId();
  KeyTurns turns_;  // Of changes.
  ChangeEras eras_;
  std::unique_ptr<Node> node_;  // Last: its thread uses leases_.
};

}  // namespace kvferry
