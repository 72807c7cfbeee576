"""ckptkern.tiled against fn(x): values, gradients and their sums, hooks, random state, precision, memory, errors."""

import collections
import copy
import functools

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

import ckptkern
from ckptkern import tiled
from ckptkern.errors import ShapeError
from ckptkern.memory import peak_memory, saved_tensors

TOKENS, WIDTH = 150, 8


def mlp(p=0.0, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(p), nn.Linear(4 * WIDTH, WIDTH)
    ).to(dtype)


def tokens(shape=(2, TOKENS, WIDTH), dtype=torch.float64, requires_grad=True):
    torch.manual_seed(1)
    return torch.randn(shape, dtype=dtype).requires_grad_(requires_grad)


def assert_same(y, expected, *trained, cut=lambda y: y):
    """Equal outputs and gradients of a random function of them."""
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    trained = [t for t in trained if t.requires_grad]
    assert y.requires_grad == expected.requires_grad == bool(trained)
    if trained:
        dy = torch.randn_like(cut(y))
        actual, again, wanted = (
            torch.autograd.grad(cut(output), trained, dy, retain_graph=True) for output in (y, y, expected)
        )
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(again, actual, rtol=0, atol=0)


# -- the same function ------------------------------------------------------------------------------------------------


def frozen(*parts):
    fn = mlp()
    for i in parts:
        fn[i].requires_grad_(False)
    return fn


class Captures(nn.Module):
    """A parameter of the function, and what was computed of it before; in a lambda, so that tiled finds no module."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))

    def function(self):
        derived = self.scale.exp()
        return lambda x: (x * self.scale).tanh() + derived


class WithCheckpoints(nn.Module):
    def forward(self, x):
        return ckptkern.checkpoint(torch.sin, x) * torch_checkpoint.checkpoint(torch.cos, x, use_reentrant=False)


FUNCTIONS = {
    **{f"without gradients of {parts}": functools.partial(frozen, *parts) for parts in [(), (1,), (0, 1, 4), range(5)]},
    "a fused layer": lambda: ckptkern.nn.MLP(WIDTH, 4 * WIDTH, recompute="full").double(),
    "another width": lambda: nn.Linear(WIDTH, 31).double(),
    "captured tensors": Captures,
    "checkpoints inside": WithCheckpoints,
}
SHAPES = [((2, TOKENS, WIDTH), -2), ((TOKENS, WIDTH), 0), ((TOKENS, 3, WIDTH), 0)]
CASES = [("another width", shape, dim, n, True) for shape, dim in SHAPES for n in (1, 2, 7, TOKENS, 1000)]
CASES += [(name, *SHAPES[0], 4, x_trained) for name in FUNCTIONS for x_trained in (True, False)]


@pytest.mark.parametrize(("name", "shape", "dim", "chunks", "x_trained"), CASES)
def test_outputs_and_gradients(name, shape, dim, chunks, x_trained):
    """Twice, and of a part of the chunks. Weights keep theirs when x needs none, as in a first layer (DeepSpeed, Liger)."""
    module, x = FUNCTIONS[name](), tokens(shape, requires_grad=x_trained)
    for cut in (lambda y: y, lambda y: y[:, :3]):
        fn = getattr(module, "function", lambda: module)()
        assert_same(tiled(fn, x, chunks, dim), fn(x), x, *module.parameters(), cut=cut)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert_same(tiled(fn, x, chunks, dim), fn(x))


def test_whole_numbers_no_tokens_and_second_order():
    fn, x = mlp(), tokens()
    whole = lambda x: (x.logsumexp(-1) > 0).int()  # noqa: E731
    assert torch.equal(tiled(whole, x, 4), whole(x))
    assert tiled(fn, tokens((2, 0, WIDTH))).shape == (2, 0, WIDTH)
    assert torch.autograd.gradgradcheck(lambda x: tiled(fn, x, 2), (tokens((1, 5, WIDTH)),))


# -- sums of gradients ------------------------------------------------------------------------------------------------


class Scale(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2, dtype=dtype))

    def forward(self, x):
        return x @ self.weight


def compiled(fn, x, chunks):
    torch._dynamo.reset()
    return torch.compile(lambda x: tiled(fn, x, chunks), backend="aot_eager", fullgraph=True)(x)


def of_another_tensor(fn, x, chunks):
    derived = fn.weight * 1.0
    return tiled(lambda x: x @ derived, x, chunks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "dtype", "autocast"),
    [
        (compiled, torch.bfloat16, False),
        (of_another_tensor, torch.bfloat16, False),
        (tiled, torch.bfloat16, False),
        (tiled, torch.float32, True),
        (of_another_tensor, torch.float32, True),
    ],
)
def test_sums_of_16_bit_gradients_are_not_rounded_after_each_chunk(call, dtype, autocast):
    """13 chunks of 85 rows of ones: of the sum 1105, bfloat16 additions leave 1096 (Liger#1391). A float32 weight's gradient
    holds every digit under autocast too, because each chunk casts the weight for itself."""
    fn, x = Scale(dtype), torch.ones(1, 1105, 2, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = call(fn, x, 13)
    y.backward(torch.ones_like(y))
    assert fn.weight.grad.tolist() == torch.full((2, 2), 1105.0, dtype=dtype).tolist()


def test_main_grad():
    """Matrices' gradients are added to it, in float32."""
    fn, x = ckptkern.nn.MLP(WIDTH, 4 * WIDTH, recompute="full").bfloat16(), tokens(dtype=torch.bfloat16)
    results = []
    for call in (lambda x: tiled(fn, x, 5), fn):
        for p in fn.parameters():
            p.grad, p.main_grad = None, torch.zeros_like(p, dtype=torch.float32)
        call(x).float().sum().backward()
        assert all((p.grad is None) == (p.dim() == 2) for p in fn.parameters())
        results.append([p.main_grad if p.grad is None else p.grad.float() for p in fn.parameters()])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() < 2e-2 * theirs.abs().max()


# -- hooks ------------------------------------------------------------------------------------------------------------


def test_hooks_run_once():
    """Those of parameters with the whole gradient, those of the module with all tokens."""
    fn, x, seen = mlp(), tokens(), collections.Counter()
    for t in (x, *fn.parameters()):
        t.register_hook(lambda grad, t=t: seen.update([("tensor", t)]))
        t.register_post_accumulate_grad_hook(lambda _, t=t: seen.update([("accumulated", t)]))
    fn.register_forward_pre_hook(lambda m, args: seen.update([("before", args[0].shape[1])]))
    fn.register_forward_hook(lambda m, args, out: seen.update([("after", out.shape[1])]))
    fn.register_full_backward_hook(lambda m, gin, gout: seen.update([("backward", gin[0].shape[1])]))
    tiled(fn, x, 6).sum().backward()
    expected = [(kind, t) for kind in ("tensor", "accumulated") for t in (x, *fn.parameters())]
    assert seen == dict.fromkeys([*expected, *((kind, TOKENS) for kind in ("before", "after", "backward"))], 1)
    assert "forward" not in fn.__dict__


def test_a_forward_of_its_own_stays_and_an_error_leaves_the_module_as_it_was():
    fn, x = mlp(), tokens()
    fn.forward = own = lambda x: x * 2
    assert_same(tiled(fn, x, 3), x * 2, x)
    assert fn.__dict__["forward"] is own
    del fn.forward
    fn.register_forward_pre_hook(lambda m, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiled(fn, x, 3)
    assert "forward" not in fn.__dict__


# -- random state, precision, nesting ---------------------------------------------------------------------------------


def test_backward_drops_what_forward_dropped():
    x = tokens()
    y = tiled(lambda x: F.dropout(x, 0.5), x, 7)
    torch.rand(1)
    moved = torch.get_rng_state()
    grad = torch.autograd.grad(y.sum(), x)[0]
    assert torch.equal(torch.get_rng_state(), moved)
    assert torch.equal(grad, (y != 0) * 2.0)
    masks = [part != 0 for part in y.chunk(7, 1)]
    assert not torch.equal(masks[0], masks[1])


def test_backward_outside_of_autocast_recomputes_inside():
    fn, x, dtypes = mlp(dtype=torch.float32), tokens(dtype=torch.float32), []
    fn[1].register_forward_hook(lambda m, args, out: dtypes.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        y = tiled(fn, x, 3)
    y.float().sum().backward()
    assert dtypes == [torch.bfloat16] * 6
    assert torch.is_autocast_cache_enabled()


# -- memory -----------------------------------------------------------------------------------------------------------


MODULES = {
    "gelu": (torch.float32, lambda d: nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))),
    "head": (torch.bfloat16, lambda d: nn.Sequential(nn.RMSNorm(d), nn.Linear(d, 10 * d))),
    "norm": (torch.float32, nn.LayerNorm),
}


@pytest.mark.parametrize("name", MODULES)
def test_peak_is_input_output_gradients_and_workspace(name):
    """Forward: x is there; y and a chunk. Backward: dy is there; x, dx, parameters' gradients and a chunk."""
    dtype, make = MODULES[name]
    fn, x, workspace = make(64).to(dtype), tokens((1, 4096, 64), dtype), 2**18 if name == "norm" else 2**20
    for p in fn.parameters():
        p.grad = torch.zeros_like(p)
    tiled(fn, x, workspace=workspace).sum().backward()  # libraries' own memory is there
    with peak_memory("cpu") as forward, saved_tensors(fn) as saved:
        y = tiled(fn, x, workspace=workspace)
    dy = torch.randn_like(y)
    with peak_memory("cpu") as backward:
        y.backward(dy)
    # sums and a chunk's; of 16 bits also its cast and matmuls' float32 copies
    gradients = (8 if dtype == torch.bfloat16 else 2) * sum(p.nbytes for p in fn.parameters())
    states = 4096 * 128  # random state of each chunk
    assert [row[2] for row in saved.tensors] == [x.nbytes]
    assert y.nbytes <= forward.bytes <= y.nbytes + workspace + states
    assert x.nbytes <= backward.bytes <= x.nbytes + workspace + gradients
    assert name != "norm" or backward.bytes < 2 * x.nbytes, "two gradients of the input"


def test_workspace_sets_the_length():
    seen, x = [], torch.randn(4096, 64)
    fn = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    fn[0].register_forward_hook(lambda m, args, out: seen.append(out.shape[-2]))
    # a token saves x, h and gelu(h), and returns y: 640 floats, twice
    for workspace, lengths in ((5120 * 1024, [1024] * 4), ("1KiB", [128] * 32), ("1GiB", [4096])):
        tiled(fn, x, workspace=workspace)  # measures
        seen.clear()
        tiled(fn, x, workspace=workspace)
        assert seen == lengths


class Routes(nn.Module):
    """Reads values on the host, samples, and counts calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.lengths = []

    def forward(self, x):
        self.lengths.append(x.shape[-2])
        self.calls += 1
        values, indices = F.dropout(x, 0.5).topk(2)
        return torch.exp(values) * (1 + (indices.max().item() < 0))


def test_what_fake_tensors_cannot_run_is_measured_on_tokens():
    """This leaves buffers and random states, and no decisions to a recompute, which knows the size."""
    fn, x = Routes(), torch.randn(4096, 64, requires_grad=True)
    torch.manual_seed(0)
    y = ckptkern.checkpoint(tiled, fn, x, workspace="1MiB", context_fn=ckptkern.saved_decisions)
    # 576 bytes of a token: twice dropout's mask, two indices, two exp and y
    assert fn.lengths == [128, 128, 256, 1366, 1366, 1364]
    assert fn.calls == 3
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(tiled(fn, x, 3).sum(), x)
    torch.testing.assert_close(dx, expected)


# -- what is refused --------------------------------------------------------------------------------------------------


REFUSED = [
    ({"chunks": 0}, ValueError, "chunks must be a positive int or None, not 0"),
    ({"chunks": True}, ValueError, "chunks must be a positive int"),
    ({"dim": 3}, ValueError, r"dim must be a dimension of x, which has shape \(2, 150, 8\), but is 3"),
    ({"workspace": "much"}, ValueError, "tiled: workspace must be"),
    ({"chunks": 2, "workspace": 4}, ValueError, "chunks and workspace both set a chunk's length"),
    ({"x": [1]}, TypeError, "x must be a tensor, not list"),
    ({"fn": 3}, TypeError, "fn must be a function or module of one tensor, not int"),
    ({"fn": lambda x: (x, x)}, TypeError, "must return a tensor, but returned a tuple"),
    ({"fn": lambda x: x.sum()}, ShapeError, r"got 75 tokens but returned shape \(\)"),
    ({"fn": lambda x: x[:, :3]}, ShapeError, r"got 75 tokens but returned shape \(2, 3, 8\)"),
]


@pytest.mark.parametrize(("how", "kind", "message"), REFUSED)
def test_bad_arguments(how, kind, message):
    arguments = {"fn": mlp(), "x": tokens(), "chunks": None if "workspace" in how else 2} | how
    with pytest.raises(kind, match=message):
        tiled(**arguments)


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


NOT_TOKEN_WISE = {
    "roll": (Calls(lambda x: x.roll(1, -2)), r"output for token \d+ depends on other tokens \(in 1: Calls\)"),
    "mean": (Calls(lambda x: x - x.mean(-2, keepdim=True)), r"depends on other tokens \(in 1: Calls\)"),
    "position": (
        Calls(lambda x: x + torch.arange(x.shape[-2], dtype=x.dtype)[:, None]),
        "run alone, tokens 50 to 99 give an output that differs",
    ),
    "batch norm": (nn.BatchNorm1d(WIDTH).double(), "is not token-wise along dimension 0.* 1: BatchNorm1d"),
    "mixer": (nn.Conv1d(TOKENS, TOKENS, 1).double(), r"depends on other tokens \(in 1: Conv1d\)"),
}


@pytest.mark.parametrize("name", NOT_TOKEN_WISE)
def test_check_names_what_is_not_token_wise(name):
    """It leaves statistics as they were."""
    bad, message = NOT_TOKEN_WISE[name]
    fn = nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), bad)
    x, dim, before = tokens((TOKENS, WIDTH)) if name == "batch norm" else tokens(), -2, copy.deepcopy(fn.state_dict())
    with pytest.raises((ValueError, RuntimeError), match=message):
        tiled(fn, x, 3, dim, check=True)
    torch.testing.assert_close(fn.state_dict(), before, rtol=0, atol=0)


def test_check_passes_what_is_token_wise_and_draws_nothing():
    for fn in (mlp(), mlp(0.3), lambda x: F.dropout(x, 0.1)):
        x, after = tokens(), []
        for check in (True, False):
            torch.manual_seed(2)
            tiled(fn, x, 3, check=check)
            after.append(torch.get_rng_state())
        assert torch.equal(*after)


class Watched(nn.Module):
    """Computes otherwise while it has hooks, as modules with a fast path do."""

    def forward(self, x):
        return x * (2 if self._forward_hooks else 3)


def test_check_compares_chunks_without_hooks_of_its_own():
    fn, x = nn.Sequential(nn.Identity(), Watched()), tokens()
    assert torch.equal(tiled(fn, x, 3, check=True), 3 * x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_check_of_whole_numbers_registers_no_hooks():
    """A scripted module refuses them."""
    fn, x = nn.Sequential(torch.jit.script(nn.Embedding(9, WIDTH))), torch.arange(9).view(1, 9)
    assert torch.equal(tiled(fn, x, 3, -1, check=True), fn(x))
