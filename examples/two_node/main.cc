// The way of a request without an engine around it: a prefill process and a decode process, a pool
// in each, and kvferry in between. README.md shows how to run it.

#include <cstdio>
#include <string>

#include "examples/two_node/options.h"
#include "examples/two_node/roles.h"

int main(int argc, char** argv) {
  using kvferry::examples::Options;
  using kvferry::examples::Role;
  const Options options = kvferry::examples::ParseOptions(argc, argv);
  const bool prefill = options.role == Role::kPrefill;
  const absl::Status status =
      prefill ? kvferry::examples::RunPrefill(options) : kvferry::examples::RunDecode(options);
  if (status.ok()) return 0;
  std::fprintf(stderr, "two_node %s: %s\n", prefill ? "prefill" : "decode",
               status.ToString().c_str());
  return 1;
}
