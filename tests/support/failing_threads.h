#pragma once

// What becomes of things when the system starts no more threads. Where failing_threads.cc is linked
// in, pthread_create() of the whole program is its own, for libraries too.

namespace kvferry {

// As long as it lives, starts of threads from that number on, counted from 0, fail with EAGAIN.
class FailingThreads {
 public:
  explicit FailingThreads(int number);
  ~FailingThreads();
  FailingThreads(const FailingThreads&) = delete;
  FailingThreads& operator=(const FailingThreads&) = delete;
};

// As long as it lives, starts fail while so many threads run beside those that ran already.
class ScarceThreads {
 public:
  explicit ScarceThreads(int at_once);
  ~ScarceThreads();
  ScarceThreads(const ScarceThreads&) = delete;
  ScarceThreads& operator=(const ScarceThreads&) = delete;
};

}  // namespace kvferry
