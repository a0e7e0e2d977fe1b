#include "bench/kernel_row.h"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <random>

#include "absl/strings/str_cat.h"
#include "base/clock.h"

namespace kvferry::bench {
namespace {

double Seconds(const std::function<void()>& fn) {
  const Deadline begin = Clock::now();
  fn();
  return SecondsBetween(begin, Clock::now());
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

std::string only;  // NOLINT(cert-err58-cpp): empty.

}  // namespace

void MeasureOnly(const std::string& part_of_name) { only = part_of_name; }

void PrintHead(const std::string& kernels, const std::string& limit) {
  std::printf("%-40s %8s %8s %8s %14s %7s\n", kernels.c_str(), "GB/s", limit.c_str(), "ratio",
              "min..max", "target");
}

bool Measure(const KernelRow& row, int rounds) {
  if (row.name.find(only) == std::string::npos) return true;
  std::vector<double> ours, limits, ratios;
  for (int round = 0; round <= rounds; ++round) {
    const double our_seconds = Seconds(row.ours);
    if ((round == 0 || round == rounds) && !row.right()) {
      std::printf("%-40s wrote something else than it had to\n", row.name.c_str());
      return false;
    }
    const double limit_seconds = Seconds(row.limit);
    if (round == 0) continue;  // It warms up.
    ours.push_back(row.bytes / our_seconds * 1e-9);
    limits.push_back(row.bytes / limit_seconds * 1e-9);
    ratios.push_back(limit_seconds / our_seconds);
  }
  const auto [low, high] = std::minmax_element(ratios.begin(), ratios.end());
  std::printf("%-40s %8.2f %8.2f %8.2f %6.2f..%-6.2f %7.2f\n", row.name.c_str(), Median(ours),
              Median(limits), Median(ratios), *low, *high, row.target);
  std::fflush(stdout);
  return true;
}

std::vector<int32_t> RandomSlots(int64_t num_slots, int64_t count) {
  std::vector<int32_t> slots(static_cast<size_t>(num_slots));
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), std::mt19937_64(1));
  slots.resize(static_cast<size_t>(count));
  return slots;
}

std::string SizeName(int64_t bytes) {
  return bytes % 1024 == 0 ? absl::StrCat(bytes / 1024, " KiB") : absl::StrCat(bytes, " B");
}

}  // namespace kvferry::bench
