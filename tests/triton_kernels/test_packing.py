"""ReLU's non-zeros: packed as the definition packs them, unpacked with forward's bits, and what has no room made again."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import cases
import pytest
import torch
from kernel_cases import DTYPES, dropout_of
from torch.utils._python_dispatch import TorchDispatchMode

import ckptkern
from ckptkern import eager, triton_kernels
from ckptkern.eager import packing as eager_packing
from ckptkern.ops import _choices
from ckptkern.triton_kernels import packing
from ckptkern.triton_kernels.tile import Tile

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# rows and columns: more than one program and block of columns, compiled and interpreted; ones; no multiple of 8
SHAPES = [(37, 301), (16, 512), (1, 1), (5, 1), (3, 9), (0, 8), (4, 0), (2, 264)]
PATTERNS = {
    "relu": lambda h: h.relu(),
    "zeros": torch.zeros_like,
    "positive": lambda h: h.abs() + 1,
    "last row": lambda h: torch.cat([torch.zeros_like(h[:-1]), h[-1:].abs() + 1]),
    "one column": lambda h: h.abs() * (torch.arange(h.shape[1], device=h.device) == h.shape[1] - 1),
}


def rooms(h: torch.Tensor) -> list[int]:
    """Nothing, one, the exact number of non-zeros and its neighbours, all."""
    count = int(h.count_nonzero())
    return sorted({0, 1, count // 2, max(count - 1, 0), count, count + 1, h.numel()})


def layer(M: int, K: int, N: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    return tuple(t.to(device, dtype) for t in (torch.randn(M, K), torch.randn(N, K) / max(K, 1) ** 0.5, torch.randn(N)))


def assert_same_packed(ours, theirs) -> None:
    for name, one, other in zip(("bits", "offsets", "values"), ours, theirs, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7)), name
        assert torch.equal(one.isnan(), other.isnan()), name


@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_as_the_definition_packs(shape, dtype, device):
    for name, pattern in PATTERNS.items() if min(shape) else [("relu", torch.relu)]:
        h = pattern(torch.randn(shape).to(device, dtype))
        for room in rooms(h) if name == "relu" else (int(h.count_nonzero()),):
            assert_same_packed(triton_kernels.pack_nonzeros(h, room), eager.pack_nonzeros(h, room))


@pytest.mark.parametrize("backend", [eager, triton_kernels], ids=["eager", "triton"])
@pytest.mark.parametrize(("dtype", "exponent"), [*zip(DTYPES, (-149, -24, -133), strict=True)], ids=str)
def test_the_layout(dtype, exponent, backend, device):
    """bit j of byte i is column 8 i + j; -0 counts as 0; NaN, infinity and the smallest number are non-zeros."""
    nan, inf, small = float("nan"), float("inf"), 2.0**exponent
    h = torch.tensor([[0, 1, -0.0, nan, 0, 0, 0, 0, inf], [0] * 9, [small] + [0] * 8], dtype=dtype)
    bits, offsets, values = backend.pack_nonzeros(h.to(device), 6)
    assert bits.tolist() == [[0b1010, 1], [0, 0], [1, 0]]
    assert offsets.tolist() == [0, 3, 3, 4]
    assert str(values.tolist()) == str([1.0, nan, inf, small, 0.0, 0.0])


@each_dtype
def test_on_a_gpu_the_definition_adds_no_numbers(dtype, device):
    """Its other form gives the same."""
    h = torch.randn(37, 301).to(device, dtype).relu()
    for room in rooms(h):
        packed = eager.pack_nonzeros(h, room)
        with mock.patch.object(eager_packing, "_add", eager_packing._put):
            assert_same_packed(eager.pack_nonzeros(h, room), packed)


@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpacked_with_forwards_bits(shape, dtype, device):
    """Whatever the room: rows that fit are read, others are made again by the product that made them."""
    M, N = shape
    x, w, b = layer(M, 40, N, dtype, device)
    for bias in (b, None):
        h = triton_kernels.linear_fwd(x, w, bias, "relu", "ieee")[0]
        for room in (h.numel() // 4,) if bias is None else rooms(h):
            packed = triton_kernels.pack_nonzeros(h, room)
            assert torch.equal(triton_kernels.unpack_nonzeros(*packed, x, w, bias, "ieee"), h), room
            if int(packed[1][-1]) <= room:
                assert torch.equal(eager.unpack_nonzeros(*packed, x, w, bias, "ieee"), h), room


@each_dtype
@pytest.mark.parametrize("room", [0, 900, 3000, 5000])
def test_dropout_needs_no_mask_again(room, dtype, device):
    """The bits have it; what is made again is scaled as forward scaled it."""
    (x, w, b), dropout = layer(100, 33, 75, dtype, device), dropout_of(0.3, device)
    h = triton_kernels.linear_fwd(x, w, b, "relu", "ieee", dropout=dropout)[0]
    packed = triton_kernels.pack_nonzeros(h, room)
    assert torch.equal(triton_kernels.unpack_nonzeros(*packed, x, w, b, "ieee", scale=dropout[2]), h)


def fitting(packed) -> int:
    """How many rows fit."""
    return int((packed[1][1:] <= len(packed[2])).sum())


@pytest.mark.parametrize("start", [0, 16, 64, 96])
def test_a_part_of_the_rows(start, device):
    """Offsets are places among the values of all rows."""
    x, w, b = layer(150, 24, 70, torch.bfloat16, device)
    h = triton_kernels.linear_fwd(x, w, b, "relu", "ieee")[0]
    bits, offsets, values = packed = triton_kernels.pack_nonzeros(h, 80 * 35)
    assert 64 < fitting(packed) < 96
    part = slice(start, start + 50)
    given = bits[part], offsets[start : start + 51], values, x[part], w, b
    assert torch.equal(triton_kernels.unpack_nonzeros(*given, "ieee"), h[part])


@each_dtype
def test_the_mask_is_the_stored_one(dtype, device):
    """Bits that another product's rounding may have set otherwise: 0 stays 0, and what is set is positive, if small, though not
    so small that torch.set_flush_denormal makes it 0."""
    x, w, b = layer(70, 24, 50, dtype, device)
    other = eager.pack_nonzeros(torch.randn(70, 50, device=device).relu(), 0)
    zeros = triton_kernels.linear_fwd(x, w, b, "relu", "ieee")[0] == 0
    bits = eager.unpack_bits(other[0], 50)
    for backend in (triton_kernels, eager):
        h = backend.unpack_nonzeros(*other[:2], x.new_empty(0), x, w, b, "ieee")
        assert torch.equal(h > 0, bits)
        assert (h[zeros & bits] == torch.finfo(dtype).tiny).all()
        assert (h[~zeros & bits] > 2.0**-20).all()


def test_strides(device):
    """What a hook on saved tensors gives back may have others."""
    x, w, b = layer(70, 24, 50, torch.float32, device)
    h = triton_kernels.linear_fwd(x, w, b, "relu", "ieee")[0]
    packed = triton_kernels.pack_nonzeros(h, 40 * 25)
    apart = [torch.stack((t, t), -1)[..., 0] for t in (*packed, x, w, b)]
    assert not any(t.is_contiguous() for t in apart)
    assert torch.equal(triton_kernels.unpack_nonzeros(*apart, "ieee"), h)
    assert_same_packed(triton_kernels.pack_nonzeros(h.t().contiguous().t(), 40 * 25), packed)


def test_tiles_whose_rows_fit_multiply_nothing(device, interpreted):
    if not interpreted:
        pytest.skip("counts the calls of a function that is compiled in elsewhere")
    x, w, b = layer(160, 24, 50, torch.float32, device)
    product, tile = packing.product_tile, Tile(16, 64, 16, 4, 1)
    h = triton_kernels.linear_fwd(x, w, b, "relu", "ieee", tile=tile)[0]
    ends = h.count_nonzero(1).cumsum(0)
    # the room ends with a tile, in a tile's first row, or in its last
    for room, tiles in (
        (ends[-1], 0), (ends[-1] - 1, 1), (ends[79], 5), (ends[80], 5), (ends[79] - 1, 6), (ends[78], 6), (0, 10),
    ):  # fmt: skip
        packed = triton_kernels.pack_nonzeros(h, int(room))
        with mock.patch.object(packing, "product_tile", side_effect=product) as spy:
            assert torch.equal(triton_kernels.unpack_nonzeros(*packed, x, w, b, "ieee", tile=tile), h)
        assert spy.call_count == tiles, room


class HostReads(TorchDispatchMode):
    """Counts operations, and those that make the host wait for a GPU, in the bodies of our ops too."""

    WAITING = ("_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "unique", "equal")

    def __init__(self, device: str):
        super().__init__()
        self.count = self.operations = 0
        self.key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.upper()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "ckptkern":
            with self:
                return func.redispatch(self.key, *args, **(kwargs or {}))
        self.operations += 1
        self.count += func._schema.name.removeprefix("aten::") in self.WAITING
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def lists_read() -> Iterator[list]:
    """What Tensor.tolist is called for: it waits, too, and on a CPU is no operation."""
    read, whole = [], torch.Tensor.tolist
    with mock.patch.object(torch.Tensor, "tolist", lambda t: read.append(t) or whole(t)):
        yield read


@pytest.mark.parametrize("setup", cases.setups(("relu",), ("packed",), (0.3,), ("linear_stack", "mlp")))
def test_nothing_is_read_on_the_host(setup, device):
    """By kernels, so that CUDA graphs capture a step; PyTorch ops read once for each h, in backward."""
    tensors = {name: t.detach().to(device).requires_grad_() for name, t in cases.make(setup).items()}
    for backend, once in (("triton", 0), ("eager", 1)):
        with ckptkern.backend(backend), HostReads(device) as reads, lists_read() as lists:
            y = setup.call(tensors)
            assert (reads.count, len(lists)) == (0, 0)
            torch.autograd.grad(y, list(tensors.values()), torch.ones_like(y))
        assert (reads.count, len(lists)) == (0, once * (sum("weight" in name for name in tensors) - 1))


@pytest.mark.parametrize("room", [0, 99_999])
def test_the_definition_reads_once_on_the_host_however_large(room, device):
    x, w, b = layer(60, 3, 5000, torch.float32, device)
    h = eager.linear_fwd(x, w, b, "relu", "ieee")[0]
    with HostReads(device) as reads, lists_read() as lists:
        packed = eager.pack_nonzeros(h, room)
        assert (reads.count, len(lists)) == (0, 0)
        again = eager.unpack_nonzeros(*packed, x, w, b, "ieee")
    assert (reads.count, len(lists)) == (0, 1)
    torch.testing.assert_close(again, h)


def test_on_meta_nothing_is_taken_apart():
    """`report` and `plan` run there at sizes of models."""
    h, weight = torch.empty(4096, 8192, device="meta"), torch.empty(8192, 4, device="meta")
    with HostReads("cpu") as reads:
        packed = eager.pack_nonzeros(h, 1000)
        eager.unpack_nonzeros(*packed, h[:, :4], weight, None, "ieee")
    assert reads.operations < 10


def test_room_that_stays_free_spoils_no_block_of_a_store(device):
    """Whose scale is that of the largest of 128 numbers."""
    x, w, b = layer(16, 8, 24, torch.float32, device)
    h = triton_kernels.linear_fwd(x, w, b, "relu", "ieee")[0]
    w2 = torch.eye(16, 24, device=device).requires_grad_()
    with ckptkern.backend("triton"), ckptkern.storage.compress("fp8", min_bytes=0):
        y = ckptkern.mlp(x, w, b, w2, None, "relu", recompute="packed", capacity=1.0)
    y.backward(torch.eye(16, device=device))
    torch.testing.assert_close(w2.grad, h, rtol=1 / 8, atol=0.01)


def check_route(route, capacity, device, rows, features, hidden, workspace):
    """h as backward sees it, spelled by fc2's gradient, is forward's; on cuBLAS's, what was read."""
    x, w1, b1 = layer(rows, features, hidden, torch.bfloat16, device)
    w2 = torch.eye(rows, hidden, dtype=x.dtype, device=device).requires_grad_()
    with ckptkern.backend("triton"), _choices.forced_route(route):
        y = ckptkern.mlp(x, w1, b1, w2, None, "relu", 0.3, recompute="packed", capacity=capacity, workspace=workspace)
    y.backward(torch.eye(rows, dtype=x.dtype, device=device))
    h = y.detach()[:, :hidden]
    fit = fitting(eager.pack_nonzeros(h, rows * -int(-capacity * hidden // 1)))
    assert (fit == 0) == (capacity == 0)
    assert (fit == rows) == (capacity == 1)
    assert torch.equal(w2.grad[:fit], h[:fit])
    assert torch.equal(w2.grad != 0, h != 0)
    if route != "library":
        assert torch.equal(w2.grad, h)
    torch.testing.assert_close(w2.grad, h)


@pytest.mark.parametrize("capacity", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("route", ["triton", "dual", "library", "persistent"])
def test_routes(route, capacity, device):
    """In two chunks."""
    check_route(route, capacity, device, rows=140, features=9, hidden=24, workspace=1)


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("route", ["triton:128x256", "persistent:256x128"])
def test_routes_with_other_tiles(route, capacity):
    """Which forward takes for many rows; what is made again has the shipped one."""
    check_route(route, capacity, "cuda", rows=4096, features=64, hidden=1024, workspace=None)
