#include "transport/fields.h"

#include "absl/strings/str_cat.h"

namespace kvferry {
namespace {

absl::Status Bad(std::string_view name, std::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("field '", std::string(name), "' ", std::string(what)));
}

}  // namespace

Fields& Fields::Set(std::string_view name, uint64_t value) {
  values_.insert_or_assign(std::string(name), value);
  return *this;
}

Fields& Fields::Set(std::string_view name, std::string value) {
  values_.insert_or_assign(std::string(name), Text{std::move(value)});
  return *this;
}

absl::StatusOr<uint64_t> Fields::Uint(std::string_view name, uint64_t max) const {
  const auto found = values_.find(name);
  if (found == values_.end()) return Bad(name, "is missing");
  const auto* value = std::get_if<uint64_t>(&found->second);
  if (value == nullptr) return Bad(name, "is no number");
  if (*value > max) return Bad(name, absl::StrCat("is ", *value, ", limit ", max));
  return *value;
}

absl::StatusOr<std::string_view> Fields::Bytes(std::string_view name, size_t max_bytes) const {
  const auto found = values_.find(name);
  if (found == values_.end()) return Bad(name, "is missing");
  const auto* value = std::get_if<Text>(&found->second);
  if (value == nullptr) return Bad(name, "is no byte string");
  if (value->bytes.size() <= max_bytes) return value->bytes;
  return Bad(name, absl::StrCat("has ", value->bytes.size(), " bytes, limit ", max_bytes));
}

size_t Fields::TotalBytes() const {
  size_t bytes = 0;
  for (const auto& [name, value] : values_) {
    const auto* text = std::get_if<Text>(&value);
    bytes += name.size() + (text == nullptr ? sizeof(uint64_t) : text->bytes.size());
  }
  return bytes;
}

absl::Status Fields::Check() const {
  if (values_.size() > kMaxFields) {
    return absl::InvalidArgumentError(
        absl::StrCat(values_.size(), " fields in one message, limit ", kMaxFields));
  }
  for (const auto& [name, value] : values_) {
    if (name.size() > kMaxNameBytes) {
      return Bad(name, absl::StrCat("has a name above ", kMaxNameBytes, " bytes"));
    }
  }
  const size_t bytes = TotalBytes();
  if (bytes <= kMaxTotalBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("fields of ", bytes, " bytes in one message, limit ", kMaxTotalBytes));
}

}  // namespace kvferry
