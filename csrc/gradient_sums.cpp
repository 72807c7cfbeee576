#include "gradient_sums.h"

#include <ATen/SequenceNumber.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/variable.h>

#include <limits>
#include <memory>
#include <type_traits>
#include <unordered_set>
#include <vector>

namespace ckptkern {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

// Runs as soon as all gradients have arrived, as AccumulateGrad does, before the nodes of earlier operations.
constexpr uint64_t kFirst = std::numeric_limits<uint64_t>::max();

struct Float32Sum : Node {
  explicit Float32Sum(edge_list&& next) : Node(kFirst, std::move(next)) {}
  std::string name() const override {
    return "ckptkern::Float32Sum";
  }
  variable_list apply(variable_list&& sum) override {
    return std::move(sum); // the engine casts it to the dtype of the next node's input
  }
};

template <class Pointer, class Sum>
Pointer make_sum(edge_list&& next) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return std::make_shared<Sum>(std::move(next));
  } else {
    return c10::make_intrusive<Sum>(std::move(next));
  }
}

} // namespace

GradientSums::GradientSums() : since_(at::sequence_number::peek()) {}

Edge GradientSums::sum_of(const Edge& edge) {
  auto& sum = sums_[{edge.function.get(), edge.input_nr}];
  if (!sum) {
    const auto& there = edge.function->input_metadata(edge.input_nr);
    sum = make_sum<NodePtr, Float32Sum>({edge});
    sum->add_input_metadata(
        at::empty({}, there.options().dtype(at::kFloat)).expand_symint(there.shape_as_dim_vector()));
  }
  return {sum, 0};
}

void GradientSums::redirect(const at::Tensor& output) {
  const uint64_t since = std::exchange(since_, at::sequence_number::peek());
  const auto& root = output.grad_fn();
  if (!root) {
    return;
  }
  const auto outside = [&](const Node* node) { return node->sequence_nr() < since || node->sequence_nr() == kFirst; };
  if (outside(root.get())) {
    return;
  }
  std::vector<Node*> pending{root.get()};
  std::unordered_set<Node*> seen{root.get()};
  while (!pending.empty()) {
    Node* node = pending.back();
    pending.pop_back();
    for (Edge& edge : node->next_edges()) {
      Node* next = edge.function.get();
      if (next == nullptr) {
        continue;
      }
      if (outside(next)) {
        const auto dtype = c10::typeMetaToScalarType(next->input_metadata(edge.input_nr).options().dtype());
        if (dtype == at::kHalf || dtype == at::kBFloat16) {
          edge = sum_of(edge); // not set_next_edge, which needs a node without edges to it
        }
      } else if (seen.insert(next).second) {
        pending.push_back(next);
      }
    }
  }
}

} // namespace ckptkern
