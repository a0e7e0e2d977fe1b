#include "base/utf8.h"

#include <nlohmann/json.hpp>

namespace kvferry {

std::string ValidUtf8(absl::string_view text) {
  using Json = nlohmann::json;
  // There and back, since the library has no function for it alone.
  const std::string quoted =
      Json(std::string(text)).dump(-1, ' ', false, Json::error_handler_t::replace);
  return Json::parse(quoted).get<std::string>();
}

std::string_view Utf8Prefix(std::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes) return text;
  // Bytes that go on with a character are 10xxxxxx, and at most three in a row.
  size_t end = max_bytes;
  while (end > 0 && max_bytes - end < 3 && (static_cast<unsigned char>(text[end]) >> 6) == 2) --end;
  return text.substr(0, end);
}

}  // namespace kvferry
