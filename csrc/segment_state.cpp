#include "segment_state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/util/irange.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <mutex>

namespace py = pybind11;

namespace ckptkern {
namespace {

at::CPUGeneratorImpl& cpu_generator() {
  return *at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
}

CpuRandomState read_cpu() {
  auto& generator = cpu_generator();
  const std::lock_guard<std::mutex> lock(generator.mutex_);
  return {generator.engine(), generator.next_float_normal_sample(), generator.next_double_normal_sample()};
}

void write_cpu(const CpuRandomState& state) {
  auto& generator = cpu_generator();
  const std::lock_guard<std::mutex> lock(generator.mutex_);
  generator.set_engine(state.engine);
  generator.set_next_float_normal_sample(state.next_float_normal);
  generator.set_next_double_normal_sample(state.next_double_normal);
}

at::Tensor read_device(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  try {
    return generator.get_state();
  } catch (const c10::Error& error) {
    TORCH_CHECK(
        false,
        "ckptkern.checkpoint: the random state of ",
        generator.device(),
        " cannot be read here: ",
        error.what_without_backtrace(),
        ". In a CUDA graph capture use preserve_rng_state=False, and ckptkern.dropout or ckptkern's layers for dropout: "
        "they replay their masks from a tensor of their own.");
  }
}

void write_device(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

// Guards against a list that holds itself. Depth is counted here because Py_LeaveRecursiveCall in a destructor crashes a
// thread that Python unwinds when it exits: its thread state is gone.
constexpr int deepest = 1000;

void refuse_endless(int depth) {
  if (depth > deepest) {
    PyErr_SetString(PyExc_RecursionError, "the arguments of a region are nested more than 1000 deep");
    throw py::error_already_set();
  }
}

// Returns (a container's values, a function that constructs it), or null for other objects.
py::object take_apart(py::handle value) {
  static const auto* const home = new py::module_(py::module_::import("ckptkern.state.containers"));
  static const auto* const classes = new py::tuple(home->attr("CONTAINERS"));
  static const auto* const function = new py::object(home->attr("take_apart"));
  static PyObject* const fields = PyUnicode_InternFromString("__dataclass_fields__");
  PyTypeObject* const type = Py_TYPE(value.ptr());
  const auto is_of = [&](py::handle one) {
    return PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(one.ptr())) != 0;
  };
  if (is_scalar(value.ptr()) || PyType_Check(value.ptr()) ||
      (std::none_of(classes->begin(), classes->end(), is_of) &&
       PyObject_HasAttr(reinterpret_cast<PyObject*>(type), fields) == 0)) {
    return {};
  }
  auto parts = (*function)(value);
  return parts.is_none() ? py::object() : parts;
}

// State that the regions around this thread have overwritten, outermost first.
struct Outer {
  RandomState random;
  ModuleState::Undo modules;
  at::impl::PythonTorchFunctionTLS function_modes;
};

std::vector<Outer>& outer_states() {
  thread_local std::vector<Outer> instance;
  return instance;
}

// A region that this thread runs: it records random states, or repeats those from `next` on.
struct Drawing {
  std::shared_ptr<Draws> draws;
  bool repeats;
  std::size_t next = 0;
};

std::vector<Drawing>& drawings() {
  thread_local std::vector<Drawing> instance;
  return instance;
}

at::Tensor drawn_at(std::size_t depth, const std::function<at::Tensor()>& sample) {
  if (depth == 0) {
    return sample();
  }
  auto& region = drawings()[depth - 1];
  if (region.repeats && region.next < region.draws->size()) {
    return (*region.draws)[region.next++];
  }
  auto state = drawn_at(depth - 1, sample); // a region that runs again inside another one's recompute
  if (!region.repeats) {
    region.draws->push_back(state);
  }
  return state;
}

} // namespace

at::Tensor drawn(const std::function<at::Tensor()>& sample) {
  return drawn_at(drawings().size(), sample);
}

RandomState RandomState::read(const std::vector<at::Generator>& device_generators) {
  RandomState state{read_cpu(), {}};
  for (const auto& generator : device_generators) {
    state.devices.emplace_back(generator, read_device(generator));
  }
  return state;
}

RandomState RandomState::read_again() const {
  if (!cpu) {
    return {};
  }
  std::vector<at::Generator> generators;
  for (const auto& device : devices) {
    generators.push_back(device.first);
  }
  return read(generators);
}

void RandomState::restore() const {
  if (cpu) {
    write_cpu(*cpu);
  }
  for (const auto& [generator, state] : devices) {
    write_device(generator, state);
  }
}

SegmentState::SegmentState(
    const py::tuple& args,
    const py::dict& kwargs,
    bool preserve_rng_state,
    bool values,
    py::handle own,
    const py::tuple& reachable)
    : modules_(values), function_modes_(at::impl::PythonTorchFunctionTLS::get_state()) {
  Found found;
  if (!own.is_none()) {
    modules_.add_module(own, /*own=*/true);
  }
  tensors_.reserve(args.size());
  args_ = take(args, found, 0);
  kwargs_ = take(kwargs, found, 0);
  places_.clear();
  for (const auto& value : reachable) {
    reach(value, found, 0);
  }
  if (preserve_rng_state) {
    for (const auto& generator : modules_.generators()) {
      found.generators.push_back(THPGenerator_Unwrap(generator.ptr()));
    }
    for (const auto& device : found.devices) {
      found.generators.push_back(at::globalContext().defaultGenerator(device));
    }
    random_ = RandomState::read(found.generators);
  }
  if (!preserve_rng_state || !drawings().empty()) {
    draws_ = std::make_shared<Draws>();
  }
}

void SegmentState::record() const {
  drawings().push_back({draws_, /*repeats=*/false});
}

void SegmentState::stop() const {
  drawings().pop_back();
}

// depth: 0 for the tuple of arguments and the dict of keywords, 1 for an argument.
Argument SegmentState::take(py::handle value, Found& found, int depth) {
  refuse_endless(depth);
  Argument argument;
  PyObject* const pointer = value.ptr();
  if (THPVariable_Check(pointer) &&
      !THPVariable_Unpack(pointer).is_inference()) { // autograd does not save inference tensors
    const at::Tensor tensor = THPVariable_Unpack(pointer);
    argument.kind = Argument::Kind::tensor;
    const auto known = std::find(places_.begin(), places_.end(), tensor.unsafeGetTensorImpl());
    argument.tensor = static_cast<std::size_t>(known - places_.begin());
    if (known != places_.end()) {
      return argument;
    }
    places_.push_back(tensor.unsafeGetTensorImpl());
    if (depth > 1 && !tensor.requires_grad()) {
      caches_.push_back(
          Cache{
              tensors_.size(),
              c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()),
              static_cast<uint32_t>(tensor._version())});
    }
    tensors_.emplace_back(tensor, /*is_output=*/false);
    const at::Device device = tensor.device();
    auto& devices = found.devices;
    if (!device.is_cpu() && !device.is_meta() && std::find(devices.begin(), devices.end(), device) == devices.end()) {
      devices.push_back(device);
    }
    return argument;
  }
  const auto children = [&](const auto& sequence) {
    for (std::size_t i = 0; i < sequence.size(); ++i) { // saving a tensor may run hooks, which may run any code
      const auto child = py::reinterpret_borrow<py::object>(sequence[i]);
      argument.children.push_back(take(child, found, depth + 1));
    }
  };
  if (PyTuple_CheckExact(pointer)) {
    argument.kind = Argument::Kind::tuple;
    children(py::reinterpret_borrow<py::tuple>(value));
  } else if (PyTuple_Check(pointer) && py::hasattr(value, "_make")) {
    argument.kind = Argument::Kind::named_tuple;
    argument.object = py::type::of(value);
    children(py::reinterpret_borrow<py::tuple>(value));
  } else if (PyList_CheckExact(pointer)) {
    argument.kind = Argument::Kind::list;
    children(py::reinterpret_borrow<py::list>(value));
  } else if (PyDict_CheckExact(pointer)) {
    argument.kind = Argument::Kind::dict;
    const auto dict = py::reinterpret_borrow<py::dict>(value);
    const py::list keys(dict);
    for (const auto key : keys) {
      const auto child = py::reinterpret_borrow<py::object>(dict[key]);
      argument.children.push_back(take(child, found, depth + 1));
    }
    argument.object = keys;
  } else if (auto parts = take_apart(value)) {
    argument.kind = Argument::Kind::container;
    const auto pair = parts.cast<py::tuple>();
    argument.object = pair[1];
    children(pair[0].cast<py::tuple>());
  } else {
    argument.object = py::reinterpret_borrow<py::object>(value);
    reach(value, found, depth);
  }
  return argument;
}

// Adds what the function reads besides its arguments.
void SegmentState::reach(py::handle value, Found& found, int depth) {
  PyObject* const pointer = value.ptr();
  if (is_scalar(pointer)) {
    return;
  }
  if (THPVariable_Check(pointer)) {
    modules_.add_tensor(THPVariable_Unpack(pointer));
  } else if (THPGenerator_Check(pointer)) {
    found.generators.push_back(THPGenerator_Unwrap(pointer));
  } else if (PyCell_Check(pointer)) {
    modules_.add_cell(value);
    if (PyObject* const content = PyCell_GET(pointer); content != nullptr && !THPVariable_Check(content)) {
      reach(content, found, depth);
    }
  } else if (is_module(pointer)) {
    modules_.add_module(value, /*own=*/false);
  } else if (depth == 0 && (PyTuple_CheckExact(pointer) || PyList_CheckExact(pointer))) {
    for (const auto& one : py::reinterpret_borrow<py::sequence>(value)) {
      reach(one, found, 1);
    }
  }
}

void SegmentState::settle() {
  modules_.settle();
  for (const auto& cache : caches_) {
    const auto impl = cache.impl.lock();
    if (impl && impl->version_counter().current_version() != cache.version) {
      tensors_[cache.tensor] = torch::autograd::SavedVariable(at::Tensor(impl), /*is_output=*/false);
    }
  }
}

py::object SegmentState::give(const Argument& argument, std::vector<py::object>& given) const {
  const auto fill = [&](auto sequence) {
    for (const auto i : c10::irange(argument.children.size())) {
      sequence[i] = give(argument.children[i], given);
    }
    return sequence;
  };
  switch (argument.kind) {
    case Argument::Kind::tensor:
      if (!given[argument.tensor]) {
        given[argument.tensor] =
            py::reinterpret_steal<py::object>(THPVariable_Wrap(tensors_[argument.tensor].unpack()));
      }
      return given[argument.tensor];
    case Argument::Kind::tuple:
      return fill(py::tuple(argument.children.size()));
    case Argument::Kind::named_tuple:
      return argument.object.attr("_make")(fill(py::tuple(argument.children.size())));
    case Argument::Kind::container:
      return argument.object(fill(py::tuple(argument.children.size())));
    case Argument::Kind::list:
      return fill(py::list(argument.children.size()));
    case Argument::Kind::dict: {
      py::dict dict;
      const auto keys = argument.object.cast<py::list>();
      for (const auto i : c10::irange(argument.children.size())) {
        dict[keys[i]] = give(argument.children[i], given);
      }
      return dict;
    }
    case Argument::Kind::object:
      break;
  }
  return argument.object;
}

py::tuple SegmentState::arguments() const {
  std::vector<py::object> given(tensors_.size());
  return py::make_tuple(give(args_, given), give(kwargs_, given));
}

void SegmentState::enter() const {
  precision_.enter();
  try {
    outer_states().push_back({random_.read_again(), {}, at::impl::PythonTorchFunctionTLS::get_state()});
  } catch (...) {
    precision_.exit();
    throw;
  }
  if (draws_) {
    drawings().push_back({draws_, /*repeats=*/true});
  }
  try {
    random_.restore();
    modules_.enter(outer_states().back().modules);
    at::impl::PythonTorchFunctionTLS::set_state(function_modes_);
  } catch (...) {
    exit();
    throw;
  }
}

void SegmentState::exit() const {
  auto& stack = outer_states();
  TORCH_CHECK(!stack.empty(), "SegmentState: exit without enter on this thread");
  const auto outer = std::move(stack.back());
  stack.pop_back();
  if (draws_) {
    drawings().pop_back();
  }
  at::impl::PythonTorchFunctionTLS::set_state(outer.function_modes);
  modules_.exit(outer.modules);
  outer.random.restore();
  precision_.exit();
}

} // namespace ckptkern
