// Values of 2 MiB put into our stores and got back, each store beside what lies under it, used
// directly: memcpy, hiredis with the same server, RocksDB; and values of 4 KiB in batches, beside
// the same store called value by value. The two take turns; the tables have medians of the rounds,
// and every value got back is compared with what was put.

#include <stdlib.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/slab.h"
#include "bench/must.h"
#include "bench/peers/plain_store.h"
#include "connector/store/host_store.h"
#include "connector/store/tiered_store.h"
#ifdef KVFERRY_BENCH_REDIS
#include "connector/store/redis_store.h"
#include "tests/support/redis_process.h"
#endif
#ifdef KVFERRY_BENCH_ROCKSDB
#include "connector/store/rocksdb_store.h"
#endif

namespace kvferry::bench {
namespace {

constexpr int64_t kValueBytes = 2 << 20;
constexpr int64_t kValues = 64;
constexpr int64_t kTimeoutMs = 10000;

// Our store as one of the two.
class Ours : public PlainStore {
 public:
  explicit Ours(std::unique_ptr<KvStore> store) : store_(std::move(store)) {}
  absl::Status Put(const std::string& key, std::span<const std::byte> value) override {
    return store_->Put(key, {&value, 1}, DeadlineInMs(kTimeoutMs));
  }
  absl::Status Get(const std::string& key, std::span<std::byte> out) override {
    return store_->Get(key, {&out, 1}, DeadlineInMs(kTimeoutMs));
  }

 private:
  const std::unique_ptr<KvStore> store_;
};

// memcpy to a place that the key names, and back.
class Copies : public PlainStore {
 public:
  absl::Status Put(const std::string& key, std::span<const std::byte> value) override {
    std::memcpy(PlaceOf(key), value.data(), value.size());
    return absl::OkStatus();
  }
  absl::Status Get(const std::string& key, std::span<std::byte> out) override {
    std::memcpy(out.data(), PlaceOf(key), out.size());
    return absl::OkStatus();
  }

 private:
  std::byte* PlaceOf(const std::string& key) {
    return memory_.get() + std::stoll(key) * kValueBytes;
  }
  const std::shared_ptr<std::byte> memory_ = Must(MapSlab(kValues * kValueBytes));
};

// What is put, and where it is got to. Each round puts other values under the same keys.
class Values {
 public:
  Values() : source_(kValues * kValueBytes), target_(source_.size()) {
    std::mt19937_64 random(2);
    for (size_t i = 0; i < source_.size(); i += 8) {
      const uint64_t word = random();
      std::memcpy(&source_[i], &word, 8);
    }
  }
  // Seconds.
  double Put(PlainStore& store, int round) const {
    const Deadline begin = Clock::now();
    for (int64_t i = 0; i < kValues; ++i) Must(store.Put(absl::StrCat(i), Value(i, round)));
    return SecondsBetween(begin, Clock::now());
  }
  double Get(PlainStore& store, int round) {
    std::memset(target_.data(), 0, target_.size());
    const Deadline begin = Clock::now();
    for (int64_t i = 0; i < kValues; ++i) {
      const auto out = std::span(target_).subspan(i * kValueBytes, kValueBytes);
      Must(store.Get(absl::StrCat(i), out));
    }
    const double seconds = SecondsBetween(begin, Clock::now());
    for (int64_t i = 0; i < kValues; ++i) {
      wrong_ += std::memcmp(&target_[i * kValueBytes], Value(i, round).data(), kValueBytes) != 0;
    }
    return seconds;
  }
  int64_t wrong() const { return wrong_; }

 private:
  std::span<const std::byte> Value(int64_t i, int round) const {
    return std::span(source_).subspan((i + round) % kValues * kValueBytes, kValueBytes);
  }
  std::vector<std::byte> source_;
  std::vector<std::byte> target_;
  int64_t wrong_ = 0;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// GB/s of the median, the slowest and the fastest round.
struct Rates {
  Rates(const std::vector<double>& seconds, int64_t bytes) {
    const double gb = static_cast<double>(bytes) * 1e-9;
    median = gb / Median(seconds);
    min = gb / *std::ranges::max_element(seconds);
    max = gb / *std::ranges::min_element(seconds);
  }
  double median, min, max;
};

// The last column: how many times as fast ours is, the median of the rounds, because the machine is
// not as busy in one round as in another.
void PrintRow(const std::string& what, const std::string& beside,
              const std::array<std::vector<double>, 2>& seconds,
              int64_t bytes = kValues * kValueBytes) {
  const Rates ours(seconds[0], bytes);
  const Rates theirs(seconds[1], bytes);
  std::vector<double> ratios(seconds[0].size());
  std::ranges::transform(seconds[1], seconds[0], ratios.begin(), std::divides<>());
  std::printf("| %s | %.2f | %.2f-%.2f | %s | %.2f | %.2f-%.2f | %.2f |\n", what.c_str(),
              ours.median, ours.min, ours.max, beside.c_str(), theirs.median, theirs.min,
              theirs.max, Median(ratios));
  std::fflush(stdout);
}

void Compare(const std::string& name, std::unique_ptr<PlainStore> ours, const std::string& beside,
             std::unique_ptr<PlainStore> theirs, int rounds, Values& values) {
  const std::array<PlainStore*, 2> stores = {ours.get(), theirs.get()};
  std::array<std::vector<double>, 2> puts;
  std::array<std::vector<double>, 2> gets;
  for (int round = 0; round <= rounds; ++round) {
    for (size_t turn = 0; turn < stores.size(); ++turn) {
      const size_t which = (turn + round) % stores.size();  // Each goes first every other time.
      const double put = values.Put(*stores[which], round);
      const double get = values.Get(*stores[which], round);
      if (round == 0) continue;  // It warms up.
      puts[which].push_back(put);
      gets[which].push_back(get);
    }
  }
  PrintRow(absl::StrCat(name, ", put"), beside, puts);
  PrintRow(absl::StrCat(name, ", get"), beside, gets);
}

// Small values in one batch, or each in a call of its own.
class SmallValues {
 public:
  static constexpr int64_t kBytes = 4 << 10;
  static constexpr int64_t kCount = 256;

  SmallValues() : source_(kCount * kBytes), target_(source_.size()) {
    for (size_t i = 0; i < source_.size(); ++i) source_[i] = static_cast<std::byte>(i * 31 >> 8);
    for (int64_t i = 0; i < kCount; ++i) {
      keys_.push_back(absl::StrCat("small ", i));
      values_.push_back(std::span(source_).subspan(i * kBytes, kBytes));
      outs_.push_back(std::span(target_).subspan(i * kBytes, kBytes));
    }
    for (int64_t i = 0; i < kCount; ++i) {
      puts_.push_back({keys_[i], {&values_[i], 1}});
      gets_.push_back({keys_[i], {&outs_[i], 1}});
    }
  }
  // Seconds.
  double Put(KvStore& store, bool together) {
    for (int64_t i = 0; i < kCount; ++i) source_[i * kBytes] = static_cast<std::byte>(++changes_);
    const Deadline begin = Clock::now();
    const int64_t step = together ? kCount : 1;
    for (int64_t i = 0; i < kCount; i += step) {
      Check(store.PutBatch(std::span(puts_).subspan(i, step), DeadlineInMs(kTimeoutMs)));
    }
    return SecondsBetween(begin, Clock::now());
  }
  double Get(KvStore& store, bool together) {
    std::memset(target_.data(), 0, target_.size());
    const Deadline begin = Clock::now();
    const int64_t step = together ? kCount : 1;
    for (int64_t i = 0; i < kCount; i += step) {
      Check(store.GetBatch(std::span(gets_).subspan(i, step), DeadlineInMs(kTimeoutMs)));
    }
    const double seconds = SecondsBetween(begin, Clock::now());
    wrong_ += target_ == source_ ? 0 : 1;
    return seconds;
  }
  int64_t wrong() const { return wrong_; }

 private:
  static void Check(const std::vector<absl::Status>& statuses) {
    for (const absl::Status& status : statuses) Must(status);
  }
  std::vector<std::byte> source_;
  std::vector<std::byte> target_;
  std::vector<std::string> keys_;
  std::vector<std::span<const std::byte>> values_;
  std::vector<std::span<std::byte>> outs_;
  std::vector<KvStore::PutItem> puts_;
  std::vector<KvStore::GetItem> gets_;
  int64_t changes_ = 0;
  int64_t wrong_ = 0;
};

// `forget` makes the store answer from below. Returns how many rounds gave wrong bytes.
int64_t CompareBatches(
    const std::string& name, KvStore& store, int rounds,
    const std::function<void()>& forget = [] {}) {
  SmallValues values;
  std::array<std::vector<double>, 2> puts;
  std::array<std::vector<double>, 2> gets;
  for (int round = 0; round <= 10 * rounds; ++round) {
    for (const size_t turn : {0, 1}) {
      const size_t which = (turn + round) % 2;
      const double put = values.Put(store, which == 0);
      forget();
      const double get = values.Get(store, which == 0);
      if (round == 0) continue;  // It warms up.
      puts[which].push_back(put);
      gets[which].push_back(get);
    }
  }
  constexpr int64_t kBytes = SmallValues::kCount * SmallValues::kBytes;
  PrintRow(absl::StrCat(name, ", put"), "one by one", puts, kBytes);
  PrintRow(absl::StrCat(name, ", get"), "one by one", gets, kBytes);
  return values.wrong();
}

std::unique_ptr<HostStore> SmallHost() {
  return Must(
      HostStore::Create({Must(HostStore::FlatLayout(SmallValues::kBytes)),
                         2 * SmallValues::kCount * SmallValues::kBytes, SmallValues::kBytes}));
}

// The tiered store answers from its lower tier, as after a restart.
int64_t CompareTiered(const std::string& name, std::shared_ptr<KvStore> lower, int rounds) {
  const std::shared_ptr<HostStore> upper = SmallHost();
  const auto tiered = Must(TieredStore::Create(upper, std::move(lower)));
  return CompareBatches(name, *tiered, rounds, [&] {
    for (int64_t i = 0; i < SmallValues::kCount; ++i) {
      Must(upper->Erase(absl::StrCat("small ", i), DeadlineInMs(kTimeoutMs)));
    }
  });
}

int64_t CompareSmall(int rounds, const std::string& folder) {
  int64_t wrong = 0;
#ifdef KVFERRY_BENCH_REDIS
  if (WhyNoRedis().empty()) {
    const RedisProcess server;
    const std::shared_ptr<KvStore> redis = Must(RedisStore::Create({.port = server.port()}));
    wrong += CompareBatches("redis", *redis, rounds);
    wrong += CompareTiered("host over redis", redis, rounds);
  }
#endif
#ifdef KVFERRY_BENCH_ROCKSDB
  const std::shared_ptr<KvStore> rocksdb =
      Must(RocksDbStore::Open({.path = folder + "/small", .capacity_bytes = 16 << 20}));
  wrong += CompareBatches("rocksdb", *rocksdb, rounds);
  wrong += CompareTiered("host over rocksdb", rocksdb, rounds);
#endif
  (void)rounds, (void)folder;
  return wrong;
}

void CompareHost(int rounds, Values& values) {
  auto host = Must(HostStore::Create(
      {Must(HostStore::FlatLayout(1 << 20)), 2 * kValues * kValueBytes, kValueBytes}));
  Compare("host", std::make_unique<Ours>(std::move(host)), "memcpy", std::make_unique<Copies>(),
          rounds, values);
}

// These two: why it could not be measured, or "".
std::string CompareRedis(int rounds, Values& values) {
#ifdef KVFERRY_BENCH_REDIS
  if (!WhyNoRedis().empty()) return WhyNoRedis();
  const RedisProcess server;
  auto ours = Must(RedisStore::Create({.port = server.port()}));
  Compare("redis", std::make_unique<Ours>(std::move(ours)), "hiredis",
          Must(PlainRedis(server.port())), rounds, values);
  return "";
#else
  (void)rounds, (void)values;
  return "built without hiredis (Debian: libhiredis-dev)";
#endif
}

std::string CompareRocksDb(int rounds, Values& values, const std::string& folder) {
#ifdef KVFERRY_BENCH_ROCKSDB
  auto ours = Must(RocksDbStore::Open({.path = folder + "/ours"}));
  Compare("rocksdb", std::make_unique<Ours>(std::move(ours)), "RocksDB",
          Must(PlainRocksDb(folder + "/plain")), rounds, values);
  return "";
#else
  (void)rounds, (void)values, (void)folder;
  return "built without RocksDB (Debian: librocksdb-dev)";
#endif
}

class ScratchFolder {
 public:
  explicit ScratchFolder(const std::string& parent) : path_(parent + "/kvferry-bench-XXXXXX") {
    if (mkdtemp(path_.data()) != nullptr) return;
    Must(absl::PermissionDeniedError(absl::StrCat("cannot make a folder in ", parent)));
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

int Main(int argc, char** argv) {
  CLI::App app("Puts and gets of our stores beside what lies under them.");
  int rounds = 9;
  std::string parent = std::filesystem::temp_directory_path();
  app.add_option("--reps", rounds, "of which the median counts")->check(CLI::Range(1, 1000));
  app.add_option("--folder", parent, "where files of RocksDB go for a while")
      ->check(CLI::ExistingDirectory);
  CLI11_PARSE(app, argc, argv);
  const ScratchFolder folder(parent);
  Values values;
  std::printf(
      "%lld values of 2 MiB, one after another, in each store and in what lies under it\n\n",
      static_cast<long long>(kValues));
  std::printf("| store | GB/s | GB/s min-max | beside | GB/s | GB/s min-max | x |\n");
  std::printf("|---|---|---|---|---|---|---|\n");
  CompareHost(rounds, values);
  const std::string no_redis = CompareRedis(rounds, values);
  const std::string no_rocksdb = CompareRocksDb(rounds, values, folder.path());
  if (!no_redis.empty()) std::printf("redis: not measured: %s\n", no_redis.c_str());
  if (!no_rocksdb.empty()) std::printf("rocksdb: not measured: %s\n", no_rocksdb.c_str());
  std::printf("\n%lld values of 4 KiB in one batch, and each in a call of its own\n\n",
              static_cast<long long>(SmallValues::kCount));
  std::printf("| store | GB/s | GB/s min-max | beside | GB/s | GB/s min-max | x |\n");
  std::printf("|---|---|---|---|---|---|---|\n");
  const int64_t wrong = values.wrong() + CompareSmall(rounds, folder.path());
  if (wrong == 0) return 0;
  std::printf("\nWRONG: %lld values were not what was put\n", static_cast<long long>(wrong));
  return 1;
}

}  // namespace
}  // namespace kvferry::bench

int main(int argc, char** argv) { return kvferry::bench::Main(argc, argv); }
