#include "python/rows.h"

#include <cstring>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "python/pool_memory.h"
#include "python/status_error.h"

namespace kvferry {
namespace {

std::vector<ArrayDim> DimsOf(const RowInput& array) {
  const auto value_bytes = static_cast<int64_t>(array.itemsize());
  std::vector<ArrayDim> dims;
  for (size_t i = 0; i < array.ndim(); ++i) {
    dims.push_back({static_cast<int64_t>(array.shape(i)), array.stride(i) * value_bytes});
  }
  return dims;
}

// Returns what is behind the copy.
std::byte* CopyDims(const std::byte* from, std::span<const ArrayDim> dims, int64_t value_bytes,
                    std::byte* to) {
  const bool in_one = dims.size() == 1 && dims[0].stride == value_bytes;
  if (dims.empty() || in_one) {
    const auto bytes = static_cast<size_t>(in_one ? dims[0].size * value_bytes : value_bytes);
    std::memcpy(to, from, bytes);
    return to + bytes;
  }
  for (int64_t i = 0; i < dims[0].size; ++i) {
    to = CopyDims(from + i * dims[0].stride, dims.subspan(1), value_bytes, to);
  }
  return to;
}

}  // namespace

DType FromDlpack(const nanobind::dlpack::dtype& dtype) {
  // The formats that DLPack 1.1 added and nanobind does not name.
  constexpr uint8_t kFloat8E4M3Fn = 10, kFloat8E5M2 = 12;
  for (const DType known : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kUint8}) {
    if (ToDlpack(known) == dtype) return known;
  }
  if (dtype.code == kFloat8E4M3Fn) return DType::kFloat8E4M3;
  if (dtype.code == kFloat8E5M2) return DType::kFloat8E5M2;
  throw StatusError(absl::InvalidArgumentError(
      absl::StrCat("rows have a dtype (DLPack code ", dtype.code, ", ", dtype.bits,
                   " bits) that is none of float32, float16, bfloat16, float8_e4m3fn, "
                   "float8_e5m2, uint8")));
}

const std::byte* GivenRows::Packed(const RowInput& array) {
  copies_.push_back(std::make_unique_for_overwrite<std::byte[]>(array.nbytes()));
  CopyDims(static_cast<const std::byte*>(array.data()), Merged(DimsOf(array)),
           static_cast<int64_t>(array.itemsize()), copies_.back().get());
  return copies_.back().get();
}

void GivenRows::Add(const RowInput& array, int64_t num_rows, int64_t num_heads, int64_t head_dim,
                    const PoolMemory& memory) {
  CheckRowsReach(DeviceOf(array), memory);
  const DType dtype = FromDlpack(array.dtype());
  const auto view_of = [&](const void* data, std::span<const ArrayDim> dims) {
    // Read only: kvferry's views do not say so.
    return TokenView::OfArray(static_cast<std::byte*>(const_cast<void*>(data)), dtype, dims,
                              num_rows, num_heads, head_dim);
  };
  absl::StatusOr<TokenView> view = view_of(array.data(), DimsOf(array));
  // Of another number no copy fits either, and it may take more memory than there is: strides of 0
  // make many values of few.
  const bool has_as_many = static_cast<int64_t>(array.size()) == num_rows * num_heads * head_dim;
  if (view.ok() || !has_as_many) {
    views_.push_back(Value(std::move(view)));
    return;
  }
  if (array.device_type() == nanobind::device::cpu::value) {
    const ArrayDim dim = {static_cast<int64_t>(array.size()), DTypeBytes(dtype)};
    views_.push_back(Value(view_of(Packed(array), {&dim, 1})));
  } else {
    Check(absl::InvalidArgumentError(absl::StrCat(
        view.status().message(),
        "; on a device they are stored from where they lie: make them contiguous first")));
  }
}

}  // namespace kvferry
