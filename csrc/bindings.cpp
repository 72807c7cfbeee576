// The Python module ckptkern._C, and the ops that torch sees.
#include "gradient_sums.h"
#include "philox.h"
#include "precision.h"
#include "saved_tensors.h"
#include "segment_state.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/randint.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/profiler/orchestration/observer.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/version.h>

#include <limits>
#include <new>
#include <utility>

namespace py = pybind11;

namespace {

using ckptkern::Precision;
using ckptkern::SegmentState;

// Samples int64[2] on nonce's device, from torch's own generator there: torch.manual_seed reproduces it and
// CUDA-graph capture samples anew in each replay. The bounds are those of torch.randint(-2**63, 2**63 - 1).
// The recompute of a region that does not preserve the generator's state gets the region's samples.
at::Tensor rng_state(const at::Tensor& nonce) {
  return ckptkern::drawn([&] {
    return at::randint(
        std::numeric_limits<int64_t>::min(),
        std::numeric_limits<int64_t>::max(),
        {2},
        nonce.options().dtype(at::kLong).requires_grad(false));
  });
}

// --- All observers of a call, in one query: each of torch's own queries goes through pybind11 and takes 1 to 4 us where its
// code is not in the caches.

enum Observed : uint64_t {
  transforms = 1,
  modes = 2,
  profiler = 4,
  subclass = 8,
  wrapped = 16,
  hooks = 32,
  in_backward = 64,
  batched = 128,
  main_grad = 256,
  autocast = 512
};
constexpr int needs_shift = 16;
constexpr Py_ssize_t most_needs = 48;

// Returns Observed | needs_input_grad mask << needs_shift, of a tuple or list of Tensor and None.
PyObject* observe(PyObject*, PyObject* tensors) {
  using c10::DispatchKey;
  uint64_t seen = 0, needs = 0;
  const auto keys_of_thread = c10::impl::tls_local_dispatch_key_set();
  const auto included = keys_of_thread.included_;
  if (!keys_of_thread.excluded_.has_all(c10::autocast_dispatch_keyset)) {
    seen |= autocast;
  }
  if (included.has(DispatchKey::FuncTorchDynamicLayerFrontMode) ||
      included.has(DispatchKey::FuncTorchDynamicLayerBackMode)) {
    seen |= transforms;
  }
  if (c10::impl::TorchDispatchModeTLS::stack_len() > 0) {
    seen |= modes;
  }
  if (torch::profiler::impl::profilerEnabled()) {
    seen |= profiler;
  }
  if (at::SavedTensorDefaultHooks::get_hooks(/*ignore_is_tracing=*/true).has_value()) {
    seen |= hooks;
  }
  if (torch::autograd::get_current_graph_task_id() != -1) {
    seen |= in_backward;
  }
  const bool recording = c10::AutogradState::get_tls_state().get_grad_mode();
  static PyObject* const main_grad_name = PyUnicode_InternFromString("main_grad");
  PyObject* fast = PySequence_Fast(tensors, "observe takes a tuple or a list");
  if (fast == nullptr) {
    return nullptr;
  }
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(fast);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(fast, i);
    if (item == Py_None) {
      continue;
    }
    if (!THPVariable_Check(item)) {
      Py_DECREF(fast);
      PyErr_Format(PyExc_TypeError, "observe takes tensors and None, not %s", Py_TYPE(item)->tp_name);
      return nullptr;
    }
    if (!THPVariable_CheckExact(item)) {
      seen |= subclass;
    }
    if (PyObject_HasAttr(item, main_grad_name) != 0) {
      seen |= main_grad;
    }
    const auto& tensor = THPVariable_Unpack(item);
    const auto keys = tensor.key_set();
    seen |= (keys.has(DispatchKey::FuncTorchGradWrapper) ? wrapped : 0) |
        (i == 0 && keys.has(DispatchKey::Batched) ? batched : 0);
    if (recording && i < most_needs && tensor.requires_grad()) {
      needs |= uint64_t(1) << i;
    }
  }
  Py_DECREF(fast);
  return PyLong_FromUnsignedLongLong(seen | needs << needs_shift);
}

// Returns a byte for each edge of the running node, 1 where this backward pass asks for the gradient; None if it asks for all.
PyObject* asked(PyObject*, PyObject*) {
  const auto* executed = torch::autograd::get_current_graph_task_exec_info();
  if (executed == nullptr || executed->empty()) {
    Py_RETURN_NONE;
  }
  const auto node = torch::autograd::get_current_node();
  if (!node) {
    Py_RETURN_NONE;
  }
  const auto count = node->num_outputs();
  PyObject* edges = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count));
  if (edges != nullptr) {
    for (size_t i = 0; i < count; ++i) {
      PyBytes_AS_STRING(edges)[i] = node->task_should_compute_output(i) ? 1 : 0;
    }
  }
  return edges;
}

// Returns whether the tensor is strided and floating point, with sizes that are not symbolic.
bool plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_floating_point() &&
      !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

// Returns whether weight [N, in_features] and bias [N] or None are plain tensors on x's device, from (x, weight, bias,
// in_features). False also for subclasses and symbolic sizes, which it does not read.
PyObject* layer_fits(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 4 || !THPVariable_CheckExact(given[0]) || !THPVariable_CheckExact(given[1]) ||
      !PyLong_CheckExact(given[3])) {
    Py_RETURN_FALSE;
  }
  const auto& weight = THPVariable_Unpack(given[1]);
  const auto device = THPVariable_Unpack(given[0]).device();
  bool fits =
      plain(weight) && weight.device() == device && weight.dim() == 2 && weight.size(1) == PyLong_AsLongLong(given[3]);
  if (fits && given[2] != Py_None) {
    fits = THPVariable_CheckExact(given[2]);
    if (fits) {
      const auto& bias = THPVariable_Unpack(given[2]);
      fits = plain(bias) && bias.device() == device && bias.dim() == 1 && bias.size(0) == weight.size(0);
    }
  }
  return PyBool_FromLong(fits);
}

PyMethodDef functions[] = {
    {"asked",
     asked,
     METH_NOARGS,
     "() -> a byte for each gradient of the running node, 1 if asked for; None if all are"},
    {"layer_fits",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(layer_fits)),
     METH_FASTCALL,
     "(x, weight, bias, in_features) -> whether they fit as a linear layer on x's device"},
    {"observe",
     observe,
     METH_O,
     "(tensors) -> the call's observers in 16 bits, and above these the needs_input_grad mask"},
    {nullptr, nullptr, 0, nullptr}};

// --- C++ values as plain CPython types. Every region creates one and enters it; through pybind11 the calls would cost twice as
// much as the work.

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

PyMethodDef precision_methods[] = {
    {"__enter__", precision_enter, METH_NOARGS, nullptr},
    {"__exit__", reinterpret_cast<PyCFunction>(precision_exit), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyTypeObject precision_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// --- SegmentState

PyObject* make_segment_state(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  static const char* names[] = {"args", "kwargs", "preserve_rng_state", "values", "own", "reachable", nullptr};
  PyObject *args = nullptr, *kwargs = nullptr, *own = nullptr, *reachable = nullptr;
  int preserve_rng_state = 0, values = 0;
  if (PyArg_ParseTupleAndKeywords(
          arguments,
          keywords,
          "O!O!ppOO!:SegmentState",
          const_cast<char**>(names),
          &PyTuple_Type,
          &args,
          &PyDict_Type,
          &kwargs,
          &preserve_rng_state,
          &values,
          &own,
          &PyTuple_Type,
          &reachable) == 0) {
    return nullptr;
  }
  return translated([&] {
    const auto tuple = py::reinterpret_borrow<py::tuple>(args);
    const auto dict = py::reinterpret_borrow<py::dict>(kwargs);
    const auto others = py::reinterpret_borrow<py::tuple>(reachable);
    return wrap(type, SegmentState(tuple, dict, preserve_rng_state != 0, values != 0, own, others));
  });
}

PyObject* segment_state_arguments(PyObject* self, PyObject*) {
  return translated([&] { return value_of<SegmentState>(self).arguments().release().ptr(); });
}

PyObject* segment_state_draws(PyObject* self, void*) {
  return PyBool_FromLong(static_cast<long>(value_of<SegmentState>(self).draws()));
}

PyGetSetDef segment_state_values[] = {
    {"draws", segment_state_draws, nullptr, "is forward to run between record() and stop()?", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

template <auto method>
PyObject* segment_state_modules(PyObject* self, PyObject*) {
  return translated([&] { return (value_of<SegmentState>(self).modules().*method)().release().ptr(); });
}

PyMethodDef segment_state_methods[] = {
    {"settle", call<SegmentState, &SegmentState::settle>, METH_NOARGS, nullptr},
    {"enter", call<SegmentState, &SegmentState::enter>, METH_NOARGS, nullptr},
    {"exit", call<SegmentState, &SegmentState::exit>, METH_NOARGS, nullptr},
    {"record", call<SegmentState, &SegmentState::record>, METH_NOARGS, nullptr},
    {"stop", call<SegmentState, &SegmentState::stop>, METH_NOARGS, nullptr},
    {"parameters",
     segment_state_modules<&ckptkern::ModuleState::parameters>,
     METH_NOARGS,
     "[parameter, ...] of the module that the call runs"},
    {"roots",
     segment_state_modules<&ckptkern::ModuleState::roots>,
     METH_NOARGS,
     "[module, ...] that the call can reach"},
    {"reclassed",
     segment_state_modules<&ckptkern::ModuleState::reclassed>,
     METH_NOARGS,
     "[(module, its class in forward), ...] of modules that have another class now"},
    {"changed",
     segment_state_modules<&ckptkern::ModuleState::changed>,
     METH_NOARGS,
     "after enter(): [(tensors, module or None, name, version now, version after forward), ...] that must not be read"},
    {"arguments", segment_state_arguments, METH_NOARGS, "(args, kwargs) as they were given"},
    {nullptr, nullptr, 0, nullptr}};

PyTypeObject segment_state_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

bool add_types(PyObject* module) {
  segment_state_type.tp_getset = segment_state_values;
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
  m.attr("torch_version") = TORCH_VERSION;
  py::class_<ckptkern::GradientSums>(m, "GradientSums")
      .def(py::init<>())
      .def("redirect", &ckptkern::GradientSums::redirect, py::arg("output"));
  if (PyModule_AddFunctions(m.ptr(), functions) != 0 || !add_types(m.ptr())) {
    throw py::error_already_set();
  }
}
