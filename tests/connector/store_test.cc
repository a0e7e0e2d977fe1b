#include "tests/connector/fake_store.h"
#include "tests/connector/store_conformance.h"

namespace kvferry {
namespace {

// Also what the suite itself is tried with.
StoreBackend Fake() {
  return {{"Fake", ""},
          [](const StoreBackend::Size& size) {
            return std::make_shared<FakeStore>(size.max_value_bytes);
          },
          /*pins=*/false};
}

INSTANTIATE_TEST_SUITE_P(Stores, StoreConformance, testing::Values(Fake()), BackendName());

}  // namespace
}  // namespace kvferry
