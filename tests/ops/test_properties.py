"""Every op of the catalogue with every pair of its options: values, gradients of first and second order, and recompute.

A call is compared with its oracle (support/oracles.py) in float64, where only a library's order of sums differs. Its tokens,
classes and heads are taken in several chunks and groups, the last of which are smaller.
"""

import pytest
import torch
from support.cases import assert_same, assert_same_within_rounding, uninitialised_is_nan
from support.catalog import Entry, Sizes
from support.properties import (
    ALL,
    HEADS,
    OF_OPS,
    REFUSALS,
    TILED,
    Case,
    alone,
    each,
    each_call,
    each_pair,
    in_pairs,
    joined,
    many,
    mode_in_turn,
    named,
    outcome,
    sizes_of,
    smallest_chunks,
    variants_of,
)

import ckptkern
from ckptkern.ops.cross_entropy.op import LinearCrossEntropy

# What an op refuses to do together, as the catalogue's values of these options meet; for an option those that come after it.
BEFORE_THE_BRANCH = {"norm_scale": "norm_first", "norm_shift": "norm_first"}
PACKED = "mask_is_exclusion key_value attn_mask key_padding_mask"
REFUSED = {
    "mlp_block": BEFORE_THE_BRANCH,
    "latent_attention_block": BEFORE_THE_BRANCH,
    "moe_block": BEFORE_THE_BRANCH,
    "attention_block": {
        "norm_scale": "norm_first cu_seqlens max_seqlen", "norm_shift": "norm_first cu_seqlens max_seqlen",
        "num_kv_heads": "gate_in_query lora", "cu_seqlens": PACKED, "max_seqlen": PACKED, "mask_is_exclusion": "key_value",
        "rotary_interleaved": "key_value", "gate_bias": "gate_weight gate_in_query", "gate_weight": "gate_in_query",
        "gate_in_query": "qkv_layout lora", "key_value": "qkv_layout rotary attn_mask key_padding_mask lora",
    },
    "transformer_layer": {"cross_attention_arguments": "parallel"},
    "scaled_dot_product_attention": {"attn_mask": "is_causal"},
}  # fmt: skip


def check_against_oracle(case: Case, **more) -> None:
    """Results, whether they have a graph, and gradients."""
    leaves = case.make(torch.float64)
    results, expected = case.results(leaves, **more), case.oracle(leaves)
    graphs = [[tensor.requires_grad for tensor in tensors] for tensors in (results, expected)]
    assert graphs[0] == graphs[1], f"{case}: results have a graph: {graphs[0]}, but of the oracle {graphs[1]}"
    assert_same_within_rounding(outcome(results, leaves), outcome(expected, leaves), case, "the oracle")


def refuses(case: Case) -> str:
    """The message with which the op refuses these options in either order, "" if it takes them, compared with the oracle."""
    for options in (case.options, case.options[::-1]):
        try:
            check_against_oracle(case._replace(options=options), **smallest_chunks(case.entry))
            if len(options) < 2:
                check_against_oracle(case)
        except REFUSALS as error:
            refusal = str(error)
        else:
            return ""
    assert refusal.startswith(f"{case.entry.function.__name__}: "), f"{case} fails: {refusal}"
    return refusal


@pytest.mark.parametrize(("entry", "first"), each_pair())
def test_pairs_of_options(entry: Entry, first: str):
    """Modes in turn, the smallest workspace, and an option alone in the default's, too. What is refused is what REFUSED
    lists."""
    refused = {}
    for i, options in enumerate(in_pairs(entry)[first], start=len(first)):
        message = refuses(Case(entry, options, mode_in_turn(entry, i), sizes_of(entry)))
        refused |= {options[-1]: message} if message else {}
    expected = set(REFUSED.get(entry.name, {}).get(first, "").split())
    assert refused.keys() == expected, (
        f"{entry.name} with {first} refuses {refused or 'nothing'}, but is expected to refuse {expected or 'nothing'}"
    )


VARIANTS = [
    pytest.param(entry, label, id=f"{named(name)}-{named(label)}")
    for name, entry in ALL.items()
    for label in variants_of(entry, sizes_of(entry))
]


@pytest.mark.parametrize(("entry", "label"), VARIANTS)
def test_other_values_of_arguments(entry: Entry, label: str):
    """In every mode, in several chunks and in one."""
    for mode in entry.modes or ("",):
        for more in ({}, smallest_chunks(entry)):
            check_against_oracle(Case(entry, (label,), mode, sizes_of(entry)), **more)


@pytest.mark.parametrize("entry", each())
def test_second_order(entry: Entry):
    """Of a penalty on the gradients, with each option, and without any for each input alone: others may then not be saved."""
    for i, options in enumerate(alone(entry)):
        case = Case(entry, options, mode_in_turn(entry, i) if options else "full" if entry.modes else "")
        names = case.make().keys()
        for trained in [names] if options else [names, *({name} for name in names)]:
            leaves = case.make(torch.float64, frozen=names - trained)
            ours, theirs = (penalty(run(leaves), leaves) for run in (case.results, case.oracle))
            assert_same_within_rounding(ours, theirs, f"second order of {case}, trained: {trained}", "the oracle")


def penalty(results, leaves) -> dict[str, torch.Tensor]:
    """Gradients of the square of the gradients, and the first ones as double backward sees them."""
    first = outcome([joined(results).square().sum()], leaves, create_graph=True)
    grads = [first[name] for name, leaf in leaves.items() if leaf.requires_grad]
    squares = sum(grad.square().sum() for grad in grads)
    return {f"first {name}": grad.detach() for name, grad in first.items()} | outcome([squares], leaves)


# -- recompute ---------------------------------------------------------------------------------------------------------

RECOMPUTE = [name for name, op in OF_OPS.items() if op.modes and name not in HEADS]


@pytest.mark.parametrize("entry", each(RECOMPUTE))
def test_every_mode_gives_the_same_bits(entry: Entry):
    """Modes differ in what they save: what is recomputed equals what forward computed, in one chunk and in several in turn.

    In groups of heads "none" forms q, k and v of all heads by one matmul, so there its gradients may be others.
    """
    for i, options in enumerate([(), *alone(entry)]):
        more, outcomes = smallest_chunks(entry) if i % 2 else {}, {}
        for mode in entry.modes:
            case = Case(entry, options, mode, sizes_of(entry))
            leaves = case.make(torch.bfloat16)
            outcomes[mode] = outcome(case.results(leaves, **more), leaves)
        assert_same(outcomes["selective"], outcomes["full"], case, "recompute='full'")
        if more and {"num_heads", "attention_arguments"} & entry.parameters.keys():
            outcomes = {
                mode: {n: t for n, t in values.items() if n.startswith("result")} for mode, values in outcomes.items()
            }
        assert_same(outcomes["none"], outcomes["full"], case, "recompute='full'")


MANY_CLASSES = Sizes((2, 3), 8, 40, 2050)  # three times as many slices of classes as are combined at once
WITH_KERNELS = [name for name, entry in OF_OPS.items() if entry.op.kernels]


def on_kernels(name: str) -> list[tuple[str, ...]]:
    """Many options at once, those that go with none of these alone, and arguments that the catalogue has not."""
    entry, at_once = OF_OPS[name], many(name)
    rest = [chosen for chosen in alone(entry) if not set(chosen) <= set().union(*at_once)]
    variants = [label for label in variants_of(entry, TILED) if not label.startswith(("activation", "no biases"))]
    return [*at_once, *rest, *((label,) for label in variants)]


@pytest.mark.parametrize(("entry", "options"), each_call(WITH_KERNELS, on_kernels))
@uninitialised_is_nan()
def test_kernels_compute_what_pytorch_ops_do(entry: Entry, options):
    """With many options in two modes, which give the same bits where they recompute, and then in groups of heads."""
    outcomes, modes = {}, (*entry.modes[:1], *entry.modes[-1:]) if len(options) != 1 else entry.modes[:1]
    sizes = MANY_CLASSES if entry.op is LinearCrossEntropy else TILED
    for mode in modes or ("",):
        case = Case(entry, options, mode, sizes)
        leaves = case.make()
        theirs = outcome(case.results(leaves), leaves)
        with ckptkern.backend("triton"):
            outcomes[mode] = outcome(case.results(leaves), leaves)
        assert_same_within_rounding(outcomes[mode], theirs, f"{case} on the kernels", "PyTorch ops")
    if len(outcomes) > 1 and entry.name not in HEADS:
        assert_same(*outcomes.values(), f"{case} on the kernels", "another mode")
    if len(options) > 1 and "num_heads" in entry.parameters:
        with ckptkern.backend("triton"):
            groups = outcome(case.results(leaves, workspace=1), leaves)
        assert_same_within_rounding(groups, theirs, f"{case} on the kernels, in groups of heads", "PyTorch ops")
