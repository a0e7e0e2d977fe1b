#include "connector/store/rocksdb_store.h"

#include <gtest/gtest.h>
#include <rocksdb/db.h>
#include <rocksdb/utilities/stackable_db.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <new>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "connector/store/host_store.h"
#include "connector/store/rocksdb_resumer.h"
#include "connector/store/tiered_store.h"
#include "tests/connector/store_conformance.h"
#include "tests/connector/store_values.h"
#include "tests/support/failing_new.h"
#include "tests/support/temp_folder.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kNotFound = absl::StatusCode::kNotFound;
constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;
constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;

// Deletes a store, and says how to open it again.
struct Keeper {
  std::shared_ptr<TempFolder> folder;
  RocksDbStore::Options options;

  void operator()(KvStore* store) const { delete store; }
  std::shared_ptr<KvStore> Open() const {
    return {Must(RocksDbStore::Open(options)).release(), *this};
  }
};

StoreBackend RocksDb() {
  StoreBackend backend;
  backend.name = "RocksDb";
  backend.make = [](const StoreBackend::Size& size) {
    auto folder = std::make_shared<TempFolder>();
    return Keeper{folder, {folder->path(), size.capacity_bytes, size.max_value_bytes}}.Open();
  };
  backend.evicts = true;
  backend.reopen = [](std::shared_ptr<KvStore> store) {
    const Keeper keeper = *std::get_deleter<Keeper>(store);
    store.reset();
    return keeper.Open();
  };
  backend.random_operations = 20000;
  return backend;
}

// What it is for: the disk below a pool in memory, which a restart empties.
StoreBackend HostOverRocksDb() {
  StoreBackend backend = RocksDb();
  const auto over = [](std::shared_ptr<KvStore> lower) -> std::shared_ptr<KvStore> {
    const KvLayout layout = Must(HostStore::FlatLayout(512));
    std::shared_ptr<KvStore> upper = Must(HostStore::Create({layout, 32 << 10, 0}));
    return Must(TieredStore::Create(std::move(upper), std::move(lower)));
  };
  backend.name = "HostOverRocksDb";
  backend.make = [over, make = backend.make](const StoreBackend::Size& size) {
    return over(make(size));
  };
  backend.evicts = false;
  backend.reopen = nullptr;
  return backend;
}

INSTANTIATE_TEST_SUITE_P(RocksDbStores, StoreConformance,
                         testing::Values(RocksDb(), HostOverRocksDb()), BackendName());

TEST(RocksDbStores, AgeSurvivesARestart) {
  const TempFolder folder;
  RocksDbStore::Options options = {.path = folder.path()};
  {
    const auto store = Must(RocksDbStore::Open(options));
    for (const std::string_view key : {"a", "b", "c", "d", "a"}) {
      ASSERT_TRUE(IsOk(Put(*store, key, ValueOf(1, 1, 1000))));
    }
    ASSERT_TRUE(IsOk(store->Pin("b", Soon())));
    EXPECT_EQ(store->stats().capacity_bytes, -1);
  }
  options.capacity_bytes = 2 * 1025;
  {
    const auto store = Must(RocksDbStore::Open(options));
    EXPECT_EQ(store->stats().evictions, 2);
    EXPECT_EQ(store->stats().bytes, 2 * 1025);
    EXPECT_EQ(store->stats().pinned, 0);
    EXPECT_EQ(Must(store->Exists(std::vector<std::string_view>{"a", "d"}, Soon())), 2);
    ASSERT_TRUE(IsOk(Put(*store, "e", ValueOf(1, 1, 1000))));
    EXPECT_TRUE(Fails(store->GetBytes("d", Soon()), kNotFound));
  }
  EXPECT_EQ(Must(RocksDbStore::Open(options))->stats().entries, 2);
}

// Written in several goes, the first of them first.
TEST(RocksDbStores, OfALargeBatchTheFirstIsDroppedLast) {
  const TempFolder folder;
  constexpr int64_t kBytes = 700 << 10;  // Two of them are written together.
  const RocksDbStore::Options options = {.path = folder.path(), .capacity_bytes = 10 * kBytes};
  auto store = Must(RocksDbStore::Open(options));
  const std::vector<std::string_view> keys = {"a", "b", "c", "d", "e", "f", "g", "h"};
  const Bytes value = ValueOf(1, 1, kBytes - 100);
  const std::span<const std::byte> part = value;
  std::vector<KvStore::PutItem> items;
  for (const std::string_view key : keys) items.push_back({key, {&part, 1}});
  for (const absl::Status& status : store->PutBatch(items, Soon())) ASSERT_TRUE(IsOk(status));
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(IsOk(Put(*store, absl::StrCat("other ", i), value)));
  }
  EXPECT_EQ(Must(store->Exists(keys, Soon())), 5);
  EXPECT_EQ(store->stats().entries, 10);
  store.reset();
  store = Must(RocksDbStore::Open(options));
  for (int i = 5; i < 8; ++i) {
    ASSERT_TRUE(IsOk(Put(*store, absl::StrCat("other ", i), value)));
  }
  EXPECT_EQ(Must(store->Exists(keys, Soon())), 2);
  EXPECT_EQ(store->stats().entries, 10);
}

TEST(RocksDbStores, OfABatchTheLaterValueOfAKeyStaysAfterARestart) {
  const TempFolder folder;
  {
    const auto store = Must(RocksDbStore::Open({.path = folder.path()}));
    const Bytes first = ValueOf(1, 1, 1000), second = ValueOf(1, 2, 2000);
    const std::span<const std::byte> first_part = first, second_part = second;
    const std::vector<KvStore::PutItem> items = {
        {"a", {&first_part, 1}}, {"b", {&first_part, 1}}, {"a", {&second_part, 1}}};
    for (const absl::Status& status : store->PutBatch(items, Soon())) ASSERT_TRUE(IsOk(status));
  }
  const auto store = Must(RocksDbStore::Open({.path = folder.path()}));
  EXPECT_TRUE(*store->GetBytes("a", Soon()) == ValueOf(1, 2, 2000));
  EXPECT_TRUE(*store->GetBytes("b", Soon()) == ValueOf(1, 1, 1000));
}

TEST(RocksDbStores, UnderAPoolItFillsItAgainAfterARestart) {
  const TempFolder folder;
  const KvLayout layout = Must(HostStore::FlatLayout(512));
  const auto open = [&] {
    return Must(TieredStore::Create(Must(HostStore::Create({layout, 1 << 20, 0})),
                                    Must(RocksDbStore::Open({.path = folder.path()}))));
  };
  ASSERT_TRUE(IsOk(Put(*open(), "a", ValueOf(1, 1, 70000))));
  const auto store = open();
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(*store->GetBytes("a", Soon()) == ValueOf(1, 1, 70000));
  }
}

TEST(RocksDbStores, AValueLargerThanTheStoreDropsNothing) {
  const TempFolder folder;
  const auto store = Must(RocksDbStore::Open({.path = folder.path(), .capacity_bytes = 5000}));
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 1000))));
  EXPECT_TRUE(Fails(Put(*store, "b", ValueOf(1, 1, 5000)), kExhausted, "5025 bytes", "of 5000",
                    "0 pinned"));
  EXPECT_TRUE(Fails(Put(*store, "a", ValueOf(1, 1, 5000)), kExhausted));
  EXPECT_TRUE(*store->GetBytes("a", Soon()) == ValueOf(1, 1, 1000));
}

TEST(RocksDbStores, AGetAfterItsDeadlineReadsNothing) {
  const TempFolder folder;
  const auto store = Must(RocksDbStore::Open({.path = folder.path()}));
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 1000))));
  EXPECT_TRUE(Fails(store->GetBytes("a", Clock::now()), absl::StatusCode::kDeadlineExceeded));
}

TEST(RocksDbStores, SyncedPutsWork) {
  const TempFolder folder;
  const RocksDbStore::Options options = {.path = folder.path(), .sync = true};
  ASSERT_TRUE(IsOk(Put(*Must(RocksDbStore::Open(options)), "a", ValueOf(1, 1, 100000))));
  EXPECT_TRUE(*Must(RocksDbStore::Open(options))->GetBytes("a", Soon()) == ValueOf(1, 1, 100000));
}

int64_t BytesOfFiles(const std::string& path) {
  int64_t bytes = 0;
  for (const auto& file : std::filesystem::directory_iterator(path)) {
    std::error_code error;
    const auto size = file.file_size(error);  // RocksDB may remove it meanwhile.
    if (!error) bytes += static_cast<int64_t>(size);
  }
  return bytes;
}

TEST(RocksDbStores, FilesStayNearTheCapacity) {
  const TempFolder folder;
  constexpr int64_t kCapacity = 16 << 20;
  const auto store = Must(RocksDbStore::Open({.path = folder.path(), .capacity_bytes = kCapacity}));
  for (uint64_t i = 0; i < 600; ++i) {  // Some are replaced, most pushed out.
    ASSERT_TRUE(IsOk(Put(*store, absl::StrCat(i % 7 == 0 ? i % 20 : i), ValueOf(i, 1, 100000))));
  }
  EXPECT_TRUE(WaitFor([&] { return BytesOfFiles(folder.path()) < 2 * kCapacity; }, Soon()))
      << BytesOfFiles(folder.path());
}

// ---- Damage -------------------------------------------------------------------------------------

// Opens the files behind the store's back, and lets `change` alter them.
void ChangeFiles(const std::string& path,
                 const std::function<void(rocksdb::DB&, rocksdb::ColumnFamilyHandle& values,
                                          rocksdb::ColumnFamilyHandle& entries)>& change) {
  const std::vector<rocksdb::ColumnFamilyDescriptor> families = {
      {rocksdb::kDefaultColumnFamilyName, {}}, {"kvferry entries 1", {}}};
  rocksdb::DB* opened = nullptr;
  std::vector<rocksdb::ColumnFamilyHandle*> handles;
  const rocksdb::Status status =
      rocksdb::DB::Open(rocksdb::DBOptions(), path, families, &handles, &opened);
  ASSERT_TRUE(status.ok()) << status.ToString();
  const std::unique_ptr<rocksdb::DB> db(opened);
  change(*db, *handles[0], *handles[1]);
  for (rocksdb::ColumnFamilyHandle* const handle : handles) db->DestroyColumnFamilyHandle(handle);
}

std::vector<std::pair<std::string, std::string>> Records(rocksdb::DB& db,
                                                         rocksdb::ColumnFamilyHandle& family) {
  std::vector<std::pair<std::string, std::string>> records;
  const std::unique_ptr<rocksdb::Iterator> it(db.NewIterator({}, &family));
  for (it->SeekToFirst(); it->Valid(); it->Next()) {
    records.emplace_back(it->key().ToString(), it->value().ToString());
  }
  return records;
}

TEST(RocksDbStores, WhatIsDamagedIsAMissAndDropped) {
  const TempFolder folder;
  const RocksDbStore::Options options = {.path = folder.path()};
  const std::vector<std::string> keys = {"byte", "length", "magic", "short", "empty",
                                         "long", "gone",   "one",   "other", "whole"};
  {
    const auto store = Must(RocksDbStore::Open(options));
    for (const std::string& key : keys) ASSERT_TRUE(IsOk(Put(*store, key, ValueOf(7, 1, 9000))));
  }
  ChangeFiles(folder.path(), [&](rocksdb::DB& db, rocksdb::ColumnFamilyHandle& values, auto&) {
    auto records = Records(db, values);
    ASSERT_EQ(records.size(), keys.size());
    records[0].second[5000] ^= 1;
    records[1].second[8] ^= 1;
    records[2].second[0] ^= 1;
    records[3].second.pop_back();
    records[4].second.clear();
    records[5].second.push_back('x');
    std::swap(records[7].second, records[8].second);  // Each one whole, under the other's key.
    for (const auto& [key, record] : records) {
      ASSERT_TRUE(db.Put({}, &values, key, record).ok());
    }
    ASSERT_TRUE(db.Delete({}, &values, records[6].first).ok());
  });
  const auto store = Must(RocksDbStore::Open(options));
  Bytes out(9000);
  const std::span<std::byte> part = out;
  for (size_t i = 0; i + 1 < keys.size(); ++i) {
    EXPECT_TRUE(Fails(store->Get(keys[i], {&part, 1}, Soon()), kNotFound)) << keys[i];
    EXPECT_TRUE(Fails(store->GetBytes(keys[i], Soon()), kNotFound)) << keys[i];
    EXPECT_EQ(store->stats().errors, static_cast<int64_t>(i) + 1);  // Once: it is gone then.
  }
  EXPECT_EQ(store->stats().entries, 1);
  EXPECT_TRUE(*store->GetBytes("whole", Soon()) == ValueOf(7, 1, 9000));
  ASSERT_TRUE(IsOk(Put(*store, "byte", ValueOf(7, 2, 9000))));
  EXPECT_TRUE(*store->GetBytes("byte", Soon()) == ValueOf(7, 2, 9000));
}

// As long as it lives, no file grows beyond so many bytes: writes fail with EFBIG.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : signal_(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit = {bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, signal_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  void (*signal_)(int);
  rlimit before_{};
};

// The bytes that an entry says to have, in front of its key.
std::string EntryText(int64_t bytes, std::string_view key) {
  std::string text(sizeof(bytes), '\0');
  std::memcpy(text.data(), &bytes, sizeof(bytes));
  return text.append(key);
}

// Which would be read beyond its end, or not to it.
TEST(RocksDbStores, AValueOfAnotherLengthThanItsEntrySaysIsAMiss) {
  const TempFolder folder;
  {
    const auto store = Must(RocksDbStore::Open({.path = folder.path()}));
    for (const std::string_view key : {"a", "b", "c"}) {
      ASSERT_TRUE(IsOk(Put(*store, key, ValueOf(7, 1, 1000))));
    }
  }
  ChangeFiles(folder.path(), [](rocksdb::DB& db, auto&, rocksdb::ColumnFamilyHandle& entries) {
    const auto records = Records(db, entries);
    ASSERT_EQ(records.size(), 3u);
    ASSERT_EQ(records[0].second, EntryText(1025, "a"));
    ASSERT_TRUE(db.Put({}, &entries, records[0].first, EntryText(1026, "a")).ok());
    ASSERT_TRUE(db.Put({}, &entries, records[1].first, EntryText(1024, "b")).ok());
  });
  const auto store = Must(RocksDbStore::Open({.path = folder.path()}));
  Bytes a(1001), b(999), c(1000);
  const std::span<std::byte> into_a = a, into_b = b, into_c = c;
  const std::vector<KvStore::GetItem> items = {
      {"a", {&into_a, 1}}, {"b", {&into_b, 1}}, {"c", {&into_c, 1}}};
  for (const absl::Status& status : store->GetBatch(items, Clock::now())) {
    EXPECT_TRUE(Fails(status, absl::StatusCode::kDeadlineExceeded));
  }
  const std::vector<absl::Status> got = store->GetBatch(items, Soon());
  EXPECT_TRUE(Fails(got[0], kNotFound));
  EXPECT_TRUE(Fails(got[1], kNotFound));
  EXPECT_TRUE(IsOk(got[2]));
  EXPECT_TRUE(c == ValueOf(7, 1, 1000));
  EXPECT_EQ(store->stats().hits, 1);
  EXPECT_EQ(store->stats().misses, 2);
  EXPECT_EQ(store->stats().entries, 1);
}

TEST(RocksDbStores, WhatIsDamagedIsAMissAlsoWhereItCannotBeDropped) {
  const TempFolder folder;
  { ASSERT_TRUE(IsOk(Put(*Must(RocksDbStore::Open({.path = folder.path()})), "a", Bytes(1000)))); }
  ChangeFiles(folder.path(), [](rocksdb::DB& db, rocksdb::ColumnFamilyHandle& values, auto&) {
    ASSERT_TRUE(db.Put({}, &values, Records(db, values)[0].first, "x").ok());
  });
  const auto store = Must(RocksDbStore::Open({.path = folder.path()}));
  const FileSizeLimit limit(0);
  EXPECT_TRUE(Fails(store->GetBytes("a", Soon()), kNotFound));
}

TEST(RocksDbStores, EntriesThatMakeNoSenseAreNotTakenForOurs) {
  const std::string key(KvStore::kMaxKeyBytes, 'k');
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"12345678", EntryText(100, "")},        {"12345678", EntryText(1000, key + "k")},
      {"12345678", EntryText(25, "a")},        {"12345678", "short"},
      {"123456789", EntryText(100, "longer")}, {"1234567", EntryText(100, "shorter")}};
  for (const auto& [record_key, text] : bad) {
    SCOPED_TRACE(testing::Message() << record_key << " " << text.size());
    const TempFolder folder;
    { ASSERT_TRUE(IsOk(Put(*Must(RocksDbStore::Open({.path = folder.path()})), key, Bytes(9)))); }
    ChangeFiles(folder.path(), [&](rocksdb::DB& db, auto&, rocksdb::ColumnFamilyHandle& entries) {
      ASSERT_TRUE(db.Put({}, &entries, record_key, text).ok());
    });
    EXPECT_TRUE(Fails(RocksDbStore::Open({.path = folder.path()}), absl::StatusCode::kDataLoss,
                      folder.path(), "makes no sense"));
  }
}

// As a put that failed half-way may leave them.
TEST(RocksDbStores, OfTwoEntriesOfAKeyTheLaterStaysAlone) {
  const TempFolder folder;
  {
    const auto store = Must(RocksDbStore::Open({.path = folder.path()}));
    for (const std::string_view key : {"a", "b"}) {
      ASSERT_TRUE(IsOk(Put(*store, key, ValueOf(7, 1, 1000))));
    }
  }
  ChangeFiles(folder.path(), [](rocksdb::DB& db, auto&, rocksdb::ColumnFamilyHandle& entries) {
    const auto records = Records(db, entries);
    ASSERT_TRUE(db.Put({}, &entries, records[0].first, records[1].second).ok());  // Both are of b.
  });
  EXPECT_TRUE(*Must(RocksDbStore::Open({.path = folder.path()}))->GetBytes("b", Soon()) ==
              ValueOf(7, 1, 1000));
  ChangeFiles(folder.path(), [](rocksdb::DB& db, rocksdb::ColumnFamilyHandle& values,
                                rocksdb::ColumnFamilyHandle& entries) {
    EXPECT_EQ(Records(db, values).size(), 1u);
    EXPECT_EQ(Records(db, entries).size(), 1u);
  });
}

TEST(RocksDbStores, WhatIsReplacedOrErasedLeavesNothingOnTheDisk) {
  const TempFolder folder;
  {
    const auto store = Must(RocksDbStore::Open({.path = folder.path()}));
    for (uint64_t version = 1; version <= 3; ++version) {
      ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(7, version, 1000))));
    }
    ASSERT_TRUE(IsOk(Put(*store, "b", ValueOf(7, 1, 1000))));
    ASSERT_TRUE(IsOk(store->Erase("b", Soon())));
  }
  ChangeFiles(folder.path(), [](rocksdb::DB& db, rocksdb::ColumnFamilyHandle& values,
                                rocksdb::ColumnFamilyHandle& entries) {
    EXPECT_EQ(Records(db, values).size(), 1u);
    EXPECT_EQ(Records(db, entries).size(), 1u);
  });
}

// RocksDB finds out itself, and says so in other words than of a value that is not there.
TEST(RocksDbStores, ValuesOfDamagedAndOfMissingFilesAreMisses) {
  for (const bool missing : {false, true}) {
    SCOPED_TRACE(missing);
    const TempFolder folder;
    {
      ASSERT_TRUE(IsOk(Put(*Must(RocksDbStore::Open({.path = folder.path()})), "a", Bytes(99999))));
    }
    const auto store = Must(RocksDbStore::Open({.path = folder.path()}));  // Writes its files.
    int changed = 0;
    for (const auto& file : std::filesystem::directory_iterator(folder.path())) {
      if (file.path().extension() != ".blob") continue;
      ++changed;
      if (missing) {
        std::filesystem::remove(file.path());
      } else {
        std::fstream(file.path(), std::ios::in | std::ios::out | std::ios::binary).seekp(50000)
            << 'x';
      }
    }
    ASSERT_EQ(changed, 1);
    EXPECT_TRUE(Fails(store->GetBytes("a", Soon()), kNotFound));
    EXPECT_EQ(store->stats().errors, 1);
    EXPECT_EQ(store->stats().entries, 0);
  }
}

// Bytes of the files themselves, wherever they fall: what RocksDB finds is as good as what we find.
TEST(RocksDbStores, DamagedFilesNeverGiveWrongBytes) {
  const TempFolder folder;
  const RocksDbStore::Options options = {.path = folder.path()};
  {
    const auto store = Must(RocksDbStore::Open(options));
    for (uint64_t key = 0; key < 50; ++key) {
      ASSERT_TRUE(IsOk(Put(*store, absl::StrCat(key), WholeValue(key, key))));
    }
  }
  ChangeFiles(folder.path(), [](rocksdb::DB& db, rocksdb::ColumnFamilyHandle& values, auto&) {
    ASSERT_TRUE(db.Flush({}, &values).ok());
  });
  { const auto store = Must(RocksDbStore::Open(options)); }
  std::mt19937_64 random(4);
  for (const auto& file : std::filesystem::directory_iterator(folder.path())) {
    const std::string extension = file.path().extension();
    if (extension != ".sst" && extension != ".blob") continue;
    std::fstream stream(file.path(), std::ios::in | std::ios::out | std::ios::binary);
    for (int i = 0; i < 10; ++i) {
      stream.seekp(static_cast<int64_t>(random() % file.file_size() * 3 / 4));
      stream.put(static_cast<char>(random()));
    }
  }
  const auto store = RocksDbStore::Open(options);
  if (!store.ok()) {  // Which is no wrong byte either.
    EXPECT_TRUE(Fails(store, absl::StatusCode::kDataLoss, folder.path()));
    return;
  }
  for (uint64_t key = 0; key < 50; ++key) {
    const auto got = (*store)->GetBytes(absl::StrCat(key), Soon());
    EXPECT_TRUE(got.ok() ? *got == WholeValue(key, key) : absl::IsNotFound(got.status())) << key;
  }
}

// ---- Processes ----------------------------------------------------------------------------------

// kvferry_test_store_writer on a folder.
class Writer {
 public:
  explicit Writer(const std::string& path) {
    int ends[2];
    if (pipe(ends) != 0) std::abort();
    child_ = fork();
    if (child_ == 0) {
      dup2(ends[1], STDOUT_FILENO);
      close(ends[0]);
      execl(KVFERRY_TEST_STORE_WRITER, KVFERRY_TEST_STORE_WRITER, path.c_str(), nullptr);
      _exit(127);
    }
    close(ends[1]);
    lines_ = fdopen(ends[0], "r");
  }
  ~Writer() {
    Kill();
    fclose(lines_);
  }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  // Empty when it has ended.
  std::string Line() {
    char line[1000] = {};
    if (fgets(line, sizeof(line), lines_) == nullptr) return "";
    line[strcspn(line, "\n")] = '\0';
    return line;
  }
  void Kill() {
    if (child_ <= 0) return;
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
    child_ = -1;
  }

 private:
  pid_t child_ = -1;
  FILE* lines_ = nullptr;
};

// What returned is there, and what was under way is there whole or not at all.
TEST(RocksDbStores, KilledInTheMidstOfPuts) {
  const TempFolder folder;
  std::mt19937_64 random(2);
  for (int round = 0; round < 5; ++round) {
    SCOPED_TRACE(round);
    uint64_t version = 0;
    {
      Writer writer(folder.path());
      ASSERT_EQ(writer.Line(), "open");
      const uint64_t stop_at = 1 + random() % 500;
      while (version < stop_at) {
        const std::string line = writer.Line();
        ASSERT_FALSE(line.empty()) << "it has ended";
        version = std::stoull(line);
      }
      writer.Kill();
      for (std::string line = writer.Line(); !line.empty(); line = writer.Line()) {
        version = std::stoull(line);
      }
    }
    const auto store = Must(RocksDbStore::Open({.path = folder.path()}));
    for (uint64_t key = 0; key < 20; ++key) {
      const auto got = store->GetBytes(absl::StrCat(key), Soon());
      if (!got.ok()) {
        EXPECT_TRUE(Fails(got, kNotFound));
        EXPECT_TRUE(round == 0 && (key == 0 ? 20 : key) > version) << key << " " << version;
        continue;
      }
      EXPECT_TRUE(IsWholeValue(key, *got));
      uint64_t of = 0;
      std::memcpy(&of, got->data() + 8, sizeof(of));
      // The last version of this key that was said to be put, or the one that was under way.
      const uint64_t put = version - (version - key) % 20;
      if (version >= key && put > 0) {
        EXPECT_TRUE(of == put || of == version + 1) << key << " " << of << " " << version;
      }
    }
    EXPECT_EQ(store->stats().errors, 0);
  }
}

TEST(RocksDbStores, APathIsOpenedOnce) {
  const TempFolder folder;
  {
    Writer writer(folder.path());
    ASSERT_EQ(writer.Line(), "open");
    EXPECT_TRUE(Fails(RocksDbStore::Open({.path = folder.path()}), kPrecondition, folder.path(),
                      "open already"));
  }
  const auto store = Must(RocksDbStore::Open({.path = folder.path()}));
  EXPECT_TRUE(Fails(RocksDbStore::Open({.path = folder.path()}), kPrecondition, "open already"));
}

// What kvferry_test_store_opener said of its two stores.
struct Opened {
  absl::Status short_of_threads = absl::UnknownError("it has ended");
  absl::Status afterwards = absl::UnknownError("it has ended");
  bool ended_well = false;
};

Opened OpenWithThreads(const std::string& how, int number, const std::string& path) {
  const std::string command =
      absl::StrCat(KVFERRY_TEST_STORE_OPENER, " ", how, " ", number, " ", path);
  FILE* const lines = popen(command.c_str(), "r");  // NOLINT(bugprone-command-processor): ours.
  Opened opened;
  for (absl::Status* const status : {&opened.short_of_threads, &opened.afterwards}) {
    char line[1000] = {};
    if (fgets(line, sizeof(line), lines) == nullptr) break;
    int code = 0;
    const absl::string_view text = line;
    if (!absl::SimpleAtoi(text.substr(0, text.find(' ')), &code)) {
      break;
    }
    *status = absl::Status(static_cast<absl::StatusCode>(code), line);
  }
  opened.ended_well = pclose(lines) == 0;
  return opened;
}

TEST(RocksDbStores, WhereThreadsAreShort) {
  for (int at_once = 0; at_once <= 18; ++at_once) {
    SCOPED_TRACE(at_once);
    const TempFolder folder;
    for (const char* const what : {"new", "there already"}) {
      SCOPED_TRACE(what);
      const Opened opened = OpenWithThreads("scarce", at_once, folder.path());
      EXPECT_TRUE(opened.ended_well);
      if (at_once < 3) {
        EXPECT_TRUE(Fails(opened.short_of_threads, kExhausted, folder.path(),
                          absl::StrCat("thread ", at_once + 1, " of 3")));
      } else {
        EXPECT_TRUE(IsOk(opened.short_of_threads));
      }
      EXPECT_TRUE(IsOk(opened.afterwards));
    }
  }
}

// As where others take them while RocksDB opens its files. The timer starts last: what RocksDB has
// locked by then stays so in that process.
TEST(RocksDbStores, WhereThreadsRunOut) {
  const TempFolder folder;
  ASSERT_TRUE(IsOk(Put(*Must(RocksDbStore::Open({.path = folder.path()})), "a", ValueOf(1, 1, 9))));
  for (int number = 0; number <= 18; ++number) {
    SCOPED_TRACE(number);
    const Opened opened = OpenWithThreads("fail", number, folder.path());
    EXPECT_TRUE(opened.ended_well);
    if (number < 6) {
      EXPECT_TRUE(Fails(opened.short_of_threads, kExhausted, folder.path()));
    } else {
      EXPECT_TRUE(IsOk(opened.short_of_threads));
    }
    if (number == 5) {
      EXPECT_TRUE(Fails(opened.afterwards, kPrecondition, "open already"));
    } else {
      EXPECT_TRUE(IsOk(opened.afterwards));
    }
    EXPECT_TRUE(*Must(RocksDbStore::Open({.path = folder.path()}))->GetBytes("a", Soon()) ==
                ValueOf(1, 1, 9));
  }
}

// ---- Paths and options --------------------------------------------------------------------------

TEST(RocksDbStores, BadOptionsAreNamed) {
  const TempFolder folder;
  const auto open = [&](const std::string& path, int64_t capacity_bytes, int64_t max_value_bytes) {
    return RocksDbStore::Open({path, capacity_bytes, max_value_bytes});
  };
  EXPECT_TRUE(Fails(open("", 0, 1), kInvalid, "path is empty"));
  EXPECT_TRUE(Fails(open(folder.path(), -1, 1), kInvalid, "capacity_bytes is -1"));
  EXPECT_TRUE(Fails(open(folder.path(), 0, 0), kInvalid, "max_value_bytes is 0", "1073741824"));
  EXPECT_TRUE(Fails(open(folder.path(), 0, (1 << 30) + 1), kInvalid, "1073741825"));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(RocksDbStores, PathsThatAreNoFolders) {
  const TempFolder folder;
  const std::string file = folder.path() + "/file";
  std::ofstream(file) << "x";
  EXPECT_TRUE(Fails(RocksDbStore::Open({.path = file}), kPrecondition, file, "no folder"));
  EXPECT_TRUE(Fails(RocksDbStore::Open({.path = file + "/below"}), kPrecondition, "no folder"));
  EXPECT_TRUE(Fails(RocksDbStore::Open({.path = "/proc/kvferry"}), kPrecondition, "/proc/kvferry"));
  EXPECT_TRUE(IsOk(RocksDbStore::Open({.path = folder.path() + "/made/for/it"})));
}

// As another program does, which makes it where there is none.
std::unique_ptr<rocksdb::DB> OpenAsAnother(const std::string& path) {
  rocksdb::Options options;
  options.create_if_missing = true;
  rocksdb::DB* opened = nullptr;
  EXPECT_TRUE(rocksdb::DB::Open(options, path, &opened).ok());
  return std::unique_ptr<rocksdb::DB>(opened);
}

TEST(RocksDbStores, AnothersDatabaseIsLeftAlone) {
  const TempFolder folder;
  ASSERT_TRUE(OpenAsAnother(folder.path())->Put({}, "a", "b").ok());
  EXPECT_TRUE(Fails(RocksDbStore::Open({.path = folder.path()}), kPrecondition, folder.path(),
                    "another RocksDB database"));
  ASSERT_TRUE(OpenAsAnother(folder.path())->Delete({}, "a").ok());
  // As when the making of ours was cut short.
  EXPECT_TRUE(IsOk(RocksDbStore::Open({.path = folder.path()})));
}

TEST(RocksDbStores, AnothersFamiliesAreLeftAlone) {
  const TempFolder folder;
  const std::unique_ptr<rocksdb::DB> db = OpenAsAnother(folder.path());
  rocksdb::ColumnFamilyHandle* theirs = nullptr;
  ASSERT_TRUE(db->CreateColumnFamily({}, "theirs", &theirs).ok());
  ASSERT_TRUE(db->DestroyColumnFamilyHandle(theirs).ok());
  ASSERT_TRUE(db->Close().ok());
  EXPECT_TRUE(Fails(RocksDbStore::Open({.path = folder.path()}), kPrecondition, folder.path(),
                    "another RocksDB database"));
}

// A file system of its own; `error` says why there is none.
class Tmpfs {
 public:
  explicit Tmpfs(const char* options) {
    if (mount("tmpfs", folder_.path().c_str(), "tmpfs", 0, options) != 0) error_ = strerror(errno);
  }
  ~Tmpfs() {
    if (error_.empty()) umount2(folder_.path().c_str(), MNT_DETACH);
  }
  const std::string& path() const { return folder_.path(); }
  const std::string& error() const { return error_; }

 private:
  TempFolder folder_;
  std::string error_;
};

TEST(RocksDbStores, AFullDiskAndRoomAgain) {
  const Tmpfs disk("size=16m");
  if (!disk.error().empty()) GTEST_SKIP() << "cannot mount a tmpfs: " << disk.error();
  const std::string ballast = disk.path() + "/ballast";
  std::ofstream(ballast) << std::string(6 << 20, 'x');
  const RocksDbStore::Options options = {.path = disk.path() + "/store"};
  auto store = Must(RocksDbStore::Open(options));
  const auto put = [&](uint64_t i) { return Put(*store, absl::StrCat(i), ValueOf(i, 1, 50000)); };
  uint64_t fit = 0;
  absl::Status status = put(0);
  while (status.ok() && fit < 1000) status = put(++fit);
  EXPECT_TRUE(Fails(status, kExhausted, "No space left on device"));
  EXPECT_EQ(status.message().find("opened anew"), absl::string_view::npos) << status;
  ASSERT_GT(fit, 30);
  EXPECT_TRUE(Fails(put(0), kExhausted));  // Not again, either; the old value stays.
  EXPECT_GE(store->stats().errors, 2);
  for (uint64_t i = 0; i < fit; ++i) {
    EXPECT_TRUE(*store->GetBytes(absl::StrCat(i), Soon()) == ValueOf(i, 1, 50000));
  }
  EXPECT_TRUE(Fails(store->GetBytes(absl::StrCat(fit), Soon()), kNotFound));

  std::filesystem::remove(ballast);
  EXPECT_TRUE(IsOk(put(fit)));
  EXPECT_TRUE(IsOk(store->Erase("0", Soon())));
  store.reset();
  store = Must(RocksDbStore::Open(options));
  EXPECT_EQ(store->stats().entries, static_cast<int64_t>(fit));
  for (uint64_t i = 1; i <= fit; ++i) {
    EXPECT_TRUE(*store->GetBytes(absl::StrCat(i), Soon()) == ValueOf(i, 1, 50000));
  }
}

// RocksDB is asked by a fake whether it goes on.
class Resumes : public rocksdb::StackableDB {
 public:
  using rocksdb::StackableDB::StackableDB;
  rocksdb::Status Resume() override {
    ++asked;
    EXPECT_TRUE(WaitFor([&] { return !hangs; }, Soon()));
    if (finds_no_memory) throw std::bad_alloc();
    return says;
  }

  std::atomic<int> asked = 0;
  std::atomic<bool> hangs = false;
  bool finds_no_memory = false;
  rocksdb::Status says;
};

class RocksDbResumers : public testing::Test {
 protected:
  RocksDbResumers() : db_(OpenAsAnother(folder_.path()).release()) {}
  absl::Status Resume(const rocksdb::Status& error, int64_t timeout_ms = 20000) {
    return resumer_.Resume(error, 100, absl::UnavailableError("it failed"),
                           DeadlineInMs(timeout_ms));
  }

  const TempFolder folder_;
  Resumes db_;
  const Tmpfs disk_{"size=16m"};
  RocksDbResumer resumer_{&db_, disk_.path()};
};

// As it may for ever.
TEST_F(RocksDbResumers, OneThatHangsIsWaitedForUntilTheDeadline) {
  db_.hangs = true;
  for (int call = 0; call < 2; ++call) {
    EXPECT_TRUE(Fails(Resume(rocksdb::Status::IOError(), 20), absl::StatusCode::kUnavailable,
                      "it failed; RocksDB has not got over it yet"));
  }
  EXPECT_EQ(db_.asked, 1);
  db_.hangs = false;
  EXPECT_TRUE(IsOk(Resume(rocksdb::Status::IOError())));
}

// On a thread of its own, where nobody else would catch it.
TEST_F(RocksDbResumers, OneThatFindsNoMemoryFailsTheWriteAlone) {
  db_.finds_no_memory = true;
  EXPECT_TRUE(
      Fails(Resume(rocksdb::Status::IOError()), absl::StatusCode::kUnavailable, "it failed"));
  db_.finds_no_memory = false;
  EXPECT_TRUE(IsOk(Resume(rocksdb::Status::IOError())));
}

TEST_F(RocksDbResumers, OneThatCouldNotBeginIsNotWaitedFor) {
  const rocksdb::Status error = rocksdb::Status::IOError();
  const absl::Status failed = absl::UnavailableError("it failed");
  bool resumed = false;
  CallWithoutMemory([&] { resumed = resumer_.Resume(error, 100, failed, Soon()).ok(); },
                    [&] { EXPECT_TRUE(IsOk(Resume(error, 1000))); });
  EXPECT_TRUE(resumed);
}

// Each time it would write what fits, and fail.
TEST_F(RocksDbResumers, AFullDiskIsTriedAgainWhenThereIsMoreRoom) {
  if (!disk_.error().empty()) GTEST_SKIP() << "cannot mount a tmpfs: " << disk_.error();
  const std::string ballast = disk_.path() + "/ballast";
  std::ofstream(ballast) << std::string(6 << 20, 'x');
  db_.says = rocksdb::Status::NoSpace();
  for (int call = 0; call < 20; ++call) {
    EXPECT_TRUE(Fails(Resume(rocksdb::Status::NoSpace()), absl::StatusCode::kUnavailable));
  }
  EXPECT_LT(db_.asked, 20);
  const int asked = db_.asked;
  std::filesystem::remove(ballast);
  db_.says = rocksdb::Status::OK();
  EXPECT_TRUE(IsOk(Resume(rocksdb::Status::NoSpace())));
  EXPECT_EQ(db_.asked, asked + 1);
}

// RocksDB lost sight of a flush, and a put waited for that for ever; or it took no more writes.
TEST(RocksDbStores, AFullDiskKeepsNobodyWaiting) {
  const Tmpfs disk("size=16m");
  if (!disk.error().empty()) GTEST_SKIP() << "cannot mount a tmpfs: " << disk.error();
  // A write buffer of 1 MiB.
  const auto store =
      Must(RocksDbStore::Open({.path = disk.path() + "/store", .capacity_bytes = 16 << 20}));
  const std::string ballast = disk.path() + "/ballast";
  std::ofstream(ballast) << std::string(8 << 20, 'x');
  int failed = 0;
  for (uint64_t i = 0; i < 500; ++i) {
    failed += Put(*store, absl::StrCat(i), ValueOf(i, 1, 100000)).ok() ? 0 : 1;
  }
  EXPECT_GT(failed, 100);
  std::filesystem::remove(ballast);
  EXPECT_TRUE(IsOk(Put(*store, "last", ValueOf(1, 1, 100000))));
  const auto last = store->GetBytes("last", Soon());
  EXPECT_TRUE(last.ok() && *last == ValueOf(1, 1, 100000));
}

TEST(RocksDbStores, AnErrorThatRocksDbDoesNotGetOver) {
  const TempFolder folder;
  auto store = Must(RocksDbStore::Open({.path = folder.path()}));
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 1000))));
  const auto expect_refused = [&] {
    EXPECT_TRUE(Fails(Put(*store, "b", ValueOf(2, 1, 100000)), absl::StatusCode::kUnavailable,
                      "File too large",
                      "; RocksDB takes no more writes until the store is opened anew"));
  };
  {
    const FileSizeLimit limit(50000);
    expect_refused();
  }
  expect_refused();
  EXPECT_TRUE(*store->GetBytes("a", Soon()) == ValueOf(1, 1, 1000));
  store.reset();
  store = Must(RocksDbStore::Open({.path = folder.path()}));
  EXPECT_TRUE(IsOk(Put(*store, "b", ValueOf(2, 1, 100000))));
  EXPECT_TRUE(*store->GetBytes("a", Soon()) == ValueOf(1, 1, 1000));
}

TEST(RocksDbStores, AReadOnlyDisk) {
  const Tmpfs disk("ro");
  if (!disk.error().empty()) GTEST_SKIP() << "cannot mount a tmpfs: " << disk.error();
  for (const std::string& path : {disk.path(), disk.path() + "/below"}) {
    EXPECT_TRUE(Fails(RocksDbStore::Open({.path = path}), absl::StatusCode::kPermissionDenied, path,
                      "Read-only file system"));
  }
}

}  // namespace
}  // namespace kvferry
