#include "tests/support/failing_threads.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <limits>
#include <memory>

namespace {

constexpr int kNoLimit = std::numeric_limits<int>::max();

std::atomic<int> starts_left = kNoLimit;
std::atomic<int> most_running = kNoLimit;
std::atomic<int> running = 0;

struct Start {
  void* (*run)(void*);
  void* argument;
};
struct Free {
  void operator()(Start* start) const { std::free(start); }
};
using StartPtr = std::unique_ptr<Start, Free>;

void* Run(void* start) {
  const Start of = *StartPtr(static_cast<Start*>(start));
  void* const result = of.run(of.argument);
  --running;  // Before anybody can have joined it.
  return result;
}

bool Fails() {
  if (starts_left != kNoLimit && starts_left-- <= 0) return true;
  return running >= most_running;
}

}  // namespace

// Of all of the test's program.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*run)(void*), void* argument) noexcept {
  static const auto real =
      reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  if (Fails()) return EAGAIN;
  StartPtr start(static_cast<Start*>(std::malloc(sizeof(Start))));  // new may be failing_new.cc's.
  if (start == nullptr) return EAGAIN;
  *start = {run, argument};
  ++running;
  const int error = real(thread, attributes, Run, start.get());
  if (error == 0) {
    (void)start.release();  // The thread's.
  } else {
    --running;
  }
  return error;
}

namespace kvferry {

FailingThreads::FailingThreads(int number) { starts_left = number; }
FailingThreads::~FailingThreads() { starts_left = kNoLimit; }

ScarceThreads::ScarceThreads(int at_once) { most_running = running + at_once; }
ScarceThreads::~ScarceThreads() { most_running = kNoLimit; }

}  // namespace kvferry
