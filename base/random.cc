#include "base/random.h"

#include <sys/random.h>

#include <random>

namespace kvferry {

uint64_t RandomId() {
  uint64_t id = 0;
  while (id == 0) {
    if (getrandom(&id, sizeof(id), 0) != static_cast<ssize_t>(sizeof(id))) {
      // Only a kernel before 3.17 or a signal at boot gets here; std::random_device is as good
      // then.
      std::random_device device;
      id = (static_cast<uint64_t>(device()) << 32) | device();
    }
  }
  return id;
}

std::string RandomBytes16() {
  const uint64_t words[] = {RandomId(), RandomId()};
  return {reinterpret_cast<const char*>(words), sizeof(words)};
}

}  // namespace kvferry
