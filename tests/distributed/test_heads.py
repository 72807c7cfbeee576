"""Converted heads under DistributedDataParallel and fully_shard train as one process with all ranks' batches."""

import copy
import warnings

import pytest
import torch
from conversion.test_heads import LM, WIDTH, V, flat, ids, model_of
from support.cases import assert_as_exact
from support.ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckptkern
from ckptkern.conversion.logits import Logits
from ckptkern.memory import peak_memory


def converted(model: nn.Module, replaced: bool = True) -> nn.Module:
    conversion = ckptkern.convert(model, ids(), ids(1))
    assert [row.replaced_by for row in conversion.converted] == ["linear_cross_entropy"] * replaced, str(conversion)
    return model


def sharded(model: LM, head: bool = False) -> LM:
    for part in (model.body, model.head)[: 1 + head]:
        fully_shard(part)
    return fully_shard(model)


WRAPPERS = {
    "DDP": lambda model: DistributedDataParallel(converted(model)),
    "shard, convert": lambda model: converted(sharded(model)),
    "convert, shard, the head alone": lambda model: sharded(converted(model), head=True),
    "shard, convert, the head alone": lambda model: converted(sharded(model, head=True), replaced=False),
    "convert, shard": lambda model: sharded(converted(model)),
    "DDP, unused": lambda model: DistributedDataParallel(converted(model), find_unused_parameters=True),
}


@on_ranks()
def test_ddps_copies_of_logits_stay_lazy(rank):
    """The sink of find_unused_parameters=True clones what the model returns, and hands its backward no gradient."""
    model = model_of(flat, tied=False)
    model.head = nn.Linear(model.head.in_features, 8192)
    model.loss = lambda model, z, targets: nn.functional.cross_entropy(z.flatten(0, 1), targets.flatten())
    del model.added
    ours = WRAPPERS["DDP, unused"](model)
    calls = model.head.forward.calls
    with peak_memory("cpu") as peak:
        logits, loss = ours(ids(2, 512), ids(3, 512))
        loss.backward()
    assert peak.bytes < 24 * 2**20  # the logits take 32 MiB
    assert calls["original"] == 0
    with pytest.warns(UserWarning, match="reads its logits, which are then computed"):
        logits.topk(3)
    assert calls["original"] == 1


def losses(model: nn.Module, ranks: list[int]) -> list[list[float]]:
    """Of training steps with the mean of these ranks' losses."""
    optimizer, values = torch.optim.SGD(model.parameters(), 0.5), []
    for step in range(3):
        optimizer.zero_grad()
        each = [model(ids(10 * step + rank), ids(10 * step + rank + 1))[1] for rank in ranks]
        (sum(each) / len(each)).backward()
        optimizer.step()
        values.append([float(loss.detach()) for loss in each])
    return values


@pytest.mark.parametrize(
    "wrapper", [pytest.param(name, marks=pytest.mark.long if i > 3 else ()) for i, name in enumerate(WRAPPERS)]
)
@on_ranks()
def test_a_head_is_trained_as_in_one_process(rank, wrapper):
    model = model_of(flat, tied=False, bias=True)
    del model.added  # is in no loss, which DDP would wait for
    want = losses(copy.deepcopy(model), [0, 1])
    ours = WRAPPERS[wrapper](model)
    actual = losses(ours, [rank])
    assert [loss for (loss,) in actual] == pytest.approx([row[rank] for row in want], rel=1e-5)
    assert want[-1] != pytest.approx(want[0], rel=1e-2)
    logits, _ = model(ids(), ids(1))
    assert (type(logits) is Logits) == (not wrapper.endswith("alone"))


def by_layers(
    model: LM, of_head: dict | None = None, output_dtype: torch.dtype | None = None, layers=True, **options
) -> LM:
    """Sharded in the documented order: layers, then the root, in bfloat16 if an output_dtype is given."""
    of_root = dict(options)
    if output_dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16)
        of_root["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, output_dtype=output_dtype)
    if layers:
        fully_shard(model.body, **options)
    if of_head is not None:
        fully_shard(model.head, **options | of_head)
    return fully_shard(model, **of_root)


POLICIES = {
    "resharded": {"reshard_after_forward": True},
    "gathered": {"reshard_after_forward": False},
    "to a smaller group": {"reshard_after_forward": 1},
    "the root alone": {"layers": False},
    "mixed precision": {"output_dtype": torch.float32},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "the head in a gathered group": {"of_head": {"reshard_after_forward": False}},
    "the head in a gathered group, mixed precision": {
        "of_head": {"reshard_after_forward": False},
        "output_dtype": torch.float32,
    },
}


def gradients(model: nn.Module, outside: bool) -> dict[str, torch.Tensor]:
    """Those of a step with the loss of forward, or one of the logits that it returns, of all parameters in one tensor."""
    model.zero_grad()
    logits, loss = model(ids(2), None if outside else ids(3))
    loss = flat(model, logits, ids(3)) if outside else loss
    assert not isinstance(logits, Logits) or not logits.matmul.aliases, "the logits were computed"
    loss.backward()
    grads = [p.grad.full_tensor() if isinstance(model, FSDPModule) else p.grad for p in model.parameters()]
    return {"gradients": torch.cat([grad.flatten() for grad in grads])}


def check_policy(outside: bool, tied: bool, options: dict) -> None:
    theirs = model_of(flat, tied=tied, bias=not tied)
    del theirs.added
    exact = gradients(copy.deepcopy(theirs).double(), outside)
    ours = converted(copy.deepcopy(theirs))
    calls = ours.head.forward.calls
    ours, theirs = (by_layers(model, **options) for model in (ours, theirs))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        actual = gradients(ours, outside)
    assert_as_exact(actual, gradients(theirs, outside), exact)
    assert calls == {"fused": 1, "checkpointed": 0, "original": 0}


@on_ranks()
def test_a_sharded_root_keeps_the_fused_loss(rank):
    """fully_shard hooks all results of the root, logits too. Where it has resharded the weight since, a loss that is taken
    outside gathers it again."""
    for name, options in POLICIES.items():
        for outside in (False, True):
            try:
                check_policy(outside, outside and "of_head" not in options, options)
            except Exception as error:  # raised again with the policy's name
                raise AssertionError(f"{name}, {outside=}: {error}") from error


class TwoHeads(nn.Module):
    """Returns its losses in evaluation, and in training the logits of both heads."""

    def __init__(self):
        super().__init__()
        self.embed, self.heads = nn.Embedding(V, WIDTH), nn.ModuleList(nn.Linear(WIDTH, V) for _ in range(2))

    def loss(self, each, targets):
        return sum(nn.functional.cross_entropy(z.flatten(0, 1), targets.flatten()) for z in each)

    def forward(self, x, targets):
        each = [head(self.embed(x)) for head in self.heads]
        return each if self.training else self.loss(each, targets)


@on_ranks()
def test_losses_outside_of_two_heads_in_one_group(rank):
    """The first head's loss gathers the weights of both, which are then in another place."""
    torch.manual_seed(0)
    theirs, grads = TwoHeads(), []
    ours = copy.deepcopy(theirs)
    ckptkern.convert(ours, ids(), ids(1))
    for model in (theirs, ours):
        fully_shard(model, reshard_after_forward=True)
        model.loss(model.train()(ids(), ids(1)), ids(1)).backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()])
    assert [head.forward.calls["fused"] for head in ours.heads] == [1, 1]
    torch.testing.assert_close(*grads)


@on_ranks()
def test_values_of_a_sharded_roots_logits(rank):
    """The root hears of backward from whatever is computed of them, before and after it returns them."""
    for early in (False, True):
        grads = []
        for model in (model_of(flat, tied=False), converted(model_of(flat, tied=False))):
            model.loss = lambda model, z, targets, early=early: z.exp().mean() if early else None
            fully_shard(model)
            logits, _ = model(ids(), ids(1))
            logits.sin().sum().backward()
            grads.append([p.grad.full_tensor() for p in (model.head.weight, model.embed.weight)])
        torch.testing.assert_close(*grads)


@on_ranks()
def test_logits_of_a_sharded_root_that_come_too_late_are_an_error(rank):
    """Also where the next forward has gathered the weight that the step changed."""
    model = by_layers(converted(model_of(flat, tied=False)))
    logits, loss = model(ids(), ids(1))
    copied = logits.detach().clone()
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    _, loss = model(ids(), ids(1))
    matmul = logits.matmul  # as if the weight were where it was
    matmul.marks = [
        (version, tensor.data_ptr()) for (version, _), tensor in zip(matmul.marks, matmul.tensors, strict=True)
    ]
    with pytest.raises(RuntimeError, match=r"copy them there by .detach\(\).clone\(\)"):
        logits.argmax(-1)
    assert copied.argmax(-1).shape == ids().shape
    loss.backward()
