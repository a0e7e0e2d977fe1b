#include "examples/two_node/layout_flags.h"

#include "base/status.h"

namespace kvferry::examples {

void LayoutFlags::AddTo(CLI::App* app) {
  const std::string group = "KV layout, the same on both sides";
  app->add_option("--layout", layout, "mha: K and V apart; fused: side by side; mla: latent")
      ->check(CLI::IsMember({"mha", "fused", "mla"}))
      ->group(group);
  app->add_option("--layers", layers, "layers")->group(group);
  app->add_option("--page-size", page_size, "tokens in a page")->group(group);
  app->add_option("--kv-heads", kv_heads, "KV heads (mha, fused)")->group(group);
  app->add_option("--head-dim", head_dim, "values in a head (mha, fused)")->group(group);
  app->add_option("--latent-dim", latent_dim, "values of a token's latent (mla)")->group(group);
  app->add_option("--dtype", dtype, "float32, float16, bfloat16, float8_e4m3fn, ...")->group(group);
}

absl::StatusOr<KvLayout> LayoutFlags::Make() const {
  KVFERRY_ASSIGN_OR_RETURN(const DType type, ParseDType(dtype));
  const auto make = layout == "fused" ? &KvLayout::Fused : &KvLayout::Mha;
  const KvLayout made = layout == "mla" ? KvLayout::Mla(layers, page_size, latent_dim, type)
                                        : make(layers, page_size, kv_heads, head_dim, type);
  KVFERRY_RETURN_IF_ERROR(made.Validate());
  return made;
}

}  // namespace kvferry::examples
