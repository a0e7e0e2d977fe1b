#pragma once

#include <ctime>

namespace kvferry {

// Seconds that processors have worked for this process (CLOCK_PROCESS_CPUTIME_ID) or for the
// calling thread (CLOCK_THREAD_CPUTIME_ID).
inline double CpuSeconds(clockid_t of) {
  timespec time{};
  clock_gettime(of, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

}  // namespace kvferry
