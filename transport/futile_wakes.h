#pragma once

#include <chrono>

namespace kvferry {

// UCX's event fd stays readable while a peer has not answered a connection for which data waits:
// after so many wakes that brought nothing it is left out of the next sleeps, which are short then.
class FutileWakes {
 public:
  static constexpr auto kPause = std::chrono::milliseconds(1);

  // A wake is futile until it turns out that there was something to do.
  void OnWake() { ++in_a_row_; }
  void OnBusy() { in_a_row_ = 0; }
  // Whether to sleep for kPause, without the fd.
  bool Pause() const { return in_a_row_ >= kMax; }

 private:
  static constexpr int kMax = 8;
  int in_a_row_ = 0;
};

}  // namespace kvferry
