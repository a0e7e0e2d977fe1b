#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "connector/store/kv_store.h"
#include "python/maker.h"
#include "python/status_error.h"

namespace kvferry {

inline constexpr int64_t kStoreTimeoutMs = 5000;
inline constexpr int64_t kMaxStoreTimeoutMs = int64_t{366} * 24 * 3600 * 1000;

// Raises for what is no timeout of a store.
Deadline StoreDeadline(int64_t timeout_ms);
// The bytes of a bytes object, or of a str as UTF-8: valid as long as the object.
std::string_view StoreKey(nanobind::handle key);

// A store that can be closed while calls are under way: it goes with the last of them.
class PyStore {
 public:
  explicit PyStore(std::unique_ptr<KvStore> store) : store_(LeftByForks(std::move(store))) {}
  virtual ~PyStore() = default;

  std::shared_ptr<KvStore> get() const {
    maker_.CheckIsHere("stores");
    const MutexLock lock(&mutex_);
    if (store_ == nullptr) throw StatusError(absl::FailedPreconditionError("store: it is closed"));
    return store_;
  }
  void Close() {
    std::shared_ptr<KvStore> store;
    const MutexLock lock(&mutex_);
    store.swap(store_);
  }

 private:
  const Maker maker_;
  mutable Mutex mutex_;
  std::shared_ptr<KvStore> store_ ABSL_GUARDED_BY(mutex_);
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
