#include "pool/pool_memory.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/host_memory.h"
#include "base/slab.h"
#include "base/status.h"
#include "pool/block_quant.h"
#include "pool/token_copy.h"

namespace kvferry {
namespace {

class Host : public PoolMemory {
 public:
  std::string name() const override { return "host memory"; }
  bool on_host() const override { return true; }
  absl::StatusOr<std::shared_ptr<std::byte>> Allocate(int64_t bytes) const override {
    KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> slab, AllocateForNow(bytes));
    UseHugePages(slab.get(), bytes);
    return slab;
  }
  absl::StatusOr<std::shared_ptr<std::byte>> AllocateForNow(int64_t bytes) const override {
    KVFERRY_RETURN_IF_ERROR(CheckHostRoom(bytes));
    return MapSlab(bytes);
  }
  absl::Status Run(std::span<const TokenCopy> copies, ThreadPool* threads) const override {
    for (const TokenCopy& copy : copies) copy.Run(threads);
    return absl::OkStatus();
  }
  absl::Status RunQuantized(std::span<const QuantizedCopy> copies,
                            ThreadPool* threads) const override {
    for (const QuantizedCopy& copy : copies) copy.Run(threads);
    return absl::OkStatus();
  }
  absl::Status RunApart(std::span<const TokenCopy> copies) const override {
    return Run(copies, nullptr);
  }
  absl::Status MoveApart(std::span<const BytesMove> moves) const override {
    for (const BytesMove& move : moves) {
      std::memcpy(move.to, move.from, static_cast<size_t>(move.bytes));
    }
    return absl::OkStatus();
  }
  absl::StatusOr<std::shared_ptr<const void>> Pin(
      std::span<const std::span<std::byte>> /*pieces*/) const override {
    return nullptr;
  }
};

}  // namespace

std::vector<BytesMove> MovesOf(std::span<const ItemsMove> items,
                               std::span<const PlaceMove> places) {
  std::vector<BytesMove> moves;
  moves.reserve(items.size() * places.size());
  for (const PlaceMove& place : places) {
    for (const ItemsMove& move : items) {
      moves.push_back({place.from + move.from * place.item_bytes,
                       place.to + move.to * place.item_bytes, move.items * place.item_bytes});
    }
  }
  return moves;
}

absl::StatusOr<std::shared_ptr<std::byte>> PoolMemory::AllocateForNow(int64_t bytes) const {
  return Allocate(bytes);
}

absl::Status PoolMemory::RunBlocks(const BlockCache& /*from*/, BlockCache& /*to*/,
                                   std::span<const std::pair<int64_t, int64_t>> /*pairs*/) const {
  return absl::UnimplementedError(absl::StrCat(name(), " copies no blocks of caches"));
}

absl::StatusOr<std::shared_ptr<const MovesUnderWay>> PoolMemory::BeginMoveApart(
    std::span<const BytesMove> moves) const {
  KVFERRY_RETURN_IF_ERROR(MoveApart(moves));
  return nullptr;
}

absl::Status PoolMemory::MoveItemsApart(std::span<const ItemsMove> items,
                                        std::span<const PlaceMove> places) const {
  return MoveApart(MovesOf(items, places));
}

absl::StatusOr<std::vector<PoolMemory::SharedPart>> PoolMemory::Share(
    std::span<const std::byte> /*bytes*/) const {
  return absl::UnimplementedError(absl::StrCat(name(), " has no names for other processes"));
}

absl::StatusOr<std::shared_ptr<const std::byte>> PoolMemory::MapShared(absl::string_view /*name*/,
                                                                       int64_t /*bytes*/) const {
  return absl::UnimplementedError(absl::StrCat(name(), " has no names for other processes"));
}

const std::shared_ptr<const PoolMemory>& HostMemory() {
  static const auto& memory = *new std::shared_ptr<const PoolMemory>(new Host());
  return memory;
}

absl::Status CheckOnHost(absl::string_view what, const PoolMemory& memory) {
  if (memory.on_host()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(what, " lies in ", memory.name(), ", which the processor cannot touch"));
}

}  // namespace kvferry
