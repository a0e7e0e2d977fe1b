#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>

#include "absl/strings/numbers.h"

namespace kvferry {

// A number that whoever runs the test may have set.
inline int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  int64_t value = otherwise;
  if (text != nullptr && !absl::SimpleAtoi(text, &value)) ADD_FAILURE() << name << "=" << text;
  return value;
}

}  // namespace kvferry
