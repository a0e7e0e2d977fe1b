// What the rate of a large transfer does not show: requests that are small, layers that are sent
// while the next is computed, many receivers of one sender, and what it costs to wait. This process
// only drives and prints: both sides are processes of their own (session_peer.h).

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/clock.h"
#include "bench/child_process.h"
#include "bench/driver.h"
#include "bench/must.h"
#include "bench/peers/plain_zmq.h"
#include "bench/session_peer.h"

namespace kvferry::bench {
namespace {

constexpr int kSalt = 7;
// A virtual machine may be stopped for a while; its processes are not dead.
constexpr const char* kPatience = "heartbeat_timeout_ms=600000";

struct Path {
  const char* name;
  const char* setting;
  int64_t peers_mapped;  // Of one peer, when the path is the one that is meant.
};
constexpr Path kPaths[] = {{"TCP", "same_host_path=network", 0},
                           {"shared memory", "same_host_path=auto", 1}};

// A pool of `pages` pages.
struct Shape {
  int64_t layers;
  int64_t page_size;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t pages;

  int64_t page_bytes() const { return layers * 2 * page_size * kv_heads * head_dim * 2; }
  std::vector<std::string> Arguments(const char* role, const Path& path) const {
    return absl::StrSplit(
        absl::StrCat("peer --role ", role, " --config ", path.setting, " --config ", kPatience,
                     " --pool-pages ", pages, " --layers ", layers, " --page-size ", page_size,
                     " --kv-heads ", kv_heads, " --head-dim ", head_dim),
        ' ');
  }
};
// Llama 3 8B in pages of 16 tokens, as llama8b-p16 and short-p16 of workload.py.
constexpr Shape Llama(int64_t layers, int64_t pages) { return {layers, 16, 8, 128, pages}; }

struct Spread {
  double median, min, max;
};
Spread Of(std::vector<double> values) {
  std::ranges::sort(values);
  return {values[values.size() / 2], values.front(), values.back()};
}
template <typename Combine>
std::vector<double> Each(const std::vector<double>& a, const std::vector<double>& b,
                         const Combine& combine) {
  std::vector<double> out(a.size());
  std::ranges::transform(a, b, out.begin(), combine);
  return out;
}

std::string Runs(int64_t first, int64_t count) {
  return count == 0 ? "" : absl::StrCat(first, "+", count);
}

// The first `pages` pages of that process hold what a sender's from `first` on do; zeroes them.
void VerifyAndZero(ChildProcess& receiver, int64_t pages, int64_t first) {
  const std::string local = Runs(0, pages);
  receiver.Ask(absl::StrCat("verify ", kSalt, " ", local, " ", Runs(first, pages)));
  receiver.Ask(absl::StrCat("zero ", local));
}

double Milliseconds(const nlohmann::json& from, const nlohmann::json& to) {
  return static_cast<double>(to.get<int64_t>() - from.get<int64_t>()) * 1e-6;
}

// A prefill process and decode processes with sessions to it. What they fetch is verified after
// each fetch.
class Processes {
 public:
  // As many decode processes as there are numbers, with so many endpoints each.
  Processes(const Shape& sender, const Shape& receiver, const Path& path,
            const std::vector<int64_t>& endpoints)
      : path_(path), layers_(sender.layers), endpoints_(endpoints) {
    prefill_ = std::make_unique<ChildProcess>(sender.Arguments("prefill", path));
    for (const int64_t count : endpoints) {
      std::vector<std::string> arguments = receiver.Arguments("decode", path);
      arguments.insert(arguments.end(), {"--endpoints", absl::StrCat(count)});
      decodes_.push_back(std::make_unique<ChildProcess>(arguments));
    }
    prefill_->Ask(absl::StrCat("fill ", kSalt));
  }

  // The first `pages` pages, so many times in a row, each when the one before is done. Of the
  // ticket's pages all are cached when `pages` is 0. Seconds each.
  std::vector<double> Fetch(int64_t count, int64_t pages) {
    const std::string tickets = Publish(count, Runs(0, std::max<int64_t>(pages, 1)), layers_);
    decode().Send(absl::StrCat("fetch ", Runs(0, pages), " ", tickets));
    std::vector<double> seconds = decode().Receive()["seconds"];
    prefill_->Ask(absl::StrCat("ended ", count));
    Verify(0, pages, 0);
    return seconds;
  }

  // The first `pages` pages, while their layers become final. Milliseconds from the last of them
  // to the fetch's end.
  double Stream(int64_t pages, int64_t every_ms) {
    const std::string ticket = Publish(1, Runs(0, pages), /*ready_layers=*/0);
    decode().Send(absl::StrCat("fetch ", Runs(0, pages), " ", ticket));
    const nlohmann::json layers = prefill_->Ask(absl::StrCat("layers ", every_ms));
    const nlohmann::json done = decode().Receive();
    prefill_->Ask("ended 1");
    Verify(0, pages, 0);
    return Milliseconds(layers["last"], done["end"]);
  }

  // Each endpoint fetches so many pages, all at once, and no two the same. Seconds each.
  std::vector<double> Together(int64_t pages) {
    std::vector<std::string> tickets;
    int64_t receivers = 0;
    for (const int64_t count : endpoints_) {
      std::vector<std::string> own;
      for (int64_t i = 0; i < count; ++i)
        own.push_back(Publish(1, Runs(receivers++ * pages, pages), layers_));
      tickets.push_back(absl::StrJoin(own, ","));
    }
    const int64_t when_ns = Nanoseconds(DeadlineInMs(50));
    for (size_t i = 0; i < decodes_.size(); ++i) {
      decodes_[i]->Send(absl::StrCat("together ", when_ns, " ", tickets[i]));
    }
    std::vector<double> seconds;
    for (const auto& decode : decodes_) {
      const std::vector<double> some = decode->Receive()["seconds"];
      seconds.insert(seconds.end(), some.begin(), some.end());
    }
    prefill_->Ask(absl::StrCat("ended ", receivers));
    for (size_t i = 0, first = 0; i < decodes_.size(); first += endpoints_[i++] * pages) {
      Verify(i, endpoints_[i] * pages, static_cast<int64_t>(first));
    }
    return seconds;
  }

  // CPU seconds so far: of the prefill process, and of the first decode process.
  std::pair<double, double> Cpu() {
    return {prefill_->Ask("cpu")["cpu"], decode().Ask("cpu")["cpu"]};
  }

 private:
  ChildProcess& decode() { return *decodes_[0]; }

  std::string Publish(int64_t count, const std::string& runs, int64_t ready_layers) {
    const auto answer =
        prefill_->Ask(absl::StrCat("publish ", count, " ", runs, " ", ready_layers));
    return absl::StrJoin(answer["tickets"].get<std::vector<std::string>>(), ",");
  }

  // The first `pages` pages of that process hold what the sender's from `first` on do; and they
  // came on the path that is meant. Zeroes them.
  void Verify(size_t process, int64_t pages, int64_t first) {
    ChildProcess& decode = *decodes_[process];
    VerifyAndZero(decode, pages, first);
    if (decode.Ask("metric peers_mapped")["value"] != path_.peers_mapped * endpoints_[process]) {
      Must(absl::InternalError(absl::StrCat("the sessions are not over ", path_.name)));
    }
  }

  const Path path_;
  const int64_t layers_;
  const std::vector<int64_t> endpoints_;
  std::unique_ptr<ChildProcess> prefill_;
  std::vector<std::unique_ptr<ChildProcess>> decodes_;
};

// ---------------------------------------------------------------- small requests

constexpr int64_t kInARow = 20;

void CompareRequests(int rounds) {
  ChildProcess echo({"echo"});
  PlainZmq plain(echo.ready()["address"].get<std::string>());
  struct Row {
    std::string what;
    const char* path;
    Processes* processes;
    int64_t pages;
    std::vector<double> us;
  };
  std::vector<std::unique_ptr<Processes>> processes;
  std::vector<Row> rows;
  for (const Path& path : kPaths) {
    const Shape llama = Llama(32, 8);
    const Shape tiny = {1, 1, 1, 64, 1};
    processes.push_back(std::make_unique<Processes>(llama, llama, path, std::vector<int64_t>{1}));
    Processes* const large = processes.back().get();
    processes.push_back(std::make_unique<Processes>(tiny, tiny, path, std::vector<int64_t>{1}));
    rows.push_back({"128 tokens, 16 MiB", path.name, large, 8, {}});
    rows.push_back({"one page, 2 MiB", path.name, large, 1, {}});
    rows.push_back({"one page of 256 bytes", path.name, processes.back().get(), 1, {}});
    rows.push_back({"no page: all are cached", path.name, large, 0, {}});
  }
  std::vector<double> bare;
  for (int round = 0; round <= rounds; ++round) {
    const double away = Of(plain.RoundTrips(kInARow)).median * 1e6;
    if (round > 0) bare.push_back(away);  // The first one warms up.
    for (Row& row : rows) {
      const double us = Of(row.processes->Fetch(kInARow, row.pages)).median * 1e6;
      if (round > 0) row.us.push_back(us);
    }
  }
  std::printf(
      "From Fetch() to done on a warm session, the median of %lld in a row; beside a message of 64 "
      "bytes\nthat goes to another process and back by ZeroMQ alone; target: no page <= 1.3x\n\n",
      static_cast<long long>(kInARow));
  std::printf("| request | path | us | us min-max | x of ZeroMQ |\n|---|---|---|---|---|\n");
  const auto print = [&](const std::string& what, const char* path, const std::vector<double>& us) {
    const Spread spread = Of(us);
    std::printf("| %s | %s | %.0f | %.0f-%.0f | %.2f |\n", what.c_str(), path, spread.median,
                spread.min, spread.max, Of(Each(us, bare, std::divides<>())).median);
  };
  print("ZeroMQ alone", "TCP", bare);
  for (const Row& row : rows) print(row.what, row.path, row.us);
}

// ---------------------------------------------------------------- layers

constexpr int64_t kLayers = 32;
constexpr int64_t kPagesStreamed[] = {64, 256};
constexpr int64_t kEveryMs[] = {5, 40};

// What nobody can hide: the last layer, or what the network cannot take while the others are made.
double LeastMs(double all_ms, double one_ms, int64_t every_ms) {
  return std::max(one_ms, all_ms - static_cast<double>((kLayers - 1) * every_ms));
}

void CompareLayers(int rounds) {
  struct Streamed {
    std::vector<double> left, least, more;
  };
  struct Row {
    const Path* path;
    Processes* all;
    Processes* one;
    int64_t pages;
    std::vector<double> all_ms, one_ms;
    Streamed streamed[std::size(kEveryMs)];
  };
  std::vector<std::unique_ptr<Processes>> processes;
  std::vector<Row> rows;
  for (const Path& path : kPaths) {
    const auto make = [&](int64_t layers) {
      const Shape shape = Llama(layers, std::ranges::max(kPagesStreamed));
      return processes
          .emplace_back(std::make_unique<Processes>(shape, shape, path, std::vector<int64_t>{1}))
          .get();
    };
    Processes* const all = make(kLayers);
    Processes* const one = make(1);
    for (const int64_t pages : kPagesStreamed) rows.push_back({&path, all, one, pages, {}, {}, {}});
  }
  for (int round = 0; round <= rounds; ++round) {
    for (Row& row : rows) {
      const double all_ms = row.all->Fetch(1, row.pages)[0] * 1e3;
      const double one_ms = row.one->Fetch(1, row.pages)[0] * 1e3;
      if (round == 0) continue;  // It warms up.
      row.all_ms.push_back(all_ms);
      row.one_ms.push_back(one_ms);
      for (size_t i = 0; i < std::size(kEveryMs); ++i) {
        const double left = row.all->Stream(row.pages, kEveryMs[i]);
        const double least = LeastMs(all_ms, one_ms, kEveryMs[i]);
        row.streamed[i].left.push_back(left);
        row.streamed[i].least.push_back(least);
        row.streamed[i].more.push_back(left - least);
      }
    }
  }
  std::printf(
      "\n%lld layers that become final one after another: what is left to wait for after the last, "
      "beside the\nleast that can be: the transfer of one layer alone, or what of all at once is "
      "longer than the time before\nthe last; target: 1 ms more\n\n",
      static_cast<long long>(kLayers));
  std::printf(
      "| path | MiB a layer | a layer every ms | left ms | min-max | one layer ms | all at once ms "
      "| least ms | more ms |\n|---|---|---|---|---|---|---|---|---|\n");
  for (const Row& row : rows) {
    const int64_t layer_mib = (Llama(1, 1).page_bytes() * row.pages) >> 20;
    for (size_t i = 0; i < std::size(kEveryMs); ++i) {
      const Spread left = Of(row.streamed[i].left);
      std::printf("| %s | %lld | %lld | %.1f | %.1f-%.1f | %.1f | %.0f | %.1f | %.1f |\n",
                  row.path->name, static_cast<long long>(layer_mib),
                  static_cast<long long>(kEveryMs[i]), left.median, left.min, left.max,
                  Of(row.one_ms).median, Of(row.all_ms).median, Of(row.streamed[i].least).median,
                  Of(row.streamed[i].more).median);
    }
  }
}

// ---------------------------------------------------------------- many receivers

constexpr int64_t kReceivers = 64;

constexpr int64_t kPerProcess = 8;
constexpr int64_t kPagesEach = 8;
constexpr int64_t kAllPages = kReceivers * kPagesEach;
constexpr Shape kWhole = Llama(32, kAllPages);
constexpr Shape kPart = Llama(32, kPagesEach* kPerProcess);

// As Processes::Together(), over plain sockets.
class PlainSockets {
 public:
  PlainSockets(const Shape& receiver, const std::vector<int64_t>& receivers)
      : receivers_(receivers) {
    const int64_t port = sender_.Ask("listen")["port"];
    int64_t first = 0;
    for (const int64_t count : receivers) {
      std::vector<std::string> arguments = receiver.Arguments("plain-receivers", kPaths[0]);
      arguments.insert(arguments.end(), {"--endpoints", absl::StrCat(count)});
      processes_.push_back(std::make_unique<ChildProcess>(arguments));
      processes_.back()->Ask(absl::StrCat("connect ", port, " ", first));
      first += count;
    }
    sender_.Ask(absl::StrCat("accept ", first));
    sender_.Ask(absl::StrCat("fill ", kSalt));
  }

  std::vector<double> Together(int64_t pages, int64_t turn_bytes) {
    const int64_t when_ns = Nanoseconds(DeadlineInMs(50));
    for (const auto& process : processes_) {
      process->Send(absl::StrCat("receive ", when_ns, " ", pages));
    }
    sender_.Ask(absl::StrCat("send ", when_ns, " ", pages, " ", turn_bytes));
    std::vector<double> seconds;
    for (const auto& process : processes_) {
      const std::vector<double> some = process->Receive()["seconds"];
      seconds.insert(seconds.end(), some.begin(), some.end());
    }
    int64_t first = 0;
    for (size_t i = 0; i < processes_.size(); ++i) {
      VerifyAndZero(*processes_[i], receivers_[i] * pages, first);
      first += receivers_[i] * pages;
    }
    return seconds;
  }

 private:
  const std::vector<int64_t> receivers_;
  ChildProcess sender_{kWhole.Arguments("plain-sender", kPaths[0])};
  std::vector<std::unique_ptr<ChildProcess>> processes_;
};

// One way to serve one receiver or many, and what it took.
struct Fan {
  std::string name;
  std::function<std::vector<double>()> one, many;  // Seconds of each receiver.
  std::vector<double> ones{}, manys{}, uneven{};

  void Measure(bool counts) {
    const double gb = static_cast<double>(kWhole.page_bytes() * kAllPages) * 1e-9;
    const double seconds = one()[0];
    const Spread each = Of(many());
    if (!counts) return;
    ones.push_back(gb / seconds);
    manys.push_back(gb / each.max);
    uneven.push_back(each.max / each.min);
  }
  void Print() const {
    const Spread a = Of(ones);
    const Spread b = Of(manys);
    const Spread c = Of(uneven);
    std::printf("| %s | %.2f | %.2f-%.2f | %.2f | %.2f-%.2f | %.2f | %.2f | %.2f-%.2f |\n",
                name.c_str(), a.median, a.min, a.max, b.median, b.min, b.max,
                Of(Each(manys, ones, std::divides<>())).median, c.median, c.min, c.max);
    std::fflush(stdout);
  }
};

void MeasureInTurn(std::vector<Fan> fans, int rounds) {
  for (int round = 0; round <= rounds; ++round) {
    for (Fan& fan : fans) fan.Measure(round > 0);  // The first one warms up.
  }
  for (const Fan& fan : fans) fan.Print();
}

void CompareReceivers(int rounds) {
  const std::vector<int64_t> each(kReceivers / kPerProcess, kPerProcess);
  std::printf(
      "\n%lld receivers of one sender, 128 tokens each at once, beside one receiver of as much in "
      "one request;\nGB/s until the last is done; targets: >= 0.9x, slowest <= 1.3x fastest. Plain "
      "sockets: one thread that sends\nto each in turn, without any protocol, and a thread for "
      "each "
      "that receives\n\n",
      static_cast<long long>(kReceivers));
  std::printf(
      "| path | one GB/s | min-max | %lld GB/s | min-max | x | slowest/fastest | min-max |\n"
      "|---|---|---|---|---|---|---|---|\n",
      static_cast<long long>(kReceivers));
  for (const Path& path : kPaths) {
    Processes one(kWhole, kWhole, path, {1});
    Processes many(kWhole, kPart, path, each);
    std::vector<Fan> fans;
    fans.push_back({path.name, [&] { return one.Fetch(1, kAllPages); },
                    [&] { return many.Together(kPagesEach); }});
    std::optional<PlainSockets> plain_one, plain_many;
    if (path.peers_mapped == 0) {
      plain_one.emplace(kWhole, std::vector<int64_t>{1});
      plain_many.emplace(kPart, each);
      for (const int64_t turn_kib : {256, 1024, 4096}) {
        fans.push_back(
            {absl::StrCat("plain sockets, ", turn_kib, " KiB a turn"),
             [&, turn_kib] { return plain_one->Together(kAllPages, turn_kib << 10); },
             [&, turn_kib] { return plain_many->Together(kPagesEach, turn_kib << 10); }});
      }
    }
    MeasureInTurn(std::move(fans), rounds);
  }
}

// ---------------------------------------------------------------- nothing to do

// % of a core that the sender and the first receiver take in so many seconds without a request.
std::pair<double, double> IdlePercent(Processes& processes, std::chrono::seconds idle) {
  for (;;) {
    processes.Together(1);
    std::this_thread::sleep_for(std::chrono::seconds(1));  // What the requests left behind.
    const Deadline begin = Clock::now();
    const auto before = processes.Cpu();
    std::this_thread::sleep_for(idle);
    const auto after = processes.Cpu();
    const double seconds = SecondsBetween(begin, Clock::now());
    // Else the machine was stopped meanwhile.
    if (seconds < 1.2 * static_cast<double>(idle.count())) {
      return {(after.first - before.first) / seconds * 100,
              (after.second - before.second) / seconds * 100};
    }
  }
}

void MeasureIdle(int rounds) {
  constexpr auto kIdle = std::chrono::seconds(5);
  std::printf(
      "\nCPU time of a sender with %lld connected peers, and of one of them, while nothing is "
      "asked "
      "for;\n%% of a core over %lld s; target: < 1 %%\n\n",
      static_cast<long long>(kReceivers), static_cast<long long>(kIdle.count()));
  std::printf("| path | process | %% of a core | min-max |\n|---|---|---|---|\n");
  for (const Path& path : kPaths) {
    // The first of the receivers' processes has one endpoint only.
    Processes processes({1, 1, 1, 64, kReceivers}, {1, 1, 1, 64, 9}, path,
                        {1, 9, 9, 9, 9, 9, 9, 9});
    std::vector<double> senders;
    std::vector<double> receivers;
    for (int round = 0; round < rounds; ++round) {
      const auto [sender, receiver] = IdlePercent(processes, kIdle);
      senders.push_back(sender);
      receivers.push_back(receiver);
    }
    for (const auto& [what, percent] : {std::pair("sender", senders), {"receiver", receivers}}) {
      const Spread spread = Of(percent);
      std::printf("| %s | %s | %.2f | %.2f-%.2f |\n", path.name, what, spread.median, spread.min,
                  spread.max);
    }
    std::fflush(stdout);
  }
}

int Main(int argc, char** argv) {
  CLI::App app("Small requests, layers, many receivers and idle sessions.");
  int rounds = 5;
  std::vector<std::string> tables = {"requests", "layers", "receivers", "idle"};
  app.add_option("--reps", rounds, "of which the median counts")->check(CLI::Range(1, 1000));
  app.add_option("--tables", tables, "which of requests, layers, receivers and idle; default: all")
      ->delimiter(',')
      ->check(CLI::IsMember({"requests", "layers", "receivers", "idle"}));
  // What this program runs as a child of itself.
  PeerFlags peer;
  CLI::App* const peer_command = app.add_subcommand("peer")->group("");
  CLI::App* const echo_command = app.add_subcommand("echo")->group("");
  peer.AddTo(peer_command);
  CLI11_PARSE(app, argc, argv);
  if (peer_command->parsed()) {
    const absl::StatusOr<int> rc = ServePeer(peer);
    return rc.ok() ? *rc : Fail("kvferry_bench_sessions", rc.status());
  }
  if (echo_command->parsed()) {
    ServePlainZmq();
    return 0;
  }
  const std::pair<const char*, void (*)(int)> all[] = {{"requests", CompareRequests},
                                                       {"layers", CompareLayers},
                                                       {"receivers", CompareReceivers},
                                                       {"idle", MeasureIdle}};
  for (const auto& [name, table] : all) {
    if (std::ranges::find(tables, name) != tables.end()) table(rounds);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace kvferry::bench

int main(int argc, char** argv) { return kvferry::bench::Main(argc, argv); }
