"""convert_later: the first training call converts, whatever came before it, and the network trains as before."""

import copy
import threading
import warnings
from collections import UserDict

import pytest
import torch
from support.architectures import ids
from support.ranks import on_ranks
from support.training import alone, build, check, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ckptkern
from ckptkern.conversion.later import example_of
from ckptkern.integrations import convert_later

FUSED = 2 * ["transformer_layer"]


def make() -> nn.Module:
    return build("converted", ours=False)


def replaced(later) -> list:
    return [row.replaced_by for row in later.conversion.converted]


def test_the_first_training_call_converts():
    network = make()
    unfused = copy.deepcopy(network)
    later = convert_later(network, recompute="full")
    with torch.no_grad():
        network(ids())
    assert later.conversion is None
    assert later.check_calls() == {}
    check(network, alone(unfused, 1), 0)
    assert replaced(later) == FUSED
    assert later.check_calls() == {"fused": 6, "checkpointed": 0, "original": 0}
    assert not network._forward_pre_hooks


def test_autocast_of_the_call_is_that_of_the_conversion():
    network = make()
    unfused, later = copy.deepcopy(network), convert_later(network, recompute="full")
    with torch.autocast("cpu", torch.bfloat16):
        got, wanted = loss_of(network, 0, 0, 0), loss_of(unfused, 0, 0, 0)
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)
    assert replaced(later) == FUSED
    assert later.check_calls()["fused"] == 2


def test_a_checkpoint_around_the_model_recomputes_what_it_ran():
    network = make()
    unfused, later = copy.deepcopy(network), convert_later(network)
    for model in (network, unfused):
        checkpoint(model, ids(), use_reentrant=False).sum().backward()
    assert replaced(later) == FUSED
    for ours, theirs in zip(network.parameters(), unfused.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_remove_cancels():
    network = make()
    later = convert_later(network)
    later.remove()
    network(ids())
    assert later.conversion is None


def test_options_are_checked_at_once():
    with pytest.raises(TypeError, match="recompte"):
        convert_later(make(), recompte="full")
    with pytest.raises(ValueError, match="compiled"):
        convert_later(torch.compile(make()))


def test_an_error_of_the_call_is_the_users():
    network = make()
    later = convert_later(network, include="no.such.module")
    with pytest.raises(ValueError, match=r"no\.such\.module"):
        network(ids())
    assert later.conversion is None
    network(ids())  # goes on, unconverted


class Whole(nn.Module):
    """Runs batches of four alone."""

    def __init__(self):
        super().__init__()
        self.network = make()

    def forward(self, tokens):
        if tokens.size(0) != 4:
            raise ValueError("four")
        return self.network(tokens)


def test_a_batch_that_two_samples_do_not_stand_for_is_used_whole():
    network = Whole()
    later = convert_later(network)
    network(torch.cat([ids(), ids(1)])[:4])
    assert replaced(later) == FUSED


def test_an_example_is_the_first_samples():
    x, scalar, other = torch.zeros(5, 3), torch.tensor(1), torch.zeros(3, 5)
    (first,), kwargs = example_of(((x,), {"mask": x, "n": scalar, "other": other, "flag": True}), 2, 4)
    assert first.shape == kwargs["mask"].shape == (2, 3)
    assert kwargs["n"].shape == ()
    assert kwargs["other"].shape == (3, 5)
    assert kwargs["flag"] is True


def test_samples_and_tokens_whose_labels_count_come_first():
    tokens, labels, mask = torch.arange(24).view(4, 6), torch.full((4, 6), -100), torch.arange(36).view(6, 6)
    labels[1, 3] = labels[3, 1:5] = 1
    call = (), {"input_ids": tokens, "labels": labels, "mask": mask.expand(4, 1, 6, 6)}
    _, example = example_of(call, 2, None)
    assert example["labels"].tolist() == labels[[3, 1]].tolist()
    assert example["input_ids"].tolist() == tokens[[3, 1]].tolist()
    _, example = example_of(call, 2, 3)
    assert example["labels"].tolist() == [[1, 1, 1], [-100, 1, -100]]
    assert example["input_ids"].tolist() == tokens[[3, 1], 2:5].tolist()
    assert example["mask"].tolist() == 2 * [[mask[2:5, 2:5].tolist()]]
    _, example = example_of(((), {"input_ids": tokens}), 2, 3)
    assert example["input_ids"].tolist() == tokens[:2, :3].tolist()


class Holder(nn.Module):
    """Takes its input in an object, as transformers' models take an encoder's output."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, encoded, lock=None):
        return self.mlp(encoded["x"])


@pytest.mark.parametrize("lock", [None, threading.Lock()])
def test_a_graph_in_an_argument_runs_backward_once(lock):
    """The example's own backward ends at the arguments, wherever they are; what cannot be copied is passed on."""
    network, encoder = Holder(), nn.Linear(8, 8)
    x = torch.randn(4, 8)
    wanted = torch.autograd.grad(network(UserDict(x=encoder(x))).sum(), [*encoder.parameters()])
    later = convert_later(network)
    network(UserDict(x=encoder(x)), lock=lock).sum().backward()
    assert replaced(later) == ["mlp_block"]
    torch.testing.assert_close([p.grad for p in encoder.parameters()], [*wanted])


def test_the_latest_takes_the_place_of_an_earlier_one():
    network = make()
    earlier, later = convert_later(network), convert_later(network, recompute="full")
    network(ids())
    assert earlier.conversion is None
    assert later.check_calls()["fused"] == 2


def test_a_lost_fusion_is_warned_of_once():
    network = make()
    later = convert_later(network)
    network(ids())
    network.layers[0].c_fc.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="runs"):
        network(ids())
    with pytest.warns(UserWarning, match=r"1 training calls .* layers\.0"):
        later.check_calls()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        later.check_calls()


def test_data_parallel_is_refused():
    with pytest.raises(ValueError, match="DataParallel"):
        convert_later(nn.DataParallel(make()))


def shard(network: nn.Module) -> None:
    for module in (*network.layers, network):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("what", ["wrapper", "inside"])
@on_ranks()
def test_data_parallel_trains_as_one_process(rank, what, static_graph):
    """The first step of a static graph is counted, so the second converts."""
    network = make()
    unfused, wrapped = copy.deepcopy(network), DistributedDataParallel(network, static_graph=static_graph)
    if static_graph:
        with pytest.raises(ValueError, match="static_graph"):
            ckptkern.convert(wrapped, ids())
    later = convert_later(wrapped if what == "wrapper" else network, recompute="full")
    check(wrapped, alone(unfused, 2), rank)
    assert replaced(later) == FUSED
    assert later.check_calls() == {"fused": 4 if static_graph else 6, "checkpointed": 0, "original": 0}


@pytest.mark.parametrize("before", [False, True])
@on_ranks()
def test_shards_train_as_one_process(rank, before):
    """Whether fully_shard comes first or not: its hook would begin the first forward, so the second call converts."""
    network = make()
    unfused = copy.deepcopy(network)
    if before:
        later = convert_later(network, recompute="full")
    shard(network)
    if not before:
        later = convert_later(network, recompute="full")
    check(network, alone(unfused, 2), rank)
    assert replaced(later) == FUSED
    assert later.check_calls()["fused"] == (4 if before else 6)
    assert ckptkern.revert(network) is network
