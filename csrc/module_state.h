// The state of a region's modules and closure in forward, restored for a recompute: parameters, buffers and submodules, numbers
// and flags such as `training`, `requires_grad`, hooks, and the values of small buffers that forward updates.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <array>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace ckptkern {

bool is_scalar(PyObject* value); // None, bool, int, float or str
bool is_module(PyObject* value);

class ModuleState {
 public:
  // values: also copy running statistics where the call may not run their norm.
  explicit ModuleState(bool values) : values_(values) {}

  // Called before forward runs. A module is added with its submodules. own: the call surely runs it.
  void add_module(pybind11::handle module, bool own);
  void add_cell(pybind11::handle cell);
  void add_tensor(const at::Tensor& captured);

  // Called after forward: its own updates are not errors later.
  void settle();

  // torch.Generators among the attributes.
  const std::vector<pybind11::object>& generators() const {
    return generators_;
  }

  // The modules that were added, without their submodules.
  pybind11::list roots() const;

  // The parameters of own modules.
  pybind11::list parameters() const;

  // [(module, its class in forward)] of modules that have another class now: they cannot run.
  pybind11::list reclassed() const;

  // After enter(): [(objects, module or None, name, version now, version after forward)] of objects that were changed in place
  // since, or that forward updated without an earlier copy. A recompute must not read them.
  pybind11::list changed() const;

  // Restores forward's state where it differs, and notes the replaced state in `undo`. exit() restores that, also where the
  // recompute assigned. Parameters that are sharded or of another shape stay: FSDP has put the right ones there.
  struct Undo {
    std::vector<std::pair<pybind11::object, bool>> values; // of each entry, and whether enter() replaced it; null: none
    std::vector<std::pair<at::Tensor, bool>> requires_grad;
    std::vector<std::pair<std::pair<std::size_t, std::size_t>, pybind11::object>> dicts; // (space, place): the dict
    std::vector<pybind11::object> contents; // of each container
  };
  void enter(Undo& undo) const;
  void exit(const Undo& undo) const;

  static constexpr std::size_t kDicts = 6; // a module's dicts that are replaced as a whole: hooks and submodules

 private:
  enum class Kind : uint8_t { attributes, parameters, buffers, cell, tensor };
  struct Space {
    pybind11::object object; // a dict, another mapping, a cell, or null
    pybind11::object module; // its owner
    Kind kind;
    bool own = false; // the call surely runs the module
    bool norm = false; // a training norm: native ops update its buffers without a new version
    bool updated = false; // one of its buffers was updated
    Py_ssize_t size = 0; // of attributes
    pybind11::object type = {}; // of attributes: the module's class
    std::array<pybind11::object, kDicts> dicts = {}; // of attributes: copies; null where they are empty
  };
  struct Entry {
    std::size_t space; // index into spaces_
    pybind11::object name = {}; // null in a cell
    pybind11::object value = {}; // null: not held
    at::Tensor tensor = {}; // the value's; detached if it has a graph, which must not live as long as this region's
    std::optional<c10::weak_intrusive_ptr<c10::TensorImpl>> original = {}; // the tensor that has a graph
    at::Tensor before = {}; // a small tensor's copy from before forward
    uint32_t version = 0;
    bool requires_grad = false;
    bool updated = false; // forward itself updated it
    bool absent = false; // an attribute that forward adds
  };
  using Copies = std::unordered_map<const void*, at::Tensor>; // by original: a storage or a tensor
  using Objects = std::unordered_map<const void*, pybind11::object>; // by TensorImpl

  void add_space(Space space);
  void add_entry(const Space& space, pybind11::handle name, PyObject* value);
  void add_absent();
  void add_container(PyObject* value);
  bool is(const Entry& entry, PyObject* now) const;
  bool is_lost(const Entry& entry) const;
  pybind11::object wanted(const Entry& entry, Copies& copies, Objects& objects) const;

  bool values_;
  bool settled_ = false; // only once: other calls of the region may follow
  std::vector<pybind11::object> generators_;
  std::vector<pybind11::object> roots_;
  std::vector<Space> spaces_;
  std::vector<Entry> entries_;
  std::vector<std::pair<pybind11::object, pybind11::object>>
      containers_; // lists and dicts of scalars, and their copies
  std::unordered_set<const void*> seen_; // modules and captured tensors
  Copies copies_;
};

} // namespace ckptkern
