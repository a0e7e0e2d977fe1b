#pragma once

// token_copy.h on an NVIDIA GPU: gather, scatter, store with scale and cast, copy and conversion
// between layouts, in one kernel launch whatever the slots are.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "pool/token_view.h"

namespace kvferry {

// Row to_slots[i] of `to` becomes row from_slots[i] of `from`, for i in [0, num_rows), converted
// to `to`'s dtype and scale; the bytes are those that TokenCopy writes on an x86 processor. A null
// list stands for 0, 1, 2, ... . Whole pages or blocks are rows as well:
// TokenView::Packed(buffer.address, DType::kUint8, num_pages, 1, buffer.item_bytes).
//
// The views' memory and the lists (int32) lie in device memory, or in host memory that the device
// can address (PinHostMemory). Asynchronous on `stream`, whose device must be the current one:
// everything must live, and the lists keep their values, until it has run.
//
// What only the device can see is checked there: a row of which either slot is outside its view
// is skipped, and one is added to *skipped_rows, in memory as above, unless that is null. The
// caller sets it to 0 and reads it when the stream has come this far.
//
// A destination slot that stands twice gets either row or parts of both. Rows must not overlap
// between the views, unless they are the same row and values do not change in size.
//
// INVALID_ARGUMENT as CheckRowsFit() says, for a view without data, a page_size below 1, a negative
// number of heads or values, or rows beyond INT32_MAX in number or values; OUT_OF_RANGE when there
// is no list and the view has fewer than num_rows slots; as CudaStatus() says when the launch
// fails. Nothing is written then. Thread-safe.
absl::Status CopyTokensCuda(const TokenView& from, const int32_t* from_slots, const TokenView& to,
                            const int32_t* to_slots, int64_t num_rows, int64_t* skipped_rows,
                            cudaStream_t stream);

}  // namespace kvferry
