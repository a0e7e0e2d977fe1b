#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace kvferry {

// Room for `count` more elements: appending them cannot throw. Unlike reserve(), which makes just that much, it
// costs a constant time an element however often it is called.
template <typename T>
void ReserveMore(std::vector<T>* list, size_t count) {
  const size_t needed = list->size() + count;
  if (needed > list->capacity()) list->reserve(std::max(needed, 2 * list->capacity()));
}

}  // namespace kvferry
