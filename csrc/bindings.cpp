// ckptkern._C: the Python module, and the ops that torch sees.
#include "philox.h"
#include "precision.h"
#include "saved_tensors.h"
#include "segment_state.h"

#include <ATen/ops/randint.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <limits>

namespace {

// int64[2] on nonce's device, from torch's own generator there: torch.manual_seed reproduces it and
// CUDA-graph capture draws anew in each replay. The bounds are those of torch.randint(-2**63, 2**63 - 1).
at::Tensor rng_state(const at::Tensor& nonce) {
  return at::randint(
      std::numeric_limits<int64_t>::min(),
      std::numeric_limits<int64_t>::max(),
      {2},
      nonce.options().dtype(at::kLong).requires_grad(false));
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
  using ckptkern::Precision;

  m.attr("torch_version") = CKPTKERN_TORCH_VERSION;
  m.def("philox4x32_10", &ckptkern::philox4x32_10, py::arg("key"), py::arg("counter"));
  py::class_<Precision>(m, "Precision")
      .def(py::init<>())
      .def(
          "__enter__",
          [](py::object self) {
            self.cast<const Precision&>().enter();
            return self;
          })
      .def("__exit__", [](const Precision& self, py::handle, py::handle, py::handle) { self.exit(); })
      .def("autocast_dtype", &Precision::autocast_dtype, py::arg("device_type"))
      .def("fp32_precision", &Precision::fp32_precision, py::arg("backend"), py::arg("op"))
      .def_property_readonly("deterministic", &Precision::deterministic);
  if (!ckptkern::add_saved_tensors(m.ptr())) {
    throw py::error_already_set();
  }
  using ckptkern::SegmentState;
  py::class_<SegmentState>(m, "SegmentState")
      .def(
          py::init<const py::tuple&, const py::dict&, bool>(),
          py::arg("args"),
          py::arg("kwargs"),
          py::arg("preserve_rng_state"))
      .def("settle", &SegmentState::settle)
      .def("arguments", &SegmentState::arguments)
      .def("enter", &SegmentState::enter)
      .def("exit", &SegmentState::exit);
}
