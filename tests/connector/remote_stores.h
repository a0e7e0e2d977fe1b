#pragma once

// Servers of stores, clients of them, and what a client of ours would not ask.

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "connector/store/remote_store.h"
#include "connector/store/store_server.h"
#include "connector/store/store_wire.h"
#include "connector/store/tiered_store.h"
#include "tests/support/endpoints.h"

namespace kvferry {

inline KvLayout Flat(int64_t page_bytes) { return Must(HostStore::FlatLayout(page_bytes)); }

inline std::unique_ptr<StoreServer> Serve(std::shared_ptr<HostStore> host,
                                          Config config = SmallChunks()) {
  return Must(StoreServer::Create({{config, kTestModel, "store"}, std::move(host), nullptr}));
}

// A host store over another one.
inline std::unique_ptr<StoreServer> Serve(std::shared_ptr<HostStore> host,
                                          const std::shared_ptr<KvStore>& lower) {
  std::shared_ptr<TieredStore> tiered = Must(TieredStore::Create(host, lower));
  return Must(
      StoreServer::Create({{SmallChunks(), kTestModel, ""}, std::move(host), std::move(tiered)}));
}

inline std::unique_ptr<RemoteStore> Dial(const std::string& address,
                                         std::shared_ptr<const KvPool> pool,
                                         int64_t max_value_bytes = 64 << 20,
                                         int64_t connect_timeout_ms = 3000) {
  Config config = SmallChunks();
  config.connect_timeout_ms = connect_timeout_ms;
  return Must(RemoteStore::Create(
      {{config, kTestModel, "client"}, address, std::move(pool), max_value_bytes}));
}

// That asks servers for what no RemoteStore would.
inline std::unique_ptr<Node> StartNode(std::shared_ptr<const KvPool> pool,
                                       FetchSource* source = nullptr,
                                       const Config& config = SmallChunks()) {
  Node::Options options;
  options.config = config;
  options.model = kTestModel;
  options.pool = std::move(pool);
  options.source = source;
  return Must(Node::Start(std::move(options)));
}

inline Fields KeyArgs(std::string_view key) {
  return Fields().Set("keys", Must(PackKeys({&key, 1})));
}

// A server with room for 64 pages, one client that puts and one that gets.
class RemotePages : public testing::Test {
 protected:
  static std::vector<std::string> Keys(int64_t count) {
    std::vector<std::string> keys;
    for (int64_t i = 0; i < count; ++i) keys.push_back(absl::StrCat("key", i));
    return keys;
  }
  static std::vector<std::string_view> Views(const std::vector<std::string>& keys) {
    return {keys.begin(), keys.end()};
  }
  static std::shared_ptr<HostStore> MakeHost(int64_t pages) {
    return Must(HostStore::Create({SmallLayout(), pages * SmallLayout().page_bytes(), 0}));
  }
  static testing::AssertionResult AllOk(const std::vector<absl::Status>& statuses) {
    for (const absl::Status& status : statuses) {
      if (!status.ok()) return testing::AssertionFailure() << status;
    }
    return testing::AssertionSuccess();
  }

  std::shared_ptr<KvPool> source_ = MakePatternPool(SmallLayout(), 32, 1);
  std::shared_ptr<KvPool> target_ = MakePatternPool(SmallLayout(), 32, 2);
  std::shared_ptr<HostStore> host_ = MakeHost(64);
  std::unique_ptr<StoreServer> server_ = Serve(host_);
  std::unique_ptr<RemoteStore> writer_ = Dial(server_->address(), source_);
  std::unique_ptr<RemoteStore> reader_ = Dial(server_->address(), target_);
};

}  // namespace kvferry
