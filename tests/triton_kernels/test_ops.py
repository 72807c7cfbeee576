"""Whole ops on the Triton backend, interpreted: what forward and backward must agree on, seen from outside.

Probes that make a hidden quantity visible, bit for bit, through the public functions alone:
    the second weight [I; 0] makes y begin with h;  dy = I makes that weight's gradient spell h, as backward recomputed it
    dh = 1 makes relu's bias gradient count the units that are alive
"""

from collections.abc import Iterator

import pytest
import torch
from support import cases
from support.cases import (
    DTYPES,
    P,
    Sizes,
    Watch,
    assert_same,
    check_against_float64,
    expected_mask,
    gradients,
    make,
    setups,
)
from support.drop_ins import pairwise
from support.kernel_cases import ACTIVATIONS_AND_DTYPES

import ckptkern
from ckptkern import state, triton_kernels
from ckptkern.ops.dispatch import choices as _choices
from ckptkern.ops.dispatch import implementations as _impls

WIDE = Sizes(hidden=66)  # too wide for the one kernel of a narrow stack
ALL = tuple(cases.ACTIVATIONS)
BIASES = r".*bias\d*"  # whose gradients are sums over rows: kernel_cases.SUMS_OF_ROWS
LAYERS = ("linear_act", "linear_stack", "mlp", "gated_mlp")


@pytest.fixture(autouse=True)
def _triton() -> Iterator[None]:
    with ckptkern.backend("triton"):
        yield


def sizes_of(setup):
    """A stack's usual sizes are narrow: one kernel at "full", which the modes that save tensors do not have."""
    return WIDE if setup.op.name == "linear_stack" else Sizes()


@pytest.mark.parametrize("setup", setups(modes=("full",), dropout=(P,)))
def test_the_kernels_run(setup):
    with Watch() as watch:
        gradients(setup.fused, make(setup))
    assert sum(watch.strings.count(impl) for impl in _impls.OF_KERNELS) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("setup", setups(("relu", "gelu"), ("full",), (P,)))
def test_gradients_are_as_exact_as_torchs(setup, dtype, device):
    """At one mode: all give the same bits."""
    check_against_float64(setup, make(setup, sizes_of(setup), dtype, device=device))


@pytest.mark.parametrize("setup", setups(("relu",), dropout=(0.5,)))
def test_saved_tensors_may_come_back_with_other_strides(setup):
    """The bits of a narrow stack's mask were read as if rows were contiguous.

    Of whole numbers, scaled by two in dropout: torch.mm of a transposed operand promises no bits of other numbers.
    """
    for sizes in {sizes_of(setup), Sizes()}:
        tensors = cases.whole_numbers(make(setup, sizes))
        dy = cases.whole_numbers({"dy": cases.output_gradient(setup.fused(tensors))})["dy"]
        transposed = cases.with_saved_transposed(setup.fused)
        assert_same(gradients(transposed, tensors, dy), gradients(setup.fused, tensors, dy))


@pytest.mark.parametrize("setup", setups(ALL, ("full",), ops=["linear_stack"]))
def test_narrow_stack_is_as_exact_as_torchs(setup, device):
    check_against_float64(setup, make(setup, dtype=torch.bfloat16, device=device))


UNALIGNED = {
    "no tokens": Sizes((0,)),
    "one dimension": Sizes(()),
    "ones": Sizes((1, 1), 1, 1, 1),
    "no features": Sizes((3,), 0),
    "no hidden": Sizes((3,), hidden=0),
    "no output": Sizes((3,), out=0),
}


# Every op at every size, with and without biases in turn.
UNALIGNED_CASES = [
    pytest.param(*setup.values, sizes, (i + j) % 2 == 0, id=f"{setup.id}-{name}")
    for i, setup in enumerate(setups(("relu", "silu"), ("full",), dropout=(P,)))
    for j, (name, sizes) in enumerate(UNALIGNED.items())
]


@pytest.mark.sampled
@pytest.mark.parametrize(("setup", "sizes", "bias"), UNALIGNED_CASES)
def test_unaligned_and_empty_shapes(setup, sizes, bias):
    """Empty batches, sizes of one, features of zero (attention-gym#260, mamba#387)."""
    check_against_float64(setup, make(setup, sizes, bias=bias))


@pytest.mark.parametrize("setup", setups(("relu", "gelu"), ("none", "full"), dropout=(P,)))
def test_expanded_output_gradient(setup, device):
    """.sum() sends strides (0, 0)."""
    tensors = make(setup, device=device)
    y = setup.fused(tensors)
    dy = y.new_ones(()).expand(y.shape)
    assert_same(gradients(setup.fused, tensors, dy), gradients(setup.fused, tensors, dy.contiguous()), BIASES)


@pytest.mark.parametrize(
    "setup",
    [
        *setups(("relu2",), ("full",), (0.5,), ["linear_act", "mlp", "gated_mlp", "dropout"]),
        *setups(("relu",), ("full",), ops=["linear_stack"]),  # three squares would pass 2^24, where whole numbers end
    ],
)
def test_views_of_one_tensor(setup):
    """All inputs cut out of one storage, each at its own odd offset and stride, biases included.

    Of whole numbers: torch.mm of an operand at another offset promises no bits of other numbers.
    """
    dense = cases.whole_numbers(make(setup))
    dy = cases.whole_numbers({"dy": cases.output_gradient(setup.fused(dense))})["dy"]
    storage = torch.randn(sum(t.shape[-1] for t in dense.values()) + 3, 200)
    views, start = {}, 3
    for name, t in dense.items():
        length = t.shape[-1]
        if t.dim() == 1:
            view = storage[start : start + length, 7]
        else:
            rows = t.shape[:-1].numel()
            view = storage[start : start + length, 9 : 9 + rows].t()
        view.copy_(t.detach().reshape(view.shape))
        views[name] = view.view(t.shape).detach().requires_grad_() if t.dim() < 3 else view.detach().requires_grad_()
        start += length
    x = dense["x"].detach().reshape(views["x"].shape).requires_grad_()
    dy = dy.reshape(*x.shape[:-1], dy.shape[-1])
    assert_same(gradients(setup.fused, views, dy), gradients(setup.fused, {**dense, "x": x}, dy), BIASES)


# --- one result in every mode and in every chunking


# One activation for each set of saved tensors in bf16, whose rounding shows most, and one in each other dtype.
MODES_AND_DTYPES = [
    pytest.param(*setup.values, dtype, id=f"{setup.id}-{dtype}")
    for activation, dtype in (
        *((activation, torch.bfloat16) for activation in cases.SAVED_SETS), ("relu", torch.float32), ("gelu", torch.float16)
    )
    for setup in setups((activation,), ("none",), (P,), LAYERS)
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize(("setup", "dtype"), MODES_AND_DTYPES)
def test_every_mode_gives_the_same_bits(setup, dtype, device):
    """y and all gradients are those of mode "none", which recomputes nothing."""
    tensors = make(setup, sizes_of(setup), dtype, device=device)
    expected = gradients(setup.fused, tensors)
    for mode in ("selective", "full"):
        assert_same(gradients(setup.with_(recompute=mode).fused, tensors), expected, BIASES)


ONE_CHUNK, MANY_CHUNKS = None, 1  # bytes of workspace: at least 128 rows are taken at a time


def gated(x, w1, b1, w2, b2, *args, **options):
    """gated_mlp with mlp's arguments; the up projection is another weight of the same sizes."""
    up = w1.detach().flip(0)
    return ckptkern.gated_mlp(x, w1, up, w2, *args, gate_bias=b1, down_bias=b2, **options)


def spelling(hidden, rows, like):
    """[I; 0] [rows, hidden]: y starts with h, and dy = I gives this weight the gradient h [rows, hidden]."""
    return torch.eye(rows, hidden).to(like).requires_grad_()


@pytest.mark.parametrize(
    "case", pairwise(op=(ckptkern.mlp, gated), chunks=(False, True), kind=tuple(ACTIVATIONS_AND_DTYPES))
)
def test_hidden_layer_is_recomputed_bitwise(case, device):
    """Forward's h and backward's have the same bits, dropout included, in every dtype and chunk."""
    op, (activation, dtype), workspace = case["op"], case["kind"], MANY_CHUNKS if case["chunks"] else ONE_CHUNK
    rows, features, hidden = 40 if workspace is ONE_CHUNK else 140, 9, 24
    given = torch.randn(rows, features), torch.randn(hidden, features) / 3, torch.randn(hidden)
    x, w1, b1 = (t.to(device, dtype) for t in given)
    w2 = spelling(hidden, rows, x)
    y = op(x, w1, b1, w2, None, activation, P, workspace=workspace)
    y.backward(torch.eye(rows).to(x))
    h = y[:, :hidden]
    assert 0.5 < (h != 0).double().mean() / (1 - P) * (2 if "relu" in activation else 1) < 2
    assert torch.equal(w2.grad, h)


@pytest.mark.parametrize(
    ("rows", "activation", "dtype"),
    [
        *((40, *each) for each in ACTIVATIONS_AND_DTYPES),
        *((140, *each) for each in ACTIVATIONS_AND_DTYPES if each[0] == "gelu"),
    ],
    ids=lambda one: {140: "wide", 40: "narrow"}.get(one, str(one)),
)
def test_chain_is_recomputed_bitwise(rows, activation, dtype, device):
    """The last layer's weight gradient spells the h that backward recomputed; y of the chain without it is h.

    The last weight is 0 and its bias a point where act' is exactly 1. The wide chain runs layer by layer in two chunks,
    the narrow one in one kernel, padded to 64 features: so is the chain that gives h.
    """
    features, hidden = 9, 24
    slope_is_one = {"relu": 1.0, "identity": 1.0, "relu2": 0.5}.get(activation, 30.0)
    x = torch.randn(rows, features).to(device, dtype)
    w1, b1 = (torch.randn(hidden, features) / 3).to(x), torch.randn(hidden).to(x)
    w2, b2 = x.new_zeros(rows, hidden), x.new_zeros(rows)
    w2[:hidden], b2[:hidden] = torch.randn(hidden, hidden) / 5, torch.randn(hidden)
    h = ckptkern.linear_stack(x, [w1, w2], [b1, b2], activation)[:, :hidden]
    last = x.new_zeros(rows, hidden).requires_grad_()
    bias = x.new_full((rows,), slope_is_one)
    chain = [w1, w2[:hidden], last], [b1, b2[:hidden], bias]
    y = ckptkern.linear_stack(x, *chain, activation, workspace=MANY_CHUNKS)
    y.backward(torch.eye(rows).to(x))
    assert torch.equal(last.grad, h)


def has_chunks(case: dict) -> bool:
    return case["op"] != "linear_act" or not case["chunks"]


@pytest.mark.parametrize(
    "case",
    pairwise(has_chunks, op=("mlp", "gated_mlp", "linear_stack", "linear_act"), chunks=(False, True), dtype=DTYPES),
)
def test_bias_gradient_counts_the_live_units(case, device):
    """db under dh = 1 is the column sum of (h > 0), with dropout of one sublayer twice that, exactly; h is read from y."""
    op, dtype, workspace = case["op"], case["dtype"], MANY_CHUNKS if case["chunks"] else ONE_CHUNK
    rows, features, hidden = 140, 9, 24
    x, w1 = torch.randn(rows, features).to(device, dtype), torch.randn(hidden, features).to(device, dtype)
    b1 = torch.randn(hidden).to(x).requires_grad_()
    w2, ones = torch.eye(rows, hidden).to(x), x.new_ones(rows)
    weight, options = 1, {"workspace": workspace}
    if op == "mlp":
        weight, y = 2, ckptkern.mlp(x, w1, b1, w2, None, "relu", 0.5, **options)
    elif op == "gated_mlp":  # an up projection of 0 with bias 1
        biases = {"gate_bias": b1, "up_bias": ones[:hidden]}
        weight, y = 2, ckptkern.gated_mlp(x, w1, torch.zeros_like(w1), w2, "relu", 0.5, **biases, **options)
    elif op == "linear_stack":  # a bias of 1 keeps the last layer alive
        y = ckptkern.linear_stack(x, [w1, w2], [b1, ones], "relu", **options)
    else:
        y = ckptkern.linear_act(x, w1, b1, "relu", recompute="full")
    h = ckptkern.linear_act(x, w1, b1, "relu") if op == "linear_stack" else y[:, :hidden]
    alive = h > 0
    y.backward((torch.arange(y.shape[1]) < hidden).to(y).expand(y.shape))
    assert torch.equal(b1.grad, (weight * alive.sum(0)).to(dtype))
    assert alive.sum(0).min() > 0


CHUNKED = setups(("gelu",), ("full",), (P,), ["mlp", "gated_mlp", "linear_stack"])


@pytest.mark.parametrize("setup", CHUNKED)
def test_chunks_change_only_the_order_of_a_sum(setup, device):
    """y and dx keep their bits; sums over tokens are in float32, rounded once: no error is added."""
    sizes = Sizes((140,), hidden=66 if setup.op.name == "linear_stack" else 20)
    tensors = make(setup, sizes, torch.bfloat16, device=device)
    one, many = (gradients(setup.with_(workspace=workspace).fused, tensors) for workspace in (ONE_CHUNK, MANY_CHUNKS))
    exact = gradients(setup.unfused, cases.clone(tensors, torch.float64), cases.output_gradient(one["y"]).double())
    for name, reference in exact.items():
        if name in ("y", "x"):
            assert torch.equal(many[name], one[name]), name
        else:
            errors = [(run[name].double() - reference).norm() / reference.norm() for run in (one, many)]
            assert errors[1] <= 1.05 * errors[0], (name, errors)


@pytest.mark.parametrize("setup", setups(("gelu",), ("none",), (P,), ["mlp", "gated_mlp"]))
def test_both_implementations_give_the_same_bits(setup, monkeypatch, device):
    """On `dual` one kernel forms all matmuls of a tile; on `triton` z (g and u) is formed first. One result.

    In two chunks, so that the second samples its masks from its own first row.
    """
    one_kernel = {"mlp": "mlp_bwd", "gated_mlp": "gated_bwd"}[setup.op.name]
    calls = []
    launcher = getattr(triton_kernels, one_kernel)
    monkeypatch.setattr(
        triton_kernels, one_kernel, lambda *args, **kw: calls.append(one_kernel) or launcher(*args, **kw)
    )
    tensors = make(setup, Sizes((140,), 96, 8, 5), torch.bfloat16, device=device)
    setup = setup.with_(workspace=MANY_CHUNKS)
    saved = gradients(setup.fused, tensors)
    for impl, expected in (("triton", []), ("dual", [one_kernel])):
        with _choices.forced_impl(impl):
            results = gradients(setup.with_(recompute="full").fused, tensors)
        assert calls == 2 * expected
        assert_same(results, saved, BIASES)


# --- masks


@pytest.mark.parametrize("workspace", [ONE_CHUNK, MANY_CHUNKS], ids=["one chunk", "chunks"])
@pytest.mark.parametrize(
    "setup", setups(("identity",), ("none", "selective", "full"), (P,), ["mlp", "gated_mlp", "dropout"])
)
def test_one_mask_in_forward_and_backward_and_both_backends(setup, workspace, device):
    """y and dx are zero where the mask of the reference implementation is, on either backend, and nowhere else."""
    rows, hidden = 140, 24
    ones, eye = torch.ones(rows, 1, device=device), torch.eye(hidden, device=device)
    tensors = {"x": ones, "fc1_weight": ones[:hidden], "fc2_weight": eye}
    tensors |= {"gate_weight": ones[:hidden], "up_weight": ones[:hidden], "down_weight": eye}
    if setup.op.name == "dropout":
        tensors = {"x": ones.expand(rows, hidden).contiguous()}
    mask, scale = expected_mask(P, rows, hidden, device=device), state.threshold_scale(P)[1]
    for backend in ("triton", "eager"):
        with ckptkern.backend(backend):
            x = tensors["x"].clone().requires_grad_()
            setup = setup.with_(workspace=workspace)
            y = setup.fused({**tensors, "x": x})
            y.backward(torch.ones_like(y))
        assert torch.equal(y, mask * scale), backend
        slope = {"mlp": 1, "gated_mlp": 2}.get(setup.op.name)
        dx = mask * scale if slope is None else slope * (mask * scale).sum(1, keepdim=True)
        torch.testing.assert_close(x.grad, dx, rtol=1e-6, atol=0)


def test_two_calls_differ_and_a_seed_reproduces(device):
    """Two calls differ, and a seed reproduces them (flash-attention#2088)."""
    x = torch.ones(64, 64, device=device)
    first, second = ckptkern.dropout(x, P), ckptkern.dropout(x, P)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    third = ckptkern.dropout(x, P)
    torch.manual_seed(5)
    assert torch.equal(ckptkern.dropout(x, P), third)


# --- what is wanted, and what is left alone


@pytest.mark.parametrize("setup", setups(("gelu",), ("none", "full"), (P,)) + setups(("relu",), ("full",)))
def test_every_single_trained_input(setup, device):
    """Each gradient alone has the bits that it has among all."""
    names = list(make(setup))
    everything = gradients(setup.fused, make(setup, device=device))
    for name in names:
        alone = gradients(setup.fused, make(setup, frozen=set(names) - {name}, device=device))
        assert_same(alone, {one: everything[one] for one in ("y", name)})


@pytest.mark.sampled
@pytest.mark.parametrize("setup", setups(("relu", "gelu"), dropout=(P,)))
def test_nothing_saved_or_given_is_overwritten(setup, device):
    """A second backward of one graph repeats the first, and inputs keep their values."""
    tensors = make(setup, sizes_of(setup), device=device)
    before = cases.clone(tensors)
    y = setup.fused(tensors)
    saved, dy = y.detach().clone(), cases.output_gradient(y)
    first, second = (torch.autograd.grad(y, list(tensors.values()), dy, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(y, saved)
    assert_same(tensors, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("setup", setups(("gelu",), ("none", "full"), dropout=(P,)))
def test_autocast(setup, dtype, device):
    """float32 parameters, 16-bit kernels in forward and in backward outside of the context."""
    tensors = make(setup, sizes_of(setup), device=device)

    def under_autocast(function):
        def call(t):
            with torch.autocast(device, dtype):
                return function(t)

        return call

    ours, eager = (gradients(under_autocast(function), tensors) for function in (setup.fused, setup.unfused))
    dy = cases.output_gradient(ours["y"])
    exact = gradients(setup.unfused, cases.clone(tensors, torch.float64), dy.double())
    assert ours["y"].dtype == (torch.float32 if setup.op.name == "dropout" else dtype)
    assert all(ours[name].dtype == torch.float32 for name in tensors)
    cases.assert_as_exact(ours, eager, exact)
