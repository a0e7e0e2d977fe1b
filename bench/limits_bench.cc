// What the machine itself allows for the same work (driver.h). Besides the driver's commands:
//
//   memcpy THREADS SALT LOCAL REMOTE   copies the pages of one pool to another of this process, one
//                                      memcpy a page and buffer, in the order of kvferry's stream;
//                                      then compares
//   tcp STREAMS BYTES ITEM HOW         as many bytes from child processes (bulk_tcp.h), as they lie
//                                      if ITEM is 0, else in items of as many bytes at random,
//                                      which are moved as HOW says: "packed" or "straight"
//
// Both answer {"seconds": S, "cpu": of all processes, "verified": true}.

#include <sched.h>

#include <CLI/CLI.hpp>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status.h"
#include "bench/bulk_tcp.h"
#include "bench/driver.h"
#include "bench/on_threads.h"
#include "examples/two_node/layout_flags.h"
#include "examples/two_node/pattern.h"
#include "examples/two_node/support.h"

namespace kvferry::bench {
namespace {

constexpr int kMostThreads = 64;

nlohmann::json Verified(double seconds, double cpu) {
  return nlohmann::json{{"seconds", seconds}, {"cpu", cpu}, {"verified", true}};
}

Answer MeasureTcp(BulkTcp* tcp, const Words& words) {
  if (tcp == nullptr) return absl::FailedPreconditionError("started without --tcp-bytes");
  KVFERRY_ASSIGN_OR_RETURN(const int streams, ParseNumber<int>(words[0]));
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t bytes, ParseNumber<uint64_t>(words[1]));
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t item_bytes, ParseNumber<uint64_t>(words[2]));
  if (words[3] != "packed" && words[3] != "straight") {
    return absl::InvalidArgumentError(absl::StrCat("'", words[3], "' is no way to move items"));
  }
  const BulkTcp::Items items{item_bytes, words[3] == "straight"};
  KVFERRY_ASSIGN_OR_RETURN(const BulkTcp::Result result, tcp->Measure(bytes, streams, items));
  return Verified(result.seconds, result.cpu);
}

// From page from[i] of every buffer of one pool to page to[i] of another.
struct Copies {
  const KvPool& source;
  const KvPool& target;
  std::vector<int64_t> from;
  std::vector<int64_t> to;

  // The share of one of `threads` threads: part of the pages, of every buffer.
  void Run(int thread, int threads) const {
    const auto share = [&](int i) { return to.size() * i / threads; };
    for (size_t b = 0; b < source.buffer_infos().size(); ++b) {
      const BufferInfo& in = source.buffer_infos()[b];
      const BufferInfo& out = target.buffer_infos()[b];
      for (size_t i = share(thread); i < share(thread + 1); ++i) {
        std::memcpy(out.address + to[i] * out.item_bytes, in.address + from[i] * in.item_bytes,
                    in.item_bytes);
      }
    }
  }
};

Answer MeasureMemcpy(const KvPool& source, const KvPool& target, const Words& words) {
  KVFERRY_ASSIGN_OR_RETURN(const int threads, ParseNumber<int>(words[0]));
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t salt, ParseNumber<uint64_t>(words[1]));
  KVFERRY_ASSIGN_OR_RETURN(const PageRuns local, examples::ParseRuns(words[2]));
  KVFERRY_ASSIGN_OR_RETURN(const PageRuns remote, examples::ParseRuns(words[3]));
  KVFERRY_RETURN_IF_ERROR(local.CheckWithin(target.num_pages()));
  KVFERRY_RETURN_IF_ERROR(remote.CheckWithin(source.num_pages()));
  if (threads < 1 || threads > kMostThreads || local.num_pages() != remote.num_pages()) {
    return absl::InvalidArgumentError("memcpy: bad thread count, or lists of two lengths");
  }
  const Copies copies{source, target, remote.ToPages(), local.ToPages()};
  const double cpu_before = examples::CpuSeconds();
  const Deadline begin = Clock::now();
  OnThreads(threads, [&](int thread) { copies.Run(thread, threads); });
  const double seconds = SecondsBetween(begin, Clock::now());
  const double cpu = examples::CpuSeconds() - cpu_before;
  KVFERRY_RETURN_IF_ERROR(examples::Pattern(salt).Verify(target, local, remote));
  examples::ZeroPages(target, local);
  return Verified(seconds, cpu);
}

struct Flags {
  examples::LayoutFlags layout;
  int64_t pool_pages = 0;
  BulkTcp::Options tcp;
};

absl::StatusOr<int> Run(const Flags& flags) {
  KVFERRY_ASSIGN_OR_RETURN(const KvLayout layout, flags.layout.Make());
  std::unique_ptr<BulkTcp> tcp;
  if (flags.tcp.bytes > 0) {
    KVFERRY_ASSIGN_OR_RETURN(tcp, BulkTcp::Start(flags.tcp));
  }
  KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<KvPool> source,
                           TouchedPool(layout, flags.pool_pages));
  KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<KvPool> target,
                           TouchedPool(layout, flags.pool_pages));
  Driver driver(source);
  driver.Add("memcpy", 4,
             [&](const Words& words) { return MeasureMemcpy(*source, *target, words); });
  driver.Add("tcp", 4, [&](const Words& words) { return MeasureTcp(tcp.get(), words); });
  return driver.Run();
}

}  // namespace
}  // namespace kvferry::bench

int main(int argc, char** argv) {
  CLI::App app("Copies and bulk TCP without kvferry, for comparison; bench/run.py drives it.");
  kvferry::bench::Flags flags;
  app.add_option("--pool-pages", flags.pool_pages, "pages of each pool")->required();
  app.add_option("--tcp-bytes", flags.tcp.bytes, "most bytes of a tcp command; 0: no streams");
  app.add_option("--tcp-streams", flags.tcp.streams, "most streams of a tcp command")
      ->check(CLI::Range(1, 64));
  app.add_option("--tcp-host", flags.tcp.host, "IPv4 address that the streams come to");
  app.add_option("--tcp-senders-netns", flags.tcp.senders_netns,
                 "file of the network namespace that they come from");
  app.add_option("--tcp-congestion-control", flags.tcp.congestion_control, "of the streams");
  app.add_option("--tcp-senders-cpus", flags.tcp.senders_cpus, "processors that they run on")
      ->delimiter(',')
      ->check(CLI::Range(0, CPU_SETSIZE - 1));
  flags.layout.AddTo(&app);
  CLI11_PARSE(app, argc, argv);
  const absl::StatusOr<int> rc = kvferry::bench::Run(flags);
  return rc.ok() ? *rc : kvferry::bench::Fail("kvferry_bench_limits", rc.status());
}
