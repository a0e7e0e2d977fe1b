#include <rocksdb/db.h>
#include <rocksdb/options.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "bench/peers/plain_store.h"

namespace kvferry::bench {
namespace {

absl::Status From(const rocksdb::Status& status) {
  return status.ok() ? absl::OkStatus() : absl::UnavailableError(status.ToString());
}

class RocksDb : public PlainStore {
 public:
  explicit RocksDb(rocksdb::DB* db) : db_(db) {}

  absl::Status Put(const std::string& key, std::span<const std::byte> value) override {
    const rocksdb::Slice slice(reinterpret_cast<const char*>(value.data()), value.size());
    return From(db_->Put(rocksdb::WriteOptions(), key, slice));
  }

  absl::Status Get(const std::string& key, std::span<std::byte> out) override {
    rocksdb::PinnableSlice value;
    const rocksdb::Status status =
        db_->Get(rocksdb::ReadOptions(), db_->DefaultColumnFamily(), key, &value);
    if (!status.ok()) return From(status);
    if (value.size() != out.size()) {
      return absl::DataLossError(absl::StrCat(value.size(), " bytes"));
    }
    std::memcpy(out.data(), value.data(), out.size());
    return absl::OkStatus();
  }

 private:
  const std::unique_ptr<rocksdb::DB> db_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PlainStore>> PlainRocksDb(const std::string& path) {
  rocksdb::Options options;
  options.create_if_missing = true;
  options.error_if_exists = true;
  options.compression = rocksdb::kNoCompression;
  options.enable_blob_files = true;
  options.min_blob_size = 4096;
  options.blob_file_size = options.write_buffer_size;
  options.enable_blob_garbage_collection = true;
  options.blob_garbage_collection_force_threshold = 0.5;
  rocksdb::DB* db = nullptr;
  const rocksdb::Status status = rocksdb::DB::Open(options, path, &db);
  if (!status.ok()) return From(status);
  return std::make_unique<RocksDb>(db);
}

}  // namespace kvferry::bench
