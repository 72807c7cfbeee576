"""What the ops save for backward, and how far memory rises beside that in both passes."""

import pytest
import torch
from support.cases import output_gradient
from support.properties import (
    OF_OPS,
    REFUSALS,
    Case,
    alone,
    each,
    in_pairs,
    joined,
    mode_in_turn,
    named,
    sizes_of,
    smallest_chunks,
)
from torch import Tensor
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

import ckptkern
from ckptkern.memory import memory_timeline, peak_memory, saved_tensors
from ckptkern.ops.catalog import Entry, Sizes

# -- what is saved -----------------------------------------------------------------------------------------------------
# (elements in the compute dtype, other bytes) for each token, besides x and what is given, such as parameters and masks.


def width(arguments: dict, name: str) -> int:
    """The rows of a weight, or of three."""
    given = arguments.get(name)
    return 0 if given is None else sum(one.shape[0] for one in given) if isinstance(given, list) else given.shape[-2]


def of_hidden(hidden: int, gated: bool, activation: str, mode: str) -> int:
    """g, u and h of a gated MLP, else z and h; relu's h stands for z."""
    tensors = {"none": 3 if gated else 2, "selective": 2 if gated else 1, "full": 0}[mode]
    return hidden * (min(tensors, 1) if activation == "relu" and not gated else tensors)


def of_linear_act(a: dict, mode: str) -> tuple[float, float]:
    out = width(a, "weight")
    if mode == "full" or a.get("activation") == "identity":
        return 0, 0
    return (0, -(-out // 8)) if mode == "selective" and a.get("activation", "relu") == "relu" else (out, 0)


def of_linear_stack(a: dict, mode: str) -> tuple[float, float]:
    widths = [one.shape[0] for one in a["weights"]]
    if mode == "full":
        return 0, -(-widths[-1] // 8) if a.get("activation", "relu") == "relu" else 0
    return sum(widths), 0


def of_mlp(a: dict, mode: str) -> tuple[float, float]:
    gated = a.get("gate_weight") is not None
    hidden = width(a, "fc1_weight") or width(a, "up_weight")
    return of_hidden(hidden, gated, a.get("activation", "gelu"), mode), 0


def of_attention(a: dict, mode: str, lse: int) -> tuple[float, float]:
    """o and lse, and at "none" q, k, v and the gate."""
    heads, core = a["num_heads"], a["out_weight"].shape[1]
    if mode == "full":
        return 0, 0
    if mode == "selective":
        return core, lse * heads
    if "kv_a_weight" in a:
        down = width(a, "q_a_weight"), width(a, "kv_a_weight"), width(a, "q_weight"), width(a, "kv_b_weight")
        return core + sum(down), lse * heads
    own, keys = core, 2 * core // heads * (a.get("num_kv_heads") or heads)
    if a.get("key_value") is not None:
        keys = keys * a["key_value"].shape[-2] / a["x"].shape[-2]
    gate = core if a.get("gate_in_query") else width(a, "gate_weight")
    return core + own + keys + gate, lse * heads


def of_moe(a: dict, mode: str) -> tuple[float, float]:
    """g and u of a token's experts and, for moe_block, its choice, as int16."""
    k = a["top_k"] if "top_k" in a else a["top_k_index"].shape[-1]
    chosen = 2 * k if "top_k" in a else 0
    shared, gated = width(a, "shared_up_weight"), a.get("shared_gate_weight") is not None
    elements = of_hidden(shared, gated, a.get("activation", "silu"), mode) if shared else 0
    return elements + (0 if mode == "full" else k * a["gate_up_weight"].shape[1]), chosen


def states(a: dict) -> int:
    """Bytes of dropout's states, 16 each; the updates of a sublayer share one."""
    if not a.get("training", True):
        return 0
    lora = a.get("lora") or {}
    lora = lora.values() if isinstance(lora, dict) else [lora]
    drops = [a.get(name, 0) for name in ("dropout_p", "resid_dropout_p", "drop_path_p")]
    return 16 * (sum(p > 0 for p in drops) + any(one.dropout_p for one in lora))


def of_layer(a: dict, mode: str, lse: int) -> tuple[float, float, int]:
    """The sublayers', of which "selective" recomputes the MLP, and at "none" what passes between them."""
    attentions = [one for one in (a["attention_arguments"], a.get("cross_attention_arguments")) if one is not None]
    feed, training = a["mlp_arguments"], {"training": a.get("training", True)}
    inner = of_moe if "router_weight" in feed else of_mlp
    found = [inner(feed, "none" if mode == "none" else "full")]
    found += [of_attention(one | {"x": a["x"]}, mode, lse) for one in attentions]
    between = a["x"].shape[-1] * len(attentions) if mode == "none" and not a.get("parallel") else 0
    drawn = sum(states(one | training) for one in (*attentions, feed))
    return sum(one[0] for one in found), sum(one[1] for one in found), drawn, between


def expected_bytes(case: Case, dtype: torch.dtype, x_itemsize: int) -> int:
    """x_itemsize: of x and of what passes between sublayers, which keep their dtype under autocast."""
    a, name, mode, itemsize = case.arguments, case.entry.function.__name__, case.mode, dtype.itemsize
    lse, between, x = max(itemsize, 4), 0, a.get("x")
    if name == "transformer_layer":
        elements, others, drawn, between = of_layer(a, mode, lse)
    elif name in ("scaled_dot_product_attention", "varlen_attn"):
        q = a["query"]
        tokens = q.shape[0] * q.shape[2] if q.shape[2:3] and len(q.shape) == 4 else q.shape[0]
        heads = q.shape[1]
        drawn = 16 * (a.get("dropout_p", 0) > 0)
        return tokens * heads * (q.shape[-1] * itemsize + lse) + drawn
    else:
        of = {"linear_act": of_linear_act, "linear_stack": of_linear_stack, "moe_mlp": of_moe, "moe_block": of_moe}
        if "num_heads" in a:
            elements, others = of_attention(a, mode, lse)
        else:
            elements, others = of.get(name, of_mlp)(a, mode)
        drawn = states(a)
    tokens = torch.Size(x.shape[:-1]).numel()
    return round(tokens * (elements * itemsize + others + (x.shape[-1] + between) * x_itemsize)) + drawn


def saved_bytes(case: Case, leaves: dict[str, Tensor], *, count: tuple[str, ...] = (), **more) -> int:
    """What a call saves besides its arguments, of which those in `count` are counted, too."""
    given = case.given(leaves)
    arguments = [one for one in tree_leaves(given) if isinstance(one, Tensor)]
    with saved_tensors(exclude=[*arguments, *(leaf for name, leaf in leaves.items() if name not in count)]) as saved:
        case.results(leaves, given=given, **more)
    return saved.bytes


TABLES = [
    name for name in OF_OPS
    if name != "dropout" and not name.startswith(("grouped", "linear_cross", "linear_dist", "linear_topk", "selected"))
]  # fmt: skip
OF_PAIRS = [
    pytest.param(OF_OPS[name], first, id=f"{named(name)}-{first or 'none'}")
    for name in TABLES
    for first in in_pairs(OF_OPS[name])
]


@pytest.mark.parametrize(("entry", "first"), OF_PAIRS)
def test_saved_bytes_are_the_tables(entry: Entry, first: str):
    """Of every pair of options, and of each alone in every mode: in float32, bfloat16 and under autocast in turn, in chunks and
    in one."""
    precisions = ("float32", "autocast", "bfloat16") if "x" in entry.inputs(Sizes()) else ("float32", "bfloat16")
    for i, options in enumerate(in_pairs(entry)[first], start=len(first)):
        modes = (entry.modes or ("",)) if len(options) < 2 else [mode_in_turn(entry, i)]
        for j, mode in enumerate(modes):
            case = Case(entry, options, mode, sizes_of(entry))
            more = smallest_chunks(entry) if i % 2 else {}
            check_saved_bytes(case, precisions[(i // 2 + j) % len(precisions)], more)


def check_saved_bytes(case: Case, precision: str, more: dict) -> None:
    leaves = case.make(torch.bfloat16 if precision == "bfloat16" else torch.float32)
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    keeps_x = case.entry.function.__name__.endswith(("_block", "_layer"))
    x_itemsize = 4 if precision == "float32" or (precision == "autocast" and keeps_x) else 2
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
        try:
            found = saved_bytes(case, leaves, count=("x",), **more)
        except REFUSALS:  # test_properties.py counts these
            return
    expected = expected_bytes(case, dtype, x_itemsize)
    assert found == expected, f"{case} in {precision} saves {found} bytes, but its table has {expected}"


PER_TOKEN = {  # bytes in float32; for scalar losses at "none" at most the gradients that forward forms
    "linear_cross_entropy": lambda a, mode: 4 + 4 * a.get("return_entropy", False),
    "selected_log_probs": lambda a, mode: 4 + 4 * a.get("return_entropy", False),
    "linear_distillation": lambda a, mode: 8 + 4 * (a.get("beta", 0) > 0),
}


@pytest.mark.parametrize("entry", each(PER_TOKEN))
def test_saved_bytes_of_heads(entry: Entry):
    """At "full" numbers for each token, whatever is asked for; else logits, or gradients of a scalar loss."""
    for options in alone(entry):
        for mode in entry.modes or ("",):
            case = Case(entry, options, mode, sizes_of(entry))
            leaves, a = case.make(torch.float32), case.arguments
            found, results = saved_bytes(case, leaves), case.results(leaves)
            formed_in_forward = mode == "none" and len(results) == 1 and not results[0].dim() and "z_loss" not in a
            tokens, V = case.sizes.tokens, case.sizes.out
            expected = tokens * PER_TOKEN[entry.name](a, mode) + (16 if "lora" in a else 0)
            if mode in ("none", "selective") and "lora" not in a:
                logits, formed = tokens * (V * 4 + V // 16 + 16), 4 * sum(leaf.numel() for leaf in leaves.values())
                expected += min(logits, formed) if formed_in_forward else logits
            around = tokens * 4 * 4 + 64  # of what PyTorch ops make of each token's numbers
            assert found <= expected + around, (
                f"{case} saves {found} bytes, but at most {expected + around} are declared"
            )


@pytest.mark.parametrize("entry", each(OF_OPS))
def test_nothing_is_saved_without_a_gradient(entry: Entry):
    case = Case(entry)
    leaves = case.make(torch.float32)
    with torch.no_grad(), saved_tensors() as unrecorded:
        assert not any(one.requires_grad for one in case.results(leaves))
    with saved_tensors() as frozen:
        case.results({name: leaf.detach() for name, leaf in leaves.items()})
    assert (unrecorded.bytes, frozen.bytes) == (0, 0)


# -- the peak ----------------------------------------------------------------------------------------------------------

BOUNDED = dict.fromkeys(
    ("linear_cross_entropy", "selected_log_probs", "linear_distillation", "linear_topk_distillation"),
    Sizes((640,), 16, 16, 2048),
)
LAYERS = ("linear_stack", "mlp", "gated_mlp", "mlp_block", "moe_block", "moe_mlp", "grouped_gated_mlp")
BOUNDED |= dict.fromkeys(LAYERS, Sizes((768,), 8, 64, 8))
BOUNDED |= dict.fromkeys(
    [name for name in OF_OPS if "attention_block" in name or "transformer" in name], Sizes((2, 256), 8, 64, 8, 4)
)


def test_ops_with_a_workspace_are_bounded():
    of_its_own = {"scaled_dot_product_attention"}  # test_query_blocks.py
    assert BOUNDED.keys() == {name for name, one in OF_OPS.items() if "workspace" in one.parameters} - of_its_own


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("entry", each(name for name in BOUNDED))
def test_the_workspace_counts_what_a_pass_holds(entry: Entry, backend: str, monkeypatch):
    """With room for four of the smallest chunks forward takes no fifth, and backward neither; of each option, modes in turn.

    Kernels are not run, with every second option: they are what their launchers allocate. "none" is left out: in attention it
    holds little besides the buffers of torch's own kernel, which no workspace bounds.
    """
    if backend == "triton" and not entry.op.kernels:
        return
    monkeypatch.setattr(InterpretedFunction, "run", lambda *args, **options: None)
    for i, options in enumerate(alone(entry)[:: 2 if backend == "triton" else 1]):
        modes = [mode for mode in entry.modes if mode != "none"] or [""]
        case = Case(entry, options, modes[(i + (backend == "triton")) % len(modes)], BOUNDED[entry.name])
        leaves = case.make(torch.float32)

        def transient(workspace: int, case=case, leaves=leaves) -> tuple[int, int]:
            """How far memory rises above what stays."""
            with ckptkern.backend(backend), memory_timeline("cpu") as forward:
                y = joined(case.results(leaves, workspace=workspace))
            dy = output_gradient(y)
            with peak_memory("cpu") as backward:
                grads = torch.autograd.grad(y, list(leaves.values()), dy)
            return forward.peak - forward.bytes[-1], backward.bytes - sum(grad.nbytes for grad in grads)

        for place, least in enumerate(transient(1)):
            if least <= 0:  # a backward that scales the gradients that forward formed holds less than these
                continue
            held = transient(4 * least)[place]
            assert held <= 4 * least, (
                f"{case} on {backend}: {('forward', 'backward')[place]} holds {held} transient bytes in a workspace of "
                f"{4 * least}"
            )
