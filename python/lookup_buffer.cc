#include "python/lookup_buffer.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cstring>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/cancel_and_wait.h"
#include "base/mutex.h"
#include "base/slab.h"
#include "connector/copy_pages.h"
#include "connector/kv_tensors.h"
#include "connector/lookup_consumer.h"
#include "connector/lookup_producer.h"
#include "python/closable.h"
#include "python/convert.h"
#include "python/gil.h"
#include "python/kv_store.h"
#include "python/rows.h"
#include "python/status_error.h"
#include "transport/command_queue.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT(google-build-using-namespace): "name"_a

namespace kvferry {
namespace {

template <typename T>
using Input = GivenArray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using TokenInput = Input<int32_t>;
using RoiInput = std::optional<Input<uint8_t>>;
using HiddenInput = std::optional<Input<uint8_t>>;
// lookup.py makes them so.
using TensorInput = GivenArray<nb::ro, nb::c_contig, nb::device::cpu>;
using ByteArray = NumpyArray<uint8_t>;

std::span<const int32_t> Span(const TokenInput& tokens) { return {tokens.data(), tokens.shape(0)}; }

std::optional<std::vector<bool>> ToRoi(const RoiInput& roi) {
  if (!roi) return std::nullopt;
  return std::vector<bool>(roi->data(), roi->data() + roi->shape(0));
}

std::vector<std::byte> ToHidden(const HiddenInput& hidden) {
  if (!hidden) return {};
  const auto* data = reinterpret_cast<const std::byte*>(hidden->data());
  return {data, data + hidden->shape(0)};
}

constexpr char kWhat[] = "lookup buffer";
using Producer = Closable<LookupProducer>;

// ---------------------------------------------------------------- producer

// Whether entries can be tensors here, and not pages alone. Asked before one is taken, which would
// be lost.
void CheckCanBeTensors(const KvLayout& layout) {
  Check(KvTensorBytes(layout, 1).status());
  const DType dtype = layout.dtype_of(layout.tensors[0]);
  if (dtype == layout.dtype) return;
  throw StatusError(absl::InvalidArgumentError(
      absl::StrCat("key and value as tensors need the layout's dtype, ", DTypeName(layout.dtype),
                   ", and not one of their own, ", DTypeName(dtype), "; take pages")));
}

// A tensor [layers, tokens, heads, dim] of the layout's dtype.
std::span<const std::byte> TensorBytes(const TensorInput& tensor, const char* name,
                                       const KvLayout& layout, size_t num_tokens) {
  const DType dtype = FromDlpack(tensor.dtype());
  const bool raw = dtype == DType::kUint8 && DTypeBytes(layout.dtype) == 1;
  if (dtype != layout.dtype && !raw) {
    throw StatusError(absl::InvalidArgumentError(absl::StrCat(
        name, " is ", DTypeName(dtype), " but the layout's dtype is ", DTypeName(layout.dtype))));
  }
  const std::vector<size_t> want = {static_cast<size_t>(layout.num_layers), num_tokens,
                                    static_cast<size_t>(layout.tensors[0].num_heads),
                                    static_cast<size_t>(layout.tensors[0].head_dim)};
  const std::vector<size_t> shape(tensor.shape_ptr(), tensor.shape_ptr() + tensor.ndim());
  if (shape != want) {
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat(name, " has shape [", absl::StrJoin(shape, ", "),
                     "] but [layers, tokens, heads, dim] is [", absl::StrJoin(want, ", "), "]")));
  }
  return {static_cast<const std::byte*>(tensor.data()), tensor.nbytes()};
}

void InsertTensors(const Producer& self, const KvLayout& layout, const TokenInput& tokens,
                   const RoiInput& roi, const TensorInput& key, const TensorInput& value,
                   const HiddenInput& hidden, int64_t timeout_ms) {
  const auto mask = ToRoi(roi);
  const size_t num_tokens = Value(SelectTokens(Span(tokens), mask)).size();
  CheckCanBeTensors(layout);
  const auto key_bytes = TensorBytes(key, "key", layout, num_tokens);
  const auto value_bytes = TensorBytes(value, "value", layout, num_tokens);
  const Deadline deadline = StoreDeadline(timeout_ms);
  Check(self.CallWithoutGil([&](LookupProducer& producer) {
    return producer.InsertTensors(Span(tokens), mask, key_bytes, value_bytes, deadline,
                                  ToHidden(hidden));
  }));
}

uint64_t InsertPages(const Producer& self, const TokenInput& tokens, const RoiInput& roi,
                     const std::vector<int64_t>& pages, const HiddenInput& hidden,
                     int64_t timeout_ms) {
  const Deadline deadline = StoreDeadline(timeout_ms);
  return Value(self.CallWithoutGil([&](LookupProducer& producer) {
    return producer.Insert(Span(tokens), ToRoi(roi), pages, deadline, ToHidden(hidden));
  }));
}

void BindProducer(nb::module_& module) {
  nb::class_<Producer>(module, "LookupProducer",
                       "Entries of KV by their tokens; see connector/lookup_producer.h.")
      .def(
          "__init__",
          [](Producer* self, const std::shared_ptr<KvPool>& pool, const Config& config,
             const std::string& model, const std::string& name, int64_t max_bytes,
             int64_t partition, int64_t reply_lease_ms, int64_t copy_pages) {
            LookupProducer::Options options;
            options.config = config;
            options.model = model;
            options.name = name;
            options.pool = ForAnyThread(pool);
            options.max_bytes = max_bytes;
            options.partition = partition;
            options.reply_lease_ms = reply_lease_ms;
            options.copy_pages = copy_pages;
            new (self) Producer(Value(LookupProducer::Create(options)), kWhat);
          },
          nb::kw_only(), "pool"_a, "config"_a, "model"_a, "name"_a = "", "max_bytes"_a,
          "partition"_a = 0, "reply_lease_ms"_a = 5000, "copy_pages"_a = 0,
          nb::call_guard<ReleasedGil>())
      .def_prop_ro("address", [](const Producer& self) { return self.get()->address(); })
      .def_prop_ro("num_own_pages",
                   [](const Producer& self) { return self.get()->num_own_pages(); })
      .def("insert_tensors", &InsertTensors, "layout"_a, "tokens"_a, "roi"_a.none(), "key"_a,
           "value"_a, "hidden"_a.none(), "timeout_ms"_a,
           "Copies key and value, [layers, tokens of roi, heads, dim]; waits for room.")
      .def("insert_pages", &InsertPages, "tokens"_a, "roi"_a.none(), "pages"_a, "hidden"_a.none(),
           "timeout_ms"_a,
           "Offers pages in place, until take_gone() names the entry that this returns.")
      .def(
          "take_gone",
          [](const Producer& self) {
            std::vector<std::pair<uint64_t, std::string>> gone;
            for (const GoneEntry& entry : self.get()->TakeGone()) {
              gone.emplace_back(entry.entry, entry.fetched ? "fetched" : "dropped");
            }
            return gone;
          },
          "(entry, 'fetched' | 'dropped') of entries that left since the last call.")
      .def(
          "metrics",
          [](const Producer& self) { return MetricsDict([&] { return self.get()->Metrics(); }); },
          nb::sig("def metrics(self) -> dict[str, int]"))
      .def("close", &Producer::Close);
}

// ---------------------------------------------------------------- consumer

// Which lookups are done, for an event loop that watches a file descriptor. Holds nothing of
// Python: its other end is the progress thread.
class LookupEvents {
 public:
  // The number of a lookup, made when that begins: saying that it is done takes no memory.
  using Event = std::list<uint64_t>;

  int fd() const { return wake_.get(); }
  void Add(Event& event) {
    {
      const MutexLock lock(&mutex_);
      done_.splice(done_.end(), event);
    }
    wake_.Wake();
  }
  std::vector<uint64_t> Take() {
    const MutexLock lock(&mutex_);
    std::vector<uint64_t> done(done_.begin(), done_.end());  // First: nothing is lost if it throws.
    wake_.Drain();
    done_.clear();
    return done;
  }

 private:
  const WakeFd wake_;
  Mutex mutex_;
  Event done_ ABSL_GUARDED_BY(mutex_);
};

// What Python holds of them: the progress thread must never be the last to let go of a Python
// object.
struct PyEvents {
  PyEvents() {
    if (events->fd() >= 0) return;
    throw StatusError(
        absl::ResourceExhaustedError(absl::StrCat("lookup: eventfd: ", std::strerror(errno))));
  }
  const std::shared_ptr<LookupEvents> events = std::make_shared<LookupEvents>();
};

// Pages that a lookup fills, taken when it is known how many; back with the last owner: the lookup
// while it is under way, and its Python object.
class LentPages {
 public:
  explicit LentPages(std::shared_ptr<CopyPages> pool) : pool_(std::move(pool)) {}
  LentPages(const LentPages&) = delete;
  LentPages& operator=(const LentPages&) = delete;
  ~LentPages() {
    if (pages_.num_pages() > 0) pool_->Free(pages_);
  }

  absl::StatusOr<std::vector<int64_t>> Allocate(int64_t count) {
    if (pages_.num_pages() > 0) pool_->Free(std::exchange(pages_, {}));  // Of another entry.
    absl::StatusOr<PageRuns> pages = pool_->Allocate(count, Clock::now());
    if (!pages.ok()) return absl::ResourceExhaustedError(pages.status().message());
    pages_ = *std::move(pages);
    return pages_.ToPages();
  }

 private:
  const std::shared_ptr<CopyPages> pool_;
  PageRuns pages_;
};

// A consumer and those pages of its pool that lookups of tensors use.
struct ConsumerParts {
  std::shared_ptr<KvPool> pool;
  std::shared_ptr<CopyPages> copies;
  std::unique_ptr<LookupConsumer> consumer;

  void Close() { consumer->Close(); }
};
using Consumer = Closable<ConsumerParts>;

class PyLookup {
 public:
  PyLookup(std::shared_ptr<KvPool> pool, std::shared_ptr<LentPages> lent)
      : pool_(std::move(pool)), lent_(std::move(lent)) {}
  PyLookup(const PyLookup&) = delete;
  PyLookup& operator=(const PyLookup&) = delete;
  // Python lets go of it, as where Ctrl-C comes before it is anybody's: the caller has his pages
  // back.
  ~PyLookup() {
    // In the child of a fork nobody would end it, nor let go of its lock.
    if (handle_ == nullptr || !maker_.IsHere() || handle_->done()) return;
    const ReleasedGil nogil;
    CancelAndWait(*handle_);
  }

  // Once, before anything else is called.
  void Begin(std::shared_ptr<LookupHandle> handle) { handle_ = std::move(handle); }
  LookupHandle& handle() const {
    maker_.CheckIsHere("lookup");
    return *handle_;
  }
  const KvPool& pool() const { return *pool_; }
  // Of a lookup that is done; raises what it failed with.
  LookupResult result() const {
    Check(handle().status());
    return handle().result();
  }

 private:
  const std::shared_ptr<KvPool> pool_;
  const Maker maker_;
  std::shared_ptr<LookupHandle> handle_;
  const std::shared_ptr<LentPages> lent_;  // Null: the caller's pages.
};

std::unique_ptr<PyLookup> Start(const Consumer& self, const std::optional<TokenInput>& tokens,
                                const RoiInput& roi,
                                const std::optional<std::vector<int64_t>>& pages,
                                int64_t timeout_ms, const PyEvents* events, uint64_t event) {
  std::shared_ptr<ConsumerParts> held = self.get();
  LookupConsumer::Request request;
  if (tokens) request.tokens.emplace(tokens->data(), tokens->data() + tokens->shape(0));
  request.roi = ToRoi(roi);
  std::shared_ptr<LentPages> lent;
  if (pages) {
    request.pages = *pages;
  } else {
    CheckCanBeTensors(held->pool->layout());
    lent = std::make_shared<LentPages>(held->copies);
    request.allocate = [lent](int64_t count) { return lent->Allocate(count); };
  }
  request.deadline = StoreDeadline(timeout_ms);
  if (events != nullptr) {
    request.on_done = [done = events->events, event = std::make_shared<LookupEvents::Event>(
                                                  1, event)] { done->Add(*event); };
  }
  auto lookup = std::make_unique<PyLookup>(held->pool, std::move(lent));
  const ReleasedGil nogil;
  const std::shared_ptr<ConsumerParts> parts = std::move(held);
  lookup->Begin(Value(parts->consumer->DropSelect(std::move(request))));
  return lookup;
}

// key and value, [layers, tokens that match, heads, dim].
std::pair<DlpackArray, DlpackArray> Tensors(const PyLookup& self) {
  const LookupResult result = self.result();
  const KvLayout& layout = self.pool().layout();
  CheckCanBeTensors(layout);
  const int64_t bytes = Value(KvTensorBytes(layout, result.num_matched));
  std::shared_ptr<std::byte> memory;
  {
    const ReleasedGil nogil;
    memory = Value(MapSlab(2 * bytes));
    Check(CopyPagesToTensors(self.pool(), Value(PageRuns::FromPages(result.pages)),
                             result.num_matched, {memory.get(), static_cast<size_t>(bytes)},
                             {memory.get() + bytes, static_cast<size_t>(bytes)}));
  }
  const size_t shape[] = {static_cast<size_t>(layout.num_layers),
                          static_cast<size_t>(result.num_matched),
                          static_cast<size_t>(layout.tensors[0].num_heads),
                          static_cast<size_t>(layout.tensors[0].head_dim)};
  const auto array = [&](std::byte* data) {
    return DlpackArray(data, std::size(shape), shape, KeepAlive(memory), nullptr,
                       ToDlpack(layout.dtype), nb::device::cpu::value);
  };
  return {array(memory.get()), array(memory.get() + bytes)};
}

std::optional<ByteArray> Hidden(const PyLookup& self) {
  const LookupResult result = self.result();
  if (result.hidden_bytes == 0) return std::nullopt;
  return ByteArray(reinterpret_cast<uint8_t*>(result.hidden.get()),
                   {static_cast<size_t>(result.hidden_bytes)}, KeepAlive(result.hidden));
}

void BindLookup(nb::module_& module) {
  nb::class_<PyEvents>(module, "LookupEvents",
                       "Lookups that are done, for an event loop: readable when there are any.")
      .def(nb::init<>())
      .def("fileno", [](const PyEvents& self) { return self.events->fd(); })
      .def(
          "take", [](const PyEvents& self) { return self.events->Take(); },
          "Their numbers, since the last call.");
  nb::class_<PyLookup>(module, "Lookup", "One lookup; see connector/lookup_handle.h.")
      .def_prop_ro("done", [](const PyLookup& self) { return self.handle().done(); })
      .def(
          "wait",
          [](const PyLookup& self, int64_t timeout_ms) {
            const Deadline deadline = StoreDeadline(timeout_ms);
            const ReleasedGil nogil;
            Check(self.handle().Wait(deadline));
          },
          "timeout_ms"_a)
      .def(
          "cancel", [](const PyLookup& self) { self.handle().Cancel(); },
          nb::call_guard<ReleasedGil>())
      .def_prop_ro(
          "tokens", [](const PyLookup& self) { return ToArray(self.result().tokens); },
          nb::rv_policy::reference,  // The array owns its values.
          "Of the entry.")
      .def_prop_ro("num_matched", [](const PyLookup& self) { return self.result().num_matched; })
      .def_prop_ro("pages", [](const PyLookup& self) { return self.result().pages; })
      .def("tensors", &Tensors, "Copies of key and value: [layers, tokens that match, heads, dim].")
      .def("hidden", &Hidden, nb::rv_policy::reference);
}

void BindConsumer(nb::module_& module) {
  nb::class_<Consumer>(module, "LookupConsumer",
                       "Finds entries of LookupProducers; see connector/lookup_consumer.h.")
      .def(
          "__init__",
          [](Consumer* self, const std::shared_ptr<KvPool>& pool, const Config& config,
             const std::string& model, const std::string& name,
             const std::vector<std::string>& producers, int64_t partition, int64_t copy_pages) {
            auto parts = std::make_unique<ConsumerParts>();
            parts->pool = ForAnyThread(pool);
            parts->copies = Value(CopyPages::Create(parts->pool->num_pages(), copy_pages));
            LookupConsumer::Options options;
            options.config = config;
            options.model = model;
            options.name = name;
            options.pool = parts->pool;
            options.producers = producers;
            options.partition = partition;
            parts->consumer = Value(LookupConsumer::Create(options));
            new (self) Consumer(std::move(parts), kWhat);
          },
          nb::kw_only(), "pool"_a, "config"_a, "model"_a, "name"_a = "", "producers"_a,
          "partition"_a = 0, "copy_pages"_a = 0, nb::call_guard<ReleasedGil>())
      .def("drop_select", &Start, "tokens"_a.none(), "roi"_a.none(), "pages"_a.none(),
           "timeout_ms"_a, "events"_a = nb::none(), "event"_a = 0,
           "Starts a lookup, into the caller's pages or (none) into the last copy_pages of the "
           "pool. `events` gets the number `event` when it is done.")
      .def(
          "metrics",
          [](const Consumer& self) {
            return MetricsDict([&] { return self.get()->consumer->Metrics(); });
          },
          nb::sig("def metrics(self) -> dict[str, int]"))
      .def("close", &Consumer::Close);
}

}  // namespace

void BindLookupBuffer(nb::module_& module) {
  BindProducer(module);
  BindLookup(module);
  BindConsumer(module);
}

}  // namespace kvferry
