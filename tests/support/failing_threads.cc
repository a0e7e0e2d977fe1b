#include "tests/support/failing_threads.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <memory>

#include "tests/support/sanitized.h"

namespace {

std::atomic<bool> is_scarce = false;
std::atomic<int> room = 0;

#ifndef KVFERRY_SANITIZED  // They have a pthread_create of their own.
struct Started {
  void* (*run)(void*);
  void* arg;
};

void* RunAndLeave(void* arg) {
  const std::unique_ptr<Started> started(static_cast<Started*>(arg));
  void* const result = started->run(started->arg);
  ++room;
  return result;
}

using Create = int(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
Create* TheSystems() {
  static auto* const create = reinterpret_cast<Create*>(dlsym(RTLD_NEXT, "pthread_create"));
  return create;
}
#endif

}  // namespace

#ifndef KVFERRY_SANITIZED
// Of all of the test's program, and of the libraries in it.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*run)(void*), void* arg) {
  if (!is_scarce) return TheSystems()(thread, attributes, run, arg);
  if (room-- <= 0) {
    ++room;
    return EAGAIN;
  }
  auto started = std::make_unique<Started>(Started{run, arg});
  const int error = TheSystems()(thread, attributes, RunAndLeave, started.get());
  if (error == 0) {
    [[maybe_unused]] Started* const taken = started.release();
  } else {
    ++room;
  }
  return error;
}
#endif

namespace kvferry {

FewThreads::FewThreads(int threads) {
  room = threads;
  is_scarce = true;
}
FewThreads::~FewThreads() { is_scarce = false; }

}  // namespace kvferry
