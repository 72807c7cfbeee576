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

constexpr std::size_t small = 64 * 1024; // bytes: what is copied, in case forward updates it

// torch's own batch and instance norms read no running statistics while they train.
bool trains_without_reading(PyObject* module, PyObject* attributes) {
  static PyObject* const norm =
      py::object(py::module_::import("torch.nn.modules.batchnorm").attr("_NormBase")).release().ptr();
  if (PyDict_GetItemString(attributes, "training") != Py_True || PyObject_IsInstance(module, norm) != 1) {
    return false;
  }
  const auto home = py::str(py::type::of(module).attr("__module__")).cast<std::string>();
  return home.rfind("torch.nn.modules.", 0) == 0;
}

// Neither a subclass with operations of its own nor a tensor of a torch.func transform.
bool is_plain(const at::Tensor& x) {
  const auto keys = x.key_set();
  return !x.unsafeGetTensorImpl()->is_python_dispatch() && x.layout() == at::kStrided &&
      !keys.has(c10::DispatchKey::FuncTorchBatched) && !keys.has(c10::DispatchKey::FuncTorchGradWrapper) &&
      !keys.has(c10::DispatchKey::Functionalize);
}

uint32_t version_of(const at::Tensor& x) {
  return x.is_inference() ? 0 : static_cast<uint32_t>(x._version());
}

// Below autograd and outside of the caller's modes.
at::Tensor copy_of(const at::Tensor& x) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  return x.clone();
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

// May what is there be exchanged for what was?
bool exchangeable(PyObject* now, PyObject* then) {
  if (now == nullptr || then == nullptr || !THPVariable_Check(now) || !THPVariable_Check(then)) {
    return true;
  }
  const auto &a = THPVariable_Unpack(now), &b = THPVariable_Unpack(then);
  if (a.unsafeGetTensorImpl()->is_python_dispatch() || b.unsafeGetTensorImpl()->is_python_dispatch()) {
    return false;
  }
  return a.sizes() == b.sizes() && !same_memory(a, b);
}

} // namespace

bool is_scalar(PyObject* value) {
  return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
      PyUnicode_CheckExact(value);
}

bool is_module(PyObject* value) {
  static PyObject* const type = py::object(py::module_::import("torch.nn").attr("Module")).release().ptr();
  return PyObject_IsInstance(value, type) == 1;
}

namespace {

// The dicts of a module's forward hooks, and of what they take.
bool are_hooks(PyObject* name, PyObject* value) {
  static PyObject* const names[] = {
      PyUnicode_InternFromString("_forward_hooks"),
      PyUnicode_InternFromString("_forward_pre_hooks"),
      PyUnicode_InternFromString("_forward_hooks_with_kwargs"),
      PyUnicode_InternFromString("_forward_pre_hooks_with_kwargs"),
      PyUnicode_InternFromString("_forward_hooks_always_called")};
  return PyDict_Check(value) && std::find(std::begin(names), std::end(names), name) != std::end(names);
}

py::object copied_hooks(PyObject* hooks) {
  static PyObject* const none = py::object(py::module_::import("collections").attr("OrderedDict")()).release().ptr();
  return PyDict_GET_SIZE(hooks) == 0 ? py::reinterpret_borrow<py::object>(none) : py::handle(hooks).attr("copy")();
}

bool same_keys(PyObject* a, PyObject* b) {
  if (PyDict_GET_SIZE(a) != PyDict_GET_SIZE(b)) {
    return false;
  }
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t place = 0;
  while (PyDict_Next(a, &place, &key, &value) != 0) {
    if (PyDict_GetItem(b, key) == nullptr) {
      return false;
    }
  }
  return true;
}

} // namespace

void ModuleState::add_entry(const Space& space, py::handle name, PyObject* value) {
  Entry entry{spaces_.size(), py::reinterpret_borrow<py::object>(name), py::reinterpret_borrow<py::object>(value)};
  if (PyDict_Check(value) && space.kind == Kind::attributes) {
    entry.hooks = true;
    entry.value = copied_hooks(value);
  } else if (THPVariable_Check(value)) {
    entry.tensor = THPVariable_Unpack(value);
    const auto& x = entry.tensor;
    entry.requires_grad = x.requires_grad();
    entry.version = version_of(x);
    if (x.grad_fn()) { // its graph must not live as long as this region's
      entry.value = py::reinterpret_steal<py::object>(THPVariable_Wrap(x.detach().requires_grad_(entry.requires_grad)));
    } else if (
        !entry.requires_grad && !space.norm && space.kind != Kind::parameters && !x.is_inference() && is_plain(x) &&
        x.nbytes() <= small) {
      auto& copy = copies_[x.unsafeGetTensorImpl()];
      if (!copy.defined()) {
        copy = copy_of(x);
      }
      entry.before = copy;
    }
  }
  entries_.push_back(std::move(entry));
}

void ModuleState::add_space(Space space) {
  const std::size_t count = entries_.size();
  for_each(space.object.ptr(), [&](PyObject* name, PyObject* value) {
    if (space.kind != Kind::attributes || is_scalar(value) || THPVariable_Check(value) || are_hooks(name, value)) {
      add_entry(space, name, value);
    } else if (THPGenerator_Check(value)) {
      generators_.push_back(py::reinterpret_borrow<py::object>(value));
    }
  });
  if (entries_.size() != count) {
    spaces_.push_back(std::move(space));
  }
}

void ModuleState::add_module(py::handle root, bool own) {
  static PyObject* const names[] = {
      PyUnicode_InternFromString("_parameters"),
      PyUnicode_InternFromString("_buffers"),
      PyUnicode_InternFromString("_modules")};
  roots_.push_back(py::reinterpret_borrow<py::object>(root));
  std::vector<py::object> pending{roots_.back()};
  for (std::size_t i = 0; i < pending.size(); ++i) {
    const py::object module = pending[i];
    if (!seen_.insert(module.ptr()).second) {
      continue;
    }
    auto attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module.ptr(), nullptr));
    if (!attributes) {
      throw py::error_already_set();
    }
    const auto dict = [&](PyObject* name) {
      auto found = py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(attributes.ptr(), name));
      if (!found) { // a ScriptModule's
        found = py::reinterpret_steal<py::object>(PyObject_GetAttr(module.ptr(), name));
      }
      const Py_ssize_t size = found ? PyObject_Size(found.ptr()) : -1;
      if (size < 0) {
        throw py::error_already_set();
      }
      return size == 0 ? py::object() : std::move(found);
    };
    if (auto parameters = dict(names[0])) {
      add_space({std::move(parameters), module, Kind::parameters, own});
    }
    if (auto buffers = dict(names[1])) {
      add_space(
          {std::move(buffers),
           module,
           Kind::buffers,
           own,
           !values_ && trains_without_reading(module.ptr(), attributes.ptr())});
    }
    if (auto modules = dict(names[2])) {
      for_each(modules.ptr(), [&](PyObject*, PyObject* child) {
        if (child != Py_None) {
          pending.push_back(py::reinterpret_borrow<py::object>(child));
        }
      });
      add_space({std::move(modules), module, Kind::modules, own});
    }
    Space own_space{std::move(attributes), module, Kind::attributes, own};
    own_space.type = py::type::of(module);
    own_space.size = PyDict_GET_SIZE(own_space.object.ptr());
    add_space(std::move(own_space));
  }
}

void ModuleState::add_cell(py::handle cell) {
  PyObject* const value = PyCell_GET(cell.ptr());
  if (value != nullptr && seen_.insert(cell.ptr()).second) { // else it is not filled yet
    Space space{py::reinterpret_borrow<py::object>(cell), py::none(), Kind::cell};
    add_entry(space, py::handle(), value);
    spaces_.push_back(std::move(space));
  }
}

void ModuleState::add_tensor(const at::Tensor& captured) {
  if (seen_.insert(captured.unsafeGetTensorImpl()).second) {
    Entry entry{spaces_.size()};
    entry.tensor = captured;
    entry.version = version_of(captured);
    entry.requires_grad = captured.requires_grad();
    entries_.push_back(std::move(entry));
    spaces_.push_back({py::object(), py::none(), Kind::tensor});
  }
}

// What forward has added to attributes is not there when it runs again.
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
      if ((is_scalar(value) || THPVariable_Check(value)) && !known.contains(py::handle(name))) {
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
  for (auto& space : spaces_) {
    if (space.type) { // a lazy module changes its own
      space.type = py::type::of(space.module);
    }
  }
  add_absent();
  for (auto& entry : entries_) {
    auto& space = spaces_[entry.space];
    if (entry.hooks) { // a lazy module removes its own
      const auto now = item(space.object.ptr(), entry.name.ptr());
      if (now && !same_keys(now.ptr(), entry.value.ptr())) {
        entry.value = copied_hooks(now.ptr());
      }
    }
    if (!entry.tensor.defined()) {
      continue;
    }
    const uint32_t version = version_of(entry.tensor);
    entry.updated = version != entry.version;
    space.updated = space.updated || entry.updated;
    entry.version = version;
    // A native op, such as batch_norm, updates a buffer and moves no version.
    if (entry.before.defined() &&
        ((!entry.updated && space.kind != Kind::buffers) || entry.before.sizes() != entry.tensor.sizes())) {
      entry.before = at::Tensor();
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
    if (entry.tensor.defined() && space.own && space.kind == Kind::parameters && entry.tensor.is_leaf()) {
      found.append(entry.value);
    }
  }
  return found;
}

py::list ModuleState::changed() const {
  py::list found;
  for (const auto& space : spaces_) {
    if (space.type && !space.type.is(py::type::of(space.module))) {
      found.append(py::make_tuple(py::none(), space.type, space.module));
    }
  }
  for (const auto& entry : entries_) {
    const auto& space = spaces_[entry.space];
    if (!entry.tensor.defined() || space.norm || entry.tensor.is_inference()) {
      continue;
    }
    const uint32_t now = version_of(entry.tensor);
    // A parameter that forward itself changes (a clamp, merged adapters) is as a run of it leaves it.
    const bool lost =
        entry.updated && !entry.before.defined() && space.kind != Kind::parameters && !entry.requires_grad;
    if (!lost && (entry.updated || now == entry.version)) {
      continue;
    }
    const auto there = space.object ? item(space.object.ptr(), entry.name.ptr()) : py::object();
    if (there && there.ptr() != entry.value.ptr() && !exchangeable(there.ptr(), entry.value.ptr())) {
      continue;
    }
    const py::object name = entry.name ? entry.name : py::none();
    const py::object tensor = py::reinterpret_steal<py::object>(THPVariable_Wrap(entry.tensor));
    found.append(py::make_tuple(tensor, entry.value ? entry.value : tensor, space.module, name, now, entry.version));
  }
  return found;
}

// What the recompute shall find. Null: whatever is there.
py::object ModuleState::wanted(const Entry& entry, std::unordered_map<const void*, py::object>& copies) const {
  const auto& space = spaces_[entry.space];
  const bool statistics =
      space.norm && (space.own || space.updated) && entry.tensor.defined() && is_plain(entry.tensor);
  // What others have changed since is left, and is an error if it is read.
  const bool copied = entry.before.defined() && (entry.updated || version_of(entry.tensor) == entry.version);
  if (!copied && !statistics) {
    return entry.value;
  }
  auto& copy = copies[entry.tensor.unsafeGetTensorImpl()];
  if (!copy) {
    const auto& source = entry.before.defined() ? entry.before : entry.tensor; // statistics are not to be updated twice
    copy = py::reinterpret_steal<py::object>(THPVariable_Wrap(copy_of(source)));
  }
  return copy;
}

ModuleState::Undo ModuleState::enter() const {
  Undo undo;
  undo.values.reserve(entries_.size());
  std::unordered_map<const void*, py::object> copies;
  for (const auto& entry : entries_) {
    const auto& space = spaces_[entry.space];
    undo.values.emplace_back(space.object ? item(space.object.ptr(), entry.name.ptr()) : py::object(), false);
    PyObject* const now = undo.values.back().first.ptr();
    const auto& x = entry.tensor;
    if (x.defined() && x.is_leaf() && x.requires_grad() != entry.requires_grad) {
      undo.requires_grad.emplace_back(x, x.requires_grad());
      x.requires_grad_(entry.requires_grad);
    }
    if (!space.object || (entry.hooks && now != nullptr && same_keys(now, entry.value.ptr()))) {
      continue;
    }
    const bool same = x.defined() && now != nullptr && THPVariable_Check(now) &&
        THPVariable_Unpack(now).unsafeGetTensorImpl() == x.unsafeGetTensorImpl();
    if (entry.absent && now != nullptr) {
      put(space.object.ptr(), entry.name.ptr(), nullptr);
      undo.values.back().second = true;
      continue;
    }
    const auto value = wanted(entry, copies);
    const bool copied = value && value.ptr() != entry.value.ptr();
    if (value && value.ptr() != now && (copied || !same) && (same || exchangeable(now, value.ptr()))) {
      put(space.object.ptr(), entry.name.ptr(), value.ptr());
      undo.values.back().second = true;
    }
  }
  return undo;
}

void ModuleState::exit(const Undo& undo) const {
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const auto& space = spaces_[entries_[i].space];
    if (!space.object) {
      continue;
    }
    const auto now = item(space.object.ptr(), entries_[i].name.ptr());
    PyObject* const before = undo.values[i].first.ptr();
    if (now.ptr() != before && (undo.values[i].second || exchangeable(now.ptr(), before))) {
      put(space.object.ptr(), entries_[i].name.ptr(), before);
    }
  }
  for (const auto& [tensor, requires_grad] : undo.requires_grad) {
    tensor.requires_grad_(requires_grad);
  }
}

} // namespace ckptkern
