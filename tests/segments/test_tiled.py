"""ckptkern.tiled against fn(x): values, gradients and their sums, hooks, random state, precision, memory, errors."""

import copy

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


def mlp(p: float = 0.0, width: int = WIDTH, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(p), nn.Linear(4 * width, width)
    ).to(dtype)


def tokens(shape=(2, TOKENS, WIDTH), dtype=torch.float64, requires_grad=True) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(shape, dtype=dtype).requires_grad_(requires_grad)


def grads(y, wanted):
    torch.manual_seed(2)
    return torch.autograd.grad(y, wanted, torch.randn(y.shape).to(y.dtype), allow_unused=True)


def assert_close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


# -- the same function ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 2, 7, TOKENS, 1000])
@pytest.mark.parametrize(("shape", "dim"), [((2, TOKENS, WIDTH), -2), ((TOKENS, WIDTH), 0), ((TOKENS, 3, WIDTH), 0)])
def test_output_and_gradients(shape, dim, chunks):
    fn, x = mlp(), tokens(shape)
    y, expected = tiled(fn, x, chunks, dim), fn(x)
    assert_close([y, *grads(y, [x, *fn.parameters()])], [expected, *grads(expected, [x, *fn.parameters()])])


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_layers_of_ours(recompute):
    torch.manual_seed(0)
    fn = ckptkern.nn.MLP(WIDTH, 4 * WIDTH, recompute=recompute).double()
    x = tokens()
    y, expected = tiled(fn, x, 3), fn(x)
    assert_close([y, *grads(y, [x, *fn.parameters()])], [expected, *grads(expected, [x, *fn.parameters()])])


def test_output_of_another_shape_and_dtype():
    x = tokens()
    fn = lambda x: (x.logsumexp(-1) > 0).int()  # noqa: E731
    assert torch.equal(tiled(fn, x, 4), fn(x))
    head = nn.Linear(WIDTH, 31).double()
    assert_close([tiled(head, x, 4)], [head(x)])


@pytest.mark.parametrize("x_needs", [True, False])
@pytest.mark.parametrize("frozen", [(), (1,), (0, 1, 4), (0, 1, 2, 3, 4)])
def test_any_of_the_gradients(frozen, x_needs):
    fn, x = mlp(), tokens(requires_grad=x_needs)
    for i in frozen:
        fn[i].requires_grad_(False)
    wanted = [one for one in (x, *fn.parameters()) if one.requires_grad]
    y, expected = tiled(fn, x, 4), fn(x)
    assert y.requires_grad == expected.requires_grad
    if wanted:
        assert_close(grads(y, wanted), grads(expected, wanted))


def test_tensors_that_a_function_captures():
    x, scale = tokens(), torch.randn(WIDTH, dtype=torch.float64, requires_grad=True)
    derived = scale.exp()
    fn = lambda x: (x * scale).tanh() + derived  # noqa: E731
    y, expected = tiled(fn, x, 4), fn(x)
    torch.manual_seed(2)
    dy = torch.randn_like(y)
    assert_close(*(torch.autograd.grad(one, [x, scale], dy, retain_graph=True) for one in (y, expected)))


def test_without_gradients_and_empty():
    fn, x = mlp(), tokens()
    with torch.no_grad():
        y = tiled(fn, x, 4)
        assert not y.requires_grad
        assert_close([y], [fn(x)])
    with torch.inference_mode():
        assert_close([tiled(fn, x, 4)], [fn(x)])
    assert tiled(fn, tokens((2, 0, WIDTH))).shape == (2, 0, WIDTH)


def test_two_backward_passes_and_second_order():
    fn, x = mlp(), tokens((1, 5, WIDTH))
    y = tiled(fn, x, 2)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y.sum(), x)[0])
    assert torch.autograd.gradgradcheck(lambda x: tiled(fn, x, 2), (x,))


def test_only_some_chunks_get_a_gradient():
    fn, x = mlp(), tokens()
    y, expected = tiled(fn, x, 5), fn(x)
    assert_close(grads(y[:, :3], [x]), grads(expected[:, :3], [x]))


# -- sums of gradients ------------------------------------------------------------------------------------------------


def assert_within_twice_of(eager, found, exact):
    """Each parameter's error is at most twice eager's own, and half a rounding of the gradient itself."""

    def errors(grads):
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(grads, exact, strict=True)]

    for grad, ours, theirs in zip(found, errors(found), errors(eager), strict=True):
        assert ours <= 2 * theirs + torch.finfo(grad.dtype).eps / 2


def run_of(fn, x, call, autocast=None):
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        y = call(fn, x)
    return torch.autograd.grad(y, list(fn.parameters()), torch.ones_like(y))  # of one sign: sums grow


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "autocast"])
@pytest.mark.parametrize("whole", ["module", "function"])
def test_sums_of_16_bit_gradients_do_not_round_for_each_chunk(whole, dtype):
    """256 chunks: a sum in bfloat16 stops growing where a chunk's part is below a rounding."""
    autocast = torch.bfloat16 if dtype == "autocast" else None
    own = torch.float32 if autocast else dtype
    fn, x = mlp(dtype=own), tokens((1, 1024, WIDTH), own, requires_grad=False)
    exact = run_of(copy.deepcopy(fn).double(), x.double(), lambda fn, x: fn(x))
    eager = run_of(fn, x, lambda fn, x: fn(x), autocast)
    call = (lambda fn, x: tiled(fn, x, 256)) if whole == "module" else (lambda fn, x: tiled(lambda x: fn(x), x, 256))
    assert_within_twice_of(eager, run_of(fn, x, call, autocast), exact)


def test_the_sum_of_a_tensor_that_is_no_parameter():
    scale = torch.ones(WIDTH, dtype=torch.bfloat16, requires_grad=True)
    derived = scale * 1.0
    x = torch.full((1, 4096, WIDTH), 1.0, dtype=torch.bfloat16)
    y = tiled(lambda x: x * derived, x, 1024)
    assert torch.autograd.grad(y, scale, torch.ones_like(y))[0].tolist() == [4096.0] * WIDTH


# -- hooks ------------------------------------------------------------------------------------------------------------


def test_hooks_of_parameters_run_once():
    fn, x = mlp(), tokens()
    seen = []
    for name, p in fn.named_parameters():
        p.register_hook(lambda grad, name=name: seen.append(("tensor", name)))
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(("accumulated", name)))
    x.register_hook(lambda grad: seen.append(("tensor", "x")))
    tiled(fn, x, 6).sum().backward()
    names = [name for name, _ in fn.named_parameters()]
    assert sorted(seen) == sorted([("tensor", "x"), *((kind, n) for kind in ("tensor", "accumulated") for n in names)])


def test_hooks_of_the_module_run_once_with_all_tokens():
    fn, x = mlp(), tokens()
    seen = []
    fn.register_forward_pre_hook(lambda m, args: seen.append(("before", m is fn, args[0].shape[1])))
    fn.register_forward_hook(lambda m, args, out: seen.append(("after", m is fn, out.shape[1])))
    fn.register_full_backward_hook(lambda m, gin, gout: seen.append(("backward", m is fn, gin[0].shape[1])))
    tiled(fn, x, 3).sum().backward()
    assert seen == [("before", True, TOKENS), ("after", True, TOKENS), ("backward", True, TOKENS)]
    assert "forward" not in fn.__dict__


def test_a_forward_of_its_own_stays_and_an_error_leaves_the_module_as_it_was():
    fn, x = mlp(), tokens()
    fn.forward = own = lambda x: x * 2
    assert_close([tiled(fn, x, 3)], [x * 2])
    assert fn.__dict__["forward"] is own
    fn.forward = None
    del fn.forward
    fn.register_forward_pre_hook(lambda m, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiled(fn, x, 3)
    assert "forward" not in fn.__dict__


def test_main_grad():
    torch.manual_seed(0)
    fn, x = ckptkern.nn.MLP(WIDTH, 4 * WIDTH, recompute="full").bfloat16(), tokens(dtype=torch.bfloat16)
    copied = copy.deepcopy(fn)
    for module in (fn, copied):
        for p in module.parameters():
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    tiled(fn, x, 5).float().sum().backward()
    copied(x).float().sum().backward()
    for ours, theirs in zip(fn.parameters(), copied.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None) == (theirs.dim() == 2)
        ours, theirs = (p.main_grad if p.grad is None else p.grad.float() for p in (ours, theirs))
        assert (ours - theirs).abs().max() < 2e-2 * theirs.abs().max()


# -- random state, precision, nesting ---------------------------------------------------------------------------------


def test_backward_drops_what_forward_dropped():
    x = tokens()
    torch.manual_seed(3)
    y = tiled(lambda x: F.dropout(x, 0.5), x, 7)
    after = torch.get_rng_state()
    torch.manual_seed(4)
    moved = torch.get_rng_state()
    grad = torch.autograd.grad(y.sum(), x)[0]
    assert torch.equal(torch.get_rng_state(), moved)
    assert torch.equal(grad, (y != 0) * 2.0)
    masks = [part != 0 for part in y.chunk(7, 1)]
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(after, moved)


def test_backward_outside_of_autocast_recomputes_inside(monkeypatch):
    fn, x = mlp(dtype=torch.float32), tokens(dtype=torch.float32)
    dtypes = []
    fn[1].register_forward_hook(lambda m, args, out: dtypes.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        y = tiled(fn, x, 3)
    y.float().sum().backward()
    assert dtypes == [torch.bfloat16] * 6
    assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("outer", [ckptkern.checkpoint, torch_checkpoint.checkpoint], ids=["ours", "torch's"])
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("how", [{"chunks": 4}, {"workspace": "16KiB"}])
def test_inside_a_checkpoint(how, p, outer):
    fn, x = mlp(p), tokens((2, 512, WIDTH))
    results = []
    for call in (
        lambda x: tiled(fn, x, **how),
        lambda x: outer(lambda x: tiled(fn, x, **how).sin(), x, use_reentrant=False),
    ):
        torch.manual_seed(5)
        y = call(x)
        results.append((y, call))
    inner = results[0][0].sin()
    assert_close(
        [results[1][0], *grads(results[1][0], [x, *fn.parameters()])], [inner, *grads(inner, [x, *fn.parameters()])]
    )


def test_checkpoints_inside():
    fn, x = mlp(0.3), tokens()
    inner = lambda x: ckptkern.checkpoint(fn, x) + torch_checkpoint.checkpoint(fn, x, use_reentrant=False)  # noqa: E731
    unfused = lambda x: fn(x) + fn(x)  # noqa: E731
    torch.manual_seed(6)
    y = tiled(inner, x, 3)
    torch.manual_seed(6)
    expected = tiled(unfused, x, 3)
    assert_close([y, *grads(y, [x, *fn.parameters()])], [expected, *grads(expected, [x, *fn.parameters()])])


def test_compiled():
    fn, x = mlp(), tokens()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x):
        return tiled(fn, x, 4) * 2

    y, expected = compiled(x), fn(x) * 2
    assert_close([y, *grads(y, [x, *fn.parameters()])], [expected, *grads(expected, [x, *fn.parameters()])])


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))

    def forward(self, x):
        return x * self.weight


def test_compiled_sums_of_16_bit_gradients():
    """12 chunks of 85 tokens: bfloat16 has no 425."""
    fn, x = Scale(), torch.ones(1020, 2, dtype=torch.bfloat16)
    torch.compile(lambda x: tiled(fn, x, 12), backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert fn.weight.grad.tolist() == [1020.0, 1020.0]


# -- memory -----------------------------------------------------------------------------------------------------------


def test_saves_its_input():
    fn, x = mlp(), tokens()
    with saved_tensors(fn) as saved:
        tiled(fn, x, 6)
    assert [one[2] for one in saved.tensors] == [x.nbytes]


MODULES = {
    "gelu": lambda d: nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)),
    "relu, norm": lambda d: nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 6 * d), nn.ReLU(), nn.Linear(6 * d, d)),
    "head": lambda d: nn.Sequential(nn.RMSNorm(d), nn.Linear(d, 10 * d)),
    "deep": lambda d: nn.Sequential(*[nn.Sequential(nn.Linear(d, d), nn.SiLU()) for _ in range(12)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODULES)
def test_peak_is_input_output_gradients_and_workspace(name, dtype):
    """Forward: x is there; y and a chunk. Backward: dy is there; x, dx, parameters' gradients and a chunk."""
    fn, x = MODULES[name](64).to(dtype), tokens((1, 4096, 64), dtype)
    for p in fn.parameters():
        p.grad = torch.zeros_like(p)
    workspace = 2**20
    tiled(fn, x, workspace=workspace).sum().backward()  # libraries' own memory is there
    with peak_memory("cpu") as forward:
        y = tiled(fn, x, workspace=workspace)
    dy = torch.randn_like(y)
    with peak_memory("cpu") as backward:
        y.backward(dy)
    width = (
        8 if dtype == torch.bfloat16 else 2
    )  # sums and a chunk's; of 16 bits also its cast and matmuls' float32 copies
    gradients = width * sum(p.nbytes for p in fn.parameters())
    states = 4096 * 128  # random state of each chunk
    assert y.nbytes <= forward.bytes <= y.nbytes + workspace + states
    assert x.nbytes <= backward.bytes <= x.nbytes + workspace + gradients
    with peak_memory("cpu") as step:
        tiled(fn, x, workspace=workspace).backward(dy)
    with peak_memory("cpu") as unfused:
        fn(x).backward(dy)
    assert step.bytes < unfused.bytes


def test_backward_has_one_gradient_of_the_input():
    fn, x, workspace = nn.LayerNorm(64), tokens((1, 16384, 64), torch.float32), 2**18
    y = tiled(fn, x, workspace=workspace)
    dy = torch.randn_like(y)
    with peak_memory("cpu") as backward:
        y.backward(dy)
    assert x.nbytes <= backward.bytes <= x.nbytes + workspace < 2 * x.nbytes


def test_workspace_sets_the_length():
    seen = []
    fn = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    fn[0].register_forward_hook(lambda m, args, out: seen.append(out.shape[-2]))
    x = torch.randn(4096, 64)

    def lengths(**how):
        tiled(fn, x, **how)
        seen.clear()
        tiled(fn, x, **how)
        return list(seen)

    # a token saves x, h and gelu(h), and returns y: 640 floats, twice
    assert lengths(workspace=5120 * 1024) == [1024] * 4
    assert lengths(workspace="1KiB") == [128] * 32
    assert lengths(workspace="1GiB") == [4096]


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ({"chunks": 0}, ValueError, "chunks must be a positive int or None, not 0"),
        ({"chunks": True}, ValueError, "chunks must be a positive int"),
        ({"chunks": "4"}, ValueError, "chunks must be a positive int"),
        ({"dim": 3}, ValueError, r"dim must be a dimension of x, which has shape \(2, 150, 8\), but is 3"),
        ({"workspace": "much"}, ValueError, "tiled: workspace must be"),
        ({"chunks": 2, "workspace": 4}, ValueError, "chunks and workspace both say how long a chunk is"),
        ({"x": [1]}, TypeError, "x must be a tensor, not list"),
        ({"fn": 3}, TypeError, "fn must be a function or module of one tensor, not int"),
        ({"fn": lambda x: (x, x)}, TypeError, "must return a tensor, but returned a tuple"),
        ({"fn": lambda x: x.sum()}, ShapeError, r"got 75 tokens and returned shape \(\)"),
        ({"fn": lambda x: x[:, :3]}, ShapeError, r"got 75 tokens and returned shape \(2, 3, 8\)"),
    ],
)
def test_bad_arguments(how, kind, message):
    arguments = {"fn": mlp(), "x": tokens(), "chunks": None if "workspace" in how else 2} | how
    with pytest.raises(kind, match=message):
        tiled(**arguments)


def test_what_fake_tensors_cannot_run_needs_chunks():
    x = tokens((1, 512, WIDTH))
    fn = lambda x: x * (x.sum().item() != 0)  # noqa: E731
    with pytest.raises(RuntimeError, match=r"does not run on fake tensors, .*: give chunks"):
        tiled(fn, x)
    assert tiled(fn, x, 2).shape == x.shape


class Roll(nn.Module):
    def forward(self, x):
        return x.roll(1, -2)


class Position(nn.Module):
    def forward(self, x):
        return x + torch.arange(x.shape[-2], dtype=x.dtype)[:, None]


class Mean(nn.Module):
    def forward(self, x):
        return x - x.mean(-2, keepdim=True)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Roll(), r"output for token \d+ depends on other tokens \(in 1: Roll\)"),
        (Mean(), r"depends on other tokens \(in 1: Mean\)"),
        (Position(), "tokens 50 to 99 alone give another output than among the others"),
        (nn.Conv1d(TOKENS, TOKENS, 1).double(), r"depends on other tokens \(in 1: Conv1d\)"),
    ],
    ids=["roll", "mean", "position", "mixer"],
)
def test_check_names_what_is_not_token_wise(bad, message):
    fn, x = nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), bad), tokens()
    with pytest.raises((ValueError, RuntimeError), match=message):
        tiled(fn, x, 3, check=True)


def test_check_finds_batch_norm_and_leaves_its_statistics():
    norm = nn.BatchNorm1d(WIDTH).double()
    before = copy.deepcopy(norm.state_dict())
    with pytest.raises(ValueError, match="tiled: BatchNorm1d is not token-wise along dimension 0"):
        tiled(norm, tokens((TOKENS, WIDTH)), 3, 0, check=True)
    for name, value in norm.state_dict().items():
        assert torch.equal(value, before[name])


def test_check_passes_what_is_token_wise():
    x = tokens()
    for fn in (mlp(), mlp(0.3), lambda x: F.dropout(x, 0.1)):
        before = torch.get_rng_state()
        tiled(fn, x, 3, check=True)
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        tiled(fn, x, 3)
        assert torch.equal(after, torch.get_rng_state())
