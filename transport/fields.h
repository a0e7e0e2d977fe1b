#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <variant>

#include "absl/status/statusor.h"

namespace kvferry {

// What a call or its reply carries: a few named numbers and byte strings, so that the layers above
// need no encoding of their own. Readers ignore names they do not know.
class Fields {
 public:
  static constexpr size_t kMaxFields = 16;
  static constexpr size_t kMaxNameBytes = 32;
  static constexpr size_t kMaxTotalBytes = 1536 << 10;  // Of all names and values together.

  // No std::string by itself: libstdc++ takes it for a type that never leaves a variant without a
  // value, and destroys one that was never made where copying it finds no memory.
  struct Text {
    std::string bytes;

    bool operator==(const Text&) const = default;
  };
  using Value = std::variant<uint64_t, Text>;
  using Map = std::map<std::string, Value, std::less<>>;

  Fields& Set(std::string_view name, uint64_t value);
  Fields& Set(std::string_view name, std::string value);

  bool Has(std::string_view name) const { return values_.contains(name); }
  // INVALID_ARGUMENT naming the field when it is missing, of the other type or above the limit.
  absl::StatusOr<uint64_t> Uint(std::string_view name, uint64_t max = UINT64_MAX) const;
  absl::StatusOr<std::string_view> Bytes(std::string_view name,
                                         size_t max_bytes = kMaxTotalBytes) const;

  const Map& values() const { return values_; }
  // Of all names and values.
  size_t TotalBytes() const;
  // INVALID_ARGUMENT when it is too large for a message.
  absl::Status Check() const;

 private:
  Map values_;
};

}  // namespace kvferry
