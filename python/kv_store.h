#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include "base/clock.h"
#include "connector/store/kv_store.h"
#include "python/closable.h"

namespace kvferry {

inline constexpr int64_t kStoreTimeoutMs = 5000;
inline constexpr int64_t kMaxStoreTimeoutMs = int64_t{366} * 24 * 3600 * 1000;

// Raises for what is no timeout of a store.
Deadline StoreDeadline(int64_t timeout_ms);
// The bytes of a bytes object, or of a str as UTF-8: valid as long as the object.
std::string_view StoreKey(nanobind::handle key);

// It goes with the last of the calls that are under way when it is closed.
class PyStore : public Closable<KvStore, /*waits_for_calls=*/false> {
 public:
  explicit PyStore(std::unique_ptr<KvStore> store) : Closable(std::move(store), "store") {}
  virtual ~PyStore() = default;
};

// Types of their own in Python.
template <typename Store>
class PyStoreOf : public PyStore {
 public:
  using PyStore::PyStore;
};

// HostStore and what other stores were built, block_keys, and the header of values.
void BindKvStore(nanobind::module_& module);

}  // namespace kvferry
