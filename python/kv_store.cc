#include "python/kv_store.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "connector/store/block_key.h"
#include "connector/store/host_store.h"
#include "connector/store/kv_store.h"
#include "connector/store/tiered_store.h"
#include "connector/store/value_header.h"
#include "python/convert.h"
#include "python/gil.h"
#include "python/status_error.h"
#ifdef KVFERRY_HAVE_REDIS
#include "connector/store/redis_store.h"
#endif
#ifdef KVFERRY_HAVE_ROCKSDB
#include "connector/store/rocksdb_store.h"
#endif

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT(google-build-using-namespace): "name"_a

namespace kvferry {
namespace {

using ByteArray = NumpyArray<uint8_t>;

// Memory that a Python object offers, as bytes. What it cannot do without a copy is an error.
template <typename Array, typename Byte>
class Buffers {
 public:
  // An object, or a list or tuple of them: a value in parts.
  explicit Buffers(nb::handle object) {
    if (!PyList_Check(object.ptr()) && !PyTuple_Check(object.ptr())) {
      Add(object);
      return;
    }
    for (const nb::handle part : object) Add(part);
  }
  std::span<const std::span<Byte>> parts() const { return parts_; }

 private:
  void Add(nb::handle object) {
    Array array;
    if (!nb::try_cast<Array>(object, array, /*convert=*/false)) Refuse(object);
    if (array.device_type() != nb::device::cpu::value) {
      throw StatusError(absl::InvalidArgumentError(
          "store: the memory is not the CPU's; copy it there first, as with .cpu()"));
    }
    if (!IsContiguous(array)) {
      throw StatusError(absl::InvalidArgumentError(
          "store: the memory is not contiguous; make it so first, as with .contiguous()"));
    }
    parts_.push_back({static_cast<Byte*>(array.data()), array.nbytes()});
    arrays_.push_back(std::move(array));
  }

  [[noreturn]] static void Refuse(nb::handle object) {
    const auto type = nb::cast<std::string>(object.type().attr("__name__"));
    const char* kind = std::is_const_v<Byte> ? "no buffer" : "no buffer that can be written";
    throw nb::type_error(
        absl::StrCat("store: ", type, " is ", kind, " (numpy, torch, memoryview, or by DLPack)")
            .c_str());
  }

  static bool IsContiguous(const Array& array) {
    int64_t want = 1;
    for (size_t i = array.ndim(); i-- > 0;) {
      if (array.shape(i) == 0) return true;
      if (array.shape(i) != 1 && array.stride(i) != want) return false;
      want *= static_cast<int64_t>(array.shape(i));
    }
    return true;
  }

  std::vector<Array> arrays_;
  std::vector<std::span<Byte>> parts_;
};
using Input = Buffers<GivenArray<nb::ro>, const std::byte>;
using Output = Buffers<GivenArray<>, std::byte>;

// ---------------------------------------------------------------- stores

std::vector<std::string_view> StoreKeys(const std::vector<nb::object>& keys) {
  std::vector<std::string_view> names;
  names.reserve(keys.size());
  for (const nb::object& key : keys) names.push_back(StoreKey(key));
  return names;
}

// None for each that is OK.
std::vector<nb::object> ErrorsOf(const std::vector<absl::Status>& statuses) {
  std::vector<nb::object> errors;
  errors.reserve(statuses.size());
  for (const absl::Status& status : statuses) errors.push_back(ExceptionOf(status));
  return errors;
}

void Put(const PyStore& self, nb::handle key, nb::handle value, int64_t timeout_ms) {
  const std::string_view name = StoreKey(key);
  const Input input(value);
  const Deadline deadline = StoreDeadline(timeout_ms);
  Check(self.CallWithoutGil(
      [&](KvStore& store) { return store.Put(name, input.parts(), deadline); }));
}

void GetInto(const PyStore& self, nb::handle key, nb::handle out, int64_t timeout_ms) {
  const std::string_view name = StoreKey(key);
  const Output output(out);
  const Deadline deadline = StoreDeadline(timeout_ms);
  Check(self.CallWithoutGil(
      [&](KvStore& store) { return store.Get(name, output.parts(), deadline); }));
}

ByteArray GetBytes(const PyStore& self, nb::handle key, int64_t timeout_ms) {
  const std::string_view name = StoreKey(key);
  const Deadline deadline = StoreDeadline(timeout_ms);
  return ToNumpy<uint8_t>(
      Value(self.CallWithoutGil([&](KvStore& store) { return store.GetBytes(name, deadline); })));
}

template <auto kCall>  // KvStore::Exists or ExistsEach.
auto AskAboutKeys(const PyStore& self, const std::vector<nb::object>& keys, int64_t timeout_ms) {
  const std::vector<std::string_view> names = StoreKeys(keys);
  const Deadline deadline = StoreDeadline(timeout_ms);
  return Value(
      self.CallWithoutGil([&](KvStore& store) { return (store.*kCall)(names, deadline); }));
}

template <absl::Status (KvStore::*kCall)(std::string_view, Deadline)>
void CallWithKey(const PyStore& self, nb::handle key, int64_t timeout_ms) {
  const std::string_view name = StoreKey(key);
  const Deadline deadline = StoreDeadline(timeout_ms);
  Check(self.CallWithoutGil([&](KvStore& store) { return (store.*kCall)(name, deadline); }));
}

using Pairs = std::vector<std::pair<nb::object, nb::object>>;

template <typename Memory, typename Item, auto kCall>
std::vector<nb::object> CallBatch(const PyStore& self, const nb::sequence& items,
                                  int64_t timeout_ms) {
  Pairs pairs;  // Keeps what the names are of.
  for (const nb::handle item : items) {
    if (!PyTuple_Check(item.ptr()) || PyTuple_GET_SIZE(item.ptr()) != 2) {
      throw nb::type_error("store: an item of a batch is a tuple (key, buffer)");
    }
    pairs.emplace_back(item[0], item[1]);
  }
  std::vector<Memory> memory;
  memory.reserve(pairs.size());
  for (const auto& pair : pairs) memory.emplace_back(pair.second);
  std::vector<Item> batch;
  for (size_t i = 0; i < pairs.size(); ++i) {
    batch.push_back({StoreKey(pairs[i].first), memory[i].parts()});
  }
  const Deadline deadline = StoreDeadline(timeout_ms);
  return ErrorsOf(
      self.CallWithoutGil([&](KvStore& store) { return (store.*kCall)(batch, deadline); }));
}

nb::dict StatsDict(const PyStore& self) {
  const auto stats = self.CallWithoutGil([](const KvStore& store) { return store.stats(); });
  nb::dict dict;
  for (const auto& [name, field] : kStatsFields) dict[name] = stats.*field;
  return dict;
}

using PagesCall = std::vector<absl::Status> (KvStore::*)(std::span<const std::string_view>,
                                                         const KvPool&, std::span<const int64_t>,
                                                         Deadline);

template <PagesCall kCall>
std::vector<nb::object> CallPages(const PyStore& self, const std::vector<nb::object>& keys,
                                  const std::shared_ptr<KvPool>& pool,
                                  const std::vector<int64_t>& pages, int64_t timeout_ms) {
  // There may be no key that could have the error.
  if (keys.size() != pages.size()) {
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat("store: ", keys.size(), " keys for ", pages.size(), " pages")));
  }
  const std::vector<std::string_view> names = StoreKeys(keys);
  const Deadline deadline = StoreDeadline(timeout_ms);
  return ErrorsOf(self.CallWithoutGil(
      [&](KvStore& store) { return (store.*kCall)(names, *pool, pages, deadline); }));
}

void BindCommon(nb::module_& module) {
  nb::class_<PyStore>(module, "KvStore",
                      "What every store can do; see connector/store/kv_store.h. Keys are bytes or "
                      "str, values whatever offers contiguous CPU memory, or a list of such parts.")
      .def("put", &Put, "key"_a, "value"_a, "timeout_ms"_a = kStoreTimeoutMs)
      .def("get_into", &GetInto, "key"_a, "out"_a, "timeout_ms"_a = kStoreTimeoutMs,
           "Fills memory of the value's length; what is in it after an error is undefined.")
      .def("get_bytes", &GetBytes, "key"_a, "timeout_ms"_a = kStoreTimeoutMs,
           "The value as an array of uint8.")
      .def("exists", &AskAboutKeys<&KvStore::Exists>, "keys"_a, "timeout_ms"_a = kStoreTimeoutMs,
           "How many of the keys, from the first on, are there without a gap.")
      .def("exists_each", &AskAboutKeys<&KvStore::ExistsEach>, "keys"_a,
           "timeout_ms"_a = kStoreTimeoutMs, "Which of the keys are there: a list of bool.")
      .def("erase", &CallWithKey<&KvStore::Erase>, "key"_a, "timeout_ms"_a = kStoreTimeoutMs)
      .def("pin", &CallWithKey<&KvStore::Pin>, "key"_a, "timeout_ms"_a = kStoreTimeoutMs)
      .def("unpin", &CallWithKey<&KvStore::Unpin>, "key"_a, "timeout_ms"_a = kStoreTimeoutMs)
      .def("put_batch", &CallBatch<Input, KvStore::PutItem, &KvStore::PutBatch>, "items"_a,
           "timeout_ms"_a = kStoreTimeoutMs,
           "Of (key, value); for each None or the error, which is not raised.")
      .def("get_batch", &CallBatch<Output, KvStore::GetItem, &KvStore::GetBatch>, "items"_a,
           "timeout_ms"_a = kStoreTimeoutMs,
           "Of (key, out); for each None or the error, which is not raised.")
      .def("put_pages", &CallPages<&KvStore::PutPages>, "keys"_a, "pool"_a, "pages"_a,
           "timeout_ms"_a = kStoreTimeoutMs,
           "Pages of a pool, one a key; for each None or the error, which is not raised.")
      .def("get_pages", &CallPages<&KvStore::GetPages>, "keys"_a, "pool"_a, "pages"_a,
           "timeout_ms"_a = kStoreTimeoutMs,
           "Fills pages of a pool; for each None or the error, which is not raised.")
      .def("stats", &StatsDict, nb::sig("def stats(self) -> dict[str, int]"))
      .def(
          "close", [](PyStore& self) { self.Close(); },
          "Calls that are under way end as if it were open; later ones fail.")
      .def_prop_ro("name", [](const PyStore& self) { return std::string(self.get()->name()); })
      .def_prop_ro("max_value_bytes",
                   [](const PyStore& self) { return self.get()->max_value_bytes(); });
}

// ---------------------------------------------------------------- backends

void BindHostStore(nb::module_& module) {
  using PyHostStore = PyStoreOf<HostStore>;
  nb::class_<PyHostStore, PyStore>(module, "HostStore",
                                   "In this process's memory; see connector/store/host_store.h.")
      .def(
          "__init__",
          [](PyHostStore* self, int64_t capacity_bytes, int64_t page_bytes, int64_t max_value_bytes,
             const std::optional<KvLayout>& layout) {
            const HostStore::Options options = {
                .layout = layout ? *layout : Value(HostStore::FlatLayout(page_bytes)),
                .capacity_bytes = capacity_bytes,
                .max_value_bytes = max_value_bytes};
            new (self) PyHostStore(Value(HostStore::Create(options)));
          },
          "capacity_bytes"_a, "page_bytes"_a = 16384, "max_value_bytes"_a = 0, nb::kw_only(),
          "layout"_a = nb::none(),
          "A value takes whole pages, of page_bytes or of a layout; max_value_bytes 0 is the "
          "capacity.");
}

#ifdef KVFERRY_HAVE_REDIS
void BindRedisStore(nb::module_& module) {
  using PyRedisStore = PyStoreOf<RedisStore>;
  const RedisStore::Options defaults;
  nb::class_<PyRedisStore, PyStore>(module, "RedisStore",
                                    "In a Redis server; see connector/store/redis_store.h.")
      .def(
          "__init__",
          [](PyRedisStore* self, std::string host, int64_t port, std::string username,
             std::string password, std::string password_file, int64_t database,
             std::string key_prefix, int64_t ttl_ms, int64_t connect_timeout_ms,
             int64_t max_value_bytes, int64_t connections) {
            const RedisStore::Options options = {.host = std::move(host),
                                                 .port = port,
                                                 .username = std::move(username),
                                                 .password = std::move(password),
                                                 .password_file = std::move(password_file),
                                                 .database = database,
                                                 .key_prefix = std::move(key_prefix),
                                                 .ttl_ms = ttl_ms,
                                                 .connect_timeout_ms = connect_timeout_ms,
                                                 .max_value_bytes = max_value_bytes,
                                                 .connections = connections};
            absl::StatusOr<std::unique_ptr<RedisStore>> store;
            {
              const ReleasedGil nogil;  // It reads the password_file, which may be far away.
              store = RedisStore::Create(options);
            }
            new (self) PyRedisStore(Value(std::move(store)));
          },
          "host"_a = defaults.host, "port"_a = defaults.port, "username"_a = "", "password"_a = "",
          "password_file"_a = "", "database"_a = defaults.database,
          "key_prefix"_a = defaults.key_prefix, "ttl_ms"_a = defaults.ttl_ms,
          "connect_timeout_ms"_a = defaults.connect_timeout_ms,
          "max_value_bytes"_a = defaults.max_value_bytes, "connections"_a = defaults.connections);
}
#endif

#ifdef KVFERRY_HAVE_ROCKSDB
void BindRocksDbStore(nb::module_& module) {
  using PyRocksDbStore = PyStoreOf<RocksDbStore>;
  const RocksDbStore::Options defaults;
  nb::class_<PyRocksDbStore, PyStore>(module, "RocksDbStore",
                                      "In files; see connector/store/rocksdb_store.h.")
      .def(
          "__init__",
          [](PyRocksDbStore* self, std::string path, int64_t capacity_bytes,
             int64_t max_value_bytes, bool sync) {
            const RocksDbStore::Options options = {.path = std::move(path),
                                                   .capacity_bytes = capacity_bytes,
                                                   .max_value_bytes = max_value_bytes,
                                                   .sync = sync};
            absl::StatusOr<std::unique_ptr<RocksDbStore>> store;
            {
              const ReleasedGil nogil;
              store = RocksDbStore::Open(options);
            }
            new (self) PyRocksDbStore(Value(std::move(store)));
          },
          "path"_a, "capacity_bytes"_a = defaults.capacity_bytes,
          "max_value_bytes"_a = defaults.max_value_bytes, "sync"_a = defaults.sync);
}
#endif

void BindTieredStore(nb::module_& module) {
  using PyTieredStore = PyStoreOf<TieredStore>;
  nb::class_<PyTieredStore, PyStore>(
      module, "TieredStore",
      "A fast store over a large one; see connector/store/tiered_store.h. Closing it leaves them "
      "open for those who have them.")
      .def(
          "__init__",
          [](PyTieredStore* self, const PyStore& upper, const PyStore& lower) {
            new (self) PyTieredStore(Value(TieredStore::Create(upper.get(), lower.get())));
          },
          "upper"_a, "lower"_a);
}

// ---------------------------------------------------------------- keys and headers

nb::bytes ToBytes(std::string_view text) { return nb::bytes(text.data(), text.size()); }

std::vector<nb::bytes> MakeBlockKeys(const IntegersInput& tokens, int64_t page_size,
                                     const std::string& model, const KvLayout& layout,
                                     int64_t partition, const std::string& salt,
                                     std::optional<nb::bytes> parent) {
  const KeyScope scope = {.model = model, .layout = layout, .partition = partition, .salt = salt};
  std::optional<std::string_view> parent_key;
  if (parent) parent_key.emplace(parent->c_str(), parent->size());
  std::vector<nb::bytes> keys;
  for (const std::string& key :
       Value(BlockKeys(SlotList(tokens, "token"), page_size, scope, parent_key))) {
    keys.push_back(ToBytes(key));
  }
  return keys;
}

nb::bytes HeaderOf(nb::handle key, nb::handle value) {
  const std::string_view name = StoreKey(key);
  const Input input(value);
  ValueHeader header;
  {
    const ReleasedGil nogil;
    header = MakeValueHeader(name, input.parts());
  }
  return nb::bytes(header.data(), header.size());
}

bool IsWhole(nb::handle key, nb::handle header_and_value) {
  const std::string_view name = StoreKey(key);
  const Input input(header_and_value);
  const ReleasedGil nogil;
  return input.parts().size() == 1 && CheckedValue(name, input.parts()[0]).has_value();
}

}  // namespace

Deadline StoreDeadline(int64_t timeout_ms) {
  if (timeout_ms >= 0 && timeout_ms <= kMaxStoreTimeoutMs) return DeadlineInMs(timeout_ms);
  throw StatusError(absl::InvalidArgumentError(
      absl::StrCat("timeout_ms is ", timeout_ms, " but must be 0 to ", kMaxStoreTimeoutMs)));
}

// The bytes of a bytes object, or of a str as UTF-8: valid as long as the object.
std::string_view StoreKey(nb::handle key) {
  if (PyBytes_Check(key.ptr())) {
    return {PyBytes_AS_STRING(key.ptr()), static_cast<size_t>(PyBytes_GET_SIZE(key.ptr()))};
  }
  if (!PyUnicode_Check(key.ptr())) {
    const auto type = nb::cast<std::string>(key.type().attr("__name__"));
    throw nb::type_error(absl::StrCat("a key is bytes or str, not ", type).c_str());
  }
  Py_ssize_t length = 0;
  const char* text = PyUnicode_AsUTF8AndSize(key.ptr(), &length);
  if (text == nullptr) throw nb::python_error();
  return {text, static_cast<size_t>(length)};
}

void BindKvStore(nb::module_& module) {
  BindCommon(module);
  BindHostStore(module);
  BindTieredStore(module);
#ifdef KVFERRY_HAVE_REDIS
  BindRedisStore(module);
#endif
#ifdef KVFERRY_HAVE_ROCKSDB
  BindRocksDbStore(module);
#endif
  module.def("block_keys", &MakeBlockKeys, "tokens"_a, "page_size"_a, nb::kw_only(), "model"_a,
             "layout"_a, "partition"_a = 0, "salt"_a = "", "parent"_a = nb::none(),
             "Keys of the full blocks that the tokens begin with, 32 bytes each; see "
             "connector/store/block_key.h.");
  module.def("value_header", &HeaderOf, "key"_a, "value"_a,
             "What stores put in front of a value; see connector/store/value_header.h.");
  module.def("value_is_whole", &IsWhole, "key"_a, "header_and_value"_a,
             "Whether it is a header and the value that it was made for.");
}

}  // namespace kvferry
