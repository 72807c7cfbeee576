// What a region's modules and closure hold in forward, so that a recompute finds it: parameters, buffers and submodules, numbers
// and flags such as `training`, `requires_grad`, and the values of small buffers that forward updates.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace ckptkern {

bool is_scalar(PyObject* value); // None, bool, int, float or str
bool is_module(PyObject* value);

class ModuleState {
 public:
  // values: norms' running statistics are copied too, although they only update them.
  explicit ModuleState(bool values) : values_(values) {}

  // In forward, before it runs. A module comes with those inside. own: the call runs it for sure.
  void add_module(pybind11::handle module, bool own);
  void add_cell(pybind11::handle cell);
  void add_tensor(const at::Tensor& captured);

  // After forward: what it updated itself is not an error later.
  void settle();

  // torch.Generators among the attributes.
  const std::vector<pybind11::object>& generators() const {
    return generators_;
  }

  // The modules that were added, without those inside.
  pybind11::list roots() const;

  // The parameters of own modules.
  pybind11::list parameters() const;

  // [(tensor, its value, module or None, name, version now, version after forward)] of what was changed in place since, and of
  // what forward updated without a copy from before. A recompute must not read them. (None, class, module) of a module that has
  // another class now: it cannot run.
  pybind11::list changed() const;

  // Puts back what differs; undone by exit(), which also undoes what the recompute assigned. Not for tensors that are sharded
  // or of another shape: whoever exchanged them (FSDP) has put the right one there.
  struct Undo {
    std::vector<std::pair<pybind11::object, bool>>
        values; // of each entry, and whether enter() exchanged it; null: none
    std::vector<std::pair<at::Tensor, bool>> requires_grad;
  };
  Undo enter() const;
  void exit(const Undo& undo) const;

 private:
  struct Entry {
    std::size_t space; // of spaces_
    pybind11::object name; // null in a cell
    pybind11::object value; // null: not held
    bool requires_grad = false;
    bool updated = false; // by forward itself
    bool hooks = false; // the value is a copy of a dict of hooks
    bool absent = false; // an attribute that forward adds
    uint32_t version = 0;
    at::Tensor tensor; // of value, or what it aliases
    at::Tensor before; // a small tensor's copy from before forward
  };
  enum class Kind : uint8_t { attributes, parameters, buffers, modules, cell, tensor };
  struct Space {
    pybind11::object object; // a dict, a cell, or null
    pybind11::object module; // whose dict it is
    Kind kind;
    bool own = false; // the call runs the module for sure
    bool norm = false; // one that trains: it updates statistics and does not read them
    bool updated = false; // is one of its buffers?
    Py_ssize_t size = 0; // of attributes
    pybind11::object type = {}; // of attributes: the module's class, which a parametrization changes
  };
  void add_space(Space space);
  void add_absent();
  void add_entry(const Space& space, pybind11::handle name, PyObject* value);
  pybind11::object wanted(const Entry& entry, std::unordered_map<const void*, pybind11::object>& copies) const;

  bool values_;
  bool settled_ = false; // once: other calls of the same region may follow
  std::vector<pybind11::object> generators_;
  std::vector<pybind11::object> roots_;
  std::vector<Space> spaces_;
  std::vector<Entry> entries_;
  std::unordered_set<const void*> seen_; // modules and captured tensors
  std::unordered_map<const void*, at::Tensor> copies_; // of small tensors, by TensorImpl
};

} // namespace ckptkern
