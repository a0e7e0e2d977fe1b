#include "pool/token_kv_pool.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "pool/rows_aside.h"

namespace kvferry {
namespace {

absl::Status CheckTokens(const KvLayout& layout, int64_t num_tokens) {
  // Slots are int32 everywhere; so is the last one of the padding page and all others.
  const int64_t max_tokens = (int64_t{INT32_MAX} / layout.page_size - 1) * layout.page_size;
  if (num_tokens >= 1 && num_tokens <= max_tokens && num_tokens % layout.page_size == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "token pool: num_tokens is ", num_tokens, " but must be a multiple of page_size ",
      layout.page_size, " in [", layout.page_size, ", ", max_tokens, "]"));
}

absl::Status CheckHalves(const KvLayout& layout) {
  if (layout.tensors[0].name != "kv" || layout.tensors[0].head_dim % 2 == 0)
    return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("token pool: head_dim of \"kv\" is ",
                                                 layout.tensors[0].head_dim,
                                                 " but must be even: half of it is the key"));
}

absl::Status CheckValueDim(const KvLayout& layout, int64_t value_dim) {
  const bool latent = layout.tensors[0].name == "latent";
  const int64_t max_dim = latent ? layout.tensors[0].head_dim : 0;
  if (value_dim >= 0 && value_dim <= max_dim) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("token pool: latent_value_dim is ", value_dim,
                                                 " but must lie in [0, ", max_dim, "] for ",
                                                 layout.ToString()));
}

// All that a token pool asks of its pages.
absl::Status CheckPages(const KvLayout& layout, int64_t num_tokens, int64_t latent_value_dim) {
  KVFERRY_RETURN_IF_ERROR(CheckTokens(layout, num_tokens));
  KVFERRY_RETURN_IF_ERROR(CheckHalves(layout));
  KVFERRY_RETURN_IF_ERROR(CheckValueDim(layout, latent_value_dim));
  return CheckTokensCanBeFound(layout);
}

// ---------------------------------------------------------------- copies within one memory

std::span<const std::byte> BytesOf(const BufferInfo& buffer) {
  return {buffer.address, static_cast<size_t>(buffer.bytes)};
}

// From the first byte of a pool's buffers to the last.
std::span<const std::byte> Hull(const KvPool& pool) {
  const std::less<const std::byte*> below;
  std::byte* begin = pool.buffer_infos()[0].address;
  std::byte* end = begin;
  for (const BufferInfo& buffer : pool.buffer_infos()) {
    begin = std::min(begin, buffer.address, below);
    end = std::max(end, buffer.address + buffer.bytes, below);
  }
  return {begin, static_cast<size_t>(end - begin)};
}

bool ShareMemory(const KvPool& a, const KvPool& b) {
  if (&a == &b) return true;
  if (!Meet(Hull(a), Hull(b))) return false;
  // An engine's buffers may lie in between those of another pool.
  return std::any_of(
      a.buffer_infos().begin(), a.buffer_infos().end(), [&b](const BufferInfo& mine) {
        return std::any_of(
            b.buffer_infos().begin(), b.buffer_infos().end(),
            [&mine](const BufferInfo& theirs) { return Meet(BytesOf(mine), BytesOf(theirs)); });
      });
}

// Whether a slot gets another row and is the source of one, too, which the order of copies decides.
bool ReadsWhatItWrites(std::span<const int32_t> from_slots, std::span<const int32_t> to_slots) {
  const absl::flat_hash_set<int32_t> read(from_slots.begin(), from_slots.end());
  for (size_t i = 0; i < to_slots.size(); ++i) {
    if (to_slots[i] != from_slots[i] && read.contains(to_slots[i])) return true;
  }
  return false;
}

}  // namespace

absl::StatusOr<std::shared_ptr<TokenKvPool>> TokenKvPool::Create(
    const KvLayout& layout, int64_t num_tokens, int64_t latent_value_dim,
    const std::shared_ptr<const PoolMemory>& memory) {
  KVFERRY_RETURN_IF_ERROR(layout.Validate());
  // Before memory is taken, which may be much.
  KVFERRY_RETURN_IF_ERROR(CheckPages(layout, num_tokens, latent_value_dim));
  const int64_t num_pages = num_tokens / layout.page_size + 1;
  if (const int64_t max_pages = KvPool::MaxPages(layout); num_pages > max_pages) {
    return absl::InvalidArgumentError(
        absl::StrCat("token pool: num_tokens is ", num_tokens, " but must be at most ",
                     (max_pages - 1) * layout.page_size, " for this layout"));
  }
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<KvPool> pool,
                           memory == nullptr ? KvPool::Create(layout, num_pages)
                                             : KvPool::CreateIn(layout, num_pages, memory));
  return Over(std::move(pool), latent_value_dim);
}

absl::StatusOr<std::shared_ptr<TokenKvPool>> TokenKvPool::Over(std::shared_ptr<KvPool> pool,
                                                               int64_t latent_value_dim) {
  const KvLayout& layout = pool->layout();
  KVFERRY_RETURN_IF_ERROR(
      CheckPages(layout, (pool->num_pages() - 1) * layout.page_size, latent_value_dim));
  std::vector<TokenView> views;
  for (int64_t tensor = 0; tensor < layout.num_tensors(); ++tensor) {
    for (int64_t layer = 0; layer < layout.num_layers; ++layer) {
      KVFERRY_ASSIGN_OR_RETURN(const TokenView view, TokenView::Of(*pool, layer, tensor));
      views.push_back(view);
    }
  }
  return std::shared_ptr<TokenKvPool>(
      new TokenKvPool(std::move(pool), std::move(views), latent_value_dim));
}

TokenKvPool::TokenKvPool(std::shared_ptr<KvPool> pool, std::vector<TokenView> views,
                         int64_t latent_value_dim)
    : pool_(std::move(pool)),
      views_(std::move(views)),
      latent_value_dim_(latent_value_dim),
      layers_(pool_->layout().num_layers) {}

int64_t TokenKvPool::tensor_bytes(int64_t tensor) const {
  return layout().num_layers * pool_->buffer(0, tensor).bytes;
}

// ---------------------------------------------------------------- keys and values

absl::Status TokenKvPool::CheckLayer(int64_t layer) const {
  if (layer >= 0 && layer < layout().num_layers) return absl::OkStatus();
  return absl::OutOfRangeError(
      absl::StrCat("token pool: layer ", layer, " is not in [0, ", layout().num_layers, ")"));
}

TokenView TokenKvPool::KeyView(int64_t layer) const {
  const TokenView first = view(layer, 0);
  return layout().tensors[0].name == "kv" ? first.Slice(0, first.head_dim / 2) : first;
}

TokenView TokenKvPool::ValueView(int64_t layer) const {
  const TokenView first = view(layer, 0);
  const std::string& name = layout().tensors[0].name;
  if (name == "kv") return first.Slice(first.head_dim / 2, first.head_dim / 2);
  if (name == "latent") {
    return first.Slice(0, latent_value_dim_ == 0 ? first.head_dim : latent_value_dim_);
  }
  // Codes of keys may have their scales behind them.
  for (int64_t tensor = 1; tensor < layout().num_tensors(); ++tensor) {
    if (layout().tensors[tensor].name == "v") return view(layer, tensor);
  }
  return layout().num_tensors() > 1 ? view(layer, 1) : first;
}

absl::StatusOr<TokenView> TokenKvPool::Key(int64_t layer, Deadline deadline) {
  KVFERRY_RETURN_IF_ERROR(layers_.WaitFor(layer, deadline));
  return KeyView(layer);
}

absl::StatusOr<TokenView> TokenKvPool::Value(int64_t layer, Deadline deadline) {
  KVFERRY_RETURN_IF_ERROR(layers_.WaitFor(layer, deadline));
  return ValueView(layer);
}

std::vector<TokenView> TokenKvPool::Parts(int64_t layer) const {
  std::vector<TokenView> parts;
  int64_t next = 0;
  if (layout().tensors[0].name == "kv") {
    parts = {KeyView(layer), ValueView(layer)};
    next = 1;
  }
  for (; next < layout().num_tensors(); ++next) parts.push_back(view(layer, next));
  return parts;
}

absl::Status TokenKvPool::Set(int64_t layer, std::span<const int32_t> slots,
                              std::span<const TokenView> rows, std::span<const float> scales) {
  KVFERRY_RETURN_IF_ERROR(CheckLayer(layer));
  std::vector<TokenView> parts = Parts(layer);
  if (rows.size() != parts.size() || (!scales.empty() && scales.size() != parts.size())) {
    return absl::InvalidArgumentError(absl::StrCat("token pool: ", rows.size(), " tensors and ",
                                                   scales.size(), " scales given, but a layer has ",
                                                   parts.size(), " parts"));
  }
  std::vector<TokenCopy> copies;
  for (size_t part = 0; part < parts.size(); ++part) {
    if (!scales.empty()) parts[part].scale = scales[part];
    KVFERRY_ASSIGN_OR_RETURN(const TokenCopy copy,
                             TokenCopy::PlanScatter(rows[part], parts[part], slots));
    copies.push_back(copy);
  }
  // Rows may be a view of this pool's own.
  return Meet(rows, parts) ? RunAside(copies, memory(), threads_.get())
                           : memory().Run(copies, threads_.get());
}

// ---------------------------------------------------------------- flat data

int64_t TokenKvPool::layer_flat_bytes(int64_t num_slots) const {
  return num_slots * (layout().layer_page_bytes() / layout().page_size);
}

int64_t TokenKvPool::flat_bytes(int64_t num_slots) const {
  return layout().num_layers * layer_flat_bytes(num_slots);
}

absl::StatusOr<std::vector<TokenView>> TokenKvPool::FlatViews(
    int64_t first_layer, int64_t num_layers, int64_t num_slots,
    std::span<const std::byte> flat) const {
  const int64_t want = num_layers * layer_flat_bytes(num_slots);
  if (static_cast<int64_t>(flat.size()) != want) {
    return absl::InvalidArgumentError(absl::StrCat("token pool: flat data of ", flat.size(),
                                                   " bytes, but ", num_slots, " slots of ",
                                                   num_layers, " layers have ", want));
  }
  std::vector<TokenView> views;
  auto* next = const_cast<std::byte*>(flat.data());  // Written to only when it came as writable.
  for (int64_t tensor = 0; tensor < layout().num_tensors(); ++tensor) {
    for (int64_t layer = first_layer; layer < first_layer + num_layers; ++layer) {
      const TokenView rows = view(layer, tensor);
      views.push_back(
          TokenView::Packed(next, rows.dtype, num_slots, rows.num_heads, rows.head_dim));
      next += num_slots * rows.row_bytes();
    }
  }
  return views;
}

absl::Status TokenKvPool::CopyFlat(int64_t first_layer, int64_t num_layers,
                                   std::span<const int32_t> slots, std::span<const std::byte> flat,
                                   bool read) const {
  KVFERRY_ASSIGN_OR_RETURN(
      const std::vector<TokenView> packed,
      FlatViews(first_layer, num_layers, static_cast<int64_t>(slots.size()), flat));
  std::vector<TokenCopy> copies;
  std::vector<TokenView> views;
  for (size_t i = 0; i < packed.size(); ++i) {
    const int64_t index = static_cast<int64_t>(i);
    const TokenView rows = view(first_layer + index % num_layers, index / num_layers);
    views.push_back(rows);
    KVFERRY_ASSIGN_OR_RETURN(const TokenCopy copy,
                             read ? TokenCopy::PlanGather(rows, slots, packed[i])
                                  : TokenCopy::PlanScatter(packed[i], rows, slots));
    copies.push_back(copy);
  }
  // `flat` may be a view of this pool's own.
  return Meet(packed, views) ? RunAside(copies, memory(), threads_.get())
                             : memory().Run(copies, threads_.get());
}

absl::Status TokenKvPool::ReadFlat(std::span<const int32_t> slots,
                                   std::span<std::byte> flat) const {
  return CopyFlat(0, layout().num_layers, slots, flat, true);
}

absl::Status TokenKvPool::WriteFlat(std::span<const int32_t> slots,
                                    std::span<const std::byte> flat) {
  return CopyFlat(0, layout().num_layers, slots, flat, false);
}

absl::Status TokenKvPool::ReadFlatLayer(int64_t layer, std::span<const int32_t> slots,
                                        std::span<std::byte> flat) const {
  KVFERRY_RETURN_IF_ERROR(CheckLayer(layer));
  return CopyFlat(layer, 1, slots, flat, true);
}

absl::Status TokenKvPool::WriteFlatLayer(int64_t layer, std::span<const int32_t> slots,
                                         std::span<const std::byte> flat) {
  KVFERRY_RETURN_IF_ERROR(CheckLayer(layer));
  return CopyFlat(layer, 1, slots, flat, false);
}

// ---------------------------------------------------------------- between pools

absl::Status TokenKvPool::CheckSameTensors(const TokenKvPool& other) const {
  const KvLayout& theirs = other.layout();
  bool same =
      layout().num_layers == theirs.num_layers && layout().num_tensors() == theirs.num_tensors();
  for (size_t i = 0; same && i < theirs.tensors.size(); ++i) {
    same = layout().tensors[i].name == theirs.tensors[i].name;
  }
  if (same) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("token pool: cannot copy from ", theirs.ToString(),
                                                 " to ", layout().ToString()));
}

absl::StatusOr<std::vector<TokenCopy>> TokenKvPool::PlanLayersFrom(
    const TokenKvPool& from, int64_t first_layer, int64_t num_layers,
    std::span<const int32_t> from_slots, std::span<const int32_t> to_slots) const {
  KVFERRY_RETURN_IF_ERROR(CheckSameTensors(from));
  std::vector<TokenCopy> copies;
  for (int64_t tensor = 0; tensor < layout().num_tensors(); ++tensor) {
    for (int64_t layer = first_layer; layer < first_layer + num_layers; ++layer) {
      KVFERRY_ASSIGN_OR_RETURN(
          const TokenCopy copy,
          TokenCopy::Plan(from.view(layer, tensor), from_slots, view(layer, tensor), to_slots));
      copies.push_back(copy);
    }
  }
  return copies;
}

absl::Status TokenKvPool::CheckCopyFrom(const TokenKvPool& from,
                                        std::span<const int32_t> from_slots,
                                        std::span<const int32_t> to_slots) const {
  // All layers are alike.
  return PlanLayersFrom(from, 0, 1, from_slots, to_slots).status();
}

absl::Status TokenKvPool::CopyLayersFrom(const TokenKvPool& from, int64_t first_layer,
                                         int64_t num_layers, std::span<const int32_t> from_slots,
                                         std::span<const int32_t> to_slots) {
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<TokenCopy> copies,
                           PlanLayersFrom(from, first_layer, num_layers, from_slots, to_slots));
  // A device knows how to reach the host, and not the other way round.
  const PoolMemory& copier = memory().on_host() ? from.memory() : memory();
  if (from_slots.empty() || !ShareMemory(*from.pool_, *pool_)) {
    return copier.Run(copies, threads_.get());
  }
  // Slots of one number are one row only if both pools see the memory alike.
  const bool alike = std::all_of(copies.begin(), copies.end(),
                                 [](const TokenCopy& copy) { return copy.from() == copy.to(); });
  if (alike && !ReadsWhatItWrites(from_slots, to_slots)) return copier.Run(copies, threads_.get());
  return RunAside(copies, copier, threads_.get());
}

absl::Status TokenKvPool::CopyLayerFrom(const TokenKvPool& from, int64_t layer,
                                        std::span<const int32_t> from_slots,
                                        std::span<const int32_t> to_slots) {
  KVFERRY_RETURN_IF_ERROR(CheckLayer(layer));
  return CopyLayersFrom(from, layer, 1, from_slots, to_slots);
}

absl::Status TokenKvPool::CopyFrom(const TokenKvPool& from, std::span<const int32_t> from_slots,
                                   std::span<const int32_t> to_slots) {
  return CopyLayersFrom(from, 0, layout().num_layers, from_slots, to_slots);
}

}  // namespace kvferry
