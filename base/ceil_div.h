#pragma once

#include <concepts>

namespace kvferry {

// a / b, rounded up. Neither is negative, b is not 0; nothing overflows.
template <std::integral T>
constexpr T CeilDiv(T a, T b) {
  return a / b + static_cast<T>(a % b != 0);
}

// The least multiple of b that is not below a, which has to fit T.
template <std::integral T>
constexpr T RoundUp(T a, T b) {
  return CeilDiv(a, b) * b;
}

}  // namespace kvferry
