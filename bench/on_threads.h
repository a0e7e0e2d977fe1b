#pragma once

#include <functional>
#include <thread>
#include <vector>

namespace kvferry::bench {

// fn(0) .. fn(threads - 1) at once, fn(0) on this thread, without any of our own machinery. Between
// two calls there are no threads that could take a core from what else is measured.
inline void OnThreads(int threads, const std::function<void(int)>& fn) {
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(fn, i);
  fn(0);
  for (std::thread& other : others) other.join();
}

}  // namespace kvferry::bench
