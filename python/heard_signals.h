#pragma once

// Signals that come while the main thread waits in C++. Python runs their handlers, which raise
// KeyboardInterrupt for Ctrl-C, only when it is asked to.

#include <nanobind/nanobind.h>

#include <functional>

#include "base/interrupt.h"
#include "python/gil.h"

namespace kvferry {

// What a call hears of that waits with base/interrupt.h, while this lives: of signals, if it is the
// main thread's. Handlers run in between, and may use what is called, and close it. Made and ended
// with the GIL held; the call has released it.
class HeardSignals final : public Interrupter {
 public:
  explicit HeardSignals(const void* called);
  HeardSignals(const HeardSignals&) = delete;
  HeardSignals& operator=(const HeardSignals&) = delete;
  ~HeardSignals();

  // Behind the call, which has ended early where a handler raised: raises that. True: a handler has
  // closed what was called, which is done when this ends.
  bool Raise();

  // Whether this thread is in a handler that a call of the same object runs, which cannot end
  // before the handler has: that call is to end then, and `close` is done behind it.
  static bool CloseBehindCall(const void* called, const std::function<void()>& close);

 private:
  bool Look() noexcept override;

  const void* const called_;
  const bool is_main_;
  HeardSignals* const around_;  // Of the call whose handler makes this one.
  Interrupter* const before_;
  std::function<void()> close_;
  // What a handler raised.
  PyObject *type_ = nullptr, *value_ = nullptr, *traceback_ = nullptr;
};

// What wait() gives, which runs without the GIL; raises what a handler raised meanwhile.
template <typename Wait>
auto WaitWithoutGil(const Wait& wait) {
  HeardSignals signals(nullptr);
  auto result = [&] {
    const ReleasedGil nogil;
    return wait();
  }();
  signals.Raise();
  return result;
}

}  // namespace kvferry
