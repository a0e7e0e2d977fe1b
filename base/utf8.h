#pragma once

// Texts of others, for whom we make strings that have to be UTF-8: Python's, and those of messages.

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/strings/string_view.h"

namespace kvferry {

// The text, with U+FFFD for what is no UTF-8 in it. Never fails.
std::string ValidUtf8(absl::string_view text);

// The longest beginning of a text of UTF-8 that has at most max_bytes and ends with a character.
std::string_view Utf8Prefix(std::string_view text, size_t max_bytes);

}  // namespace kvferry
