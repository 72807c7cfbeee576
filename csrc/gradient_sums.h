// Sums in float32 of what several parts of a graph send to one 16-bit tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <map>
#include <utility>

namespace ckptkern {

// Autograd adds up the gradients that arrive at one tensor in that tensor's dtype: n chunks round n times. `redirect` puts a
// node between each chunk's graph and the tensors outside of it that are float16 or bfloat16. The node's input is float32, to
// which the engine casts what arrives before it adds, so the sum is rounded once, and the tensor's hooks see it once.
class GradientSums {
 public:
  // What a chunk computes is inside: nodes made since this, or since the `redirect` of the chunk before it.
  GradientSums();

  // output: of a chunk.
  void redirect(const at::Tensor& output);

 private:
  using NodePtr = decltype(torch::autograd::Edge::function); // an intrusive_ptr since torch 2.13, a shared_ptr before

  torch::autograd::Edge sum_of(const torch::autograd::Edge& edge);

  uint64_t since_;
  std::map<std::pair<const torch::autograd::Node*, uint32_t>, NodePtr> sums_; // by the place outside
};

} // namespace ckptkern
