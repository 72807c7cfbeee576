"""The catalogue's ops with options, alone and in pairs, as the tests of properties run them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from support import catalog, oracles
from support.cases import SEED, Tensors, every_other, output_gradient
from support.catalog import HEAD_DIM, IN_TORCH_OPS, OPS, OTHER_OPS, Entry, P, Sizes, gain, normal
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ckptkern import LoRA

OF_OPS = {entry.name: entry for entry in (*OPS.values(), *OTHER_OPS)}
ALL = OF_OPS | {entry.name: entry for entry in IN_TORCH_OPS}
HEADS = ("linear_cross_entropy", "selected_log_probs", "linear_distillation", "linear_topk_distillation")
# A workspace of one byte takes these tokens in two chunks, of which the second has 6, and heads in two groups.
TAILS = Sizes((2, 67), experts=4)
CLASSES = Sizes((2, 67), out=300)  # and these classes in two chunks, of which the second has 44
TILED = Sizes((2, 3), 36, 40, 70)  # several tiles of the interpreted kernels, the last of which are not full
REFUSALS = (ValueError, TypeError, NotImplementedError, RuntimeError)


class Case(NamedTuple):
    """A call of an op: its options by name, at a recompute mode ("" for the op's default) and sizes. It is a function of the
    tensors that are trained, by name. fixed: its arguments, if they are not those of its options."""

    entry: Entry
    options: tuple[str, ...] = ()
    mode: str = ""
    sizes: Sizes = Sizes()
    fixed: dict | None = None

    def __str__(self) -> str:
        options = " and ".join(self.options) or "no option"
        return f"{self.entry.name} with {options}{self.mode and f' at {self.mode}'}"

    @property
    def op(self) -> str:
        """The name of the op, which several functions may share."""
        return self.entry.op.name

    @property
    def arguments(self) -> dict:
        """Every option has its own value. Of what else options bring along, such as the norm of a norm's weight, the first
        option's counts."""
        if self.fixed is not None:
            return self.fixed
        chosen = values_of(self.entry.name, self.sizes)
        mode = {"recompute": self.mode} if self.mode else {}
        inputs = self.entry.inputs(self.sizes) | mode
        for name in reversed(self.options):
            inputs |= chosen[name]
        return inputs | {name: chosen[name][name] for name in self.options if name in chosen[name]}

    @property
    def others(self) -> list[Tensor]:
        """The tensors among the arguments that are not trained: masks, targets, bounds."""
        return tensors_of(self.arguments)

    def with_(self, **arguments: Any) -> Case:
        """The same call with other arguments, from then on fixed."""
        return self._replace(fixed=self.arguments | arguments)

    def make(
        self, dtype: torch.dtype = torch.float32, device: str = "cpu", *, frozen: Container[str] = (), seed: int = 0
    ) -> Tensors:
        leaves = catalog.random_leaves(self.arguments, dtype, device, seed)
        return {name: t.requires_grad_(name not in frozen) for name, t in leaves.items()}

    def given(self, leaves: Tensors) -> dict:
        """Numbers that are not trained, such as a teacher's, are in float64 where everything is."""
        double = any(leaf.dtype == torch.float64 for leaf in leaves.values())
        return tree_map_only(Tensor, lambda t: t.double() if double and t.is_floating_point() else t, self.arguments)

    def results(self, leaves: Tensors, **more) -> list[Tensor]:
        """What the op returns, without what was not asked for."""
        torch.manual_seed(SEED)
        return tensors_of(catalog.call(self.entry, self.given(leaves), leaves, **more))

    def oracle(self, leaves: Tensors, **more) -> list[Tensor]:
        entry = self.entry._replace(function=getattr(oracles, self.entry.function.__name__))
        with next(iter(leaves.values())).device:  # of the states that the oracle samples
            return self._replace(entry=entry).results(leaves, **more)

    def unseeded(self, leaves: Tensors) -> Tensor:
        """`joined` results, drawing from the generator as it stands."""
        return joined(tensors_of(catalog.call(self.entry, self.arguments, leaves)))

    def __call__(self, leaves: Tensors, **more) -> Tensor:
        return joined(self.results(leaves, **more))


def call_of(name: str, *options: str, mode: int = 0, sizes: Sizes = Sizes(), **more: Any) -> Case:  # noqa: B008
    """mode: the place of the recompute mode, the default's first."""
    entry = OF_OPS[name]
    return Case(entry, options, (entry.modes or [""])[mode], sizes).with_(**more)


def dropping(name: str, **more: Any) -> Case:
    """An op that drops what it can, which moves the generator."""
    return call_of(
        name, *(option for option in OF_OPS[name].every_option() if option == "p" or option.endswith("_p")), **more
    )


def tensors_of(returned) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]


def joined(results: list[Tensor]) -> Tensor:
    """The numbers among them, as one tensor."""
    numbers = [tensor for tensor in results if tensor.is_floating_point()]
    return numbers[0] if len(numbers) == 1 else torch.cat([tensor.reshape(-1) for tensor in numbers])


def outcome(results: list[Tensor], leaves: Tensors, laid: Callable[[Tensor], Tensor] = Tensor.clone, **more) -> Tensors:
    """Results by number and gradients by name, of random gradients of the results; zeros for an input that none reads.

    laid: gives a result's gradient other strides.
    """
    graphs = [result for result in results if result.requires_grad]
    sent = [laid(dy) if dy.dim() else dy for dy in map(output_gradient, graphs, range(len(graphs)))]
    names = [name for name, leaf in leaves.items() if leaf.requires_grad]
    grads = torch.autograd.grad(graphs, [leaves[name] for name in names], sent, allow_unused=True, **more)
    values = {f"result {i}": result.detach() for i, result in enumerate(results)}
    return values | {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(names, grads, strict=True)}


# -- values of arguments that the catalogue has not ---------------------------------------------------------------------


def tables(*shape: int) -> tuple[Tensor, Tensor]:
    """cos and sin of rotary tables [..., 2], or of interleaved ones [..., 4]: an angle for each pair of columns."""
    rows = torch.arange(math.prod(shape[:-1])).view(*shape[:-1], 1)
    angles = rows * torch.tensor([1.0, 1.0, 0.1, 0.1])[: shape[-1]]
    return angles.cos(), angles.sin()


def _attention_variants(s: Sizes) -> dict[str, dict]:
    (B, S), d, D, own = s.lead, s.features, HEAD_DIM, s.heads * HEAD_DIM
    rows = own, D, D  # of q, k and v, whose heads share one of k
    three = dict(qkv_weight=[normal(n, d) for n in rows], qkv_bias=[normal(n) for n in rows], num_kv_heads=1)
    update = {name: LoRA(normal(2, d), normal(n, 2), 0.5, P) for name, n in zip("qkv", rows, strict=True)}
    update |= {"out": LoRA(normal(2, own), normal(d, 2), 2.0, P)}
    memory = dict(key_value=normal(B, S + 1, 8), qkv_weight=[normal(rows[0], d), *(normal(n, 8) for n in rows[1:])])
    of_memory = update | {name: LoRA(normal(2, 8), normal(D, 2), 0.5, P) for name in "kv"}
    hidden = torch.ones(S, S, dtype=torch.bool).triu(3)
    nothing = hidden.clone()  # for a row, and a column that no row sees
    nothing[1:2], nothing[:, :1] = True, True
    ends = every_other(cumulated(0, 1, 1, 3, 5) * (s.tokens // 6))
    packed = dict(
        x=normal(s.tokens, d), cu_seqlens=ends, rotary=100.0, is_causal=True, dropout_p=P, sinks=normal(s.heads)
    )
    slopes = torch.tensor([[0.5, 0.25]])
    return {
        "three weights with updates": three | dict(lora=update, norm="rms"),
        "memory of other features": three
        | memory
        | dict(lora=of_memory, attn_mask=normal(S, S + 1), sinks=normal(s.heads)),
        "a gate in the query of grouped heads": three
        | dict(qkv_weight=[normal(n, d) for n in (2 * own, D, D)], qkv_bias=None, gate_in_query=True, post_norm="rms"),
        "a norm of all heads": three
        | dict(qk_norm=((gain(own), normal(own)), (gain(D), normal(D))), qk_norm_kind="layer"),
        "a norm for each head": dict(qk_norm=(gain(s.heads, D), gain(s.heads, D)), qkv_layout="heads"),
        "tables and slopes of samples": dict(
            rotary=tables(B, S, 2), alibi_slopes=slopes / torch.arange(1, B + 1)[:, None]
        ),
        "tables of any sample": dict(rotary=tables(1, S, 2)),
        "a bias of samples": dict(attn_mask=normal(B, s.heads, S, S), softcap=2.0, dropout_p=P),
        "a bias and a mask": dict(attn_mask=(normal(1, s.heads, S, S), hidden), mask_is_exclusion=True),
        "a bias where nothing is seen": dict(attn_mask=(normal(B, s.heads, S, S), nothing), mask_is_exclusion=True),
        "padding that is added": dict(key_padding_mask=-torch.arange(B * S).view(B, S) / 10),
        "sequences, of which one is empty, and tokens in none": packed | dict(alibi_slopes=every_other(slopes[0])),
        "a number that scales the branch": dict(layer_scale=0.3, residual=True),
        "a number that scales scores down to nothing": dict(is_causal=True, scale=0.0),
        "a negative scale of causal scores": dict(is_causal=True, scale=-0.5),
    }


def _latent_variants(s: Sizes) -> dict[str, dict]:
    (B, S), wide = s.lead, 9
    values = dict(kv_b_weight=normal(s.heads * (2 + wide), s.hidden), out_weight=normal(s.features, s.heads * wide))
    return {
        "values wider than keys": values,
        "tables of samples": dict(rotary=tables(B, S, 4), rotary_interleaved=True),
        "tables of fewer columns": dict(rotary=tables(S, 2)),
        "interleaved tables of fewer columns": dict(rotary=tables(S, 2), rotary_interleaved=True),
        "a bias of samples": dict(attn_mask=normal(B, s.heads, S, S), softcap=2.0, dropout_p=P),
    }


def _layer_variants(s: Sizes, name: str) -> dict[str, dict]:
    """Sublayers with many options, and a decoder's."""
    own = ("x", "training", "recompute", "workspace")
    attention = OPS["latent_attention_block" if "latents" in name else "attention_block"]
    feed = OPS["moe_block" if "experts" in name else "mlp_block"]
    calls = {}
    for i in range(2):
        parts = [Case(part, many(part.name)[i], "", s).arguments for part in (attention, feed)]
        parts = [{key: value for key, value in part.items() if key not in own} for part in parts]
        calls[f"many options {'before' if i else 'after'} a norm"] = dict(
            attention_arguments=parts[0], mlp_arguments=parts[1] | {"residual": True}
        )
    if name == "transformer_layer":
        memory = _attention_variants(s)["memory of other features"]
        plain = {key: value for key, value in attention.inputs(s).items() if key not in own}
        calls["memory of other features"] = {"cross_attention_arguments": plain | memory}
    return calls


def _without_biases(entry: Entry, s: Sizes) -> dict[str, dict]:
    names = [name for name in entry.inputs(s) if name.endswith(("bias", "biases"))]
    return {"no biases": dict.fromkeys(names)} if names else {}


def cumulated(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


@functools.cache
def values_of(name: str, s: Sizes) -> dict[str, dict]:
    """The arguments of each option and variant of an entry. All calls share the tensors among them."""
    return ALL[name].every_option(s) | variants_of(ALL[name], s)


def variants_of(entry: Entry, s: Sizes) -> dict[str, dict]:
    name, parameters = entry.function.__name__, entry.parameters
    calls = _without_biases(entry, s)
    if name == "attention_block":
        calls |= _attention_variants(s)
    elif name == "latent_attention_block":
        calls |= _latent_variants(s)
    elif name == "transformer_layer":
        calls |= _layer_variants(s, entry.name)
    elif name == "scaled_dot_product_attention":
        (B, S), H = s.lead, s.heads
        calls |= {
            "a mask of keys": dict(attn_mask=torch.arange(B * (S + 1)).view(B, 1, 1, S + 1) % 3 > 0, dropout_p=P),
            "values of other features": dict(value=normal(B, H, S + 1, 3)),
            "rows after the last column": dict(query=normal(B, H, 3 * S, HEAD_DIM), window_size=(1, -1), dropout_p=P),
        }
    elif name == "varlen_attn":
        packed = dict(
            cu_seq_q=cumulated(0, 4, 4, 9), cu_seq_k=cumulated(0, 3, 5, 11), max_q=5, max_k=6, enable_gqa=True
        )
        packed |= dict(query=normal(11, 4, HEAD_DIM)) | dict.fromkeys(("key", "value"), normal(14, 2, HEAD_DIM))
        calls |= {
            "other sequences of keys": packed,
            "a negative scale of causal scores": packed | dict(is_causal=True, scale=-0.5),
            "a window of other sequences of keys": packed | dict(window_size=(2, 1)),
        }
    elif name == "moe_mlp":
        index = torch.arange(2 * s.tokens).view(*s.lead, 2) % (s.experts + 2) - 1
        calls["dropped pairs and an expert without tokens"] = dict(top_k_index=index.masked_fill(index == 1, 0))
    elif name == "moe_block":
        plain = dict(shared_up_weight=normal(9, s.features), shared_down_weight=normal(s.features, 9))
        calls["a shared expert without a gate"] = plain | dict(activation="relu", top_k=1)
    elif name == "selected_log_probs":
        tokens = torch.arange(s.tokens).view(s.lead) % s.out
        several = torch.stack([tokens, tokens, tokens.roll(1), torch.full_like(tokens, s.out - 1)], -1)
        several = dict(tokens=several.masked_fill(several % 3 == 0, -100), return_entropy=True)
        calls |= {
            "several candidates": several,
            "several candidates with an update": several | ALL[name].every_option(s)["lora"],
        }
    if "activation" in parameters and name != "transformer_layer":
        acts = oracles.ACTIVATIONS if "mlp" in name or "linear" in name else ("relu",)
        calls |= {f"activation {act}": {"activation": act} for act in acts}
    return calls


class Calls(TorchDispatchMode):
    """The library ops that run, and their arguments."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "ckptkern" and func._schema.name.endswith(("_fwd", "_bwd")):
            self.found.append((func, tree_map_only(Tensor, Tensor.detach, args)))
        return func(*args, **(kwargs or {}))


def calls_of(case: Case, dtype: torch.dtype = torch.float32) -> list[tuple]:
    """Of forward and backward."""
    leaves = case.make(dtype)
    with Calls() as calls:
        outcome(case.results(leaves), leaves)
    return calls.found


# -- which calls -------------------------------------------------------------------------------------------------------


def options_of(entry: Entry) -> list[str]:
    """Those that need no second process. The mode and the workspace are not among them: tests choose these."""
    chosen = entry.every_option()
    names = [name for name in chosen if catalog.ACROSS_RANKS not in chosen[name].values()]
    return [name for name in names if name not in ("recompute", "workspace")]


def alone(entry: Entry) -> list[tuple[str, ...]]:
    """No option, and each alone."""
    return [(), *((name,) for name in options_of(entry))]


def in_pairs(entry: Entry) -> dict[str, list[tuple[str, ...]]]:
    """For each option it alone and with each later one, all at one index of `in_turn`; "" is no option."""
    names = options_of(entry)
    return {"": [()]} | {name: [(name,), *((name, other) for other in names[i + 1 :])] for i, name in enumerate(names)}


@functools.cache
def many(name: str) -> list[tuple[str, ...]]:
    """Calls with as many options at once as the op accepts: taken as the catalogue lists them, and from its end."""
    entry, covered = ALL[name], []
    options = [option for option in options_of(entry) if option not in ("training", "p")]  # which switch dropout off
    for order in (options, options[::-1]):
        taken: tuple[str, ...] = ()
        for option in order:
            try:
                case = Case(entry, (*taken, option))
                case.results(case.make())
            except REFUSALS:
                continue
            taken = (*taken, option)
        if set(taken) not in map(set, covered):
            covered.append(taken)
    return covered


def mode_in_turn(entry: Entry, i: int) -> str:
    return entry.modes[i % len(entry.modes)] if entry.modes else ""


def smallest_chunks(entry: Entry) -> dict:
    return {"workspace": 1} if "workspace" in entry.parameters else {}


def sizes_of(entry: Entry) -> Sizes:
    return CLASSES if entry.function.__name__ in HEADS else TAILS


def named(name: str) -> str:
    """An id for pytest, which begins with the entry's name."""
    return name.replace(" ", "_")


# Whose sublayers are those of "transformer_layer" and of "transformer_layer-latents and experts".
LONG = "transformer_layer-latents", "transformer_layer-experts"


def _param(name: str, *values, id: str):
    return pytest.param(ALL[name], *values, id=id, marks=[pytest.mark.long] * (name in LONG))


def each(names: Iterable[str] = ALL) -> list:
    """pytest parameters: entries."""
    return [_param(name, id=named(name)) for name in names]


def each_pair(names: Iterable[str] = ALL) -> list:
    """pytest parameters: entries, and names of options, of which `in_pairs` has the pairs."""
    return [
        _param(name, first, id=f"{named(name)}-{first or 'none'}") for name in names for first in in_pairs(ALL[name])
    ]


def each_call(names: Iterable[str] = ALL, calls: Callable[[str], list[tuple[str, ...]]] = many) -> list:
    """pytest parameters: entries without an option, and with the options of `calls`, by default with many at once."""
    return [
        _param(name, options, id=f"{named(name)}-{_id_of(options, i)}")
        for name in names
        for i, options in enumerate(dict.fromkeys([(), *calls(name)]))
    ]


def _id_of(options: tuple[str, ...], i: int) -> str:
    return f"many{i}" if len(options) > 1 else named(options[0]) if options else "none"
