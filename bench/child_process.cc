#include "bench/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "bench/must.h"

namespace kvferry::bench {
namespace {

constexpr int kAnswerMs = 120000;  // Longest that any one command may take.

struct Pipe {
  UniqueFd read;
  UniqueFd write;
};

Pipe MakePipe() {
  std::array<int, 2> fds{};
  if (pipe2(fds.data(), O_CLOEXEC) != 0) Must(absl::ResourceExhaustedError("no pipe"));
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

// Of a fork, of which only exec follows: other threads may have held any lock.
[[noreturn]] void Exec(pid_t parent, int in, int out, char** arguments) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(126);  // It died before the line above.
  dup2(in, STDIN_FILENO);
  dup2(out, STDOUT_FILENO);
  execv("/proc/self/exe", arguments);
  _exit(127);
}

}  // namespace

ChildProcess::ChildProcess(const std::vector<std::string>& arguments)
    : name_(absl::StrJoin(arguments, " ")) {
  std::signal(SIGPIPE, SIG_IGN);  // A child that has died is noticed by what it does not answer.
  Pipe in = MakePipe();
  Pipe out = MakePipe();
  std::vector<std::string> line = {"kvferry_bench_sessions"};
  line.insert(line.end(), arguments.begin(), arguments.end());
  std::vector<char*> words;
  words.reserve(line.size() + 1);
  for (std::string& word : line) words.push_back(word.data());
  words.push_back(nullptr);
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ == 0) Exec(parent, in.read.get(), out.write.get(), words.data());
  if (pid_ < 0) Must(absl::ResourceExhaustedError("no process"));
  to_child_ = std::move(in.write);
  from_child_ = std::move(out.read);
  in.read = UniqueFd();
  out.write = UniqueFd();
  ready_ = Receive();
}

ChildProcess::~ChildProcess() {
  to_child_ = UniqueFd();
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void ChildProcess::Send(const std::string& command) {
  const std::string line = command + "\n";
  for (size_t done = 0; done < line.size();) {
    const ssize_t n = write(to_child_.get(), line.data() + done, line.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return;  // Receive() says why.
    done += static_cast<size_t>(n);
  }
}

std::string ChildProcess::ReadLine() {
  for (;;) {
    const size_t end = read_.find('\n');
    if (end != std::string::npos) {
      std::string line = read_.substr(0, end);
      read_.erase(0, end + 1);
      return line;
    }
    pollfd fd = {from_child_.get(), POLLIN, 0};
    std::array<char, 4096> bytes{};
    ssize_t n = 0;
    if (poll(&fd, 1, kAnswerMs) > 0) n = read(from_child_.get(), bytes.data(), bytes.size());
    if (n <= 0) Must(absl::UnavailableError(absl::StrCat(name_, ": no answer")));
    read_.append(bytes.data(), static_cast<size_t>(n));
  }
}

nlohmann::json ChildProcess::Receive() {
  nlohmann::json answer = nlohmann::json::parse(ReadLine(), nullptr, /*allow_exceptions=*/false);
  if (!answer.is_object()) Must(absl::InternalError(absl::StrCat(name_, ": no answer in JSON")));
  if (answer.contains("error")) {
    Must(absl::InternalError(absl::StrCat(name_, ": ", answer["error"].get<std::string>())));
  }
  return answer;
}

}  // namespace kvferry::bench
