// The state that an activation checkpoint saves of its call: arguments, random state and precision.
#pragma once

#include "module_state.h"
#include "precision.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Generator.h>
#include <ATen/core/MT19937RNGEngine.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace ckptkern {

// An argument tree without its tensors. Containers are taken apart, those that are not a tuple, list or dict by
// ckptkern/state/containers.py; other objects are saved as they are.
struct Argument {
  enum class Kind { object, tensor, tuple, named_tuple, list, dict, container };

  Kind kind = Kind::object;
  pybind11::object
      object; // the value itself; a named tuple's type; a dict's keys, as a list; a container's constructor
  std::size_t tensor = 0; // place among the saved tensors
  std::vector<Argument> children;
};

// The CPU generator's state, in half the bytes of get_state().
struct CpuRandomState {
  at::mt19937 engine;
  std::optional<float> next_float_normal;
  std::optional<double> next_double_normal;
};

// The states of the CPU's generator and of some devices', or none. Copies of a generator share its state.
struct RandomState {
  std::optional<CpuRandomState> cpu;
  std::vector<std::pair<at::Generator, at::Tensor>> devices;

  static RandomState read(const std::vector<at::Generator>& device_generators);
  RandomState read_again() const;
  void restore() const;
};

// The results of `rng_state` in a region that does not preserve the generators' states, as in a CUDA graph capture, which
// cannot read them. A recompute returns them again.
using Draws = std::vector<at::Tensor>;

// Returns what the innermost region of this thread drew at this place, or else `sample`'s result.
at::Tensor drawn(const std::function<at::Tensor()>& sample);

// The state that a call reads, saved by the constructor in forward: arguments, the state of the modules that it can reach,
// modes of torch functions, precision and random state. Argument tensors are autograd's saved variables: active saved-tensor
// hooks see them, and reading a tensor that was changed in place raises. enter() restores forward's state; exit() restores the
// state from before enter(), also after an error in between.
class SegmentState {
 public:
  // own: the module that the call runs, or None. reachable: other objects that the function can reach: its closure's cells,
  // defaults, globals. values: the recompute has every value of forward, also running statistics that it only updates.
  SegmentState(
      const pybind11::tuple& args,
      const pybind11::dict& kwargs,
      bool preserve_rng_state,
      bool values,
      pybind11::handle own,
      const pybind11::tuple& reachable);

  // Called after forward: its own writes to a nested tensor without gradient (a cache) are not errors.
  void settle();

  // Returns the call's (args, kwargs). Runs unpack hooks, and so a parent region's recompute.
  pybind11::tuple arguments() const;

  void enter() const;
  void exit() const;

  const ModuleState& modules() const {
    return modules_;
  }

  // Around forward where `draws` is true.
  bool draws() const {
    return draws_ != nullptr;
  }
  void record() const;
  void stop() const;

 private:
  struct Found {
    std::vector<at::Device> devices;
    std::vector<at::Generator> generators;
  };
  Argument take(pybind11::handle value, Found& found, int depth);
  void reach(pybind11::handle value, Found& found, int depth);
  pybind11::object give(const Argument& argument, std::vector<pybind11::object>& given) const;

  Precision precision_;
  struct Cache {
    std::size_t tensor; // place among the saved tensors
    c10::weak_intrusive_ptr<c10::TensorImpl> impl;
    uint32_t version;
  };

  std::vector<torch::autograd::SavedVariable> tensors_; // each once: mha(x, x, x) saves one x
  std::vector<const c10::TensorImpl*> places_; // their tensors, while arguments are read
  std::vector<Cache> caches_;
  Argument args_;
  Argument kwargs_;
  ModuleState modules_;
  at::impl::PythonTorchFunctionTLS function_modes_;
  RandomState random_;
  std::shared_ptr<Draws> draws_; // null if the generators' states are preserved
};

} // namespace ckptkern
