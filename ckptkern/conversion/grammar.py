"""Reads a traced graph backwards as one fused op.

    branch   = [drop path] [scale] [norm] [dropout] core         core = attention | MLP | gated MLP
    sublayer = [norm] branch of [norm] x [+ x]
    layer    = MLP sublayer of [cross-attention sublayer of] attention sublayer | x + attention branch + MLP branch

Reading skips views, casts and the rotation of q and k: it guesses what the module computes, and check.py verifies it.
Where the graph is ambiguous, for example which half of a fused weight is the gate, a reading lists all choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .attention import read_attention
from .computed import Computed
from .reading import (
    Probability,
    Reading,
    Steps,
    Weight,
    find_scale,
    layers_as,
    prefixed,
)
from .trace import Node, Unreadable

# by path: an MoE block as it was checked, or why it is not a moe_block
Blocks = Mapping[str, Reading | Unreadable]


class Grammar(Steps):
    def __init__(self, module: nn.Module, blocks: Blocks):
        super().__init__(module)
        self.blocks = blocks

    # -- cores

    def mlp(self, node: Node) -> Reading:
        """Reads an MLP, gated or not, or an MoE block, which is a leaf of the graph and was read alone."""
        if node.kind == "module" and (block := self.blocks.get(node.source)) is not None:
            if isinstance(block, Unreadable):
                raise Unreadable(f"its MoE block: {block}")
            if len(node.inputs) != 1 or node.output:
                raise self.refuse("an MoE block must take and return one tensor:", node)
            self.layers_read += 1
            logits_of = block.logits_of and f"{node.source}.{block.logits_of}"
            return Reading(prefixed(block.arguments, node.source), self.input_of(node), logits_of=logits_of)
        down, hidden = self.linear(node, "the branch's end"), []
        h = self.strip(down.input, hidden)
        arguments = {"dropout_p": self.probability(hidden)}
        if (match := self.activation(h)) is not None:
            activation, z = match
            up = self.linear(z, "the activation's input")
            return Reading(arguments | {"activation": activation} | layers_as(up=up, down=down), up.input)
        if not h.is_function("mul", of=2):
            raise self.refuse("the hidden layer ends in", h)
        a, b = map(self.strip, h.inputs)
        for gate, up_node in ((a, b), (b, a)):
            match, up = self.activation(gate), self.linear_of(up_node)
            if match is None or up is None:
                continue
            activation, gate_node = match
            gate_layer = self.linear(gate_node, "the activation's input")
            pairs = [(gate_layer, up)]
            if gate_node is up_node:  # both are parts of one weight, in either order
                pairs = [(up.rows(i, 2), up.rows(1 - i, 2)) for i in (0, 1)]
            elif gate_layer.input is not up.input:
                continue
            orders = [layers_as(gate=gate, up=up, down=down) for gate, up in pairs]
            choices = [orders] if len(orders) > 1 else []
            return Reading(arguments | {"activation": activation} | orders[0], up.input, choices)
        raise Unreadable("not a gated product: " + " * ".join(map(self.describe, (a, b))))

    # -- sublayers

    def branch(self, node: Node, core) -> Reading:
        """Reads [drop path] [scale] [norm] [dropout] core."""
        around, after = {}, []
        node = self.strip(node)
        if (p := self.drop_path(node)) is not None:
            around["drop_path_p"] = p
            node = self.input_of(node)
        while (match := self.scale(node)) is not None:
            scale, node = match
            if scale != 1.0 and around.setdefault("layer_scale", scale) is not scale:
                raise Unreadable("a branch is scaled twice")
        if self.norm(node) is not None:
            around |= self.norm_arguments(node, "post_norm")
            node = node.inputs[0]
        part = core(self, self.strip(node, after))
        part.arguments |= around | {"resid_dropout_p": self.probability(after)}
        return part

    def scale(self, node: Node) -> tuple[Any, Node] | None:
        """Returns (layer_scale, the node that it scales); None for other nodes."""
        number, behind = self.scaled(node)
        if behind is not node:
            return number, behind
        if not node.is_function("mul"):
            weight = self.once("scale", node, find_scale)
            return weight and (weight, self.input_of(node))
        for parameter, other in node.pairs:
            if parameter.kind == "parameter" != other.kind and len(parameter.shape) == 1:
                return Weight(parameter.source), self.strip(other)
        if (pair := self.of_samples(node)) is not None:
            return Computed(pair[0], True), self.strip(pair[1])
        return None

    @staticmethod
    def of_samples(node: Node) -> tuple[Node, Node] | None:
        """Returns (a vector for each sample, the other operand) of a sum or product [B, ..., d] of two tensors; None for
        other nodes."""
        shape = (*(1,) * (len(node.shape) - 2), node.shape[-1])
        for vectors, other in node.pairs if len(node.shape) > 2 else ():
            if vectors.shape[1:] == shape and vectors.shape[0] in (1, node.shape[0]) and other.shape == node.shape:
                return vectors, other
        return None

    def normed(self, node: Node) -> tuple[dict, Node] | None:
        """Returns (the arguments of a norm [* (1 + scale)] [+ shift], the node that it reads); None for other nodes."""
        arguments = {}
        if self.is_sum(node) and (pair := self.of_samples(node)) is not None:
            arguments["norm_shift"], node = Computed(pair[0], True), self.strip(pair[1])
        if node.is_function("mul") and (pair := self.of_samples(node)) is not None:
            one_more, normed = map(self.strip, pair)
            if self.norm(normed) is None:
                return None
            if not one_more.is_function("add", of=1):
                raise Unreadable("a norm is multiplied by something else than 1 + a scale")
            arguments["norm_scale"], node = Computed(one_more.inputs[0], True), normed
        return None if self.norm(node) is None else (self.norm_arguments(node) | arguments, self.input_of(node))

    def is_sum(self, node: Node) -> bool:
        """Returns whether the node is a sum of two tensors, and not a linear layer with its update."""
        return node.is_function("add", of=2) and self.linear_of(node) is None

    def sublayer(self, node: Node, core) -> Reading:
        node, trailing = self.strip(node), None
        if self.norm(node) is not None:
            trailing, node = node, self.input_of(node)
        if not self.is_sum(node):
            if trailing is not None:
                raise Unreadable("a branch that ends in a norm has no residual")
            return self.with_norm(self.branch(node, core), None)
        reasons = []
        for residual, branch in node.pairs:
            try:
                part = self.branch(branch, core)
            except Unreadable as reason:
                reasons.append(str(reason))
                continue
            x = self.strip(residual)
            if trailing is None:
                part = self.with_norm(part, x)
            elif part.x is x:
                part.arguments |= {"residual": True, "norm_first": False, **self.norm_arguments(trailing)}
            if part.x is x:
                return part
            reasons.append("the residual is not what the branch reads")
        raise Unreadable(max(reasons, key=len))

    def with_norm(self, part: Reading, x: Node | None) -> Reading:
        """Adds the norm that the part reads from, and returns the part. x: the residual, if there is one."""
        part.arguments["residual"] = x is not None
        if part.x is not x and (normed := self.normed(part.x)) is not None:
            arguments, part.x = normed
            part.arguments |= arguments
        return part

    # -- modules

    def terms(self, node: Node, dropouts: list[Probability]) -> list[Node]:
        """Returns the terms of a sum. dropouts: collects the dropouts of sums."""
        own: list[Probability] = []
        total = self.strip(node, own)
        if not self.is_sum(total):
            return [self.strip(node)]
        dropouts += own
        return [term for summand in total.inputs for term in self.terms(summand, dropouts)]

    def parallel(self, node: Node) -> Reading:
        """Reads x + attention branch + MLP branch."""
        dropouts: list[Probability] = []
        terms = self.terms(node, dropouts)
        arguments = [term for term in terms if term.kind == "argument"]
        branches = [term for term in terms if term.kind != "argument"]
        if len(arguments) != 1 or len(branches) != 2:
            raise Unreadable("it is not x + attention + MLP")
        if any(p.value for p in dropouts):
            raise Unreadable("one dropout covers several branches")
        reasons = []
        for first, second in (branches, branches[::-1]):
            try:
                attention, mlp = self.branch(first, read_attention), self.branch(second, Grammar.mlp)
            except Unreadable as reason:
                reasons.append(str(reason))
                continue
            for part in (attention, mlp):
                if self.with_norm(part, None).x is not arguments[0]:
                    raise self.refuse("a branch of a sum reads", part.x)
                del part.arguments["residual"]
            return layer_of(attention, mlp, arguments[0], parallel=True)
        raise Unreadable(max(reasons, key=len))

    def layer(self, node: Node) -> Reading:
        mlp = self.sublayer(node, Grammar.mlp)
        if mlp.x.kind == "argument":
            mlp.op = "moe_block" if "router_weight" in mlp.arguments else "mlp_block"
            return mlp
        attention, cross = self.sublayer(mlp.x, read_attention), None
        if attention.x.kind != "argument" and "key_value" in attention.arguments:
            attention, cross = self.sublayer(attention.x, read_attention), attention
        if attention.x.kind != "argument":
            raise self.refuse("the attention sublayer reads", attention.x)
        return layer_of(attention, mlp, attention.x, cross)

    def attention_alone(self, node: Node) -> Reading:
        part = self.sublayer(node, read_attention)
        if part.x.kind != "argument":
            raise self.refuse("attention reads", part.x)
        part.op = "latent_attention_block" if "kv_a_weight" in part.arguments else "attention_block"
        return part

    def chain(self, node: Node) -> Reading:
        """Reads act(linear(... act(linear(x)))), with one activation throughout."""
        weights, biases, activations = [], [], set()
        node = self.strip(node)
        while node.kind != "argument":
            match = self.activation(node)
            if match is None and not isinstance(self.module, nn.Linear):
                raise self.refuse("an activation expected, found", node)
            activation, node = match or ("identity", node)
            linear = self.linear(node, "the activation's input")
            weights.insert(0, linear.weight)
            biases.insert(0, linear.bias)
            activations.add(activation)
            node = linear.input
        if len(activations) != 1:
            raise Unreadable("it is not a chain of linear layers with one activation")
        if len(weights) == 1:
            return Reading({"weight": weights[0], "bias": biases[0], "activation": activation}, node, op="linear_act")
        return Reading({"weights": weights, "biases": biases, "activation": activation}, node, op="linear_stack")


def layer_of(
    attention: Reading, mlp: Reading, x: Node, cross: Reading | None = None, parallel: bool = False
) -> Reading:
    arguments = {"parallel": True} if parallel else {}
    parts = {"attention_arguments": attention, "cross_attention_arguments": cross, "mlp_arguments": mlp}
    choices = []
    for name, part in parts.items():
        if part is not None:
            arguments[name] = part.arguments
            for choice in part.choices:
                choices.append([{f"{name}.{key}": value for key, value in answer.items()} for answer in choice])
    return Reading(arguments, x, choices, mlp.logits_of, "transformer_layer")


def read(module: nn.Module, output: Node, blocks: Blocks | None = None) -> Reading:
    """Returns the fused op that may have computed `output`. Raises Unreadable with the reason of the longest match."""
    grammar, refusals = Grammar(module, blocks or {}), []
    for way in (grammar.layer, grammar.parallel, grammar.attention_alone, grammar.chain):
        grammar.layers_read, grammar.masked = 0, {}
        try:
            reading = way(output)
            reading.x = reading.x.source
            return reading
        except Unreadable as reason:
            refusals.append((grammar.layers_read, str(reason)))
    raise Unreadable(max(refusals, key=lambda refusal: refusal[0])[1])
