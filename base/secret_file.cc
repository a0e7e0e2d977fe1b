#include "base/secret_file.h"

#include <cerrno>
#include <cstring>
#include <fstream>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kvferry {

absl::StatusOr<std::string> ReadSecretFile(absl::string_view option, const std::string& path) {
  std::string text(kMaxSecretFileBytes + 1, '\0');
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file.is_open() || file.bad()) {
    return absl::InvalidArgumentError(
        absl::StrCat(option, " '", path, "' cannot be read: ", std::strerror(errno)));
  }
  text.resize(static_cast<size_t>(file.gcount()));
  if (static_cast<int64_t>(text.size()) <= kMaxSecretFileBytes) return text;
  return absl::InvalidArgumentError(
      absl::StrCat(option, " '", path, "' has more than ", kMaxSecretFileBytes, " bytes"));
}

}  // namespace kvferry
