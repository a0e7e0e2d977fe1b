#include "python/token_pools.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/thread_pool.h"
#include "pool/block_cache.h"
#include "pool/block_quant.h"
#include "pool/host_kv_pool.h"
#include "pool/token_kv_pool.h"
#include "python/convert.h"
#include "python/gil.h"
#include "python/heard_signals.h"
#include "python/pool_memory.h"
#include "python/rows.h"
#include "python/status_error.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT(google-build-using-namespace): "name"_a

namespace kvferry {
namespace {

using PoolPtr = std::shared_ptr<TokenKvPool>;
using HostPtr = std::shared_ptr<HostKvPool>;
using CachePtr = std::shared_ptr<BlockCache>;
using ByteArray = NumpyArray<uint8_t>;
using ByteInput = GivenArray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// ---------------------------------------------------------------- arrays and views

// Without a copy: of memory that `owner` has.
template <typename Owner>
DlpackArray ArrayOf(std::byte* data, DType dtype, const std::vector<ArrayDim>& dims,
                    const Owner& owner) {
  std::vector<size_t> sizes;
  std::vector<int64_t> strides;
  for (const ArrayDim& dim : dims) {
    sizes.push_back(static_cast<size_t>(dim.size));
    strides.push_back(dim.stride / DTypeBytes(dtype));
  }
  const DlpackDevice device = DeviceOf(owner->memory());
  return DlpackArray(data, sizes.size(), sizes.data(), KeepAlive(owner), strides.data(),
                     ToDlpack(dtype), device.type, device.id);
}

// [num_slots, heads, dim] where slots lie evenly, else [pages, page_size, heads, dim].
template <typename Owner>
DlpackArray SeenFrom(const TokenView& view, const Owner& owner) {
  std::vector<ArrayDim> dims = {{view.num_slots, view.token_stride},
                                {view.num_heads, view.head_stride},
                                {view.head_dim, view.value_stride}};
  if (view.page_stride != view.page_size * view.token_stride) {
    dims[0].size = view.page_size;
    dims.insert(dims.begin(), ArrayDim{view.num_slots / view.page_size, view.page_stride});
  }
  return ArrayOf(view.data, view.dtype, dims, owner);
}

std::span<const std::byte> Bytes(const ByteInput& array) {
  return {reinterpret_cast<const std::byte*>(array.data()), array.shape(0)};
}

// ---------------------------------------------------------------- TokenKvPool

void SetKv(TokenKvPool& self, int64_t layer, const SlotsInput& slots,
           const std::vector<RowInput>& rows, const std::vector<float>& scales) {
  CheckIndex("layer", layer, self.layout().num_layers);
  const GivenRows given = RowsFor(self.Parts(layer), slots, rows, self.memory());
  const ReleasedGil nogil;
  Check(self.Set(layer, SlotList(slots), given.views(), scales));
}

ByteArray GetFlat(const TokenKvPool& self, const SlotInput& slots, std::optional<int64_t> layer) {
  const auto count = static_cast<int64_t>(slots.shape(0));
  const int64_t size = layer ? self.layer_flat_bytes(count) : self.flat_bytes(count);
  OwnedArray<uint8_t> flat(static_cast<size_t>(size));
  const auto bytes = std::as_writable_bytes(flat.values());
  {
    const ReleasedGil nogil;
    Check(layer ? self.ReadFlatLayer(*layer, SlotList(slots), bytes)
                : self.ReadFlat(SlotList(slots), bytes));
  }
  return std::move(flat).ToNumpy({bytes.size()});
}

void SetFlat(TokenKvPool& self, const SlotInput& slots, const ByteInput& flat,
             std::optional<int64_t> layer) {
  const ReleasedGil nogil;
  Check(layer ? self.WriteFlatLayer(*layer, SlotList(slots), Bytes(flat))
              : self.WriteFlat(SlotList(slots), Bytes(flat)));
}

void CopyFrom(TokenKvPool& self, const TokenKvPool& source, const SlotInput& source_slots,
              const SlotInput& slots, std::optional<int64_t> layer) {
  const ReleasedGil nogil;
  Check(layer ? self.CopyLayerFrom(source, *layer, SlotList(source_slots), SlotList(slots))
              : self.CopyFrom(source, SlotList(source_slots), SlotList(slots)));
}

BlockFormat ParseBlockFormat(const std::string& name) {
  if (name == "mxfp4") return BlockFormat::kMxfp4;
  if (name == "fp8_block128") return BlockFormat::kFp8Block128;
  throw StatusError(absl::InvalidArgumentError(
      absl::StrCat("block format '", name, "' is not one of mxfp4, fp8_block128")));
}

// Codes in `tensor`, scales in the next one.
void CheckCodes(const TokenKvPool& self, int64_t layer, int64_t tensor) {
  CheckIndex("layer", layer, self.layout().num_layers);
  CheckIndex("tensor", tensor, self.layout().num_tensors() - 1);
}

void SetQuantized(TokenKvPool& self, const std::string& format, int64_t layer, int64_t tensor,
                  const SlotsInput& slots, const RowInput& rows) {
  CheckCodes(self, layer, tensor);
  const BlockFormat block_format = ParseBlockFormat(format);
  const TokenView codes = self.view(layer, tensor);
  const int64_t head_dim = codes.head_dim * 8 / InfoOf(block_format).codes_bits;
  GivenRows given;
  given.Add(rows, static_cast<int64_t>(slots.size()), codes.num_heads, head_dim, self.memory());
  const ReleasedGil nogil;
  Check(StoreQuantized(block_format, given.views()[0], codes, self.view(layer, tensor + 1),
                       SlotList(slots), self.memory(), self.threads()));
}

NumpyArray<float, 3> GetQuantized(const TokenKvPool& self, const std::string& format, int64_t layer,
                                  int64_t tensor, const SlotInput& slots) {
  CheckCodes(self, layer, tensor);
  const BlockFormat block_format = ParseBlockFormat(format);
  const TokenView codes = self.view(layer, tensor);
  const size_t head_dim = codes.head_dim * 8 / InfoOf(block_format).codes_bits;
  const size_t num_heads = codes.num_heads, count = slots.shape(0);
  OwnedArray<float> owned(count * num_heads * head_dim);
  auto* const data = reinterpret_cast<std::byte*>(owned.values().data());
  const TokenView values = TokenView::Packed(data, DType::kFloat32, static_cast<int64_t>(count),
                                             codes.num_heads, static_cast<int64_t>(head_dim));
  {
    const ReleasedGil nogil;
    Check(LoadQuantized(block_format, codes, self.view(layer, tensor + 1), SlotList(slots), values,
                        self.memory(), self.threads()));
  }
  return std::move(owned).ToNumpy({count, num_heads, head_dim});
}

template <absl::StatusOr<TokenView> (TokenKvPool::*kView)(int64_t, Deadline)>
DlpackArray BufferWhenReady(const PoolPtr& self, int64_t layer, int64_t timeout_ms) {
  return SeenFrom(
      Value(WaitWithoutGil([&] { return (self.get()->*kView)(layer, DeadlineInMs(timeout_ms)); })),
      self);
}

void BindLayerCounter(nb::module_& module) {
  nb::class_<LayerCounter>(module, "LayerCounter",
                           "Which layers are loaded; see pool/layer_counter.h.")
      .def(
          "begin", [](LayerCounter& self) { return Value(self.Begin()); },
          "A load begins: no layer is ready. Gives its number.")
      .def(
          "ready",
          [](LayerCounter& self, int64_t load, int64_t count) { Check(self.Ready(load, count)); },
          "load"_a, "count"_a,
          "Of that load the first `count` layers are ready. FailedPrecondition: it was given up.")
      .def(
          "fail",
          [](LayerCounter& self, int64_t load, const std::string& why) {
            self.Fail(load, absl::AbortedError(why));
          },
          "load"_a, "why"_a,
          "That load ends; whoever waits for a layer that is not ready gets Aborted.")
      .def(
          "wait",
          [](LayerCounter& self, int64_t layer, int64_t timeout_ms) {
            Check(WaitWithoutGil([&] { return self.WaitFor(layer, DeadlineInMs(timeout_ms)); }));
          },
          "layer"_a, "timeout_ms"_a)
      .def_prop_ro("last_load", &LayerCounter::last_load,
                   "What begin() gave last, 0 before: if its loader is gone, fail() it.")
      .def_prop_ro("num_ready", &LayerCounter::ready);
}

void BindTokenKvPool(nb::module_& module) {
  nb::class_<TokenKvPool>(module, "TokenKvPool",
                          "Keys and values by token slot; see pool/token_kv_pool.h.")
      .def_static(
          "create",
          [](const KvLayout& layout, int64_t num_tokens, int64_t latent_value_dim,
             const std::string& memory) {
            const std::shared_ptr<const PoolMemory> lies_in = MemoryNamed(memory);
            return Value(TokenKvPool::Create(layout, num_tokens, latent_value_dim, lies_in));
          },
          "layout"_a, "num_tokens"_a, "latent_value_dim"_a = 0, nb::kw_only(), "memory"_a = "host",
          nb::call_guard<ReleasedGil>(),
          "Zeroed memory for num_tokens slots, and page 0 for padding: the host's, or a GPU's as "
          "'cuda:0'.")
      .def_static(
          "over",
          [](std::shared_ptr<KvPool> pool, int64_t latent_value_dim) {
            return Value(TokenKvPool::Over(std::move(pool), latent_value_dim));
          },
          "pool"_a, "latent_value_dim"_a = 0, "On the memory of a KvPool, an engine's for example.")
      .def("use_threads", &TokenKvPool::UseThreads, "threads"_a.none(),
           "Threads that help with everything copied from now on.")
      .def_prop_ro("layout", &TokenKvPool::layout)
      .def_prop_ro("pages", &TokenKvPool::pages, "The KvPool with the memory.")
      .def_prop_ro(
          "memory", [](const TokenKvPool& self) { return NameOf(self.memory()); },
          "Where it lies, as for create().")
      .def_prop_ro("num_tokens", &TokenKvPool::num_tokens)
      .def_prop_ro("num_slots", &TokenKvPool::num_slots, "Those of page 0 included.")
      .def_prop_ro("layers", &TokenKvPool::layers, nb::rv_policy::reference_internal)
      .def(
          "tensor_bytes",
          [](const TokenKvPool& self, int64_t tensor) {
            CheckIndex("tensor", tensor, self.layout().num_tensors());
            return self.tensor_bytes(tensor);
          },
          "tensor"_a, "Over all layers.")
      .def(
          "buffer",
          [](const PoolPtr& self, int64_t layer, int64_t tensor) {
            CheckIndex("layer", layer, self->layout().num_layers);
            CheckIndex("tensor", tensor, self->layout().num_tensors());
            return SeenFrom(self->view(layer, tensor), self);
          },
          "layer"_a, "tensor"_a,
          "A tensor of a layer without a copy, for torch.from_dlpack and numpy.from_dlpack: "
          "[num_slots, heads, dim], or [pages, page_size, heads, dim] where pages are HND, of "
          "several tokens and heads. fp8 is seen as uint8.")
      .def("key_buffer", &BufferWhenReady<&TokenKvPool::Key>, "layer"_a, "timeout_ms"_a = 30000,
           "The keys of a layer, as buffer(), once `layers` says that they are loaded.")
      .def("value_buffer", &BufferWhenReady<&TokenKvPool::Value>, "layer"_a, "timeout_ms"_a = 30000)
      .def("set_kv_buffer", &SetKv, "layer"_a, "slots"_a, "rows"_a,
           "scales"_a = std::vector<float>(),
           "Stores rows[part] ([slots, heads, dim]) in `slots`, with any arrangement of leading "
           "dimensions on either side, such as [batch, tokens], divided "
           "by scales[part] and cast. Parts: key and value, or the latent, then further tensors. "
           "Views of a fused QKV are read where they lie. A GPU's pool also takes rows of that "
           "GPU, which must have been computed.")
      .def("get_flat_data", &GetFlat, "slots"_a, "layer"_a = nb::none(),
           "Stored bytes of these slots, [tensors, layers, slots, heads, dim], or of one layer.")
      .def("set_flat_data", &SetFlat, "slots"_a, "flat"_a.noconvert(), "layer"_a = nb::none())
      .def("copy_from", &CopyFrom, "source"_a, "source_slots"_a, "slots"_a, "layer"_a = nb::none(),
           "Rows of another pool, or of this one, converted where dtypes or page formats differ. "
           "All are "
           "read before one is written.")
      .def("set_quantized", &SetQuantized, "format"_a, "layer"_a, "tensor"_a, "slots"_a, "rows"_a,
           "Quantises rows into `tensor` and their scales into the next one; format: mxfp4 or "
           "fp8_block128.")
      .def("get_quantized", &GetQuantized, "format"_a, "layer"_a, "tensor"_a, "slots"_a,
           "The values of quantised rows as float32.");
  module.def(
      "quantized_tensors",
      [](const std::string& format, const std::string& name, int64_t num_heads, int64_t head_dim) {
        std::vector<std::tuple<std::string, int64_t, int64_t, std::string>> tensors;
        for (const KvTensor& tensor :
             Value(QuantizedTensors(ParseBlockFormat(format), name, num_heads, head_dim))) {
          tensors.emplace_back(tensor.name, tensor.num_heads, tensor.head_dim,
                               DTypeName(*tensor.dtype));
        }
        return tensors;
      },
      "format"_a, "name"_a, "num_heads"_a, "head_dim"_a,
      "Tensors of a KvLayout for quantised rows: the codes, and their scales.");
}

// ---------------------------------------------------------------- HostKvPool

template <absl::Status (HostKvPool::*kCall)(std::span<const int32_t>)>
void CallOnSlots(HostKvPool& self, const SlotInput& slots) {
  Check((self.*kCall)(SlotList(slots)));
}

void BindHostKvPool(nb::module_& module) {
  nb::class_<HostKvPool>(module, "HostKvPool",
                         "The host tier of a TokenKvPool; see pool/host_kv_pool.h.")
      .def_static(
          "create",
          [](PoolPtr device, double ratio, int64_t bytes, int64_t keep_free_bytes) {
            return Value(HostKvPool::Create(
                std::move(device), {.ratio_to_device = ratio, .bytes = bytes}, keep_free_bytes));
          },
          "device"_a, nb::kw_only(), "ratio"_a = 0.0, "bytes"_a = 0,
          "keep_free_bytes"_a = HostKvPool::kDefaultKeepFreeBytes, nb::call_guard<ReleasedGil>(),
          "Sized by its ratio to the device pool or in bytes.")
      .def_prop_ro("host", &HostKvPool::host, "The TokenKvPool with the memory.")
      .def_prop_ro("num_tokens", &HostKvPool::num_tokens)
      .def_prop_ro("bytes_per_token", &HostKvPool::bytes_per_token)
      .def_prop_ro("available_size", &HostKvPool::num_free, "In tokens.")
      .def(
          "alloc",
          [](HostKvPool& self, int64_t num_tokens) -> std::optional<Int32Array> {
            return ArrayOrNone(self.Allocate(num_tokens));
          },
          "num_tokens"_a, "Reserved slots in whole pages, None when fewer are free.")
      .def("free", &CallOnSlots<&HostKvPool::Free>, "slots"_a, "All slots of each of their pages.")
      .def("clear", [](HostKvPool& self) { Check(self.Clear()); })
      .def("protect_write", &CallOnSlots<&HostKvPool::ProtectWrite>, "slots"_a)
      .def("protect_load", &CallOnSlots<&HostKvPool::ProtectLoad>, "slots"_a)
      .def("complete_io", &CallOnSlots<&HostKvPool::CompleteIo>, "slots"_a)
      .def("mark_backup", &CallOnSlots<&HostKvPool::MarkBackup>, "slots"_a)
      .def("mark_synced", &CallOnSlots<&HostKvPool::MarkSynced>, "slots"_a)
      .def(
          "state_of",
          [](const HostKvPool& self, const SlotInput& slots) {
            return std::string(HostSlotStateName(Value(self.StateOf(SlotList(slots)))));
          },
          "slots"_a, "The state that all these slots are in.")
      .def(
          "back_up",
          [](HostKvPool& self, const SlotInput& device_slots, const SlotInput& host_slots) {
            const ReleasedGil nogil;
            Check(self.BackUp(SlotList(device_slots), SlotList(host_slots)));
          },
          "device_slots"_a, "host_slots"_a,
          "Rows of these device slots to reserved host slots, which are synced then.")
      .def(
          "load",
          [](HostKvPool& self, const SlotInput& host_slots, const SlotInput& device_slots) {
            const ReleasedGil nogil;
            Check(self.Load(SlotList(host_slots), SlotList(device_slots)));
          },
          "host_slots"_a, "device_slots"_a,
          "Rows of backup host slots, which are synced then, to these device slots: layer by "
          "layer, counting the device pool's `layers` up. FailedPrecondition while another load is "
          "under way.");
}

// ---------------------------------------------------------------- BlockCache

constexpr std::array<const char*, 5> kDimNames = {"kv", "block", "token", "head", "value"};

std::array<BlockDim, 5> ParseOrder(const std::vector<std::string>& names) {
  std::array<BlockDim, 5> order{};
  bool known = names.size() == order.size();
  for (size_t i = 0; known && i < order.size(); ++i) {
    const auto* found = std::find(kDimNames.begin(), kDimNames.end(), names[i]);
    known = found != kDimNames.end();
    if (known) order[i] = static_cast<BlockDim>(found - kDimNames.begin());
  }
  if (known) return order;
  throw StatusError(absl::InvalidArgumentError(
      absl::StrCat("order is (", absl::StrJoin(names, ", "), ") but must have each of ",
                   absl::StrJoin(kDimNames, ", "), " once")));
}

using PairInput = IntegerInput<nb::shape<-1, 2>>;
// Writable on purpose: blocks are copied into them.
using LayerInput = GivenArray<>;

// The whole of a layer, which lies in `order`.
DlpackArray LayerOf(const CachePtr& self, int64_t layer) {
  const BlockCacheShape& shape = self->shape();
  CheckIndex("layer", layer, shape.num_layers);
  return ArrayOf(self->layer(layer), shape.dtype, shape.LayerDims(self->num_blocks()), self);
}

// What such tensors are layers of, by the first of them.
BlockCacheShape ShapeOf(const std::vector<LayerInput>& layers, const std::optional<DType>& dtype,
                        bool mla, const std::array<BlockDim, 5>& order) {
  const size_t ndim = mla ? 4 : 5;
  if (layers.empty() || layers[0].ndim() != ndim || (!mla && layers[0].shape(0) != 2)) {
    throw StatusError(absl::InvalidArgumentError(absl::StrCat(
        "block cache: layers are tensors [", mla ? "" : "2, ", "blocks, block_size, heads, dim]")));
  }
  const auto size = [&](size_t from_last) {
    return static_cast<int64_t>(layers[0].shape(ndim - from_last));
  };
  return {static_cast<int64_t>(layers.size()),
          size(3),
          size(2),
          size(1),
          dtype ? *dtype : FromDlpack(layers[0].dtype()),
          mla,
          order};
}

// Bytes stand for any dtype of one byte.
void CheckLayer(const LayerInput& layer, size_t index, const BlockCacheShape& shape,
                int64_t num_blocks, const PoolMemory& memory) {
  CheckLiesIn(absl::StrCat("block cache: layer ", index), DeviceOf(layer), memory);
  const DType dtype = FromDlpack(layer.dtype());
  const bool is_bytes = dtype == DType::kUint8 && DTypeBytes(shape.dtype) == 1;
  bool fits = dtype == shape.dtype || is_bytes;
  const std::vector<ArrayDim> want = shape.LayerDims(num_blocks);
  fits = fits && layer.ndim() == want.size();
  for (size_t i = 0; fits && i < want.size(); ++i) {
    fits = static_cast<int64_t>(layer.shape(i)) == want[i].size &&
           (want[i].size == 1 || layer.stride(i) * DTypeBytes(dtype) == want[i].stride);
  }
  if (fits) return;
  throw StatusError(absl::InvalidArgumentError(absl::StrCat(
      "block cache: layer ", index, " is no tensor of ", DTypeName(shape.dtype),
      " whose dimensions (size x bytes apart, by the order) are ", SizesByStrides(want))));
}

CachePtr AdoptLayers(const std::vector<LayerInput>& layers, const std::optional<std::string>& dtype,
                     bool mla, const std::vector<std::string>& order) {
  const std::optional<DType> values =
      dtype ? std::optional(Value(ParseDType(*dtype))) : std::nullopt;
  const BlockCacheShape shape = ShapeOf(layers, values, mla, ParseOrder(order));
  Check(shape.Validate());
  const LayerInput& first = layers[0];
  const std::shared_ptr<const PoolMemory> memory = MemoryOn(DeviceOf(first));
  std::vector<std::span<std::byte>> bytes;
  for (const LayerInput& layer : layers) {
    CheckLayer(layer, bytes.size(), shape, static_cast<int64_t>(first.shape(mla ? 0 : 1)), *memory);
    bytes.push_back({static_cast<std::byte*>(layer.data()), layer.nbytes()});
  }
  return Value(BlockCache::Adopt(shape, bytes, OwnerOf(KeepAlive(layers)), memory));
}

void BindBlockCache(nb::module_& module) {
  nb::class_<BlockCache>(module, "BlockCache",
                         "An engine's block cache on one device; see pool/block_cache.h.")
      .def_static(
          "create",
          [](int64_t num_blocks, int64_t num_layers, int64_t block_size, int64_t num_kv_heads,
             int64_t head_dim, const std::string& dtype, bool mla,
             const std::vector<std::string>& order, const std::string& memory) {
            const std::shared_ptr<const PoolMemory> lies_in = MemoryNamed(memory);
            return Value(BlockCache::Create({num_layers, block_size, num_kv_heads, head_dim,
                                             Value(ParseDType(dtype)), mla, ParseOrder(order)},
                                            num_blocks, lies_in));
          },
          nb::kw_only(), "num_blocks"_a, "num_layers"_a, "block_size"_a, "num_kv_heads"_a,
          "head_dim"_a, "dtype"_a = "bfloat16", "mla"_a = false,
          "order"_a = std::vector<std::string>(kDimNames.begin(), kDimNames.end()),
          "memory"_a = "host", nb::call_guard<ReleasedGil>(),
          "Zeroed memory: the host's, or a GPU's as 'cuda:0'. order: dimensions as they lie in "
          "memory, outermost first.")
      .def_static("adopt_tensors", &AdoptLayers, "tensors"_a.noconvert(), nb::kw_only(),
                  "dtype"_a = nb::none(), "mla"_a = false,
                  "order"_a = std::vector<std::string>(kDimNames.begin(), kDimNames.end()),
                  "An engine's cache: for each layer a tensor [2, blocks, block_size, heads, dim] "
                  "(without the 2 for MLA) whose strides are those of the order, on the CPU or a "
                  "GPU. dtype: where tensors are of bytes. They are kept alive with the cache; "
                  "nothing is copied.")
      .def_static(
          "block_bytes_of",
          [](int64_t num_layers, int64_t block_size, int64_t num_kv_heads, int64_t head_dim,
             const std::string& dtype, bool mla) {
            const BlockCacheShape shape = {
                num_layers, block_size, num_kv_heads, head_dim, Value(ParseDType(dtype)), mla};
            Check(shape.Validate());
            return shape.block_bytes();
          },
          nb::kw_only(), "num_layers"_a, "block_size"_a, "num_kv_heads"_a, "head_dim"_a,
          "dtype"_a = "bfloat16", "mla"_a = false,
          "block_bytes of such a cache, before there is one: how many blocks fit.")
      .def_prop_ro("num_blocks", &BlockCache::num_blocks)
      .def_prop_ro(
          "dtype",
          [](const BlockCache& self) { return std::string(DTypeName(self.shape().dtype)); })
      .def_prop_ro(
          "memory", [](const BlockCache& self) { return NameOf(self.memory()); },
          "Where it lies, as for create().")
      .def_prop_ro("bytes", &BlockCache::bytes)
      .def_prop_ro(
          "block_bytes", [](const BlockCache& self) { return self.shape().block_bytes(); },
          "Of one block over all layers.")
      .def_prop_ro(
          "buffer_infos", [](const BlockCache& self) { return ToTuples(self.buffer_infos()); },
          "(address, bytes, bytes of a block) of each buffer, layer after layer: what lies outside "
          "of the block in its order.")
      .def(
          "pin_for",
          [](BlockCache& self, const BlockCache& device) { Check(self.PinFor(device.memory())); },
          "device"_a, nb::call_guard<ReleasedGil>(),
          "Of a cache in host memory: pins it, so that copy_blocks() from and to a cache in that "
          "one's memory is faster. Takes the room of all blocks. Nothing to do where an engine has "
          "pinned all of them.")
      .def(
          "view",
          [](const CachePtr& self, int64_t layer, int64_t kv) {
            return SeenFrom(Value(self->View(layer, kv)), self);
          },
          "layer"_a, "kv"_a,
          "Keys (0) or values (1) of a layer without a copy, as TokenKvPool.buffer().")
      .def(
          "layer", &LayerOf, "layer"_a,
          "All of a layer without a copy, for torch.from_dlpack: [2, blocks, block_size, heads, "
          "dim], without the 2 for MLA, with strides as the order has them. fp8 is seen as uint8.");
  module.def(
      "copy_blocks",
      [](const BlockCache& source, BlockCache& destination, const PairInput& pairs,
         ThreadPool* threads) {
        const CountList blocks(pairs, "block");
        const std::span<const int64_t> flat = blocks;
        std::vector<BlockPair> list;
        for (size_t i = 0; i < flat.size(); i += 2) list.emplace_back(flat[i], flat[i + 1]);
        const ReleasedGil nogil;
        Check(CopyBlocks(source, destination, list, threads));
      },
      "source"_a, "destination"_a, "pairs"_a, "threads"_a.none() = nb::none(),
      "Block pairs[:, 1] of destination becomes block pairs[:, 0] of source, in every layer: swap "
      "in, swap out, or copy within one cache. A GPU copies what lies there, on the default "
      "stream, "
      "and is done when this returns; threads help with host memory only.");
}

}  // namespace

void BindTokenPools(nb::module_& module) {
  BindLayerCounter(module);
  BindTokenKvPool(module);
  BindHostKvPool(module);
  BindBlockCache(module);
}

}  // namespace kvferry
