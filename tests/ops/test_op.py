"""What the factory promises of every op: what is saved, gradients of any order, matmuls run, autograd's own ways."""

import functools
import itertools

import pytest
import torch
from support.blocks import TWICE, blocks, calls, in_turn, joined_biases, variants
from support.cases import (
    DTYPES,
    LAYERS,
    MODES,
    SAVED_SETS,
    SEED,
    P,
    Saved,
    Setup,
    Sizes,
    Watch,
    assert_as_exact,
    assert_flat_memory,
    assert_same,
    assert_same_within_rounding,
    check_against_float64,
    clone,
    each_activation,
    every_other,
    gradients,
    make,
    output_gradient,
    seeded,
    setups,
    transposed,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import ckptkern
from ckptkern.memory import saved_tensors
from ckptkern.ops import catalog

UNALIGNED = {
    "vector": Sizes(lead=()),
    "one": Sizes(lead=(1,), features=1, hidden=1, out=1),
    "3 features": Sizes(lead=(2, 3, 5), features=3),
    "40 features": Sizes(lead=(17,), features=40, hidden=33, out=9),
    "no batch": Sizes(lead=(0, 5)),
    "no sequence": Sizes(lead=(3, 0)),
    "no features": Sizes(features=0),
    "no hidden": Sizes(hidden=0),
    "no outputs": Sizes(out=0),
}


# -- what is saved -----------------------------------------------------------------------------------------------------


def saved_by(setup: Setup, tensors: dict) -> int:
    with saved_tensors(exclude=[t for name, t in tensors.items() if name != "x"]) as saved:
        setup.fused(tensors)
    return saved.bytes


def expected_bytes(setup: Setup, sizes: Sizes, itemsize: int) -> int:
    elements, mask_bytes = setup.op.saved(setup.activation, setup.recompute, *sizes[1:])
    return sizes.tokens * (elements * itemsize + mask_bytes) + (16 if setup.dropout_p else 0)


@pytest.mark.sampled
@pytest.mark.parametrize("setup", setups(SAVED_SETS, dropout=(0.0, P)))
def test_saved_bytes_are_the_tables(setup):
    assert saved_by(setup, make(setup)) == expected_bytes(setup, Sizes(), 4)


@pytest.mark.parametrize("setup", setups(dropout=(0.0, P)))
def test_autocast_saves_no_cast_weight(setup):
    """float32 parameters under bf16 autocast: only activations are saved, in two bytes per element, also x's cast copy."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        itemsize = 2 if setup.op.parameters(1, 1, 1) else 4  # dropout alone runs in x's own dtype, as torch's does
        assert saved_by(setup, make(setup)) == expected_bytes(setup, Sizes(), itemsize)


@pytest.mark.parametrize("setup", setups(modes=("none", "selective")))
def test_a_frozen_first_weight_lets_go_of_the_input(setup):
    first = {"gate_weight", "up_weight"} if setup.op.name == "gated_mlp" else {*list(make(setup))[1:2]}
    saved = saved_by(setup, make(setup, frozen=first))
    input_bytes = Sizes().tokens * Sizes().features * 4
    if setup.op.name in ("linear_act", "mlp", "gated_mlp"):
        assert saved == expected_bytes(setup, Sizes(), 4) - input_bytes
    else:
        assert saved <= expected_bytes(setup, Sizes(), 4)


@pytest.mark.parametrize("setup", setups(modes=("full",)))
def test_nothing_is_saved_without_a_gradient(setup):
    frozen = make(setup, frozen=list(make(setup)))
    assert saved_by(setup, frozen) == 0
    with torch.no_grad():
        assert saved_by(setup, make(setup)) == 0
        assert not setup.fused(make(setup)).requires_grad


# -- first order ------------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("setup", each_activation((0.0, P)))
def test_gradients_are_as_exact_as_torchs(setup, dtype):
    check_against_float64(setup, make(setup, dtype=dtype))


@pytest.mark.parametrize("setup", setups(("silu",), dropout=(P,), ops=("linear_act", "mlp", "gated_mlp")))
def test_every_subset_of_biases(setup):
    biases = [name for name in make(setup) if "bias" in name]
    for missing in subsets(biases):
        tensors = {name: t for name, t in make(setup, dtype=torch.float64).items() if name not in missing}
        assert_same_within_rounding(gradients(setup.fused, tensors), gradients(setup.unfused, tensors))


# Every op at every size, with and without biases in turn.
UNALIGNED_CASES = [
    pytest.param(*setup.values, sizes, (i + j) % 2 == 0, id=f"{setup.id}-{name}")
    for i, setup in enumerate(setups(("relu", "silu"), dropout=(P,)))
    for j, (name, sizes) in enumerate(UNALIGNED.items())
]


@pytest.mark.sampled
@pytest.mark.parametrize(("setup", "sizes", "bias"), UNALIGNED_CASES)
def test_unaligned_and_empty_shapes(setup, sizes, bias):
    """No tokens, no features, sizes of one. Deterministic mode fills what torch.empty gives with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        check_against_float64(setup, make(setup, sizes, torch.bfloat16, bias=bias))
    finally:
        torch.use_deterministic_algorithms(False)


def inside_a_larger(t: torch.Tensor) -> torch.Tensor:
    padded = t.new_zeros([size + 3 for size in t.shape])
    inner = tuple(slice(1, size + 1) for size in t.shape)
    padded[inner] = t
    return padded[inner]


def leading_dims_swapped(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() > 2 else t


LAYOUTS = (transposed, every_other, inside_a_larger, leading_dims_swapped)


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("setup", setups(SAVED_SETS, dropout=(P,)) + in_turn() + calls())
def test_strided_inputs_and_output_gradients(setup, layout):
    """x, the weights, the biases and dy may have any strides; results are those of dense tensors."""
    dense = make(setup)
    strided = {name: layout(t.detach()).requires_grad_() for name, t in dense.items()}
    assert any(not t.is_contiguous() for t in strided.values())
    dy = output_gradient(setup.fused(dense))
    if isinstance(setup, Setup):
        check_against_float64(setup, strided, layout(dy))
    assert_same_within_rounding(gradients(setup.fused, strided, layout(dy)), gradients(setup.fused, dense, dy))


@pytest.mark.sampled
@pytest.mark.parametrize("setup", setups(SAVED_SETS, dropout=(P,)) + in_turn() + calls())
def test_expanded_output_gradients(setup):
    """.sum() sends strides (0, 0), a broadcast one dimension of stride 0."""
    tensors = make(setup)
    y = setup.fused(tensors)
    one = y.new_tensor(0.7)
    row, column = output_gradient(y)[:1], output_gradient(y)[..., :1]
    for dy in (one.expand(y.shape), row.expand(y.shape), column.expand(y.shape)):
        assert 0 in dy.stride()
        assert_same_within_rounding(
            gradients(setup.fused, tensors, dy), gradients(setup.fused, tensors, dy.contiguous())
        )
        if isinstance(setup, Setup):
            check_against_float64(setup, tensors, dy)


@pytest.mark.parametrize("setup", setups(dropout=(P,)))
def test_expanded_input(setup):
    tensors = make(setup)
    row = tensors["x"].detach()[:1, :1]
    tensors["x"] = row.expand(Sizes().lead + row.shape[-1:]).requires_grad_()
    assert tensors["x"].stride()[:2] == (0, 0)
    check_against_float64(setup, tensors)


@pytest.mark.parametrize("setup", setups(modes=("full",)) + calls())
def test_gradient_strides_are_the_parameters(setup):
    """.grad of a transposed or dense parameter has the parameter's strides, as optimisers expect."""
    tensors = {name: transposed(t.detach()).requires_grad_() for name, t in make(setup).items()}
    setup.fused(tensors).sum().backward()
    for name, t in tensors.items():
        assert t.grad.stride() == t.stride(), name


@pytest.mark.sampled
@pytest.mark.parametrize("setup", each_activation((P,)) + in_turn() + calls())
def test_gradcheck(setup):
    tensors = make(setup, Sizes((2, 2), 3, 4, 2), torch.float64)

    def function(*values):
        return setup.fused(dict(zip(tensors, values, strict=True)))

    assert torch.autograd.gradcheck(function, tuple(tensors.values()), fast_mode=not isinstance(setup, Setup))


SAVING = ("selective", "full")


@pytest.mark.sampled
@pytest.mark.parametrize("setup", setups(SAVED_SETS, SAVING, (P,)) + blocks(SAVING) + variants(SAVING))
def test_every_mode_gives_the_same_bits(setup):
    """The modes differ in what they keep, not in any result: what is recomputed equals what forward computed."""
    tensors = make(setup, dtype=torch.bfloat16)
    assert_same(gradients(setup.fused, tensors), gradients(setup.with_(recompute="none").fused, tensors))


@pytest.mark.parametrize("setup", setups(dropout=(P,)) + in_turn())
def test_ten_runs_are_bitwise_equal(setup):
    """Nothing is tuned, cached or accumulated in the first run."""
    tensors = make(setup)
    first = gradients(setup.fused, tensors)
    for _ in range(9):
        assert_same(gradients(setup.fused, tensors), first)


@pytest.mark.parametrize("setup", setups(SAVED_SETS, ops=LAYERS))
def test_micro_batches_add_up_to_the_batch(setup):
    """Gradients of four micro-batches, accumulated in .grad, are those of one batch."""
    whole = make(setup, Sizes(lead=(8, 5)))
    dy = output_gradient(setup.unfused(whole))

    def accumulate(function, tensors):
        tensors = clone(tensors)
        for rows in torch.arange(8).chunk(4):
            function({**tensors, "x": tensors["x"][rows]}).backward(dy[rows].to(tensors["x"].dtype))
        return {name: t.grad for name, t in tensors.items()}

    exact = gradients(setup.unfused, clone(whole, torch.float64), dy.double())
    del exact["y"]
    assert_as_exact(accumulate(setup.fused, whole), accumulate(setup.unfused, whole), exact)


# -- frozen inputs and matmuls run ------------------------------------------------------------------------------------


def subsets(names: list[str]):
    for size in range(len(names) + 1):
        yield from itertools.combinations(names, size)


@pytest.mark.sampled
@pytest.mark.parametrize("setup", setups(SAVED_SETS, dropout=(P,)) + calls())
def test_every_subset_of_frozen_inputs(setup):
    """The gradients of a subset, also of a stack's lists, have the bits that they have if all are trained."""
    names = list(make(setup))
    everything = gradients(setup.fused, make(setup))
    for frozen in subsets(names):
        some = gradients(setup.fused, make(setup, frozen=frozen))
        assert_same(some, {name: value for name, value in everything.items() if name not in frozen})


@pytest.mark.sampled
@pytest.mark.parametrize("setup", setups(SAVED_SETS, dropout=(P,)))
def test_matmuls_of_every_subset_of_frozen_inputs(setup):
    """No matmuls run besides autograd's own and the recomputed ones, and the registered FLOPs are those that run."""
    names = list(make(setup))
    forward = matmuls(setup.fused, make(setup, frozen=names)).flops
    assert forward == matmuls(setup.unfused, make(setup, frozen=names)).flops
    # at "full", forward runs again except for the last layer, which linear_act and a stack without a saved mask run too
    last_layer = 2 * Sizes().tokens * Sizes().out * Sizes().hidden
    if setup.op.name == "linear_act" or (setup.op.name == "linear_stack" and setup.activation != "relu"):
        last_layer = 0
    recompute = forward - last_layer if setup.recompute == "full" else 0
    if setup.op.name in ("dropout", "linear_act") and setup.activation == "identity":
        recompute = 0
    for frozen in subsets(names):
        tensors = make(setup, frozen=frozen)
        seen, unfused = matmuls(setup.fused, tensors), matmuls(setup.unfused, tensors)
        extra = seen.flops - unfused.flops
        assert extra in (0, recompute), (
            f"{frozen} frozen: {extra} FLOPs more than autograd, {recompute} would recompute"
        )
        if unfused.flops == forward and setup.op.name in ("mlp", "gated_mlp"):
            assert extra == 0, "the last bias alone needs no hidden layer"
        assert seen.registered == seen.flops, frozen


def matmuls(function, tensors) -> Watch:
    with Watch() as watch:
        watch.gradients = gradients(function, tensors)
    return watch


def each_part(names: list[str]) -> list[tuple[str, ...]]:
    """The input, the parameters, each tensor alone, and all."""
    return [part for part in dict.fromkeys([tuple(names[1:]), tuple(names), *((name,) for name in names)]) if part]


def partial_flops(function, tensors: dict, part: tuple[str, ...]) -> int:
    y = function(tensors)
    with Watch() as watch:
        torch.autograd.grad(y, [tensors[name] for name in part], output_gradient(y))
    return watch.flops


@pytest.mark.sampled
@pytest.mark.parametrize("setup", setups(SAVED_SETS) + in_turn() + calls())
def test_matmuls_of_a_partial_backward(setup):
    """torch.autograd.grad of some inputs runs what backward runs where the others are frozen."""
    names = list(make(setup))
    forward = matmuls(setup.fused, make(setup, frozen=names)).flops
    for part in each_part(names):
        frozen = make(setup, frozen=[name for name in names if name not in part])
        assert partial_flops(setup.fused, make(setup), part) == matmuls(setup.fused, frozen).flops - forward, part


@pytest.mark.parametrize("setup", setups(SAVED_SETS, modes=("none", "selective")))
def test_a_partial_backward_without_recompute_runs_autograds_matmuls(setup):
    names = list(make(setup))
    for part in each_part(names):
        ours, theirs = (partial_flops(function, make(setup), part) for function in (setup.fused, setup.unfused))
        assert ours == theirs, part


@pytest.mark.sampled
@pytest.mark.parametrize("setup", setups(SAVED_SETS, dropout=(P,)) + in_turn() + calls())
def test_a_partial_backward_has_the_bits_of_a_whole_one(setup):
    """Also as two passes over one graph: the input's gradient first, the weights' later (zero-bubble pipelines)."""
    tensors = make(setup)
    y = setup.fused(tensors)
    dy, names = output_gradient(y), list(tensors)
    whole = torch.autograd.grad(y, list(tensors.values()), dy, retain_graph=True)
    for part in each_part(names):
        some = torch.autograd.grad(y, [tensors[name] for name in part], dy, retain_graph=True)
        assert_same(dict(zip(part, some, strict=True)), {name: whole[names.index(name)] for name in part})


@pytest.mark.parametrize("setup", setups(SAVED_SETS))
def test_number_of_matmuls(setup):
    """The docstrings' tables. All layers are given the same size, so that FLOPs count matmuls."""
    sizes = Sizes((4,), 6, 6, 6)
    tensors = make(setup, sizes)
    expected = setup.op.matmuls[setup.recompute]
    if setup.op.name == "linear_stack" and (setup.activation, setup.recompute) == ("relu", "full"):
        expected -= 1
    if setup.op.name == "linear_act" and setup.activation == "identity":
        expected = 3
    assert matmuls(setup.fused, tensors).flops == expected * 2 * 4 * 6 * 6


@pytest.mark.parametrize("setup", setups(modes=("full",), dropout=(P,)))
def test_flop_counter(setup):
    """torch's own counter finds the registered formulas."""
    tensors = make(setup)
    with FlopCounterMode(display=False) as counter:
        gradients(setup.fused, tensors)
    assert counter.get_total_flops() == matmuls(setup.fused, tensors).flops
    by_op = {str(op).removeprefix("ckptkern."): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    if by_op:
        assert by_op.keys() == {f"{setup.op.name}_fwd", f"{setup.op.name}_bwd"}


# -- second order ------------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("setup", each_activation((P,)) + in_turn(TWICE, ("full",)) + calls())
def test_gradgradcheck(setup):
    """Second-order gradients are right or an error, never silently wrong (pytorch#76185)."""
    tensors = make(setup, Sizes((2, 2), 3, 4, 2), torch.float64)

    def function(*values):
        return setup.fused(dict(zip(tensors, values, strict=True)))

    assert torch.autograd.gradgradcheck(function, tuple(tensors.values()), fast_mode=True)


def gradient_penalty(function, tensors: dict) -> dict:
    """Gradients of |dL/dx|^2 + |dL/dparameters|^2: second order in everything."""
    tensors = clone(tensors)
    wanted = [t for t in tensors.values() if t.requires_grad]
    y = function(tensors)
    first = torch.autograd.grad(y, wanted, output_gradient(y), create_graph=True)
    sum(g.square().sum() for g in first).backward()
    return {name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in tensors.items() if t.requires_grad}


@pytest.mark.parametrize("setup", setups(("gelu",), modes=("none", "full"), ops=LAYERS))
@pytest.mark.parametrize("where", ["x", "parameters"])
def test_second_order_with_frozen_inputs(setup, where):
    """They are right, or an error if the input that they need was not saved."""
    names = list(make(setup))
    frozen = names[1:] if where == "x" else names[:1]
    tensors = make(setup, dtype=torch.float64, frozen=frozen)
    expected = gradient_penalty(setup.unfused, tensors)
    if where == "x" and setup.recompute == "none" and setup.op.name in ("linear_act", "mlp", "gated_mlp"):
        with pytest.raises(RuntimeError, match=f"{setup.op.name}: second-order gradients need the input"):
            gradient_penalty(setup.fused, tensors)
        return
    actual = gradient_penalty(setup.fused, tensors)
    assert actual.keys() == expected.keys()
    assert_same_within_rounding(actual, expected)


@pytest.mark.parametrize("setup", setups(("identity",), ops=["linear_act"]))
def test_second_order_of_a_linear_layer_with_a_frozen_weight(setup):
    """A linear map's gradient does not depend on its input, so nothing is missing for the second order."""
    tensors = make(setup, dtype=torch.float64, frozen=["weight", "bias"])

    def penalty(function):
        x, scale = tensors["x"], torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        y = function({**tensors, "x": x})
        (first,) = torch.autograd.grad(y, x, scale * torch.ones_like(y), create_graph=True)
        return torch.autograd.grad(first.square().sum(), scale)[0]

    torch.testing.assert_close(penalty(setup.fused), penalty(setup.unfused))


@pytest.mark.parametrize("setup", setups(("silu",), modes=("full",), dropout=(P,)))
def test_third_order(setup):
    tensors = make(setup, Sizes((2,), 3, 4, 2), torch.float64)

    def third(function):
        x = tensors["x"]
        y = function(tensors)
        (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), x, create_graph=True)
        return torch.autograd.grad((second**2).sum(), list(tensors.values()), allow_unused=True)

    for ours, theirs in zip(third(setup.fused), third(setup.unfused), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


# -- autograd ----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("setup", setups(dropout=(P,)) + in_turn() + calls())
def test_second_backward_through_a_retained_graph(setup):
    """A second backward through a retained graph gives what the first gave (axolotl#3892)."""
    tensors = make(setup)
    y = setup.fused(tensors)
    dy, inputs = output_gradient(y), list(tensors.values())
    first = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    second = torch.autograd.grad(y, inputs, dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, inputs, dy)


@pytest.mark.parametrize(
    "setup", setups(modes=("none", "full"), dropout=(P,)) + in_turn(modes=("none", "full")) + calls()
)
def test_changes_between_forward_and_backward_are_caught(setup):
    """x and every weight, except those that backward does not read: dropout does not read x."""
    for name in make(setup):
        if "bias" in name or name.endswith("shift"):
            continue
        tensors = make(setup)
        y = setup.fused(tensors)
        with torch.no_grad():
            tensors[name].add_(1)
        if setup.op_name == "dropout":
            y.sum().backward()
            continue
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def keeps_its_output(setup: Setup) -> bool:
    mode = {"linear_act": ("none",), "linear_stack": ("none", "selective")}.get(setup.op.name, ())
    return setup.activation == "relu" and setup.recompute in mode


@pytest.mark.parametrize("setup", setups(SAVED_SETS, dropout=(P,)))
def test_output_changed_in_place(setup):
    """Gradients are right if the output is not saved, an error if it is (relu at "none", as with torch.relu)."""
    tensors = make(setup)
    dy = output_gradient(setup.fused(tensors))
    if keeps_its_output(setup):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(lambda t: setup.fused(t).mul_(3), tensors, dy)
    else:
        changed = gradients(lambda t: setup.fused(t).mul_(3), tensors, dy)
        assert_same(changed, gradients(lambda t: setup.fused(t) * 3, tensors, dy))


@pytest.mark.sampled
@pytest.mark.parametrize("setup", setups(SAVED_SETS, dropout=(P,)) + in_turn(modes=("none", "full")))
def test_nothing_saved_or_given_is_overwritten(setup):
    """exp saves its result, which is the op's input; dy belongs to the caller."""
    before = make(setup)

    def through_exp(function):
        tensors = clone(before)
        y = function({**tensors, "x": tensors["x"].exp()})
        dy = output_gradient(y)
        saved_dy = dy.clone()
        y.backward(dy)
        assert torch.equal(dy, saved_dy)
        for name, t in tensors.items():
            assert torch.equal(t, before[name]), name
        return {name: t.grad for name, t in tensors.items()}

    ours, theirs = (joined_biases(through_exp(function)) for function in (setup.fused, setup.unfused))
    assert_same_within_rounding(ours, theirs)


@pytest.mark.sampled
@pytest.mark.parametrize("setup", setups(dropout=(P,)) + in_turn() + calls())
def test_memory_is_flat_without_the_garbage_collector(setup):
    """Steps leave no tensor behind, not even with the garbage collector off (pytorch#5569, pytorch#84413)."""
    tensors = make(setup)
    assert_flat_memory(setup.call, tensors, next(iter(tensors)), steps=47 if isinstance(setup, Setup) else 6)


@pytest.mark.parametrize("setup", setups(dropout=(P,)) + in_turn(modes=("none", "full")))
def test_inference_saves_nothing(setup):
    """If no gradient is needed, forward writes no h, z or mask: y is its only result that is not empty."""
    everything = make(setup)
    expected = setup.fused(everything).detach()
    for tensors, graded in ((everything, False), (make(setup, frozen=list(everything)), True)):
        with torch.set_grad_enabled(graded), Saved() as saved:
            assert torch.equal(setup.fused(tensors), expected)
        assert saved.bytes == [0]


@pytest.mark.parametrize(
    "setup", setups(modes=("none", "full"), dropout=(P,)) + in_turn(modes=("none", "full")) + calls()
)
def test_inference_mode_then_training(setup):
    """Inference leaves nothing behind that would break training."""
    tensors = make(setup)
    expected = gradients(setup.fused, tensors)
    with torch.inference_mode():
        y = setup.fused(tensors)
        assert y.is_inference()
    assert torch.equal(y, expected["y"])
    assert_same(gradients(setup.fused, tensors), expected)


@pytest.mark.sampled
@pytest.mark.parametrize("setup", setups(dropout=(P,)) + in_turn() + calls())
def test_saved_tensors_on_the_cpu(setup):
    """Saved tensors go through hooks: save_on_cpu stores copies, and backward works from them."""
    tensors = make(setup)

    def offloaded(t):
        with torch.autograd.graph.save_on_cpu():
            return setup.fused(t)

    assert_same(gradients(offloaded, tensors), gradients(setup.fused, tensors))


@pytest.mark.parametrize("setup", setups(modes=("none", "full"), dropout=(P,)) + in_turn() + calls())
def test_every_saved_tensor_is_unpacked_once(setup):
    """Hooks of checkpointing and sharding fire once for each saved tensor."""
    packed, unpacked = [], []

    def unpack(entry):
        unpacked.append(entry[0])
        return entry[1]

    def pack(t):
        packed.append(len(packed))
        return packed[-1], t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = setup.fused(make(setup))
    y.sum().backward()
    assert len(packed) > 0
    assert sorted(unpacked) == packed


@pytest.mark.parametrize(
    "setup", setups(modes=("full",), dropout=(P,)) + blocks(("full",), names=("pre-norm",)) + calls()
)
def test_forward_mode_is_refused(setup):
    tensors = make(setup)
    with torch.autograd.forward_ad.dual_level():
        first, x = next(iter(tensors.items()))
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match=f"{setup.op_name}: forward-mode AD is not supported"):
            setup.fused({**tensors, first: dual})


@pytest.mark.parametrize(
    "setup", setups(("relu",), modes=("full",), dropout=(P,)) + blocks(("full",), names=("pre-norm",))
)
def test_nodes_are_named_after_their_op(setup):
    """The names show in tracebacks of anomaly mode, profiles and drawings of the graph."""
    y = setup.fused(make(setup))  # before torch 2.13 a grad_fn does not outlive its output
    node = y.grad_fn
    name = catalog.OPS[setup.op_name].op.__name__
    assert node.name() == type(node).__name__ == f"{name}FunctionBackward"


# -- inside torch.utils.checkpoint -------------------------------------------------------------------------------------


def modes_of(watch: Watch) -> list[str]:
    return [mode for mode in watch.strings if mode in (*MODES, "forward")]


@pytest.mark.sampled
@pytest.mark.parametrize("reentrant", [False, True, None], ids=["non-reentrant", "reentrant", "ours"])
@pytest.mark.parametrize(
    "setup", setups(dropout=(P,)) + in_turn() + variants(("full",), ("learned bias", "low-rank llama")) + calls()
)
def test_inside_a_checkpoint(setup, reentrant):
    """Gradients, masks and the generator's state are the same, and nothing is recomputed twice: no more matmuls than in eager
    PyTorch."""
    tensors = make(setup)

    def checkpointed(function):
        def run(t):
            # sin saves y, so that eager PyTorch's recompute too runs to the end of the region
            wrap = ckptkern.checkpoint if reentrant is None else functools.partial(checkpoint, use_reentrant=reentrant)
            return wrap(lambda *v: function(dict(zip(t, v, strict=True))).sin(), *t.values())

        return run

    ours = matmuls(seeded(checkpointed(setup.call)), tensors)
    state = torch.get_rng_state()
    assert_same(ours.gradients, gradients(lambda t: setup.fused(t).sin(), tensors))
    assert torch.equal(state, torch.get_rng_state())
    if not isinstance(setup, Setup):
        return
    assert ours.flops <= matmuls(checkpointed(setup.unfused), tensors).flops
    modes = modes_of(ours)
    if "recompute" in setup.op.options:
        # backward runs in the mode of the recomputed forward; a reentrant first forward makes nothing to save
        assert modes[1:] == ["none", "none"]
        assert modes[0] in (("full", "forward") if reentrant else ("none",))


@pytest.mark.parametrize(
    "setup", setups(("gelu",), modes=("none",), dropout=(P,)) + blocks(("none",), names=("llama",))
)
def test_selective_checkpoint_may_save_the_op(setup):
    """A policy of torch's selective checkpointing sees the forward op and can save its results."""
    tensors = make(setup)
    forward_op = getattr(torch.ops.ckptkern, f"{setup.op_name}_fwd").default

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is forward_op else CheckpointPolicy.PREFER_RECOMPUTE

    def checkpointed(t):
        return checkpoint(
            lambda *v: setup.call(dict(zip(t, v, strict=True))).sin(), *t.values(), use_reentrant=False,
            context_fn=functools.partial(create_selective_checkpoint_contexts, policy),
        )  # fmt: skip

    ours = matmuls(seeded(checkpointed), tensors)
    direct = matmuls(lambda t: setup.fused(t).sin(), tensors)
    assert_same(ours.gradients, direct.gradients)
    assert ours.flops == direct.flops


@pytest.mark.parametrize("setup", setups(modes=("full",), dropout=(P,)))
def test_checkpoint_under_autocast(setup):
    """No cast that is made in forward and missing in recompute, or the other way round."""
    tensors = make(setup)

    def checkpointed(t):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            setup.call(t)  # fills whatever cache there is
            torch.manual_seed(SEED)
            return checkpoint(lambda *v: setup.call(dict(zip(t, v, strict=True))), *t.values(), use_reentrant=False)

    def direct(t):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return setup.fused(t)

    assert_same(gradients(checkpointed, tensors), gradients(direct, tensors))
