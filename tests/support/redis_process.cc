#include "tests/support/redis_process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

[[noreturn]] void GiveUp(absl::string_view why) {
  std::cerr << why << std::endl;
  std::exit(1);
}

sockaddr_in Loopback(int64_t port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

bool Accepts(int64_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in address = Loopback(port);
  const bool accepts =
      connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  close(fd);
  return accepts;
}

std::string OnPath(absl::string_view name) {
  const char* path = std::getenv("PATH");
  for (const absl::string_view folder : absl::StrSplit(path == nullptr ? "" : path, ':')) {
    std::string program = absl::StrCat(folder, "/", name);
    if (access(program.c_str(), X_OK) == 0) return program;
  }
  return "";
}

// One program goes by several names, and acts by the one it is called by. Debian has it in
// redis-tools; its redis-server is a link to it and a service, which nobody needs here.
std::string Program() {
  const std::string server = OnPath("redis-server");
  return server.empty() ? OnPath("redis-check-rdb") : server;
}

}  // namespace

std::string WhyNoRedis() {
  return Program().empty() ? "no redis-server on PATH (Debian: redis-tools)" : "";
}

int64_t FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = Loopback(0);
  socklen_t length = sizeof(address);
  const bool bound = bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  if (!bound) GiveUp("no free port");
  close(fd);
  return ntohs(address.sin_port);
}

RedisProcess::RedisProcess(std::vector<std::string> arguments)
    : arguments_(std::move(arguments)), port_(FreePort()) {
  Start();
}

RedisProcess::~RedisProcess() { Kill(); }

void RedisProcess::Start() {
  std::vector<std::string> line = {
      "redis-server", "--port", absl::StrCat(port_), "--bind", "127.0.0.1",
      "--save",       "",       "--appendonly",      "no"};
  line.insert(line.end(), arguments_.begin(), arguments_.end());
  const std::string program = Program();
  std::vector<char*> arguments;
  arguments.reserve(line.size() + 1);
  for (std::string& argument : line) arguments.push_back(argument.data());
  arguments.push_back(nullptr);
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(126);  // It died before the line above.
    const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) dup2(null, fd);
    execv(program.c_str(), arguments.data());
    _exit(127);
  }
  if (!WaitFor([this] { return Accepts(port_); }, Soon())) {
    GiveUp(absl::StrCat("redis-server does not accept at port ", port_));
  }
}

void RedisProcess::Kill() {
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
}

void RedisProcess::Signal(int signal) const { kill(pid_, signal); }

}  // namespace kvferry
