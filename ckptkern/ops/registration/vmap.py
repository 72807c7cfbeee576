"""How the library ops run under vmap: once per sample."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.utils._pytree import tree_map


def loop_over_batch(op):
    """A vmap rule that calls the op per sample: gradients of weights are per sample, so nothing could be shared."""

    def rule(info, in_dims, *args):
        def sample(i):
            def pick(arg, dim):
                if isinstance(arg, (list, tuple)):
                    dims = dim if isinstance(dim, (list, tuple)) else [dim] * len(arg)
                    return [pick(a, d) for a, d in zip(arg, dims, strict=True)]
                return arg if dim is None or not isinstance(arg, Tensor) else arg.select(dim, i)

            return op(*(pick(arg, dim) for arg, dim in zip(args, in_dims, strict=True)))

        def stack(column):
            if isinstance(column[0], Tensor):
                return torch.stack(column), 0
            stacked = [stack(list(inner)) for inner in zip(*column, strict=True)]
            kind = type(column[0])
            return kind(value for value, _ in stacked), kind(dim for _, dim in stacked)

        return stack([sample(i) for i in range(info.batch_size)])

    return rule


def in_legacy_vmap(op):
    """The same for the older vmap behind torch.autograd.grad's is_grads_batched, whose own fallback takes no lists."""
    rule = loop_over_batch(op)

    def call(*args):
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()

        def split(arg):
            """(physical tensor, dimension of the batch)"""
            if isinstance(arg, (list, tuple)):
                return tuple(map(list, zip(*map(split, arg), strict=True))) if arg else (arg, None)
            if isinstance(arg, Tensor) and is_legacy_batchedtensor(arg):
                return torch._remove_batch_dim(arg, level, 1, 0), 0
            return arg, None

        values, dims = zip(*map(split, args), strict=True)
        results, _ = rule(SimpleNamespace(batch_size=values[0].shape[0]), dims, *values)
        return tree_map(lambda result: torch._add_batch_dim(result, 0, level), results)

    return call
