#include "module_state.h"

#include <ATen/ops/clone.h>
#include <algorithm>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/python_variable.h>

namespace py = pybind11;

namespace ckptkern {
namespace {

constexpr std::size_t small = 64 * 1024; // bytes: tensors up to this are copied, in case forward updates them
constexpr Py_ssize_t few = 64; // most items of a list or dict that is copied

// Batch and instance norms, whose native ops update their statistics in training.
bool is_training_norm(PyObject* module, PyObject* attributes) {
  static PyObject* const norm =
      py::object(py::module_::import("torch.nn.modules.batchnorm").attr("_NormBase")).release().ptr();
  return PyDict_GetItemString(attributes, "training") == Py_True &&
      PyType_IsSubtype(Py_TYPE(module), reinterpret_cast<PyTypeObject*>(norm)) != 0;
}

// Avoids the instance check of torch's metaclass, which is slow.
bool is_tensor(PyObject* value) {
  return PyType_IsSubtype(Py_TYPE(value), reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0;
}

bool is_generator(PyObject* value) {
  return PyType_IsSubtype(Py_TYPE(value), reinterpret_cast<PyTypeObject*>(THPGeneratorClass)) != 0;
}

// Returns whether x is not a subclass with operations of its own, nor a tensor of a torch.func transform.
bool is_plain(const at::Tensor& x) {
  const auto keys = x.key_set();
  return !x.unsafeGetTensorImpl()->is_python_dispatch() && x.layout() == at::kStrided &&
      !keys.has(c10::DispatchKey::FuncTorchBatched) && !keys.has(c10::DispatchKey::FuncTorchGradWrapper) &&
      !keys.has(c10::DispatchKey::Functionalize);
}

uint32_t version_of(const at::Tensor& x) {
  return x.is_inference() ? 0 : static_cast<uint32_t>(x._version());
}

// Runs ops below autograd and outside of the caller's modes.
struct Below {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_modes{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

// Copies x. If its storage is small, copies share memory as their originals do.
at::Tensor copy_of(const at::Tensor& x, std::unordered_map<const void*, at::Tensor>& copies) {
  const Below below;
  const bool whole = x.storage().nbytes() <= small && x.storage().nbytes() % x.itemsize() == 0;
  const void* const key =
      whole ? static_cast<const void*>(x.storage().unsafeGetStorageImpl()) : x.unsafeGetTensorImpl();
  auto& copy = copies[key];
  if (!copy.defined()) {
    const auto count = static_cast<int64_t>(x.storage().nbytes() / x.itemsize());
    copy = whole ? x.as_strided({count}, {1}, 0).clone() : x.clone();
  }
  return whole && copy.scalar_type() == x.scalar_type() ? copy.as_strided(x.sizes(), x.strides(), x.storage_offset())
      : whole                                           ? x.clone()
                                                        : copy;
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return is_plain(a) && is_plain(b) && a.has_storage() && b.has_storage() && a.is_alias_of(b) &&
      a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

// A space is a dict, another mapping (of a ScriptModule) or a cell.
py::object item(PyObject* space, PyObject* name) {
  PyObject* found = nullptr;
  if (PyDict_Check(space)) {
    found = Py_XNewRef(PyDict_GetItemWithError(space, name));
  } else if (PyCell_Check(space)) {
    found = PyCell_Get(space);
  } else if ((found = PyObject_GetItem(space, name)) == nullptr && PyErr_ExceptionMatches(PyExc_KeyError) != 0) {
    PyErr_Clear();
  }
  if (found == nullptr && PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(found);
}

void put(PyObject* space, PyObject* name, PyObject* value) {
  const int status = PyCell_Check(space) ? PyCell_Set(space, value)
      : value == nullptr                 ? PyObject_DelItem(space, name)
      : PyDict_Check(space)              ? PyDict_SetItem(space, name, value)
                                         : PyObject_SetItem(space, name, value);
  if (status != 0) {
    throw py::error_already_set();
  }
}

template <typename F>
void for_each(PyObject* space, const F& function) {
  PyObject *name = nullptr, *value = nullptr;
  Py_ssize_t place = 0;
  if (PyDict_Check(space)) {
    while (PyDict_Next(space, &place, &name, &value) != 0) {
      function(name, value);
    }
    return;
  }
  const auto items = py::reinterpret_steal<py::object>(PyMapping_Items(space));
  if (!items) {
    throw py::error_already_set();
  }
  for (const auto& pair : items) {
    function(PyTuple_GET_ITEM(pair.ptr(), 0), PyTuple_GET_ITEM(pair.ptr(), 1));
  }
}

// Returns whether the present value may be replaced by forward's.
bool exchangeable(PyObject* now, PyObject* then, bool of_parameters) {
  if (now == nullptr || then == nullptr || !is_tensor(now) || !is_tensor(then)) {
    return true;
  }
  const auto &a = THPVariable_Unpack(now), &b = THPVariable_Unpack(then);
  if (a.unsafeGetTensorImpl()->is_python_dispatch() || b.unsafeGetTensorImpl()->is_python_dispatch()) {
    return false;
  }
  return (!of_parameters || a.sizes() == b.sizes()) && !same_memory(a, b);
}

// Names of a module's dicts of forward hooks, of their options, and of submodules.
PyObject* const* dict_names() {
  static PyObject* const names[ModuleState::kDicts] = {
      PyUnicode_InternFromString("_forward_hooks"),
      PyUnicode_InternFromString("_forward_pre_hooks"),
      PyUnicode_InternFromString("_forward_hooks_with_kwargs"),
      PyUnicode_InternFromString("_forward_pre_hooks_with_kwargs"),
      PyUnicode_InternFromString("_forward_hooks_always_called"),
      PyUnicode_InternFromString("_modules")};
  return names;
}

// Copies a dict; null for an empty one.
py::object copied(PyObject* dict) {
  return PyDict_GET_SIZE(dict) == 0 ? py::object() : py::object(py::handle(dict).attr("copy")());
}

bool same_items(PyObject* a, PyObject* b) { // b: null for an empty one
  if (PyDict_GET_SIZE(a) != (b == nullptr ? 0 : PyDict_GET_SIZE(b))) {
    return false;
  }
  PyObject *name = nullptr, *other = nullptr, *value = nullptr, *its = nullptr;
  Py_ssize_t i = 0, j = 0;
  while (PyDict_Next(a, &i, &name, &value) != 0 && PyDict_Next(b, &j, &other, &its) != 0) {
    if (value != its || PyObject_RichCompareBool(name, other, Py_EQ) != 1) {
      return false;
    }
  }
  return true;
}

} // namespace

bool is_scalar(PyObject* value) {
  return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
      PyUnicode_CheckExact(value);
}

bool is_module(PyObject* value) {
  static PyObject* const type = py::object(py::module_::import("torch.nn").attr("Module")).release().ptr();
  return PyType_IsSubtype(Py_TYPE(value), reinterpret_cast<PyTypeObject*>(type)) != 0;
}

namespace {

// Returns whether value is a list or dict of at most `few` scalars, such as adapters' scales, or one that forward fills. A dict
// may have any keys.
bool is_container(PyObject* value) {
  if (PyList_CheckExact(value)) {
    const Py_ssize_t size = PyList_GET_SIZE(value);
    for (Py_ssize_t i = 0; i < std::min(size, few); ++i) {
      if (!is_scalar(PyList_GET_ITEM(value, i))) {
        return false;
      }
    }
    return size <= few;
  }
  if (!PyDict_CheckExact(value) || PyDict_GET_SIZE(value) == 0 ||
      PyDict_GET_SIZE(value) > few) { // empty ones are hooks
    return false;
  }
  PyObject *name = nullptr, *item = nullptr;
  Py_ssize_t place = 0;
  while (PyDict_Next(value, &place, &name, &item) != 0) {
    if (!is_scalar(item)) {
      return false;
    }
  }
  return true;
}

bool is_constant(PyObject* value) {
  if (!PyTuple_Check(value) || PyTuple_GET_SIZE(value) > few) {
    return is_scalar(value);
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
    if (!is_scalar(PyTuple_GET_ITEM(value, i))) {
      return false;
    }
  }
  return true;
}

// Returns whether the name is that of a module's parameters, buffers or submodules.
bool is_table(PyObject* name) {
  return PyUnicode_CompareWithASCIIString(name, "_parameters") == 0 ||
      PyUnicode_CompareWithASCIIString(name, "_buffers") == 0 ||
      PyUnicode_CompareWithASCIIString(name, "_modules") == 0;
}

py::object contents_of(PyObject* container) {
  PyObject* const found =
      PyDict_Check(container) ? PyDict_Copy(container) : PyList_GetSlice(container, 0, PyList_GET_SIZE(container));
  if (found == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(found);
}

void fill(PyObject* container, PyObject* contents) {
  if (PyDict_Check(container)) {
    PyDict_Clear(container);
  }
  const int status = PyDict_Check(container) ? PyDict_Update(container, contents)
                                             : PyList_SetSlice(container, 0, PyList_GET_SIZE(container), contents);
  if (status != 0) {
    throw py::error_already_set();
  }
}

} // namespace

void ModuleState::add_container(PyObject* value) {
  if (seen_.insert(value).second) {
    containers_.emplace_back(py::reinterpret_borrow<py::object>(value), contents_of(value));
  }
}

void ModuleState::add_entry(const Space& space, py::handle name, PyObject* value) {
  Entry entry{spaces_.size(), py::reinterpret_borrow<py::object>(name), py::reinterpret_borrow<py::object>(value)};
  if (is_tensor(value)) {
    const auto& x = THPVariable_Unpack(value);
    entry.requires_grad = x.requires_grad();
    entry.version = version_of(x);
    if (x.grad_fn()) {
      entry.tensor = x.detach().requires_grad_(entry.requires_grad);
      entry.value = py::reinterpret_steal<py::object>(THPVariable_Wrap(entry.tensor));
      entry.original = c10::weak_intrusive_ptr<c10::TensorImpl>(x.getIntrusivePtr());
    } else {
      entry.tensor = x;
      if (!entry.requires_grad && space.kind != Kind::parameters && space.kind != Kind::tensor &&
          (!space.norm || space.own || values_) && !x.is_inference() && is_plain(x) && x.nbytes() <= small &&
          THPVariable_CheckExact(value)) {
        entry.before = copy_of(x, copies_);
      }
    }
  }
  entries_.push_back(std::move(entry));
}

void ModuleState::add_space(Space space) {
  for_each(space.object.ptr(), [&](PyObject* name, PyObject* value) {
    if (space.kind != Kind::attributes || is_constant(value) || is_tensor(value)) {
      add_entry(space, name, value);
    } else if (is_container(value)) {
      if (!is_table(name)) {
        add_entry(space, name, value);
        add_container(value);
      }
    } else if (is_generator(value)) {
      generators_.push_back(py::reinterpret_borrow<py::object>(value));
    }
  });
  spaces_.push_back(std::move(space));
}

void ModuleState::add_module(py::handle root, bool own) {
  static PyObject* const parameters = PyUnicode_InternFromString("_parameters");
  static PyObject* const buffers = PyUnicode_InternFromString("_buffers");
  roots_.push_back(py::reinterpret_borrow<py::object>(root));
  entries_.reserve(32);
  spaces_.reserve(8);
  std::vector<py::object> pending{roots_.back()};
  for (std::size_t i = 0; i < pending.size(); ++i) {
    const py::object module = pending[i];
    if (!seen_.insert(module.ptr()).second) {
      continue;
    }
    Space space{
        py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module.ptr(), nullptr)),
        module,
        Kind::attributes,
        own};
    if (!space.object) {
      throw py::error_already_set();
    }
    PyObject* const attributes = space.object.ptr();
    const auto mapping = [&](PyObject* name) {
      auto found = py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(attributes, name));
      if (!found) { // a ScriptModule's
        found = py::reinterpret_steal<py::object>(PyObject_GetAttr(module.ptr(), name));
      }
      const Py_ssize_t size = found ? PyObject_Size(found.ptr()) : -1;
      if (size < 0) {
        throw py::error_already_set();
      }
      return size == 0 ? py::object() : std::move(found);
    };
    if (auto found = mapping(parameters)) {
      add_space({std::move(found), module, Kind::parameters, own});
    }
    if (auto found = mapping(buffers)) {
      add_space({std::move(found), module, Kind::buffers, own, is_training_norm(module.ptr(), attributes)});
    }
    if (const auto found = mapping(dict_names()[kDicts - 1])) {
      for_each(found.ptr(), [&](PyObject*, PyObject* child) {
        if (child != Py_None) {
          pending.push_back(py::reinterpret_borrow<py::object>(child));
        }
      });
    }
    for (std::size_t place = 0; place < kDicts; ++place) {
      PyObject* const dict = PyDict_GetItemWithError(attributes, dict_names()[place]);
      if (dict != nullptr && PyDict_Check(dict)) {
        space.dicts[place] = copied(dict);
      }
    }
    space.type = py::type::of(module);
    space.size = PyDict_GET_SIZE(attributes);
    add_space(std::move(space));
  }
}

void ModuleState::add_cell(py::handle cell) {
  PyObject* const value = PyCell_GET(cell.ptr());
  if (value != nullptr && seen_.insert(cell.ptr()).second) { // null: not filled yet
    Space space{py::reinterpret_borrow<py::object>(cell), py::none(), Kind::cell};
    add_entry(space, py::handle(), value);
    spaces_.push_back(std::move(space));
  }
}

void ModuleState::add_tensor(const at::Tensor& captured) {
  if (seen_.insert(captured.unsafeGetTensorImpl()).second) {
    Space space{py::object(), py::none(), Kind::tensor};
    const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(captured));
    add_entry(space, py::handle(), object.ptr());
    spaces_.push_back(std::move(space));
  }
}

// Notes attributes that forward added: they must not be there when it runs again.
void ModuleState::add_absent() {
  for (std::size_t i = 0; i < spaces_.size(); ++i) {
    const auto& space = spaces_[i];
    if (space.kind != Kind::attributes || PyDict_GET_SIZE(space.object.ptr()) == space.size) {
      continue;
    }
    py::set known;
    for (const auto& entry : entries_) {
      if (entry.space == i) {
        known.add(entry.name);
      }
    }
    for_each(space.object.ptr(), [&](PyObject* name, PyObject* value) {
      const bool saved = is_constant(value) || is_tensor(value) || (is_container(value) && !is_table(name));
      if (saved && !known.contains(py::handle(name))) {
        Entry entry{i, py::reinterpret_borrow<py::object>(name)};
        entry.absent = true;
        entries_.push_back(std::move(entry));
      }
    });
  }
}

void ModuleState::settle() {
  if (std::exchange(settled_, true)) {
    return;
  }
  add_absent();
  for (auto& space : spaces_) {
    if (space.type && !space.type.is(py::type::of(space.module))) { // a lazy module, which also removes its hook
      space.type = py::type::of(space.module);
      for (std::size_t place = 0; place < kDicts; ++place) {
        space.dicts[place] = copied(PyDict_GetItem(space.object.ptr(), dict_names()[place]));
      }
    }
  }
  for (auto& entry : entries_) {
    auto& space = spaces_[entry.space];
    if (entry.tensor.defined()) {
      const uint32_t version = version_of(entry.tensor);
      entry.updated = version != entry.version;
      space.updated = space.updated || entry.updated;
      entry.version = version;
      // A buffer's is always held: a native op, such as batch_norm, updates it without a new version.
      if (!entry.updated && space.kind != Kind::buffers) {
        entry.before = at::Tensor();
      }
    }
  }
  copies_.clear();
}

py::list ModuleState::roots() const {
  py::list found;
  for (const auto& root : roots_) {
    found.append(root);
  }
  return found;
}

py::list ModuleState::parameters() const {
  py::list found;
  for (const auto& entry : entries_) {
    const auto& space = spaces_[entry.space];
    if (entry.tensor.defined() && space.own && space.kind == Kind::parameters && !entry.original) {
      found.append(entry.value);
    }
  }
  return found;
}

py::list ModuleState::reclassed() const {
  py::list found;
  for (const auto& space : spaces_) {
    if (space.type && !space.type.is(py::type::of(space.module))) {
      found.append(py::make_tuple(space.module, space.type));
    }
  }
  return found;
}

// Returns whether forward updated the entry and its earlier value is unknown. Statistics of norms, parameters (a clamp, merged
// adapters) and values that cannot be replaced stay as forward leaves them.
bool ModuleState::is_lost(const Entry& entry) const {
  const auto& space = spaces_[entry.space];
  return entry.updated && !entry.before.defined() && !entry.requires_grad && !space.norm &&
      space.kind != Kind::parameters && space.kind != Kind::tensor;
}

py::list ModuleState::changed() const {
  py::list found;
  for (const auto& entry : entries_) {
    const auto& space = spaces_[entry.space];
    if (!entry.tensor.defined() || entry.tensor.is_inference() || (space.norm && space.kind == Kind::buffers)) {
      continue;
    }
    const uint32_t now = version_of(entry.tensor);
    if (!is_lost(entry) && (entry.updated || now == entry.version)) {
      continue;
    }
    const auto there = space.object ? item(space.object.ptr(), entry.name.ptr()) : py::object();
    py::list objects;
    objects.append(entry.value);
    if (there && is_tensor(there.ptr())) {
      if (!is(entry, there.ptr()) && there.ptr() != entry.value.ptr() && !entry.before.defined() && !is_lost(entry) &&
          !exchangeable(there.ptr(), entry.value.ptr(), space.kind == Kind::parameters)) {
        continue; // FSDP's
      }
      objects.append(there);
    }
    if (entry.original) {
      if (auto impl = entry.original->lock()) {
        objects.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(at::Tensor(std::move(impl)))));
      }
    }
    found.append(py::make_tuple(objects, space.module, entry.name ? entry.name : py::none(), now, entry.version));
  }
  return found;
}

bool ModuleState::is(const Entry& entry, PyObject* now) const {
  if (now == nullptr || !entry.tensor.defined() || !is_tensor(now)) {
    return now != nullptr && now == entry.value.ptr();
  }
  const auto* const impl = THPVariable_Unpack(now).unsafeGetTensorImpl();
  return impl == entry.tensor.unsafeGetTensorImpl() || (entry.original && impl == entry.original->lock().get());
}

// Returns the value for the recompute; null to leave the present one.
py::object ModuleState::wanted(const Entry& entry, Copies& copies, Objects& objects) const {
  const auto& space = spaces_[entry.space];
  // Statistics that a norm has updated, perhaps without a new version, must not be updated twice.
  const bool statistics =
      space.norm && space.kind == Kind::buffers && (space.own || space.updated) && is_plain(entry.tensor);
  if (!entry.tensor.defined() || (!entry.before.defined() && !statistics && !is_lost(entry))) {
    return entry.value;
  }
  auto& object = objects[entry.tensor.unsafeGetTensorImpl()];
  if (!object) {
    object = py::reinterpret_steal<py::object>(
        THPVariable_Wrap(copy_of(entry.before.defined() ? entry.before : entry.tensor, copies)));
    const auto own = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(entry.value.ptr(), nullptr));
    if (own && PyDict_GET_SIZE(own.ptr()) != 0) { // attributes of the tensor
      object.attr("__dict__").attr("update")(own);
    }
    PyErr_Clear();
  }
  return object;
}

void ModuleState::enter(Undo& undo) const {
  static PyObject* const ordered = py::object(py::module_::import("collections").attr("OrderedDict")).release().ptr();
  for (const auto& [container, contents] : containers_) {
    undo.contents.push_back(contents_of(container.ptr()));
    fill(container.ptr(), contents.ptr());
  }
  for (std::size_t i = 0; i < spaces_.size(); ++i) {
    const auto& space = spaces_[i];
    for (std::size_t place = 0; space.type && place < kDicts; ++place) {
      PyObject* const now = PyDict_GetItem(space.object.ptr(), dict_names()[place]);
      PyObject* const then = space.dicts[place].ptr();
      if (now != nullptr && PyDict_Check(now) && !same_items(now, then)) {
        undo.dicts.emplace_back(std::make_pair(i, place), py::reinterpret_borrow<py::object>(now));
        const auto fresh = then == nullptr ? py::handle(ordered)() : py::handle(then).attr("copy")();
        put(space.object.ptr(), dict_names()[place], fresh.ptr());
      }
    }
  }
  Copies copies;
  Objects objects;
  undo.values.reserve(entries_.size());
  for (const auto& entry : entries_) {
    const auto& space = spaces_[entry.space];
    undo.values.emplace_back(space.object ? item(space.object.ptr(), entry.name.ptr()) : py::object(), false);
    PyObject* const now = undo.values.back().first.ptr();
    const auto& x = entry.tensor;
    if (x.defined() && !entry.original && x.is_leaf() && x.requires_grad() != entry.requires_grad) {
      undo.requires_grad.emplace_back(x, x.requires_grad());
      x.requires_grad_(entry.requires_grad);
    }
    if (!space.object) {
      continue;
    }
    const bool is_there = is(entry, now);
    const auto value = entry.absent ? py::object() : wanted(entry, copies, objects);
    if (entry.absent ? now != nullptr
                     : value && (value.ptr() != entry.value.ptr() || !is_there) &&
                (is_there || exchangeable(now, value.ptr(), space.kind == Kind::parameters))) {
      undo.values.back().second = true;
      put(space.object.ptr(), entry.name.ptr(), value.ptr());
    }
  }
}

void ModuleState::exit(const Undo& undo) const {
  const auto put_back = [](PyObject* space, PyObject* name, PyObject* value) {
    try {
      put(space, name, value);
    } catch (py::error_already_set& error) { // the others are restored all the same
      error.discard_as_unraisable("a region's recompute");
    }
  };
  for (std::size_t i = 0; i < undo.values.size(); ++i) {
    const auto& space = spaces_[entries_[i].space];
    if (space.object) {
      const auto now = item(space.object.ptr(), entries_[i].name.ptr());
      PyObject* const before = undo.values[i].first.ptr();
      if (now.ptr() != before &&
          (undo.values[i].second || exchangeable(now.ptr(), before, space.kind == Kind::parameters))) {
        put_back(space.object.ptr(), entries_[i].name.ptr(), before);
      }
    }
  }
  for (const auto& [tensor, requires_grad] : undo.requires_grad) {
    tensor.requires_grad_(requires_grad);
  }
  for (std::size_t i = 0; i < undo.contents.size(); ++i) {
    fill(containers_[i].first.ptr(), undo.contents[i].ptr());
  }
  for (const auto& [where, dict] : undo.dicts) {
    put_back(spaces_[where.first].object.ptr(), dict_names()[where.second], dict.ptr());
  }
}

} // namespace ckptkern
