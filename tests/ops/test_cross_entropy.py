"""linear_cross_entropy against torch's linear and cross_entropy: values, gradients of any order, saved tensors, every
option."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from support.cases import (
    DTYPES,
    MODES,
    Saved,
    Watch,
    assert_flat_memory,
    assert_same,
    assert_same_within_rounding,
    check_exactness,
    gradients,
    output_gradient,
    through_export,
    with_saved_transposed,
)
from support.drop_ins import pairwise
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import ckptkern
from ckptkern import eager
from ckptkern.memory import peak_memory, saved_tensors
from ckptkern.ops.cross_entropy.op import vocabulary_chunks

IGNORED = -100
lce = ckptkern.linear_cross_entropy


def make(lead=(3, 5), features=7, classes=12, dtype=torch.float32, bias=True, ignore="some", seed=0):
    """(tensors that need gradients, target). ignore: which targets are ignored."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    values = {"x": normal(*lead, features), "weight": normal(classes, features) * max(features, 1) ** -0.5}
    values |= {"bias": normal(classes)} if bias else {}
    target = torch.randint(max(classes, 1), lead, generator=generator)
    places = torch.arange(target.numel()).view(lead)
    ignored = {"none": places < 0, "some": places % 3 == 0, "all but one": places != 1, "all": places >= 0}[ignore]
    return {name: t.to(dtype).requires_grad_() for name, t in values.items()}, target.masked_fill(ignored, IGNORED)


def class_weights(classes, dtype=torch.float32):
    return torch.linspace(0.5, 2.0, classes, dtype=torch.float64).to(dtype)


def joined(found):
    """The results that have a gradient, as one tensor."""
    if isinstance(found, torch.Tensor):
        return found
    return torch.cat([one.reshape(-1) for one in found if isinstance(one, torch.Tensor) and one.requires_grad])


def ours(target, t, **options):
    return joined(lce(t["x"], t["weight"], target, linear_bias=t.get("bias"), **options))


def unfused(
    target, t, *, weight=None, reduction="mean", ignore_index=IGNORED, label_smoothing=0.0, logit_scale=1.0, softcap=None,
    z_loss=0.0, return_lse=False, return_log_probs=False, return_entropy=False, return_accuracy=False,
    recompute=None, workspace=None,
):  # fmt: skip
    z = F.linear(t["x"], t["weight"], t.get("bias"))
    z = (z if z.dtype == torch.float64 else z.float()) * logit_scale
    z = softcap * torch.tanh(z / softcap) if softcap else z
    z, target = z.flatten(0, -2) if z.dim() > 1 else z[None], target.reshape(-1)
    counted = target != ignore_index
    loss = F.cross_entropy(
        z, target, None if weight is None else weight.to(z.dtype), reduction=reduction, ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )  # fmt: skip
    lse = torch.logsumexp(z, 1) * counted
    if z_loss:
        squares = lse.square()
        loss = loss + z_loss * (
            squares if reduction == "none" else squares.sum() / (counted.sum() if reduction == "mean" else 1)
        )
    log_probs = z.gather(1, target.masked_fill(~counted, 0)[:, None])[:, 0] * counted - lse
    loss = loss.view(t["x"].shape[:-1]) if reduction == "none" else loss
    log_p = z.log_softmax(1)
    entropy = -(log_p.exp() * log_p.clamp_min(-1e30)).sum(1) * counted
    wanted = zip((lse, log_probs, entropy), (return_lse, return_log_probs, return_entropy), strict=True)
    found = loss, *(one for one, asked in wanted if asked)
    return joined(found) if len(found) > 1 or return_accuracy else loss


def check(target, tensors, **options):
    """Twice eager's error at most against float64, on one draw or twelve. What is saved in 16 bits is compared with
    PyTorch's 16-bit logits."""
    check_exactness(functools.partial(ours, target, **options), functools.partial(unfused, target, **options), tensors)


# -- values and gradients


OPTIONS = pairwise(
    dtype=DTYPES, recompute=MODES, reduction=("mean", "sum", "none"), bias=(True, False), weighted=(False, True),
    label_smoothing=(0.0, 0.1, 1.0), softcap=(None, 5.0), logit_scale=(1.0, 0.5), z_loss=(0.0, 0.02),
    return_lse=(False, True), return_log_probs=(False, True), return_entropy=(False, True), return_accuracy=(False, True),
    workspace=(None, 1), ignore=("none", "some", "all but one"), classes=(40, 300),
)  # fmt: skip


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_as_exact_as_pytorch(case, backend):
    """Every pair of options, in kernels too; unaligned sizes, of which a chunk of the vocabulary is the smaller part."""
    case = dict(case)
    dtype, classes = case.pop("dtype"), case.pop("classes")
    tensors, target = make((5, 7), 33, classes, dtype, case.pop("bias"), case.pop("ignore"))
    weight = class_weights(classes) if case.pop("weighted") else None
    with ckptkern.backend(backend):
        check(target, tensors, weight=weight, **case)


SHAPES = {
    "one token": dict(lead=()),
    "one": dict(lead=(1,), features=1, classes=1),
    "three dimensions": dict(lead=(2, 3, 4)),
    "no tokens": dict(lead=(0,)),
    "no sequence": dict(lead=(3, 0)),
    "no features": dict(features=0),
    "a chunk and one": dict(classes=257),
    "three chunks": dict(classes=700),
}


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, backend, mode):
    tensors, target = make(**SHAPES[shape], ignore="none")
    with ckptkern.backend(backend):
        for reduction in ("sum", "none"):
            smoothing = 0.0 if shape == "one" else 0.1  # of one class nothing is left but its rounding
            options = dict(reduction=reduction, label_smoothing=smoothing, workspace=1)
            check(target, tensors, recompute=mode, **options)


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_tokens_ignored(reduction, backend):
    """As torch: a mean of nothing is NaN, and the gradients are zero, whatever an ignored token's x holds."""
    tensors, target = make(ignore="all")
    expected = unfused(target, tensors, reduction=reduction)
    with ckptkern.backend(backend):
        loss = ours(target, tensors, reduction=reduction, z_loss=0.1)
        torch.testing.assert_close(loss, expected, equal_nan=True)
        loss.sum().backward()
    assert all(not t.grad.any() for t in tensors.values())


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_an_ignored_tokens_input_does_not_matter(backend, mode):
    """Infinite logits of padding give no NaN: not in the loss, not in x's and the bias's gradients."""
    tensors, target = make(ignore="some")
    run = functools.partial(ours, target, recompute=mode, label_smoothing=0.1)
    with ckptkern.backend(backend):
        expected = gradients(run, tensors)
        with torch.no_grad():
            tensors["x"].view(-1, 7)[::3] = 1e38
        found = gradients(run, tensors)
    del expected["weight"], found["weight"]  # 0 times 1e38 is 0, too, but matmuls add in another order
    assert_same(found, expected)


def test_another_ignore_index():
    """One that is a class (padding), as torch; None is torch's default."""
    tensors, target = make(ignore="none")
    assert_same_within_rounding(
        gradients(functools.partial(ours, target, ignore_index=3), tensors),
        gradients(functools.partial(unfused, target, ignore_index=3), tensors),
    )
    tensors, target = make(ignore="some")
    ignored = functools.partial(ours, target)
    assert_same(
        gradients(functools.partial(ignored, ignore_index=None), tensors),
        gradients(functools.partial(ignored), tensors),
    )


@pytest.mark.parametrize("frozen", list(itertools.product((False, True), repeat=3))[1:-1])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_every_subset_of_frozen_inputs(frozen, mode):
    """The others' gradients have the same bits, and no matmul is run for what is frozen."""
    tensors, target = make()
    full = gradients(functools.partial(ours, target, recompute=mode, reduction="none"), tensors)
    for t, off in zip(tensors.values(), frozen, strict=True):
        t.requires_grad_(not off)
    with Watch() as watch:
        part = gradients(functools.partial(ours, target, recompute=mode, reduction="none"), tensors)
    assert_same(part, {name: full[name] for name in part})
    matmuls = 1 + (mode == "full") + (not frozen[0]) + (not frozen[1])
    assert watch.flops == watch.registered == matmuls * 2 * 15 * 7 * 12


def test_strides_of_inputs_and_gradients():
    """Transposed inputs, a target that is a view, a weight with a column to spare: gradients as of contiguous ones."""
    tensors, target = make((4, 6), 8, 20)
    options = dict(reduction="none", label_smoothing=0.1)
    expected = gradients(functools.partial(ours, target, **options), tensors)
    strided = {
        "x": tensors["x"].detach().transpose(0, 1).contiguous().transpose(0, 1),
        "weight": F.pad(tensors["weight"].detach(), (0, 3))[:, :8],
        "bias": torch.stack([tensors["bias"].detach()] * 2, 1)[:, 0],
    }
    given = {name: t.requires_grad_() for name, t in strided.items()}
    column = torch.stack([target, target], -1)[..., 0]
    for backend in ("eager", "triton"):
        with ckptkern.backend(backend):
            found = gradients(functools.partial(ours, column, **options), given)
        assert_same_within_rounding(found, expected)


# -- what is saved


TOKENS, CLASSES, WIDTH = 24, 300, 16


def saved_by(target, tensors, **options):
    with saved_tensors(exclude=[*tensors.values(), target]) as saved:
        ours(target, tensors, **options)
    return saved.bytes


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_saved_bytes(dtype, softcap):
    """At "full" 4 bytes a token besides the arguments, and the mean's count."""
    tensors, target = make((TOKENS,), WIDTH, CLASSES, dtype)
    for reduction, count in (("sum", 0), ("none", 0), ("mean", 8)):
        options = dict(reduction=reduction, softcap=softcap, label_smoothing=0.1, z_loss=0.0)
        assert saved_by(target, tensors, recompute="full", **options) == 4 * TOKENS + count
    slices = 0 if softcap else 4  # the eager backend has one
    logits = CLASSES * dtype.itemsize + slices + 4 + 4
    for mode in ("none", "selective"):
        assert saved_by(target, tensors, recompute=mode, softcap=softcap, reduction="none") == TOKENS * logits


def test_saved_bytes_of_the_kernels():
    """Exponentials, and 4 bytes for each slice of 32 columns, the interpreter's."""
    tensors, target = make((TOKENS,), WIDTH, CLASSES, torch.bfloat16)
    with ckptkern.backend("triton"):
        assert saved_by(target, tensors, reduction="sum") == 4 * TOKENS
        none = saved_by(target, tensors, recompute="none", reduction="sum")
    assert none == TOKENS * (2 * CLASSES + 4 * 10 + 8)


def test_z_loss_and_lse_save_no_more():
    tensors, target = make((TOKENS,), WIDTH, CLASSES)
    options = dict(z_loss=0.1, return_lse=True, reduction="sum")
    with saved_tensors(exclude=[*tensors.values(), target]) as saved:
        lce(tensors["x"], tensors["weight"], target, linear_bias=tensors["bias"], **options)
    assert saved.bytes == 4 * TOKENS


def test_autocast_saves_no_cast_weight():
    """float32 parameters under bf16: x's cast copy and lse; gradients in float32, logits and loss too."""
    tensors, target = make((TOKENS,), WIDTH, CLASSES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ours(target, tensors)
        assert saved_by(target, tensors, reduction="sum") == 4 * TOKENS + 2 * TOKENS * WIDTH
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(t.grad.dtype == torch.float32 for t in tensors.values())


def test_nothing_is_saved_without_a_gradient():
    tensors, target = make()
    expected = ours(target, tensors, recompute="none").detach()
    with torch.no_grad(), Saved() as saved:
        assert torch.equal(ours(target, tensors, recompute="none"), expected)
    assert saved.bytes == [4 * 15]  # lse, freed with the call


def test_a_frozen_weight_lets_go_of_the_input():
    """At "none" x's gradient needs no x."""
    tensors, target = make()
    tensors["weight"].requires_grad_(False)
    with saved_tensors(exclude=[tensors["weight"], tensors["bias"], target]) as saved:
        ours(target, tensors, recompute="none", reduction="none")
    assert saved.bytes == 15 * (4 * 12 + 4 + 4 + 4)


def step(run, tensors):
    for t in tensors.values():
        t.grad = None
    with peak_memory("cpu") as peak:
        run(tensors).backward()
    return peak.bytes - sum(t.nbytes for t in tensors.values())  # of the gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_of_a_step_against_pytorch(dtype):
    """Above the gradients: what the workspace allows. PyTorch holds float32 logits three times; its chunked form
    holds more than ours, or less by no more than the bound above."""
    M, d, V = 1024, 128, 8192
    tensors, target = make((M,), d, V, dtype)
    workspace = M * V // 4
    peak = step(functools.partial(ours, target, workspace=workspace), tensors)
    copies = (
        4 * d * (2 * M + V) if dtype.itemsize == 2 else 0
    )  # a CPU's float32 copies of x, dx and, in forward, the weight
    assert peak <= max(workspace + copies, 128 * 4 * V + copies) + 2**18
    assert step(functools.partial(unfused, target), tensors) > 8 * M * V
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        options = torch.nn.LinearCrossEntropyOptions()

        def torchs(t):
            return F.linear_cross_entropy(t["x"], t["weight"], target, linear_bias=t["bias"], options=options)

        # torch 2.15's chunks of float32 add to the weight's gradient itself, and are of 16 tokens here
        smaller = 128 * 4 * V if torch.__version__ >= "2.15" and dtype == torch.float32 else 0
        assert peak < step(torchs, tensors) + smaller


@pytest.mark.parametrize(
    ("entries", "each", "workspace", "chunks"),
    [
        (0, 10, 1, []),
        (100, 10, 1, [(0, 100)]),
        (257, 10, 1, [(0, 256), (256, 257)]),
        (1000, 1, 512, [(0, 512), (512, 1000)]),
        (1300, 1, 1024, [(0, 768), (768, 1300)]),
        (50257, 0, 1, [(0, 256 * 196 + 81)]),
    ],
)
def test_vocabulary_chunks(entries, each, workspace, chunks):
    found = vocabulary_chunks(entries, each, workspace)
    if each:
        assert found == chunks
    assert [start for start, _ in found[1:]] == [stop for _, stop in found[:-1]]
    assert (not found and not entries) or (found[0][0], found[-1][1]) == (0, entries)


# -- autograd's own ways


def test_ten_runs_are_bitwise_equal():
    tensors, target = make((40,), 20, 600)
    run = functools.partial(ours, target, workspace=1, label_smoothing=0.1)
    first = gradients(run, tensors)
    for _ in range(9):
        assert_same(gradients(run, tensors), first)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workspace", [1, "40KiB"])
def test_modes_and_chunks_agree(mode, workspace):
    tensors, target = make((40,), 20, 600)
    for options in (dict(label_smoothing=0.1), dict(softcap=4.0)):
        expected = gradients(functools.partial(ours, target, **options), tensors)
        found = gradients(functools.partial(ours, target, recompute=mode, workspace=workspace, **options), tensors)
        assert_same_within_rounding(found, expected)


def test_second_backward_through_a_retained_graph():
    tensors, target = make()
    for mode in MODES:
        loss, inputs = ours(target, tensors, recompute=mode), list(tensors.values())
        first = torch.autograd.grad(loss, inputs, retain_graph=True)
        assert all(map(torch.equal, first, torch.autograd.grad(loss, inputs, retain_graph=True)))
        torch.autograd.grad(loss, inputs)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(loss, inputs)


def test_second_order():
    """Hessian-vector matmuls through the reference; where x is not saved, an error and no silent zero."""
    tensors, target = make(dtype=torch.float64)
    found = []
    for run in (ours, unfused):
        inputs = list(tensors.values())
        first = torch.autograd.grad(run(target, tensors, label_smoothing=0.1, z_loss=0.1), inputs, create_graph=True)
        total = sum((grad * output_gradient(grad)).sum() for grad in first)
        found.append(dict(zip(tensors, torch.autograd.grad(total, inputs), strict=True)))
    assert_same_within_rounding(*found)
    with torch.no_grad():
        tensors["x"][target == IGNORED] = 1e308  # whose logits overflow
    (dx,) = torch.autograd.grad(ours(target, tensors), tensors["x"], create_graph=True)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(dx.square().sum(), list(tensors.values())))
    tensors["weight"].requires_grad_(False)
    for reduction in ("none", "mean"):
        loss = ours(target, tensors, recompute="none", reduction=reduction).sum()
        with pytest.raises(RuntimeError, match="second-order gradients need the input"):
            torch.autograd.grad(loss, tensors["x"], create_graph=True)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_changes_between_forward_and_backward_are_caught(mode):
    for name in ("x", "weight", "target"):
        tensors, target = make()
        loss = ours(target, tensors, recompute=mode)
        with torch.no_grad():
            (target if name == "target" else tensors[name]).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_memory_is_flat_without_the_garbage_collector():
    tensors, target = make()
    assert_flat_memory(functools.partial(ours, target), tensors, "x")


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint_the_mode_is_none(reentrant):
    tensors, target = make()
    expected = gradients(functools.partial(ours, target), tensors)
    with Watch() as watch:
        found = gradients(
            lambda t: checkpoint(
                lambda *v: ours(target, dict(zip(t, v, strict=True))), *t.values(), use_reentrant=reentrant
            ),
            tensors,
        )
    assert_same_within_rounding(found, expected)
    assert "full" not in watch.strings[4 if reentrant else 0 :]  # forward without gradients saves nothing
    assert watch.flops == 4 * 2 * 15 * 7 * 12  # forward twice, and dx and dw


def test_micro_batches_add_up_to_main_grad():
    """Megatron's float32 buffer gets each chunk's rows; there is no gradient beside it."""
    tensors, target = make((6, 50), 16, 600, torch.bfloat16)
    weight = torch.nn.Parameter(tensors["weight"].detach())
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
    exact = torch.zeros(weight.shape, dtype=torch.float64)
    for x, t in zip(tensors["x"].detach(), target, strict=True):
        lce(x, weight, t, workspace=1, reduction="sum").backward()
        w = weight.detach().double().requires_grad_()
        F.cross_entropy(F.linear(x.double(), w), t, reduction="sum").backward()
        exact += w.grad
    assert weight.grad is None
    assert weight.grad_added_to_main_grad
    assert (weight.main_grad - exact).norm() < 2e-3 * exact.norm()


# -- as torch sees it


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("mode", ["none", "full"])
def test_compiled_equals_eager(mode):
    """One graph, for every number of tokens."""
    counter = CompileCounterWithBackend("aot_eager")

    def call(t, target):
        options = dict(label_smoothing=0.1, weight=class_weights(12), z_loss=0.1, return_lse=True)
        return ours(target, t, recompute=mode, **options)

    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for tokens in (5, 8, 3):
        tensors, target = make((2, tokens))
        expected = gradients(lambda t, target=target: call(t, target), tensors)
        assert_same_within_rounding(gradients(lambda t, target=target: compiled(t, target), tensors), expected)
    assert counter.frame_count <= 2


@pytest.mark.usefixtures("fresh_compiler")
def test_inductor():
    tensors, target = make()
    run = functools.partial(ours, target, z_loss=0.1)
    compiled = torch.compile(run, fullgraph=True)
    assert_same_within_rounding(gradients(compiled, tensors), gradients(run, tensors))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_autocast():
    tensors, target = make()

    def run(t):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ours(target, t)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert_same(gradients(compiled, tensors), gradients(run, tensors))


def test_torch_func():
    """grad, and vmap(grad), whose samples are batches of tokens."""
    tensors, target = make((4, 5), dtype=torch.float64)

    def loss(run, x, w, t):
        return run(t, {"x": x, "weight": w})

    x, w = (tensors[name].detach() for name in ("x", "weight"))
    for transform in (
        lambda run: torch.func.grad(functools.partial(loss, run), argnums=(0, 1))(x, w, target),
        lambda run: torch.func.vmap(torch.func.grad(functools.partial(loss, run), argnums=(0, 1)), (0, None, 0))(
            x, w, target
        ),
    ):
        for ours_, plain_ in zip(transform(ours), transform(unfused), strict=True):
            torch.testing.assert_close(ours_, plain_)
    with pytest.raises(NotImplementedError, match="forward-mode AD"):
        torch.func.jvp(lambda x: loss(ours, x, w, target), (x,), (x,))


def test_export():
    """A graph that calls the op itself trains."""
    tensors, target = make()
    run = functools.partial(ours, target, z_loss=0.1)
    assert_same_within_rounding(through_export(run, tensors), gradients(run, tensors))


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_saved_tensors_may_come_back_with_other_strides(mode, backend):
    tensors, target = make((40,), 20, 100)
    run = functools.partial(ours, target, recompute=mode)
    with ckptkern.backend(backend):
        assert_same_within_rounding(gradients(with_saved_transposed(run), tensors), gradients(run, tensors))


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
        check(target, tensors, workspace=workspace, **options)

    def step():
        return torch.autograd.grad(ours(target, tensors, workspace=1, **options), list(tensors.values()))

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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_weights_of_any_dtype_under_autocast_on_a_gpu(dtype):
    """Their gradients are those of float32 weights, but for rounding."""
    tensors, target = make((3, 30), 64, 500)
    tensors = {name: t.detach().cuda() for name, t in tensors.items()}
    grads = []
    for held in (torch.float32, dtype):
        given = {name: t.to(held if name == "weight" else t.dtype).requires_grad_() for name, t in tensors.items()}
        with torch.autocast("cuda", torch.bfloat16):
            loss = ours(target.cuda(), given, workspace=1)
        grads.append(torch.autograd.grad(loss, given["weight"])[0])
    assert grads[1].dtype == dtype
    assert (grads[1] - grads[0]).abs().max() < 2e-2 * grads[0].abs().max()


# -- the other kind of target


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_probabilities_of_classes(reduction):
    """As F.cross_entropy, which has the classes second; every token counts."""
    tensors, _ = make((2, 3), dtype=torch.float64)
    target = torch.rand(2, 3, 12, dtype=torch.float64).softmax(-1)
    options = dict(label_smoothing=0.1, reduction=reduction, weight=class_weights(12, torch.float64))

    def reference(t):
        z = F.linear(t["x"], t["weight"], t["bias"])
        loss = F.cross_entropy(z.movedim(-1, 1), target.movedim(-1, 1), **options)
        squares = torch.logsumexp(z, -1).square()
        return loss + 0.1 * {"mean": squares.mean, "sum": squares.sum, "none": lambda: squares}[reduction]()

    found = gradients(functools.partial(ours, target, z_loss=0.1, **options), tensors)
    assert_same_within_rounding(found, gradients(reference, tensors))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has it from 2.12 on")
def test_torchs_own_function():
    """Its arguments, shapes and values: [N, d] and [d]."""
    for lead in ((6,), ()):
        tensors, target = make(lead, ignore="none")
        options = dict(linear_bias=tensors["bias"], weight=class_weights(12), ignore_index=2, label_smoothing=0.1)
        for reduction in ("mean", "sum", "none"):
            given = tensors["x"], tensors["weight"], target
            theirs = F.linear_cross_entropy(*given, reduction=reduction, **options)
            torch.testing.assert_close(lce(*given, reduction=reduction, **options), theirs)


# -- errors


def test_targets_out_of_bounds():
    """torch's message; the sentinel may be any number that no class has."""
    tensors, target = make(ignore="none")
    for wrong in (12, -1, 2**40, -100 + 2**32):
        target.view(-1)[4] = wrong
        for backend in ("eager", "triton"):
            with ckptkern.backend(backend), pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
                ours(target, tensors)
            with ckptkern.backend(backend):
                assert ours(target, tensors, ignore_index=wrong).isfinite()


WRONG = {
    "a target of int32": (
        dict(target=torch.zeros(3, 5, dtype=torch.int32)),
        TypeError,
        "target must be int64, or floating point for probabilities, not torch.int32",
    ),
    "a target of another shape": (
        dict(target=torch.zeros(5, 3, dtype=torch.int64)),
        ValueError,
        r"shape \(3, 5\), a class",
    ),
    "probabilities of another shape": (dict(target=torch.zeros(3, 5)), ValueError, r"shape \(3, 5, 12\), probab"),
    "a target that is a list": (dict(target=[1, 2]), TypeError, "target must be a Tensor, not list"),
    "features": (dict(linear_weight=torch.zeros(12, 8)), ValueError, "input has 7 features but linear_weight"),
    "a weight of three dimensions": (dict(linear_weight=torch.zeros(12, 2, 7)), ValueError, "must be .out_features"),
    "a bias": (dict(linear_bias=torch.zeros(7)), ValueError, r"must have shape \(12,\)"),
    "class weights": (dict(weight=torch.ones(11)), ValueError, r"a value for each class, but has shape \(11,\)"),
    "class weights that train": (
        dict(weight=torch.ones(12, requires_grad=True)),
        ValueError,
        "weight gets no gradient",
    ),
    "dtypes": (dict(input=torch.zeros(3, 5, 7, dtype=torch.float16)), TypeError, "use one dtype, or torch.autocast"),
    "reduction": (dict(reduction="avg"), ValueError, "reduction must be one of 'none', 'mean', 'sum', not 'avg'"),
    "recompute": (dict(recompute="all"), ValueError, "recompute must be one of"),
    "label_smoothing": (dict(label_smoothing=1.5), ValueError, "label_smoothing must be between 0 and 1, not 1.5"),
    "softcap": (dict(softcap=0.0), ValueError, "softcap must be positive or None, not 0.0"),
    "a scale that trains": (
        dict(logit_scale=torch.ones((), requires_grad=True)),
        ValueError,
        "no gradient .* logit_scale",
    ),
    "z_loss": (dict(z_loss="much"), TypeError, "z_loss must be a number, not 'much'"),
    "return_lse": (dict(return_lse="sum"), TypeError, "return_lse must be a bool, not 'sum'"),
    "no largest": (dict(top_k=0), ValueError, "top_k must be from 1 to 12, not 0"),
    "more than all classes": (dict(top_k=13), ValueError, "top_k must be from 1 to 12, not 13"),
    "a flag for a number": (dict(top_k=True), TypeError, "top_k must be an int or None, not True"),
    "workspace": (dict(workspace=-1), ValueError, "workspace must be a positive number of bytes"),
    "a place without a group": (
        dict(vocab_start=3),
        ValueError,
        "vocab_start needs a group",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments(what):
    changed, kind, message = WRONG[what]
    tensors, target = make()
    given = dict(input=tensors["x"], linear_weight=tensors["weight"], target=target, linear_bias=tensors["bias"])
    with pytest.raises(kind, match=message):
        lce(**given | changed)


# -- what others got wrong


def test_a_first_token_that_is_ignored_does_not_silence_the_others():
    """Gradients of "none" are weighted token by token (Liger-Kernel#968, #678, #1298)."""
    tensors, target = make((9,))
    assert target[0] == IGNORED
    check(target, tensors, reduction="none")
    run = functools.partial(ours, target, reduction="none")
    dy = torch.arange(9.0)
    expected = gradients(functools.partial(unfused, target, reduction="none"), tensors, dy)
    assert_same_within_rounding(gradients(run, tensors, dy), expected)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_fp16_keeps_the_loss_scale(mode):
    """dz is formed under the scale, so that fp16 holds it: unscaled, 32 % of it would be 0 (Liger-Kernel#512)."""
    tensors, target = make((512,), 32, 2048, torch.float16, bias=False, ignore="none")
    exact = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    unfused(target, exact).backward()
    (ours(target, tensors, recompute=mode) * 65536.0).backward()
    error = (tensors["weight"].grad.double() / 65536 - exact["weight"].grad).norm() / exact["weight"].grad.norm()
    assert error < 5e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_error_does_not_grow_with_the_number_of_chunks(dtype):
    """A chunk's dW is final, dX is summed in float32 (axolotl#1601, ml-cross-entropy#14)."""
    tensors, target = make((200,), 24, 5120, dtype, ignore="none")
    exact = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    unfused(target, exact, reduction="sum").backward()

    def errors(workspace):
        found = gradients(functools.partial(ours, target, reduction="sum", workspace=workspace), tensors)
        return {n: ((found[n].double() - t.grad).norm() / t.grad.norm()).item() for n, t in exact.items()}

    whole, parts = errors(None), errors(1)
    for name in whole:
        assert parts[name] <= 1.1 * whole[name], name


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_gradients_where_nearly_all_labels_are_ignored(backend):
    """One token of many counts (unsloth#5230)."""
    tensors, target = make((300,), ignore="all but one")
    with ckptkern.backend(backend):
        check(target, tensors)
        found = gradients(functools.partial(ours, target), tensors)
    assert all(found[name].abs().max() > 1e-3 for name in tensors)


def test_mean_counts_neither_ignored_tokens_nor_their_classes():
    """The divisor is the weight of the targets that count, with smoothing too (TransformerEngine#2476, pytorch#73205)."""
    tensors, target = make((30,), ignore="some")
    weight = class_weights(12)
    for smoothing in (0.0, 0.3):
        options = dict(weight=weight, label_smoothing=smoothing)
        counted = target != IGNORED
        total = weight[target[counted]].sum()
        mean, losses = (ours(target, tensors, reduction=name, **options) for name in ("mean", "none"))
        torch.testing.assert_close(mean, losses[counted].sum() / total)
        assert not losses[~counted].any()
        torch.testing.assert_close(mean, unfused(target, tensors, **options))


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_sentinel_beyond_the_vocabulary(backend):
    """An ignore_index equal to a column that pads the last tile (ml-cross-entropy#59); entries of -inf, which mask classes."""
    tensors, target = make(classes=12, ignore="none")
    target.view(-1)[::2] = 12
    with torch.no_grad():
        tensors["bias"][5:7] = -torch.inf
        tensors["bias"][:4] += 1
    target[target.eq(5) | target.eq(6)] = 0
    with ckptkern.backend(backend):
        for mode in ("none", "full"):
            run = functools.partial(ours, target, ignore_index=12, recompute=mode)
            expected = gradients(functools.partial(unfused, target, ignore_index=12), tensors)
            assert_same_within_rounding(gradients(run, tensors), expected)


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_tokens_that_are_nearly_certain(mode, backend):
    """p of the target close to 1: its gradient p - 1 keeps its digits, though exponentials are saved in 16 bits."""
    tensors, target = make((64,), 32, 96, torch.bfloat16, bias=False, ignore="none")
    with torch.no_grad():
        tensors["x"].copy_(12 * tensors["weight"][target] + 0.1 * tensors["x"])
    exact = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    unfused(target, exact, reduction="sum").backward()
    with ckptkern.backend(backend):
        found = gradients(functools.partial(ours, target, recompute=mode, reduction="sum"), tensors, torch.ones(()))
    assert (found["x"].double() - exact["x"].grad).norm() < 0.01 * exact["x"].grad.norm()
