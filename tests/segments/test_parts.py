"""Layers that run in parts: cut at what mixes tokens, in slices along whatever axis is independent."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import register_pytree_node

import ckptkern
from ckptkern.memory import peak_memory
from ckptkern.segments import parts as parts_file
from ckptkern.segments import stages
from ckptkern.segments.axes import name_of, shape_of
from ckptkern.segments.decisions import Decisions
from ckptkern.segments.parts import Parts
from ckptkern.segments.recorded import is_traced, traced_call

D, H, S = 32, 4, 96


def mixed(x: Tensor) -> Tensor:
    """Mixes tokens, each feature by itself, by a recurrence that nothing knows."""
    state, states = torch.zeros_like(x[:, 0]), []
    for i in range(0, x.shape[1], 8):
        part = x[:, i : i + 8]
        state = torch.tanh(state + part.cumsum(1)[:, -1])
        states.append(part * state[:, None])
    return torch.cat(states, 1)


class Layer(nn.Module):
    """A token mixer between token-wise steps, of which no pattern is known."""

    def __init__(self, mixer=mixed, d: int = D):
        super().__init__()
        self.up, self.out = nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.convolution = nn.Conv1d(d, d, 3, padding=2, groups=d)
        self.wide, self.narrow = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.scale = nn.Parameter(torch.ones(d))
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.up(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).chunk(2, -1)
        h = F.silu(self.convolution(h.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        x = x + self.out(self.mixer(h) * torch.sigmoid(gate)) * self.scale
        return x + self.narrow(torch.sin(self.wide(x)) * torch.exp(-self.wide(x).square()))


class Heads(nn.Module):
    """Attention written out, over heads that share keys and values."""

    def __init__(self, mask: bool = False):
        super().__init__()
        self.qkv, self.out, self.mask = nn.Linear(D, D + D, bias=False), nn.Linear(D, D), mask

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        q, k, v = self.qkv(x).split([D, D // 2, D // 2], -1)
        q = q.view(B, S, H, -1).transpose(1, 2)
        k, v = (heads.view(B, S, H // 2, -1).transpose(1, 2).repeat_interleave(2, 1) for heads in (k, v))
        scores = q @ k.transpose(-1, -2) * D**-0.5
        if self.mask:
            scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -1e9)
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, S, D))


class Relative(nn.Module):
    """Attention with scores of distances, which are shifted to the rows of their queries (Transformer-XL, XLNet)."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.distances = nn.Parameter(torch.randn(H, D // H, 2 * S))

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        q, k, v = self.qkv(x).view(B, S, 3, H, -1).permute(2, 0, 3, 1, 4)
        shifted = (q @ self.distances).view(B, H, 2 * S, S)[:, :, 1:].reshape(B, H, S, 2 * S - 1)
        scores = q @ k.transpose(-1, -2) + shifted.index_select(-1, torch.arange(S))
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, S, D))


class Window(nn.Module):
    """Attention to the tokens nearby, by a mask that core attention makes a tensor of floats."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        at = torch.arange(S)
        self.register_buffer("near", (at[:, None] - at).abs() < 8)

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        q, k, v = self.qkv(x).view(B, S, 3, H, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, self.near)
        return x + self.out(y.transpose(1, 2).reshape(B, S, D))


class Scan(nn.Module):
    """A state of heads by features, written in place chunk by chunk."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.decay = nn.Parameter(torch.linspace(0.1, 1, H))

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        q, k, v = (linear(x).view(B, S, H, -1).transpose(1, 2) for linear in (self.q, self.k, self.v))
        state, y = q.new_zeros(B, H, D // H, D // H), torch.zeros_like(v)
        for i in range(0, S, 32):
            at = slice(i, i + 32)
            y[:, :, at] = q[:, :, at] @ state
            state = state * torch.exp(-self.decay)[None, :, None, None] + k[:, :, at].transpose(-1, -2) @ v[:, :, at]
        return x + self.out(y.transpose(1, 2).reshape(B, S, D))


class Waveform(nn.Module):
    """Convolutions that shorten a sequence, one with a norm of each channel over time, one with a norm of each time."""

    def __init__(self):
        super().__init__()
        self.wide, self.over_time = nn.Conv1d(D, 3 * D, 5, stride=2), nn.GroupNorm(3 * D, 3 * D)
        self.apart, self.norm = nn.Conv1d(3 * D, D, 3, dilation=2, bias=False), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.over_time(self.wide(x.transpose(1, 2))))
        return F.gelu(self.norm(self.apart(h).transpose(1, 2)))


LAYERS = {
    "unknown": Layer,
    "heads": Heads,
    "causal": lambda: Heads(mask=True),
    "relative": Relative,
    "window": Window,
    "scan": Scan,
    "waveform": Waveform,
}


def step(layer: nn.Module, x: Tensor, run, dtype: torch.dtype | None = None) -> list[Tensor]:
    layer.zero_grad()
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        y = ckptkern.checkpoint(run, x, determinism_check="values")
    seed = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, generator=seed).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def in_parts(layer: nn.Module, slices: int = 0, workspace: int = 2**16) -> tuple[Parts, object]:
    parts = Parts()
    parts.slices = slices
    return parts, lambda x: parts(layer, workspace, (x,), {})


def assert_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-5) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= tolerance * max(float(tensor.norm()) for tensor in (b, theirs[0]))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("slices", [0, 3, 7])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_in_parts_is_the_layer(name, slices, batch):
    torch.manual_seed(0)
    layer, x = LAYERS[name](), torch.randn(batch, S, D)
    parts, run = in_parts(layer, slices)
    ours = step(layer, x, run)
    (plan,) = parts.plans.values()
    assert plan is not None, parts.why
    assert len(plan.stages) > 1 or plan.stages[0].n == batch  # samples know nothing of each other
    assert not slices or all(stage.length < stage.n for stage in plan.stages if stage.axes)
    assert_close(ours, step(layer, x, layer.forward))


@pytest.mark.parametrize("name", LAYERS)
def test_under_autocast_and_in_16_bits(name):
    torch.manual_seed(0)
    layer, x = LAYERS[name](), torch.randn(2, S, D)
    reference = copy.deepcopy(layer).double()
    wanted = step(reference, x.double(), reference.forward)
    for dtype, model in ((torch.bfloat16, layer), (None, copy.deepcopy(layer).bfloat16())):
        x = x.to(next(model.parameters()).dtype)
        theirs = step(model, x, model.forward, dtype)
        parts, run = in_parts(model, 5)
        ours = step(model, x, run, dtype)
        assert all(parts.plans.values()), parts.why
        for a, b, exact in zip(ours, theirs, wanted, strict=True):
            assert a.dtype == b.dtype
            assert (a - exact).norm() <= 2 * (b - exact).norm() + 1e-3 * exact.norm()


def test_frozen_parameters_get_no_gradient_and_unused_ones_none():
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(1, S, D)
    layer.unused = nn.Linear(2, 2)
    layer.up.requires_grad_(False)
    _, run = in_parts(layer, 4)
    ckptkern.checkpoint(run, x).sum().backward()
    assert layer.up.weight.grad is None
    assert layer.unused.weight.grad is None
    assert layer.out.weight.grad is not None


def test_second_derivatives():
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(1, 16, D, requires_grad=True)
    _, run = in_parts(layer, 3)
    results = []
    for forward in (run, layer.forward):
        (gradient,) = torch.autograd.grad(forward(x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), [x, layer.wide.weight]))
    assert_close(*results, tolerance=1e-4)


class Experts(nn.Module):
    """A mixture of experts by a matmul of groups of rows, which torch knows of fake tensors in 16 bits alone."""

    def __init__(self):
        super().__init__()
        self.router, self.norm = nn.Linear(D, 4), nn.RMSNorm(D, elementwise_affine=False)
        self.up = nn.Parameter(torch.randn(4, D, 2 * D) / D**0.5)
        self.down = nn.Parameter(torch.randn(4, 2 * D, D) / D**0.5)
        self.bias = nn.Parameter(torch.randn(4, 2 * D))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x).flatten(0, 1)
        scores, experts = torch.topk(self.router(h).softmax(-1), 2)
        experts, order = experts.flatten().sort(stable=True)
        ends = torch.histc(experts.float(), 4, 0, 3).cumsum(0).to(torch.int32)
        wide = torch._grouped_mm(h[order // 2], self.up, offs=ends) + self.bias[experts]
        y = torch._grouped_mm(F.silu(wide), self.down, offs=ends) * scores.flatten()[order, None]
        return x + torch.zeros_like(h).index_add(0, order // 2, y).view_as(x)


class Biased(nn.Module):
    """Attention with a bias by distance, computed of a small table, which the layer returns, as T5's first one does."""

    def __init__(self):
        super().__init__()
        self.qkv, self.table = nn.Linear(D, 3 * D), nn.Embedding(16, H)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, S, _ = x.shape
        at = torch.arange(S)
        distance = (at[None, :] - at[:, None]).abs().float()
        bias = self.table((distance + 1).log().mul(3).long().clamp(max=15)).permute(2, 0, 1)[None]
        q, k, v = (heads.view(B, S, H, -1).transpose(1, 2) for heads in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, bias)
        return x + y.transpose(1, 2).reshape(B, S, D), bias, torch.zeros(1, H, S, S)


def test_decisions_are_those_of_forward(monkeypatch):
    """topk and sort run once, all at once, and a recompute takes what forward chose."""
    torch.manual_seed(0)
    layer, x = Experts(), torch.randn(2, S, D)
    try:
        theirs = step(layer, x, layer.forward)
    except RuntimeError as error:
        pytest.skip(f"this torch multiplies groups in 16 bits alone: {error}")
    parts, run = in_parts(layer, 3)
    decided, seen = Decisions.decided, []
    monkeypatch.setattr(Decisions, "decided", lambda self, *args: (seen.append(args[0]), decided(self, *args))[1])

    def checkpointed(x):
        return ckptkern.checkpoint(run, x, context_fn=ckptkern.saved_decisions)

    x0 = x.detach().requires_grad_()
    y = checkpointed(x0)
    assert seen == ["topk", "sort"]
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    assert seen == ["topk", "sort"] * 2
    assert_close([y.detach(), x0.grad, *(p.grad for p in layer.parameters())], theirs)
    (plan,) = parts.plans.values()
    whole = [stage for stage in plan.stages if not stage.axes]
    assert {"topk", "sort", "part"} <= {name_of(node) for stage in whole for node in stage.nodes}
    assert "grouped_mm" in str(plan)
    assert any("index" in str(stage) for stage in plan.stages if stage.axes), "rows of a table, with what reads them"


def test_what_is_computed_of_a_small_table_is_cut_and_what_has_no_gradient_gets_none():
    torch.manual_seed(0)
    layer, x = Biased(), torch.randn(1, S, D)
    parts, run = in_parts(layer)
    results = []
    for forward in (run, layer.forward):
        layer.zero_grad()
        y, bias, zeros = ckptkern.checkpoint(forward, x)
        assert bias.requires_grad
        assert not zeros.requires_grad
        (y.square().sum() + bias.sin().sum()).backward()
        results.append([y.detach(), bias.detach(), *(p.grad for p in layer.parameters())])
    assert_close(*results)
    (plan,) = parts.plans.values()
    (stage,) = (stage for stage in plan.stages if "embedding" in map(name_of, stage.nodes))
    assert stage.n == S
    assert stages.FLOOR <= stage.length < S


@pytest.mark.parametrize("kind", [Relative, Window])
def test_scores_and_masks_are_not_stored_for_slices_of_rows(kind):
    layer, x = kind(), torch.randn(1, S, D)
    parts, run = in_parts(layer)
    step(layer, x, run)
    (plan,) = parts.plans.values()
    results = [node for stage in plan.stages for node in stage.results if name_of(node) != "addmm"]
    stored = [name_of(n) for n in results if stages.size_of(n) > 3 * x.nbytes or shape_of(n) == (S, S)]
    assert not stored, str(plan)


def test_parts_of_a_product_take_memory_for_themselves_alone():
    class Chunks(Layer):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return tuple(part.transpose(1, 2) for part in self.up(x).chunk(2, -1))

    torch.manual_seed(0)
    layer, x = Chunks(), torch.randn(1, S, D)
    _, run = in_parts(layer, 3)
    ours, theirs = run(x), layer(x)
    assert_close(*([part.detach() for part in parts] for parts in (ours, theirs)))
    assert [part.untyped_storage().nbytes() for part in ours] == [part.nbytes for part in theirs]


def test_a_value_that_is_read_whole_and_through_a_view():
    class Shifts(Layer):
        def forward(self, x: Tensor) -> Tensor:
            x = self.out(x).cumsum(1)
            return x + F.pad(x[..., 1:], (1, 0))

    torch.manual_seed(0)
    layer, x = Shifts(), torch.randn(3, S, D)
    parts, run = in_parts(layer, workspace=2**12)
    assert_close(*([y.detach() for y in f(x)] for f in (run, layer)))
    assert all(parts.plans.values()), parts.why


def test_scores_that_a_layer_returns_are_computed_where_they_are_read():
    class Returns(Heads):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            q, k = self.qkv(x).chunk(2, -1)
            scores = (q @ k.transpose(-1, -2)).softmax(-1)
            return x + self.out(scores @ x), scores

    torch.manual_seed(0)
    layer, x = Returns(), torch.randn(1, S, D)
    parts, run = in_parts(layer, 3)
    assert_close([output.detach() for output in run(x)], [output.detach() for output in layer(x)])
    (plan,) = parts.plans.values()
    handed = {node.name for stage in plan.stages for node in stage.results if node.meta["val"].shape[-1] == S}
    assert len(handed) == 1, "the result alone has a column for each token"


def test_slices_of_a_loop_launch_so_many_operators_at_most(monkeypatch):
    """A workspace of a kilobyte would run the loop for a channel at a time."""

    class Loop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            state, states = torch.zeros_like(x[:, 0]), []
            for row in x.unbind(1):
                state = torch.tanh(state + row)
                states.append(state)
            return torch.stack(states, 1)

    torch.manual_seed(0)
    layer, x = Loop(), torch.randn(1, S, D)
    lengths = []
    for launched in (2**16, 1000):
        monkeypatch.setattr(stages, "LAUNCHED", launched)
        parts, run = in_parts(layer, workspace=1024)
        assert_close([run(x)], [layer(x)])
        (stage,) = next(iter(parts.plans.values())).stages
        assert stage.n == D
        assert -(-stage.n // stage.length) * len(stage.nodes) <= launched
        lengths.append(stage.length)
    assert lengths == [1, 11]


def test_what_samples_or_writes_is_not_cut():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x):
            self.count.add_(1)
            return x * self.count.sum()

    for layer, why in ((nn.Dropout(0.5), "dropout|bernoulli|rand"), (Writes(), "changes what")):
        parts, run = in_parts(layer, 2)
        x = torch.randn(2, 8, D)
        ours = run(x)
        assert ours.shape == x.shape
        for _ in range(3):
            run(x)
        assert list(parts.plans.values()) == [None]
        assert any(reason in parts.why for reason in why.split("|")), parts.why
        if isinstance(layer, Writes):
            assert layer.count.tolist() == [4, 4, 4]


class Seeding(Layer):
    """Sets a seed of NumPy's generator and reads what it draws, after a number of Python's in one of these ways."""

    def __init__(self, seed: int, reads: str = ""):
        super().__init__()
        self.seed, self.reads = seed, reads

    def forward(self, x: Tensor) -> Tensor:
        numpy = pytest.importorskip("numpy")
        number = random.random() if self.reads else 0.5
        if self.reads == "in a constant":
            x = x * torch.tensor(number)
        if self.reads == "in a call":
            x = traced_call(None, torch.mul, (x, number), {}) if is_traced() else x * number
        if self.reads == "to choose" and number < 0.3:
            x = x.sin()
        if self.reads != "without a seed":
            random.seed(0)
        numpy.random.seed(self.seed)
        order = numpy.random.permutation(D)
        numpy.random.normal()  # draws two numbers, and holds one back
        return super().forward(x[..., torch.tensor(order, dtype=torch.long)])


def test_numbers_that_a_forward_draws_from_its_own_seed_are_recorded():
    numpy = pytest.importorskip("numpy")
    torch.manual_seed(0)
    x, parts = torch.randn(1, S, D), Parts()
    for seed in (1, 2):
        layer, states = Seeding(seed), []

        def run(x, layer=layer):
            return parts(layer, 2**16, (x,), {})

        for forward in (layer, lambda x, run=run: ckptkern.checkpoint(run, x)):
            random.seed(3)
            y = forward(x)
            states.append(str((random.getstate(), numpy.random.get_state())))
            numpy.random.seed(4)
            before = numpy.random.random(), numpy.random.seed(4)
            y.sum().backward()
            assert (numpy.random.random(), None) == before, "a recompute draws nothing"
        assert states[0] == states[1]
        assert_close(step(layer, x, run), step(layer, x, layer.forward))
    assert len(parts.plans) == 2, "each layer has its own numbers"
    assert all(plan and plan.ends for plan in parts.plans.values()), parts.why


@pytest.mark.parametrize("reads", ["in a constant", "in a call", "to choose", "without a seed"])
def test_a_forward_that_draws_without_a_seed_of_its_own_is_not_cut(reads):
    parts, run = in_parts(Seeding(1, reads))
    run(torch.randn(1, S, D))
    assert list(parts.plans.values()) == [None]
    assert "NumPy's random numbers" in parts.why


def test_a_length_is_planned_once_and_a_copy_plans_anew():
    layer = Layer()
    parts, run = in_parts(layer, 2)
    for length in (16, 24, 16):
        run(torch.randn(1, length, D))
    assert len(parts.plans) == 2
    assert copy.deepcopy(parts).plans == {}


def test_a_length_in_use_stays_planned(monkeypatch):
    """While other lengths come and go, more of them than are remembered."""
    lengths, planned = [], parts_file.planned
    monkeypatch.setattr(parts_file, "PLANS", 2)
    monkeypatch.setattr(
        parts_file, "planned", lambda m, flat, *args: (lengths.append(flat[0].shape[1]), planned(m, flat, *args))[1]
    )
    _, run = in_parts(nn.Linear(D, D), 2)
    for other in (17, 18, 19):
        for length in (16, other):
            run(torch.randn(1, length, D))
    assert lengths == [16, 17, 18, 19]


class Refers(nn.Module):
    """Calls a module that it does not contain, and that bounds its own memory."""

    def __init__(self):
        super().__init__()
        self.others = [nn.Linear(D, D)]

    def forward(self, x: Tensor) -> Tensor:
        (other,) = self.others
        return torch.sin(traced_call(other, torch.empty_like, (x,), {}) if is_traced() else other(x))


def test_layers_that_share_plans_call_their_own_modules():
    parts = Parts()
    parts.slices = 2
    for layer in (Refers(), Refers()):
        x = torch.randn(1, 16, D)
        assert torch.equal(parts(layer, 2**16, (x,), {}), layer(x))
    assert "a module that is not inside it" in parts.why


class Table(nn.Module):
    """Makes a longer table when a longer call comes."""

    def __init__(self):
        super().__init__()
        self.linear, self.n = nn.Linear(D, D), 0

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.n:
            self.n = x.shape[1]
            self.register_buffer("table", torch.arange(self.n)[:, None] / 100, persistent=False)
        return x + torch.sin(self.linear(x) + self.table[: x.shape[1]])


def test_what_a_forward_changes_is_changed_by_the_forward_alone():
    layer = Table()
    _, run = in_parts(layer, 2)
    for length in (8, 16, 16, 8):
        x = torch.randn(1, length, D)
        torch.testing.assert_close(run(x), layer(x))
        assert type(layer.table) is Tensor
        assert layer.n == len(layer.table)


def test_lists_that_a_forward_fills_and_tensors_that_it_holds():
    class Fills(Layer):
        def forward(self, x, losses):
            losses.append(x.square().mean())
            return super().forward(x) * self.factor

    layer, losses, parts = Fills(), [], Parts()
    parts.slices = 2
    for layer.factor in (torch.tensor(2.0), torch.tensor(3.0)):
        x = torch.randn(1, 16, D)
        assert torch.equal(parts(layer, 2**16, (x, losses), {}), layer(x, []))
    assert len(losses) == 2
    assert "list" in parts.why


def test_gradients_that_a_forward_switches_off_stay_off():
    class Stops(Layer):
        def forward(self, x):
            with torch.no_grad():
                scale = self.scale * x.abs().mean(-1, keepdim=True)
                with torch.enable_grad():
                    shift = self.out(x)
                assert not torch.is_grad_enabled()
            assert torch.is_grad_enabled(), "as in a training call"
            return super().forward(x / (1 + scale) + shift + self.up(x).detach()[..., :D]), scale

    class Writes(Layer):
        def forward(self, x):
            scale = x * 2
            with torch.no_grad():
                scale += 1
            return super().forward(scale)

    torch.manual_seed(0)
    layer, x = Stops(), torch.randn(1, 32, D)
    parts, run = in_parts(layer, 3)
    assert_close(step(layer, x, lambda x: run(x)[0]), step(layer, x, lambda x: layer(x)[0]))
    assert [output.requires_grad for output in run(x)] == [True, False]
    assert None not in parts.plans.values()
    layer = Writes()
    parts, run = in_parts(layer, 3)
    assert_close(step(layer, x, run), step(layer, x, layer.forward))
    assert "while gradients are off" in parts.why


def test_parameters_of_another_kind_are_planned_anew():
    layer, x = Layer(), torch.randn(1, 32, D)
    parts, run = in_parts(layer, 3)
    run(x)
    layer.out.bias = None
    assert_close(step(layer, x, run), step(layer, x, layer.forward))
    assert len(parts.plans) == 2


class Box:
    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class Sealed(Box):
    pass


def refuse(*_):
    raise TypeError("sealed")


register_pytree_node(Box, lambda box: ([box.tensor], None), lambda held, _: Box(held[0].tolist()))
register_pytree_node(Sealed, lambda box: ([box.tensor], None), refuse)


@pytest.mark.parametrize("kind", [Box, Sealed])
def test_arguments_that_pytree_does_not_rebuild_are_passed_as_they_are(kind):
    class Adds(Layer):
        def forward(self, x, box):
            return super().forward(x + box.tensor)

    layer, parts = Adds(), Parts()
    for _ in range(2):
        x, box = torch.randn(1, 16, D), kind(torch.randn(D, requires_grad=True))
        assert torch.equal(parts(layer, 2**16, (x, box), {}), layer(x, box))
    assert list(parts.plans.values()) == [None]


class Recurrent(nn.Module):
    """A loop over tokens that mixes all channels, and so has no axis. samples: some of each token, in an op of its own."""

    def __init__(self, samples: bool = False):
        super().__init__()
        self.samples = samples
        self.up, self.step, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        h, states = self.up(x), []
        state = torch.zeros_like(h[:, 0])
        for row in h.unbind(1):
            if self.samples:
                row = traced_call(None, F.dropout, (row,), {}) if is_traced() else F.dropout(row)
            state = torch.tanh(self.step(state) + row)
            states.append(torch.sin(state) * torch.exp(-state.square()))
        return x + self.down(torch.stack(states, 1))


@pytest.mark.parametrize(("batch", "samples"), [(1, False), (2, False), (1, True)])
def test_a_loop_that_mixes_channels_runs_some_steps_at_a_time(batch, samples, one_thread):
    torch.manual_seed(0)
    layer, x = Recurrent(samples), torch.randn(batch, 2 * S, D, requires_grad=True)
    _, run = in_parts(layer, workspace=2**14)
    for tensor in (x, *layer.parameters()):
        tensor.grad = torch.zeros_like(tensor)
    peaks, results = [], []
    for function in (layer, run, run):
        torch.manual_seed(1)
        with peak_memory("cpu") as peak:
            y = function(x)
            y.square().sum().backward()
        results.append([y.detach(), *(tensor.grad.clone() for tensor in (x, *layer.parameters()))])
        for tensor in (x, *layer.parameters()):
            tensor.grad.zero_()
        peaks.append(peak.bytes)
    assert_close(results[1], results[0])
    assert_close(results[2], results[0])
    # the layer is several times as large as the steps between which a state is saved; a weight has one gradient
    if not samples:  # in Python, the random state of each few steps is a tensor
        assert peaks[2] < 0.85 * peaks[0]
