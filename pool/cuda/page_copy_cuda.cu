#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "pool/cuda/page_copy_cuda.h"

namespace kvferry {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 65536;  // Pages beyond that take turns.

// One block a page at a time, its threads side by side so that reads and writes coalesce.
template <typename Word, bool kGather>
__global__ void CopyPages(std::byte* buffer, const int64_t* pages, int64_t num_pages,
                          int64_t words_per_page, std::byte* packed) {
  for (int64_t i = blockIdx.x; i < num_pages; i += gridDim.x) {
    Word* page = reinterpret_cast<Word*>(buffer) + pages[i] * words_per_page;
    Word* item = reinterpret_cast<Word*>(packed) + i * words_per_page;
    for (int64_t word = threadIdx.x; word < words_per_page; word += blockDim.x) {
      if constexpr (kGather) {
        item[word] = page[word];
      } else {
        page[word] = item[word];
      }
    }
  }
}

template <bool kGather>
absl::Status Launch(const BufferInfo& buffer, const int64_t* pages, int64_t num_pages,
                    std::byte* packed, cudaStream_t stream) {
  if (num_pages < 0 || buffer.address == nullptr || pages == nullptr || packed == nullptr) {
    return absl::InvalidArgumentError("page copy: a null pointer, or a negative num_pages");
  }
  if (num_pages == 0) return absl::OkStatus();
  const auto blocks = static_cast<unsigned>(std::min(num_pages, kMaxBlocks));
  const auto address =
      reinterpret_cast<uintptr_t>(buffer.address) | reinterpret_cast<uintptr_t>(packed);
  if ((address | static_cast<uintptr_t>(buffer.item_bytes)) % sizeof(int4) == 0) {
    CopyPages<int4, kGather><<<blocks, kThreads, 0, stream>>>(
        buffer.address, pages, num_pages, buffer.item_bytes / static_cast<int64_t>(sizeof(int4)),
        packed);
  } else {
    CopyPages<char, kGather><<<blocks, kThreads, 0, stream>>>(buffer.address, pages, num_pages,
                                                              buffer.item_bytes, packed);
  }
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("page copy: ", cudaGetErrorString(error)));
}

}  // namespace

absl::Status GatherPagesCuda(const BufferInfo& buffer, const int64_t* device_pages,
                             int64_t num_pages, std::byte* packed, cudaStream_t stream) {
  return Launch<true>(buffer, device_pages, num_pages, packed, stream);
}

absl::Status ScatterPagesCuda(const BufferInfo& buffer, const int64_t* device_pages,
                              int64_t num_pages, const std::byte* packed, cudaStream_t stream) {
  // The kernel only reads it.
  return Launch<false>(buffer, device_pages, num_pages, const_cast<std::byte*>(packed), stream);
}

}  // namespace kvferry
