#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "connector/store/key_turns.h"
#include "connector/store/kv_store.h"
#include "connector/store/tier_patience.h"
#include "pool/kv_pool.h"
#include "transport/limited_line.h"

namespace kvferry {

// A fast store over a large one: puts go to both, gets ask the upper one first and bring up what
// only the lower one has. An entry is there while either has it.
//
// A tier that fails is done without: a put fails only when no tier took the value, a get only when
// none has it and one could not say. `errors` counts what failed; an upper tier without room is no
// error. A tier that did not take a value must not answer with the one before: the old one is
// removed there, or, when that fails too, remembered as stale until a put or an erasure gets
// through. At most kMaxStaleKeys are remembered, and not beyond the end of the process; puts fail
// with the tier's error when there are more.
//
// A tier that was waited for in vain for kPatience since it last answered, in one call or in
// several, is UNAVAILABLE without being asked for kSilence: what the other one has is not to be
// late because of it. From then on until it answers a call waits for it for kPatience at most, and
// for twice as long each time that is in vain, up to 7.5 s, after which it is silent for four times
// as long as that call waited, but for kSilence at least and 30 s at most (TierPatience): so one
// that hangs costs its callers one deadline and then a fifth of their time at most. One that
// refuses at once, which costs nothing, is asked each time.
//
// Others may use the tiers themselves, but then not for the same keys. Statistics count calls of
// this store; of entries and bytes only the tiers know.
class TieredStore : public KvStore {
 public:
  static constexpr int64_t kMaxStaleKeys = 1 << 20;
  static constexpr auto kPatience = TierPatience::kPatience;
  static constexpr auto kSilence = TierPatience::kSilence;

  // INVALID_ARGUMENT for a store that is null, or both the same.
  static absl::StatusOr<std::unique_ptr<TieredStore>> Create(std::shared_ptr<KvStore> upper,
                                                             std::shared_ptr<KvStore> lower);

  std::string_view name() const override { return "tiered"; }
  // The larger one; what is too large for a tier is kept in the other alone.
  int64_t max_value_bytes() const override;
  // RESOURCE_EXHAUSTED also for a pinned entry whose new value no tier can keep pinned: it is there
  // then, but may go.
  absl::Status Put(std::string_view key, ConstParts value, Deadline deadline) override;
  absl::Status Get(std::string_view key, Parts out, Deadline deadline) override;
  absl::StatusOr<std::vector<std::byte>> GetBytes(std::string_view key, Deadline deadline) override;
  // These fail only when both tiers do and nothing was found: what one of them has can be got.
  absl::StatusOr<int64_t> Exists(std::span<const std::string_view> keys,
                                 Deadline deadline) override;
  absl::StatusOr<std::vector<bool>> ExistsEach(std::span<const std::string_view> keys,
                                               Deadline deadline) override;
  // Fails when either tier does: what it still has would come back.
  absl::Status Erase(std::string_view key, Deadline deadline) override;
  // Pins in both tiers where they can, counted here. A tier whose pins are not for sure, as those
  // of a RemoteStore, counts as one without: a pin that nobody knows of would stay for ever. What
  // only a lower tier without pins has is brought up for it.
  absl::Status Pin(std::string_view key, Deadline deadline) override;
  // Fails when a tier does that has the pin: the entry stays pinned, and this can be called again.
  absl::Status Unpin(std::string_view key, Deadline deadline) override;
  bool pins_for_sure() const override {
    return upper_.store->pins_for_sure() && lower_.store->pins_for_sure();
  }
  // For the owner of an upper tier who has the values in its memory, where nobody sees them yet:
  // pages of `pool`. The lower tier takes them, and then `show`(i) has the upper one give value i,
  // which it is not asked to unless the lower one took that: below there may be another value,
  // which would come up once this one is evicted. If it fails then, the upper one drops the value
  // before.
  std::vector<absl::Status> PutShown(std::span<const std::string_view> keys, const KvPool& pool,
                                     std::span<const int64_t> pages,
                                     const std::function<absl::Status(size_t)>& show,
                                     Deadline deadline);
  // For who reads the upper tier's values where they lie: that is a hit of this store's too.
  void CountHitAbove();
  const KvStore* upper() const { return upper_.store.get(); }
  // Batches go to the tiers as batches.
  std::vector<absl::Status> GetBatch(std::span<const GetItem> items, Deadline deadline) override;
  Stats stats() const override;

 private:
  // Abseil's sets and maps are broken by a growth for which there is no memory.
  using Keys = std::set<std::string, std::less<>>;
  struct Tier {
    std::shared_ptr<KvStore> store;
    Keys stale{};   // Keys whose value there is an old one.
    Keys pinned{};  // Keys that we have pinned there.
    TierPatience patience{};
  };

  // If a put finds no memory half-way, the lower tier may lack what the upper one has, and would be
  // asked once that is evicted. Unless it is said to be over, what the upper one has is removed
  // there, or else is stale. Needs the keys' turns.
  class PutUnderWay {
   public:
    PutUnderWay(TieredStore* store, std::span<const std::string_view> keys, Deadline deadline);
    ~PutUnderWay();
    PutUnderWay(const PutUnderWay&) = delete;
    PutUnderWay& operator=(const PutUnderWay&) = delete;
    void IsOver() { marks_.clear(); }

   private:
    TieredStore* const store_;
    const Deadline deadline_;
    std::vector<Keys::node_type> marks_;  // That they are stale: it takes no memory then.
  };

  TieredStore(std::shared_ptr<KvStore> upper, std::shared_ptr<KvStore> lower);
  void PutDistinct(std::span<const PutItem> items, std::span<absl::Status> statuses,
                   Deadline deadline) override;

  // All calls to a tier that may wait for it go through these, and wait until the time that they
  // are given. UNAVAILABLE while it is silent.
  template <typename Call>
  auto Ask(Tier& tier, Deadline deadline, const Call& call) -> decltype(call(deadline));
  template <typename Call>
  std::vector<absl::Status> AskBatch(Tier& tier, Deadline deadline, size_t num_items,
                                     const Call& call);
  absl::StatusOr<Deadline> MayAskUntil(const Tier& tier, Deadline deadline) const;
  // What a call to the tier that began then has come to.
  void Heard(Tier& tier, Deadline begin, std::span<const absl::Status> statuses);
  // What a get of this tier gave. An error counts, but a miss is none, and neither is another
  // length than was asked for.
  absl::Status Note(absl::Status fetched);
  absl::StatusOr<std::vector<std::byte>> BytesFrom(Tier& tier, std::string_view key,
                                                   Deadline deadline);
  std::vector<absl::Status> FetchFrom(Tier& tier, std::span<const GetItem> items,
                                      Deadline deadline);
  // Of what the upper tier did not give, for the reasons in `statuses`, when it had been put into
  // so often.
  std::vector<absl::Status> FetchFromLower(std::span<const GetItem> items,
                                           std::vector<absl::Status> statuses, uint64_t puts_above,
                                           Deadline deadline);
  // Between the looks at the two tiers, of which the first was made when the upper one had been put
  // into so often, a put may have moved what neither gave up, if the lower one did not take the
  // value.
  bool MayHaveMovedUp(uint64_t puts_above) const { return puts_above_ != puts_above; }
  // Of what the tiers did not give one after the other. Says so in `lower`; needs the keys' turns.
  void FetchWhatMovedUp(std::span<const GetItem> items, std::span<const absl::Status> upper,
                        std::span<absl::Status> lower, Deadline deadline);
  void CountGets(std::span<const absl::Status> statuses);
  // Of a batch, or of what was found piece by piece, the first is to be dropped last above.
  void UseAbove(std::span<const std::string_view> keys, Deadline deadline);
  // How many of the keys this tier has, from the first on. An error counts.
  absl::StatusOr<int64_t> CountIn(Tier& tier, std::span<const std::string_view> keys,
                                  Deadline deadline);
  // And which of them.
  absl::StatusOr<std::vector<bool>> WhichIn(Tier& tier, std::span<const std::string_view> keys,
                                            Deadline deadline);
  // These need the turn of the key, or of all keys.
  // `cut_off`: is set where the tier found no memory half-way, so that nobody knows what it took.
  std::vector<absl::Status> PutInto(Tier& tier, std::span<const PutItem> items, Deadline deadline,
                                    bool* cut_off);
  // The tier has a new value of the key's.
  void AfterPutInto(Tier& tier, std::string_view key, Deadline deadline);
  absl::Status PutInto(Tier& tier, std::string_view key, ConstParts value, Deadline deadline);
  // Of pinned ones, whose pins are to stay, that the lower tier took.
  void PutInPlaceAbove(std::span<const PutItem> items, std::span<const absl::Status> lower,
                       std::span<absl::Status> upper, Deadline deadline);
  // The keys differ.
  std::vector<absl::Status> PutIntoBoth(std::span<const PutItem> items, Deadline deadline);
  // How a put went, of which the tiers said this.
  absl::Status AfterPut(std::string_view key, const absl::Status& upper, const absl::Status& lower,
                        Deadline deadline);
  absl::Status EraseFrom(Tier& tier, std::string_view key, Deadline deadline);
  // The tier said `put` to the new value.
  absl::Status DropOld(Tier& tier, std::string_view key, const absl::Status& put,
                       Deadline deadline);
  // False when there are too many.
  bool RememberStale(Tier& tier, std::string_view key);
  absl::Status PinIn(Tier& tier, std::string_view key, Deadline deadline);
  absl::Status BringUpAndPin(std::string_view key, Deadline deadline);
  absl::Status UnpinIn(Tier& tier, std::string_view key, Deadline deadline);

  bool IsStale(const Tier& tier, std::string_view key) const;
  bool IsPinned(std::string_view key) const;
  // Whether a tier has pinned the present value.
  bool IsPinnedInATier(std::string_view key) const;
  void CountError(const absl::Status& status);

  KeyTurns turns_;
  mutable Mutex mutex_;  // Of the tiers, but for their stores; never held during a call to one.
  Tier upper_;
  Tier lower_;
  std::map<std::string, int64_t, std::less<>> pins_ ABSL_GUARDED_BY(mutex_);
  std::atomic<uint64_t> puts_above_ = 0;  // Values that the upper tier has taken.
  Stats counts_ ABSL_GUARDED_BY(mutex_);
  LimitedLine failed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvferry
