// Python bindings: argument conversion and nothing else. Behaviour, units and errors are documented
// in the C++ headers that each class wraps.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check_range.h"
#include "base/config.h"
#include "base/host_memory.h"
#include "base/random.h"
#include "base/shared_memory.h"
#include "base/utf8.h"
#include "pool/kv_layout.h"
#include "pool/kv_pool.h"
#include "pool/page_allocator.h"
#include "python/block_tables.h"
#include "python/convert.h"
#include "python/endpoints.h"
#include "python/gdn_pool.h"
#include "python/gil.h"
#include "python/given_array.h"
#include "python/kv_store.h"
#include "python/lookup_buffer.h"
#include "python/model_config.h"
#include "python/model_pools.h"
#include "python/pool_memory.h"
#include "python/remote_store.h"
#include "python/slot_pools.h"
#include "python/status_error.h"
#include "python/token_pools.h"
#include "transport/node.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT(google-build-using-namespace): "name"_a

namespace kvferry {
namespace {

// ---------------------------------------------------------------- errors

struct ErrorRow {
  absl::StatusCode code;
  const char* name;
};
constexpr std::array kErrors = {
    ErrorRow{absl::StatusCode::kNotFound, "NotFound"},
    ErrorRow{absl::StatusCode::kAlreadyExists, "AlreadyExists"},
    ErrorRow{absl::StatusCode::kUnavailable, "Unavailable"},
    ErrorRow{absl::StatusCode::kDeadlineExceeded, "DeadlineExceeded"},
    ErrorRow{absl::StatusCode::kResourceExhausted, "ResourceExhausted"},
    ErrorRow{absl::StatusCode::kFailedPrecondition, "FailedPrecondition"},
    ErrorRow{absl::StatusCode::kCancelled, "Cancelled"},
    ErrorRow{absl::StatusCode::kDataLoss, "DataLoss"},
    ErrorRow{absl::StatusCode::kPermissionDenied, "PermissionDenied"},
    ErrorRow{absl::StatusCode::kAborted, "Aborted"},
    ErrorRow{absl::StatusCode::kUnimplemented, "Unimplemented"},
};

// The module keeps these alive; they live as long as the interpreter.
PyObject* g_error = nullptr;
PyObject* g_out_of_range = nullptr;
std::array<PyObject*, kErrors.size()> g_errors{};

PyObject* ExceptionFor(absl::StatusCode code) {
  if (code == absl::StatusCode::kInvalidArgument) return PyExc_ValueError;
  if (code == absl::StatusCode::kOutOfRange) return g_out_of_range;
  for (size_t i = 0; i < kErrors.size(); ++i) {
    if (kErrors[i].code == code) return g_errors[i];
  }
  return g_error;
}

void BindErrors(nb::module_& module) {
  g_error = PyErr_NewExceptionWithDoc("kvferry.Error", "Base of kvferry's errors.",
                                      PyExc_RuntimeError, nullptr);
  module.attr("Error") = nb::borrow(g_error);
  for (size_t i = 0; i < kErrors.size(); ++i) {
    const bool timeout = kErrors[i].code == absl::StatusCode::kDeadlineExceeded;
    const nb::object bases =
        timeout ? nb::object(nb::make_tuple(nb::borrow(g_error), nb::borrow(PyExc_TimeoutError)))
                : nb::borrow(g_error);
    const std::string name = std::string("kvferry.") + kErrors[i].name;
    g_errors[i] = PyErr_NewException(name.c_str(), bases.ptr(), nullptr);
    module.attr(kErrors[i].name) = nb::borrow(g_errors[i]);
  }
  const nb::object both =
      nb::make_tuple(nb::borrow(PyExc_IndexError), nb::borrow(PyExc_ValueError));
  g_out_of_range = PyErr_NewExceptionWithDoc(
      "kvferry.OutOfRange", "An index, or a range of them, that is outside.", both.ptr(), nullptr);
  module.attr("OutOfRange") = nb::borrow(g_out_of_range);
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const StatusError& error) {
      PyErr_SetString(ExceptionFor(error.code()), error.what());
    }
  });
}

// ---------------------------------------------------------------- values

std::string ToJson(nb::handle options) {
  const auto json = nb::steal<nb::object>(StayAtExit([] { return PyImport_ImportModule("json"); }));
  if (!json.is_valid()) throw nb::python_error();
  const nb::object dumps = json.attr("dumps");
  const auto text = nb::steal<nb::object>(
      StayAtExit([&] { return PyObject_CallOneArg(dumps.ptr(), options.ptr()); }));
  if (!text.is_valid()) throw nb::python_error();
  return nb::cast<std::string>(text);
}

Config MakeConfig(const nb::object& options) {
  Config config = Value(Config::FromEnv(Config()));
  if (!options.is_none()) {
    config = Value(Config::FromJson(ToJson(options), config));
  }
  Check(config.Validate());
  return config;
}

using TensorTuple = std::tuple<std::string, int64_t, int64_t>;
using TensorWithDtype = std::tuple<std::string, int64_t, int64_t, std::string>;
using TensorInput = std::variant<TensorTuple, TensorWithDtype>;

KvTensor ToTensor(const TensorInput& input) {
  if (const auto* plain = std::get_if<TensorTuple>(&input)) {
    return {std::get<0>(*plain), std::get<1>(*plain), std::get<2>(*plain)};
  }
  const auto& [name, num_heads, head_dim, dtype] = std::get<TensorWithDtype>(input);
  return {name, num_heads, head_dim, Value(ParseDType(dtype))};
}

TensorInput FromTensor(const KvTensor& tensor) {
  const TensorTuple plain = {tensor.name, tensor.num_heads, tensor.head_dim};
  if (!tensor.dtype) return plain;
  return std::tuple_cat(plain, std::tuple(std::string(DTypeName(*tensor.dtype))));
}

KvLayout MakeLayout(int64_t num_layers, int64_t page_size, const std::string& dtype,
                    const std::string& page_format, const std::vector<TensorInput>& tensors) {
  KvLayout layout;
  layout.num_layers = num_layers;
  layout.page_size = page_size;
  layout.dtype = Value(ParseDType(dtype));
  layout.page_format = page_format;
  for (const TensorInput& tensor : tensors) layout.tensors.push_back(ToTensor(tensor));
  Check(layout.Validate());
  return layout;
}

// Of what has another name in the layout, by which that would refuse it.
void CheckDim(const char* name, int64_t value, int64_t max) {
  Check(CheckRange("layout", name, value, 1, max));
}

KvLayout Validated(const KvLayout& layout) {
  Check(layout.Validate());
  return layout;
}

// What is not as it comes.
std::string ReprOfConfig(const nb::handle self) {
  const nb::object usual = nb::cast(Config());
  std::vector<std::string> fields;
  for (const std::string& name : Config::FieldNames()) {
    const nb::object value = nb::getattr(self, name.c_str());
    if (value.equal(nb::getattr(usual, name.c_str()))) continue;
    fields.push_back(absl::StrCat(name, "=", nb::cast<std::string>(nb::repr(value))));
  }
  return absl::StrCat("Config(", absl::StrJoin(fields, ", "), ")");
}

void BindConfig(nb::module_& module) {
  nb::class_<Config> config(module, "Config", "All tunables; see base/config.h.");
  config.def_static(
      "make", &MakeConfig, "options"_a = nb::none(),
      nb::sig("def make(options: dict[str, object] | None = None) -> Config"),
      "Defaults, then KVFERRY_* variables, then options; validated. ValueError names the "
      "wrong key or value and lists the right ones.");
  config.def_static("field_names", &Config::FieldNames, "Keys that make() knows.");
  config.def(
      "check_key_file", [](const Config& self) { Check(Node::CheckKeyFile(self)); },
      nb::call_guard<ReleasedGil>(),
      "ValueError where key_file cannot be read or holds no key, as endpoints that are made say.");
  config.def("__repr__", &ReprOfConfig);
  config.def_ro("listen_host", &Config::listen_host)
      .def_ro("listen_port", &Config::listen_port)
      .def_ro("allowed_hosts", &Config::allowed_hosts)
      .def_ro("key_file", &Config::key_file)
      .def_ro("allow_insecure_network", &Config::allow_insecure_network)
      .def_ro("data_port", &Config::data_port)
      .def_ro("net_device", &Config::net_device)
      .def_ro("tcp_congestion_control", &Config::tcp_congestion_control)
      .def_ro("ucx_tls", &Config::ucx_tls)
      .def_ro("network_path", &Config::network_path)
      .def_ro("direct_tls", &Config::direct_tls)
      .def_ro("lanes", &Config::lanes)
      .def_ro("same_host_path", &Config::same_host_path)
      .def_ro("copy_threads", &Config::copy_threads)
      .def_ro("chunk_bytes", &Config::chunk_bytes)
      .def_ro("arena_bytes", &Config::arena_bytes)
      .def_ro("device_arena_bytes", &Config::device_arena_bytes)
      .def_ro("credits_per_transfer", &Config::credits_per_transfer)
      .def_ro("checksum", &Config::checksum)
      .def_ro("heartbeat_interval_ms", &Config::heartbeat_interval_ms)
      .def_ro("heartbeat_timeout_ms", &Config::heartbeat_timeout_ms)
      .def_ro("connect_timeout_ms", &Config::connect_timeout_ms)
      .def_ro("lease_ms", &Config::lease_ms)
      .def_ro("publish_grace_ms", &Config::publish_grace_ms)
      .def_ro("fetch_timeout_ms", &Config::fetch_timeout_ms)
      .def_ro("max_fetch_timeout_ms", &Config::max_fetch_timeout_ms)
      .def_ro("busy_poll_us", &Config::busy_poll_us)
      .def_ro("max_peers", &Config::max_peers)
      .def_ro("max_fetches_per_peer", &Config::max_fetches_per_peer)
      .def_ro("max_calls_per_peer", &Config::max_calls_per_peer)
      .def_ro("max_leases", &Config::max_leases);
}

void BindLayout(nb::module_& module) {
  nb::class_<KvLayout> layout(module, "KvLayout", "How KV lies in memory; see pool/kv_layout.h.");
  layout
      .def(
          "__init__",
          [](KvLayout* self, int64_t num_layers, int64_t page_size, const std::string& dtype,
             const std::string& page_format, const std::vector<TensorInput>& tensors) {
            new (self) KvLayout(MakeLayout(num_layers, page_size, dtype, page_format, tensors));
          },
          nb::kw_only(), "num_layers"_a, "page_size"_a, "dtype"_a, "page_format"_a, "tensors"_a,
          "tensors: (name, num_heads, head_dim) of each tensor of one layer; with a dtype in "
          "fourth place where it is not the layout's.")
      .def_static(
          "mha",
          [](int64_t num_layers, int64_t page_size, int64_t num_kv_heads, int64_t head_dim,
             const std::string& dtype) {
            CheckDim("num_kv_heads", num_kv_heads, KvLayout::kMaxHeads);
            return Validated(KvLayout::Mha(num_layers, page_size, num_kv_heads, head_dim,
                                           Value(ParseDType(dtype))));
          },
          "num_layers"_a, "page_size"_a, "num_kv_heads"_a, "head_dim"_a, "dtype"_a)
      .def_static(
          "fused",
          [](int64_t num_layers, int64_t page_size, int64_t num_kv_heads, int64_t head_dim,
             const std::string& dtype) {
            CheckDim("num_kv_heads", num_kv_heads, KvLayout::kMaxHeads);
            CheckDim("head_dim", head_dim, KvLayout::kMaxHeadDim / 2);
            return Validated(KvLayout::Fused(num_layers, page_size, num_kv_heads, head_dim,
                                             Value(ParseDType(dtype))));
          },
          "num_layers"_a, "page_size"_a, "num_kv_heads"_a, "head_dim"_a, "dtype"_a)
      .def_static(
          "mla",
          [](int64_t num_layers, int64_t page_size, int64_t latent_dim, const std::string& dtype) {
            CheckDim("latent_dim", latent_dim, KvLayout::kMaxHeadDim);
            return Validated(
                KvLayout::Mla(num_layers, page_size, latent_dim, Value(ParseDType(dtype))));
          },
          "num_layers"_a, "page_size"_a, "latent_dim"_a, "dtype"_a)
      .def_ro("num_layers", &KvLayout::num_layers)
      .def_ro("page_size", &KvLayout::page_size)
      .def_ro("page_format", &KvLayout::page_format)
      .def_prop_ro("dtype", [](const KvLayout& self) { return std::string(DTypeName(self.dtype)); })
      .def_prop_ro("tensors",
                   [](const KvLayout& self) {
                     std::vector<TensorInput> tensors;
                     for (const KvTensor& tensor : self.tensors) {
                       tensors.push_back(FromTensor(tensor));
                     }
                     return tensors;
                   })
      .def_prop_ro("page_bytes", &KvLayout::page_bytes, "Bytes of one page over all layers.")
      .def_prop_ro("layer_page_bytes", &KvLayout::layer_page_bytes)
      .def(
          "item_bytes",
          [](const KvLayout& self, int64_t tensor) {
            CheckIndex("tensor", tensor, self.num_tensors());
            return self.item_bytes(tensor);
          },
          "tensor"_a, "Bytes of one page of that tensor in one layer.")
      .def("__repr__", [](const KvLayout& self) { return "KvLayout(" + self.ToString() + ")"; });
  DefineEquality(layout, [](const KvLayout& self) { return self.ToString(); });
}

using PoolPtr = std::shared_ptr<KvPool>;

using SharedPtr = std::shared_ptr<SharedMemory>;

// (address, bytes).
using Buffers = std::vector<std::pair<uintptr_t, int64_t>>;

std::vector<BufferInfo> InfosOf(const KvLayout& layout, const Buffers& buffers) {
  std::vector<BufferInfo> infos;
  for (size_t i = 0; i < buffers.size(); ++i) {
    const auto tensor = static_cast<int64_t>(i) / layout.num_layers;
    // Too many buffers are refused by Adopt; until then any item size will do.
    const int64_t item_bytes = tensor < layout.num_tensors() ? layout.item_bytes(tensor) : 0;
    infos.push_back(
        {reinterpret_cast<std::byte*>(buffers[i].first), buffers[i].second, item_bytes});
  }
  return infos;
}

PoolPtr AdoptPool(const KvLayout& layout, const Buffers& buffers, nb::object owner,
                  const SharedPtr& shared, const std::string& memory) {
  std::shared_ptr<const PoolMemory> lies_in = MemoryNamed(memory);
  if (shared != nullptr && lies_in != nullptr) {
    Check(absl::InvalidArgumentError(
        absl::StrCat("kv pool: memory is '", memory, "', but shared memory is the host's")));
  }
  const std::vector<BufferInfo> infos = InfosOf(layout, buffers);
  std::shared_ptr<const void> keep_alive = OwnerOf(std::move(owner));
  return Value(shared == nullptr
                   ? KvPool::Adopt(layout, infos, std::move(keep_alive), std::move(lies_in))
                   : KvPool::AdoptShared(layout, infos, std::move(keep_alive), shared));
}

// Writable on purpose: a transfer writes into them.
using EngineTensor = GivenArray<nb::c_contig>;

// Numbers are the layout's; integers are bytes, as which engines keep what torch has no type for.
void CheckTensorDType(const KvLayout& layout, size_t buffer, nb::dlpack::dtype given) {
  const auto code = static_cast<nb::dlpack::dtype_code>(given.code);
  const bool is_number =
      code == nb::dlpack::dtype_code::Float || code == nb::dlpack::dtype_code::Bfloat;
  const size_t tensor = buffer / static_cast<size_t>(layout.num_layers);
  if (!is_number || tensor >= layout.tensors.size()) return;  // Too many are refused by Adopt.
  const DType dtype = layout.dtype_of(layout.tensors[tensor]);
  if (given == ToDlpack(dtype)) return;
  Check(absl::InvalidArgumentError(
      absl::StrCat("kv pool: buffer ", buffer, " is a tensor of ", int{given.bits}, "-bit ",
                   code == nb::dlpack::dtype_code::Bfloat ? "bfloat" : "float", " values, but '",
                   layout.tensors[tensor].name, "' of the layout is ", DTypeName(dtype))));
}

PoolPtr AdoptTensors(const KvLayout& layout, const std::vector<EngineTensor>& tensors) {
  std::shared_ptr<const PoolMemory> memory =
      tensors.empty() ? HostMemory() : MemoryOn(DeviceOf(tensors[0]));
  Buffers buffers;
  for (const EngineTensor& tensor : tensors) {
    CheckTensorDType(layout, buffers.size(), tensor.dtype());
    CheckLiesIn(absl::StrCat("kv pool: buffer ", buffers.size()), DeviceOf(tensor), *memory);
    buffers.emplace_back(reinterpret_cast<uintptr_t>(tensor.data()),
                         static_cast<int64_t>(tensor.nbytes()));
  }
  return Value(KvPool::Adopt(layout, InfosOf(layout, buffers), OwnerOf(KeepAlive(tensors)),
                             std::move(memory)));
}

NumpyArray<uint8_t> PageView(const PoolPtr& pool, int64_t layer, int64_t tensor, int64_t page) {
  const KvLayout& layout = pool->layout();
  CheckIndex("layer", layer, layout.num_layers);
  CheckIndex("tensor", tensor, layout.num_tensors());
  CheckIndex("page", page, pool->num_pages());
  Check(CheckOnHost("kv pool: the page", pool->memory()));
  const std::span<std::byte> bytes = pool->page(layer, tensor, page);
  return {reinterpret_cast<uint8_t*>(bytes.data()), {bytes.size()}, KeepAlive(pool)};
}

void BindPools(nb::module_& module) {
  nb::class_<SharedMemory>(module, "SharedMemory",
                           "Zeroed memory that other processes of this host can be given to read.")
      .def_static(
          "create",
          [](int64_t bytes) {
            auto memory = std::make_shared<SharedMemory>(
                Value(SharedMemory::Create("kvferry-engine", bytes)));
            UseHugePages(memory->data.get(), bytes);
            return memory;
          },
          "bytes"_a, nb::call_guard<ReleasedGil>(),
          "In huge pages where the system has them, which are taken at once.")
      .def_prop_ro(
          "address",
          [](const SharedMemory& self) { return reinterpret_cast<uintptr_t>(self.data.get()); })
      .def_ro("bytes", &SharedMemory::bytes)
      .def(
          "array",
          [](const SharedPtr& self) -> NumpyArray<uint8_t> {
            return {reinterpret_cast<uint8_t*>(self->data.get()),
                    {static_cast<size_t>(self->bytes)},
                    KeepAlive(self)};
          },
          "All of it as bytes, without a copy; keeps it alive.");

  nb::class_<KvPool>(module, "KvPool", "The memory of a paged KV cache; see pool/kv_pool.h.")
      .def_static(
          "create",
          [](const KvLayout& layout, int64_t num_pages, bool at_once, const std::string& memory) {
            using TakesRoom = KvPool::TakesRoom;
            if (auto lies_in = MemoryNamed(memory)) {
              return Value(KvPool::CreateIn(layout, num_pages, std::move(lies_in)));
            }
            return Value(KvPool::Create(layout, num_pages,
                                        at_once ? TakesRoom::kAtOnce : TakesRoom::kAsTouched));
          },
          "layout"_a, "num_pages"_a, "at_once"_a = true, "memory"_a = "host",
          nb::call_guard<ReleasedGil>(),
          "Zeroed memory of the pool's own: the host's, or a GPU's as 'cuda:0'. at_once: in huge "
          "pages where the system has them, which take their room before this returns (about 0.1 s "
          "for a GiB); else the host's is taken as pages are touched. The host's is shared with a "
          "child that the process forks, which must not write to it.")
      .def_static(
          "adopt", &AdoptPool, "layout"_a, "buffers"_a, "owner"_a, "shared"_a = nb::none(),
          "memory"_a = "host",
          "Looks at an engine's memory: (address, bytes) of each buffer, tensor by tensor, each "
          "over all layers. `owner` is kept alive with the pool. `shared`: the SharedMemory that "
          "all of them lie in, which processes of this host then read in place. memory: where "
          "they lie, 'host' or a GPU as 'cuda:0'; what is published or fetched into must not be "
          "under work there.")
      .def_static(
          "adopt_tensors", &AdoptTensors, "layout"_a, "tensors"_a.noconvert(),
          "adopt() for contiguous tensors of the CPU or of a GPU, torch's, numpy's or any with "
          "DLPack: K of each layer, then V of each, of the layout's dtypes or bytes (any "
          "integers). They are kept alive with the pool; nothing is copied.")
      .def("__repr__",
           [](const KvPool& self) {
             return absl::StrCat("KvPool(", self.num_pages(), " pages of ",
                                 self.layout().ToString(), ", ", NameOf(self.memory()), ")");
           })
      .def_prop_ro("num_pages", &KvPool::num_pages)
      .def_prop_ro("layout", &KvPool::layout)
      .def_prop_ro(
          "memory", [](const KvPool& self) { return NameOf(self.memory()); },
          "'host', or a GPU's as 'cuda:0'.")
      .def(
          "buffer_infos", [](const KvPool& self) { return ToTuples(self.buffer_infos()); },
          "(address, bytes, item bytes) of each buffer: K layers, then V layers.")
      .def("page", &PageView, "layer"_a, "tensor"_a, "page"_a,
           "One page as bytes, without a copy.");

  nb::class_<PageAllocator> allocator(module, "PageAllocator",
                                      "Page ids in long runs; see pool/page_allocator.h.");
  allocator
      .def(
          "__init__",
          [](PageAllocator* self, int64_t num_pages, int64_t reserved) {
            new (self) PageAllocator(Value(PageAllocator::Create(num_pages, reserved)));
          },
          "num_pages"_a, "reserved"_a = 0)
      .def(
          "allocate",
          [](PageAllocator& self, int64_t count) { return Value(self.Allocate(count)).ToPages(); },
          "count"_a)
      .def(
          "extend",
          [](PageAllocator& self, int64_t last_page, int64_t count) {
            return Value(self.Extend(last_page, count)).ToPages();
          },
          "last_page"_a, "count"_a = 1)
      .def(
          "free",
          [](PageAllocator& self, const std::vector<int64_t>& pages) {
            Check(self.Free(Value(PageRuns::FromPages(pages))));
          },
          "pages"_a)
      .def_prop_ro("num_free", &PageAllocator::num_free);
  DefineFreeRuns(
      allocator, "", [](const PageAllocator& self) -> auto& { return self; });
}

}  // namespace

nb::object ExceptionOf(const absl::Status& status) {
  if (status.ok()) return nb::none();
  return nb::borrow(ExceptionFor(status.code()))(ValidUtf8(status.message()));
}

}  // namespace kvferry

NB_MODULE(_core, module) {
  module.doc() = "kvferry's C++ core.";
  kvferry::BindGil();
  kvferry::BindErrors(module);
  kvferry::BindConfig(module);
  kvferry::BindLayout(module);
  kvferry::BindPools(module);
  kvferry::BindSlotPools(module);
  kvferry::BindTokenPools(module);
  kvferry::BindBlockTables(module);
  kvferry::BindGdnPool(module);
  kvferry::BindModelConfig(module);
  kvferry::BindModelPools(module);
  kvferry::BindKvStore(module);
  kvferry::BindRemoteStore(module);
  kvferry::BindEndpoints(module);
  kvferry::BindLookupBuffer(module);
  module.def("random_id", &kvferry::RandomId, "An unpredictable non-zero 64-bit number.");
}
