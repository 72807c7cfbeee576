"""Stores and tensors that are made of others: jagged nested tensors, DTensors, quantised tensors."""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.stores import Save, store_of, through, watch
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

from ckptkern.memory import saved_tensors
from ckptkern.storage import compress, offload, partition

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's prototype of nested tensors
EXACT = ["offload(min_bytes=0)", "offload()", "copies(min_bytes=0, then=offload(min_bytes=0))"]
OFFSETS, LENGTHS = torch.tensor([0, 4, 7, 10]), torch.tensor([2, 3, 1])
WIDTH = 16


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, [2, 8]).transpose(1, 2) for p in self.projections[:3])
        y = F.scaled_dot_product_attention(q, k, v)
        return self.projections[3](y.transpose(1, 2).flatten(-2))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.each = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(3, 1, WIDTH))

    def forward(self, x):
        return (x * self.one) * self.each


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


def renested(x):
    return torch.nested.as_nested_tensor([t.exp() for t in x.unbind()], layout=torch.jagged).sin()


WHOLE = {  # of tensors whose rows touch
    "linear": lambda: nn.Linear(WIDTH, 6),
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 3)),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "rms_norm": lambda: nn.RMSNorm(WIDTH),
    "attention": Attention,
    "scaled by dense": Scaled,
    "softmax": lambda: Call(lambda x: x.softmax(-1) * x),
    "padded": lambda: Call(lambda x: torch.nested.to_padded_tensor(x * x, 0.0).exp()),
    "cat": lambda: Call(lambda x: torch.cat([x.exp(), x.sin()], -1)),
    "heads": lambda: Call(lambda x: x.unflatten(-1, [2, 8]).transpose(1, 2).exp().transpose(1, 2)),
}
ANY = {  # also with holes
    "gelu": lambda: Call(F.gelu),
    "relu": lambda: Call(lambda x: x.relu().square()),
    "mean": lambda: Call(lambda x: x.sin().mean(-1, keepdim=True) * x),
    "unbind": lambda: Call(lambda x: torch.cat([t.exp() for t in (x * x).unbind()])),
    "values": lambda: Call(lambda x: x.exp().values().sin()),
    "where": lambda: Call(lambda x: torch.where(x > 0, x, x.sin()) * (x > 0)),
    "nested anew": lambda: Call(renested),
}
STEPS = [(name, False, dtype) for name in WHOLE | ANY for dtype in (torch.float32, torch.bfloat16)]
STEPS += [(name, True, torch.float32) for name in ANY]


def jagged(holes=False, dtype=torch.float32, **options):
    values = torch.randn(10, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(0), **options)
    return torch.nested.nested_tensor_from_jagged(values, OFFSETS, LENGTHS if holes else None)


def rows(y):
    """Without what lies in holes, which has no values."""
    return torch.cat(y.unbind()) if y.is_nested else y


def step(module, x, keep):
    module.zero_grad()
    torch.manual_seed(0)
    x = x.detach().requires_grad_()
    with keep:
        loss = rows(module(x)).float().square().sum()
    loss.backward()
    return [rows(x.grad), *(p.grad for p in module.parameters())]


@pytest.mark.parametrize(("name", "holes", "dtype"), STEPS)
def test_gradients_of_jagged_tensors(name, holes, dtype):
    torch.manual_seed(1)
    module, x = (WHOLE | ANY)[name]().to(dtype), jagged(holes, dtype)
    expected = step(module, x, contextlib.nullcontext())
    for keep in (*map(store_of, EXACT), saved_tensors()):
        torch.testing.assert_close(step(module, x, keep), expected, rtol=0, atol=0)
    for keep in (compress("fp8", min_bytes=0), compress("int8", min_bytes=0)):  # lossy: of the right shapes
        assert [g.shape for g in step(module, x, keep)] == [g.shape for g in expected]


def test_values_of_a_jagged_tensor_move_and_what_says_where_they_lie_stays():
    keep, x = offload(min_bytes=0), jagged(holes=True)
    puts = watch(keep)
    (restored,) = through(keep, x)
    assert puts == [x.values().numel()]
    assert restored.shape == x.shape  # the same symbol
    assert restored.offsets() is x.offsets()
    assert restored.lengths() is x.lengths()
    puts.clear()
    keep = offload(min_bytes=0)
    puts = watch(keep)
    with keep:
        y = nn.Linear(WIDTH, WIDTH)(jagged().requires_grad_())
        held = weakref.ref(y._values)
        y = y.sin()
    gc.collect()
    assert puts == [x.values().numel()] * 2
    assert held() is None
    y.values().sum().backward()


@pytest.mark.parametrize("made_of", ["offload(min_bytes=0)", "copies(min_bytes=0)", "saved_tensors()"])
def test_the_strided_layout_of_nested_tensors_stays(made_of):
    def run(context):
        torch.manual_seed(0)
        x = torch.nested.nested_tensor([torch.randn(2, WIDTH), torch.randn(4, WIDTH)], requires_grad=True)
        with context as entered:
            y = torch.nested.to_padded_tensor(x * x, 0.0)
        y.sum().backward()
        return entered, x.grad.unbind()

    context = saved_tensors() if made_of == "saved_tensors()" else store_of(made_of)
    entered, result = run(context)
    torch.testing.assert_close(result, run(contextlib.nullcontext())[1], rtol=0, atol=0)
    if made_of == "saved_tensors()":
        assert entered.bytes == 2 * 6 * WIDTH * 4  # x and x * x


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_partition_of_jagged_tensors_and_dtensors(alone):
    module, x = WHOLE["mlp"](), jagged()
    expected = step(module, x, contextlib.nullcontext())
    torch.testing.assert_close(step(module, x, partition(min_bytes=0)), expected, rtol=0, atol=0)
    x = distribute_tensor(torch.randn(6, 4), init_device_mesh("cpu", (1,)), [Replicate()])
    for keep in (partition(min_bytes=0), offload(min_bytes=0)):
        puts = watch(keep)
        leaf = x.detach().requires_grad_()
        with keep:
            y = leaf.exp().sin().sum()
        y.backward()
        assert puts == [x.numel()]  # exp's result is sin's input
        local = x.to_local()
        torch.testing.assert_close(leaf.grad.to_local(), local.exp().cos() * local.exp())


class Quantized(torch.Tensor):
    """int8 numbers and a scale for all of them."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)

    def __init__(self, data, scale):
        self.data_, self.scale = data, scale

    def __tensor_flatten__(self):
        return ["data_", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts, context, size, stride):
        return Quantized(parts["data_"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return Quantized(args[0].data_, args[0].scale)
        if function is torch.ops.aten.mul_.Tensor:
            args[0].scale.mul_(args[1])
            return args[0]
        return function(*(a.data_ * a.scale if isinstance(a, Quantized) else a for a in args), **(kwargs or {}))


class Fixed(Quantized):
    """What it is made of cannot be set."""

    data_ = property(
        lambda self: self.held[0], lambda self, value: self.held.append(value) if value is not None else self.held.x
    )

    def __new__(cls, data, scale):
        tensor = super().__new__(cls, data, scale)
        tensor.held = []
        return tensor


@pytest.mark.parametrize("kind", [Quantized, Fixed])
@pytest.mark.parametrize(
    ("keep", "moved"),
    [
        ("offload(min_bytes=0)", [40, 1]),
        ("offload(min_bytes=20)", [40]),
        ("compress('fp8', min_bytes=0)", [1]),
    ],
)
def test_quantized(keep, moved, kind):
    x, w = kind(torch.arange(40, dtype=torch.int8), torch.tensor([0.5])), torch.ones(40, requires_grad=True)
    keep = store_of(keep)
    puts = watch(keep)
    with keep:
        y = w * x
    assert puts == moved
    y.sum().backward()
    torch.testing.assert_close(w.grad, torch.arange(40) * 0.5, rtol=0.07, atol=0)


WRAPPERS = {
    "jagged": lambda: jagged().clone(),
    "two": lambda: TwoTensor(torch.ones(3, 4), torch.ones(3, 4)),
    "quantized": lambda: Quantized(torch.ones(40, dtype=torch.int8), torch.ones(1)),
}


@pytest.mark.parametrize("keep", ["offload(min_bytes=0)", "offload(min_bytes=20)", "offload()"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_changes_of_a_wrapper_in_place(name, keep):
    """They move the wrapper's version and none of its parts'."""
    x, scalar, first, second = WRAPPERS[name](), torch.ones((), requires_grad=True), [], []
    with store_of(keep):
        y = Save.apply(scalar, first, x)
        x.mul_(2)
        y = Save.apply(y, second, x)
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation.*version 1; expected version 0 instead\."
    ):
        y.backward()
    (restored,) = second  # of the later node
    for part in restored.__tensor_flatten__()[0]:
        assert torch.equal(getattr(restored, part), getattr(x, part))
