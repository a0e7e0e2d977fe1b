#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/config.h"
#include "examples/two_node/support.h"
#include "pool/kv_layout.h"

namespace kvferry::examples {

enum class Role { kPrefill, kDecode };

// The command line.
struct Options {
  Role role = Role::kPrefill;
  HostPort address;  // Of the ticket service: listened on by prefill, connected to by decode.

  KvLayout layout;
  int64_t pool_pages = 128;

  int64_t request_pages = 64;
  int64_t requests = 5;
  Fragmentation fragmentation = Fragmentation::kRand;
  uint64_t seed = 1;
  int64_t layer_delay_ms = 0;
  bool push = false;  // The decode side registers its pages first.

  Config config;
  int64_t timeout_ms = 30000;

  // What endpoints call the model. The layout is in it, so that another one on the other side is
  // refused: its pages would be converted, and here bytes are compared.
  std::string model() const { return "two_node, " + layout.ToString(); }
};

// Parses the command line; on --help or an error prints what is to be said and exits the process.
Options ParseOptions(int argc, char** argv);

}  // namespace kvferry::examples
