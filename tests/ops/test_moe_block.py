"""moe_block: what all ops promise, of an MoE layer with its router, and what a router adds: the choice and its logits."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from ops.test_experts import PROMISES, moe
from support.cases import (
    DTYPES,
    MODES,
    Op,
    Setup,
    assert_same,
    assert_same_within_rounding,
    check_exactness,
    gradients,
    output_gradient,
    seeded,
)

import ckptkern
from ckptkern.memory import saved_tensors
from ckptkern.ops.moe.sublayer import MoESublayer

E, K = 6, 2
Tensors = dict[str, torch.Tensor]
PROBE = torch.linspace(-1, 1, 64)


def chosen(logits: torch.Tensor, **o) -> torch.Tensor:
    """The choice, as transformers' DeepSeek-V3 and V2 write it."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    scores = logits.sigmoid() if o.get("scoring") == "sigmoid" else logits.softmax(-1)
    scores = scores + o.get("score_bias", 0.0)
    if groups := o.get("num_groups", 1) - 1:
        of_groups = scores.unflatten(-1, (groups + 1, -1))
        best = of_groups.max(-1).values if o.get("group_score") == "max" else of_groups.topk(2, -1)[0].sum(-1)
        seen = F.one_hot(best.topk(o["top_groups"], -1)[1], groups + 1).sum(-2).bool()
        scores = of_groups.masked_fill(~seen[..., None], -torch.inf).flatten(-2)
    return scores.topk(o["top_k"], -1)[1]


def normed(x: torch.Tensor, kind: str | None, weight: torch.Tensor | None) -> torch.Tensor:
    if kind is None:
        return x
    if kind == "rms":
        return F.rms_norm(x, x.shape[-1:], weight, 1e-5)
    return F.layer_norm(x, x.shape[-1:], weight, None, 1e-5)


def layer(t: Tensors, index: torch.Tensor | None = None, act=F.silu, **o) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, logits) in PyTorch ops; index: the choice, if it is given."""
    x, kind, first = t["x"], o.get("norm"), o.get("norm_first", True)
    h = normed(x, kind, t.get("norm_weight")) if first else x
    wide = torch.promote_types(x.dtype, o.get("router_dtype") or x.dtype)
    logits = F.linear(h.to(wide), t["router_weight"].to(wide), o.get("router_bias", t.get("router_bias")))
    index = chosen(logits, **o) if index is None else index.view(*x.shape[:-1], -1)
    upcast = logits if logits.dtype == torch.float64 else logits.float()
    w = (upcast.sigmoid() if o.get("scoring") == "sigmoid" else upcast.softmax(-1)).gather(-1, index)
    w = w / w.sum(-1, keepdim=True) if o.get("normalize", True) else w
    w = w * o.get("routed_scaling_factor", 1.0)
    biases = (t.get("gate_up_bias"), t.get("down_bias"))
    f = moe(h, index, w, t["gate_up_weight"], t["down_weight"], *biases, act)
    if "shared_up_weight" in t:
        up = F.linear(h, t["shared_up_weight"])
        hidden = act(F.linear(h, t["shared_gate_weight"])) * up if "shared_gate_weight" in t else act(up)
        shared = F.linear(hidden, t["shared_down_weight"])
        if "shared_expert_gate" in t:
            shared = F.sigmoid(F.linear(h, t["shared_expert_gate"])) * shared
        f = f + shared
    f = normed(f, o.get("post_norm"), t.get("post_norm_weight"))
    y = f * t["layer_scale"] if "layer_scale" in t else f
    y = x + y if o.get("residual", True) else y
    return (y if first else normed(y, kind, t.get("norm_weight"))), logits.reshape(-1, logits.shape[-1])


def both(results: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """One tensor of y's dtype that has the gradients of both results."""
    y, logits = results
    return torch.cat((y.reshape(-1), logits.reshape(-1).to(y.dtype)))


def ours_of(**options):
    def ours(t: Tensors) -> torch.Tensor:
        return both(ckptkern.moe_block(**t, **options))

    return ours


class Block(Op):
    """With a shared expert; what depends on the logits is added to y."""

    def parameters(self, d, h, e):
        return {
            "router_weight": (E, d), "gate_up_weight": (E, 2 * h, d), "gate_up_bias": (E, 2 * h), "down_weight": (E, d, h),
            "shared_gate_weight": (h, d), "shared_up_weight": (h, d), "shared_down_weight": (d, h),
            "shared_expert_gate": (1, d),
        }  # fmt: skip

    def call(self, t, **options):
        y, logits = ckptkern.moe_block(**t, **options, top_k=K)
        return y + (logits @ PROBE[:E].to(logits)).view(*y.shape[:-1], 1)


def unfused(t: Tensors, act, drop) -> torch.Tensor:
    """Every expert on every token: under a transform, too, no shape depends on values."""
    y, logits = t["x"], F.linear(t["x"], t["router_weight"])
    scores = logits.softmax(-1)
    index = scores.topk(K, -1)[1]
    w = scores.gather(-1, index)
    w = w / w.sum(-1, keepdim=True)
    for e in range(E):
        bias = t["gate_up_bias"][e] if "gate_up_bias" in t else None
        g, u = F.linear(t["x"], t["gate_up_weight"][e], bias).chunk(2, -1)
        of_expert = F.linear(act(g) * u, t["down_weight"][e])
        y = y + of_expert * torch.where(index == e, w, 0).sum(-1, keepdim=True)
    hidden = act(F.linear(t["x"], t["shared_gate_weight"])) * F.linear(t["x"], t["shared_up_weight"])
    y = y + F.linear(t["x"], t["shared_expert_gate"]).sigmoid() * F.linear(hidden, t["shared_down_weight"])
    return y + (logits @ PROBE[:E].to(logits)).view(*y.shape[:-1], 1)


BLOCK = Block("moe_block", unfused, saved=lambda *_: (0, 0), matmuls={})  # what is saved: below
SETUPS = [pytest.param(Setup(BLOCK, "gelu", mode), id=mode) for mode in ("selective", "full")]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


@pytest.mark.sampled
@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__.removeprefix("test_"))
def test_promise_of_every_op(promise, setup):
    promise(setup)


# -- values ------------------------------------------------------------------------------------------------------------

SHARED = ("shared_gate_weight", "shared_up_weight", "shared_down_weight")
BIAS = torch.linspace(-0.4, 0.4, E).roll(2)
VARIANTS: dict[str, tuple[tuple[str, ...], dict]] = {  # tensors besides the router's and the experts', options
    "Mixtral": ((), dict(top_k=2, norm="rms")),
    "OLMoE": ((), dict(top_k=3, normalize=False, residual=False)),
    "DeepSeek-V3": (SHARED, dict(
        top_k=2, scoring="sigmoid", score_bias=BIAS, num_groups=3, top_groups=2, routed_scaling_factor=2.5,
        router_dtype=torch.float32, norm="rms",
    )),
    "DeepSeek-V2": (SHARED, dict(
        top_k=2, normalize=False, num_groups=2, top_groups=1, group_score="max", routed_scaling_factor=4.0
    )),
    "Qwen2-MoE": ((*SHARED, "shared_expert_gate", "norm_weight"), dict(top_k=2, normalize=False, norm="rms")),
    "biases": (("router_bias", "gate_up_bias", "down_bias", *SHARED[1:]), dict(top_k=1, scoring="sigmoid", normalize=False)),
    "post-norm": (
        (*SHARED, "shared_expert_gate", "post_norm_weight", "layer_scale", "norm_weight"),
        dict(top_k=2, norm="layer", post_norm="rms"),
    ),
    "trailing norm": ((*SHARED, "norm_weight"), dict(top_k=2, norm="layer", norm_first=False)),
}  # fmt: skip


def tensors_of(variant: str, dtype: torch.dtype, lead=(50,), d=24, h=20, shared=36, seed=0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "x": (*lead, d), "router_weight": (E, d), "gate_up_weight": (E, 2 * h, d), "down_weight": (E, d, h),
        "router_bias": (E,), "gate_up_bias": (E, 2 * h), "down_bias": (E, d), "shared_gate_weight": (shared, d),
        "shared_up_weight": (shared, d), "shared_down_weight": (d, shared), "shared_expert_gate": (1, d),
        "norm_weight": (d,), "post_norm_weight": (d,), "layer_scale": (d,),
    }  # fmt: skip
    own = ("x", "router_weight", "gate_up_weight", "down_weight", *VARIANTS[variant][0])
    found = {}
    for name in own:
        shape = shapes[name]
        scale = shape[-1] ** -0.5 if name.endswith(("weight", "gate")) and len(shape) > 1 else 1.0
        value = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        found[name] = value.to(dtype).requires_grad_()
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("sizes", [((50,), 24, 20, 36), ((3, 5), 7, 9, 1)], ids=str)
@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_as_exact_as_torchs(variant, dtype, mode, sizes):
    """Of y and of the logits, with one choice of experts for all: that of our own logits."""
    options = VARIANTS[variant][1]
    choices: list[tuple[torch.Tensor, torch.Tensor]] = []  # of each x

    def ours(t: Tensors) -> torch.Tensor:
        y, logits = ckptkern.moe_block(**t, **options, recompute=mode)
        choices.append((t["x"].detach().double(), chosen(logits.detach(), **options)))
        return both((y, logits))

    def theirs(t: Tensors) -> torch.Tensor:
        index = next(index for x, index in choices if torch.equal(x, t["x"].double()))
        return both(layer(t, index, **options))

    check_exactness(ours, theirs, tensors_of(variant, dtype, *sizes))


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_mode_gives_the_same_bits(variant, backend):
    """Those of the weights' gradients too, which hang on recomputed logits; up to the sums of a kernel's tiles."""
    t, options = tensors_of(variant, torch.bfloat16), VARIANTS[variant][1]
    with ckptkern.backend(backend):
        found = [gradients(ours_of(**options, recompute=mode), t) for mode in MODES]
    for one in found[1:]:
        assert torch.equal(one["y"], found[0]["y"])
        if backend == "eager":
            assert_same(one, found[0])


@pytest.mark.parametrize("mode", MODES)
def test_chunks_give_the_same(mode):
    """Also where a chunk has no token of an expert; the last chunk is no multiple of anything."""
    t = tensors_of("Qwen2-MoE", torch.float64, (3, 129))
    options = VARIANTS["Qwen2-MoE"][1] | {"resid_dropout_p": 0.25, "drop_path_p": 0.25, "recompute": mode}
    whole, parts = (gradients(seeded(ours_of(**options, workspace=w)), t) for w in (2**40, 1))
    assert_same_within_rounding(parts, whole)


def test_an_empty_expert_has_exact_zeros():
    t = tensors_of("biases", torch.bfloat16)
    with torch.no_grad():
        t["router_bias"][2] = -100.0
    found = gradients(ours_of(**VARIANTS["biases"][1]), t)
    for name in ("gate_up_weight", "down_weight", "gate_up_bias", "down_bias"):
        assert found[name][2].count_nonzero() == 0, name
        assert found[name][0].count_nonzero() > 0 or found[name][1].count_nonzero() > 0


@pytest.mark.parametrize("lead", [(), (0,), (2, 0, 3)], ids=str)
def test_other_leading_dimensions(lead):
    t = tensors_of("Qwen2-MoE", torch.float64, lead)
    options = VARIANTS["Qwen2-MoE"][1]
    y, logits = ckptkern.moe_block(**t, **options)
    assert y.shape == (*lead, 24)
    assert logits.shape == (y[..., 0].numel(), E)

    def theirs(t: Tensors) -> torch.Tensor:
        return both(layer(t if lead else t | {"x": t["x"][None]}, **options))

    assert_same_within_rounding(gradients(ours_of(**options), t), gradients(theirs, t))


# -- the logits and the choice -----------------------------------------------------------------------------------------


def auxiliary(logits: torch.Tensor) -> torch.Tensor:
    """A load-balancing loss and a z-loss."""
    p = logits.float().softmax(-1) if logits.dtype != torch.float64 else logits.softmax(-1)
    share = F.one_hot(p.topk(K, -1)[1], E).sum(-2).to(p.dtype).mean(0)
    return E * (share * p.mean(0)).sum() + logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("which", ["y", "logits", "both"])
def test_each_result_has_its_gradients(which, compiled):
    options, t = VARIANTS["Qwen2-MoE"][1], tensors_of("Qwen2-MoE", torch.float64)

    def loss(results: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        y, logits = results
        return (y.square().sum() if which != "logits" else 0) + (auxiliary(logits) if which != "y" else 0)

    def ours(t: Tensors) -> torch.Tensor:
        return loss(ckptkern.moe_block(**t, **options))

    ours = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    theirs = torch.autograd.grad(loss(layer(t, **options)), list(t.values()), allow_unused=True)
    found = torch.autograd.grad(ours(t), list(t.values()))
    for name, mine, want in zip(t, found, theirs, strict=True):
        torch.testing.assert_close(mine, torch.zeros_like(mine) if want is None else want, msg=name)


def test_logits_in_inference():
    t = tensors_of("Mixtral", torch.float32)
    with torch.no_grad():
        found = ckptkern.moe_block(**t, **VARIANTS["Mixtral"][1])
    torch.testing.assert_close(found, layer(t, **VARIANTS["Mixtral"][1]))


@pytest.mark.parametrize("workspace", [2**40, 1])
@pytest.mark.parametrize("create_graph", [False, True])
def test_backward_takes_forwards_choice(create_graph, workspace, monkeypatch):
    """Logits that round otherwise in recompute change no choice: all experts are nearly alike to this router. Of second order,
    too, whose reference implementation forms logits of its own."""
    t = tensors_of("OLMoE", torch.float64, (300,))
    with torch.no_grad():
        t["router_weight"] *= 1e-6
    options, names = VARIANTS["OLMoE"][1], list(t)
    noise = 1e-4 * torch.randn(300, E, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    of_rows = MoESublayer.logits
    with monkeypatch.context() as patch:
        patch.setattr(MoESublayer, "logits", lambda self, h: of_rows(self, h) + noise[self.first_row :][: h.shape[0]])
        y, logits = ckptkern.moe_block(**t, **options, workspace=workspace)
    index, anew = (chosen(one, top_k=3) for one in (logits, F.linear(t["x"], t["router_weight"])))
    assert (index.sort().values != anew.sort().values).any(-1).double().mean() > 0.5

    def squares(results: tuple[torch.Tensor, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        y = both(results)
        grads = torch.autograd.grad(y, list(t.values()), output_gradient(y), create_graph=create_graph)
        if not create_graph:
            return dict(zip(names, grads, strict=True)), None
        second = torch.autograd.grad(sum(one.square().sum() for one in grads), t["down_weight"])[0]
        return dict(zip(names, grads, strict=True)), second

    (mine, ours), (want, theirs) = squares((y, logits)), squares(layer(t, index, **options))
    for name in names:
        torch.testing.assert_close(
            mine[name], want[name], rtol=1e-3, atol=1e-3 * float(want[name].abs().max()), msg=name
        )
    if create_graph:
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


def test_a_training_step_under_noise_and_checkpoint():
    """Inside a checkpoint the op saves what it needs, its choice, too: recompute runs it again at "none"."""
    t, options = tensors_of("Mixtral", torch.float64), VARIANTS["Mixtral"][1]
    want = gradients(ours_of(**options), t)
    found = gradients(lambda t: ckptkern.checkpoint(ours_of(**options), t), t)
    assert_same_within_rounding(found, want)


# -- what is saved -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", ["Mixtral", "DeepSeek-V3", "Qwen2-MoE"])
def test_saved_bytes(variant, mode, compiled):
    tokens, d, h, shared = 50, 24, 20, 36
    t, options = tensors_of(variant, torch.float32), VARIANTS[variant][1]
    parameters = [one for name, one in t.items() if name != "x"] + [options.get("score_bias", t["x"])][:1]
    parameters = [one for one in parameters if one is not t["x"]]

    def ours(t: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        return ckptkern.moe_block(**t, **options, recompute=mode)

    ours = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    with saved_tensors(exclude=parameters) as saved:
        results = ours(t)
    pairs = tokens * options["top_k"]
    widest = pairs * 2 * h + (
        tokens * shared * {"none": 3, "selective": 2}.get(mode, 0) if "shared_up_weight" in t else 0
    )
    assert saved.bytes == 4 * (tokens * d + (widest if mode != "full" else 0)) + 2 * pairs
    del results


def test_main_grads():
    t = tensors_of("Qwen2-MoE", torch.bfloat16, (300,))
    options = VARIANTS["Qwen2-MoE"][1] | {"workspace": 1}
    weights = {name: torch.nn.Parameter(one.detach()) for name, one in t.items() if one.dim() > 1 and name != "x"}
    for p in weights.values():
        p.main_grad = torch.ones(p.shape)
    want = gradients(ours_of(**options), {n: one.detach().float().requires_grad_() for n, one in t.items()})
    for _ in range(2):
        y = ours_of(**options)({**t, **weights})
        y.backward(output_gradient(y))
    for name, p in weights.items():
        assert p.grad is None
        assert p.grad_added_to_main_grad
        error = torch.linalg.vector_norm(p.main_grad - 1 - 2 * want[name])
        assert error < 0.05 * torch.linalg.vector_norm(2 * want[name]), name  # of bfloat16, and of choices that differ


def test_autocast():
    """Gradients have their tensors' dtypes; a router in float32 upcasts what bfloat16 gave."""
    t = tensors_of("DeepSeek-V3", torch.float32)
    for dtype, wanted in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        options = VARIANTS["DeepSeek-V3"][1] | {"router_dtype": dtype}
        with torch.autocast("cpu", torch.bfloat16):
            y, logits = ckptkern.moe_block(**t, **options)
        assert (y.dtype, logits.dtype) == (torch.float32, wanted)  # of the residual
        grads = torch.autograd.grad(y.sum() + logits.sum(), list(t.values()))
        assert {one.dtype for one in grads} == {torch.float32}


# -- errors ------------------------------------------------------------------------------------------------------------

WRONG = {
    "top_k must be an integer of at least 1, not 0": dict(top_k=0),
    "top_k=7 is more than the 6 experts that a token may choose from": dict(top_k=7),
    "top_k=3 is more than the 2 experts that a token may choose from": dict(top_k=3, num_groups=3, top_groups=1),
    "num_groups=3 needs top_groups": dict(num_groups=3),
    "num_groups must divide the 6 experts": dict(num_groups=4, top_groups=1),
    "scoring must be one of 'softmax', 'sigmoid', not 'tanh'": dict(scoring="tanh"),
    "group_score must be one of 'top2', 'max', not 'sum'": dict(group_score="sum"),
    "score_bias must have shape (6,), but has (5,)": dict(score_bias=torch.zeros(5)),
    "score_bias gets no gradient; detach it": dict(score_bias=torch.zeros(6, requires_grad=True)),
    "router_dtype must be torch.float32, or None for the compute dtype, not torch.float16": dict(
        router_dtype=torch.float16
    ),
    "router_weight must have 6 rows, one for each expert of gate_up_weight, but it has 5": dict(
        router_weight=torch.zeros(5, 24)
    ),
    "shared_expert_gate needs shared_up_weight": dict(shared_expert_gate=torch.zeros(1, 24)),
    "shared_up_weight needs shared_down_weight": dict(shared_up_weight=torch.zeros(3, 24)),
    "shared_down_weight must have 24 rows": dict(
        shared_up_weight=torch.zeros(3, 24), shared_down_weight=torch.zeros(23, 3)
    ),
    "shared_expert_gate must have one row, but has 2": dict(
        shared_up_weight=torch.zeros(3, 24),
        shared_down_weight=torch.zeros(24, 3),
        shared_expert_gate=torch.zeros(2, 24),
    ),
    "normalize must be a bool, not 1": dict(normalize=1),
    "norm_weight and norm_bias need norm='layer' or 'rms'": dict(norm_weight=torch.ones(24)),
    "input is torch.float32 but a parameter is torch.float64": dict(down_weight=torch.zeros(6, 24, 20).double()),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(message):
    t = {name: one.detach() for name, one in tensors_of("OLMoE", torch.float32).items()}
    with pytest.raises((TypeError, ValueError)) as error:
        ckptkern.moe_block(**(t | {"top_k": 2} | WRONG[message]))
    assert f"moe_block: {message}" in str(error.value)


def test_nothing_is_formed_for_frozen_parameters():
    """Every parameter alone, and the router with the input frozen."""
    t = tensors_of("Qwen2-MoE", torch.float64)
    options = VARIANTS["Qwen2-MoE"][1]
    want = gradients(ours_of(**options), t)
    for name, mode in itertools.product(t, ("none", "full")):
        alone = {n: one.detach().requires_grad_(n == name) for n, one in t.items()}
        found = gradients(ours_of(**options, recompute=mode), alone)
        assert found.keys() == {"y", name}
        torch.testing.assert_close(found[name], want[name])
