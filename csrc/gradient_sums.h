// Float32 sums of the gradients that several parts of a graph send to one 16-bit tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <map>
#include <utility>

namespace ckptkern {

// Autograd adds up a tensor's gradients in the tensor's dtype: n chunks round n times. `redirect` puts a node between each
// chunk's graph and the float16 and bfloat16 tensors outside of it. The node's input is float32, to which the engine casts
// gradients before it adds them. So the sum is rounded once, and the tensor's hooks see it once.
class GradientSums {
 public:
  // The first chunk's nodes are those created from here on; the next chunk's, those created since the last `redirect`.
  GradientSums();

  // output: a chunk's.
  void redirect(const at::Tensor& output);

 private:
  using NodePtr = decltype(torch::autograd::Edge::function); // an intrusive_ptr since torch 2.13, a shared_ptr before

  torch::autograd::Edge sum_of(const torch::autograd::Edge& edge);

  uint64_t since_;
  std::map<std::pair<const torch::autograd::Node*, uint32_t>, NodePtr> sums_; // by edge to the outside
};

} // namespace ckptkern
