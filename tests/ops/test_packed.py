"""Level "packed": what no other level has. Tests of all levels run at it, too, with room for half of the elements."""

import itertools
import math
from unittest import mock

import cases
import pytest
import torch
from cases import P, Sizes, Watch, assert_same, check_against_float64, gradients, make, output_gradient, setups

import ckptkern
from ckptkern import eager
from ckptkern.eager import packing
from ckptkern.memory import kept_tensors
from ckptkern.ops import _choices

OPS = ("linear_stack", "mlp")
PACKED = setups(("relu",), ("packed",), ops=OPS)
MLP, STACK = (setups(("relu",), ("packed",), ops=(name,))[0].values[0] for name in ("mlp", "linear_stack"))
CAPACITIES = (0.0, 0.01, 0.3, 0.5, 1.0)


@pytest.mark.parametrize("setup", setups(("relu",), ("packed",), (0.0, 0.5), OPS))
@pytest.mark.parametrize("workspace", [None, 1], ids=["whole", "chunked"])
def test_no_capacity_changes_a_result(setup, workspace):
    """Of whole numbers, whose products are exact in whatever rows they are made: the bits of "selective"."""
    tensors = cases.whole_numbers(make(setup, Sizes((300,), hidden=21)))
    dy = torch.randint(-2, 3, (300, 10)).float()
    expected = gradients(setup.with_(recompute="selective").fused, tensors, dy)
    for capacity in CAPACITIES:
        ours = gradients(setup.with_(capacity=capacity, workspace=workspace).fused, tensors, dy)
        assert_same(ours, expected)


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("setup", setups(("relu",), ("packed",), (P,), OPS))
def test_as_exact_as_torch(setup, capacity):
    check_against_float64(setup.with_(capacity=capacity), make(setup, Sizes((150,)), torch.bfloat16))


@pytest.mark.parametrize("setup", setups(("relu",), ("packed",), (P,), ("mlp",)))
def test_a_cpu_without_16_bit_products(setup):
    with _choices.forced_route("wide"):
        for capacity in CAPACITIES[:3]:
            check_against_float64(setup.with_(capacity=capacity), make(setup, Sizes((150,)), torch.float16))


@pytest.mark.parametrize("setup", PACKED)
def test_under_autocast(setup):
    """float32 parameters; h is packed in the compute dtype."""
    tensors = make(setup, Sizes((150,)))
    for capacity in CAPACITIES:
        with torch.autocast("cpu", torch.bfloat16):
            y = setup.with_(capacity=capacity).fused(tensors)
        grads = dict(zip(tensors, torch.autograd.grad(y, list(tensors.values()), output_gradient(y)), strict=True))
        cast = {name: t.detach().bfloat16().requires_grad_() for name, t in tensors.items()}
        assert {g.dtype for g in grads.values()} == {torch.float32}
        plain = gradients(setup.with_(recompute="none").fused, cast)
        for name, grad in grads.items():
            torch.testing.assert_close(grad.bfloat16(), plain[name], rtol=0.02, atol=0.05)


def hidden(tensors: dict) -> torch.Tensor:
    """Of an mlp."""
    return torch.nn.functional.linear(tensors["x"], tensors["fc1_weight"], tensors["fc1_bias"]).relu().flatten(0, -2)


@pytest.mark.parametrize("missing", [0, 1, 40])
def test_only_rows_without_room_are_multiplied_again(missing):
    """The room of rows of one density, less some elements, in an mlp whose layers are equally large."""
    rows, width = 100, 8
    tensors = cases.whole_numbers(make(MLP, Sizes((rows,), width, width, width)))
    tensors["x"] = tensors["x"].detach().clone().requires_grad_()
    ends = hidden(tensors).count_nonzero(1).cumsum(0)
    with (
        mock.patch("ckptkern.ops.mlp.room_of", return_value=int(ends[-1]) - missing),
        Watch() as watch,
    ):
        gradients(MLP.fused, tensors)
    again = int((ends > ends[-1] - missing).sum())
    assert (again == 0) == (missing == 0)
    assert watch.flops == 2 * width**2 * (6 * rows + again)
    assert watch.registered == 2 * width**2 * 6 * rows  # formulas know of no density


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_kept_bytes(capacity, dtype):
    """1/8 + (bytes of the dtype) x capacity for an element, 8 for a row, and x."""
    rows, width = 64, 104
    for setup, layers in ((MLP, 1), (STACK, 2)):
        tensors = make(setup, Sizes((rows,), 16, width, 40), dtype)
        if setup is STACK:
            tensors = make(setup, Sizes((rows,), 16, width, 40), dtype, bias=False)
            tensors["weight1"] = torch.randn(width, width, dtype=dtype, requires_grad=True)
            tensors["weight2"] = torch.randn(40, width, dtype=dtype, requires_grad=True)
        with kept_tensors([t for name, t in tensors.items() if name != "x"]) as kept:
            setup.with_(capacity=capacity).fused(tensors)
        layer = rows * (width // 8 + 8 + math.ceil(capacity * width) * dtype.itemsize) + 8
        y_bits = rows * 40 // 8 if setup is STACK else 0
        assert kept.bytes == rows * 16 * dtype.itemsize + layers * layer + y_bits


@pytest.mark.parametrize("setup", PACKED)
def test_values_that_are_no_numbers(setup):
    """NaN and infinities of the hidden layer come back, or are made again, as at "none"."""
    tensors = cases.whole_numbers(make(setup, Sizes((40,))))
    with torch.no_grad():
        tensors["x"][3, 2], tensors["x"][20, 0], tensors["x"][21, 1] = float("nan"), float("inf"), -float("inf")
    expected = gradients(setup.with_(recompute="none").fused, tensors)
    first = "fc1_weight" if setup.op.name == "mlp" else "weight0"
    assert expected[first].isnan().any()
    for capacity in CAPACITIES:
        ours = gradients(setup.with_(capacity=capacity).fused, tensors)
        for name, reference in expected.items():
            torch.testing.assert_close(ours[name], reference, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("capacity", [0.0, 0.2])
def test_the_mask_is_forwards_whatever_is_made_again(capacity):
    """A product that rounds otherwise in backward: here every z is less by 0.3, and half of the units would be dead."""
    rows = 60
    tensors = make(MLP, Sizes((rows,)))
    dy = torch.ones(rows, 10)
    tensors["fc2_weight"] = torch.ones(10, 12).requires_grad_()
    expected = gradients(MLP.with_(recompute="none").fused, tensors, dy)

    def other(*args, **options):
        return eager.product(*args, **options).sub_(0.3)

    with mock.patch.object(packing, "product", other):
        for flush in (False, True):
            torch.set_flush_denormal(flush)
            try:
                ours = gradients(MLP.with_(capacity=capacity).fused, tensors, dy)
            finally:
                torch.set_flush_denormal(False)
            assert not torch.equal(ours["fc2_weight"], expected["fc2_weight"])
            assert torch.equal(ours["fc1_bias"], expected["fc1_bias"])


@pytest.mark.parametrize("setup", setups(("relu",), ("packed",), (P,), OPS))
def test_nothing_is_packed_where_nothing_is_kept(setup):
    """Without a gradient, and inside a checkpoint."""
    tensors = make(setup)
    with mock.patch.object(eager, "pack_nonzeros", side_effect=AssertionError):
        with torch.no_grad():
            y = setup.fused(tensors)
        frozen = {name: t.detach() for name, t in tensors.items()}
        assert torch.equal(setup.fused(frozen), y)
        inside = torch.utils.checkpoint.checkpoint(setup.fused, tensors, use_reentrant=False)
        inside.sum().backward()
    assert torch.equal(inside, y)


@pytest.mark.parametrize("setup", setups(("relu",), ("packed",), (0.5,), OPS))
def test_a_batch_of_any_size_compiles_once(setup):
    tensors = cases.whole_numbers(make(setup, Sizes((40,))))
    names, rest = list(tensors)[1:], list(tensors.values())[1:]
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, *rest: setup.call({"x": x, **dict(zip(names, rest, strict=True))}),
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (40, 23, 64):
            x = torch.randint(-2, 3, (rows, 7)).float().requires_grad_()
            assert_same(
                gradients(lambda t: seeded(compiled, t["x"], *rest), {**tensors, "x": x}),
                gradients(setup.fused, {**tensors, "x": x}),
            )


def seeded(function, *args):
    torch.manual_seed(cases.SEED)
    return function(*args)


def test_layers_that_have_no_such_level_say_so():
    block = ckptkern.nn.TransformerEncoderLayer(16, 2, 32, activation="relu")
    for block.recompute in ("packed", ("selective", "packed")):
        with pytest.raises(ValueError, match="recompute must be one of 'none', 'selective', 'full', not 'packed'"):
            block(torch.ones(2, 3, 16))


@pytest.mark.parametrize("widths", [[5, 6], [5, 6, 7], [9, 1, 9, 2], [8] * 6, [70, 65, 3, 66, 64]], ids=str)
def test_stacks_of_any_depth(widths):
    tensors = {"x": torch.randint(-2, 3, (30, widths[0])).float()}
    for i, (k, n) in enumerate(itertools.pairwise(widths)):
        tensors[f"w{i}"], tensors[f"b{i}"] = torch.randint(-1, 2, (n, k)).float(), torch.randint(-1, 2, (n,)).float()
    tensors = {name: t.requires_grad_() for name, t in tensors.items()}
    dy = torch.randint(-1, 2, (30, widths[-1])).float()

    def stack(level: str, capacity: float):
        def run(t):
            weights, biases = ([t[f"{kind}{i}"] for i in range(len(widths) - 1)] for kind in "wb")
            return ckptkern.linear_stack(t["x"], weights, biases, recompute=level, capacity=capacity)

        return run

    expected = gradients(stack("none", 0.5), tensors, dy)
    for capacity in CAPACITIES:
        assert_same(gradients(stack("packed", capacity), tensors, dy), expected)
