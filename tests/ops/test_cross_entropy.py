"""linear_cross_entropy against torch's linear and cross_entropy: which tokens count, sizes at the edge, extreme logits, and
what it does on a GPU."""

import functools

import pytest
import torch
from support import oracles
from support.cases import (
    DTYPES,
    assert_same,
    assert_same_within_rounding,
    check_exactness,
    each_backend,
    gradients,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import ckptkern
from ckptkern import eager

IGNORED = -100


def make(lead=(3, 5), features=7, classes=12, dtype=torch.float32, bias=True, ignore="some"):
    """(tensors that need gradients, target). ignore: which targets are ignored."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    values = {"x": normal(*lead, features), "weight": normal(classes, features) * max(features, 1) ** -0.5}
    values |= {"bias": normal(classes)} if bias else {}
    target = torch.randint(max(classes, 1), lead, generator=generator)
    places = torch.arange(target.numel()).view(lead)
    ignored = {"none": places < 0, "some": places % 3 == 0, "all but one": places != 1, "all": places >= 0}[ignore]
    return {name: t.to(dtype).requires_grad_() for name, t in values.items()}, target.masked_fill(ignored, IGNORED)


def class_weights(classes):
    return torch.linspace(0.5, 2.0, classes)


def ours(target, function=ckptkern.linear_cross_entropy, **options):
    return lambda t: function(t["x"], t["weight"], target=target, linear_bias=t.get("bias"), **options)


unfused = functools.partial(ours, function=oracles.linear_cross_entropy)  # torch.nn.functional's


CASES = {  # sizes and options
    "some tokens": dict(), "one token": dict(lead=(), ignore="none"),
    "one class": dict(lead=(1,), features=1, classes=1, ignore="none", label_smoothing=0.0),  # smoothed: only its rounding
    "no tokens": dict(lead=(3, 0)), "no features": dict(features=0),
    "a chunk of classes and one": dict(classes=257),
    "one token of many counts": dict(lead=(300,), ignore="all but one"),  # unsloth#5230
    "an ignored class": dict(ignore="none", ignore_index=3),
    "a sentinel beyond the classes": dict(ignore="none", ignore_index=12),  # in the last tile's padding: ml-cross-entropy#59
    "classes of -inf": dict(ignore="none", label_smoothing=0.0),
}  # fmt: skip


@each_backend
@pytest.mark.parametrize("case", CASES)
def test_like_torchs(case, backend):
    """Of each token's loss weighted by itself, too, the first being ignored (Liger-Kernel#968, #678, #1298). The divisor is
    the weight of the targets that count, with smoothing too (TransformerEngine#2476, pytorch#73205)."""
    sizes = dict(CASES[case])
    options = {name: sizes.pop(name) for name in ("label_smoothing", "ignore_index") if name in sizes}
    tensors, target = make(**sizes)
    options = dict(label_smoothing=0.1, weight=class_weights(len(tensors["weight"]))) | options
    if "sentinel" in case:
        target[::2] = 12
    if "inf" in case:
        with torch.no_grad():
            tensors["bias"][5:7] = -torch.inf
        target[target.eq(5) | target.eq(6)] = 0
    for reduction in ("sum", "none", "mean") if target.numel() else ("sum", "none"):
        dy = torch.arange(target.numel()).view(target.shape) + 1.0 if reduction == "none" else None
        expected = gradients(unfused(target, reduction=reduction, **options), tensors, dy)
        for mode in ("none", "full"):
            run = ours(target, reduction=reduction, recompute=mode, workspace=1, **options)
            with ckptkern.backend(backend):
                assert_same_within_rounding(gradients(run, tensors, dy), expected)


@each_backend
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_tokens_ignored(reduction, backend):
    """As torch: a mean of nothing is NaN, and the gradients are zero, whatever an ignored token's x holds."""
    tensors, target = make(ignore="all")
    with ckptkern.backend(backend):
        loss = ours(target, reduction=reduction, z_loss=0.1)(tensors)
    torch.testing.assert_close(loss, unfused(target, reduction=reduction)(tensors), equal_nan=True)
    assert not any(grad.any() for grad in torch.autograd.grad(loss.sum(), list(tensors.values())))


@each_backend
@pytest.mark.parametrize(("mode", "reduction"), [("full", "mean"), ("none", "none"), ("none", "mean")])
def test_an_ignored_tokens_input_does_not_matter(backend, mode, reduction):
    """Infinite logits of padding give no NaN: not in the loss, not in x's and the bias's gradients. The last pair forms its
    gradients in forward."""
    tensors, target = make((300,), 8, 90)
    run = ours(target, recompute=mode, reduction=reduction, label_smoothing=0.1)
    with ckptkern.backend(backend):
        expected = gradients(run, tensors)
        with torch.no_grad():
            tensors["x"][target == IGNORED] = 1e38
        actual = gradients(run, tensors)
    del expected["weight"], actual["weight"]  # 0 times 1e38 is 0, too, but matmuls add in another order
    assert_same(actual, expected)


def test_second_order_where_an_ignored_tokens_logits_overflow():
    """Finite. Where x is not saved, an error and no silent zero."""
    tensors, target = make(dtype=torch.float64)
    with torch.no_grad():
        tensors["x"][target == IGNORED] = 1e308
    (dx,) = torch.autograd.grad(ours(target)(tensors), tensors["x"], create_graph=True)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(dx.square().sum(), list(tensors.values())))
    tensors["weight"].requires_grad_(False)
    for reduction in ("none", "mean"):
        loss = ours(target, recompute="none", reduction=reduction)(tensors).sum()
        with pytest.raises(RuntimeError, match="second-order gradients need the input"):
            torch.autograd.grad(loss, tensors["x"], create_graph=True)


@each_backend
@pytest.mark.parametrize("mode", ["none", "full"])
def test_targets_out_of_bounds(mode, backend):
    """torch's message; the sentinel may be any number that no class has. At "none" gradients are formed in forward."""
    tensors, target = make((300,), 8, 90, ignore="none")
    for wrong in (90, -1, 2**40, -100 + 2**32):
        target[4] = wrong
        with ckptkern.backend(backend):
            with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
                ours(target, recompute=mode)(tensors)
            assert ours(target, recompute=mode, ignore_index=wrong)(tensors).isfinite()


# -- extreme logits


def exact_gradients(target, tensors, dtype=torch.float64, **options):
    """Of the loss, in a wider dtype."""
    wide = {name: t.detach().to(dtype).requires_grad_() for name, t in tensors.items()}
    return gradients(unfused(target, **options), wide, torch.ones((), dtype=dtype))


@pytest.mark.parametrize("mode", ["none", "full"])
def test_fp16_keeps_the_loss_scale(mode):
    """dz is formed under the scale, so that fp16 holds it: unscaled, 32 % of it would be 0 (Liger-Kernel#512)."""
    tensors, target = make((512,), 32, 2048, torch.float16, bias=False, ignore="none")
    exact = exact_gradients(target, tensors)["weight"]
    (ours(target, recompute=mode)(tensors) * 65536.0).backward()
    assert (tensors["weight"].grad.double() / 65536 - exact).norm() < 5e-4 * exact.norm()


@each_backend
@pytest.mark.parametrize("mode", ["none", "full"])
def test_tokens_that_are_nearly_certain(mode, backend):
    """p of the target close to 1: its gradient p - 1 keeps its digits, though exponentials are saved in 16 bits."""
    tensors, target = make((64,), 32, 96, torch.bfloat16, bias=False, ignore="none")
    with torch.no_grad():
        tensors["x"].copy_(12 * tensors["weight"][target] + 0.1 * tensors["x"])
    exact = exact_gradients(target, tensors, reduction="sum")["x"]
    with ckptkern.backend(backend):
        actual = gradients(ours(target, recompute=mode, reduction="sum"), tensors, torch.ones(()))
    assert (actual["x"].double() - exact).norm() < 0.01 * exact.norm()


# -- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu(dtype, mode):
    """The default kernels and cuBLAS within twice eager's error, in chunks and whole; no host synchronisation; bits of
    a CUDA graph."""
    tensors, target = make((3, 300), 256, 5000, dtype)
    tensors = {name: t.detach().cuda().requires_grad_() for name, t in tensors.items()}
    target = target.cuda()
    options = dict(label_smoothing=0.1, softcap=20.0, z_loss=1e-3, recompute=mode, weight=class_weights(5000).cuda())
    for workspace in (None, 1):
        both = (head(target, workspace=workspace, **options) for head in (ours, unfused))
        check_exactness(*both, tensors)

    def step():
        return torch.autograd.grad(ours(target, workspace=1, **options)(tensors), list(tensors.values()))

    expected, stream = step(), torch.cuda.Stream()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert all(map(torch.equal, captured, expected))


class Copied(TorchFunctionMode):
    """Leaves out copies into fake tensors of a GPU, which torch makes by the driver."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return args[0] if func is torch.Tensor.copy_ else func(*args, **(kwargs or {}))


@pytest.mark.parametrize("compute", DTYPES, ids=str)
def test_matmuls_of_a_gpu_go_into_a_result_of_any_dtype(compute):
    """torch checks a matmul's result before it asks a GPU: `out` has the operands' type, or `out_dtype`."""
    with FakeTensorMode(), Copied():
        a, b = (torch.empty(shape, dtype=compute, device="cuda") for shape in ((4, 8), (8, 6)))
        assert eager.upcast_matmul(a, b).dtype == eager.wide_of(compute)
        for dtype in (*DTYPES, torch.float64):
            out = torch.empty(4, 6, dtype=dtype, device="cuda")
            assert eager.upcast_matmul(a, b, out=out) is out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_a_float32_bias_is_not_rounded_to_autocasts_dtype(dtype):
    x, w, b = torch.randn(40, 8), torch.randn(30, 8), torch.zeros(30, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        loss = ckptkern.linear_cross_entropy(x, w, torch.arange(40) % 30, linear_bias=b)
    (grad,) = torch.autograd.grad(loss, b)
    assert not torch.equal(grad, grad.to(dtype).float())
