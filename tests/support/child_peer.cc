#include "tests/support/child_peer.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

std::vector<std::string> CommandLine(const ChildPeer::Options& options) {
  std::vector<std::string> line;
  if (!options.netns.empty()) line = {"ip", "netns", "exec", options.netns};
  for (const std::string& argument :
       {std::string(KVFERRY_TEST_PEER), options.role, options.config_json,
        absl::StrCat(options.num_layers), absl::StrCat(options.num_pages),
        absl::StrCat(options.seed), options.pages_are.ToString()}) {
    line.push_back(argument);
  }
  return line;
}

// proc(5): the state follows the name, which may have spaces and parentheses of its own.
bool IsStopped(const std::filesystem::path& task) {
  std::ifstream file(task / "stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(')');
  return name_end == std::string::npos || line.substr(name_end, 3) == ") T";  // Or has ended.
}

bool AllThreadsStopped(pid_t pid) {
  const std::filesystem::directory_iterator tasks(absl::StrCat("/proc/", pid, "/task"));
  return std::all_of(begin(tasks), end(tasks),
                     [](const auto& task) { return IsStopped(task.path()); });
}

}  // namespace

std::string PeerPages::ToString() const {
  return absl::StrCat(page_size, ",", order, ",", dtype, ",", scale);
}

ChildPeer::ChildPeer(const Options& options) {
  std::signal(SIGPIPE, SIG_IGN);  // A child that dies must not take the test along.
  int in[2];
  int out[2];
  if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) {
    ADD_FAILURE() << "pipe2 failed";
    std::abort();
  }
  std::vector<std::string> line = CommandLine(options);
  std::vector<char*> arguments;
  arguments.reserve(line.size() + 1);
  for (std::string& argument : line) arguments.push_back(argument.data());
  arguments.push_back(nullptr);
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(126);  // It died before the line above.
    dup2(in[0], STDIN_FILENO);
    dup2(out[1], STDOUT_FILENO);
    execvp(arguments[0], arguments.data());
    _exit(127);
  }
  close(in[0]);
  close(out[1]);
  to_child_ = in[1];
  from_child_ = out[0];
  const std::string hello = ReadLine(Soon());
  if (hello.rfind("ready", 0) != 0) {
    ADD_FAILURE() << options.role << " did not start: '" << hello << "'";
    return;
  }
  const std::vector<std::string> words = absl::StrSplit(hello, ' ');
  if (words.size() > 1) address_ = words[1];
}

ChildPeer::~ChildPeer() { Kill(); }

void ChildPeer::CloseFds() {
  if (to_child_ >= 0) close(to_child_);
  if (from_child_ >= 0) close(from_child_);
  to_child_ = from_child_ = -1;
}

void ChildPeer::Signal(int signal) {
  if (pid_ <= 0) return;
  kill(pid_, signal);
  if (signal == SIGSTOP) {
    EXPECT_TRUE(WaitFor([&] { return AllThreadsStopped(pid_); }, Soon()));
  }
}

void ChildPeer::Kill() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
  }
  CloseFds();
}

bool ChildPeer::Quit() {
  CloseFds();
  if (pid_ <= 0) return false;
  int status = 0;
  const bool ended = WaitFor([&] { return waitpid(pid_, &status, WNOHANG) == pid_; }, Soon());
  if (ended) pid_ = -1;
  return ended && status == 0;
}

bool ChildPeer::alive() {
  if (pid_ <= 0) return false;
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) != pid_) return true;
  pid_ = -1;
  ADD_FAILURE() << "the child died by itself: "
                << (WIFSIGNALED(status) ? absl::StrCat("signal ", WTERMSIG(status))
                                        : absl::StrCat("exit code ", WEXITSTATUS(status)));
  return false;
}

int64_t ChildPeer::num_fds() const {
  const std::filesystem::directory_iterator fds(absl::StrCat("/proc/", pid_, "/fd"));
  return std::count_if(begin(fds), end(fds), [](const std::filesystem::directory_entry& fd) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(fd.path(), gone).string();
    return absl::StartsWith(target, "/memfd:") ||
           !std::filesystem::is_regular_file(fd.path(), gone);
  });
}

std::string ChildPeer::ReadLine(Deadline deadline) {
  for (;;) {
    const size_t end = buffer_.find('\n');
    if (end != std::string::npos) {
      std::string line = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      return line;
    }
    pollfd fd = {from_child_, POLLIN, 0};
    if (poll(&fd, 1, static_cast<int>(MsUntil(deadline, Clock::now()))) <= 0) return "";
    char bytes[4096];
    const ssize_t got = read(from_child_, bytes, sizeof(bytes));
    if (got <= 0) return "";
    buffer_.append(bytes, got);
  }
}

std::string ChildPeer::Ask(const std::string& command, Deadline deadline) {
  const std::string line = command + "\n";
  if (write(to_child_, line.data(), line.size()) != static_cast<ssize_t>(line.size())) return "";
  return ReadLine(deadline);
}

std::string ChildPeer::Ask(const std::string& command) { return Ask(command, Soon()); }

std::string ChildPeer::Publish(const std::vector<int64_t>& pages, int64_t ready_layers,
                               int64_t lease_ms) {
  return Ask(absl::StrCat("publish ", absl::StrJoin(pages, ","), " ", ready_layers, " ", lease_ms));
}

std::string ChildPeer::Fetch(const std::string& ticket, const std::vector<int64_t>& pages,
                             int64_t timeout_ms) {
  return Ask(absl::StrCat("fetch ", ticket, " ", absl::StrJoin(pages, ","), " ", timeout_ms));
}

std::string ChildPeer::Wait(const std::string& fetch, int64_t ms) {
  return Ask(absl::StrCat("wait ", fetch, " ", ms), DeadlineInMs(ms + 20000));
}

std::string ChildPeer::WaitLayer(const std::string& fetch, int64_t layer, int64_t ms) {
  return Ask(absl::StrCat("wait_layer ", fetch, " ", layer, " ", ms), DeadlineInMs(ms + 20000));
}

int64_t ChildPeer::Metric(const std::string& name) {
  int64_t value = -1;
  if (!absl::SimpleAtoi(Ask("metric " + name), &value)) ADD_FAILURE() << "no metric " << name;
  return value;
}

std::string ChildPeer::Verify(uint64_t seed, const std::vector<int64_t>& source_pages,
                              const std::vector<int64_t>& pages) {
  return Ask(absl::StrCat("verify ", seed, " ", absl::StrJoin(source_pages, ","), " ",
                          absl::StrJoin(pages, ",")));
}

ChildPeer::Options PeerOptions(const std::string& role, const std::string& config_json,
                               int64_t num_pages) {
  return {.role = role,
          .config_json = config_json,
          .num_layers = kPeerLayers,
          .num_pages = num_pages,
          .seed = role == "prefill" || role == "producer" ? 11u : 22u};
}

void ExpectServes(ChildPeer& prefill, ChildPeer& decode, const std::vector<int64_t>& pages) {
  const std::string fetch = decode.Fetch(prefill.Publish(pages, kPeerLayers, 60000), pages, 20000);
  EXPECT_EQ(decode.Wait(fetch, 20000), "OK");
  EXPECT_EQ(decode.Verify(11, pages, pages), "OK");
}

std::string LeaseOf(absl::string_view ticket) {
  const std::vector<std::string> parts = absl::StrSplit(ticket, '|');
  return parts.size() > 3 ? parts[3] : "";
}

}  // namespace kvferry
