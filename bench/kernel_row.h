#pragma once

// A kernel beside what the memory allows: what kernels_bench.cc and cuda_bench.cc share.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace kvferry::bench {

struct KernelRow {
  std::string name;
  double bytes;   // That ours is credited with; the limit moves as many.
  double target;  // Of the limit.
  std::function<void()> ours, limit;
  std::function<bool()> right;  // What ours wrote; asked after the first and the last round.
};

// From now on Measure() leaves out rows whose names do not have this in them. Not thread-safe.
void MeasureOnly(const std::string& part_of_name);
void PrintHead(const std::string& kernels, const std::string& limit);
// Ours and the limit take turns, `rounds` times after one that warms up; prints the medians. False
// when what ours wrote was wrong.
bool Measure(const KernelRow& row, int rounds);

// `count` of num_slots slots, in random order, each once at most.
std::vector<int32_t> RandomSlots(int64_t num_slots, int64_t count);
// "32 KiB", "1152 B".
std::string SizeName(int64_t bytes);

}  // namespace kvferry::bench
