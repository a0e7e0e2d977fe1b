#pragma once

// A server of a host store, and a client of several of them, as processes of their own.

#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "connector/store/host_store.h"
#include "connector/store/remote_store.h"
#include "connector/store/rocksdb_store.h"
#include "connector/store/store_server.h"
#include "connector/store/tiered_store.h"
#include "tests/process/peer_words.h"
#include "tests/support/endpoints.h"

namespace kvferry {

class StoreServerPeer {
 public:
  // Room for a quarter of the pool's pages; at every second port with a tier below for half of
  // them, at every fourth one with files below that the next server there finds again.
  StoreServerPeer(const KvPool& pool, const Config& config) {
    const std::shared_ptr<HostStore> host = Host(pool, 4);
    StoreServer::Options options = {{config, kTestModel, "store"}, host, nullptr};
    if (config.listen_port % 2 == 1) {
      options.tiered = Must(TieredStore::Create(
          host, config.listen_port % 4 == 3 ? Files(pool, config) : Host(pool, 2)));
    }
    server_ = Must(StoreServer::Create(std::move(options)));
  }

  std::string Greeting() const { return absl::StrCat("ready ", server_->address()); }
  std::string Handle(const Words& words) {
    if (words[0] == "metric") return absl::StrCat(Metric(*server_, words[1]));
    return "what?";
  }

 private:
  static std::shared_ptr<HostStore> Host(const KvPool& pool, int64_t part) {
    HostStore::Options options;
    options.layout = pool.layout();
    options.capacity_bytes = pool.num_pages() / part * pool.layout().page_bytes();
    return Must(HostStore::Create(options));
  }

  // In a folder of the test's, if RocksDB is there.
  static std::shared_ptr<KvStore> Files(const KvPool& pool, const Config& config) {
#ifdef KVFERRY_TEST_ROCKSDB
    RocksDbStore::Options options;
    options.path = absl::StrCat(std::getenv("KVFERRY_TEST_STORES"), "/", config.listen_port);
    options.capacity_bytes = pool.num_pages() / 2 * pool.layout().page_bytes();
    return Must(RocksDbStore::Open(options));
#else
    return Host(pool, 2);
#endif
  }

  std::unique_ptr<StoreServer> server_;
};

// Its calls run in threads of their own, many at once. What is in its pool goes and comes as pages,
// or by "put_values" and "get_values" one value after the other.
class StoreClientPeer {
 public:
  StoreClientPeer(std::shared_ptr<KvPool> pool, const Config& config)
      : pool_(std::move(pool)),
        no_pool_of_the_stores_(
            Must(KvPool::Adopt(pool_->layout(), pool_->buffer_infos(), pool_,
                               std::shared_ptr<const PoolMemory>(pool_, &pool_->memory())))),
        config_(config) {}

  std::string Greeting() const { return "ready"; }

  std::string Handle(const Words& words) {
    if (words[0] == "connect") {  // ADDRESS,ADDRESS,...
      for (const std::string& address : std::vector<std::string>(absl::StrSplit(words[1], ','))) {
        RemoteStore::Options options;
        options.endpoint = {config_, kTestModel, "client"};
        options.address = address;
        options.pool = pool_;
        stores_.push_back(Must(RemoteStore::Create(options)));
      }
      return "OK";
    }
    if (words.size() == 5) {  // put | put_values | get | get_values | erase STORE KEYS PAGES MS
      calls_.push_back(std::async(std::launch::async, [this, words] { return Call(words); }));
      return absl::StrCat(calls_.size() - 1);
    }
    if (words[0] == "wait") {  // CALL MS: a code for each key, when it has ended.
      std::shared_future<std::string>& call = calls_[Number(words[1])];
      const auto ms = std::chrono::milliseconds(Number(words[2]));
      return call.wait_for(ms) == std::future_status::ready ? call.get() : "PENDING";
    }
    if (words[0] == "metric") {
      int64_t sum = 0;
      for (const auto& store : stores_) sum += Metric(*store, words[1]);
      return absl::StrCat(sum);
    }
    return "what?";
  }

 private:
  std::string Call(const Words& words) {
    RemoteStore& store = *stores_[Number(words[1])];
    const std::vector<std::string> keys = absl::StrSplit(words[2], ',');
    const std::vector<std::string_view> views(keys.begin(), keys.end());
    const std::vector<int64_t> pages = Numbers(words[3]);
    const Deadline deadline = DeadlineInMs(Number(words[4]));
    const bool as_values = absl::EndsWith(words[0], "_values");
    const KvPool& pool = as_values ? *no_pool_of_the_stores_ : *pool_;
    const std::vector<absl::Status> statuses =
        absl::StartsWith(words[0], "put")   ? store.PutPages(views, pool, pages, deadline)
        : absl::StartsWith(words[0], "get") ? store.GetPages(views, pool, pages, deadline)
                                            : std::vector{store.Erase(keys[0], deadline)};
    return absl::StrJoin(statuses, " ", [](std::string* out, const absl::Status& status) {
      absl::StrAppend(out, absl::StatusCodeToString(status.code()));
    });
  }

  const std::shared_ptr<KvPool> pool_;
  const std::shared_ptr<KvPool> no_pool_of_the_stores_;  // The same memory.
  const Config config_;
  std::vector<std::unique_ptr<RemoteStore>> stores_;
  std::vector<std::shared_future<std::string>> calls_;  // Before the stores that they use.
};

}  // namespace kvferry
