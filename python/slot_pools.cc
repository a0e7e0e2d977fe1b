#include "python/slot_pools.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pool/req_to_token_pool.h"
#include "pool/sliding_window_allocator.h"
#include "pool/token_slot_allocator.h"
#include "python/convert.h"
#include "python/gil.h"
#include "python/pool_memory.h"
#include "python/status_error.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT(google-build-using-namespace): "name"_a

namespace kvferry {
namespace {

nb::object TableOf(const ReqToTokenPool& pool) {
  const std::initializer_list<size_t> shape = {static_cast<size_t>(pool.num_requests()),
                                               static_cast<size_t>(pool.max_context_tokens())};
  const nb::capsule owner = KeepAlive(pool.table_memory());
  if (pool.memory().on_host()) {
    return nb::cast(NumpyArray<int32_t, 2>(pool.table().data(), shape, owner));
  }
  const DlpackDevice device = DeviceOf(pool.memory());
  return nb::cast(DlpackArray(pool.table().data(), shape, owner, {}, nb::dtype<int32_t>(),
                              device.type, device.id));
}

void BindReqToTokenPool(nb::module_& module) {
  nb::class_<ReqToTokenPool>(module, "ReqToTokenPool",
                             "Token slots of each running request; see pool/req_to_token_pool.h.")
      .def(
          "__init__",
          [](ReqToTokenPool* self, int64_t num_requests, int64_t max_context_tokens,
             const std::string& memory) {
            new (self) ReqToTokenPool(Value(
                ReqToTokenPool::Create(num_requests, max_context_tokens, MemoryNamed(memory))));
          },
          "num_requests"_a, "max_context_tokens"_a, "memory"_a = "host",
          nb::call_guard<ReleasedGil>(),
          "memory: where the table lies, the host's, or a GPU's as 'cuda:0'.")
      .def(
          "alloc", [](ReqToTokenPool& self, int64_t count) { return OrNone(self.Allocate(count)); },
          "count"_a = 1, "Request slots, None when fewer are free.")
      .def(
          "free",
          [](ReqToTokenPool& self, const std::vector<int64_t>& slots) { Check(self.Free(slots)); },
          "slots"_a)
      .def(
          "free",
          [](ReqToTokenPool& self, int64_t slot) {
            Check(self.Free({&slot, 1}));
          },
          "slots"_a)
      .def("clear", &ReqToTokenPool::Clear)
      .def(
          "write",
          [](ReqToTokenPool& self, int64_t slot, int64_t first, const SlotInput& values) {
            const SlotList token_slots(values);
            const ReleasedGil nogil;
            Check(self.Write(slot, first, token_slots));
          },
          "slot"_a, "first"_a, "token_slots"_a,
          "Writes positions [first, first + len(token_slots)) of the slot's row.")
      .def(
          "write_batch",
          [](ReqToTokenPool& self, const SlotInput& slots, const SlotInput& firsts,
             const SlotInput& counts, const SlotInput& values) {
            const CountList to(slots), from(firsts, "position"), lengths(counts, "number");
            const SlotList token_slots(values);
            const ReleasedGil nogil;
            Check(self.WriteBatch(to, from, lengths, token_slots));
          },
          "slots"_a, "firsts"_a, "counts"_a, "token_slots"_a,
          "The next counts[i] of token_slots to positions [firsts[i], firsts[i] + counts[i]) of "
          "slots[i], in one go on a GPU.")
      .def_prop_ro("available_size", &ReqToTokenPool::num_free)
      .def_prop_ro(
          "req_to_token", &TableOf,
          nb::rv_policy::reference,  // The array owns its part of the memory.
          "The table [num_requests, max_context_tokens], without a copy: numpy's, on a GPU for "
          "torch.from_dlpack.")
      .def_prop_ro(
          "memory", [](const ReqToTokenPool& self) { return NameOf(self.memory()); },
          "Where the table lies, as for the constructor.");
}

// What both allocators do.
template <typename Allocator>
void DefineAllocation(nb::class_<Allocator>& allocator) {
  allocator
      .def(
          "alloc",
          [](Allocator& self, int64_t num_tokens) -> std::optional<Int32Array> {
            const absl::Status room = self.CheckRoom(num_tokens);
            if (absl::IsResourceExhausted(room)) return std::nullopt;
            Check(room);
            OwnedArray<int32_t> slots(static_cast<size_t>(num_tokens));
            Check(self.AllocateInto(slots.values()));
            return std::move(slots).template ToNumpy<1>({slots.values().size()});
          },
          "num_tokens"_a, "Slots in whole pages (int32), None when fewer are free.")
      .def(
          "alloc_extend",
          [](Allocator& self, const SlotInput& prefix_tokens, const SlotInput& tokens,
             const SlotInput& last_slots) {
            return ArrayOrNone(self.Extend(CountList(prefix_tokens, "number"),
                                           CountList(tokens, "number"), SlotList(last_slots)));
          },
          "prefix_tokens"_a, "tokens"_a, "last_slots"_a,
          "The new slots of a batch that grows from prefix_tokens to tokens, None when there are "
          "too few. last_slots: of the last token that each sequence has, any where it has none.")
      .def(
          "alloc_decode",
          [](Allocator& self, const SlotInput& tokens, const SlotInput& last_slots) {
            return ArrayOrNone(self.Decode(CountList(tokens, "number"), SlotList(last_slots)));
          },
          "tokens"_a, "last_slots"_a,
          "One slot for each sequence; tokens counts the new one. None when there are too few.")
      .def(
          "free",
          [](Allocator& self, const SlotInput& slots) { Check(self.Free(SlotList(slots))); },
          "slots"_a, "The pages of these slots, whole: one slot of a page is enough.")
      .def("free_group_begin", &Allocator::BeginFreeGroup,
           "What free() is given from now on is free at the end of the group.")
      .def("free_group_end", &Allocator::EndFreeGroup)
      .def("clear", &Allocator::Clear)
      .def_prop_ro("page_size", &Allocator::page_size)
      .def_prop_ro("available_size", &Allocator::num_free, "In tokens.");
}

void BindTokenSlotAllocator(nb::module_& module) {
  nb::class_<TokenSlotAllocator> allocator(
      module, "TokenSlotAllocator", "Token slots in pages; see pool/token_slot_allocator.h.");
  allocator
      .def(
          "__init__",
          [](TokenSlotAllocator* self, int64_t num_tokens, int64_t page_size) {
            new (self) TokenSlotAllocator(Value(TokenSlotAllocator::Create(num_tokens, page_size)));
          },
          "num_tokens"_a, "page_size"_a = 1)
      .def_prop_ro("num_free_pages",
                   [](const TokenSlotAllocator& self) { return self.pages().num_free(); });
  DefineFreeRuns(
      allocator, "", [](const TokenSlotAllocator& self) -> auto& { return self.pages(); });
  DefineAllocation(allocator);
}

void BindSlidingWindowAllocator(nb::module_& module) {
  nb::class_<SlidingWindowAllocator> allocator(
      module, "SlidingWindowAllocator",
      "Token slots with a smaller pool for windowed layers; see pool/sliding_window_allocator.h.");
  allocator
      .def(
          "__init__",
          [](SlidingWindowAllocator* self, int64_t num_full_tokens, int64_t num_window_tokens,
             int64_t page_size) {
            new (self) SlidingWindowAllocator(Value(
                SlidingWindowAllocator::Create(num_full_tokens, num_window_tokens, page_size)));
          },
          "num_full_tokens"_a, "num_window_tokens"_a, "page_size"_a = 1)
      .def(
          "free_window",
          [](SlidingWindowAllocator& self, const SlotInput& slots) {
            Check(self.FreeWindow(SlotList(slots)));
          },
          "slots"_a,
          "These tokens left the window: pages of which all slots are given, in one call, lose "
          "their window slots. Their full slots stay.")
      .def(
          "to_window",
          [](const SlidingWindowAllocator& self, const SlotInput& slots) {
            return ToArray(Value(self.ToWindow(SlotList(slots))));
          },
          "slots"_a, "Window slots of full slots; 0 for tokens outside of the window.")
      .def_prop_ro(
          "window_pages",
          [](const SlidingWindowAllocator& self) {
            const std::span<const int32_t> pages = self.window_pages();
            return ToArray({pages.begin(), pages.end()});
          },
          nb::rv_policy::reference,  // The array owns its values.
          "Window page of each full page, 0 for none (a copy).")
      .def_prop_ro("full_available_size",
                   [](const SlidingWindowAllocator& self) { return self.full().num_free(); })
      .def_prop_ro("window_available_size",
                   [](const SlidingWindowAllocator& self) { return self.window().num_free(); })
      .def_prop_ro(
          "full_num_free_pages",
          [](const SlidingWindowAllocator& self) { return self.full().pages().num_free(); })
      .def_prop_ro("window_num_free_pages", [](const SlidingWindowAllocator& self) {
        return self.window().pages().num_free();
      });
  DefineFreeRuns(
      allocator, "full_",
      [](const SlidingWindowAllocator& self) -> auto& { return self.full().pages(); });
  DefineFreeRuns(
      allocator, "window_",
      [](const SlidingWindowAllocator& self) -> auto& { return self.window().pages(); });
  DefineAllocation(allocator);
}

}  // namespace

void BindSlotPools(nb::module_& module) {
  BindReqToTokenPool(module);
  BindTokenSlotAllocator(module);
  BindSlidingWindowAllocator(module);
}

}  // namespace kvferry
