"""Gradients that are added to an existing .grad inside backward: who sees them, and when autograd does it as ever."""

import copy
from contextlib import nullcontext

import pytest
import torch
from support.cases import assert_same_within_rounding
from torch import nn

import ckptkern
from ckptkern.memory import memory_timeline, peak_memory
from ckptkern.ops.registration import gradients as _gradients
from ckptkern.ops.registration.functions import bodies_seen

D, V, S = 16, 600, 40
NN = ckptkern.nn


class Tied(nn.Module):
    """An embedding whose weight the LM head and its loss shares, a layer, an MLP that is called twice, and experts."""

    def __init__(self):
        super().__init__()
        self.token, self.layer, self.mlp = nn.Embedding(V, D), NN.LlamaDecoderLayer(D, 2, 1, 24), NN.MLP(D, 32)
        self.experts, self.stack = NN.Experts(3, D, 24), NN.LinearStack([D, 80, D])
        self.loss = NN.LinearCrossEntropyLoss(D, V, linear_weight=self.token.weight)

    def forward(self, ids):
        x = self.mlp(self.mlp(self.layer(self.token(ids))))
        index = torch.arange(x.shape[0] * x.shape[1]).view(*x.shape[:-1], 1) % 3
        return self.loss(self.stack(x + self.experts(x, index, torch.ones(*x.shape[:-1], 1))), ids)


def make(dtype=torch.float64):
    torch.manual_seed(0)
    return Tied().to(dtype)


def batches():
    return torch.randint(V, (3, 2, S), generator=torch.Generator().manual_seed(1))


def grads(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def trained(model, each=lambda loss: loss.backward()):
    for ids in batches():
        each(model(ids))
    return grads(model)


@pytest.mark.parametrize("workspace", [1, None])
@pytest.mark.parametrize("seen", [False, True], ids=["", "under a profiler"])
def test_micro_batches_have_the_sums_of_autograd(workspace, seen):
    model = make()
    ours = copy.deepcopy(model)
    ckptkern.accumulate_in_place(ours)
    with ckptkern.workspace(workspace):
        theirs = trained(model)
        ids = batches()
        ours(ids[0]).backward()
        places = {name: p.grad.data_ptr() for name, p in ours.named_parameters()}
        with memory_timeline(torch.device("cpu")) if seen else nullcontext():
            for one in ids[1:]:
                ours(one).backward()
    assert_same_within_rounding(grads(ours), theirs)
    assert places == {name: p.grad.data_ptr() for name, p in ours.named_parameters()}


def test_no_second_gradient_is_made():
    """The profiler that measures would take the ops' other path, in which the gradient is a result."""
    x, t = torch.randn(8, D, requires_grad=True), torch.arange(8)
    head = NN.LinearCrossEntropyLoss(D, 2**14, workspace="64KiB")

    def peak():
        head.linear.weight.grad, x.grad = torch.zeros_like(head.linear.weight), None
        loss = head(x, t)
        with peak_memory("cpu") as found, bodies_seen():
            loss.backward()
        return found.bytes

    before = peak()
    ckptkern.accumulate_in_place(head)
    assert before - peak() > 0.9 * head.linear.weight.nbytes
    ckptkern.accumulate_in_place(head, enabled=False)
    assert not hasattr(head.linear.weight, "main_grad")
    assert peak() == before


def test_zero_grad_and_missing_gradients():
    model = make()
    ours = copy.deepcopy(model)
    ckptkern.accumulate_in_place(ours)
    for one in (model, ours):
        trained(one)
        one.zero_grad()
        assert all(p.grad is None for p in one.parameters())
    assert_same_within_rounding(trained(ours), trained(model))


def test_who_asks_for_gradients_gets_them():
    model = make()
    ours, ids = copy.deepcopy(model), batches()[0]
    ckptkern.accumulate_in_place(ours)
    theirs = trained(model)
    assert_same_within_rounding(trained(ours), theirs)
    parameters = [list(one.parameters()) for one in (model, ours)]
    found = [torch.autograd.grad(one(ids), own) for one, own in zip((model, ours), parameters, strict=True)]
    assert_same_within_rounding(dict(enumerate(found[1])), dict(enumerate(found[0])))
    assert_same_within_rounding(grads(ours), theirs)
    few = [[own[0], own[-1]] for own in parameters]  # .backward(inputs=) leaves others alone
    for one, own in zip((model, ours), few, strict=True):
        one(ids).backward(inputs=own)
    assert_same_within_rounding(grads(ours), grads(model))
    for one in (model, ours):
        one.zero_grad()
        trained(one)
        one(ids).backward(create_graph=True)
    assert_same_within_rounding(grads(ours), grads(model))


def test_hooks_get_what_they_would():
    models = [make(), make()]
    ckptkern.accumulate_in_place(models[1])
    seen: list[dict] = [{}, {}]
    for model, own in zip(models, seen, strict=True):
        for name, p in model.named_parameters():
            if name in ("token.weight", "mlp.fc1.weight"):
                p.register_hook(lambda grad, own=own, name=name: own.setdefault(name, []).append(grad.clone()))
            p.register_post_accumulate_grad_hook(
                lambda p, own=own, name=name: own.setdefault(f"after {name}", []).append(p.grad.clone())
            )
        trained(model)
    theirs, ours = ({(name, i): g for name, found in own.items() for i, g in enumerate(found)} for own in seen)
    assert len(ours) > 30
    assert_same_within_rounding(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_16_bit_gradients_stay_autograds(dtype, monkeypatch):
    """They would be rounded once for each chunk."""
    model, added = make(dtype), []
    ckptkern.accumulate_in_place(model)
    find = _gradients.grad_to_add_to
    monkeypatch.setattr(_gradients, "grad_to_add_to", lambda w: added.append(find(w) is not None) or find(w))
    trained(model)
    assert any(added) == (dtype == torch.float32)


def test_retained_graphs_and_compiled_ones():
    model, ids = make(), batches()[0]
    ours = copy.deepcopy(model)
    ckptkern.accumulate_in_place(ours)
    for one in (model, ours):
        loss = one(ids)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_within_rounding(grads(ours), grads(model))
    torch._dynamo.reset()
    compiled = torch.compile(ours.mlp, backend="aot_eager")
    x = torch.randn(4, D, dtype=torch.float64)
    for one in (model.mlp, compiled):
        one(x).sum().backward()
    assert_same_within_rounding(grads(ours.mlp), grads(model.mlp))
    torch._dynamo.reset()
