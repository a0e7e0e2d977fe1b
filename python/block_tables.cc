#include "python/block_tables.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <new>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/thread_pool.h"
#include "pool/block_tables.h"
#include "python/convert.h"
#include "python/maker.h"
#include "python/status_error.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT(google-build-using-namespace): "name"_a

namespace kvferry {
namespace {

using Ids = std::vector<int64_t>;
// MemoryError says how large it would be.
OwnedArray<int32_t> RoomFor(size_t rows, size_t columns) {
  try {
    return OwnedArray<int32_t>(rows * columns);
  } catch (const std::bad_alloc&) {
    PyErr_Format(PyExc_MemoryError,
                 "block tables: no memory for a table of %zu rows of width %zu, int32", rows,
                 columns);
    throw nb::python_error();
  }
}

// Not a vector: its zeros would be written only to be overwritten.
NumpyArray<int32_t, 2> Table(const BlockTables& self, const Ids& ids, ThreadPool* threads,
                             std::optional<int64_t> width) {
  // Before there is a table, which may be more than there is memory.
  if (width) Check(self.CheckWidth(ids, *width));
  const int64_t columns = width ? *width : Value(self.TableWidth(ids));
  OwnedArray<int32_t> table = RoomFor(ids.size(), static_cast<size_t>(columns));
  // With the GIL: another call that moved what is copied here would be undefined.
  Check(self.WriteTable(ids, columns, table.values(), threads));
  return std::move(table).ToNumpy({ids.size(), static_cast<size_t>(columns)});
}

bool Grow(BlockTables& self, const Ids& ids, const std::vector<int64_t>& tokens) {
  const absl::Status status = self.Grow(ids, tokens);
  if (absl::IsResourceExhausted(status)) return false;
  Check(status);
  return true;
}

std::optional<std::vector<std::pair<int64_t, int64_t>>> Preempt(BlockTables& self,
                                                                int64_t num_blocks,
                                                                const Ids& keep) {
  const auto preempted = OrNone(self.Preempt(num_blocks, keep));
  if (!preempted) return std::nullopt;
  std::vector<std::pair<int64_t, int64_t>> result;
  for (const auto& [id, tokens] : *preempted) result.emplace_back(id, tokens);
  return result;
}

void BindThreadPool(nb::module_& module) {
  nb::class_<ThreadPool>(module, "ThreadPool",
                         "Worker threads that help with large calls; see base/thread_pool.h.")
      .def(nb::new_([](int64_t num_workers) {
             return LeftByForks(Value(ThreadPool::Create(num_workers)));
           }),
           "num_workers"_a)
      .def_prop_ro("num_workers", &ThreadPool::num_workers);
}

}  // namespace

void BindBlockTables(nb::module_& module) {
  BindThreadPool(module);
  nb::class_<BlockTables> tables(module, "BlockTables",
                                 "The blocks of a batch of sequences; see pool/block_tables.h.");
  tables
      .def(
          "__init__",
          [](BlockTables* self, int64_t num_blocks, int64_t block_size, int64_t max_sequences,
             int64_t bytes_per_token, int64_t reserved_blocks) {
            new (self) BlockTables(Value(BlockTables::Create(
                {num_blocks, block_size, max_sequences, bytes_per_token, reserved_blocks})));
          },
          "num_blocks"_a, "block_size"_a, "max_sequences"_a, "bytes_per_token"_a = 0,
          "reserved_blocks"_a = 0,
          "Blocks [0, reserved_blocks) are in no table: 1 where an engine keeps block 0 for "
          "padding.")
      .def(
          "add", [](BlockTables& self, int64_t tokens) { return OrNone(self.Add(tokens)); },
          "tokens"_a, "The id of a new sequence, None when blocks or ids are too few.")
      .def("grow", &Grow, "ids"_a, "tokens"_a,
           "tokens[i] more for sequence ids[i]. False when the batch needs more blocks than are "
           "free; nothing has changed then.")
      .def(
          "free", [](BlockTables& self, const Ids& ids) { Check(self.Free(ids)); }, "ids"_a)
      .def(
          "free_blocks",
          [](BlockTables& self, int64_t id, const std::vector<int64_t>& places) {
            Check(self.FreeBlocks(id, places));
          },
          "id"_a, "places"_a, "Frees blocks of a sequence that lives on; their entries become -1.")
      .def("preempt", &Preempt, "num_blocks"_a, "keep"_a = Ids(),
           "Frees the newest sequences until num_blocks blocks are free: their (id, tokens), or "
           "None when all but those in `keep` hold too few.")
      .def("clear", &BlockTables::Clear)
      .def("table", &Table, "ids"_a, "threads"_a = nb::none(), "width"_a = nb::none(),
           "The block table [ids, width], int32, padded with -1; without a width as wide as the "
           "longest row.")
      .def(
          "token_counts",
          [](const BlockTables& self, const Ids& ids) {
            return ToArray(Value(self.TokenCounts(ids)));
          },
          "ids"_a)
      .def(
          "last_positions",
          [](const BlockTables& self, const Ids& ids) {
            return ToArray(Value(self.LastPositions(ids)));
          },
          "ids"_a, "Positions of the last tokens; -1 for an empty sequence.")
      .def(
          "block_counts",
          [](const BlockTables& self, const Ids& ids) {
            return ToArray(Value(self.BlockCounts(ids)));
          },
          "ids"_a, "Blocks that each sequence holds.")
      .def_prop_ro("block_size", &BlockTables::block_size)
      .def_prop_ro("num_sequences", &BlockTables::num_sequences)
      .def_prop_ro("num_free", &BlockTables::num_free, "In blocks.")
      .def_prop_ro("fragmented_bytes", &BlockTables::fragmented_bytes);
  DefineFreeRuns(
      tables, "", [](const BlockTables& self) -> auto& { return self.pages(); });
}

}  // namespace kvferry
