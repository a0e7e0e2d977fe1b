// Kernels of pool/cuda on an NVIDIA GPU against what its memory, or its bus, allows: one plain
// cudaMemcpyAsync of as many bytes. Both take turns; the table has medians of the rounds, and what
// ours wrote is compared with what it had to write.

#include <cuda_runtime_api.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/slab.h"
#include "bench/kernel_row.h"
#include "bench/must.h"
#include "pool/block_quant.h"
#include "pool/casts.h"
#include "pool/cuda/block_copy_cuda.h"
#include "pool/cuda/block_quant_cuda.h"
#include "pool/cuda/cuda_memory.h"
#include "pool/cuda/cuda_status.h"
#include "pool/cuda/host_pin.h"
#include "pool/cuda/token_copy_cuda.h"
#include "pool/page_copy.h"
#include "pool/token_copy.h"

namespace kvferry::bench {
namespace {

constexpr int64_t kDeviceBytes = int64_t{1} << 30;  // A pass on the device, far beyond its cache.
constexpr int64_t kBusBytes = 256 << 20;            // A pass between device and host.
constexpr cudaStream_t kStream = nullptr;

void MustCuda(cudaError_t error) { Must(CudaStatus(error, "bench")); }
void Synchronize() { MustCuda(cudaStreamSynchronize(kStream)); }

std::shared_ptr<std::byte> OnDevice(int64_t bytes) { return Must(CudaMemory(0)->Allocate(bytes)); }

void Copy(std::byte* to, const std::byte* from, int64_t bytes) {
  MustCuda(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, kStream));
}

// Touched and pinned.
class PinnedBytes {
 public:
  explicit PinnedBytes(int64_t bytes) : slab_(Must(MapSlab(bytes))) {
    std::memset(slab_.get(), 1, static_cast<size_t>(bytes));
    const BufferInfo buffer{slab_.get(), bytes, bytes};
    pin_ = Must(PinHostMemory({&buffer, 1}, slab_));
  }
  std::byte* get() const { return slab_.get(); }

 private:
  std::shared_ptr<std::byte> slab_;
  std::unique_ptr<HostPin> pin_;
};

void FillRandom(std::byte* bytes, int64_t count) {
  std::mt19937_64 random(1);
  for (int64_t i = 0; i + 8 <= count; i += 8) {
    const uint64_t word = random();
    std::memcpy(bytes + i, &word, sizeof word);
  }
}

// What all rows use.
struct Rig {
  PinnedBytes host_pool{2 * kDeviceBytes}, host_packed{kDeviceBytes};
  std::shared_ptr<std::byte> pool = OnDevice(2 * kDeviceBytes);
  std::shared_ptr<std::byte> packed = OnDevice(kDeviceBytes);
  std::shared_ptr<std::byte> spare = OnDevice(kDeviceBytes);

  Rig() {
    FillRandom(host_pool.get(), 2 * kDeviceBytes);
    Copy(pool.get(), host_pool.get(), 2 * kDeviceBytes);
    Synchronize();
  }
};

struct Slots {
  explicit Slots(std::vector<int32_t> list)
      : host(std::move(list)),
        bytes_(OnDevice(static_cast<int64_t>(host.size() * sizeof(int32_t)))) {
    Copy(bytes_.get(), reinterpret_cast<const std::byte*>(host.data()),
         static_cast<int64_t>(host.size() * sizeof(int32_t)));
    Synchronize();
  }
  const int32_t* on_device() const { return reinterpret_cast<const int32_t*>(bytes_.get()); }

  const std::vector<int32_t> host;

 private:
  std::shared_ptr<std::byte> bytes_;
};

// ---------------------------------------------------------------- gather and scatter

// Row slots[i] of the pool is row i of what is packed.
bool PagesAre(const Rig& rig, const std::vector<int32_t>& slots, int64_t item) {
  for (size_t i = 0; i < slots.size(); ++i) {
    if (std::memcmp(rig.host_pool.get() + slots[i] * item,
                    rig.host_packed.get() + static_cast<int64_t>(i) * item,
                    static_cast<size_t>(item)) != 0) {
      return false;
    }
  }
  return true;
}

// `packed` on the device or on the host, which has what it must be compared with there anyway.
bool MeasureCopies(const Rig& rig, int64_t item, bool on_host, int rounds) {
  const int64_t count = (on_host ? kBusBytes : kDeviceBytes) / item;
  const int64_t bytes = count * item;
  const Slots slots(RandomSlots(2 * count, count));
  std::byte* const packed = on_host ? rig.host_packed.get() : rig.packed.get();
  const TokenView pages = TokenView::Packed(rig.pool.get(), DType::kUint8, 2 * count, 1, item);
  const TokenView rows = TokenView::Packed(packed, DType::kUint8, count, 1, item);
  const auto right = [&] {
    Copy(rig.host_pool.get(), rig.pool.get(), 2 * bytes);
    if (!on_host) Copy(rig.host_packed.get(), rig.packed.get(), bytes);
    Synchronize();
    return PagesAre(rig, slots.host, item);
  };
  const std::string where = on_host ? ", host" : "";
  const KernelRow gather = {
      absl::StrCat("gather ", SizeName(item), where),
      static_cast<double>(bytes),
      0.9,
      [&] {
        Must(CopyTokensCuda(pages, slots.on_device(), rows, nullptr, count, nullptr, kStream));
        Synchronize();
      },
      [&] {
        Copy(packed, rig.pool.get(), bytes);
        Synchronize();
      },
      right};
  const KernelRow scatter = {
      absl::StrCat("scatter ", SizeName(item), where),
      static_cast<double>(bytes),
      0.9,
      [&] {
        Must(CopyTokensCuda(rows, nullptr, pages, slots.on_device(), count, nullptr, kStream));
        Synchronize();
      },
      [&] {
        Copy(rig.spare.get(), packed, bytes);
        Synchronize();
      },
      right};
  const bool gathers = Measure(gather, rounds);
  return Measure(scatter, rounds) && gathers;
}

// ---------------------------------------------------------------- chunks of transfers

// Chunk after chunk between pages of the device and host memory, each waited for, as a transfer
// does it (PoolMemory::MoveApart); the limit waits for plain copies of as many bytes.
bool MeasureChunks(const Rig& rig, int64_t item, int64_t chunk, bool gather, bool pinned,
                   int rounds) {
  const int64_t count = kBusBytes / item;
  const int64_t bytes = count * item;
  const auto memory = CudaMemory(0);
  const std::shared_ptr<std::byte> pageable = Must(MapSlab(bytes));
  std::byte* const packed = pinned ? rig.host_packed.get() : pageable.get();
  Copy(packed, rig.spare.get(), bytes);  // Touches it; other bytes than the pages'.
  Synchronize();
  const std::vector<int32_t> slots = RandomSlots(2 * count, count);
  const PageRuns runs = *PageRuns::FromPages(std::vector<int64_t>(slots.begin(), slots.end()));
  const BufferInfo buffer{rig.pool.get(), 2 * bytes, item};
  std::vector<std::span<std::byte>> pieces;
  std::vector<BytesMove> moves;
  const auto each_chunk = [&](const auto& visit) {
    for (int64_t at = 0; at < bytes; at += chunk) visit(at, std::min(chunk, bytes - at));
  };
  return Measure(
      {absl::StrCat(gather ? "gather " : "scatter ", SizeName(item), ", chunks of ", chunk >> 10,
                    " KiB", pinned ? "" : ", pageable"),
       static_cast<double>(bytes), 0.9,
       [&] {
         each_chunk([&](int64_t at, int64_t size) {
           pieces.clear();
           AppendPagePieces(buffer, runs, at, size, &pieces);
           moves.clear();
           for (std::byte* place = packed + at; const std::span<std::byte> piece : pieces) {
             const auto size_of_piece = static_cast<int64_t>(piece.size());
             moves.push_back(gather ? BytesMove{piece.data(), place, size_of_piece}
                                    : BytesMove{place, piece.data(), size_of_piece});
             place += size_of_piece;
           }
           Must(memory->MoveApart(moves));
         });
       },
       [&] {
         each_chunk([&](int64_t at, int64_t size) {
           std::byte* const there = rig.spare.get() + at;
           Copy(gather ? packed + at : there, gather ? there : packed + at, size);
           Synchronize();
         });
       },
       [&] {
         std::memcpy(rig.host_packed.get(), packed, static_cast<size_t>(pinned ? 0 : bytes));
         Copy(rig.host_pool.get(), rig.pool.get(), 2 * bytes);
         Synchronize();
         return PagesAre(rig, slots, item);
       }},
      rounds);
}

// Of `bytes` in all, out of twice as many.
bool AreMoved(const Rig& rig, std::span<const BytesMove> moves, int64_t bytes) {
  Copy(rig.host_pool.get(), rig.pool.get(), 2 * bytes);
  Copy(rig.host_packed.get(), rig.packed.get(), bytes);
  Synchronize();
  return std::all_of(moves.begin(), moves.end(), [&](const BytesMove& move) {
    return std::memcmp(rig.host_pool.get() + (move.from - rig.pool.get()),
                       rig.host_packed.get() + (move.to - rig.packed.get()),
                       static_cast<size_t>(move.bytes)) == 0;
  });
}

// Pages to pages of another pool on the device, so many bytes at a time, as a peer's pool is read
// in place; the limit waits for plain copies of as many bytes.
bool MeasureMoves(const Rig& rig, int64_t item, int64_t at_a_time, int rounds) {
  const int64_t count = kDeviceBytes / item;
  const auto memory = CudaMemory(0);
  const std::vector<int32_t> from = RandomSlots(2 * count, count), to = RandomSlots(count, count);
  const auto each_part = [&](const auto& visit) {
    const int64_t part = at_a_time / item;
    for (int64_t i = 0; i < count; i += part) visit(i, std::min(i + part, count));
  };
  std::vector<BytesMove> moves;
  const auto add_moves = [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      moves.push_back({rig.pool.get() + from[i] * item, rig.packed.get() + to[i] * item, item});
    }
  };
  return Measure({absl::StrCat("move ", SizeName(item), ", ", at_a_time >> 20, " MiB at a time"),
                  static_cast<double>(count * item), 0.5,
                  [&] {
                    each_part([&](int64_t first, int64_t end) {
                      moves.clear();
                      add_moves(first, end);
                      Must(memory->MoveApart(moves));
                    });
                  },
                  [&] {
                    each_part([&](int64_t first, int64_t end) {
                      Copy(rig.spare.get() + first * item, rig.pool.get() + first * item,
                           (end - first) * item);
                      Synchronize();
                    });
                  },
                  [&] {
                    moves.clear();
                    add_moves(0, count);
                    return AreMoved(rig, moves, count * item);
                  }},
                 rounds);
}

// The same pages of each of many tensors, all at once, as a peer's pool on a device is read; the
// limit is one plain copy of as many bytes, waited for too.
bool MeasureRepeatedMoves(const Rig& rig, int64_t item, int64_t pages, int64_t tensors,
                          int rounds) {
  const int64_t count = pages * tensors;
  const auto memory = CudaMemory(0);
  const std::vector<int32_t> from = RandomSlots(2 * pages, pages), to = RandomSlots(pages, pages);
  std::vector<ItemsMove> items;
  for (int64_t i = 0; i < pages; ++i) items.push_back({from[i], to[i], 1});
  std::vector<PlaceMove> places;
  for (int64_t i = 0; i < tensors; ++i) {
    places.push_back(
        {rig.pool.get() + 2 * pages * item * i, rig.packed.get() + pages * item * i, item});
  }
  return Measure(
      {absl::StrCat("move ", SizeName(item), ", ", pages, " at ", tensors, " places"),
       static_cast<double>(count * item), 0.5, [&] { Must(memory->MoveItemsApart(items, places)); },
       [&] {
         Copy(rig.spare.get(), rig.pool.get(), count * item);
         Synchronize();
       },
       [&] { return AreMoved(rig, MovesOf(items, places), count * item); }},
      rounds);
}

// ---------------------------------------------------------------- numbers

constexpr int64_t kHeads = 8, kDim = 128, kValues = kHeads * kDim;

// Rows that differ, as floats of a dtype.
std::vector<std::byte> RandomRows(DType dtype, int64_t rows) {
  std::mt19937_64 random(2);
  std::vector<float> values(static_cast<size_t>(rows * kValues));
  for (float& value : values) value = static_cast<float>(random() % 2000) - 1000;
  std::vector<std::byte> bytes(values.size() * static_cast<size_t>(DTypeBytes(dtype)));
  CastBetween(DType::kFloat32, dtype)(reinterpret_cast<const std::byte*>(values.data()),
                                      bytes.data(), static_cast<int64_t>(values.size()), 1, 1);
  return bytes;
}

// All rows of the device's memory are these again and again: caches hold numbers, not random bits,
// of which many are NaN and most are beyond what kernels take the short way for.
void FillWith(const std::vector<std::byte>& rows, std::byte* there, int64_t bytes) {
  Copy(there, rows.data(), static_cast<int64_t>(rows.size()));
  for (int64_t done = static_cast<int64_t>(rows.size()); done < bytes; done *= 2) {
    Copy(there + done, there, std::min(done, bytes - done));
  }
  Synchronize();
}

// The first rows are those that the processor writes.
bool FirstRowsAre(const TokenView& there, const std::vector<int32_t>& slots, int64_t rows,
                  const std::vector<std::byte>& want) {
  const auto row_bytes = static_cast<size_t>(there.row_bytes());
  std::vector<std::byte> row(row_bytes);
  for (int64_t i = 0; i < rows; ++i) {
    Copy(row.data(), there.row(slots[static_cast<size_t>(i)]), static_cast<int64_t>(row_bytes));
    Synchronize();
    if (std::memcmp(row.data(), &want[static_cast<size_t>(i) * row_bytes], row_bytes) != 0) {
      return false;
    }
  }
  return true;
}

constexpr int64_t kCheckedRows = 256;

// K of 8 heads x 128 at random slots, divided by a scale and stored as another dtype.
bool MeasureStore(const Rig& rig, DType from, DType to, int rounds) {
  const int64_t row_bytes = kValues * (DTypeBytes(from) + DTypeBytes(to));
  const int64_t count = kDeviceBytes / row_bytes;
  const Slots slots(RandomSlots(2 * count, count));
  std::vector<std::byte> first = RandomRows(from, kCheckedRows);
  FillWith(first, rig.packed.get(), count * kValues * DTypeBytes(from));
  const TokenView rows = TokenView::Packed(rig.packed.get(), from, count, kHeads, kDim);
  TokenView stored = TokenView::Packed(rig.pool.get(), to, 2 * count, kHeads, kDim);
  stored.scale = 2.5F;
  std::vector<std::byte> want(static_cast<size_t>(kCheckedRows * kValues * DTypeBytes(to)));
  CastBetween(from, to)(first.data(), want.data(), kCheckedRows * kValues, 1, stored.scale);
  const int64_t half = count * row_bytes / 2;  // Written by the limit, as much is read.
  return Measure(
      {absl::StrCat("store ", DTypeName(from), " as ", DTypeName(to)), static_cast<double>(half),
       0.5,
       [&] {
         Must(CopyTokensCuda(rows, nullptr, stored, slots.on_device(), count, nullptr, kStream));
         Synchronize();
       },
       [&] {
         Copy(rig.spare.get(), rig.pool.get(), half);
         Synchronize();
       },
       [&] { return FirstRowsAre(stored, slots.host, kCheckedRows, want); }},
      rounds);
}

// Rows of bfloat16 to codes and scales, or back.
bool MeasureBlocks(const Rig& rig, BlockFormat format, bool stores, int rounds) {
  const std::vector<KvTensor> tensors = Must(QuantizedTensors(format, "k", kHeads, kDim));
  const int64_t code_bytes = tensors[0].num_heads * tensors[0].head_dim;
  const int64_t num_scales = tensors[1].head_dim;
  const int64_t scale_bytes = num_scales * DTypeBytes(*tensors[1].dtype);
  const int64_t moved = kValues * 2 + code_bytes + scale_bytes;
  const int64_t count = kDeviceBytes / moved;
  const Slots slots(RandomSlots(2 * count, count));
  const TokenView rows = TokenView::Packed(rig.packed.get(), DType::kBFloat16, count, kHeads, kDim);
  const auto views = [&](std::byte* memory, int64_t num_slots) {
    return std::pair(TokenView::Packed(memory, *tensors[0].dtype, num_slots, tensors[0].num_heads,
                                       tensors[0].head_dim),
                     TokenView::Packed(memory + num_slots * code_bytes, *tensors[1].dtype,
                                       num_slots, 1, num_scales));
  };
  const auto [codes, scales] = views(rig.pool.get(), 2 * count);
  // What the processor makes of the first rows.
  std::vector<std::byte> first = RandomRows(DType::kBFloat16, kCheckedRows);
  std::vector<std::byte> quantized(static_cast<size_t>(kCheckedRows * (code_bytes + scale_bytes)));
  const auto [host_codes, host_scales] = views(quantized.data(), kCheckedRows);
  const std::vector<int32_t> in_order = [] {
    std::vector<int32_t> list(kCheckedRows);
    for (size_t i = 0; i < list.size(); ++i) list[i] = static_cast<int32_t>(i);
    return list;
  }();
  const TokenView host_rows =
      TokenView::Packed(first.data(), DType::kBFloat16, kCheckedRows, kHeads, kDim);
  FillWith(first, rig.packed.get(), count * kValues * 2);
  Must(StoreQuantized(format, host_rows, host_codes, host_scales, in_order));
  const auto copy = Must(stores ? QuantizedCopy::PlanStore(format, rows, codes, scales, slots.host)
                                : QuantizedCopy::PlanLoad(format, codes, scales, slots.host, rows));
  if (!stores) {
    Must(LoadQuantized(format, host_codes, host_scales, in_order, host_rows));
    const auto put = Must(QuantizedCopy::PlanStore(format, rows, codes, scales, slots.host));
    Must(RunQuantizedCuda(put, rows, slots.on_device(), kStream));
    Synchronize();
    Copy(rig.packed.get(), rig.spare.get(), count * kValues * 2);
  }
  const auto codes_want =
      std::vector<std::byte>(quantized.begin(), quantized.begin() + kCheckedRows * code_bytes);
  const auto scales_want =
      std::vector<std::byte>(quantized.begin() + kCheckedRows * code_bytes, quantized.end());
  return Measure({absl::StrCat(stores ? "store" : "load", " bfloat16 ", stores ? "as " : "from ",
                               format == BlockFormat::kMxfp4 ? "mxfp4" : "fp8 blocks"),
                  static_cast<double>(count * moved) / 2, 0.5,
                  [&] {
                    Must(RunQuantizedCuda(copy, rows, slots.on_device(), kStream));
                    Synchronize();
                  },
                  [&] {
                    Copy(rig.spare.get(), rig.pool.get(), count * moved / 2);
                    Synchronize();
                  },
                  [&] {
                    if (!stores) return FirstRowsAre(rows, in_order, kCheckedRows, first);
                    return FirstRowsAre(codes, slots.host, kCheckedRows, codes_want) &&
                           FirstRowsAre(scales, slots.host, kCheckedRows, scales_want);
                  }},
                 rounds);
}

// Token rows of pages with tokens outermost to pages with heads outermost.
bool MeasureLayouts(const Rig& rig, int rounds) {
  constexpr int64_t kPage = 16, kRow = kValues * 2;
  const int64_t count = kDeviceBytes / kRow;
  const TokenView nhd = TokenView::Packed(rig.packed.get(), DType::kBFloat16, count, kHeads, kDim);
  TokenView hnd = TokenView::Packed(rig.pool.get(), DType::kBFloat16, count, kHeads, kDim);
  hnd.page_size = kPage;
  hnd.page_stride = kPage * kRow;
  hnd.token_stride = kDim * 2;
  hnd.head_stride = kPage * kDim * 2;
  return Measure({"bfloat16 NHD to HND", static_cast<double>(kDeviceBytes), 0.9,
                  [&] {
                    Must(CopyTokensCuda(nhd, nullptr, hnd, nullptr, count, nullptr, kStream));
                    Synchronize();
                  },
                  [&] {
                    Copy(rig.spare.get(), rig.packed.get(), kDeviceBytes);
                    Synchronize();
                  },
                  [&] {
                    Copy(rig.host_packed.get(), rig.packed.get(), kDeviceBytes);
                    Copy(rig.host_pool.get(), rig.pool.get(), kDeviceBytes);
                    Synchronize();
                    hnd.data = rig.host_pool.get();
                    bool same = true;
                    for (int64_t i = 0; i < count * kHeads; ++i) {
                      same &= std::memcmp(hnd.row(i / kHeads) + i % kHeads * hnd.head_stride,
                                          rig.host_packed.get() + i * kDim * 2, kDim * 2) == 0;
                    }
                    hnd.data = rig.pool.get();
                    return same;
                  }},
                 rounds);
}

// ---------------------------------------------------------------- swap

// Blocks of 4 layers x K and V x 32 KiB from the device to pinned memory, in runs of so many.
bool MeasureSwap(const Rig& rig, int64_t run, int rounds) {
  constexpr int64_t kBlocks = 1024;
  const BlockCacheShape shape = {.num_layers = 4,
                                 .block_size = 16,
                                 .num_kv_heads = kHeads,
                                 .head_dim = kDim,
                                 .dtype = DType::kBFloat16};
  const auto device = Must(BlockCache::Create(shape, 2 * kBlocks, CudaMemory(0)));
  const auto host = Must(BlockCache::Create(shape, kBlocks));
  const auto pin = Must(PinHostMemory(host->buffer_infos(), host));
  const int64_t moved = kBlocks * shape.block_bytes();
  for (const BufferInfo& buffer : device->buffer_infos()) {
    Copy(buffer.address, rig.host_pool.get() + (buffer.address - device->buffer_infos()[0].address),
         buffer.bytes);
  }
  Synchronize();
  const std::vector<int32_t> firsts = RandomSlots(2 * kBlocks / run, kBlocks / run);
  std::vector<BlockPair> pairs;
  for (int64_t i = 0; i < kBlocks; ++i) pairs.emplace_back(firsts[i / run] * run + i % run, i);
  return Measure(
      {absl::StrCat("swap out blocks, runs of ", run), static_cast<double>(moved), 0.9,
       [&] {
         Must(CopyBlocksCuda(*device, *host, pairs, kStream));
         Synchronize();
       },
       [&] {
         Copy(rig.host_packed.get(), rig.packed.get(), moved);
         Synchronize();
       },
       [&] {
         const std::vector<BufferInfo> from = device->buffer_infos();
         const std::vector<BufferInfo> to = host->buffer_infos();
         std::vector<std::byte> block(static_cast<size_t>(from[0].item_bytes));
         for (size_t buffer = 0; buffer < from.size(); ++buffer) {
           const int64_t item = from[buffer].item_bytes;
           for (const auto& [source, target] : pairs) {
             const std::byte* want =
                 rig.host_pool.get() + (from[buffer].address + source * item - from[0].address);
             if (std::memcmp(want, to[buffer].address + target * item, static_cast<size_t>(item)) !=
                 0) {
               return false;
             }
           }
         }
         return true;
       }},
      rounds);
}

bool MeasureAll(int rounds) {
  const Rig rig;
  bool right = true;
  PrintHead("on the device, random rows", "memcpy");
  for (const int64_t item : {32768, 2048, 1152}) right &= MeasureCopies(rig, item, false, rounds);
  for (const int64_t item : {32768, 2048}) right &= MeasureMoves(rig, item, 64 << 20, rounds);
  right &= MeasureRepeatedMoves(rig, 32768, 256, 64, rounds);
  for (const int64_t item : {2048, 1152}) {
    for (const int64_t pages : {256, 4096}) {
      right &= MeasureRepeatedMoves(rig, item, pages, 64, rounds);
    }
  }
  right &= MeasureLayouts(rig, rounds);
  for (const DType from : {DType::kBFloat16, DType::kFloat32}) {
    right &= MeasureStore(rig, from, DType::kFloat8E4M3, rounds);
  }
  for (const BlockFormat format : {BlockFormat::kMxfp4, BlockFormat::kFp8Block128}) {
    for (const bool stores : {true, false}) right &= MeasureBlocks(rig, format, stores, rounds);
  }
  std::printf("\n");
  PrintHead("between device and pinned host memory", "memcpy");
  FillRandom(rig.host_packed.get(), kDeviceBytes);
  Copy(rig.pool.get(), rig.host_packed.get(), kDeviceBytes);
  Copy(rig.spare.get(), rig.pool.get() + kDeviceBytes, kDeviceBytes);
  Synchronize();
  for (const int64_t item : {32768, 2048, 1152}) right &= MeasureCopies(rig, item, true, rounds);
  for (const int64_t item : {32768, 2048}) {
    for (const int64_t chunk : {1 << 20, 4 << 20}) {
      right &= MeasureChunks(rig, item, chunk, true, true, rounds);
      right &= MeasureChunks(rig, item, chunk, false, true, rounds);
    }
    right &= MeasureChunks(rig, item, 1 << 20, false, false, rounds);
  }
  for (const int64_t run : {1, 16}) right &= MeasureSwap(rig, run, rounds);
  return right;
}

}  // namespace
}  // namespace kvferry::bench

int main(int argc, char** argv) {
  CLI::App app("Kernels on a GPU beside plain copies of as many bytes.");
  int rounds = 9;
  app.add_option("--reps", rounds, "measured rounds of each row")->check(CLI::Range(1, 1000));
  std::string only;
  app.add_option("--only", only, "rows whose names have this in them");
  CLI11_PARSE(app, argc, argv);
  kvferry::bench::MeasureOnly(only);
  cudaDeviceProp device = {};
  if (const absl::Status status = kvferry::CudaStatus(cudaGetDeviceProperties(&device, 0), "GPU 0");
      !status.ok()) {
    std::cerr << status << std::endl;
    return 1;
  }
  std::printf("%s, %d multiprocessors, CUDA %d\n", device.name, device.multiProcessorCount,
              CUDART_VERSION / 1000);
  return kvferry::bench::MeasureAll(rounds) ? 0 : 1;
}
