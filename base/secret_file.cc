#include "base/secret_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"

namespace kvferry {
namespace {

// Up to `size` bytes; -1 with errno set.
ssize_t ReadAll(int fd, char* to, size_t size) {
  size_t done = 0;
  while (done < size) {
    const ssize_t got = read(fd, to + done, size - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return -1;
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return static_cast<ssize_t>(done);
}

}  // namespace

absl::StatusOr<std::string> ReadSecretFile(absl::string_view option, const std::string& path) {
  const auto refused = [&](auto... why) {
    return absl::InvalidArgumentError(absl::StrCat(option, " '", path, "' ", why...));
  };
  // A FIFO that nobody writes to would be waited for without end.
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat about = {};
  if (!file.valid() || fstat(file.get(), &about) != 0) {
    return refused("cannot be read: ", std::strerror(errno));
  }
  if (!S_ISREG(about.st_mode)) return refused("cannot be read: it is no regular file");
  std::string text(kMaxSecretFileBytes + 1, '\0');
  const ssize_t got = ReadAll(file.get(), text.data(), text.size());
  if (got < 0) return refused("cannot be read: ", std::strerror(errno));
  text.resize(static_cast<size_t>(got));
  if (got <= kMaxSecretFileBytes) return text;
  return refused("has more than ", kMaxSecretFileBytes, " bytes");
}

}  // namespace kvferry
