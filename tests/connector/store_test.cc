#include "connector/store/host_store.h"
#include "connector/store/tiered_store.h"
#include "tests/connector/fake_store.h"
#include "tests/connector/store_conformance.h"

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

}  // namespace
}  // namespace kvferry
