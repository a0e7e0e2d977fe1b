// Opens a RocksDbStore while threads are short, and again when they are not, and says each time
// what came of it: a number, the code of its status, and the status.
//
//   kvferry_test_store_opener fail NUMBER PATH      starts of threads from that number on fail
//   kvferry_test_store_opener scarce NUMBER PATH    so many run at once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "absl/strings/numbers.h"
#include "connector/store/rocksdb_store.h"
#include "tests/support/failing_threads.h"

namespace kvferry {
namespace {

void Open(const std::string& path) {
  const absl::Status status = RocksDbStore::Open({.path = path}).status();
  std::printf("%d %s\n", status.raw_code(), status.ToString().c_str());
}

int Run(std::string_view how, int number, const std::string& path) {
  if (how == "fail") {
    const FailingThreads failing(number);
    Open(path);
  } else {
    const ScarceThreads scarce(number);
    Open(path);
  }
  Open(path);
  return 0;
}

}  // namespace
}  // namespace kvferry

// Asked by LeakSanitizer, where it is there: RocksDB forgets what it has made where the system
// refuses it a thread.
// NOLINTNEXTLINE(bugprone-reserved-identifier, misc-use-internal-linkage)
extern "C" const char* __lsan_default_suppressions() { return "leak:librocksdb"; }

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  int number = 0;
  if (argc != 4 || !absl::SimpleAtoi(argv[2], &number)) return 2;
  return kvferry::Run(argv[1], number, argv[3]);
}
