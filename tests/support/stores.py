"""What the tests of the stores share: what backward finds of saved tensors, gradients, and modules that save some."""

import torch
from torch import nn

import ckptkern
from ckptkern import storage
from ckptkern.storage.store import Chained


class Save(torch.autograd.Function):
    """y = x; backward hands what it finds of `saved` to `restored`."""

    @staticmethod
    def forward(ctx, x, restored, *saved):
        ctx.save_for_backward(*saved)
        ctx.restored = restored
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.restored.extend(ctx.saved_tensors)
        return dy, None, *[None] * len(ctx.saved_tensors)


def through(keep, *tensors):
    """What backward finds of tensors that were saved under `keep`."""
    x, restored = torch.ones((), requires_grad=True, device="cpu"), []
    with keep:
        y = Save.apply(x, restored, *tensors)
    y.backward()
    return restored


def watch(keep):
    """Lists the number of elements of every run that `keep` is given."""
    puts, put = [], keep.put
    keep.put = lambda flat: (puts.append(flat.numel()), put(flat))[1]
    return puts


def gradients(module, x, keep):
    module.zero_grad()
    x = x.clone().requires_grad_()
    with keep:
        loss = module(x).square().sum()
    loss.backward()
    return [x.grad, *(p.grad for p in module.parameters())]


def store_of(call):
    """The store that a text makes: "offload(min_bytes=0)"."""
    names = {name: getattr(storage, name) for name in ("compress", "offload", "partition")}
    return eval(call, names | {"copies": copies})


class copies(Chained):
    """Stores a copy, bit for bit: an exact store on the device, and an exact one in a chain."""

    def put(self, flat):
        return self._then.put(flat.clone())

    def get(self, saved):
        return self._then.get(saved)

    def resident(self, saved):
        return self._then.resident(saved)


class Fused(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.blocks = nn.ModuleList(ckptkern.nn.MLP(16, recompute=recompute) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x.exp())
        return x


def unfused():
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16), nn.Softmax(-1)
    )
