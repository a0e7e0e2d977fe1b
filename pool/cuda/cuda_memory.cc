#include "pool/cuda/cuda_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/slab.h"
#include "base/status.h"
#include "pool/block_quant.h"
#include "pool/cuda/apart_cuda.h"
#include "pool/cuda/block_copy_cuda.h"
#include "pool/cuda/block_quant_cuda.h"
#include "pool/cuda/cuda_status.h"
#include "pool/cuda/host_pin.h"
#include "pool/cuda/on_device.h"
#include "pool/cuda/places.h"
#include "pool/cuda/shared_cuda.h"
#include "pool/cuda/token_copy_cuda.h"
#include "pool/token_copy.h"

namespace kvferry {
namespace {

constexpr int64_t kPieceBytes = 16 << 20;  // Of rows on their way from or to the host.
constexpr cudaStream_t kDefaultStream = nullptr;

// On `device`, which is the current one.
absl::StatusOr<std::shared_ptr<std::byte>> ZeroedMemory(int64_t bytes, int device) {
  void* memory = nullptr;
  KVFERRY_RETURN_IF_ERROR(CudaStatus(cudaMalloc(&memory, static_cast<size_t>(bytes)),
                                     absl::StrCat("cuda memory: ", bytes, " bytes refused")));
  std::shared_ptr<std::byte> owner(static_cast<std::byte*>(memory), [device](std::byte* slab) {
    OnDevice(device, [slab] {
      return CudaStatus(cudaFree(slab), "cuda memory: freeing");
    }).IgnoreError();  // Nothing can be done about it.
  });
  KVFERRY_RETURN_IF_ERROR(
      CudaStatus(cudaMemset(memory, 0, static_cast<size_t>(bytes)), "cuda memory: zeroing"));
  // cudaMemset returns before it is done, and streams need not wait for it.
  KVFERRY_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(nullptr), "cuda memory: zeroing"));
  return owner;
}

// Memory of the current device for one call, in the order of the stream.
absl::StatusOr<std::shared_ptr<std::byte>> Scratch(int64_t bytes, cudaStream_t stream) {
  void* memory = nullptr;
  KVFERRY_RETURN_IF_ERROR(
      CudaStatus(cudaMallocAsync(&memory, static_cast<size_t>(bytes), stream),
                 absl::StrCat("cuda memory: ", bytes, " bytes for a copy refused")));
  return std::shared_ptr<std::byte>(static_cast<std::byte*>(memory), [stream](std::byte* scratch) {
    cudaFreeAsync(scratch, stream);
  });
}

// ---------------------------------------------------------------- where rows lie

// Of memory that a pool on the device adopts.
absl::Status CheckLiesOn(int device, const std::byte* address) {
  KVFERRY_ASSIGN_OR_RETURN(const cudaPointerAttributes attributes, AttributesOf(address));
  if (attributes.type == cudaMemoryTypeManaged) return absl::OkStatus();  // On every device.
  const bool on_a_device = attributes.type == cudaMemoryTypeDevice;
  if (on_a_device && attributes.device == device) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "cuda memory: it lies ",
      on_a_device ? absl::StrCat("on device ", attributes.device) : "in the host's memory",
      ", but is said to lie on device ", device));
}

bool NeedsTheHost(Place place) { return place != Place::kPinned && place != Place::kDevice; }

// ---------------------------------------------------------------- copies

// The copies of one call, on the current device.
class Copies {
 public:
  Copies(int device, ThreadPool* threads, cudaStream_t stream)
      : device_(device), threads_(threads), stream_(stream) {}

  absl::Status Run(std::span<const TokenCopy> copies) {
    std::vector<Ends> ends;
    for (const TokenCopy& copy : copies) {
      if (copy.num_rows() == 0) continue;
      KVFERRY_ASSIGN_OR_RETURN(const Place from, PlaceOf(copy.from().Hull(), device_));
      KVFERRY_ASSIGN_OR_RETURN(const Place to, PlaceOf(copy.to().Hull(), device_));
      ends.push_back({&copy, from, to});
    }
    for (const Ends& one : ends) KVFERRY_RETURN_IF_ERROR(RunOne(one));
    return absl::OkStatus();
  }

  absl::Status Run(std::span<const QuantizedCopy> copies) {
    std::vector<std::pair<const QuantizedCopy*, Place>> places;
    for (const QuantizedCopy& copy : copies) {
      if (copy.slots().empty()) continue;
      for (const TokenView& view : {copy.codes(), copy.scales()}) {
        KVFERRY_ASSIGN_OR_RETURN(const Place place, PlaceOf(view.Hull(), device_));
        if (NeedsTheHost(place)) {
          return absl::InvalidArgumentError(absl::StrCat(
              "cuda memory: codes and scales must lie where device ", device_, " reaches them"));
        }
      }
      KVFERRY_ASSIGN_OR_RETURN(const Place rows, PlaceOf(copy.rows().Hull(), device_));
      places.emplace_back(&copy, rows);
    }
    for (const auto& [copy, rows] : places) KVFERRY_RETURN_IF_ERROR(RunOne(*copy, rows));
    return absl::OkStatus();
  }

 private:
  struct Ends {
    const TokenCopy* copy;
    Place from, to;
  };
  // Rows of the host, by a list or in order.
  struct HostRows {
    const TokenView& view;
    const int32_t* list;
    int64_t count;
    bool whole;     // In one piece: the device has no list that one could begin in the middle of.
    bool in_place;  // InPlace(); else they are packed on the host first, or unpacked there.
  };
  // Rows [begin, begin + host.num_slots) of a copy on their way, one after the other.
  struct Piece {
    int64_t begin;
    TokenView host, device;
  };

  absl::Status RunOne(const Ends& ends) {
    const TokenCopy& copy = *ends.copy;
    if (NeedsTheHost(ends.from) && NeedsTheHost(ends.to)) {
      copy.Run(threads_);
      return absl::OkStatus();
    }
    KVFERRY_ASSIGN_OR_RETURN(const int32_t* from_slots,
                             UploadedUnless(NeedsTheHost(ends.from), copy, copy.from_slots()));
    KVFERRY_ASSIGN_OR_RETURN(const int32_t* to_slots,
                             UploadedUnless(NeedsTheHost(ends.to), copy, copy.to_slots()));
    const auto from_of = [&](const Piece& piece) {
      return from_slots == nullptr ? nullptr : from_slots + piece.begin;
    };
    const auto to_of = [&](const Piece& piece) {
      return to_slots == nullptr ? nullptr : to_slots + piece.begin;
    };
    if (NeedsTheHost(ends.from)) {
      return FromHost({copy.from(), copy.from_slots(), copy.num_rows(), to_slots == nullptr,
                       InPlace(ends.from, copy.from(), copy.from_slots())},
                      [&](const Piece& piece) {
                        return CopyTokensCuda(piece.device, nullptr, copy.to(), to_of(piece),
                                              piece.host.num_slots, nullptr, stream_);
                      });
    }
    if (NeedsTheHost(ends.to)) {
      return ToHost({copy.to(), copy.to_slots(), copy.num_rows(), from_slots == nullptr,
                     InPlace(ends.to, copy.to(), copy.to_slots())},
                    [&](const Piece& piece) {
                      return CopyTokensCuda(copy.from(), from_of(piece), piece.device, nullptr,
                                            piece.host.num_slots, nullptr, stream_);
                    });
    }
    return CopyTokensCuda(copy.from(), from_slots, copy.to(), to_slots, copy.num_rows(), nullptr,
                          stream_);
  }

  absl::Status RunOne(const QuantizedCopy& copy, Place place) {
    const auto num_rows = static_cast<int64_t>(copy.slots().size());
    KVFERRY_ASSIGN_OR_RETURN(const int32_t* slots, Uploaded(num_rows, copy.slots().data()));
    if (!NeedsTheHost(place)) return RunQuantizedCuda(copy, copy.rows(), slots, stream_);
    const auto run = [&](const Piece& piece) {
      return RunQuantizedCuda(copy, piece.device, slots + piece.begin, stream_);
    };
    const HostRows rows = {copy.rows(), nullptr, num_rows, false,
                           InPlace(place, copy.rows(), nullptr)};
    return copy.stores() ? FromHost(rows, run) : ToHost(rows, run);
  }

  // Whether rows on the host lie one after the other, and CUDA copies them where they are.
  static bool InPlace(Place place, const TokenView& rows, const int32_t* list) {
    return place == Place::kHost && list == nullptr && rows.SlotsAreDense();
  }

  // Each piece of the rows for on_device() when it is there.
  template <typename OnDevice>
  absl::Status FromHost(const HostRows& rows, const OnDevice& on_device) {
    return ForEachPiece(rows, [&](const Piece& piece) {
      if (!rows.in_place) {
        KVFERRY_RETURN_IF_ERROR(
            CopyOnHost(rows.view, Slots(rows, piece), piece.host, InOrder(piece)));
      }
      KVFERRY_RETURN_IF_ERROR(CopyPacked(piece.host, piece.device));
      return on_device(piece);
    });
  }
  // Each piece of the rows behind on_device(), which writes it.
  template <typename OnDevice>
  absl::Status ToHost(const HostRows& rows, const OnDevice& on_device) {
    return ForEachPiece(rows, [&](const Piece& piece) {
      KVFERRY_RETURN_IF_ERROR(on_device(piece));
      KVFERRY_RETURN_IF_ERROR(CopyPacked(piece.device, piece.host));
      if (rows.in_place) return absl::OkStatus();
      return CopyOnHost(piece.host, InOrder(piece), rows.view, Slots(rows, piece));
    });
  }

  template <typename Visit>
  absl::Status ForEachPiece(const HostRows& rows, const Visit& visit) {
    const TokenView& like = rows.view;
    const int64_t row_bytes = like.row_bytes();
    const int64_t most =
        rows.whole ? rows.count : std::clamp<int64_t>(kPieceBytes / row_bytes, 1, rows.count);
    std::shared_ptr<std::byte> host;
    if (!rows.in_place) {
      KVFERRY_ASSIGN_OR_RETURN(host, MapSlab(most * row_bytes));
      order_.resize(static_cast<size_t>(rows.count));
      std::iota(order_.begin(), order_.end(), 0);
    }
    KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<std::byte> device,
                             Scratch(most * row_bytes, stream_));
    const auto packed = [&like](std::byte* data, int64_t count) {
      TokenView view = TokenView::Packed(data, like.dtype, count, like.num_heads, like.head_dim);
      view.scale = like.scale;
      return view;
    };
    for (int64_t begin = 0; begin < rows.count; begin += most) {
      const int64_t count = std::min(most, rows.count - begin);
      std::byte* const on_host = rows.in_place ? like.row(begin) : host.get();
      KVFERRY_RETURN_IF_ERROR(
          visit(Piece{begin, packed(on_host, count), packed(device.get(), count)}));
    }
    return absl::OkStatus();
  }

  absl::Status CopyOnHost(const TokenView& from, std::span<const int32_t> from_slots,
                          const TokenView& to, std::span<const int32_t> to_slots) {
    KVFERRY_ASSIGN_OR_RETURN(const TokenCopy copy, TokenCopy::Plan(from, from_slots, to, to_slots));
    copy.Run(threads_);
    return absl::OkStatus();
  }

  // Waits until the host's side may be used again.
  absl::Status CopyPacked(const TokenView& from, const TokenView& to) const {
    KVFERRY_RETURN_IF_ERROR(CudaStatus(
        cudaMemcpyAsync(to.data, from.data, static_cast<size_t>(to.num_slots * to.row_bytes()),
                        cudaMemcpyDefault, stream_),
        "cuda memory: rows between device and host"));
    return CudaStatus(cudaStreamSynchronize(stream_), "cuda memory: rows between device and host");
  }

  // A piece of a list on the host, null being 0, 1, 2, ... .
  std::span<const int32_t> Slots(const HostRows& rows, const Piece& piece) const {
    return {(rows.list == nullptr ? order_.data() : rows.list) + piece.begin,
            static_cast<size_t>(piece.host.num_slots)};
  }
  std::span<const int32_t> InOrder(const Piece& piece) const {
    return {order_.data(), static_cast<size_t>(piece.host.num_slots)};
  }

  absl::StatusOr<const int32_t*> UploadedUnless(bool on_host, const TokenCopy& copy,
                                                const int32_t* list) {
    return on_host ? nullptr : Uploaded(copy.num_rows(), list);
  }
  // A list of a copy in device memory, null for null. Each goes there once: the copies of all
  // layers have the same ones.
  absl::StatusOr<const int32_t*> Uploaded(int64_t num_rows, const int32_t* list) {
    if (list == nullptr) return nullptr;
    const int64_t bytes = num_rows * static_cast<int64_t>(sizeof *list);
    std::shared_ptr<std::byte>& there = lists_[{list, bytes}];
    if (there == nullptr) {
      KVFERRY_ASSIGN_OR_RETURN(there, Scratch(bytes, stream_));
      KVFERRY_RETURN_IF_ERROR(
          CudaStatus(cudaMemcpyAsync(there.get(), list, static_cast<size_t>(bytes),
                                     cudaMemcpyDefault, stream_),
                     "cuda memory: slots"));
    }
    return reinterpret_cast<const int32_t*>(there.get());
  }

  const int device_;
  ThreadPool* const threads_;
  const cudaStream_t stream_;
  std::map<std::pair<const int32_t*, int64_t>, std::shared_ptr<std::byte>> lists_;
  std::vector<int32_t> order_;  // 0, 1, 2, ...
};

absl::Status WaitForCopies(cudaStream_t stream) {
  constexpr absl::string_view kWhat = "cuda memory: copying";
  return stream == kDefaultStream ? CudaStatus(cudaStreamSynchronize(stream), kWhat)
                                  : WaitFor(stream, kWhat);
}

// copy(), and returns when nothing of it is under way in the stream any more. Also when it fails,
// by an error or for want of memory: what has begun uses the caller's lists, rows and blocks.
template <typename Copy>
absl::Status WaitingFor(cudaStream_t stream, const Copy& copy) {
  absl::Status status, waited;
  {
    const absl::Cleanup wait = [&] { waited = WaitForCopies(stream); };
    status = copy();
  }
  status.Update(waited);
  return status;
}

class DeviceMemory : public PoolMemory {
 public:
  explicit DeviceMemory(int device) : device_(device) {}

  std::string name() const override { return absl::StrCat("memory of cuda:", device_); }
  bool on_host() const override { return false; }
  std::optional<int> cuda_device() const override { return device_; }

  absl::StatusOr<std::shared_ptr<std::byte>> Allocate(int64_t bytes) const override {
    return OnDevice(device_, [&] { return ZeroedMemory(bytes, device_); });
  }

  absl::Status CheckHolds(std::span<const std::byte> bytes) const override {
    return OnDevice(device_, [&]() -> absl::Status {
      KVFERRY_RETURN_IF_ERROR(CheckLiesOn(device_, &bytes.front()));
      return CheckLiesOn(device_, &bytes.back());
    });
  }

  absl::Status Run(std::span<const TokenCopy> copies, ThreadPool* threads) const override {
    return OnDevice(device_, [&] { return RunAll(copies, threads, kDefaultStream); });
  }
  absl::Status RunQuantized(std::span<const QuantizedCopy> copies,
                            ThreadPool* threads) const override {
    return OnDevice(device_, [&] { return RunAll(copies, threads, kDefaultStream); });
  }
  absl::Status RunBlocks(const BlockCache& from, BlockCache& to,
                         std::span<const BlockPair> pairs) const override {
    return OnDevice(device_, [&] {
      return WaitingFor(kDefaultStream,
                        [&] { return CopyBlocksCuda(from, to, pairs, kDefaultStream); });
    });
  }
  absl::Status RunApart(std::span<const TokenCopy> copies) const override {
    return OnDevice(device_, [&]() -> absl::Status {
      KVFERRY_ASSIGN_OR_RETURN(const cudaStream_t stream, StreamApart(device_));
      return RunAll(copies, nullptr, stream);
    });
  }
  absl::Status MoveApart(std::span<const BytesMove> moves) const override {
    return OnDevice(device_, [&] { return MoveApartCuda(moves, device_); });
  }
  absl::StatusOr<std::shared_ptr<const MovesUnderWay>> BeginMoveApart(
      std::span<const BytesMove> moves) const override {
    return OnDevice(device_, [&] { return BeginMoveApartCuda(moves, device_); });
  }
  absl::Status MoveItemsApart(std::span<const ItemsMove> items,
                              std::span<const PlaceMove> places) const override {
    return OnDevice(device_, [&] { return MoveItemsApartCuda(items, places, device_); });
  }
  absl::StatusOr<std::vector<SharedPart>> Share(std::span<const std::byte> bytes) const override {
    return OnDevice(device_, [bytes] { return ShareCuda(bytes); });
  }
  absl::StatusOr<std::shared_ptr<const std::byte>> MapShared(absl::string_view name,
                                                             int64_t bytes) const override {
    return OnDevice(device_, [&] { return MapSharedCuda(name, bytes, device_); });
  }
  absl::StatusOr<std::shared_ptr<const void>> Pin(
      std::span<const std::span<std::byte>> pieces) const override {
    std::vector<BufferInfo> buffers;
    for (const std::span<std::byte>& piece : pieces) {
      const auto bytes = static_cast<int64_t>(piece.size());
      buffers.push_back({piece.data(), bytes, bytes});
    }
    return OnDevice(device_, [&]() -> absl::StatusOr<std::shared_ptr<const void>> {
      KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<const void> pin, PinHostMemory(buffers, nullptr));
      return pin;
    });
  }
  bool Reaches(std::span<const std::byte> host) const override {
    const absl::StatusOr<Place> place = OnDevice(device_, [&] { return PlaceOf(host, device_); });
    return place.ok() && *place == Place::kPinned;
  }

 private:
  // On the current device.
  template <typename Copy>
  absl::Status RunAll(std::span<const Copy> copies, ThreadPool* threads,
                      cudaStream_t stream) const {
    Copies running(device_, threads, stream);
    return WaitingFor(stream, [&] { return running.Run(copies); });
  }

  const int device_;
};

}  // namespace

std::shared_ptr<const PoolMemory> CudaMemory(int device) {
  return std::make_shared<const DeviceMemory>(device);
}

}  // namespace kvferry
