#include "examples/two_node/support.h"

#include <algorithm>
#include <random>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/cpu_seconds.h"
#include "base/status.h"

namespace kvferry::examples {

absl::StatusOr<Config> ConfigFromSettings(const std::vector<std::string>& settings) {
  KVFERRY_ASSIGN_OR_RETURN(Config config, Config::FromEnv(Config()));
  for (const std::string& setting : settings) {
    const std::pair<std::string, std::string> parts =
        absl::StrSplit(setting, absl::MaxSplits('=', 1));
    if (!absl::StrContains(setting, '=')) {
      return absl::InvalidArgumentError(absl::StrCat("'", setting, "' is not KEY=VALUE"));
    }
    KVFERRY_RETURN_IF_ERROR(config.Set(parts.first, parts.second));
  }
  return config;
}

double CpuSeconds() { return kvferry::CpuSeconds(CLOCK_PROCESS_CPUTIME_ID); }

std::string FormatRuns(const PageRuns& pages) {
  return absl::StrJoin(pages.runs(), ",", [](std::string* out, const PageRun& run) {
    absl::StrAppend(out, run.first, "+", run.count);
  });
}

absl::StatusOr<PageRuns> ParseRuns(absl::string_view text) {
  std::vector<PageRun> runs;
  for (const absl::string_view item : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(item, absl::MaxSplits('+', 1));
    PageRun run;
    if (!absl::SimpleAtoi(parts.first, &run.first) || !absl::SimpleAtoi(parts.second, &run.count)) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", item.substr(0, 40), "' is not a run of pages, FIRST+COUNT"));
    }
    runs.push_back(run);
  }
  return PageRuns::FromRuns(runs);
}

absl::StatusOr<PageRuns> ChoosePages(Fragmentation fragmentation, int64_t pool_pages, int64_t count,
                                     uint64_t seed) {
  if (count < 1 || count > pool_pages) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a request of ", count, " pages needs a pool of at least that many, not ", pool_pages));
  }
  std::mt19937_64 random(seed);
  const int64_t run_pages = fragmentation == Fragmentation::kSeq     ? count
                            : fragmentation == Fragmentation::kRuns8 ? std::min<int64_t>(8, count)
                                                                     : 1;
  // Places of run_pages pages each, at a random distance from the pool's start, in random order.
  const int64_t places = pool_pages / run_pages;
  const int64_t runs = (count + run_pages - 1) / run_pages;
  if (runs > places) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a pool of ", pool_pages, " pages has no room for ", runs, " runs of ", run_pages));
  }
  const int64_t spare = pool_pages - places * run_pages;
  const auto shift = static_cast<int64_t>(random() % (spare + 1));
  std::vector<int64_t> order(places);
  for (int64_t i = 0; i < places; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);

  std::vector<PageRun> chosen;
  for (int64_t left = count, i = 0; left > 0; left -= run_pages, ++i) {
    chosen.push_back({shift + order[i] * run_pages, std::min(run_pages, left)});
  }
  return PageRuns::FromRuns(chosen);
}

absl::StatusOr<HostPort> ParseHostPort(absl::string_view text) {
  const size_t colon = text.rfind(':');
  HostPort result;
  if (colon == absl::string_view::npos || !absl::SimpleAtoi(text.substr(colon + 1), &result.port) ||
      result.port < 0 || result.port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", text, "' is not HOST:PORT, with a port of 0 to 65535"));
  }
  absl::string_view host = text.substr(0, colon);
  if (absl::ConsumePrefix(&host, "[")) absl::ConsumeSuffix(&host, "]");
  if (host.empty()) return absl::InvalidArgumentError(absl::StrCat("'", text, "' names no host"));
  result.host = std::string(host);
  return result;
}

}  // namespace kvferry::examples
