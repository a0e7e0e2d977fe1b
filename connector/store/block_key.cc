#include "connector/store/block_key.h"

#include "absl/strings/str_cat.h"
#include "base/check_range.h"
#include "base/sha256.h"
#include "base/status.h"

namespace kvferry {
namespace {

constexpr int64_t kKeyBytes = 32;

// What is hashed, byte by byte the same on every machine.
class Fields {
 public:
  Fields& I64(int64_t value) { return Number(static_cast<uint64_t>(value), 8); }
  Fields& I32(int32_t value) { return Number(static_cast<uint32_t>(value), 4); }
  Fields& Raw(std::string_view bytes) {
    bytes_.append(bytes);
    return *this;
  }
  Fields& Str(std::string_view text) { return I64(static_cast<int64_t>(text.size())).Raw(text); }

  const std::string& bytes() const { return bytes_; }

 private:
  Fields& Number(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) bytes_.push_back(static_cast<char>(value >> (8 * i)));
    return *this;
  }

  std::string bytes_;
};

std::string ScopeFields(const KeyScope& scope) {
  const KvLayout& layout = scope.layout;
  Fields fields;
  fields.Str("kvferry block scope 1").Str(scope.model);
  fields.I64(layout.num_layers).I64(layout.page_size).Str(std::string(DTypeName(layout.dtype)));
  fields.Str(layout.page_format).I64(layout.num_tensors());
  for (const KvTensor& tensor : layout.tensors) {
    fields.Str(tensor.name).I64(tensor.num_heads).I64(tensor.head_dim);
    fields.Str(std::string(DTypeName(layout.dtype_of(tensor))));
  }
  return fields.I64(scope.partition).Str(scope.salt).bytes();
}

absl::Status CheckArguments(int64_t page_size, const KeyScope& scope,
                            std::optional<std::string_view> parent) {
  const auto bad = [](auto&&... what) {
    return absl::InvalidArgumentError(absl::StrCat("block keys: ", what...));
  };
  KVFERRY_RETURN_IF_ERROR(
      CheckRange("block keys", "page_size", page_size, 1, KvLayout::kMaxPageSize));
  if (scope.model.empty()) return bad("model is empty");
  if (scope.partition < 0) return bad("partition is ", scope.partition, " but may not be negative");
  if (parent && parent->size() != kKeyBytes) {
    return bad("parent has ", parent->size(), " bytes but keys have ", kKeyBytes);
  }
  return scope.layout.Validate();
}

}  // namespace

absl::StatusOr<std::vector<std::string>> BlockKeys(std::span<const int32_t> tokens,
                                                   int64_t page_size, const KeyScope& scope,
                                                   std::optional<std::string_view> parent) {
  KVFERRY_RETURN_IF_ERROR(CheckArguments(page_size, scope, parent));
  KVFERRY_ASSIGN_OR_RETURN(Sha256 sha256, Sha256::Create());
  KVFERRY_ASSIGN_OR_RETURN(const std::string scope_digest, sha256.Digest(ScopeFields(scope)));
  std::string before(parent.value_or(""));
  std::vector<std::string> keys;
  keys.reserve(tokens.size() / page_size);
  for (; std::ssize(tokens) >= page_size; tokens = tokens.subspan(page_size)) {
    Fields fields;
    fields.Str("kvferry block key 1").Raw(scope_digest).Str(before).I64(page_size);
    for (const int32_t token : tokens.first(page_size)) fields.I32(token);
    KVFERRY_ASSIGN_OR_RETURN(before, sha256.Digest(fields.bytes()));
    keys.push_back(before);
  }
  return keys;
}

}  // namespace kvferry
