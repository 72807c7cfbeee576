"""ckptkern.storage.offload: what is saved on the host comes back in time, and leaves nothing behind."""

import contextlib
import gc
import resource
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.stores import gradients, unfused
from torch.multiprocessing.reductions import StorageWeakRef

from ckptkern.storage import offload, store
from ckptkern.storage.offload import Flight, _Copy, _Lane


@pytest.mark.slow
def test_buffers_are_reused_and_nothing_is_left_behind():
    keep, module, x = offload(min_bytes=0), unfused(), torch.randn(40, 16)
    kinds = torch.Tensor, store._View, store._Run, _Copy, Flight
    gradients(module, x, keep)
    gc.collect()
    gc.disable()
    try:
        counts = set()
        for _ in range(5):
            with keep:
                module(x)  # and no backward
            for _ in range(9):
                gradients(module, x, keep)
                assert any(lane.free.values() for lane in keep._lanes.values()), "no buffer came back"
            alive = sum(issubclass(type(thing), kinds) for thing in gc.get_objects())
            counts.add((keep.host_bytes, len(keep._lanes[x.device].copies), alive))
        assert len(counts) == 1, counts
    finally:
        gc.enable()


def test_files_have_no_name(tmp_path):
    keep, x = offload(min_bytes=0, directory=tmp_path), torch.randn(5000, requires_grad=True)
    with keep:
        y = x.exp()
        assert keep.host_bytes == 32768
        assert list(tmp_path.iterdir()) == []
    maps = Path("/proc/self/maps")
    assert maps.read_text().count(str(tmp_path)) == 1
    y.sum().backward()
    with contextlib.suppress(ZeroDivisionError), keep:
        y = x.exp()
        1 / 0  # noqa: B018
    del y, keep
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) not in maps.read_text()


def test_a_full_disk_is_an_error_with_the_name_of_the_directory(tmp_path):
    keep, x = offload(min_bytes=0, directory=tmp_path), torch.randn(5000, requires_grad=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(OSError, match="offload: not enough space for 32768 bytes") as error, keep:
            x.exp()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.filename == str(tmp_path)
    assert keep.host_bytes == 0
    assert list(tmp_path.iterdir()) == []
    with keep:
        y = x.exp()
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


class Event:
    """A copy that does not happen before something waits for it, or for a later one of its lane."""

    def __init__(self, lane, target, source):
        self.lane, self.copy = lane, (target, source)
        lane.events.append(self)

    def query(self):
        return self.copy is None

    def run(self):
        while self.copy is not None:
            event = self.lane.events.pop(0)
            target, source = event.copy
            target.copy_(source)
            event.copy = None


class Stream:
    def __init__(self):
        self.waited, self.recorded = [], []

    def wait_event(self, event):
        self.waited.append(event)
        event.run()


class SlowLane(_Lane):
    """A lane as a GPU has it."""

    lanes = []  # noqa: RUF012

    def __init__(self, *args):
        super().__init__(*args)
        self.current, self.events, self.log = Stream(), [], []
        self.lanes.append(self)

    def stream(self):
        return self.current

    def _start(self, flight, target, source):
        flight.event = Event(self, target, source)
        return flight

    def send(self, source, buffer):
        buffer.fill_(77)
        self.log.append(f"send {source.numel() // 4}")
        return self._start(Flight(source, self.current), buffer, source)

    def bring(self, buffer, home):
        resident = torch.full_like(buffer, 78)
        self.log.append(f"bring {resident.numel() // 4}")
        return self._start(Flight(resident, home), resident, buffer)


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(sys.modules[offload.__module__], "_Lane", SlowLane)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: stream.recorded.append(self.data_ptr()))
    yield
    while SlowLane.lanes:
        for event in list(SlowLane.lanes.pop().events):
            event.run()


def chain(x, sizes):
    for size in sizes:
        x = F.pad(x, (0, size - len(x))).exp() * 0.5  # exp saves its result, of its own size
    return x


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(("prefetch", "in_flight"), [(0, 0), (1, 2), (3, 100), (3, 0)])
def test_copies_are_waited_for(prefetch, in_flight):
    module, x = unfused(), torch.randn(5, 16)
    expected = gradients(module, x, contextlib.nullcontext())
    keep = offload(min_bytes=0, prefetch=prefetch, in_flight=in_flight)
    for _ in range(3):
        actual = gradients(module, x, keep)
        assert all(map(torch.equal, actual, expected))
        with keep:
            module(x)
    (lane,) = keep._lanes.values()
    assert len(lane.pending) <= in_flight


@pytest.mark.usefixtures("slow")
def test_sources_are_held_until_they_were_copied_and_at_most_so_many():
    keep, sources = offload(min_bytes=0, in_flight=2), []
    with keep:
        y = torch.randn(10, requires_grad=True)
        for _ in range(5):
            y = y.exp()
            sources.append(StorageWeakRef(y.untyped_storage()))
    y = y.sum()
    assert [source.expired() for source in sources] == [True, True, True, False, False]
    (lane,) = keep._lanes.values()
    lane.events[0].run()
    lane.settle()
    assert [source.expired() for source in sources] == [True, True, True, True, False]
    y.backward()


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("in_flight", [0, 6])
def test_backward_fetches_ahead_in_reverse_order_and_no_further(in_flight):
    """What has not left is not brought back."""
    keep, sizes, ahead = offload(min_bytes=0, prefetch=2, in_flight=in_flight), [11, 12, 13, 14, 15, 16], []
    get = keep.get

    def counted(saved):
        tensor = get(saved)
        ahead.append([copy.buffer.numel() // 4 for copy in saved.lane.copies.values() if copy.back is not None])
        return tensor

    keep.get = counted
    with keep:
        y = chain(torch.randn(10, requires_grad=True), sizes).sum()
    (lane,) = keep._lanes.values()
    assert lane.log == [f"send {size}" for size in sizes]
    lane.log.clear()
    y.backward()
    assert lane.log == ([] if in_flight else [f"bring {size}" for size in reversed(sizes)])
    assert ahead == ([[]] * 6 if in_flight else [[14, 15], [13, 14], [12, 13], [11, 12], [11], []])


@pytest.mark.usefixtures("slow")
def test_the_stream_that_unpacks_is_the_one_that_waits():
    keep, x = offload(min_bytes=0, prefetch=1, in_flight=0), torch.randn(10, requires_grad=True)
    with keep:
        first = x.exp()
        second = first.exp()
    (lane,) = keep._lanes.values()
    home, other = lane.current, Stream()
    assert torch.equal(second.grad_fn._saved_result, second)
    assert len(home.waited) == 3  # both on their way out, the second on its way back
    lane.current = other
    restored = first.grad_fn._saved_result
    assert len(home.waited) == 3
    assert len(other.waited) == 1
    assert other.recorded == [restored.data_ptr()]
    assert torch.equal(restored, first)


@pytest.mark.usefixtures("slow")
def test_what_was_fetched_in_vain_is_let_go():
    keep = offload(min_bytes=0, prefetch=2, in_flight=0)
    with keep:
        first = chain(torch.randn(10, requires_grad=True), [11, 12]).sum()
        second = chain(torch.randn(10, requires_grad=True), [13, 14]).sum()
        third = chain(torch.randn(10, requires_grad=True), [15]).sum()
    (lane,) = keep._lanes.values()
    third.backward()
    assert [copy.back is not None for copy in lane.copies.values()] == [False, False, True, True]
    first.backward(retain_graph=True)
    assert [copy.back is not None for copy in lane.copies.values()] == [False, False, False, False]
    second.backward()


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("finish", [False, True])
def test_an_in_place_change_during_the_copy_is_the_error_of_torch(finish):
    keep, x = offload(min_bytes=0), torch.randn(3, 4, requires_grad=True)
    with keep:
        y = x.exp()
        z = y.sum()
    y.detach().add_(1)
    if finish:
        (lane,) = keep._lanes.values()
        lane.events[0].run()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*version 1; expected version 0"):
        z.backward()
