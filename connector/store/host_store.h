#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "connector/store/kv_store.h"
#include "pool/kv_layout.h"
#include "pool/kv_pool.h"
#include "pool/page_runs.h"

namespace kvferry {

// A store in memory of its own: the pages of a KvPool, mapped once, so that it never takes more
// than its capacity. A value takes whole pages and is the first bytes of the stream (StreamPlan)
// over them, so that a transport can read and fill the pages in place.
//
// What is used least recently goes first. What is pinned, leased or reserved stays; when the rest
// does not make room enough, a put fails and nothing has been dropped for it. A value that replaces
// another needs room beside it, and those of a batch beside all that they replace: the last that
// have none are RESOURCE_EXHAUSTED. Calls cost the same whatever is stored, but for the copies,
// which run outside of the lock. Deadlines are not looked at: nothing waits.
class HostStore : public KvStore {
 public:
  struct Options {
    KvLayout layout;
    int64_t capacity_bytes = 0;   // Rounded down to whole pages, but one at least.
    int64_t max_value_bytes = 0;  // 0: the capacity.
  };
  class ReadLease;
  class Reservation;

  // For values that are just bytes: one buffer of pages of `page_bytes`. INVALID_ARGUMENT unless
  // 1 <= page_bytes <= KvLayout::kMaxHeadDim (1 MiB).
  static absl::StatusOr<KvLayout> FlatLayout(int64_t page_bytes);

  // INVALID_ARGUMENT for a bad layout, capacity_bytes below 1 or beyond what a pool can have, or
  // max_value_bytes below 0 or above the capacity; RESOURCE_EXHAUSTED when the memory cannot be
  // had.
  static absl::StatusOr<std::unique_ptr<HostStore>> Create(const Options& options);

  // The value where it lies. NOT_FOUND for a miss.
  absl::StatusOr<ReadLease> Acquire(std::string_view key);
  // Pages for a value of `bytes`, to be filled and committed. Drops what it must, like Put.
  absl::StatusOr<Reservation> Reserve(int64_t bytes);
  // The same for values of so many bytes each, in order, and side by side where it can be: none of
  // them drops another, so what there is no room for beside those before is RESOURCE_EXHAUSTED.
  std::vector<absl::StatusOr<Reservation>> ReserveEach(std::span<const int64_t> bytes);
  // The value is there for everybody from now on, in place of the one before, with its pins.
  // INVALID_ARGUMENT for a bad key, an empty reservation or one of another store. The reservation
  // is used up either way.
  absl::Status Commit(Reservation reservation, std::string_view key);

  const std::shared_ptr<KvPool>& pool() const;

  std::string_view name() const override { return "host"; }
  int64_t max_value_bytes() const override;
  absl::Status Put(std::string_view key, ConstParts value, Deadline deadline) override;
  absl::Status Get(std::string_view key, Parts out, Deadline deadline) override;
  absl::StatusOr<std::vector<std::byte>> GetBytes(std::string_view key, Deadline deadline) override;
  // These count as use of what is there, the last key first: of a prefix that an engine has itself
  // nothing is ever got, and yet it has to stay for what is behind it.
  absl::StatusOr<int64_t> Exists(std::span<const std::string_view> keys,
                                 Deadline deadline) override;
  absl::StatusOr<std::vector<bool>> ExistsEach(std::span<const std::string_view> keys,
                                               Deadline deadline) override;
  absl::Status Erase(std::string_view key, Deadline deadline) override;
  absl::Status Pin(std::string_view key, Deadline deadline) override;
  absl::Status Unpin(std::string_view key, Deadline deadline) override;
  // `bytes` counts whole pages, those included that are only leased or reserved.
  Stats stats() const override;

 private:
  class State;
  struct Value;
  // Lets go of a value that is leased or reserved.
  struct Release {
    std::shared_ptr<State> state;
    void operator()(Value* value) const;
  };
  using Held = std::unique_ptr<Value, Release>;

  explicit HostStore(std::shared_ptr<State> state) : state_(std::move(state)) {}
  void PutDistinct(std::span<const PutItem> items, std::span<absl::Status> statuses,
                   Deadline deadline) override;

  const std::shared_ptr<State> state_;
};

// Somebody reads a value. Until this is gone its pages keep their bytes and are not reused, also
// when the entry is replaced or erased meanwhile, and when the store is gone. Moved, not copied.
class HostStore::ReadLease {
 public:
  ReadLease(ReadLease&&) = default;
  ReadLease& operator=(ReadLease&&) = default;

  int64_t bytes() const;
  // Of HostStore::pool(); the value is the first bytes() of the stream over them.
  const PageRuns& pages() const;
  // FAILED_PRECONDITION, naming both, unless `out` is as long as the value.
  absl::Status CopyTo(Parts out) const;

 private:
  friend class HostStore;
  explicit ReadLease(Held value) : value_(std::move(value)) {}
  Held value_;
};

// Pages that nobody else sees, for a value to come. Given back unless committed. May outlive the
// store. Moved, not copied.
class HostStore::Reservation {
 public:
  Reservation(Reservation&&) = default;
  Reservation& operator=(Reservation&&) = default;

  int64_t bytes() const;
  const PageRuns& pages() const;
  // FAILED_PRECONDITION, naming both, unless `value` is as long as the reservation.
  absl::Status CopyFrom(ConstParts value);

 private:
  friend class HostStore;
  explicit Reservation(Held value) : value_(std::move(value)) {}
  Held value_;
};

}  // namespace kvferry
