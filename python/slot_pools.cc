#include "python/slot_pools.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "pool/req_to_token_pool.h"
#include "pool/token_slot_allocator.h"
#include "python/convert.h"
#include "python/status_error.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT(google-build-using-namespace): "name"_a

namespace kvferry {
namespace {

template <typename T>
using Input = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<const T> Span(const Input<T>& array) {
  return {array.data(), array.shape(0)};
}

std::optional<Int32Array> ArrayOrNone(absl::StatusOr<std::vector<int32_t>> slots) {
  std::optional<std::vector<int32_t>> got = OrNone(std::move(slots));
  if (!got) return std::nullopt;
  return ToArray(*std::move(got));
}

void BindReqToTokenPool(nb::module_& module) {
  nb::class_<ReqToTokenPool>(module, "ReqToTokenPool",
                             "Token slots of each running request; see pool/req_to_token_pool.h.")
      .def(
          "__init__",
          [](ReqToTokenPool* self, int64_t num_requests, int64_t max_context_tokens) {
            new (self)
                ReqToTokenPool(Value(ReqToTokenPool::Create(num_requests, max_context_tokens)));
          },
          "num_requests"_a, "max_context_tokens"_a)
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
          [](ReqToTokenPool& self, int64_t slot, int64_t first, const Input<int32_t>& values) {
            Check(self.Write(slot, first, Span(values)));
          },
          "slot"_a, "first"_a, "token_slots"_a,
          "Writes positions [first, first + len(token_slots)) of the slot's row.")
      .def_prop_ro("available_size", &ReqToTokenPool::num_free)
      .def_prop_ro(
          "req_to_token",
          [](const ReqToTokenPool& self) {
            using Memory = std::shared_ptr<std::byte>;
            const nb::capsule owner(new Memory(self.memory()), [](void* pointer) noexcept {
              delete static_cast<Memory*>(pointer);
            });
            return nb::ndarray<nb::numpy, int32_t, nb::ndim<2>>(
                self.table().data(),
                {static_cast<size_t>(self.num_requests()),
                 static_cast<size_t>(self.max_context_tokens())},
                owner);
          },
          nb::rv_policy::reference,  // The array owns its part of the memory.
          "The table [num_requests, max_context_tokens], without a copy.");
}

void BindTokenSlotAllocator(nb::module_& module) {
  nb::class_<TokenSlotAllocator>(module, "TokenSlotAllocator",
                                 "Token slots in pages; see pool/token_slot_allocator.h.")
      .def(
          "__init__",
          [](TokenSlotAllocator* self, int64_t num_tokens, int64_t page_size) {
            new (self) TokenSlotAllocator(Value(TokenSlotAllocator::Create(num_tokens, page_size)));
          },
          "num_tokens"_a, "page_size"_a = 1)
      .def(
          "alloc",
          [](TokenSlotAllocator& self, int64_t num_tokens) {
            return ArrayOrNone(self.Allocate(num_tokens));
          },
          "num_tokens"_a, "Slots in whole pages (int32), None when fewer are free.")
      .def(
          "alloc_extend",
          [](TokenSlotAllocator& self, const Input<int64_t>& prefix_tokens,
             const Input<int64_t>& tokens, const Input<int32_t>& last_slots) {
            return ArrayOrNone(self.Extend(Span(prefix_tokens), Span(tokens), Span(last_slots)));
          },
          "prefix_tokens"_a, "tokens"_a, "last_slots"_a,
          "The new slots of a batch that grows from prefix_tokens to tokens, None when there are "
          "too few.")
      .def(
          "alloc_decode",
          [](TokenSlotAllocator& self, const Input<int64_t>& tokens,
             const Input<int32_t>& last_slots) {
            return ArrayOrNone(self.Decode(Span(tokens), Span(last_slots)));
          },
          "tokens"_a, "last_slots"_a,
          "One slot for each sequence; tokens counts the new one. None when there are too few.")
      .def(
          "free",
          [](TokenSlotAllocator& self, const Input<int32_t>& slots) {
            Check(self.Free(Span(slots)));
          },
          "slots"_a)
      .def("free_group_begin", &TokenSlotAllocator::BeginFreeGroup)
      .def("free_group_end", &TokenSlotAllocator::EndFreeGroup)
      .def("clear", &TokenSlotAllocator::Clear)
      .def_prop_ro("page_size", &TokenSlotAllocator::page_size)
      .def_prop_ro("available_size", &TokenSlotAllocator::num_free, "In tokens.");
}

}  // namespace

void BindSlotPools(nb::module_& module) {
  BindReqToTokenPool(module);
  BindTokenSlotAllocator(module);
}

}  // namespace kvferry
