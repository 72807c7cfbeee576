"""ckptkern.memory: what forward saves is counted exactly, and counting changes nothing about the graph."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

import ckptkern
from ckptkern.memory import peak_memory, saved_tensors


def test_each_storage_is_counted_once_at_its_whole_size():
    base = torch.randn(10, 4, requires_grad=True)

    def forward() -> torch.Tensor:
        return (base[:2].sin() + base[4:6].cos() + base[:2].exp()).sum()

    with saved_tensors() as saved:
        y = forward()
    # sin and cos save views of base's one storage, exp saves its output of [2, 4]
    assert saved.bytes == 10 * 4 * 4 + 2 * 4 * 4
    assert [nbytes for _, _, nbytes in saved.tensors] == [160, 32]
    assert saved.tensors[1][:2] == (torch.Size([2, 4]), torch.float32)
    assert torch.equal(*(torch.autograd.grad(output, base)[0] for output in (y, forward())))


def test_excluded_parameters_and_their_views_are_skipped_and_casts_counted():
    linear, x = torch.nn.Linear(8, 6), torch.randn(3, 8, requires_grad=True)
    with saved_tensors(exclude=linear.parameters()) as saved:
        F.linear(x, linear.weight.view(6, 8)[:4])
    assert saved.tensors == [(torch.Size([3, 8]), torch.float32, 3 * 8 * 4)]
    with saved_tensors() as saved:
        F.linear(x, linear.weight)
    assert saved.bytes == 3 * 8 * 4 + 6 * 8 * 4
    with saved_tensors(linear) as saved, torch.autocast("cpu", dtype=torch.bfloat16):
        linear(x)
    assert saved.bytes == 3 * 8 * 2 + 6 * 8 * 2
    model = torch.nn.Sequential(linear, torch.nn.BatchNorm1d(6)).eval()
    with saved_tensors(model) as saved:
        model(x)
    # x for the Linear, its output for the norm; in evaluation the norm saves its running statistics too
    assert sorted(nbytes for _, _, nbytes in saved.tensors if nbytes) == [3 * 6 * 4, 3 * 8 * 4]
    with saved_tensors() as saved:
        torch.sparse.mm(torch.eye(3).to_sparse(), x)
    assert saved.bytes == 2 * 3 * 8 + 3 * 4


def test_second_order_passes_through():
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    with saved_tensors():
        (g,) = torch.autograd.grad(x.exp().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(g.sum(), x)
    torch.testing.assert_close(second, x.exp())


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_meta_tensors_are_counted_as_real_ones(mode):
    def count(device: str) -> list:
        mlp = ckptkern.nn.MLP(16, 48, recompute=mode, device=device)
        with ckptkern.memory.saved_tensors(mlp) as saved:
            mlp(torch.ones(5, 16, device=device, requires_grad=True))
        return saved.tensors

    assert count("meta") == count("cpu") != []


def test_what_is_saved_prints_as_a_table_the_largest_first():
    x = torch.randn(256, 3, requires_grad=True)
    with saved_tensors() as saved:
        x.sin().sum() + x.bfloat16().repeat(1, 2048).exp().sum()
    lines = ["    3 MiB in 2 tensors", "    3 MiB  bfloat16  [256, 6144]", "    3 KiB  float32   [256, 3]"]
    assert str(saved).splitlines() == lines
    with saved_tensors() as saved:
        x.sin()
    assert str(saved).splitlines() == ["    3 KiB in 1 tensor", "    3 KiB  float32   [256, 3]"]


def test_a_store_inside_takes_what_it_saves_and_outside_gets_nothing():
    x = torch.randn(64, requires_grad=True)
    with saved_tensors() as saved, ckptkern.storage.offload(min_bytes=0):
        x.exp()
    assert saved.tensors == []
    store = ckptkern.storage.offload(min_bytes=0)
    with store, saved_tensors() as saved:
        x.exp()
    assert (saved.bytes, store.host_bytes) == (256, 0)


def test_a_reused_address_is_another_storage():
    with saved_tensors() as saved:
        for _ in range(20):
            # every graph is dropped at once, so the allocator gives the next one the same addresses
            torch.ones(1000, requires_grad=True).exp()
    assert saved.bytes == 20 * 4000


def test_graph_dies_by_reference_counting_alone():
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(1000, requires_grad=True)
        with saved_tensors() as saved:
            y = x.exp()
        storage = StorageWeakRef(y.untyped_storage())
        del y
        assert storage.expired()
        assert saved.bytes == 4000
    finally:
        gc.enable()


def test_in_place_change_is_still_an_error():
    x = torch.randn(4, requires_grad=True)
    with saved_tensors():
        y = x.exp()
        z = y.sum()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match=r"FloatTensor \[4\].*at version 1; expected version 0"):
        z.backward()


def test_peak_on_cpu_is_the_allocator_peak():
    with peak_memory("cpu") as peak:
        a = torch.empty(1 << 20, dtype=torch.uint8)
        b = torch.empty(1 << 21, dtype=torch.uint8)
        del a
        c = torch.empty(1 << 18, dtype=torch.uint8)
        del b, c
    assert peak.bytes == 3 << 20


def test_peak_of_a_step_counts_saved_tensors_and_gradients():
    x = torch.randn(1 << 16, requires_grad=True)
    with peak_memory("cpu") as peak:
        x.exp().sum().backward()
    # exp's output, its gradient (expanded, then dx = dy * y), and nothing else of that size
    assert 2 * 4 * (1 << 16) <= peak.bytes < 2 * 4 * (1 << 16) + 1024


def test_peak_refuses_other_devices():
    with pytest.raises(ValueError, match="wanted a cuda or cpu device but got meta"), peak_memory("meta"):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    with peak_memory("cuda") as peak, saved_tensors() as saved:
        y = x.exp()
    assert saved.bytes == peak.bytes == 4 << 20
    y.sum().backward()
