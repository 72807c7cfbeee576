"""The eager Function calls an op's body without the dispatcher, unless something observes the op."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ckptkern

OPS = ["ckptkern::mlp_fwd", "ckptkern::mlp_bwd"]


def step(x: Tensor) -> Tensor:
    layer = ckptkern.nn.MLP(8, 16)
    layer(x).sum().backward()
    return layer.fc1.weight.grad


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_ops():
    with Names() as mode:
        step(torch.randn(3, 8))
    assert [name for name in mode.names if name.startswith("ckptkern")] == OPS


def test_the_profiler_sees_the_ops():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step(torch.randn(3, 8))
    assert [event.name for event in profiler.events() if event.name.startswith("ckptkern::")] == OPS


class Seen(Tensor):
    """A tensor that records what is done with it."""

    names: tuple[str, ...] = ()

    @staticmethod
    def __new__(cls, inner: Tensor):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad)

    def __init__(self, inner: Tensor):
        self.inner = inner.detach()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        Seen.names = (*Seen.names, func._schema.name)
        return func(*(arg.inner if isinstance(arg, Seen) else arg for arg in args), **(kwargs or {}))


def test_a_tensor_subclass_with_operations_of_its_own_sees_pytorchs(monkeypatch):
    monkeypatch.setattr(Seen, "names", ())
    step(Seen(torch.randn(3, 8)))
    assert "aten::addmm" in Seen.names
    assert not any(name.startswith("ckptkern") for name in Seen.names)


def test_nobody_else_pays_for_the_dispatcher(monkeypatch):
    """Inside, the ops' bodies run and no op does."""
    outer = torch.randn(3, 8)
    unfused = step(outer)
    monkeypatch.setattr(torch._ops.OpOverload, "__call__", Refusing(torch._ops.OpOverload.__call__))
    assert step(outer).shape == unfused.shape


class Refusing:
    def __init__(self, call):
        self.call = call

    def __get__(self, op, kind):
        if op._schema.name.startswith("ckptkern::mlp"):
            raise AssertionError(f"{op} went through the dispatcher")
        return self.call.__get__(op, kind)


def test_a_tensor_that_outlived_its_transform_keeps_its_graph():
    """torch's ops unwrap it, and so must a Function that is applied without torch's own apply()."""
    x, escaped = torch.randn(3, 8, requires_grad=True), []
    torch.func.grad(lambda x: (escaped.append(x), x.sum())[1])(x)
    ckptkern.nn.MLP(8)(escaped[0]).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
