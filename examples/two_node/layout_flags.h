#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "pool/kv_layout.h"

namespace kvferry::examples {

// A KV layout on the command line.
struct LayoutFlags {
  std::string layout = "mha";
  int64_t layers = 16;
  int64_t page_size = 16;
  int64_t kv_heads = 8;
  int64_t head_dim = 128;
  int64_t latent_dim = 576;
  std::string dtype = "bfloat16";

  void AddTo(CLI::App* app);
  // INVALID_ARGUMENT names the value that no layout can have.
  absl::StatusOr<KvLayout> Make() const;
};

}  // namespace kvferry::examples
