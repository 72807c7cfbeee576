"""What linear_cross_entropy and selected_log_probs return of each token beside its loss, against float64 logits."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from ops.test_cross_entropy import IGNORED, class_weights, make
from support.cases import DTYPES, MODES, assert_same_within_rounding, check_exactness, gradients

import ckptkern

lce = ckptkern.linear_cross_entropy
each_backend = pytest.mark.parametrize("backend", ["eager", "triton"])
EVERYTHING = dict(label_smoothing=0.1, softcap=3.0, logit_scale=0.7, z_loss=0.1)
ALL = dict(return_lse=True, return_log_probs=True, return_entropy=True, return_accuracy=True)


def logits_of(t, logit_scale=1.0, softcap=None):
    z = F.linear(t["x"], t["weight"], t.get("bias")).double() * logit_scale
    return softcap * torch.tanh(z / softcap) if softcap else z


def statistics_of(z, target):
    """Those of logits [..., V], by name; 0 where the target is ignored."""
    counted = target != IGNORED
    classes, log_p = target.masked_fill(~counted, 0), z.log_softmax(-1)
    found = {
        "lse": z.logsumexp(-1),
        "log_probs": log_p.gather(-1, classes[..., None])[..., 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "arg_max": z.argmax(-1),
        "accuracy": (z.argmax(-1) == classes).double(),
    }
    return {name: one * counted for name, one in found.items()}


def call(target, t, **options):
    return lce(t["x"], t["weight"], target, linear_bias=t.get("bias"), **options)


@each_backend
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_statistic_with_every_option(reduction, mode, backend):
    """Class weights, smoothing, softcap, scale, ignored tokens and chunks change none of them but through the logits."""
    tensors, target = make((8, 12), 9, 600)
    with torch.no_grad():
        target[::2] = logits_of(tensors)[::2].argmax(-1)  # some are right
    target.view(-1)[::3] = IGNORED
    options = dict(EVERYTHING, weight=class_weights(600), reduction=reduction, recompute=mode, workspace=1)
    with ckptkern.backend(backend):
        found = call(target, tensors, **options, **ALL, top_k=5)
        alone = call(target, tensors, **options)
    z = logits_of(tensors, 0.7, 3.0)
    want, top = statistics_of(z, target), z.log_softmax(-1).topk(5)
    counted = (target != IGNORED)[..., None]
    assert torch.equal(found.top_k.indices, top.indices * counted)
    torch.testing.assert_close(found.top_k.log_probs.double(), top.values * counted, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.loss, alone)
    assert found.arg_max.dtype == torch.int64
    assert torch.equal(found.arg_max, want.pop("arg_max"))
    accuracy = want.pop("accuracy")
    if reduction != "none":
        accuracy = accuracy.sum() / (target != IGNORED).sum()
        assert 0.3 < accuracy < 0.7
    torch.testing.assert_close(found.accuracy.double(), accuracy)
    for name, value in want.items():
        torch.testing.assert_close(getattr(found, name).double(), value, rtol=1e-5, atol=1e-5)
    assert not any(one.requires_grad for one in (found.accuracy, found.arg_max, *found.top_k))


def test_what_is_not_asked_for_is_none():
    tensors, target = make()
    assert isinstance(call(target, tensors), torch.Tensor)
    assert call(target, tensors, top_k=12)._replace(loss=None, top_k=None) == (None,) * 7
    for name in ("lse", "log_probs", "entropy"):
        found = call(target, tensors, **{f"return_{name}": True})._asdict()
        assert [key for key, one in found.items() if one is not None] == ["loss", name]


@each_backend
def test_the_first_of_equal_logits_is_the_arg_max(backend):
    """In a slice of columns, and of slices; and the only one that is not -inf."""
    weight, bias = torch.zeros(300, 4), torch.zeros(300)
    bias[[40, 45, 250]] = 2.0
    x, target = torch.randn(3, 4), torch.tensor([40, 45, IGNORED])
    with ckptkern.backend(backend):
        found = lce(x, weight, target, linear_bias=bias, return_accuracy=True, reduction="none")
        bias[:290] = -torch.inf
        bias[295] = 1.0
        last = lce(x, weight, target.clamp_min(295), linear_bias=bias, return_accuracy=True)
    assert found.arg_max.tolist() == [40, 40, 0]
    assert found.accuracy.tolist() == [1, 0, 0]
    assert last.arg_max.tolist() == [295] * 3
    assert last.accuracy == 1


@each_backend
def test_the_largest_of_no_tokens_and_of_one(backend):
    """Shapes [..., k] of an input without tokens and of one without leading dimensions."""
    with ckptkern.backend(backend):
        for lead in ((0,), (2, 0), ()):
            tensors, target = make(lead, ignore="none")
            found = call(target, tensors, top_k=3, recompute="none").top_k
            assert found.indices.shape == found.log_probs.shape == (*lead, 3)
    top = logits_of(tensors).log_softmax(-1).topk(3)
    assert torch.equal(found.indices, top.indices)
    torch.testing.assert_close(found.log_probs.double(), top.values, rtol=1e-5, atol=1e-5)


# -- the log-probabilities of tokens


def selected(tokens, t, **options):
    return ckptkern.selected_log_probs(t["x"], t["weight"], tokens, bias=t.get("bias"), **options)


def unfused(tokens, t, temperature=1.0, return_entropy=False, **_):
    """As trainers write it."""
    z = F.linear(t["x"], t["weight"], t.get("bias"))
    log_p = F.log_softmax((z if z.dtype == torch.float64 else z.float()) / temperature, -1)
    log_probs = log_p.gather(-1, tokens.masked_fill(tokens == IGNORED, 0)[..., None])[..., 0] * (tokens != IGNORED)
    return (log_probs, -(log_p.exp() * log_p).sum(-1) * (tokens != IGNORED)) if return_entropy else log_probs


@each_backend
@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_selected_log_probs(dtype, mode, backend):
    tensors, tokens = make((5, 7), 33, 300, dtype)
    options = dict(temperature=0.7, recompute=mode, workspace=1)

    def both(run, t):
        return torch.cat([one.reshape(-1) for one in run(tokens, t, return_entropy=True, **options)])

    with ckptkern.backend(backend):
        check_exactness(functools.partial(both, selected), functools.partial(both, unfused), tensors)
        found, alone = selected(tokens, tensors, return_entropy=True, **options), selected(tokens, tensors, **options)
    assert torch.equal(found.log_probs, alone)
    assert (found.log_probs.shape, found.entropy.shape) == (tokens.shape, tokens.shape)
    assert (alone <= 0).all()


@each_backend
@pytest.mark.parametrize("mode", ["none", "full"])
def test_entropy_of_certain_even_and_masked_tokens(mode, backend):
    """0 and log V to the last digits, though logits are large; classes of -inf have no share and no gradient."""
    V, d = 300, 4
    x = torch.tensor([[0.0] * d, [200.0] + [0.0] * (d - 1), [0.0] * d], requires_grad=True)
    weight, bias = torch.zeros(V, d), torch.full((V,), 1000.0)
    weight[7, 0] = 1.0
    bias[100:] = -torch.inf
    weight.requires_grad_(), bias.requires_grad_()
    with ckptkern.backend(backend):
        tokens = torch.tensor([5, 7, IGNORED])
        entropy = ckptkern.selected_log_probs(x, weight, tokens, bias=bias, return_entropy=True, recompute=mode).entropy
        entropy.sum().backward()
    torch.testing.assert_close(entropy, torch.tensor([math.log(100), 0.0, 0.0]), rtol=1e-4, atol=1e-30)
    for one in (x, weight, bias):
        assert one.grad.isfinite().all()
        assert one.grad.abs().max() < 1e-4


def test_selected_log_probs_save_four_bytes_a_token_and_as_many_with_entropy():
    tensors, tokens = make((40,), 16, 300)
    with ckptkern.memory.saved_tensors(exclude=[*tensors.values(), tokens]) as saved:
        selected(tokens, tensors)
    assert saved.bytes == 4 * 40
    with ckptkern.memory.saved_tensors(exclude=[*tensors.values(), tokens]) as saved:
        selected(tokens, tensors, return_entropy=True)
    assert saved.bytes == 8 * 40


@each_backend
@pytest.mark.parametrize(("mode", "updated"), [("none", False), ("full", False), ("full", True)])
def test_candidates(mode, updated, backend):
    """Log-probabilities of k tokens for each place, padding among them, some of them twice; with an entropy and an update."""
    tensors, target = make((5, 7), 33, 300)
    tokens = torch.stack([target, target, target.roll(1), torch.full_like(target, 299)], -1)
    if updated:
        tensors |= {"a": torch.randn(4, 33, requires_grad=True), "b": torch.randn(300, 4, requires_grad=True)}
    tokens[target == IGNORED] = IGNORED
    counted = tokens != IGNORED

    def ours(t):
        lora = ckptkern.LoRA(t["a"], t["b"], 0.1) if updated else None
        found = selected(tokens, t, temperature=0.7, return_entropy=True, recompute=mode, workspace=1, lora=lora)
        assert found.log_probs.shape == tokens.shape
        return torch.cat([one.reshape(-1) for one in found])

    def theirs(t):
        z = F.linear(t["x"], t["weight"], t["bias"])
        z = z + F.linear(F.linear(t["x"], t["a"]), t["b"]) * 0.1 if updated else z
        log_p = (z / 0.7).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1) * counted.any(-1)
        return torch.cat([(log_p.gather(-1, tokens.masked_fill(~counted, 0)) * counted).view(-1), entropy.view(-1)])

    with ckptkern.backend(backend):
        check_exactness(ours, theirs, tensors)


@each_backend
@pytest.mark.parametrize(("mode", "updated"), [("none", False), ("full", False), ("full", True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_a_certain_candidate(dtype, mode, updated, backend):
    """p - 1 is rounded once: with p of 0.998 it is lost where p is rounded before."""
    tokens, classes = 8, 300
    x = torch.eye(tokens, 16).to(dtype) * 4
    weight = torch.zeros(classes, 16, dtype=dtype)
    weight[:tokens] = x * 0.75
    t = {"x": x.requires_grad_(), "weight": weight.requires_grad_(), "bias": torch.zeros(classes, dtype=dtype)}
    t["bias"].requires_grad_()
    lora = None
    if updated:
        lora = ckptkern.LoRA(torch.zeros(4, 16, dtype=dtype), torch.zeros(classes, 4, dtype=dtype), 1.0)
    target = torch.arange(tokens)
    options = dict(recompute=mode, workspace=1, lora=lora)
    with ckptkern.backend(backend):
        ours = gradients(lambda t: selected(target[:, None], t, **options).sum(), t)
    exact = {name: one.detach().double().requires_grad_() for name, one in t.items()}
    for name, true in gradients(lambda t: unfused(target, t).sum(), exact).items():
        assert (ours[name].double() - true).norm() < 0.01 * true.norm(), name


@each_backend
def test_candidates_of_no_tokens(backend):
    tensors, target = make((0,), ignore="none")
    with ckptkern.backend(backend):
        found = gradients(lambda t: selected(target[:, None].expand(0, 3), t).sum(), tensors)
    assert not any(one.count_nonzero() for one in found.values())


def test_an_importance_ratio():
    """A trainer's loss of old and new log-probabilities, at another temperature than 1."""
    tensors, tokens = make((4, 6), 8, 50, dtype=torch.float64)
    advantages, old = (
        torch.linspace(-1, 1, 24).view(4, 6),
        unfused(tokens, make((4, 6), 8, 50, torch.float64, seed=1)[0]),
    )

    def loss(log_probs, t):
        ratio = (log_probs(tokens, t, temperature=1.3) - old.detach()).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()

    ours, theirs = (gradients(functools.partial(loss, one), tensors) for one in (selected, unfused))
    assert_same_within_rounding(ours, theirs)


WRONG = {
    "temperature": (dict(temperature=0.0), ValueError, "selected_log_probs: temperature must be positive, not 0.0"),
    "a temperature that trains": (
        dict(temperature=torch.ones((), requires_grad=True)),
        ValueError,
        "no gradient .* temperature",
    ),
    "hidden": (dict(hidden=[1.0]), TypeError, "selected_log_probs: hidden must be a Tensor, not list"),
    "features": (dict(weight=torch.zeros(12, 8)), ValueError, "hidden has 7 features but weight has in_features=8"),
    "tokens": (dict(tokens=torch.zeros(5, 3, dtype=torch.int64)), ValueError, r"tokens must have shape \(3, 5\)"),
    "probabilities": (dict(tokens=torch.zeros(3, 5, 12)), TypeError, "tokens must be int64"),
    "a place without a group": (dict(vocab_start=3), ValueError, "selected_log_probs: vocab_start needs a group"),
    "out of bounds": (dict(tokens=torch.full((3, 5), 12)), IndexError, "Target 12 is out of bounds"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments(what):
    changed, kind, message = WRONG[what]
    tensors, tokens = make()
    given = dict(hidden=tensors["x"], weight=tensors["weight"], tokens=tokens, bias=tensors["bias"])
    with pytest.raises(kind, match=message):
        ckptkern.selected_log_probs(**given | changed)
