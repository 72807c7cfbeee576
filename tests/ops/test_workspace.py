"""`workspace`: one setting for all ops, and the promise that it makes about the peak of a step.

In each pass of an op memory rises by at most: what is saved for backward, the op's result or gradients, and the workspace. Not
counted: float32 sums of the gradients of 16-bit parameters over chunks, and what each token has a number of.
"""

import contextlib
import functools
import inspect
import math
import sys
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from support.cases import DTYPES, MODES, SEED, assert_same, assert_same_within_rounding, gradients, output_gradient
from torch._dynamo.backends.common import aot_autograd

import ckptkern
from ckptkern.memory import peak_memory, saved_tensors
from ckptkern.ops.dispatch import choices as _choices

_branch = sys.modules["ckptkern.ops.mlp.branch"]  # ckptkern.ops.mlp is the function
Tensors = dict[str, torch.Tensor]
LEAD = (17, 41)  # 697 tokens: six units of 128, of which the last has 57
TOKENS = math.prod(LEAD)
D, HIDDEN, CLASSES, EXPERTS, TOP_K, HEADS = 24, 88, 2048, 5, 2, 4
WITH_WORKSPACE = [
    name for name in ckptkern.ops.__all__
    if inspect.isfunction(op := getattr(ckptkern, name)) and "workspace" in inspect.signature(op).parameters
]  # fmt: skip


# -- what is measured --------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """shapes: of x and the parameters; call(tensors, recompute=, workspace=) -> y. numbers: bytes of what each token has one
    number of, which no chunk bounds."""

    shapes: dict[str, tuple[int, ...]]
    call: Callable[..., torch.Tensor]
    numbers: int = 0

    def make(self, dtype: torch.dtype) -> Tensors:
        generator = torch.Generator().manual_seed(SEED)
        found = {}
        for name, shape in self.shapes.items():
            scale = 1.0 if len(shape) == 1 or name in ("x", "s") else shape[-1] ** -0.5
            found[name] = (torch.randn(shape, generator=generator) * scale).to(dtype).requires_grad_()
        return found


def transient(case: Case, tensors: Tensors, mode: str, workspace: int) -> tuple[int, int]:
    """How far forward rises above what it saves and gives, and backward above the gradients."""
    torch.manual_seed(SEED)
    with peak_memory("cpu") as forward, saved_tensors(list(tensors.values())) as saved:
        y = case.call(tensors, recompute=mode, workspace=workspace)
    dy = output_gradient(y)
    with peak_memory("cpu") as backward:
        grads = torch.autograd.grad(y, list(tensors.values()), dy)
    numbers = case.numbers * TOKENS
    # x's in its dtype; of parameters the sums, those of vectors beside the part that is added
    sizes = [
        g.nbytes if name == "x" or g.dtype == torch.float64 else 4 * g.numel() * (2 if g.dim() == 1 else 1)
        for name, g in zip(tensors, grads, strict=True)
    ]
    return forward.bytes - saved.bytes - y.nbytes - numbers, backward.bytes - sum(sizes) - numbers


def stack(t, **options):
    return ckptkern.linear_stack(
        t["x"], [t["w0"], t["w1"]], [t["b0"], t["b1"]], options.pop("activation", "gelu"), **options
    )


def mlp(t, **options):
    return ckptkern.mlp(t["x"], t["up"], t["up_bias"], t["down"], t["down_bias"], **options)


def gated(t, **options):
    return ckptkern.gated_mlp(t["x"], t["gate"], t["up"], t["down"], **options)


def block(t, **options):
    lora = {"up": ckptkern.LoRA(t["a"], t["b"], 0.5, 0.1)} if "a" in t else None
    own = ("norm_weight", "norm_scale", "norm_shift", "post_norm_weight", "layer_scale", "gate_weight")
    own = {name: t[name] for name in own if name in t}
    return ckptkern.mlp_block(t["x"], t["up"], None, t["down"], None, lora=lora, **own, **options)


def routing(tokens):
    return torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)]).view(*LEAD, TOP_K)


def moe(t, **options):
    return ckptkern.moe_mlp(t["x"], routing(TOKENS), t["s"], t["w"], t["wd"], **options)


def moe_layer(t, **options):
    shared = {f"shared_{name}_weight": t[name] for name in ("gate", "up", "down")} if "gate" in t else {}
    y, logits = ckptkern.moe_block(
        t["x"], t["router"], t["w"], t["wd"], top_k=TOP_K, **shared,
        **{name: t[name] for name in ("norm_weight", "shared_expert_gate") if name in t}, **options,
    )  # fmt: skip
    return torch.cat((y.view(-1), logits.view(-1)))


def grouped(t, **options):
    offs = torch.tensor([0, 300, 300, 301, TOKENS - 5])
    return ckptkern.grouped_gated_mlp(t["x"].view(TOKENS, D), offs, t["w"], t["wd"], **options)


def head(t, **options):
    target = torch.arange(TOKENS).view(LEAD) % CLASSES
    return ckptkern.linear_cross_entropy(t["x"], t["head"], target, reduction="none", **options)


def selected(t, **options):
    tokens = torch.arange(TOKENS).view(LEAD) * 7 % CLASSES
    return ckptkern.selected_log_probs(t["x"], t["head"], tokens, temperature=0.7, **options)


def distilled(t, recompute=None, **options):
    """Into itself."""
    return ckptkern.linear_distillation(t["x"], t["head"], t["x"], t["head"], reduction="none", **options)


def distilled_of_k(t, recompute=None, **options):
    tokens = torch.arange(TOKENS * TOP_K).view(*LEAD, TOP_K) * 7 % CLASSES
    log_probs = torch.full(tokens.shape, -2.0)
    return ckptkern.linear_topk_distillation(t["x"], t["head"], log_probs, tokens, reduction="none", **options)


def attention_of(t):
    return dict(qkv_weight=t["qkv"], qkv_bias=None, out_weight=t["out"], out_bias=None, num_heads=HEADS, is_causal=True)


def attention(t, **options):
    own = {name: t[name] for name in VECTORS if name in t}
    return ckptkern.attention_block(t["x"], **attention_of(t), **own, **options)


def latent(t, **options):
    own = {name: one for name, one in t.items() if name.startswith(("q_a", "norm", "kv_a_norm"))}
    return ckptkern.latent_attention_block(
        t["x"], t["q"], t["kv_a"], t["kv_b"], t["out"], HEADS, rotary=100.0, rotary_interleaved=True, is_causal=True,
        **own, **options,
    )  # fmt: skip


def latent_layer(t, **options):
    attention = dict(
        q_weight=t["q"],
        kv_a_weight=t["kv_a"],
        kv_b_weight=t["kv_b"],
        out_weight=t["out"],
        num_heads=HEADS,
        is_causal=True,
    )
    mlp_arguments = dict(up_weight=t["up"], up_bias=None, down_weight=t["down"], down_bias=None)
    return ckptkern.transformer_layer(t["x"], attention, mlp_arguments, **options)


def layer(t, **options):
    mlp_arguments = dict(up_weight=t["up"], up_bias=None, down_weight=t["down"], down_bias=None)
    return ckptkern.transformer_layer(t["x"], attention_of(t), mlp_arguments, **options)


X = {"x": (*LEAD, D)}
PLAIN = {"up": (HIDDEN, D), "down": (D, HIDDEN)}
BIASES = {"up_bias": (HIDDEN,), "down_bias": (D,)}
GATED = X | {"gate": (HIDDEN, D)} | PLAIN
STACK = X | {"w0": (HIDDEN, D), "b0": (HIDDEN,), "w1": (D, HIDDEN), "b1": (D,)}
MATRICES = {"w": (EXPERTS, 2 * HIDDEN, D), "wd": (EXPERTS, D, HIDDEN)}
VECTORS = dict.fromkeys(("norm_scale", "norm_shift", "layer_scale"), (LEAD[0], D))
ATTENTION = {"qkv": (3 * D, D), "out": (D, D)}
LATENT = {"q": (HEADS * 16, D), "kv_a": (12 + 4, D), "kv_b": (HEADS * 24, 12), "out": (D, HEADS * 12)}
of = functools.partial
CASES = {
    "linear_stack": Case(STACK, stack),
    "linear_stack, relu": Case(STACK, of(stack, activation="relu")),
    "mlp": Case(X | PLAIN | BIASES, of(mlp, activation="gelu")),
    "mlp, relu2 and dropout": Case(X | PLAIN | BIASES, of(mlp, activation="relu2", dropout_p=0.1)),
    "gated_mlp": Case(GATED, of(gated, activation="silu")),
    "gated_mlp, dropout": Case(GATED, of(gated, activation="gelu_tanh", dropout_p=0.1)),
    "mlp_block": Case(X | PLAIN | {"norm_weight": (D,)}, of(block, norm="rms")),
    "mlp_block, gated": Case(
        X | PLAIN | {"norm_weight": (D,), "gate_weight": (HIDDEN, D)}, of(block, norm="layer", activation="silu")
    ),
    "mlp_block, post-norm, everything dropped": Case(
        X | PLAIN | {"norm_weight": (D,), "post_norm_weight": (D,), "layer_scale": (D,)},
        of(block, norm="layer", norm_first=False, post_norm="rms", dropout_p=0.1, resid_dropout_p=0.1, drop_path_p=0.1),
    ),
    "mlp_block, adaptive": Case(X | PLAIN | VECTORS, of(block, norm="layer")),
    "attention_block, adaptive": Case(X | ATTENTION | VECTORS, of(attention, norm="rms")),
    "mlp_block, LoRA": Case(X | PLAIN | {"a": (4, D), "b": (HIDDEN, 4), "norm_weight": (D,)}, of(block, norm="rms")),
    "moe_mlp": Case(X | {"s": (*LEAD, TOP_K)} | MATRICES, moe, 32 * TOP_K),
    "moe_block": Case(
        X | {"router": (EXPERTS, D), "norm_weight": (D,)} | MATRICES, of(moe_layer, norm="rms"), 64 * TOP_K
    ),
    "moe_block, shared expert": Case(
        GATED | {"router": (EXPERTS, D), "norm_weight": (D,), "shared_expert_gate": (1, D)} | MATRICES,
        of(
            moe_layer,
            norm="layer",
            norm_first=False,
            scoring="sigmoid",
            router_dtype=torch.float32,
            resid_dropout_p=0.1,
        ),
        64 * TOP_K,
    ),
    "grouped_gated_mlp": Case(X | MATRICES, grouped, 64),
    "linear_cross_entropy": Case(X | {"head": (CLASSES, D)}, head, 64),
    "selected_log_probs": Case(X | {"head": (CLASSES, D)}, selected, 64),
    "linear_distillation": Case(X | {"head": (CLASSES, D)}, of(distilled, beta=0.5), 64),
    "linear_topk_distillation": Case(X | {"head": (CLASSES, D)}, distilled_of_k, 64 * TOP_K),
    "linear_cross_entropy, softcap": Case(X | {"head": (CLASSES, D)}, of(head, softcap=3.0), 64),
    "attention_block": Case(X | ATTENTION, attention),
    "attention_block, dropout": Case(X | ATTENTION, of(attention, dropout_p=0.1)),
    "latent_attention_block": Case(X | LATENT | {"kv_a_norm_weight": (12,)}, latent),
    "latent_attention_block, dropout": Case(
        X | LATENT | {"q_a_weight": (10, D), "q": (HEADS * 16, 10), "norm_weight": (D,)},
        of(latent, norm="rms", dropout_p=0.1, residual=True, resid_dropout_p=0.1),
    ),
    "transformer_layer": Case(X | ATTENTION | PLAIN, layer),
    "transformer_layer, latents": Case(X | LATENT | PLAIN, latent_layer),
}


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_what_is_saved_and_the_workspace(name, mode, dtype, monkeypatch):
    """With a workspace of nearly two and nearly three times what the least chunk takes: a row's bytes are not underestimated.

    Without oneDNN, which takes blocks of its own on processors that multiply bfloat16: up to 200 KB, for any number of rows.
    """
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    case = CASES[name]
    tensors = case.make(dtype)
    least, whole = (transient(case, tensors, mode, workspace) for workspace in (1, 2**40))
    for workspace in (int(1.95 * max(least)), int(2.9 * max(least))):
        found = transient(case, tensors, mode, workspace)
        assert max(found) <= workspace, f"forward and backward: {found}"
    for one, all_at_once in zip(least, whole, strict=True):
        assert one < 0.75 * all_at_once or all_at_once < 0.6 * max(whole), "a pass that takes no chunks"


# -- one setting -------------------------------------------------------------------------------------------------------


def test_the_cases_are_of_all_ops_with_a_workspace():
    of_its_own = {"scaled_dot_product_attention"}  # test_query_blocks.py
    assert {name.partition(",")[0] for name in CASES} | of_its_own >= set(WITH_WORKSPACE)
    assert len(WITH_WORKSPACE) >= 8


def workspaces(run: Callable[[], object]) -> list[int]:
    """Those that were chosen while `run` ran."""
    seen = []
    choose = _choices.choose_workspace

    def spy(*args, **given):
        seen.append(choose(*args, **given))
        return seen[-1]

    with contextlib.ExitStack() as stack:
        for module in list(sys.modules.values()):
            if getattr(module, "choose_workspace", None) is choose:
                stack.enter_context(mock.patch.object(module, "choose_workspace", spy))
        run()
    return seen


@pytest.mark.parametrize("name", CASES)
def test_the_setting_is_that_of_an_op_without_its_own(name):
    case = CASES[name]
    tensors = case.make(torch.float32)

    def chosen(workspace):
        return set(workspaces(lambda: case.call(tensors, recompute="full", workspace=workspace)))

    (default,) = chosen(None)
    with ckptkern.workspace("1MiB"):
        assert chosen(None) == {2**20}
        assert chosen(12345) == {12345}
        with ckptkern.workspace(2**21):
            assert chosen(None) == {2**21}
        with ckptkern.workspace(None):
            assert chosen(None) == {default}
        assert chosen(None) == {2**20}
    assert chosen(None) == {default}


def test_a_call_sets_the_workspace_of_the_process():
    case = CASES["mlp"]
    tensors = case.make(torch.float32)

    def chosen():
        return workspaces(lambda: case.call(tensors, recompute="full", workspace=None))

    try:
        ckptkern.workspace("3MiB")
        assert chosen() == [3 * 2**20]
        with pytest.raises(KeyError), ckptkern.workspace(7):
            raise KeyError
        assert chosen() == [3 * 2**20]
        with pytest.raises(ValueError, match=r"workspace: workspace must be .* or a string like '64MiB', not 'much'"):
            ckptkern.workspace("much")
        assert chosen() == [3 * 2**20]
    finally:
        ckptkern.workspace(None)
    assert chosen() == [_choices.WORKSPACE]


def test_compiled_code_is_of_the_workspace():
    """Another workspace compiles again, one that was seen does not, and none is a symbol."""
    torch._dynamo.reset()
    case, backward = CASES["mlp"], _branch.MLPBranch.backward_rows
    tensors, graphs, taken = case.make(torch.float32), [], []

    def noted(self, *args):
        taken.append(self.o.workspace)
        return backward(self, *args)

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    run = of(case.call, recompute="full", workspace=None)
    run = torch.compile(
        run, backend=aot_autograd(fw_compiler=count, bw_compiler=lambda graph, _: graph), fullgraph=True
    )
    with mock.patch.object(_branch.MLPBranch, "backward_rows", noted):
        for size, graphs_of in ((2**17, 1), (2**18, 2), (2**19, 3), ("128KiB", 3), (None, 4)):
            with ckptkern.workspace(size):
                run(tensors).sum().backward()
            assert len(graphs) == graphs_of
            wanted = _choices.WORKSPACE if size is None else _choices.parse_bytes("", size)
            assert set(taken) - {None} == {wanted}  # None: where shapes alone are computed
            taken.clear()
    torch._dynamo.reset()


NN = ckptkern.nn
INPUT = torch.randn(2, 5, 16)
MODULES = {
    "MLP": (lambda **own: NN.MLP(16, 32, **own), (INPUT,)),
    "GatedMLP": (lambda **own: NN.GatedMLP(16, 32, **own), (INPUT,)),
    "LinearStack": (lambda **own: NN.LinearStack([16, 80, 16], **own), (INPUT,)),
    "Experts": (
        lambda **own: NN.Experts(3, 16, 32, **own), (INPUT, torch.zeros(2, 5, 1, dtype=torch.long), torch.ones(2, 5, 1)),
    ),
    "TransformerEncoderLayer": (lambda **own: NN.TransformerEncoderLayer(16, 2, 32, batch_first=True, **own), (INPUT,)),
    "TransformerDecoderLayer": (
        lambda **own: NN.TransformerDecoderLayer(16, 2, 32, batch_first=True, **own), (INPUT, torch.randn(2, 3, 16)),
    ),
    "LlamaDecoderLayer": (lambda **own: NN.LlamaDecoderLayer(16, 2, 1, 32, **own), (INPUT,)),
    "LinearCrossEntropyLoss": (
        lambda **own: NN.LinearCrossEntropyLoss(16, 50, **own), (INPUT, torch.zeros(2, 5, dtype=torch.long)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_the_attribute_of_a_module(name):
    build, inputs = MODULES[name]
    module = build(workspace="1MiB")
    assert module.workspace == "1MiB"
    assert "workspace='1MiB'" in module.extra_repr()

    def chosen():
        return {one for one in workspaces(lambda: module(*inputs)) if one is not None}

    assert chosen() == {2**20}
    module.workspace = 2**21
    assert chosen() == {2**21}
    module.workspace = None
    with ckptkern.workspace(2**22):
        assert chosen() == {2**22}
    with pytest.raises(ValueError, match=r"workspace must be .*, not 'much'"):
        build(workspace="much")


@pytest.mark.parametrize(
    "replacement",
    [
        lambda **own: NN.TransformerEncoderLayer.from_torch(torch.nn.TransformerEncoderLayer(16, 2), **own),
        lambda **own: NN.TransformerDecoderLayer.from_torch(torch.nn.TransformerDecoderLayer(16, 2), **own),
        lambda **own: NN.Experts.from_torch(NN.Experts(3, 16, 32), "silu", **own),
    ],
)
def test_the_attribute_of_a_drop_in_replacement(replacement):
    assert replacement(workspace="1MiB").workspace == "1MiB"
    assert replacement().workspace is None
    with pytest.raises(ValueError, match=r"workspace must be .*, not 'much'"):
        replacement(workspace="much")


# -- chunks ------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_chunks_change_no_mask_and_no_gradient(name, mode):
    case = CASES[name]
    tensors = case.make(torch.float64)

    def run(workspace):
        def call(t):
            torch.manual_seed(SEED)
            return case.call(t, recompute=mode, workspace=workspace)

        return gradients(call, tensors)

    assert_same_within_rounding(run(1), run(2**40))


WITHOUT_ATTENTION = [name for name in CASES if name.startswith(("linear_stack", "mlp", "gated", "moe", "grouped"))]


@pytest.mark.parametrize("name", WITHOUT_ATTENTION)
def test_a_recompute_has_the_bits_of_forward(name):
    """Forward takes the chunks of backward, so that a library's matmuls have the same shapes. So it does in attention, but
    there another mode may take other chunks."""
    case = CASES[name]
    tensors = case.make(torch.float32)

    def run(mode):
        def call(t):
            torch.manual_seed(SEED)
            return case.call(t, recompute=mode, workspace=1)

        return gradients(call, tensors)

    full = run("full")
    for mode in ("selective", "none"):
        assert_same(run(mode), full)
