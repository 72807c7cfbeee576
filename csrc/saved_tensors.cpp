#include "saved_tensors.h"

#include <ATen/SequenceNumber.h>
#include <ATen/ops/empty.h>
#include <c10/core/AutogradState.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/tensor_dtypes.h>

#include <new>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace ckptkern {
namespace {

// An owned reference, for containers.
struct Owned {
  explicit Owned(PyObject* object) : object(object) {}
  Owned(Owned&& other) noexcept : object(std::exchange(other.object, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(object, other.object);
    return *this;
  }
  ~Owned() {
    Py_XDECREF(object);
  }
  PyObject* release() {
    return std::exchange(object, nullptr);
  }
  PyObject* object;
};

// Shape, dtype, device. If only Python knows the shape (symbols, jagged tensors), it is a torch.Size.
struct Metadata {
  Metadata(PyObject* object, const at::Tensor& x) : shape(nullptr), dtype(x.scalar_type()), device(x.device()) {
    const auto* impl = x.unsafeGetTensorImpl();
    if (impl->is_python_dispatch() || impl->has_symbolic_sizes_strides()) {
      shape = Owned(PyObject_GetAttrString(object, "shape"));
      if (shape.object == nullptr) {
        throw python_error();
      }
    } else {
      sizes = x.sizes();
    }
  }
  bool operator==(const Metadata& other) const {
    if (dtype != other.dtype || device != other.device ||
        (shape.object == nullptr) != (other.shape.object == nullptr)) {
      return false;
    }
    if (shape.object == nullptr) {
      return sizes == other.sizes;
    }
    const int equal = PyObject_RichCompareBool(shape.object, other.shape.object, Py_EQ);
    if (equal < 0) {
      throw python_error();
    }
    return equal != 0;
  }
  c10::DimVector sizes;
  Owned shape;
  at::ScalarType dtype;
  at::Device device;
};

struct Watched {
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
  int64_t version;
};

struct Placeholder;

struct Segment {
  PyObject_HEAD
  struct Members {
    std::vector<Placeholder*> places; // null: backward can no longer ask for the tensor
    std::vector<Metadata> metadata; // of every place, or of none if it is not compared
    std::unordered_map<c10::TensorImpl*, Watched> watched;
    bool compares = true;
    bool stops_early = true;
    bool completed = false; // forward has returned
    bool lenient = false; // recomputed by a backward pass inside forward: the number of tensors may differ
  } m;
};

// A recomputed tensor. version: of a held tensor, which must not change; -1 without a version.
struct Value {
  Value(int64_t key, Owned object) : key(key), object(std::move(object)) {}
  int64_t key;
  Owned object;
  int64_t version = -1;
};

int64_t version_of(const Owned& object) {
  const auto& x = THPVariable_Unpack(object.object);
  return x.is_inference() ? -1 : static_cast<int64_t>(x._version());
}

constexpr int64_t held = -1; // the key of values for every backward pass over a retained graph

struct Placeholder {
  PyObject_HEAD
  Segment* segment; // owned
  std::size_t place;
  std::vector<Value> values; // one per backward pass

  PyObject* take(int64_t key) {
    for (auto i = values.begin(); i != values.end(); ++i) {
      if (i->key == held && key == held) {
        return version_of(i->object) == i->version ? Py_NewRef(i->object.object) : nullptr;
      }
      if (i->key == key) {
        PyObject* value = i->object.release();
        values.erase(i);
        return value;
      }
    }
    return nullptr;
  }
};

struct Recompute {
  PyObject_HEAD
  Segment* segment; // owned
  PyObject* stop; // owned: the exception class that ends the run
  PyObject* device; // owned: the first tensor's, or null
  int64_t key;
  std::size_t count;
  uint64_t unfilled; // the sequence number of the last packed tensor that its op may still fill
  std::vector<std::pair<std::size_t, Owned>> different;
};

PyTypeObject segment_type{PyVarObject_HEAD_INIT(nullptr, 0)};
PyTypeObject placeholder_type{PyVarObject_HEAD_INIT(nullptr, 0)};
PyTypeObject recompute_type{PyVarObject_HEAD_INIT(nullptr, 0)};
PyObject* parameter_type = nullptr;

template <typename T>
T* as(PyObject* object) {
  return reinterpret_cast<T*>(object);
}

const at::Tensor* tensor_of(PyObject* object) {
  if (!THPVariable_Check(object)) {
    PyErr_Format(PyExc_TypeError, "wanted a tensor but got %s", Py_TYPE(object)->tp_name);
    return nullptr;
  }
  return &THPVariable_Unpack(object);
}

void watch(Segment& segment, const at::Tensor& parameter) {
  if (!parameter.is_inference()) {
    segment.m.watched.insert_or_assign(
        parameter.unsafeGetTensorImpl(),
        Watched{c10::weak_intrusive_ptr<c10::TensorImpl>(parameter.getIntrusivePtr()), parameter._version()});
  }
}

// Watches the parameter, or another leaf that needs a gradient, that x is or is a view of.
void watch_leaf_of(Segment& segment, PyObject* object, const at::Tensor& x) {
  const bool view = x.is_view();
  const at::Tensor leaf = view ? at::Tensor(x._base()) : x;
  if (!leaf.is_leaf() || segment.m.watched.count(leaf.unsafeGetTensorImpl()) != 0) {
    return;
  }
  bool watched = leaf.requires_grad();
  if (!watched) { // frozen
    const Owned wrapped(view ? THPVariable_Wrap(leaf) : (Py_INCREF(object), object));
    watched = reinterpret_cast<PyObject*>(Py_TYPE(wrapped.object)) == parameter_type;
  }
  if (watched) {
    watch(segment, leaf);
  }
}

// --- SavedTensors

PyObject* segment_new(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self != nullptr) {
    new (&as<Segment>(self)->m) Segment::Members();
  }
  return self;
}

void segment_dealloc(PyObject* self) {
  as<Segment>(self)->m.~Members();
  Py_TYPE(self)->tp_free(self);
}

PyObject* segment_pack(PyObject* self, PyObject* object) {
  HANDLE_TH_ERRORS
  const at::Tensor* x = tensor_of(object);
  if (x == nullptr) {
    return nullptr;
  }
  auto& m = as<Segment>(self)->m;
  watch_leaf_of(*as<Segment>(self), object, *x);
  if (m.compares) {
    m.metadata.emplace_back(object, *x);
  }
  auto* placeholder = as<Placeholder>(placeholder_type.tp_alloc(&placeholder_type, 0));
  if (placeholder == nullptr) {
    return nullptr;
  }
  new (&placeholder->values) decltype(placeholder->values)();
  placeholder->place = m.places.size();
  Py_INCREF(self);
  placeholder->segment = as<Segment>(self);
  m.places.push_back(placeholder);
  return reinterpret_cast<PyObject*>(placeholder);
  END_HANDLE_TH_ERRORS
}

PyObject* segment_watch(PyObject* self, PyObject* object) {
  HANDLE_TH_ERRORS
  const at::Tensor* x = tensor_of(object);
  if (x == nullptr) {
    return nullptr;
  }
  watch(*as<Segment>(self), *x);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Returns (parameter, its version now, its version in forward) of a changed parameter, or None.
PyObject* segment_changed(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  for (const auto& entry : as<Segment>(self)->m.watched) {
    const auto impl = entry.second.tensor.lock();
    if (impl && impl->version_counter().current_version() != entry.second.version) {
      const int64_t version = impl->version_counter().current_version();
      return Py_BuildValue(
          "NLL", THPVariable_Wrap(at::Tensor(impl)), (long long)version, (long long)entry.second.version);
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Called after forward: stops watching parameters that forward itself changed (a clamp, an embedding's max_norm).
PyObject* segment_forget_moved(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  auto& watched = as<Segment>(self)->m.watched;
  for (auto i = watched.begin(); i != watched.end();) {
    const auto impl = i->second.tensor.lock();
    i = impl && impl->version_counter().current_version() != i->second.version ? watched.erase(i) : std::next(i);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Called after a recompute: if it changes a parameter as forward did (a clamp), the next recompute must not raise.
PyObject* segment_keep_versions(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  for (auto& entry : as<Segment>(self)->m.watched) {
    if (const auto impl = entry.second.tensor.lock()) {
      entry.second.version = impl->version_counter().current_version();
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Returns (shape, dtype, device) of the tensor that forward saved at a place.
PyObject* segment_metadata(PyObject* self, PyObject* object) {
  HANDLE_TH_ERRORS
  const auto& all = as<Segment>(self)->m.metadata;
  const std::size_t place = PyLong_AsSize_t(object);
  if (place >= all.size()) {
    if (!PyErr_Occurred()) {
      PyErr_Format(PyExc_IndexError, "place %zu of %zu", place, all.size());
    }
    return nullptr;
  }
  const Metadata& metadata = all[place];
  pybind11::object shape = metadata.shape.object == nullptr
      ? pybind11::cast(std::vector<int64_t>(metadata.sizes.begin(), metadata.sizes.end()))
      : pybind11::reinterpret_borrow<pybind11::object>(metadata.shape.object);
  return Py_BuildValue("OON", shape.ptr(), torch::getTHPDtype(metadata.dtype), THPDevice_New(metadata.device));
  END_HANDLE_TH_ERRORS
}

// Frees what a failed recompute has handed out.
PyObject* segment_drop(PyObject* self, PyObject* object) {
  const int64_t key = PyLong_AsLongLong(object);
  if (key == -1 && PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  std::vector<Value> dropped; // freed at the end, because freeing a tensor may run any code
  for (Placeholder* placeholder : as<Segment>(self)->m.places) {
    if (placeholder == nullptr) {
      continue;
    }
    auto& values = placeholder->values;
    for (auto i = values.begin(); i != values.end();) {
      if (i->key == key) {
        dropped.push_back(std::move(*i));
        i = values.erase(i);
      } else {
        ++i;
      }
    }
  }
  Py_RETURN_NONE;
}

// Holds the values of the recompute `key` for every later pass and returns their bytes, without parameters. Returns None, and
// holds nothing, if that is more than limit; limit < 0: no limit.
PyObject* segment_hold(PyObject* self, PyObject* args) {
  HANDLE_TH_ERRORS
  long long key = 0, limit = 0;
  if (PyArg_ParseTuple(args, "LL", &key, &limit) == 0) {
    return nullptr;
  }
  const auto& m = as<Segment>(self)->m;
  std::unordered_set<const void*> counted;
  for (const auto& entry : m.watched) {
    if (const auto impl = entry.second.tensor.lock(); impl && impl->has_storage()) {
      counted.insert(impl->storage().unsafeGetStorageImpl());
    }
  }
  std::size_t bytes = 0;
  std::vector<Value*> values;
  for (Placeholder* placeholder : m.places) {
    if (placeholder == nullptr) {
      continue;
    }
    for (auto& value : placeholder->values) {
      if (value.key != key) {
        continue;
      }
      values.push_back(&value);
      const auto& x = THPVariable_Unpack(value.object.object);
      if (!x.has_storage()) { // sparse, jagged and other subclasses: their bytes are not known here
        Py_RETURN_NONE;
      }
      if (counted.insert(x.storage().unsafeGetStorageImpl()).second) {
        bytes += x.storage().nbytes();
      }
    }
  }
  if (limit >= 0 && bytes > static_cast<std::size_t>(limit)) {
    Py_RETURN_NONE;
  }
  for (Value* value : values) {
    value->key = held;
    value->version = version_of(value->object);
  }
  return PyLong_FromSize_t(bytes);
  END_HANDLE_TH_ERRORS
}

// Returns whether the running backward pass leaves out the gradient of a leaf that the region reads.
PyObject* segment_leaves_out(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  const auto* executed = torch::autograd::get_current_graph_task_exec_info();
  if (executed == nullptr || executed->empty()) {
    Py_RETURN_FALSE;
  }
  for (const auto& entry : as<Segment>(self)->m.watched) {
    const auto impl = entry.second.tensor.lock();
    if (!impl || !impl->requires_grad()) {
      continue;
    }
    const auto sum = torch::autograd::impl::try_get_grad_accumulator(at::Tensor(impl));
    if (!sum) {
      continue;
    }
    const auto found = executed->find(sum.get());
    if (found == executed->end() || !found->second.should_execute()) {
      Py_RETURN_TRUE;
    }
  }
  Py_RETURN_FALSE;
  END_HANDLE_TH_ERRORS
}

Py_ssize_t segment_length(PyObject* self) {
  return static_cast<Py_ssize_t>(as<Segment>(self)->m.places.size());
}

template <bool Segment::Members::* Flag>
PyObject* get_flag(PyObject* self, void*) {
  return PyBool_FromLong(static_cast<long>(as<Segment>(self)->m.*Flag));
}

template <bool Segment::Members::* Flag>
int set_flag(PyObject* self, PyObject* value, void*) {
  const int truth = value == nullptr ? -1 : PyObject_IsTrue(value);
  if (truth < 0) {
    return -1;
  }
  as<Segment>(self)->m.*Flag = truth != 0;
  return 0;
}

template <bool Segment::Members::* Flag>
PyGetSetDef flag(const char* name) {
  return {name, get_flag<Flag>, set_flag<Flag>, nullptr, nullptr};
}

PyMethodDef segment_methods[] = {
    {"pack", segment_pack, METH_O, "x -> its placeholder"},
    {"watch", segment_watch, METH_O, "notes the version of a parameter"},
    {"changed", segment_changed, METH_NOARGS, "(parameter, version now, version in forward) of a changed one, or None"},
    {"forget_moved", segment_forget_moved, METH_NOARGS, "stops watching what has changed since it was noted"},
    {"keep_versions", segment_keep_versions, METH_NOARGS, "takes the current versions as forward's"},
    {"metadata", segment_metadata, METH_O, "place -> (shape, dtype, device)"},
    {"hold",
     segment_hold,
     METH_VARARGS,
     "(key, limit) -> bytes of that recompute's values, for all later passes; None if they are more"},
    {"leaves_out", segment_leaves_out, METH_NOARGS, "() -> whether this pass leaves out the gradient of a leaf"},
    {"drop", segment_drop, METH_O, "key: frees what its recompute has handed out"},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef segment_flags[] = {
    flag<&Segment::Members::compares>("compares"),
    flag<&Segment::Members::stops_early>("stops_early"),
    flag<&Segment::Members::completed>("completed"),
    flag<&Segment::Members::lenient>("lenient"),
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PySequenceMethods segment_sequence{};

// --- Placeholder

void placeholder_dealloc(PyObject* object) {
  auto* self = as<Placeholder>(object);
  self->segment->m.places[self->place] = nullptr;
  {
    const auto values = std::move(self->values);
  }
  self->values.~vector();
  Py_DECREF(self->segment);
  Py_TYPE(object)->tp_free(object);
}

PyObject* placeholder_take(PyObject* self, PyObject* object) {
  const int64_t key = PyLong_AsLongLong(object);
  if (key == -1 && PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  PyObject* value = as<Placeholder>(self)->take(key);
  if (value == nullptr) {
    Py_RETURN_NONE;
  }
  return value;
}

PyMethodDef placeholder_methods[] = {
    {"take", placeholder_take, METH_O, "key -> the tensor that was recomputed for it, once; then None"},
    {nullptr, nullptr, 0, nullptr}};

// --- Recompute

PyObject* recompute_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *segment = nullptr, *stop = nullptr;
  long long key = 0;
  if (PyArg_ParseTuple(args, "O!LO", &segment_type, &segment, &key, &stop) == 0) {
    return nullptr;
  }
  auto* self = as<Recompute>(type->tp_alloc(type, 0));
  if (self != nullptr) {
    new (&self->different) decltype(self->different)();
    Py_INCREF(segment);
    Py_INCREF(stop);
    self->segment = as<Segment>(segment);
    self->stop = stop;
    self->key = key;
  }
  return reinterpret_cast<PyObject*>(self);
}

void recompute_dealloc(PyObject* object) {
  auto* self = as<Recompute>(object);
  self->different.~vector();
  Py_DECREF(self->segment);
  Py_DECREF(self->stop);
  Py_XDECREF(self->device);
  Py_TYPE(object)->tp_free(object);
}

// Returns the reference count of a new Python object of a C++ tensor: newer releases of torch hold a reference themselves.
Py_ssize_t references_of_new() {
  static const Py_ssize_t count = [] {
    const at::Tensor tensor = at::empty({0}), other = tensor;
    const Owned object(THPVariable_Wrap(tensor));
    return Py_REFCNT(object.object);
  }();
  return count;
}

// Returns whether the recompute may end at x. Inputs are packed before their op's kernel runs, so that ending there skips the
// kernel. It does not end at a kernel's result, where unwinding costs time and saves none, nor at an input that the kernel has
// not filled yet, such as rrelu's noise (pytorch#193671): Python has not seen such a tensor.
bool may_end(Recompute& run, PyObject* object, const at::Tensor& x) {
  const auto now = at::sequence_number::peek(); // one more than the op's node's
  if (!x.requires_grad() && !x.is_view() && Py_REFCNT(object) <= references_of_new()) {
    run.unfilled = now;
  }
  return run.unfilled != now && !(x.grad_fn() && x.grad_fn()->sequence_nr() + 1 == now);
}

PyObject* recompute_pack(PyObject* object, PyObject* argument) {
  HANDLE_TH_ERRORS
  auto* self = as<Recompute>(object);
  auto& m = self->segment->m;
  const at::Tensor* given = tensor_of(argument);
  if (given == nullptr) {
    return nullptr;
  }
  const bool ends = may_end(*self, argument, *given) && m.stops_early && self->count + 1 == m.places.size();
  // detached: otherwise the tensor would keep this run's graph alive, and a saved output would keep itself alive
  Owned x(given->requires_grad() ? THPVariable_Wrap(given->detach()) : (Py_INCREF(argument), argument));
  if (self->device == nullptr) {
    self->device = THPDevice_New(given->device());
  }
  const std::size_t place = self->count++;
  if (place >= m.places.size()) {
    if (m.completed) {
      return PyObject_CallMethod(reinterpret_cast<PyObject*>(self->segment), "too_many", nullptr);
    }
    m.lenient = true; // a backward pass inside forward does not ask for later tensors yet
    return x.release();
  }
  if (Placeholder* placeholder = m.places[place]) {
    Py_INCREF(x.object);
    placeholder->values.emplace_back(self->key, Owned(x.object));
    if (m.compares && !(m.metadata[place] == Metadata(argument, *given))) {
      Py_INCREF(x.object);
      self->different.emplace_back(place, Owned(x.object));
    }
  }
  if (ends) {
    PyErr_SetNone(self->stop);
    return nullptr;
  }
  return x.release();
  END_HANDLE_TH_ERRORS
}

PyObject* recompute_count(PyObject* self, void*) {
  return PyLong_FromSize_t(as<Recompute>(self)->count);
}

// Returns [(place, recomputed tensor), ...] of tensors whose shape, dtype or device differs from forward's.
PyObject* recompute_different(PyObject* self, void*) {
  PyObject* list = PyList_New(0);
  for (const auto& entry : as<Recompute>(self)->different) {
    const Owned item(Py_BuildValue("nO", static_cast<Py_ssize_t>(entry.first), entry.second.object));
    if (list == nullptr || item.object == nullptr || PyList_Append(list, item.object) < 0) {
      Py_XDECREF(list);
      return nullptr;
    }
  }
  return list;
}

PyObject* recompute_device(PyObject* self, void*) {
  PyObject* device = as<Recompute>(self)->device;
  return Py_NewRef(device == nullptr ? Py_None : device);
}

PyMethodDef recompute_methods[] = {
    {"pack", recompute_pack, METH_O, "x -> x, detached, and handed to the placeholder at its place"},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef recompute_values[] = {
    {"device", recompute_device, nullptr, "of the first tensor, None before it", nullptr},
    {"count", recompute_count, nullptr, "tensors saved so far", nullptr},
    {"different", recompute_different, nullptr, "[(place, tensor)] that do not look as in forward", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

// --- unpack

PyObject* unpack_saved(PyObject*, PyObject* object) {
  if (Py_TYPE(object) != &placeholder_type) {
    PyErr_Format(PyExc_TypeError, "unpack_saved: wanted a Placeholder but got %s", Py_TYPE(object)->tp_name);
    return nullptr;
  }
  auto* placeholder = as<Placeholder>(object);
  if (!c10::AutogradState::get_tls_state().get_graph_exec_group().has_value()) {
    const int task = torch::autograd::get_current_graph_task_id();
    if (task >= 0) {
      if (PyObject* value = placeholder->take(task)) {
        return value;
      }
    }
  }
  return PyObject_CallMethod(reinterpret_cast<PyObject*>(placeholder->segment), "unpack", "O", object);
}

PyMethodDef functions[] = {
    {"unpack_saved", unpack_saved, METH_O, "placeholder -> its tensor, recomputed if need be"},
    {nullptr, nullptr, 0, nullptr}};

bool add_type(PyObject* module, PyTypeObject& type, const char* name) {
  return PyType_Ready(&type) == 0 && PyModule_AddObjectRef(module, name, reinterpret_cast<PyObject*>(&type)) == 0;
}

} // namespace

bool add_saved_tensors(PyObject* module) {
  const Owned nn(PyImport_ImportModule("torch.nn.parameter"));
  parameter_type = nn.object == nullptr ? nullptr : PyObject_GetAttrString(nn.object, "Parameter");
  if (parameter_type == nullptr) {
    return false;
  }
  segment_sequence.sq_length = segment_length;
  segment_type.tp_name = "ckptkern._C.SavedTensors";
  segment_type.tp_basicsize = sizeof(Segment);
  segment_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE;
  segment_type.tp_new = segment_new;
  segment_type.tp_dealloc = segment_dealloc;
  segment_type.tp_methods = segment_methods;
  segment_type.tp_getset = segment_flags;
  segment_type.tp_as_sequence = &segment_sequence;

  placeholder_type.tp_name = "ckptkern._C.Placeholder";
  placeholder_type.tp_basicsize = sizeof(Placeholder);
  placeholder_type.tp_flags = Py_TPFLAGS_DEFAULT;
  placeholder_type.tp_dealloc = placeholder_dealloc;
  placeholder_type.tp_methods = placeholder_methods;

  recompute_type.tp_name = "ckptkern._C.Recompute";
  recompute_type.tp_basicsize = sizeof(Recompute);
  recompute_type.tp_flags = Py_TPFLAGS_DEFAULT;
  recompute_type.tp_new = recompute_new;
  recompute_type.tp_dealloc = recompute_dealloc;
  recompute_type.tp_methods = recompute_methods;
  recompute_type.tp_getset = recompute_values;

  return add_type(module, segment_type, "SavedTensors") && add_type(module, placeholder_type, "Placeholder") &&
      add_type(module, recompute_type, "Recompute") && PyModule_AddFunctions(module, functions) == 0;
}

} // namespace ckptkern
