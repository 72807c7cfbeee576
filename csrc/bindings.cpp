// ckptkern._C: the Python module, and the ops that torch sees.
#include "philox.h"
#include "precision.h"
#include "saved_tensors.h"
#include "segment_state.h"

#include <ATen/ops/randint.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <limits>
#include <new>
#include <utility>

namespace py = pybind11;

namespace {

using ckptkern::Precision;
using ckptkern::SegmentState;

// int64[2] on nonce's device, from torch's own generator there: torch.manual_seed reproduces it and
// CUDA-graph capture samples anew in each replay. The bounds are those of torch.randint(-2**63, 2**63 - 1).
at::Tensor rng_state(const at::Tensor& nonce) {
  return at::randint(
      std::numeric_limits<int64_t>::min(),
      std::numeric_limits<int64_t>::max(),
      {2},
      nonce.options().dtype(at::kLong).requires_grad(false));
}

// --- C++ values as plain CPython types. Every region makes one and enters it, which through pybind11 would cost twice as
// much as all that they do.

template <class T>
struct Object {
  PyObject_HEAD
  T value;
};

template <class T>
T& value_of(PyObject* self) {
  return reinterpret_cast<Object<T>*>(self)->value;
}

template <class Body>
PyObject* translated(Body body) {
  try {
    return body();
  } catch (const std::exception&) { // not `...`: Python ends a thread by unwinding it, which aborts where it is caught
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

template <class T>
PyObject* wrap(PyTypeObject* type, T value) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self != nullptr) {
    new (&value_of<T>(self)) T(std::move(value));
  }
  return self;
}

template <class T>
void dealloc(PyObject* self) {
  value_of<T>(self).~T();
  Py_TYPE(self)->tp_free(self);
}

template <class T, auto method>
PyObject* call(PyObject* self, PyObject*) {
  return translated([&] {
    (value_of<T>(self).*method)();
    return Py_NewRef(Py_None);
  });
}

template <class T>
bool add_type(PyObject* module, PyTypeObject& type, const char* name, newfunc make, PyMethodDef* methods) {
  type.tp_name = name;
  type.tp_basicsize = sizeof(Object<T>);
  type.tp_flags = Py_TPFLAGS_DEFAULT;
  type.tp_new = make;
  type.tp_dealloc = dealloc<T>;
  type.tp_methods = methods;
  return PyModule_AddType(module, &type) == 0;
}

// --- Precision

PyObject* make_precision(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {nullptr};
  if (PyArg_ParseTupleAndKeywords(args, kwargs, ":Precision", const_cast<char**>(names)) == 0) {
    return nullptr;
  }
  return translated([&] { return wrap(type, Precision()); });
}

PyObject* precision_enter(PyObject* self, PyObject*) {
  return translated([&] {
    value_of<Precision>(self).enter();
    return Py_NewRef(self);
  });
}

// A context manager's __exit__: its three arguments say how the body ended.
PyObject* precision_exit(PyObject* self, PyObject* const*, Py_ssize_t) {
  return call<Precision, &Precision::exit>(self, nullptr);
}

PyObject* precision_autocast_dtype(PyObject* self, PyObject* args) {
  const char* device_type = nullptr;
  if (PyArg_ParseTuple(args, "s:autocast_dtype", &device_type) == 0) {
    return nullptr;
  }
  return translated([&] { return py::cast(value_of<Precision>(self).autocast_dtype(device_type)).release().ptr(); });
}

PyObject* precision_fp32(PyObject* self, PyObject* args) {
  const char *backend = nullptr, *op = nullptr;
  if (PyArg_ParseTuple(args, "ss:fp32_precision", &backend, &op) == 0) {
    return nullptr;
  }
  return translated([&] { return py::cast(value_of<Precision>(self).fp32_precision(backend, op)).release().ptr(); });
}

PyObject* precision_deterministic(PyObject* self, void*) {
  return PyBool_FromLong(value_of<Precision>(self).deterministic());
}

PyMethodDef precision_methods[] = {
    {"__enter__", precision_enter, METH_NOARGS, nullptr},
    {"__exit__", reinterpret_cast<PyCFunction>(precision_exit), METH_FASTCALL, nullptr},
    {"autocast_dtype",
     precision_autocast_dtype,
     METH_VARARGS,
     "device type -> autocast's dtype there, None where it was off"},
    {"fp32_precision", precision_fp32, METH_VARARGS, "(backend, op) -> 'ieee', 'tf32', ..."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef precision_values[] = {
    {"deterministic", precision_deterministic, nullptr, "torch.are_deterministic_algorithms_enabled() then", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject precision_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// --- SegmentState

PyObject* make_segment_state(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  static const char* names[] = {"args", "kwargs", "preserve_rng_state", nullptr};
  PyObject *args = nullptr, *kwargs = nullptr;
  int preserve_rng_state = 0;
  if (PyArg_ParseTupleAndKeywords(
          arguments,
          keywords,
          "O!O!p:SegmentState",
          const_cast<char**>(names),
          &PyTuple_Type,
          &args,
          &PyDict_Type,
          &kwargs,
          &preserve_rng_state) == 0) {
    return nullptr;
  }
  return translated([&] {
    const auto tuple = py::reinterpret_borrow<py::tuple>(args);
    const auto dict = py::reinterpret_borrow<py::dict>(kwargs);
    return wrap(type, SegmentState(tuple, dict, preserve_rng_state != 0));
  });
}

PyObject* segment_state_arguments(PyObject* self, PyObject*) {
  return translated([&] { return value_of<SegmentState>(self).arguments().release().ptr(); });
}

PyMethodDef segment_state_methods[] = {
    {"settle", call<SegmentState, &SegmentState::settle>, METH_NOARGS, nullptr},
    {"enter", call<SegmentState, &SegmentState::enter>, METH_NOARGS, nullptr},
    {"exit", call<SegmentState, &SegmentState::exit>, METH_NOARGS, nullptr},
    {"arguments", segment_state_arguments, METH_NOARGS, "(args, kwargs) as they were given"},
    {nullptr, nullptr, 0, nullptr}};

PyTypeObject segment_state_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

bool add_types(PyObject* module) {
  precision_type.tp_getset = precision_values;
  return add_type<Precision>(module, precision_type, "ckptkern._C.Precision", make_precision, precision_methods) &&
      add_type<SegmentState>(
             module, segment_state_type, "ckptkern._C.SegmentState", make_segment_state, segment_state_methods) &&
      ckptkern::add_saved_tensors(module);
}

} // namespace

TORCH_LIBRARY_FRAGMENT(ckptkern, m) {
  m.def("rng_state(Tensor nonce) -> Tensor", {at::Tag::nondeterministic_seeded});
  m.def(
      "keep_mask(Tensor state, int threshold, SymInt planes, SymInt rows, SymInt cols, SymInt plane_base, "
      "SymInt row_base, SymInt col_base, SymInt total_rows) -> Tensor");
}

TORCH_LIBRARY_IMPL(ckptkern, CompositeExplicitAutograd, m) {
  m.impl("rng_state", rng_state);
}

TORCH_LIBRARY_IMPL(ckptkern, CPU, m) {
  m.impl("keep_mask", ckptkern::keep_mask_cpu);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("torch_version") = CKPTKERN_TORCH_VERSION;
  m.def("philox4x32_10", &ckptkern::philox4x32_10, py::arg("key"), py::arg("counter"));
  if (!add_types(m.ptr())) {
    throw py::error_already_set();
  }
}
