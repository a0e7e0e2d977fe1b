// Puts WholeValue()s into a RocksDbStore until it is killed: keys 0 to 19 in turn, versions 1, 2,
// ... Says "open" first, then the version of each put that has returned, a line each. Says "error"
// and the status, and ends, when something fails.
//
//   kvferry_test_store_writer PATH

#include <cstdio>
#include <string>

#include "connector/store/rocksdb_store.h"
#include "tests/connector/store_values.h"

namespace kvferry {
namespace {

int Fail(const absl::Status& status) {
  std::printf("error %s\n", status.ToString().c_str());
  return 1;
}

int Run(const std::string& path) {
  const auto store = RocksDbStore::Open({.path = path});
  if (!store.ok()) return Fail(store.status());
  std::puts("open");
  for (uint64_t version = 1;; ++version) {
    const uint64_t key = version % 20;
    const absl::Status put = Put(**store, std::to_string(key), WholeValue(key, version));
    if (!put.ok()) return Fail(put);
    std::printf("%llu\n", static_cast<unsigned long long>(version));
  }
}

}  // namespace
}  // namespace kvferry

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  return argc == 2 ? kvferry::Run(argv[1]) : 2;
}
