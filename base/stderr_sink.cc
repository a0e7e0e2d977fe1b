#include "base/stderr_sink.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"
#include "base/utf8.h"

namespace kvferry {
namespace {

constexpr size_t kMaxLineBytes = PIPE_BUF;
constexpr std::string_view kCut = "...\n";

// O_NONBLOCK belongs to what is open, not to a descriptor: set on the one that is there, it would
// be set for all processes that have inherited it. So this is another one, of the same pipe or
// terminal.
UniqueFd OpenAgain(int fd) {
  return UniqueFd(open(absl::StrCat("/proc/self/fd/", fd).c_str(),
                       O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
}

void Cut(spdlog::memory_buf_t* line) {
  if (line->size() <= kMaxLineBytes) return;
  line->resize(Utf8Prefix({line->data(), line->size()}, kMaxLineBytes - kCut.size()).size());
  line->append(kCut.data(), kCut.data() + kCut.size());
}

bool IsWhole(ssize_t written, std::string_view line) {
  return written == static_cast<ssize_t>(line.size());
}

}  // namespace

bool WriteWithoutWaiting(int fd, std::string_view line) {
  struct stat is = {};
  if (fstat(fd, &is) != 0) return false;
  if (S_ISSOCK(is.st_mode)) {
    return IsWhole(send(fd, line.data(), line.size(), MSG_DONTWAIT | MSG_NOSIGNAL), line);
  }
  if (!S_ISFIFO(is.st_mode) && !S_ISCHR(is.st_mode)) {
    return IsWhole(write(fd, line.data(), line.size()), line);
  }
  // What nobody reads any more would end this process.
  pollfd room = {fd, POLLOUT, 0};
  if (poll(&room, 1, 0) != 1 || room.revents != POLLOUT) return false;
  // Others, as all ranks of an engine, write there at the same time: it may be full by now.
  iovec whole = {const_cast<char*>(line.data()), line.size()};
  const ssize_t written = pwritev2(fd, &whole, 1, /*offset=*/-1, RWF_NOWAIT);
  if (written >= 0 || errno == EAGAIN) return IsWhole(written, line);
  // A terminal, or a kernel that does not know it of pipes (before 6.4).
  const UniqueFd again = OpenAgain(fd);
  // It is another user's, or there is no descriptor left: then all that can be done is to hope.
  return IsWhole(write(again.valid() ? again.get() : fd, line.data(), line.size()), line);
}

bool StderrSink::Write(const spdlog::details::log_msg& message) {
  spdlog::memory_buf_t line;
  formatter_->format(message, line);
  Cut(&line);
  return WriteWithoutWaiting(STDERR_FILENO, {line.data(), line.size()});
}

void StderrSink::sink_it_(const spdlog::details::log_msg& message) {
  if (left_out_ > 0) {
    const std::string notice =
        absl::StrCat(left_out_, " lines before this one had no room in standard error");
    const bool said = Write({message.logger_name, spdlog::level::warn, notice});
    if (said) left_out_ = 0;
  }
  if (!Write(message)) ++left_out_;
}

}  // namespace kvferry
