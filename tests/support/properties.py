"""The catalogue's ops with options, alone and in pairs, as the tests of properties run them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest
import torch
from support.cases import SEED, output_gradient
from support.oracles import ACTIVATIONS, ORACLES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ckptkern import LoRA
from ckptkern.ops import catalog
from ckptkern.ops.catalog import HEAD_DIM, IN_TORCH_OPS, OPS, OTHER_OPS, Entry, Sizes
from ckptkern.ops.examples import P, gain, normal

OF_OPS = {entry.name: entry for entry in (*OPS.values(), *OTHER_OPS)}
ALL = OF_OPS | {entry.name: entry for entry in IN_TORCH_OPS}
HEADS = ("linear_cross_entropy", "selected_log_probs", "linear_distillation", "linear_topk_distillation")
# A workspace of one byte takes these tokens in two chunks, of which the second has 6, and heads in two groups.
TAILS = Sizes((2, 67), experts=4)
CLASSES = Sizes((2, 67), out=300)  # and these classes in two chunks, of which the second has 44
TILED = Sizes((2, 3), 36, 40, 70)  # several tiles of the interpreted kernels, the last of which are not full
REFUSALS = (ValueError, TypeError, NotImplementedError, RuntimeError)


class Case(NamedTuple):
    """A call of an op: its options by name, at a recompute mode ("" for the op's default) and sizes."""

    entry: Entry
    options: tuple[str, ...] = ()
    mode: str = ""
    sizes: Sizes = Sizes()

    def __str__(self) -> str:
        return " ".join(
            [self.entry.name, "with", " and ".join(self.options) or "no option", self.mode and f"at {self.mode}"]
        )

    @property
    def arguments(self) -> dict:
        """Every option has its own value. Of what else options bring along, such as the norm of a norm's weight, the first
        option's counts."""
        chosen = values_of(self.entry.name, self.sizes)
        mode = {"recompute": self.mode} if self.mode else {}
        found = self.entry.inputs(self.sizes) | mode
        for name in reversed(self.options):
            found |= chosen[name]
        return found | {name: chosen[name][name] for name in self.options if name in chosen[name]}

    def make(self, dtype: torch.dtype = torch.float64, **more) -> dict[str, Tensor]:
        return catalog.random_leaves(self.arguments, dtype, **more)

    def results(self, leaves: dict[str, Tensor], *, given: dict | None = None, **more) -> tuple[Tensor, ...]:
        """What the op returns, without what was not asked for. given: `given`, if its tensors are looked at."""
        torch.manual_seed(SEED)
        return tensors_of(catalog.call(self.entry, self.given(leaves) if given is None else given, leaves, **more))

    def bound(self, leaves: dict[str, Tensor]) -> Callable[[dict[str, Tensor]], Tensor]:
        """The results that have a graph, as one tensor: a function of leaves that torch.compile may trace, and that draws from
        the generator as it stands."""
        given, graphs = self.given(leaves), [one.requires_grad for one in self.results(leaves)]

        def run(leaves: dict[str, Tensor]) -> Tensor:
            results = tensors_of(catalog.call(self.entry, given, leaves))
            return torch.cat([one.reshape(-1) for one, graph in zip(results, graphs, strict=True) if graph])

        return run

    def oracle(self, leaves: dict[str, Tensor], **more) -> tuple[Tensor, ...]:
        torch.manual_seed(SEED)
        oracle = self.entry._replace(function=ORACLES[self.entry.function.__name__])
        return tensors_of(catalog.call(oracle, self.given(leaves), leaves, **more))

    def given(self, leaves: dict[str, Tensor]) -> dict:
        """Numbers that are not trained, such as a teacher's, are in float64 where everything is."""
        double = any(one.dtype == torch.float64 for one in leaves.values())
        return tree_map_only(Tensor, lambda t: t.double() if double and t.is_floating_point() else t, self.arguments)

    def function(self, leaves: dict[str, Tensor], **more) -> Tensor:
        return joined(self.results(leaves, **more))


def tensors_of(returned) -> tuple[Tensor, ...]:
    return tuple(one for one in tree_leaves(returned) if one is not None)


def joined(results) -> Tensor:
    """Those that have a graph, as one tensor."""
    return torch.cat([one.reshape(-1) for one in results if one.requires_grad])


def outcome(results: tuple[Tensor, ...], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results by number and gradients by name, of a random gradient of the results; zeros for an input that none reads."""
    y = joined(results)
    dy = output_gradient(y)
    names = [name for name, leaf in leaves.items() if leaf.requires_grad]
    grads = torch.autograd.grad(y, [leaves[name] for name in names], dy, allow_unused=True)
    found = {f"result {i}": one.detach() for i, one in enumerate(results)}
    return found | {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(names, grads, strict=True)}


# -- values of arguments that the catalogue has not ---------------------------------------------------------------------


def _attention_variants(s: Sizes) -> dict[str, dict]:
    (B, S), d, D, own = s.lead, s.features, HEAD_DIM, s.heads * HEAD_DIM
    rows = own, D, D  # of q, k and v, whose heads share one of k
    three = dict(qkv_weight=[normal(n, d) for n in rows], qkv_bias=[normal(n) for n in rows], num_kv_heads=1)
    update = {name: LoRA(normal(2, d), normal(n, 2), 0.5, P) for name, n in zip("qkv", rows, strict=True)}
    update |= {"out": LoRA(normal(2, own), normal(d, 2), 2.0, P)}
    memory = dict(key_value=normal(B, S + 1, 8), qkv_weight=[normal(rows[0], d), *(normal(n, 8) for n in rows[1:])])
    of_memory = update | {name: LoRA(normal(2, 8), normal(D, 2), 0.5, P) for name in "kv"}
    hidden = torch.ones(S, S, dtype=torch.bool).triu(3)
    angles = torch.arange(B * S).view(B, S, 1) * torch.tensor([1.0, 1.0])
    ends = torch.tensor([0, 1, 1, 3, 5], dtype=torch.int32) * (s.tokens // 6)
    packed = dict(
        x=normal(s.tokens, d), cu_seqlens=ends, rotary=100.0, is_causal=True, dropout_p=P, sinks=normal(s.heads)
    )
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
        "tables of samples for half a head": dict(rotary=(angles.cos(), angles.sin())),
        "a bias of samples": dict(attn_mask=normal(B, s.heads, S, S), softcap=2.0, dropout_p=P),
        "a bias and a mask": dict(attn_mask=(normal(1, s.heads, S, S), hidden), mask_is_exclusion=True),
        "padding that is added": dict(key_padding_mask=-torch.arange(B * S).view(B, S) / 10),
        "sequences, of which one is empty, and tokens in none": packed | dict(alibi_slopes=torch.tensor([0.5, 0.25])),
        "a number that scales the branch": dict(layer_scale=0.3, residual=True),
    }


def _latent_variants(s: Sizes) -> dict[str, dict]:
    (B, S), wide, rows = s.lead, 9, [*range(s.tokens)]
    angles = torch.tensor(rows).view(B, S, 1) * torch.tensor([1.0, 1.0, 0.1, 0.1])
    values = dict(kv_b_weight=normal(s.heads * (2 + wide), s.hidden), out_weight=normal(s.features, s.heads * wide))
    return {
        "values wider than keys": values,
        "tables of samples": dict(rotary=(angles.cos(), angles.sin()), rotary_interleaved=True),
        "a bias of samples": dict(attn_mask=normal(B, s.heads, S, S), softcap=2.0, dropout_p=P),
    }


def _layer_variants(s: Sizes, name: str) -> dict[str, dict]:
    """Sublayers with many options, and a decoder's."""
    own = ("x", "training", "recompute", "workspace")
    attention = OPS["latent_attention_block" if "latents" in name else "attention_block"]
    feed = OPS["moe_block" if "experts" in name else "mlp_block"]
    found = {}
    for i in range(2):
        parts = [Case(one, many(one.name)[i], "", s).arguments for one in (attention, feed)]
        parts = [{key: one for key, one in part.items() if key not in own} for part in parts]
        label = f"many options {'before' if i else 'after'} a norm" if name else ""
        found[label] = dict(attention_arguments=parts[0], mlp_arguments=parts[1] | {"residual": True})
    if name == "transformer_layer":
        memory = _attention_variants(s)["memory of other features"]
        plain = {key: one for key, one in attention.inputs(s).items() if key not in own}
        found["memory of other features"] = {"cross_attention_arguments": plain | memory}
    return found


def _without_biases(entry: Entry, s: Sizes) -> dict[str, dict]:
    names = [name for name in entry.inputs(s) if name.endswith(("bias", "biases"))]
    return {"no biases": dict.fromkeys(names)} if names else {}


@functools.cache
def values_of(name: str, s: Sizes) -> dict[str, dict]:
    """The arguments of each option and variant of an entry. All calls share the tensors among them."""
    return ALL[name].every_option(s) | variants_of(ALL[name], s)


def variants_of(entry: Entry, s: Sizes) -> dict[str, dict]:
    name, parameters = entry.function.__name__, entry.parameters
    found = _without_biases(entry, s)
    if name == "attention_block":
        found |= _attention_variants(s)
    elif name == "latent_attention_block":
        found |= _latent_variants(s)
    elif name == "transformer_layer":
        found |= _layer_variants(s, entry.name)
    elif name == "scaled_dot_product_attention":
        seen = torch.ones(s.lead[1], s.lead[1] + 1, dtype=torch.bool).tril(2)
        found |= {
            "a mask": dict(attn_mask=seen, dropout_p=P),
            "values of other features": dict(value=normal(s.lead[0], s.heads, s.lead[1] + 1, 3)),
        }
    elif name == "moe_mlp":
        index = torch.arange(2 * s.tokens).view(*s.lead, 2) % (s.experts + 2) - 1
        found["dropped pairs and an expert without tokens"] = dict(top_k_index=index.masked_fill(index == 1, 0))
    elif name == "moe_block":
        plain = {
            f"shared_{layer}_weight": one
            for layer, one in (("up", normal(9, s.features)), ("down", normal(s.features, 9)))
        }
        found["a shared expert without a gate"] = plain | dict(activation="relu", top_k=1)
    if "activation" in parameters and name != "transformer_layer":
        acts = ACTIVATIONS if "mlp" in name or "linear" in name else ("relu",)
        found |= {f"activation {one}": {"activation": one} for one in acts}
    return found


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
        y = case.function(leaves)
        y.backward(output_gradient(y))
    return calls.found


def assert_equal_to_rounding(ours: dict[str, Tensor], theirs: dict[str, Tensor], case: object, than: str) -> None:
    """As `cases.assert_same_within_rounding`, which says why; `than` names what gave `theirs`."""
    assert ours.keys() == theirs.keys(), f"{case}: {sorted(ours)} but {than} has {sorted(theirs)}"
    largest = max(torch.linalg.vector_norm(t.double()).item() for t in theirs.values())
    for name, theirs_ in theirs.items():
        shapes = [(one.shape, one.dtype) for one in (ours[name], theirs_)]
        assert shapes[0] == shapes[1], f"{case}: {name} is {shapes[0]}, but of {than} {shapes[1]}"
        eps = torch.finfo(theirs_.dtype).eps if theirs_.is_floating_point() else 0.0
        difference, norm = (
            torch.linalg.vector_norm(t.double()).item() for t in (ours[name].double() - theirs_, theirs_)
        )
        allowed = max(eps ** (2 / 3) * norm, 16 * eps * largest)
        assert difference <= allowed, (
            f"{case}: {name} differs from that of {than} by {difference:.3g}, at a norm of {norm:.3g}; rounding explains "
            f"{allowed:.3g}"
        )


def assert_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor], case: object, than: str) -> None:
    assert ours.keys() == theirs.keys(), f"{case}: {sorted(ours)} but {than} has {sorted(theirs)}"
    for name, theirs_ in theirs.items():
        assert ours[name].dtype == theirs_.dtype, f"{case}: {name} is {ours[name].dtype}, but of {than} {theirs_.dtype}"
        if not torch.equal(ours[name], theirs_):
            most = (ours[name].double() - theirs_.double()).abs().max().item()
            raise AssertionError(f"{case}: {name} has other bits than that of {than}: it differs by up to {most:.3g}")


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
    return {"": [()]} | {one: [(one,), *((one, other) for other in names[i + 1 :])] for i, one in enumerate(names)}


@functools.cache
def many(name: str) -> list[tuple[str, ...]]:
    """Calls with as many options at once as the op accepts: taken as the catalogue lists them, and from its end."""
    entry, found = ALL[name], []
    options = [one for one in options_of(entry) if one not in ("training", "p")]  # which switch dropout off
    for order in (options, options[::-1]):
        taken: tuple[str, ...] = ()
        for option in order:
            try:
                case = Case(entry, (*taken, option))
                case.results(case.make())
            except REFUSALS:
                continue
            taken = (*taken, option)
        if set(taken) not in map(set, found):
            found.append(taken)
    return found


def mode_in_turn(entry: Entry, i: int) -> str:
    return entry.modes[i % len(entry.modes)] if entry.modes else ""


def smallest_chunks(entry: Entry) -> dict:
    return {"workspace": 1} if "workspace" in entry.parameters else {}


def sizes_of(entry: Entry) -> Sizes:
    return CLASSES if entry.function.__name__ in HEADS else TAILS


def named(name: str) -> str:
    """An id for pytest, which begins with the entry's name."""
    return name.replace(" ", "_")


def each(names: Iterable[str] = ALL) -> list:
    """pytest parameters: entries."""
    return [pytest.param(ALL[name], id=named(name)) for name in names]


def each_call(names: Iterable[str] = ALL, calls: Callable[[str], list[tuple[str, ...]]] = many) -> list:
    """pytest parameters: entries without an option, and with the options of `calls`, by default with many at once."""
    return [
        pytest.param(ALL[name], options, id=f"{named(name)}-{_id_of(options, i)}")
        for name in names
        for i, options in enumerate(dict.fromkeys([(), *calls(name)]))
    ]


def _id_of(options: tuple[str, ...], i: int) -> str:
    return f"many{i}" if len(options) > 1 else named(options[0]) if options else "none"
