#include "python/remote_store.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/config.h"
#include "connector/store/remote_store.h"
#include "connector/store/store_server.h"
#include "pool/kv_pool.h"
#include "python/closable.h"
#include "python/convert.h"
#include "python/gil.h"
#include "python/kv_store.h"
#include "python/status_error.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT(google-build-using-namespace): "name"_a

namespace kvferry {
namespace {

using PyServer = Closable<StoreServer>;

void BindRemote(nb::module_& module) {
  using PyRemoteStore = PyStoreOf<RemoteStore>;
  nb::class_<PyRemoteStore, PyStore>(module, "RemoteStore",
                                     "In another process, which has a StoreServer; see "
                                     "connector/store/remote_store.h.")
      .def(
          "__init__",
          [](PyRemoteStore* self, const std::string& address, const std::shared_ptr<KvPool>& pool,
             const Config& config, const std::string& model, const std::string& name,
             int64_t max_value_bytes) {
            new (self)
                PyRemoteStore(Value(RemoteStore::Create({.endpoint = {config, model, name},
                                                         .address = address,
                                                         .pool = ForAnyThread(pool),
                                                         .max_value_bytes = max_value_bytes})));
          },
          "address"_a, "pool"_a, "config"_a, "model"_a, "name"_a = "",
          "max_value_bytes"_a = 64 << 20, nb::call_guard<ReleasedGil>(),
          "Pages of `pool` are moved in place. Does not wait for the server.");
}

void BindServer(nb::module_& module) {
  nb::class_<PyServer>(module, "StoreServer",
                       "Serves a HostStore, and what lies under it, to other processes; see "
                       "connector/store/store_server.h.")
      .def(
          "__init__",
          [](PyServer* self, const PyStoreOf<HostStore>& host, const Config& config,
             std::string model, std::string name, const PyStoreOf<TieredStore>* tiered) {
            StoreServer::Options options;
            options.endpoint = {config, std::move(model), std::move(name)};
            options.host = std::dynamic_pointer_cast<HostStore>(host.get());
            if (tiered != nullptr) {
              options.tiered = std::dynamic_pointer_cast<TieredStore>(tiered->get());
            }
            const ReleasedGil nogil;
            new (self) PyServer(Value(StoreServer::Create(std::move(options))), "store server");
          },
          "host"_a, "config"_a, "model"_a, "name"_a = "", "tiered"_a = nb::none(),
          "Listens on config.listen_host:listen_port. `tiered` has `host` as its upper tier, and "
          "is "
          "served then; without it `host` alone is.")
      .def_prop_ro("address", [](const PyServer& self) { return self.get()->address(); })
      .def(
          "metrics",
          [](const PyServer& self) { return MetricsDict([&] { return self.get()->Metrics(); }); },
          nb::sig("def metrics(self) -> dict[str, int]"))
      .def("close", &PyServer::Close);
}

}  // namespace

void BindRemoteStore(nb::module_& module) {
  BindRemote(module);
  BindServer(module);
}

}  // namespace kvferry
