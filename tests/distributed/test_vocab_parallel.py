"""linear_cross_entropy with its vocabulary split over gloo processes, against one process on the whole of it."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from support.cases import assert_same_within_rounding
from support.catalog import OPS
from support.interpreter import quicken
from support.ranks import Ranks, on_ranks
from support.timeline import Timeline

import ckptkern
from ckptkern.memory import saved_tensors
from ckptkern.ops.registration.functions import bodies_seen

M, WIDTH, IGNORED = 21, 9, -100
lce = ckptkern.linear_cross_entropy
SPLITS = {
    "one": (40,),
    "halves": (20, 20),
    "uneven": (7, 33),
    "three": (300, 13, 27),
    "an empty one": (25, 0, 15),
    "the first empty": (0, 40),
}
CHOSEN = OPS["linear_cross_entropy"].every_option()
# What the tests below choose, and a low-rank update, which no group has.
HERE = {"weight", "ignore_index", "group", "vocab_start", "recompute", "workspace", "lora"}
OPTIONS = {
    "plain": {},
    "everything": {name: options[name] for name, options in CHOSEN.items() if name not in HERE} | {"weighted": True},
    "smoothing": dict(label_smoothing=0.2, reduction="sum"),
    "class weights": dict(weighted=True, label_smoothing=0.2),
}


def make(V: int, dtype: torch.dtype, seed: int = 3):
    generator = torch.Generator().manual_seed(seed)
    x, w, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((M, WIDTH), (V, WIDTH), (V,)))
    target = torch.randint(V, (M,), generator=generator)
    target[::4] = IGNORED
    return {"x": x, "weight": w, "bias": b}, target


def loss_of(target, t, *, weighted=False, classes=None, **options):
    V = classes or len(t["weight"])
    weight = torch.linspace(0.5, 2, V) if weighted else None
    outputs = lce(t["x"], t["weight"], target, linear_bias=t["bias"], weight=weight, **options)
    if not isinstance(outputs, tuple):
        return {"loss": outputs}
    results = {name: value for name, value in outputs._asdict().items() if value is not None}
    if top_k := results.pop("top_k", None):
        results |= {f"top {name}": value for name, value in top_k._asdict().items()}
    return results


def gradients(run, t):
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in t.items()}
    results = run(leaves)
    y = torch.cat([value.reshape(-1) for value in results.values() if value.requires_grad])
    y.backward(torch.linspace(1, 2, y.numel()).to(y.dtype))
    values = {name: value.detach().to(y.dtype) for name, value in results.items()}
    return values | {f"d{name}": leaf.grad for name, leaf in leaves.items()}


def shard_of(t, sizes, rank):
    place = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    return t | {name: t[name][place] for name in ("weight", "bias")}, place


def _check(rank: int, sizes, options: dict, dtype=torch.float32, mode="full", backend="eager") -> None:
    """Results and x's gradient are the whole vocabulary's, the parameters' are their rows; all ranks have equal bits."""
    if backend == "triton":
        quicken()
    t, target = make(sum(sizes), dtype)
    mine, place = shard_of(t, sizes, rank)
    arguments = dict(options, classes=sum(sizes), recompute=mode, group=dist.group.WORLD)
    arguments |= {} if len(set(sizes)) == 1 else {"vocab_start": place.start}
    with ckptkern.backend(backend):
        actual = gradients(functools.partial(loss_of, target, workspace=1, **arguments), mine)
    whole = gradients(functools.partial(loss_of, target, recompute="full", **options), t)
    for name in ("dweight", "dbias"):
        whole[name] = whole[name][place]
    if dtype == torch.float32:
        assert_same_within_rounding(actual, whole)
    else:
        for name, ref in whole.items():
            assert (actual[name].float() - ref.float()).norm() <= 2 * torch.finfo(dtype).eps * ref.float().norm(), name
    for name in actual.keys() - {"dweight", "dbias"}:
        everyones = [torch.empty_like(actual[name]) for _ in sizes]
        dist.all_gather(everyones, actual[name])
        assert all(torch.equal(other, actual[name]) for other in everyones), name


SIXTEEN = ("an empty one", "everything", torch.bfloat16)
SHORT = [
    *(("halves", "plain"), ("uneven", "everything"), ("three", "class weights"), ("an empty one", "smoothing")),
    (*SIXTEEN, "none"),
]
LONG = [case for case in itertools.product(SPLITS, OPTIONS) if case not in SHORT]
LONG += [(*SIXTEEN, mode, "triton") for mode in ("none", "full")]


@pytest.mark.parametrize("case", [*SHORT, *(pytest.param(case, marks=pytest.mark.long) for case in LONG)], ids=str)
def test_shards(ranks: Ranks, case):
    split, options, *how = case
    ranks.run(len(SPLITS[split]), _check, SPLITS[split], OPTIONS[options], *how)


@on_ranks()
def test_collectives_and_errors(rank: int) -> None:
    """One all-gather of three numbers a token and one, one all-reduce; saved are lse and the vocabulary's size."""
    t, target = make(40, torch.float32)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in shard_of(t, (20, 20), rank)[0].items()}

    def loss(**options):
        return loss_of(target, leaves, group=dist.group.WORLD, label_smoothing=0.1, reduction="sum", **options)["loss"]

    with bodies_seen(), Timeline() as sent, saved_tensors([*leaves.values(), target]) as saved:
        y = loss()
    assert [(collective.name, collective.size) for collective in sent.collectives] == [
        ("all_gather_into_tensor", 2 * (3 * M + 1))
    ]
    assert saved.bytes == 4 * M + 4
    with bodies_seen(), Timeline() as sent:
        y.backward()
    assert [(collective.name, collective.size) for collective in sent.collectives] == [("all_reduce", M * WIDTH)]
    (dx,) = torch.autograd.grad(loss(), leaves["x"], create_graph=True)
    with pytest.raises(NotImplementedError, match="second-order gradients"):
        dx.sum().backward()
    leaves, place = shard_of(t, (15, 25), rank)
    with pytest.raises(ValueError, match="shards of equal size"):
        loss()
    target[1] = 40
    with pytest.raises(IndexError, match="Target 40 is out of bounds"):
        loss(vocab_start=place.start)
