#include "python/given_array.h"

#include "python/gil.h"

namespace nb = nanobind;

namespace kvferry {

nb::object DlpackCapsule(nb::handle object) {
  auto* const type = reinterpret_cast<PyObject*>(object.type().ptr());
  const auto method = nb::steal(PyObject_GetAttrString(type, "__dlpack__"));
  if (!method.is_valid()) PyErr_Clear();
  // Written in C: numpy's, and our own.
  if (!method.is_valid() || Py_IS_TYPE(method.ptr(), &PyMethodDescr_Type)) return {};
  const nb::tuple self = nb::make_tuple(object);
  nb::dict options;
  options["max_version"] = nb::make_tuple(1, 0);
  // As many are older than the option, or have no use for it.
  for (PyObject* keywords : {options.ptr(), static_cast<PyObject*>(nullptr)}) {
    auto capsule =
        nb::steal(StayAtExit([&] { return PyObject_Call(method.ptr(), self.ptr(), keywords); }));
    if (capsule.is_valid()) return capsule;
    PyErr_Clear();
  }
  return {};
}

}  // namespace kvferry
