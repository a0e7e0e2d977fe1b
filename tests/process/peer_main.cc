// One endpoint in a process of its own, so that tests can kill it. Reads commands from stdin, a
// line each, and answers each with a line on stdout; tests/support/child_peer.h is the other end.
//
//   kvferry_test_peer prefill|decode|receiver|producer|consumer|store-server|store-client
//                     CONFIG_JSON LAYERS PAGES SEED PAGES_ARE
//
// PAGES_ARE: PeerPages::ToString().
//
// A receiver is a decode endpoint that accepts pushes.

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "tests/process/lookup_peers.h"
#include "tests/process/peer_words.h"
#include "tests/process/store_peers.h"
#include "tests/support/endpoints.h"

namespace kvferry {
namespace {

class PrefillPeer {
 public:
  PrefillPeer(std::shared_ptr<KvPool> pool, std::unique_ptr<PrefillEndpoint> endpoint)
      : pool_(std::move(pool)), endpoint_(std::move(endpoint)) {}

  std::string Greeting() const { return absl::StrCat("ready ", endpoint_->address()); }

  std::string Handle(const Words& words) {
    if (words[0] == "publish") {
      PrefillEndpoint::Publication publication;
      publication.pages = Numbers(words[1]);
      publication.num_tokens = TokensOf(publication.pages);
      publication.ready_layers = Number(words[2]);
      publication.lease_ms = Number(words[3]);
      if (words.size() > 4) publication.lease_id = Lease(words[4]);
      const absl::StatusOr<Ticket> ticket = endpoint_->Publish(publication);
      return ticket.ok() ? ticket->ToString() : Answer(ticket.status());
    }
    if (words[0] == "push") {
      const absl::StatusOr<ReceiveTicket> ticket = ReceiveTicket::Parse(words[1]);
      if (!ticket.ok()) return Answer(ticket.status());
      PrefillEndpoint::Publication publication;
      publication.pages = Numbers(words[2]);
      publication.num_tokens = TokensOf(publication.pages);
      publication.ready_layers = Number(words[3]);
      const auto push = endpoint_->Push(*ticket, publication, Number(words[4]));
      if (!push.ok()) return Answer(push.status());
      pushes_.push_back(*push);
      return absl::StrCat(pushes_.size() - 1, " ", absl::Hex(pushes_.back()->lease_id()));
    }
    if (words[0] == "pushed") {  // How the push ended, waiting for it.
      const PushHandle& push = *pushes_[Number(words[1])];
      push.Wait(DeadlineInMs(Number(words[2]))).IgnoreError();
      return push.done() ? Answer(push.status()) : "PENDING";
    }
    if (words[0] == "cancel_push") {
      pushes_[Number(words[1])]->Cancel();
      return "OK";
    }
    if (words[0] == "ready") return Answer(endpoint_->AllLayersReady(Lease(words[1])));
    if (words[0] == "layer") {
      return Answer(endpoint_->LayerReady(Lease(words[1]), Number(words[2])));
    }
    if (words[0] == "give_up") return Answer(endpoint_->GiveUp(Lease(words[1])));
    if (words[0] == "unpublish") {
      return Answer(endpoint_->Unpublish(Lease(words[1]), DeadlineInMs(5000)));
    }
    if (words[0] == "release")
      return Answer(endpoint_->Release(Lease(words[1]), DeadlineInMs(5000)));
    if (words[0] == "ended") {  // How the lease ended, waiting for it.
      const uint64_t lease = Lease(words[1]);
      WaitFor([&] { return TakeEnded().contains(lease); }, DeadlineInMs(Number(words[2])));
      return ended_.contains(lease) ? ended_[lease] : "live";
    }
    if (words[0] == "metric") return absl::StrCat(Metric(*endpoint_, words[1]));
    return "what?";
  }

 private:
  int64_t TokensOf(const std::vector<int64_t>& pages) const {
    return static_cast<int64_t>(pages.size()) * pool_->layout().page_size;
  }
  static uint64_t Lease(const std::string& hex) {
    uint64_t lease = 0;
    if (!absl::SimpleHexAtoi(hex, &lease)) std::abort();
    return lease;
  }
  std::map<uint64_t, std::string>& TakeEnded() {
    for (const EndedLease& lease : endpoint_->TakeEnded()) {
      std::string& outcome = ended_[lease.lease_id];
      outcome = outcome.empty() ? std::string(LeaseOutcomeName(lease.outcome)) : "ended twice";
    }
    return ended_;
  }

  const std::shared_ptr<KvPool> pool_;
  const std::unique_ptr<PrefillEndpoint> endpoint_;
  std::map<uint64_t, std::string> ended_;
  std::vector<std::shared_ptr<PushHandle>> pushes_;
};

// From now on the kernel refuses this process's reads of another one's memory, as a network does
// that has stopped to read.
std::string ForbidReads() {
  sock_filter filter[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                          BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 0, 1),
                          BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                          BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  sock_fprog program{std::size(filter), filter};
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  const bool done = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC,
                            &program) == 0;  // Of all threads.
  return done ? "OK" : std::strerror(errno);
}

class DecodePeer {
 public:
  DecodePeer(std::shared_ptr<KvPool> pool, uint64_t seed, std::unique_ptr<DecodeEndpoint> endpoint)
      : pool_(std::move(pool)), seed_(seed), endpoint_(std::move(endpoint)) {}

  std::string Greeting() const { return "ready"; }

  std::string Handle(const Words& words) {
    if (words[0] == "receive") {
      const int64_t first_page = words.size() > 3 ? Number(words[3]) : 0;
      auto receive = endpoint_->Receive({first_page, Numbers(words[1]), 0, Number(words[2])});
      if (!receive.ok()) return Answer(receive.status());
      handles_.push_back(receive->handle);
      return absl::StrCat(handles_.size() - 1, " ", receive->ticket.ToString());
    }
    if (words[0] == "fetch") {
      const absl::StatusOr<Ticket> ticket = Ticket::Parse(words[1]);
      if (!ticket.ok()) return Answer(ticket.status());
      const int64_t first_page = words.size() > 4 ? Number(words[4]) : 0;
      DecodeEndpoint::Part part;
      if (words.size() > 5) {  // One of two readers, each of half of the heads.
        const int64_t half = Number(words[5]);
        const int64_t heads = pool_->layout().num_heads() / 2;
        part = {{half * heads, heads}, {half, 2}};
      }
      auto handle =
          endpoint_->Fetch(*ticket, first_page, Numbers(words[2]), Number(words[3]), part);
      if (!handle.ok()) return Answer(handle.status());
      handles_.push_back(*handle);
      return absl::StrCat(handles_.size() - 1);
    }
    if (words[0] == "wait") {
      const FetchHandle& handle = *handles_[Number(words[1])];
      const absl::Status status = handle.Wait(DeadlineInMs(Number(words[2])));
      return handle.done()                      ? Answer(handle.status())
             : absl::IsDeadlineExceeded(status) ? "PENDING"
                                                : "?";
    }
    if (words[0] == "wait_layer") {
      return Answer(
          handles_[Number(words[1])]->WaitLayer(Number(words[2]), DeadlineInMs(Number(words[3]))));
    }
    if (words[0] == "cancel") {
      handles_[Number(words[1])]->Cancel();
      return "OK";
    }
    if (words[0] == "layers") return absl::StrCat(handles_[Number(words[1])]->layers_done());
    if (words[0] == "missing") {
      return absl::StrCat(absl::StrJoin(handles_[Number(words[1])]->missing_pages(), " "), " ");
    }
    if (words[0] == "metric") return absl::StrCat(Metric(*endpoint_, words[1]));
    if (words[0] == "forbid_reads") return ForbidReads();
    if (words[0] == "verify") return Verify(*pool_, seed_, words);
    if (words[0] == "reset") {
      FillPattern(*pool_, seed_);
      return "OK";
    }
    return "what?";
  }

 private:
  const std::shared_ptr<KvPool> pool_;
  const uint64_t seed_;
  const std::unique_ptr<DecodeEndpoint> endpoint_;
  std::vector<std::shared_ptr<FetchHandle>> handles_;
};

// Signals every thread of this process but the one that reads commands, for so many milliseconds,
// as a profiler does; their handler does nothing.
std::string HandleSignals(const Words& words) {
  struct sigaction action {};
  action.sa_handler = [](int) {};
  action.sa_flags = SA_RESTART;
  sigaction(SIGUSR1, &action, nullptr);
  const Deadline until = DeadlineInMs(Number(words[1]));
  const pid_t process = getpid();
  while (Clock::now() < until) {
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      const pid_t thread = static_cast<pid_t>(Number(task.path().filename().string()));
      if (thread != process) syscall(SYS_tgkill, process, thread, SIGUSR1);
    }
  }
  return "OK";
}

// Answers have what was standard output to themselves: what a library prints goes to standard
// error.
int TakeStandardOutput() {
  const int answers = dup(STDOUT_FILENO);
  dup2(STDERR_FILENO, STDOUT_FILENO);
  return answers;
}

void Say(int fd, const std::string& answer) {
  const std::string line = answer + "\n";
  if (write(fd, line.data(), line.size()) != static_cast<ssize_t>(line.size())) std::abort();
}

template <typename Peer>
int Serve(const KvPool& pool, const RequestValues& values, Peer& peer, int answers) {
  Say(answers, peer.Greeting());
  std::string line;
  while (std::getline(std::cin, line)) {
    const Words words = absl::StrSplit(line, ' ');
    const std::optional<std::string> of_pages = AnswerOfPages(pool, values, words);
    Say(answers, of_pages                ? *of_pages
                 : words[0] == "signals" ? HandleSignals(words)
                                         : peer.Handle(words));
  }
  return 0;
}

int Main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "usage: kvferry_test_peer ROLE CONFIG_JSON LAYERS PAGES SEED PAGES_ARE\n");
    return 2;
  }
  const int answers = TakeStandardOutput();
  const Config config = Must(Config::FromJson(argv[2], TestConfig()));
  const Words pages_are = absl::StrSplit(argv[6], ',');
  // 8 KiB a page and tensor of 16 tokens in bfloat16, as small models have.
  KvLayout layout =
      KvLayout::Mha(Number(argv[3]), Number(pages_are[0]), 4, 64, Must(ParseDType(pages_are[2])));
  layout.page_format = pages_are[1];
  float scale = 1;
  if (!absl::SimpleAtof(pages_are[3], &scale)) std::abort();
  const auto seed = static_cast<uint64_t>(Number(argv[5]));
  const auto pool = MakePatternPool(layout, Number(argv[4]), seed);
  const RequestValues values(pool, scale);
  const std::string role = argv[1];
  EndpointOptions options = {config, kTestModel, role, /*accept_pushes=*/role == "receiver"};
  if (scale != 1) options.scales.assign(static_cast<size_t>(layout.num_buffers()), scale);
  const auto serve = [&](auto&& peer) { return Serve(*pool, values, peer, answers); };
  if (role == "prefill") {
    return serve(PrefillPeer(pool, Must(PrefillEndpoint::Create(pool, options))));
  }
  if (role == "producer") return serve(ProducerPeer(pool, config));
  if (role == "consumer") return serve(ConsumerPeer(pool, config, seed));
  if (role == "store-server") return serve(StoreServerPeer(*pool, config));
  if (role == "store-client") return serve(StoreClientPeer(pool, config));
  return serve(DecodePeer(pool, seed, Must(DecodeEndpoint::Create(pool, options))));
}

}  // namespace
}  // namespace kvferry

int main(int argc, char** argv) { return kvferry::Main(argc, argv); }
