#pragma once

// What becomes of things when the system starts no more threads.

namespace kvferry {

// As long as it lives, the system has at most `room` threads at a time for those who start one.
class FewThreads {
 public:
  explicit FewThreads(int room);
  ~FewThreads();
  FewThreads(const FewThreads&) = delete;
  FewThreads& operator=(const FewThreads&) = delete;
};

}  // namespace kvferry
