"""Runs blocks on a tensor-parallel group: each rank's op computes a part of the heads or of the hidden units.

A sublayer's branch f ends in a linear layer, so the sum of the ranks' results is the whole:

    y = around(x, R f(G x)),   dx = R f'(G dy) + ...        around: bias, dropout, norm after the branch, residual

                       G           R               x
    replicated         identity    all-reduce      equal on all ranks
    sequence parallel  all-gather  reduce-scatter  each rank's rows of every sequence

A norm before the branch is part of f, so only x is saved. f' is linear in dy, so each rank's norm gradients are partial
sums. Backward recomputes G, so a rank saves only its own rows of x (Korthikanti et al. 2022, arXiv 2205.05198). Dropout
masks are those of the unsharded block, by index.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .attention.arguments import gather as gather_attention
from .attention.block import across as attention_across
from .dispatch.choices import autocast_off, choose_backend
from .mlp.mlp import across as mlp_across
from .mlp.mlp import gather as gather_mlp
from .registration.gradients import Finish
from .registration.op import cast_parameter
from .sublayer.dropout import replayed_dropout
from .sublayer.residual import drawn, reference_output

_c10d = torch.ops._c10d_functional
NOTHING_AROUND = dict(post_norm_weight=None, post_norm_bias=None, layer_scale=None, resid_rng=None, path_rng=None)
PLAIN_AROUND = dict(residual=False, resid_p=0.0, path_p=0.0, post_norm="", branch_factor=1.0)


@dataclass(frozen=True)
class Shard:
    """This rank's place in a tensor-parallel group. group: its name for torch's functional collectives; sequence: whether x
    is split over its rows too."""

    group: str  # its name for torch's functional collectives
    rank: int
    size: int
    sequence: bool = False
    checked: list[bool] = field(
        default_factory=list, compare=False, repr=False
    )  # not empty once the ranks' random states were compared

    # -- collectives

    def gathering(self, x: Tensor) -> Finish:
        """Starts the collective of G x, for x [..., S, d]; returns a function that waits for it and returns G x."""
        if not self.sequence:
            return lambda: x
        rows = x.contiguous()  # stays until the collective has read it
        parts = _c10d.all_gather_into_tensor(rows, self.size, self.group)
        return lambda: _c10d.wait_tensor(parts).view(self.size, *rows.shape).movedim(0, -3).flatten(-3, -2)

    def reducing(self, y: Tensor) -> Finish:
        """Starts the collective of R y, for y [..., S, d] with all rows; returns a function that waits for it and returns R
        y."""
        if not self.sequence:
            return self.summing(y)
        rows = y.unflatten(-2, (self.size, -1)).movedim(-3, 0).flatten(0, 1).contiguous()
        part = _c10d.reduce_scatter_tensor(rows, "sum", self.size, self.group)
        return lambda rows=rows: _c10d.wait_tensor(part)  # rows stays until the collective has read it

    def summing(self, y: Tensor) -> Finish:
        """Starts the sum of y over the group; returns a function that waits for it and returns it."""
        total = _c10d.all_reduce(y.contiguous(), "sum", self.group)
        return lambda: _c10d.wait_tensor(total)

    def summed(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns tensors that are equal on all ranks, with gradients summed over the ranks."""
        if not torch.is_grad_enabled():
            return tensors
        results = iter(Summed.apply(self, *wanted) if (wanted := [t for t in tensors if t.requires_grad]) else ())
        return tuple(next(results) if t.requires_grad else t for t in tensors)

    # -- where this rank's part lies

    def whole_rows(self, x: Tensor) -> int:
        return x.shape[-2] * (self.size if self.sequence else 1)

    def whole(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape, dtype and device of G x, for checks."""
        return x.new_empty(()).expand(*x.shape[:-2], self.whole_rows(x), x.shape[-1]) if self.sequence else x

    def part(self, tensor: Tensor, dim: int, count: int) -> Tensor:
        """Returns this rank's `count` along dim, or the tensor itself if it has no more."""
        return tensor if tensor.shape[dim] == count else tensor.narrow(dim, self.rank * count, count)

    # -- sublayers

    def attention_block(self, x: Tensor, training: bool, alone: bool = True, **arguments) -> Tensor:
        """Computes attention_block with this rank's heads of packed weights, masks, slopes, sinks and gates. alone: whether no
        other sublayer reads x."""
        H = arguments["num_heads"]
        H_kv = H if arguments["num_kv_heads"] is None else arguments["num_kv_heads"]
        heads, kv_heads = H // self.size, H_kv // self.size
        D = arguments["out_weight"].shape[1] // heads
        counts = heads * D * (2 if arguments["gate_in_query"] else 1), kv_heads * D, kv_heads * D
        for name in ("qkv_weight", "qkv_bias"):
            value = arguments[name]
            if isinstance(value, Tensor) and arguments["qkv_layout"] == "qkv":
                value = value.split([self.size * count for count in counts])
            if isinstance(value, (tuple, list)):
                parts = zip(value, counts, strict=True)
                arguments[name] = [None if tensor is None else self.part(tensor, 0, count) for tensor, count in parts]
        mask = arguments["attn_mask"]
        if isinstance(mask, (tuple, list)):
            mask = tuple(self.mask(part, H, heads) for part in mask)
        else:
            mask = self.mask(mask, H, heads)
        arguments |= dict(num_heads=heads, num_kv_heads=kv_heads, attn_mask=mask)
        for name in ("alibi_slopes", "sinks", "gate_weight", "gate_bias"):
            if (value := arguments[name]) is not None:
                of_columns = name.startswith("gate") and value.shape[0] % (heads * D) == 0  # columns of o, else heads
                dim = -1 if name == "alibi_slopes" else 0
                arguments[name] = self.part(value, dim, heads * D if of_columns else heads)
        if arguments["key_value"] is not None:
            if self.sequence:
                raise ValueError("TensorParallel: sequence_parallel does not go with cross-attention (key_value)")
            (arguments["key_value"],) = self.summed(arguments["key_value"])
        arguments = self.with_vectors(arguments)
        t, o = gather_attention("attention_block", self.whole(x), training=training, **arguments)
        t = self.drawn(t, o, x, training)
        heads = dict(first_plane=self.rank * o.num_heads, planes=self.size * o.num_heads)
        return self.sublayer(attention_across, x, t, o, "bo", alone, **heads)

    def mlp_block(self, x: Tensor, training: bool, **arguments) -> Tensor:
        """Computes mlp_block with this rank's hidden units, of gate and up weights that hold all."""
        hidden = arguments["down_weight"].shape[1]
        for name in ("gate_weight", "gate_bias", "up_weight", "up_bias"):
            if arguments[name] is not None:
                arguments[name] = self.part(arguments[name], 0, hidden)
        t, o = gather_mlp("mlp_block", self.whole(x), training=training, **self.with_vectors(arguments))
        t = self.drawn(t, o, x, training)
        if t.rng is not None and hidden % 32:
            reason = f"the kernels' dropout masks need a multiple of 32 hidden units on each rank, not {hidden}"
            o = o._replace(backend=choose_backend("mlp_block", x.new_empty(0, dtype=o.dtype), reason))
        return self.sublayer(mlp_across, x, t, o, "down_bias", True, first_column=self.rank * hidden)

    def drawn(self, t, o, x: Tensor, training: bool):
        t = drawn(t, o, x, training)
        states = [state for state in (t.rng, t.resid_rng, t.path_rng) if state is not None]
        if states and not self.checked and not torch.compiler.is_compiling():
            self.check_alike(states[0])
            self.checked.append(True)
        return t

    def check_alike(self, state: Tensor) -> None:
        """Raises RuntimeError on a CPU; on a GPU, a device-side assertion, for which the host does not wait."""
        states = _c10d.all_gather_into_tensor(state, self.size, self.group)
        states = _c10d.wait_tensor(states).view(self.size, -1)
        alike = (states == states[0]).all()
        message = (
            "TensorParallel: the ranks of a group must draw the same dropout masks, but their random states differ; seed "
            "them alike, torch.manual_seed(seed), and data-parallel replicas differently"
        )
        if not alike.is_cpu:
            torch._assert_async(alike, message)
        elif not alike:
            raise RuntimeError(message)

    def sublayer(self, across, x: Tensor, t, o, bias: str, alone: bool, **place: int) -> Tensor:
        """Returns around(x, R f(G x)). One node of the graph computes x + R f(G x) and adds x's own gradients; if another
        sublayer reads x, autograd adds them in its own order."""
        inner = dict(NOTHING_AROUND, **{bias: None})
        options = dict(PLAIN_AROUND, **place)
        if o.norm and not o.norm_first:
            inner |= dict(norm_weight=None, norm_bias=None)
            options |= dict(norm="")
        plain = o.residual and not o.post_norm and o.branch_factor == 1.0
        adds = alone and plain and all(getattr(t, name) is None for name in inner)  # whether the sublayer is x + f
        f = across(self, o._replace(**options), adds, x, *t._replace(**inner))
        if adds:
            return f
        with autocast_off(x):
            b = cast_parameter(getattr(t, bias), f.dtype)
            f = f if b is None else f + b
            # the first row of x's first sample among the unsharded rows, and the distance to the next sample's
            first = self.rank * x.shape[-2] if self.sequence else 0
            step = self.whole_rows(x) if self.sequence and x.dim() > 2 else 0
            f = replayed_dropout(f, t.resid_rng, o.resid_p, first, step)
            return reference_output(x, f, t._replace(resid_rng=None), o)

    # -- what the ops' arguments are on this rank

    def with_vectors(self, arguments: dict) -> dict:
        """Returns the arguments with vectors of samples whose gradients are summed over ranks. A norm's vectors have
        partial sums of the branch; in sequence parallel layer_scale has partial sums of rows."""
        if arguments["lora"]:
            raise ValueError("TensorParallel: low-rank updates (lora) are not sharded")
        gate = ("layer_scale",) if self.sequence else ()
        vectors = {name: arguments[name] for name in ("norm_scale", "norm_shift", *gate)}
        vectors = {name: vector for name, vector in vectors.items() if isinstance(vector, Tensor) and vector.dim() > 1}
        return arguments | dict(zip(vectors, self.summed(*vectors.values()), strict=True))

    def mask(self, mask: Tensor | None, H: int, heads: int) -> Tensor | None:
        if mask is None or (mask.dim() < 3 and not mask.requires_grad):  # CausalBias, too, which has two dimensions
            return mask
        (mask,) = self.summed(mask)
        return self.part(mask, -3, heads) if mask.dim() > 2 and mask.shape[-3] == H else mask


class Summed(torch.autograd.Function):
    """Identity with gradients summed over the group, by one all-reduce for each dtype."""

    @staticmethod
    def forward(ctx, shard, *tensors):
        ctx.shard = shard
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx, *grads):
        sums: dict[torch.dtype, list[int]] = {}
        for i, grad in enumerate(grads):
            sums.setdefault(grad.dtype, []).append(i)
        results: list[Tensor | None] = [None] * len(grads)
        for places in sums.values():
            total = ctx.shard.summing(torch.cat([grads[i].reshape(-1) for i in places]))()
            for i, part in zip(places, total.split([grads[i].numel() for i in places]), strict=True):
                results[i] = part.view(grads[i].shape)
        return None, *results
