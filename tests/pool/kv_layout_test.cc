#include "pool/kv_layout.h"

#include <gtest/gtest.h>

#include <functional>

#include "tests/support/status.h"

namespace kvferry {
namespace {

TEST(Layouts, Factories) {
  const KvLayout mha = KvLayout::Mha(32, 16, 8, 128, DType::kBFloat16);
  EXPECT_TRUE(IsOk(mha.Validate()));
  EXPECT_EQ(mha.num_tensors(), 2);
  EXPECT_EQ(mha.num_buffers(), 64);
  EXPECT_EQ(mha.item_bytes(0), 16 * 8 * 128 * 2);
  EXPECT_EQ(mha.layer_page_bytes(), 2 * 16 * 8 * 128 * 2);
  EXPECT_EQ(mha.page_bytes(), 32 * 2 * 16 * 8 * 128 * 2);
  EXPECT_EQ(mha.page_format, "NHD");

  const KvLayout fused = KvLayout::Fused(30, 16, 3, 64, DType::kFloat32);
  EXPECT_TRUE(IsOk(fused.Validate()));
  EXPECT_EQ(fused.num_tensors(), 1);
  EXPECT_EQ(fused.item_bytes(0), 16 * 3 * 2 * 64 * 4);
  EXPECT_EQ(fused.page_format, "HND");

  const KvLayout mla = KvLayout::Mla(61, 64, 576, DType::kFloat8E4M3);
  EXPECT_TRUE(IsOk(mla.Validate()));
  EXPECT_EQ(mla.num_tensors(), 1);
  EXPECT_EQ(mla.item_bytes(0), 64 * 576);
}

TEST(Layouts, BuffersAreListedTensorByTensor) {
  const KvLayout mha = KvLayout::Mha(3, 16, 8, 128, DType::kBFloat16);
  EXPECT_EQ(mha.buffer_index(0, 0), 0);
  EXPECT_EQ(mha.buffer_index(2, 0), 2);
  EXPECT_EQ(mha.buffer_index(0, 1), 3);
  EXPECT_EQ(mha.buffer_index(2, 1), 5);
}

TEST(Layouts, TensorsOfDifferentSizes) {
  const KvLayout layout{2, 4, DType::kFloat16, "NHD", {{"k", 2, 8}, {"v", 2, 4}, {"scale", 1, 1}}};
  EXPECT_EQ(layout.item_bytes(0), 128);
  EXPECT_EQ(layout.item_bytes(1), 64);
  EXPECT_EQ(layout.item_bytes(2), 8);
  EXPECT_EQ(layout.layer_page_bytes(), 200);
  EXPECT_EQ(layout.page_bytes(), 400);
}

TEST(Layouts, ATensorMayHaveItsOwnDtype) {
  KvLayout layout = KvLayout::Mla(2, 4, 16, DType::kBFloat16);
  layout.tensors.push_back({"index_scale", 1, 1, DType::kFloat32});
  EXPECT_TRUE(IsOk(layout.Validate()));
  EXPECT_EQ(layout.item_bytes(0), 4 * 16 * 2);
  EXPECT_EQ(layout.item_bytes(1), 4 * 4);
  KvLayout other = layout;
  other.tensors[1].dtype = std::nullopt;
  EXPECT_EQ(layout.FirstDifference(other),
            "tensors: latent[1 heads x 16]+index_scale[1 heads x 1] float32 here, "
            "latent[1 heads x 16]+index_scale[1 heads x 1] there");
  layout.tensors[1].dtype = static_cast<DType>(200);
  EXPECT_TRUE(
      Fails(layout.Validate(), absl::StatusCode::kInvalidArgument, "dtype of tensor index_scale"));
}

using Change = std::function<void(KvLayout&)>;

TEST(Layouts, ValidateNamesTheField) {
  const std::vector<std::pair<Change, std::string>> bad = {
      {[](KvLayout& l) { l.num_layers = 0; }, "num_layers is 0"},
      {[](KvLayout& l) { l.num_layers = KvLayout::kMaxLayers + 1; }, "num_layers is 4097"},
      {[](KvLayout& l) { l.page_size = -1; }, "page_size is -1"},
      {[](KvLayout& l) { l.page_size = KvLayout::kMaxPageSize + 1; }, "page_size"},
      {[](KvLayout& l) { l.tensors.clear(); }, "number of tensors is 0"},
      {[](KvLayout& l) {
         l.tensors.resize(17, {"t", 1, 1});
       },
       "number of tensors is 17"},
      {[](KvLayout& l) { l.page_format = ""; }, "page_format has 0 bytes"},
      {[](KvLayout& l) { l.page_format.assign(65, 'x'); }, "page_format has 65 bytes"},
      {[](KvLayout& l) { l.tensors[0].name = ""; }, "tensor name"},
      {[](KvLayout& l) { l.tensors[1].num_heads = 0; }, "num_heads is 0"},
      {[](KvLayout& l) { l.tensors[1].num_heads = KvLayout::kMaxHeads + 1; }, "num_heads"},
      {[](KvLayout& l) { l.tensors[1].head_dim = 0; }, "head_dim is 0"},
      {[](KvLayout& l) { l.tensors[1].head_dim = INT64_MAX; }, "head_dim"},
      {[](KvLayout& l) { l.dtype = static_cast<DType>(200); }, "dtype is not a known one"},
      {[](KvLayout& l) {
         l.page_size = KvLayout::kMaxPageSize;
         l.tensors[0] = {"big", KvLayout::kMaxHeads, KvLayout::kMaxHeadDim};
       },
       "bytes of a page of tensor big"},
  };
  for (const auto& [change, part] : bad) {
    KvLayout layout = KvLayout::Mha(4, 16, 2, 32, DType::kBFloat16);
    change(layout);
    EXPECT_TRUE(Fails(layout.Validate(), absl::StatusCode::kInvalidArgument, part));
  }
}

TEST(Layouts, HalvesThatAreTooLargeAreRefusedAsSuch) {
  for (const int64_t dim : {int64_t{1} << 62, INT64_MAX, INT64_MIN, INT64_MIN + 4, int64_t{0}}) {
    EXPECT_TRUE(Fails(KvLayout::Fused(1, 16, 1, dim, DType::kUint8).Validate(),
                      absl::StatusCode::kInvalidArgument, "head_dim is"))
        << dim;
  }
}

TEST(Layouts, LimitsThemselvesAreLegal) {
  KvLayout layout =
      KvLayout::Mha(KvLayout::kMaxLayers, KvLayout::kMaxPageSize, 1, 1, DType::kUint8);
  layout.page_format.assign(64, 'x');
  layout.tensors.assign(16, {"t", 1, 4096});  // 2^20 x 2^12 = 2^32 bytes.
  EXPECT_TRUE(IsOk(layout.Validate()));
}

TEST(Layouts, FirstDifferenceNamesFieldAndBothValues) {
  const KvLayout here = KvLayout::Mha(4, 16, 2, 32, DType::kBFloat16);
  EXPECT_EQ(here.FirstDifference(here), "");
  const std::vector<std::pair<Change, std::string>> differences = {
      {[](KvLayout& l) { l.num_layers = 5; }, "num_layers: 4 here, 5 there"},
      {[](KvLayout& l) { l.page_size = 32; }, "page_size: 16 here, 32 there"},
      {[](KvLayout& l) { l.dtype = DType::kFloat32; }, "dtype: bfloat16 here, float32 there"},
      {[](KvLayout& l) { l.page_format = "HND"; }, "page_format: NHD here, HND there"},
      {[](KvLayout& l) { l.tensors.pop_back(); },
       "tensors: k[2 heads x 32]+v[2 heads x 32] here, k[2 heads x 32] there"},
      {[](KvLayout& l) { l.tensors[1].name = "w"; },
       "tensors: k[2 heads x 32]+v[2 heads x 32] here, k[2 heads x 32]+w[2 heads x 32] there"},
  };
  for (const auto& [change, want] : differences) {
    KvLayout there = here;
    change(there);
    EXPECT_EQ(here.FirstDifference(there), want);
    EXPECT_NE(here, there);
  }
}

TEST(DTypes, NamesRoundTrip) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
                            DType::kFloat8E5M2, DType::kUint8}) {
    const std::string name(DTypeName(dtype));
    EXPECT_EQ(Must(ParseDType(name)), dtype);
    EXPECT_EQ(Must(ParseDType("torch." + name)), dtype);
    EXPECT_GT(DTypeBytes(dtype), 0);
  }
  EXPECT_TRUE(Fails(ParseDType("bf16"), absl::StatusCode::kInvalidArgument, "'bf16'", "bfloat16",
                    "float8_e4m3fn"));
}

}  // namespace
}  // namespace kvferry
