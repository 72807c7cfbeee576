"""What a training step asks of a device: layers in every mode, autocast with a scaler, torch.compile, convert, replays, and a
device that is not the current one. On a CPU the same tests run interpreted kernels, and a replay is another call; what takes
minutes there is left to `make test-all`."""

import functools
from collections.abc import Callable

import pytest
import torch
from support.architectures import ids
from support.cases import MODES, SEED, P, Tensors, assert_same, assert_same_within_rounding, check_exactness, gradients
from support.training import build
from torch import Tensor, nn

import ckptkern

WIDTH, HEADS, HIDDEN = 16, 2, 32
ROWS = 2, 70  # more than the 128 rows that a chunk has at least
ENCODER = functools.partial(ckptkern.nn.TransformerEncoderLayer, WIDTH, HEADS, HIDDEN, P, batch_first=True)
LLAMA = functools.partial(
    ckptkern.nn.LlamaDecoderLayer, WIDTH, HEADS, 1, HIDDEN, dropout=P, resid_dropout=P, workspace=1
)
long_on_cpu = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.long), pytest.param("cuda", marks=pytest.mark.gpu)]
)
# "auto" runs libraries on a GPU, whose recompute has not forward's bits
each_backend = pytest.mark.parametrize("backend", ["triton", pytest.param("auto", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def _triton():
    with ckptkern.backend("triton"):
        yield


def leaves(layer: nn.Module, device: str, dtype: torch.dtype = torch.float32, lead: tuple[int, ...] = ROWS) -> Tensors:
    return {"x": torch.randn(*lead, WIDTH).to(device, dtype).requires_grad_(), **dict(layer.named_parameters())}


def running(
    layer: nn.Module, backend: str = "triton", autocast: torch.dtype | None = None
) -> Callable[[Tensors], Tensor]:
    """The layer as a function of x and its parameters; the masks are those of one seed. autocast: but for float64."""

    def run(tensors: Tensors) -> Tensor:
        torch.manual_seed(SEED)
        x, rest = tensors["x"], {name: t for name, t in tensors.items() if name != "x"}
        casts = torch.autocast(x.device.type, autocast, enabled=autocast is not None and x.dtype != torch.float64)
        with casts, ckptkern.backend(backend):
            return torch.func.functional_call(layer, rest, (x,))

    return run


@long_on_cpu
@pytest.mark.parametrize(
    ("layer", "dtype"), [(ENCODER, torch.bfloat16), (LLAMA, torch.float32)], ids=["encoder-bf16", "llama-fp32"]
)
def test_layers_in_every_mode(layer, dtype, device):
    """One result in every mode, and as exact as PyTorch's; with dropout, and the MLP's backward in chunks of rows."""
    first, *others = (layer(recompute=mode).to(device, dtype) for mode in MODES)
    tensors = leaves(first, device, dtype)
    expected = gradients(running(first), tensors)
    for other in others:
        assert_same(gradients(running(other), tensors), expected, sums=r".*bias|.*norm.*")
    check_exactness(running(first), running(first, "eager"), tensors)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy, in the interpreter
def test_float16_autocast_and_a_scaler(device):
    """As exact as PyTorch's; the scaled loss's gradients are those of the loss, and a step with an infinite one is left out."""
    layer = LLAMA().to(device)
    tensors = leaves(layer, device, lead=(2, 5))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    ours = running(layer, autocast=torch.float16)
    check_exactness(ours, running(layer, "eager", torch.float16), tensors)
    expected = gradients(lambda t: ours(t).float().square().mean(), tensors, torch.ones((), device=device))

    def step(factor: float) -> None:
        optimizer.zero_grad()
        scaler.scale(ours(tensors).float().square().mean() * factor).backward()
        scaler.unscale_(optimizer)

    step(1.0)
    for name, parameter in layer.named_parameters():
        largest = expected[name].abs().max().item()  # smaller ones are subnormal in float16 where they are not scaled
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0.02, atol=0.02 * largest)
    scaler.step(optimizer)
    scaler.update()
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    step(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert all(map(torch.equal, before, layer.parameters()))


@long_on_cpu
@each_backend
@pytest.mark.parametrize("layer", [ENCODER, LLAMA], ids=["encoder", "llama"])
def test_compiled(layer, backend, device):
    """In one graph, by inductor on a GPU: results, masks included, are those of a call."""
    module = layer().to(device)
    tensors = leaves(module, device, lead=(2, 5))
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")

    def run(tensors: Tensors) -> Tensor:
        torch.manual_seed(SEED)
        with ckptkern.backend(backend):
            return compiled(tensors["x"])

    assert_same_within_rounding(gradients(run, tensors), gradients(running(module, backend), tensors))


@pytest.mark.slow
def test_converted(device):
    """Every layer is fused where the model lies, and computes what it did."""
    network, tokens = build("converted", ours=False).to(device), ids().to(device)
    tensors = dict(network.named_parameters())
    expected = gradients(lambda _: network(tokens), tensors)
    conversion = ckptkern.convert(network, tokens)
    assert [row.replaced_by for row in conversion.converted] == 2 * ["transformer_layer"], conversion
    assert_same_within_rounding(gradients(lambda _: network(tokens), tensors), expected)


def replayed(step: Callable[[], tuple[Tensor, ...]], device: str) -> Callable[[], tuple[Tensor, ...]]:
    """The step, on a GPU as a CUDA graph."""
    if device == "cpu":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay() -> tuple[Tensor, ...]:
        graph.replay()
        return tuple(result.clone() for result in results)

    return replay


@pytest.mark.slow
def test_replays_draw_anew_and_masks_agree_within_one(device):
    """The last weight [I; 0] makes y begin with h;  dy = I makes its gradient spell h, as backward recomputed it."""
    n, features, hidden = 140, 9, 24
    model = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Dropout(P), nn.Linear(hidden, n))
    model = model.to(device, torch.bfloat16)
    x = torch.randn(n, features).to(device, torch.bfloat16).requires_grad_()
    last = model[3]
    with torch.no_grad():
        last.weight.copy_(torch.eye(n, hidden))
        last.bias.zero_()
    conversion = ckptkern.convert(model, x, recompute="full")
    assert [row.replaced_by for row in conversion.converted] == ["mlp_block"], conversion
    dy = torch.eye(n).to(x)

    def step() -> tuple[Tensor, ...]:
        model.zero_grad()
        y = model(x)
        y.backward(dy)
        return y.detach()[:, :hidden], last.weight.grad

    run, seen = replayed(step, device), []
    for _ in range(3):
        h, recomputed = run()
        assert torch.equal(h, recomputed)
        seen.append(h)
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@long_on_cpu
@each_backend
def test_a_converted_training_step_replays(backend, device):
    """Forward, backward and optimizer of layers with dropout at every place: each replay trains, with other masks."""
    network, tokens = build("converted", 0.2, device=device), ids().to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-5)

    def step() -> tuple[Tensor, ...]:
        optimizer.zero_grad()
        with ckptkern.backend(backend):
            loss = nn.functional.cross_entropy(network(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        return (loss.detach(),)

    run = replayed(step, device)
    before = [parameter.detach().clone() for parameter in network.parameters()]
    losses = torch.stack([run()[0] for _ in range(3)])
    assert losses.isfinite().all()
    assert losses.diff().abs().min() > 1e-3  # more than steps of this size change
    assert not any(map(torch.equal, before, network.parameters()))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("layer", [ENCODER, LLAMA], ids=["encoder", "llama"])
def test_a_device_that_is_not_current(layer):
    """Kernels, seeds and workspaces are those of the tensors' device."""
    assert torch.cuda.current_device() == 0
    module = layer().cuda(0)
    tensors = leaves(module, "cuda:0")
    expected = gradients(running(module), tensors)
    actual = gradients(running(module), {name: t.detach().cuda(1).requires_grad_() for name, t in tensors.items()})
    assert all(t.device.index == 1 for t in actual.values())
    assert_same({name: t.cuda(0) for name, t in actual.items()}, expected)
