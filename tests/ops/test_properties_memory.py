"""What the ops save for backward, and how far memory rises beside that in both passes."""

import math

import pytest
import torch
from support import catalog
from support.cases import Tensors, output_gradient
from support.catalog import Entry, Sizes
from support.properties import (
    HEADS,
    OF_OPS,
    REFUSALS,
    Case,
    alone,
    each,
    each_pair,
    in_pairs,
    mode_in_turn,
    sizes_of,
    smallest_chunks,
)
from triton.runtime.interpreter import InterpretedFunction

import ckptkern
from ckptkern.memory import memory_timeline, peak_memory, saved_tensors

# -- what is saved -----------------------------------------------------------------------------------------------------
# (elements in the compute dtype, other bytes) for each token, besides x and what is given, such as parameters and masks.


def width(arguments: dict, *names: str) -> int:
    """The rows of weights, which may be of an expert or three in a list."""
    shapes = catalog.input_shapes(arguments)
    return sum(shape[-2] for name, shape in shapes.items() if name.partition(".")[0] in names)


def of_hidden(hidden: int, gated: bool, activation: str, mode: str) -> int:
    """g, u and h of a gated MLP, else z and h; relu's h stands for z."""
    tensors = {"none": 3 if gated else 2, "selective": 2 if gated else 1, "full": 0}[mode]
    return hidden * (min(tensors, 1) if activation == "relu" and not gated else tensors)


def of_linear_act(a: dict, mode: str) -> tuple[float, float]:
    out = width(a, "weight")
    if mode == "full" or a.get("activation") == "identity":
        return 0, 0
    return (0, -(-out // 8)) if mode == "selective" and "activation" not in a else (out, 0)


def of_linear_stack(a: dict, mode: str) -> tuple[float, float]:
    if mode == "full":
        return 0, 0 if "activation" in a else -(-a["weights"][-1].shape[0] // 8)
    return width(a, "weights"), 0


def of_mlp(a: dict, mode: str) -> tuple[float, float]:
    return of_hidden(width(a, "fc1_weight", "up_weight"), "gate_weight" in a, a.get("activation", "gelu"), mode), 0


def of_attention(a: dict, mode: str, lse: int) -> tuple[float, float]:
    """o and lse, and at "none" q, k, v and the gate."""
    heads, core = a["num_heads"], a["out_weight"].shape[1]
    if mode == "full":
        return 0, 0
    if mode == "selective":
        return core, lse * heads
    if "kv_a_weight" in a:
        return core + width(a, "q_a_weight", "kv_a_weight", "q_weight", "kv_b_weight"), lse * heads
    keys = 2 * core // heads * a.get("num_kv_heads", heads)
    if "key_value" in a:
        keys = keys * a["key_value"].shape[-2] / a["x"].shape[-2]
    gate = core if "gate_in_query" in a else width(a, "gate_weight")
    return core + core + keys + gate, lse * heads


def of_moe(a: dict, mode: str) -> tuple[float, float]:
    """g and u of a token's experts and, for moe_block, its choice, as int16."""
    k = a["top_k"] if "top_k" in a else a["top_k_index"].shape[-1]
    shared = of_hidden(width(a, "shared_up_weight"), "shared_gate_weight" in a, a.get("activation", "silu"), mode)
    return shared + (0 if mode == "full" else k * width(a, "gate_up_weight")), 2 * k * ("top_k" in a)


def states(a: dict) -> int:
    """Bytes of dropout's states, 16 each; the updates of a sublayer share one."""
    if not a.get("training", True):
        return 0
    drops = [a.get(name, 0) for name in ("dropout_p", "resid_dropout_p", "drop_path_p")]
    return 16 * (sum(p > 0 for p in drops) + any(adapter.dropout_p for adapter in a.get("lora", {}).values()))


def of_layer(a: dict, mode: str, lse: int) -> tuple[float, float, int, int]:
    """The sublayers', of which "selective" recomputes the MLP, and at "none" what passes between them."""
    attentions = [a[name] for name in ("attention_arguments", "cross_attention_arguments") if name in a]
    feed, training = a["mlp_arguments"], {"training": a.get("training", True)}
    inner = of_moe if "router_weight" in feed else of_mlp
    parts = [of_attention(attention | {"x": a["x"]}, mode, lse) for attention in attentions]
    parts.append(inner(feed, "none" if mode == "none" else "full"))
    between = a["x"].shape[-1] * len(attentions) if mode == "none" and "parallel" not in a else 0
    drawn = sum(states(attention | training) for attention in (*attentions, feed))
    elements, others = map(sum, zip(*parts, strict=True))
    return elements, others, drawn, between


def expected_bytes(case: Case, dtype: torch.dtype, x_itemsize: int) -> int:
    """x_itemsize: of x and of what passes between sublayers, which keep their dtype under autocast."""
    a, name, mode, itemsize = case.arguments, case.entry.function.__name__, case.mode, dtype.itemsize
    lse, between, drawn = max(itemsize, 4), 0, states(a)
    if "query" in a:
        *rows, D = a["query"].shape
        return math.prod(rows) * (D * itemsize + lse) + drawn
    if name == "transformer_layer":
        elements, others, drawn, between = of_layer(a, mode, lse)
    elif "num_heads" in a:
        elements, others = of_attention(a, mode, lse)
    else:
        of = {"linear_act": of_linear_act, "linear_stack": of_linear_stack, "moe_mlp": of_moe, "moe_block": of_moe}
        elements, others = of.get(name, of_mlp)(a, mode)
    *tokens, d = a["x"].shape
    return round(math.prod(tokens) * (elements * itemsize + others + (d + between) * x_itemsize)) + drawn


def saved_bytes(case: Case, leaves: Tensors, *, count: tuple[str, ...] = (), **more) -> int:
    """What a call saves besides its arguments, of which those in `count` are counted, too."""
    case = case.with_()
    with saved_tensors([*case.others, *(leaf for name, leaf in leaves.items() if name not in count)]) as saved:
        case.results(leaves, **more)
    return saved.bytes


TABLES = [name for name in OF_OPS if name not in (*HEADS, "dropout", "grouped_gated_mlp")]


@pytest.mark.parametrize(("entry", "first"), each_pair(TABLES))
def test_saved_bytes_are_the_tables(entry: Entry, first: str):
    """Of every pair of options, and of each alone in every mode: in float32, bfloat16 and under autocast in turn, in chunks and
    in one."""
    precisions = ("float32", "autocast", "bfloat16") if "x" in entry.parameters else ("float32", "bfloat16")
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
    x_dtype = leaves["x"].dtype if keeps_x else dtype
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
        try:
            saved = saved_bytes(case, leaves, count=("x",), **more)
        except REFUSALS:  # test_properties.py counts these
            return
    expected = expected_bytes(case, dtype, x_dtype.itemsize)
    assert saved == expected, f"{case} in {precision} saves {saved} bytes, but its table has {expected}"


PER_TOKEN = {"linear_cross_entropy": 4, "selected_log_probs": 4, "linear_distillation": 16}  # bytes in float32


@pytest.mark.parametrize("entry", each(PER_TOKEN))
def test_saved_bytes_of_heads(entry: Entry):
    """At "full" numbers for each token, more for an entropy or a mixture of two models, whatever else is asked for; else
    logits, or gradients of a scalar loss that forward forms."""
    for options in alone(entry):
        for mode in entry.modes or ("",):
            case = Case(entry, options, mode, sizes_of(entry))
            leaves, a = case.make(), case.arguments
            saved, results = saved_bytes(case, leaves), case.results(leaves)
            formed_in_forward = mode == "none" and len(results) == 1 and not results[0].dim() and "z_loss" not in a
            tokens, V = case.sizes.tokens, case.sizes.out
            numbers = 4 * ("return_entropy" in a) + 16 * ("beta" in a)
            most = tokens * (PER_TOKEN[entry.name] + numbers) + (16 if "lora" in a else 0)
            if mode in ("none", "selective") and "lora" not in a:
                logits, formed = tokens * (V * 4 + V // 16 + 16), sum(leaf.nbytes for leaf in leaves.values())
                most += min(logits, formed) if formed_in_forward else logits
            most += tokens * 4 * 4 + 64  # of what PyTorch ops make of each token's numbers
            assert saved <= most, f"{case} saves {saved} bytes, but at most {most} are declared"


# -- the peak ----------------------------------------------------------------------------------------------------------


def bounded(entry: Entry) -> Sizes:
    """Sizes of which a workspace counts more than what is there without it."""
    if entry.name in HEADS:
        return Sizes((640,), 16, 16, 2048)
    heads = "attention_block" in entry.name or "transformer" in entry.name
    return Sizes((2, 256), 8, 64, 8, 4) if heads else Sizes((768,), 8, 64, 8)


BOUNDED = [name for name, entry in OF_OPS.items() if "workspace" in entry.parameters]
BOUNDED.remove("scaled_dot_product_attention")  # test_query_blocks.py


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("entry", each(BOUNDED))
def test_the_workspace_counts_what_a_pass_holds(entry: Entry, backend: str, monkeypatch, one_thread):
    """With room for four of the smallest chunks forward takes no fifth, and backward neither; of each option, modes in turn.

    Kernels are not run, with every second option: they are what their launchers allocate. "none" is left out: in attention it
    holds little besides the buffers of torch's own kernel, which no workspace bounds.
    """
    if backend == "triton" and not entry.op.kernels:
        return
    monkeypatch.setattr(InterpretedFunction, "run", lambda *args, **options: None)
    for i, options in enumerate(alone(entry)[:: 2 if backend == "triton" else 1]):
        modes = [mode for mode in entry.modes if mode != "none"] or [""]
        case = Case(entry, options, modes[(i + (backend == "triton")) % len(modes)], bounded(entry))
        leaves = case.make()

        def transient(workspace: int, case=case, leaves=leaves) -> tuple[int, int]:
            """How far memory rises above what stays."""
            with ckptkern.backend(backend), memory_timeline("cpu") as forward:
                y = case(leaves, workspace=workspace)
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


TOKENS, WIDTH = 2048, 64


def backward_peak(norm_first: bool = True, recompute: str = "full") -> int:
    """Bytes of a layer's backward, in a workspace with room for one head."""
    make = torch.Generator().manual_seed(0)
    shapes = dict(qkv=(3 * WIDTH, WIDTH), out=(WIDTH, WIDTH), up=(4 * WIDTH, WIDTH), down=(WIDTH, 4 * WIDTH))
    weights = {name: torch.randn(shape, generator=make).requires_grad_() for name, shape in shapes.items()}
    gains = [torch.ones(WIDTH, requires_grad=True) for _ in range(2)]
    x = torch.randn(1, TOKENS, WIDTH, generator=make, requires_grad=True)
    attention, mlp = (dict(norm="rms", norm_weight=gain, norm_first=norm_first) for gain in gains)
    for arguments, names in ((attention, ("qkv", "out")), (mlp, ("up", "down"))):
        for name in names:
            arguments |= {f"{name}_weight": weights[name], f"{name}_bias": None}
    attention |= dict(num_heads=4, is_causal=True)
    y = ckptkern.transformer_layer(x, attention, mlp, recompute=recompute, workspace=TOKENS * WIDTH * 8)
    dy = torch.ones_like(y)
    with peak_memory("cpu") as used:
        torch.autograd.grad(y, [x, *weights.values(), *gains], dy)
    return used.bytes


def test_a_norm_after_the_sublayers_holds_one_tensor_more_than_one_before():
    """The residual stream before the norm; what a sublayer's backward has read ends there."""
    after, before = backward_peak(norm_first=False), backward_peak()
    assert after - before <= 1.5 * TOKENS * WIDTH * 4, (after, before)


def test_groups_of_heads_hold_no_o_across_the_mlps_backward():
    full, selective = backward_peak(), backward_peak(recompute="selective")  # which saved o in forward
    assert full - selective <= 0.5 * TOKENS * WIDTH * 4, (full, selective)


def heads_peak(classes: int, workspace: int, **options) -> int:
    """Bytes of a head's backward."""
    x, w = (torch.randn(rows, 16, requires_grad=True) for rows in (TOKENS, classes))
    target = torch.zeros(TOKENS, dtype=torch.long)
    loss = ckptkern.linear_cross_entropy(x, w, target, recompute="full", workspace=workspace, **options)
    with peak_memory("cpu") as used:
        loss.backward()
    return used.bytes


def test_a_softcap_holds_one_chunk_of_logits_more():
    """u beside z, which is written where its gradient goes; the softcap's slope replaces u."""
    plain, capped = heads_peak(1024, 1), heads_peak(1024, 1, softcap=5.0)
    assert capped - plain <= 1.1 * TOKENS * 256 * 4, (plain, capped)


def test_a_heads_workspace_has_room_for_the_gradient_of_x():
    workspace = 512 * TOKENS * 4
    assert heads_peak(512, workspace) <= workspace
