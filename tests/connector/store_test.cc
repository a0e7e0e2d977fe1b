#include "connector/store/host_store.h"
#include "connector/store/tiered_store.h"
#include "tests/connector/fake_store.h"
#include "tests/connector/store_conformance.h"
#include "tests/pool/guarded_memory.h"
#include "tests/support/kv_pattern.h"

namespace kvferry {
namespace {

// Also what the suite itself is tried with.
StoreBackend Fake() {
  StoreBackend backend;
  backend.name = "Fake";
  backend.make = [](const StoreBackend::Size& size) {
    return std::make_shared<FakeStore>(size.max_value_bytes);
  };
  backend.pins = false;
  backend.random_operations = 100000;
  return backend;
}

StoreBackend Host(const std::string& name, const KvLayout& layout, int64_t random_operations) {
  StoreBackend backend;
  backend.name = name;
  backend.make = [layout](const StoreBackend::Size& size) -> std::shared_ptr<KvStore> {
    return Must(HostStore::Create({layout, size.capacity_bytes, size.max_value_bytes}));
  };
  backend.evicts = true;
  backend.random_operations = random_operations;
  return backend;
}

std::shared_ptr<KvStore> Tiered(std::shared_ptr<KvStore> upper, std::shared_ptr<KvStore> lower) {
  return Must(TieredStore::Create(std::move(upper), std::move(lower)));
}

// Both tiers drop entries.
StoreBackend TieredHosts() {
  StoreBackend backend = Host("", Must(HostStore::FlatLayout(4096)), 100000);
  backend.name = "TieredHosts";
  backend.make = [make = backend.make](const StoreBackend::Size& size) {
    return Tiered(make(size), make(size));
  };
  return backend;
}

// The upper tier is small, and the only one with pins; nothing is dropped for good.
StoreBackend TieredOverFake() {
  StoreBackend backend = Fake();
  backend.name = "TieredOverFake";
  backend.make = [make = backend.make](const StoreBackend::Size& size) {
    return Tiered(Must(HostStore::Create({Must(HostStore::FlatLayout(512)), 32 << 10, 0})),
                  make(size));
  };
  backend.pins = true;
  return backend;
}

INSTANTIATE_TEST_SUITE_P(
    Stores, StoreConformance,
    testing::Values(Fake(), Host("Host", Must(HostStore::FlatLayout(4096)), 1000000),
                    Host("HostTinyPages", Must(HostStore::FlatLayout(97)), 100000),
                    Host("HostMha", KvLayout::Mha(3, 4, 2, 8, DType::kBFloat16), 100000),
                    TieredHosts(), TieredOverFake()),
    BackendName());

// Hangs once it has given a value.
class OneGetStore : public FakeStore {
 public:
  using FakeStore::FakeStore;
  absl::StatusOr<std::vector<std::byte>> GetBytes(std::string_view key,
                                                  Deadline deadline) override {
    absl::StatusOr<std::vector<std::byte>> value = FakeStore::GetBytes(key, deadline);
    hangs = true;
    return value;
  }
};

// What comes first is of use without the others.
TEST(StoreBatches, ADeadlineCutsOffTheLastOfWhatIsGot) {
  OneGetStore store(100);
  const std::byte value[10] = {};
  const std::span<const std::byte> in = value;
  const std::vector<std::string_view> keys = {"a", "b", "c"};
  for (const std::string_view key : keys) ASSERT_TRUE(IsOk(store.Put(key, {&in, 1}, Soon())));
  std::byte outs[3][10];
  std::vector<std::span<std::byte>> parts(std::begin(outs), std::end(outs));
  std::vector<KvStore::GetItem> items;
  for (size_t i = 0; i < keys.size(); ++i) items.push_back({keys[i], {&parts[i], 1}});
  const Deadline deadline = DeadlineInMs(100);
  const std::vector<absl::Status> statuses = store.GetBatch(items, deadline);
  EXPECT_TRUE(IsOk(statuses[0]));
  EXPECT_TRUE(Fails(statuses[1], absl::StatusCode::kDeadlineExceeded));
  EXPECT_TRUE(Fails(statuses[2], absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(store.num_calls, 3 + 2);  // Nor asked for the last, nor for anything else.
}

// Pages of a device are put and got some at a time, and are one batch all the same.
TEST(StoreOfDevicePages, OfManyTheFirstIsDroppedLast) {
  const KvLayout layout = KvLayout::Mha(2, 64, 32, 64, DType::kBFloat16);  // 1 MiB a page.
  constexpr int64_t kPages = 40;                                           // Three pieces.
  const auto pool = Must(KvPool::CreateIn(layout, kPages, std::make_shared<GuardedMemory>()));
  FillPattern(*pool, 1);
  std::vector<std::string> names;
  std::vector<int64_t> pages;
  for (int64_t i = 0; i < kPages; ++i) {
    names.push_back(absl::StrCat("key", i));
    pages.push_back(i);
  }
  const std::vector<std::string_view> keys(names.begin(), names.end());
  for (const bool gets : {false, true}) {
    SCOPED_TRACE(gets);
    const auto store = Must(HostStore::Create({layout, kPages << 20, 0}));
    for (const absl::Status& status : store->PutPages(keys, *pool, pages, Soon())) {
      ASSERT_TRUE(IsOk(status));
    }
    if (gets) {
      for (const absl::Status& status : store->GetPages(keys, *pool, pages, Soon())) {
        ASSERT_TRUE(IsOk(status));
      }
    }
    { const HostStore::Reservation others = Must(store->Reserve((kPages - 5) << 20)); }
    EXPECT_EQ(Must(store->Exists(keys, Soon())), 5);
  }
}

TEST(StoreOfPages, PagesThatAreNotInThePoolAreRefused) {
  const auto pool = MakePatternPool(KvLayout::Mha(2, 4, 2, 8, DType::kBFloat16), 4, 1);
  FakeStore store(1 << 20);
  const std::vector<std::string_view> keys = {"a", "b"};
  for (const std::vector<int64_t>& pages :
       {std::vector<int64_t>{0, -1}, std::vector<int64_t>{4, 0}}) {
    for (const bool gets : {false, true}) {
      for (const absl::Status& status : gets ? store.GetPages(keys, *pool, pages, Soon())
                                             : store.PutPages(keys, *pool, pages, Soon())) {
        EXPECT_TRUE(Fails(status, absl::StatusCode::kOutOfRange, "of a pool of 4"));
      }
    }
  }
  EXPECT_EQ(store.num_calls, 0);
}

TEST(StoreOfDevicePages, OfTwoUnderOneKeyTheLaterStays) {
  const KvLayout layout = KvLayout::Mha(2, 64, 32, 64, DType::kBFloat16);  // 1 MiB a page.
  constexpr int64_t kPages = 20;                                           // Two pieces.
  const auto source = Must(KvPool::CreateIn(layout, kPages, std::make_shared<GuardedMemory>()));
  FillPattern(*source, 1);
  std::vector<int64_t> pages;
  for (int64_t i = 0; i < kPages; ++i) pages.push_back(i);
  const std::vector<std::string_view> keys(kPages, "key");
  const auto store = Must(HostStore::Create({layout, kPages << 20, 0}));
  for (const absl::Status& status : store->PutPages(keys, *source, pages, Soon())) {
    ASSERT_TRUE(IsOk(status));
  }
  const auto on_host = MakePatternPool(layout, 1, 3);
  const std::vector<int64_t> first = {0};
  ASSERT_TRUE(IsOk(store->GetPages({{keys[0]}}, *on_host, first, Soon())[0]));
  EXPECT_TRUE(HoldsPages(*on_host, first, 1, std::vector<int64_t>{kPages - 1}, 0, 2));
}

// Pinned once, not for each piece or call; on one that cannot be pinned, without.
class CountedPins : public GuardedMemory {
 public:
  explicit CountedPins(int device) : device_(device) {}
  std::optional<int> cuda_device() const override { return device_; }
  absl::StatusOr<std::shared_ptr<const void>> Pin(
      std::span<const std::span<std::byte>> pieces) const override {
    ++pins;
    return GuardedMemory::Pin(pieces);
  }
  mutable int pins = 0;

 private:
  const int device_;
};

TEST(StoreOfDevicePages, PassThroughMemoryThatIsPinnedOnce) {
  const KvLayout layout = KvLayout::Mha(2, 64, 32, 64, DType::kBFloat16);  // 1 MiB a page.
  const auto store = Must(HostStore::Create({layout, 64 << 20, 0}));
  for (const bool refused : {false, true}) {
    SCOPED_TRACE(refused);
    const auto memory = std::make_shared<CountedPins>(refused ? 101 : 100);
    if (refused) memory->pin_failure = absl::UnavailableError("no");
    const auto pool = Must(KvPool::CreateIn(layout, 40, memory));
    FillPattern(*pool, 1);
    std::vector<std::string> names;
    std::vector<int64_t> pages;
    for (int64_t i = 0; i < 40; ++i) {
      names.push_back(absl::StrCat("key", i));
      pages.push_back(i);
    }
    const std::vector<std::string_view> keys(names.begin(), names.end());
    for (int round = 0; round < 2; ++round) {
      for (const auto& put : store->PutPages(keys, *pool, pages, Soon())) EXPECT_TRUE(IsOk(put));
      FillPattern(*pool, 2);
      for (const auto& got : store->GetPages(keys, *pool, pages, Soon())) EXPECT_TRUE(IsOk(got));
      EXPECT_TRUE(HoldsPages(*pool, pages, 1, pages, 0, 2));
    }
    EXPECT_EQ(memory->pins, 1);
  }
}

TEST(StoreOfDevicePages, APageThatIsLongerThanAPieceIsNotKept) {
  const KvLayout layout = KvLayout::Mha(2, 1024, 64, 128, DType::kBFloat16);  // 64 MiB a page.
  const auto memory = std::make_shared<CountedPins>(102);
  const auto pool = Must(KvPool::CreateIn(layout, 2, memory));
  FillPattern(*pool, 1);
  const auto store = Must(HostStore::Create({layout, 128 << 20, 0}));
  const std::vector<std::string_view> keys = {"one", "two"};
  const std::vector<int64_t> pages = {0, 1}, swapped = {1, 0};
  for (const auto& put : store->PutPages(keys, *pool, pages, Soon())) EXPECT_TRUE(IsOk(put));
  for (const auto& got : store->GetPages(keys, *pool, swapped, Soon())) EXPECT_TRUE(IsOk(got));
  EXPECT_TRUE(HoldsPages(*pool, swapped, 1, pages, 0, 2));
  EXPECT_EQ(memory->pins, 4);
}

// More pages than are staged at a time, between pools that the processor cannot touch.
TEST(StoreOfDevicePages, GoThroughTheHost) {
  const KvLayout layout = KvLayout::Mha(2, 64, 32, 64, DType::kBFloat16);  // 1 MiB a page.
  constexpr int64_t kPages = 20;
  const auto memory = std::make_shared<GuardedMemory>();
  const auto source = Must(KvPool::CreateIn(layout, kPages, memory));
  const auto target = Must(KvPool::CreateIn(layout, kPages, memory));
  FillPattern(*source, 1);
  FillPattern(*target, 2);
  const auto store = Must(HostStore::Create({Must(HostStore::FlatLayout(4096)), 64 << 20, 0}));
  std::vector<std::string> names;
  std::vector<int64_t> from, to;
  for (int64_t i = 0; i < kPages; ++i) {
    names.push_back(absl::StrCat("key", i));
    from.push_back((i * 7) % kPages);
    to.push_back((i * 3) % kPages);
  }
  const std::vector<std::string_view> keys(names.begin(), names.end());
  memory->failure = absl::UnavailableError("fell off the bus");
  for (const absl::Status& status : store->PutPages(keys, *source, from, Soon())) {
    EXPECT_TRUE(Fails(status, absl::StatusCode::kUnavailable, "fell off the bus"));
  }
  EXPECT_EQ(store->stats().entries, 0);
  memory->failure = absl::OkStatus();
  for (const absl::Status& status : store->PutPages(keys, *source, from, Soon())) {
    EXPECT_TRUE(IsOk(status));
  }
  // What it makes of a page is what it makes of one on the host.
  const auto on_host = MakePatternPool(layout, 1, 3);
  const std::vector<int64_t> first = {0};
  ASSERT_TRUE(IsOk(store->GetPages({{keys[3]}}, *on_host, first, Soon())[0]));
  EXPECT_TRUE(HoldsPages(*on_host, first, 1, std::span(from).subspan(3, 1), 0, 2));

  ASSERT_TRUE(IsOk(store->Erase(keys[18], Soon())));
  const std::vector<absl::Status> got = store->GetPages(keys, *target, to, Soon());
  for (int64_t i = 0; i < kPages; ++i) {
    EXPECT_EQ(got[i].code(), i == 18 ? absl::StatusCode::kNotFound : absl::StatusCode::kOk) << i;
  }
  from.erase(from.begin() + 18);
  to.erase(to.begin() + 18);
  EXPECT_TRUE(HoldsExactly(*target, 2, to, 1, from));
}

// Each would be late at once, and a thousand of them by a second.
TEST(StoreBatches, EndWithTheOneThatTookAllTheirTime) {
  FakeStore fake(1000);
  fake.hangs = true;
  const Bytes value(10);
  const std::span<const std::byte> part = value;
  Bytes out(10);
  const std::span<std::byte> room = out;
  std::vector<KvStore::PutItem> puts;
  std::vector<KvStore::GetItem> gets;
  for (const char* key : {"a", "b", "c"}) {
    puts.push_back({key, {&part, 1}});
    gets.push_back({key, {&room, 1}});
  }
  for (const absl::Status& status : fake.PutBatch(puts, DeadlineInMs(20))) {
    EXPECT_TRUE(Fails(status, absl::StatusCode::kDeadlineExceeded, "hangs"));
  }
  EXPECT_EQ(fake.num_calls, 1);
  for (const absl::Status& status : fake.GetBatch(gets, DeadlineInMs(20))) {
    EXPECT_TRUE(Fails(status, absl::StatusCode::kDeadlineExceeded, "hangs"));
  }
  EXPECT_EQ(fake.num_calls, 2);
}

}  // namespace
}  // namespace kvferry
