#include "python/given_array.h"

#include <unistd.h>

#include "python/gil.h"

namespace nb = nanobind;

namespace kvferry {
namespace {

// Ctrl-C, or what else a signal's handler raises, that came while an object's own code ran: not to
// be lost. It is raised behind the call. Handlers run in the main thread, as what is raised later
// does.
void RaiseLater() {
  if (gettid() != getpid()) return;
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  const auto raise = [](void* exception) {
    auto* const raised = static_cast<PyObject*>(exception);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised)), raised);
    Py_DECREF(raised);
    return -1;
  };
  if (value != nullptr && Py_AddPendingCall(raise, value) != 0) Py_DECREF(value);
}

// What `method` gives; nothing where it fails.
nb::object CallDlpack(nb::handle method, nb::handle object) {
  const auto self = nb::steal(PyTuple_Pack(1, object.ptr()));
  const auto version = nb::steal(Py_BuildValue("(ii)", 1, 0));
  const auto options = nb::steal(PyDict_New());
  if (!self.is_valid() || !version.is_valid() || !options.is_valid() ||
      PyDict_SetItemString(options.ptr(), "max_version", version.ptr()) != 0) {
    PyErr_Clear();
    return {};
  }
  // As many are older than the option, or have no use for it.
  for (PyObject* keywords : {options.ptr(), static_cast<PyObject*>(nullptr)}) {
    auto capsule =
        nb::steal(StayAtExit([&] { return PyObject_Call(method.ptr(), self.ptr(), keywords); }));
    if (capsule.is_valid()) return capsule;
    const bool is_refused = PyErr_ExceptionMatches(PyExc_Exception) != 0;
    const bool may_try_again = PyErr_ExceptionMatches(PyExc_TypeError) != 0 ||
                               PyErr_ExceptionMatches(PyExc_BufferError) != 0;
    if (!is_refused) RaiseLater();
    PyErr_Clear();
    if (!may_try_again) return {};
  }
  return {};
}

}  // namespace

bool MakeReadable(nb::object& object) {
  auto* const type = reinterpret_cast<PyObject*>(object.type().ptr());
  const auto method = nb::steal(PyObject_GetAttrString(type, "__dlpack__"));
  if (!method.is_valid()) PyErr_Clear();
  // Written in C: numpy's, and our own.
  if (method.is_valid() && Py_IS_TYPE(method.ptr(), &PyMethodDescr_Type)) return true;
  if (method.is_valid()) {
    object = CallDlpack(method, object);
    return object.is_valid();
  }
  if (!PyObject_CheckBuffer(object.ptr())) return true;
  object = nb::steal(PyMemoryView_FromObject(object.ptr()));
  if (!object.is_valid()) PyErr_Clear();
  return object.is_valid();
}

}  // namespace kvferry
