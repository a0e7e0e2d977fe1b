#include "python/heard_signals.h"

#include <unistd.h>

#include <utility>

namespace kvferry {
namespace {

thread_local HeardSignals* t_heard = nullptr;

}  // namespace

HeardSignals::HeardSignals(const void* called)
    : called_(called),
      is_main_(gettid() == getpid()),
      around_(t_heard),
      before_(SetInterrupter(is_main_ ? this : nullptr)) {
  t_heard = this;
}

HeardSignals::~HeardSignals() {
  t_heard = around_;
  SetInterrupter(before_);
  if (close_ != nullptr) close_();  // Nobody finds this call any more and puts it off again.
  Py_XDECREF(type_);
  Py_XDECREF(value_);
  Py_XDECREF(traceback_);
}

bool HeardSignals::Look() noexcept {
  const HeldGil gil;
  if (!gil) return false;
  const bool raised = StayAtExit([] { return PyErr_CheckSignals(); }) != 0;
  // Not to be in the way of Python code until the call has ended.
  if (raised) PyErr_Fetch(&type_, &value_, &traceback_);
  return raised || close_ != nullptr;
}

bool HeardSignals::Raise() {
  if (type_ == nullptr) return close_ != nullptr;
  PyErr_Restore(std::exchange(type_, nullptr), std::exchange(value_, nullptr),
                std::exchange(traceback_, nullptr));
  throw nanobind::python_error();
}

bool HeardSignals::CloseBehindCall(const void* called, const std::function<void()>& close) {
  for (HeardSignals* heard = t_heard; heard != nullptr; heard = heard->around_) {
    if (heard->called_ != called) continue;
    heard->close_ = close;
    return true;
  }
  return false;
}

}  // namespace kvferry
