"""Experts by torch's grouped_mm, whose CPU loop stands for its kernel: what that leaves unwritten, or wrong, is NaN here."""

import itertools
from unittest import mock

import pytest
import torch
from support import launchers
from support.cases import (
    NoSync,
    assert_same,
    assert_same_within_rounding,
    check_exactness,
    gradients,
    output_gradient,
)
from support.catalog import Sizes, normal
from support.properties import Case, call_of, joined
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.interpreter import InterpretedFunction

import ckptkern
from ckptkern import LoRA, eager, triton_kernels
from ckptkern.benchmarks.autotune import forced_impl
from ckptkern.memory import memory_timeline, peak_memory
from ckptkern.ops.dispatch import choices as _choices
from ckptkern.ops.dispatch import implementations

BF16, CPU_LOOP = torch.bfloat16, F.grouped_mm


class Grouped:
    """grouped_mm as on a GPU of this compute capability. made: the results of its calls, in order."""

    def __init__(self, capability: tuple[int, int] = (10, 0)):
        self.capability, self.made = capability, []

    def __call__(self, a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
        out, rows = CPU_LOOP(a, b, offs=offs), torch.arange(a.shape[0])
        if b.dim() == 3:
            out.masked_fill_((rows >= offs[-1:])[:, None], float("nan"))
        elif self.capability == (10, 0):
            out.masked_fill_((offs.diff(prepend=offs.new_zeros(1)) == 0)[:, None, None], float("nan"))
        self.made.append(out)
        return out

    def count(self) -> tuple[int, int]:
        """(of rows by stacks, of rows by rows), since the last time."""
        dims, self.made = [out.dim() for out in self.made], []
        return dims.count(2), dims.count(3)


@pytest.fixture
def mm(monkeypatch):
    """Every op of experts takes it where its operands allow; what is between the matmuls is PyTorch's."""
    fake = Grouped()
    monkeypatch.setattr(implementations, "capability_of", lambda x: fake.capability)
    monkeypatch.setattr(F, "grouped_mm", fake)
    _choices.primitives.cache_clear()
    with (
        ckptkern.backend("triton"),
        forced_impl("library"),
        mock.patch.object(_choices.primitives("library"), "kernels", launchers),
    ):
        yield fake
    _choices.primitives.cache_clear()


def updates(sizes: Sizes, rank: int = 8) -> dict[str, LoRA]:
    E, d, N = sizes.experts, sizes.features, sizes.hidden
    shapes = {"gate_up": (2 * N, d), "down": (d, N)}
    return {name: LoRA(normal(E, rank, k), normal(E, n, rank), 0.5) for name, (n, k) in shapes.items()}


def experts(sizes: Sizes = Sizes((40,), 16, 24, experts=5), bias: bool = False, **more) -> Case:  # noqa: B008
    call = call_of("moe_mlp", sizes=sizes)
    return call._replace(fixed={k: v for k, v in call.arguments.items() if bias or "bias" not in k} | more)


EVEN, EIGHT = experts(), Sizes((30,), 16, 24, experts=11)
INDEX = EVEN.arguments["top_k_index"]
CASES = {  # call, grouped matmuls of a step: (rows by stacks, rows by rows)
    "full": (EVEN, (5, 2)),
    "none": (EVEN.with_(recompute="none"), (4, 2)),
    "an empty expert": (EVEN.with_(top_k_index=INDEX.clamp(min=1)), (5, 2)),
    "dropped": (EVEN.with_(top_k_index=torch.where(INDEX % 3 == 0, -1, INDEX)), (5, 2)),
    "all dropped": (EVEN.with_(top_k_index=INDEX * 0 - 1), (5, 2)),
    "top 1": (EVEN.with_(top_k_index=INDEX[:, :1], top_k_weights=normal(40, 1)), (5, 2)),
    "top 8": (experts(EIGHT, top_k_index=torch.rand(30, 11).argsort(1)[:, :8], top_k_weights=normal(30, 8)), (5, 2)),
    "no tokens": (experts(Sizes((0,), 16, 24, experts=5)), (0, 0)),
    "biases": (experts(bias=True), (1, 2)),
    "updates": (EVEN.with_(lora=updates(EVEN.sizes)), (17, 6)),
    "updates of rank 2": (EVEN.with_(lora=updates(EVEN.sizes, 2)), (5, 2)),
    "chunks": (experts(Sizes((150,), 16, 24, experts=5), workspace=1), (10, 0)),
    "odd features": (experts(Sizes((40,), 12, 24, experts=5)), (0, 0)),
    "gelu": (EVEN.with_(activation="gelu"), (5, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_as_exact_as_eager_pytorch(name, mm):
    call, expected = CASES[name]
    t = call.make(BF16)
    gradients(call, t)
    assert mm.count() == expected
    check_exactness(call, lambda t: joined(call.oracle(t)), t)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_rows_beyond_the_last_offset(mode, mm):
    """Zeros come out, and zeros as their gradient, whatever they hold."""
    offs = torch.tensor([7, 7, 20], dtype=torch.int32)
    call = call_of("grouped_gated_mlp", "row_weights", sizes=Sizes((37,), 16, 24), recompute=mode, offs=offs)
    t = call.make(BF16)
    dy = output_gradient(t["x"]).index_fill(0, torch.arange(20, 37), 0.0)
    with ckptkern.backend("eager"):
        expected = gradients(call, t, dy)
    with torch.no_grad():
        t["x"][20:] = dy[20:] = float("nan")
    actual = gradients(call, t, dy)
    assert sum(mm.count()) == (7 if mode == "full" else 6)
    of_nobody = (actual[name][20:] for name in ("y", "x", "row_weights"))
    assert not any(rows.any() for rows in (*of_nobody, actual["gate_up_weight"][1], actual["down_weight"][1]))
    assert_same_within_rounding(actual, expected)


NAMES = [name for name in EVEN.make() if name != "top_k_index"]


@pytest.mark.parametrize("lora", [None, updates(EVEN.sizes)], ids=["", "updates"])
def test_every_set_of_gradients(lora, mm):
    """They are the same whatever else is asked for."""
    call = EVEN.with_(lora=lora)
    t = call.make(BF16)
    y = call(t)
    dy, names = output_gradient(y), NAMES if lora is None else ["x", "down_weight", *(set(t) - set(NAMES))]
    whole = dict(zip(t, torch.autograd.grad(y, t.values(), dy, retain_graph=True), strict=True))
    for count in (1, 2):
        for some in itertools.combinations(names, count):
            grads = torch.autograd.grad(y, [t[name] for name in some], dy, retain_graph=True)
            assert_same(dict(zip(some, grads, strict=True)), {name: whole[name] for name in some}, some)


def test_weights_gradients_are_grouped_mms_own(mm):
    """No second tensor of all experts beside it."""
    for mm.capability in implementations.CAPABILITIES:
        t = EVEN.make(BF16)
        grads = torch.autograd.grad(EVEN(t).sum(), (t["gate_up_weight"], t["down_weight"]))
        assert {grad.data_ptr() for grad in grads} <= {out.data_ptr() for out in mm.made}


def test_sums_are_float32(mm):
    """In a main_grad, which no grouped_mm adds to."""
    expected, t = gradients(EVEN, EVEN.make(BF16)), EVEN.make(BF16)
    mm.count()
    weights = t["gate_up_weight"], t["down_weight"]
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones(weight.shape), False
    actual = gradients(EVEN, t)
    assert mm.count() == (5, 0)
    for name, weight in zip(("gate_up_weight", "down_weight"), weights, strict=True):
        sums = weight.main_grad - 1
        assert_same_within_rounding({name: sums.to(BF16)}, {name: expected[name]})
        assert (sums == sums.to(BF16))[sums != 0].float().mean() < 0.2, f"{name} was rounded before it was added"
        assert not actual[name].any()


def test_a_block_with_a_shared_expert(mm):
    names = ("shared_gate_weight", "shared_up_weight", "shared_down_weight", "shared_expert_gate")
    call = call_of("moe_block", *names, sizes=Sizes((40,), 16, 24, experts=5))
    call = call._replace(fixed={k: v for k, v in call.arguments.items() if "bias" not in k})
    t = call.make(BF16)
    actual = gradients(call, t)
    assert mm.count() == (5, 2)
    with ckptkern.backend("eager"):
        assert_same_within_rounding(actual, gradients(call, t))


def test_nothing_waits_for_the_host(mm, monkeypatch):
    """With the kernels between the matmuls."""
    monkeypatch.setattr(_choices.primitives("library"), "kernels", triton_kernels)
    call = EVEN.with_(top_k_index=INDEX - 1)
    with ckptkern.backend("eager"):
        expected = gradients(call, call.make(BF16))
    monkeypatch.setattr(Tensor, "tolist", None, raising=False)
    with NoSync():
        actual = gradients(call, call.make(BF16))
    assert mm.count() == (5, 2)
    assert_same_within_rounding(actual, expected)


@pytest.mark.parametrize("lora", [False, True], ids=["", "updates"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_the_workspace_counts_what_a_pass_holds(mode, lora, mm, monkeypatch):
    """With room for four of the smallest chunks neither pass takes a fifth; kernels are what their launchers allocate."""
    monkeypatch.setattr(InterpretedFunction, "run", lambda *args, **options: None)
    monkeypatch.setattr(_choices.primitives("library"), "kernels", triton_kernels)
    call = experts(Sizes((768,), 16, 64, experts=3), recompute=mode)
    call = call.with_(lora=updates(call.sizes)) if lora else call
    t = call.make(BF16)

    def transient(workspace: int) -> tuple[int, int]:
        with memory_timeline("cpu") as forward:
            y = call(t, workspace=workspace)
        dy = output_gradient(y)
        mm.made = []
        with peak_memory("cpu") as backward:
            grads = torch.autograd.grad(y, list(t.values()), dy)
        return forward.peak - forward.bytes[-1], backward.bytes - sum(grad.nbytes for grad in grads)

    monkeypatch.setattr(F, "grouped_mm", CPU_LOOP)
    for place, least in enumerate(transient(1)):
        held = transient(4 * least)[place]
        assert held <= 4 * least, (
            f"{('forward', 'backward')[place]} holds {held} transient bytes in a workspace of {4 * least}"
        )


@pytest.mark.parametrize("name", ["full", "an empty expert", "dropped", "updates"])
def test_by_what_the_device_has(name, device):
    """On a GPU with torch's kernel by that, as often as said above; elsewhere by ours."""
    call, expected = CASES[name]
    t = call.make(BF16, device)
    with (
        ckptkern.backend("triton"),
        forced_impl("library"),
        mock.patch.object(F, "grouped_mm", wraps=F.grouped_mm) as spy,
    ):
        gradients(call, t)
        assert spy.call_count == (
            sum(expected) if implementations.capability_of(t["x"]) in implementations.CAPABILITIES else 0
        )
        check_exactness(call, lambda t: joined(call.oracle(t)), t)


# -- where torch's kernel runs -----------------------------------------------------------------------------------------

ROWS, STACK = torch.zeros(40, 16, dtype=BF16), torch.zeros(3, 24, 16, dtype=BF16)
GROUPS = eager.route(torch.arange(40)[:, None] % 3, 3)
TAKEN = {
    "rows and a stack": (ROWS, STACK), "a transposed stack": (STACK.mT,),
    "wider rows": (torch.zeros(40, 24, dtype=BF16)[:, 8:],),
}  # fmt: skip
NOT_TAKEN = {
    "float16": (ROWS.half(),), "float32": (STACK.float(),), "transposed rows": (torch.zeros(16, 40, dtype=BF16).mT,),
    "every other column": (torch.zeros(40, 32, dtype=BF16)[:, ::2],),
    "expanded rows": (ROWS[:1].expand(40, 16),), "no features": (ROWS[:, :0],),
    "12 features": (torch.zeros(40, 16, dtype=BF16)[:, :12],), "a stride of 20": (torch.zeros(40, 20, dtype=BF16)[:, :16],),
    "another address": (torch.zeros(40, 24, dtype=BF16)[:, 4:20],), "12 rows of a matrix": (STACK[:, :12],),
    "matrices 4 elements off": (torch.zeros(2000, dtype=BF16).as_strided((3, 24, 16), (388, 16, 1)),),
}  # fmt: skip


@pytest.mark.parametrize("name", [*TAKEN, *NOT_TAKEN])
def test_what_tma_takes(name, monkeypatch):
    for capability in ((9, 0), (10, 0), (8, 0), (8, 9), (10, 3), (12, 0), (0, 0)):
        monkeypatch.setattr(implementations, "capability_of", lambda x, capability=capability: capability)
        taken = name in TAKEN and capability in ((9, 0), (10, 0))
        assert implementations.runs_grouped(GROUPS, *(TAKEN | NOT_TAKEN)[name]) == taken, capability


@pytest.mark.parametrize(
    ("tokens", "count", "taken"), [(0, 3, False), (40, 0, False), (40, 1023, True), (40, 1024, False)]
)
def test_how_many_groups_it_takes(tokens, count, taken, monkeypatch):
    monkeypatch.setattr(implementations, "capability_of", lambda x: (9, 0))
    assert implementations.runs_grouped(eager.route(torch.zeros(tokens, 1, dtype=torch.int32), count), STACK) == taken
