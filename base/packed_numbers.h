#pragma once

#include <bit>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace kvferry {

static_assert(std::endian::native == std::endian::little, "numbers are copied as they lie");

// Integers as bytes, little-endian, one behind the other: lists in calls.
template <typename T>
std::string PackNumbers(std::span<const T> numbers) {
  static_assert(std::is_integral_v<T>);
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size_bytes()};
}
// Nothing for bytes that are no whole number of them. The caller has bounded them.
template <typename T>
std::optional<std::vector<T>> UnpackNumbers(std::string_view bytes) {
  static_assert(std::is_integral_v<T>);
  if (bytes.size() % sizeof(T) != 0) return std::nullopt;
  std::vector<T> numbers(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(numbers.data(), bytes.data(), bytes.size());
  return numbers;
}

}  // namespace kvferry
