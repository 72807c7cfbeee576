"""Frozen as a tensor: views, dtypes and torch's operations dequantise it, nothing changes it, and its parts are whole."""

import copy
import io

import pytest
import torch
from support.cases import assert_same, gradients
from torch.nn import functional as F

import ckptkern
from ckptkern import Frozen
from ckptkern.memory import dense_parts, saved_tensors


def make(*lead):
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(*lead, 12, 10, generator=generator).to(torch.float8_e4m3fn)
    frozen = Frozen(data, torch.full((*lead, 1, 1), 0.5), kind="block_fp8", dtype=torch.float32)
    return frozen, frozen.dequantize()


VIEWS = {
    "transposed": lambda w: w.t(),
    "rows": lambda w: w[3:9],
    "columns of rows": lambda w: w[2:].narrow(1, 1, 4),
    "a chunk": lambda w: w.chunk(3)[1],
    "a part": lambda w: w.split([5, 7])[1].t(),
    "a row": lambda w: w[4],
    "detached": lambda w: w.detach(),
    "wide": lambda w: w.double(),
    "an expert": lambda w: list(w)[1][2:].t(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_of_what_it_stands_for(name):
    frozen, dense = make(*[3] * (name == "an expert"))
    view, wanted = VIEWS[name](frozen), VIEWS[name](dense)
    assert type(view) is Frozen
    assert view.parts[0] is frozen.parts[0] or name == "an expert"
    assert (view.shape, view.stride(), view.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
    assert torch.equal(view.dequantize(), wanted)


def test_other_operations_dequantise():
    frozen, dense = make()
    x = {"x": torch.linspace(-1, 1, 30).view(3, 10).requires_grad_()}
    assert_same(*(gradients(lambda t, w=w: F.linear(t["x"], w), x) for w in (frozen, dense)))
    for actual, wanted in ((frozen + 1, dense + 1), (frozen.sum(), dense.sum()), (frozen.cpu().clone(), dense)):
        assert type(actual) is torch.Tensor
        assert torch.equal(actual, wanted)


ERRORS = {
    r"cannot be changed in place by aten\.mul_": lambda w: w.mul_(2),
    r"cannot be changed in place by aten\.add\.out": lambda w: torch.add(w, 1, out=w),
    r"cannot be changed in place by aten\.max\.dim_max": lambda w: torch.max(torch.ones(2, 2), 0, out=(w, w.long())),
    r"has no gradient, .* train a low-rank update": lambda w: w.requires_grad_(),
    r"has no address, .* take the address of dequantize": lambda w: w.data_ptr(),
}


@pytest.mark.parametrize("message", ERRORS)
def test_what_a_frozen_is_not_for(message):
    frozen, dense = make()
    with pytest.raises(RuntimeError, match=rf"^ckptkern\.Frozen {message}"):
        ERRORS[message](frozen)
    assert torch.equal(frozen.dequantize(), dense)
    assert frozen.requires_grad_(False) is frozen


def test_a_copy_reads_the_same_memory_and_a_file_holds_it():
    frozen, dense = make()
    assert copy.deepcopy(frozen) is frozen
    file = io.BytesIO()
    torch.save({"weight": frozen[2:]}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)["weight"].dequantize(), dense[2:])


def test_a_store_leaves_it_where_it_is():
    """It would move quantised memory, which belongs to the model, to and fro, and `compress` would round its scales."""
    frozen, dense = make()
    x = torch.randn(4, 10, requires_grad=True)
    with ckptkern.storage.compress("int8", min_bytes=1), saved_tensors([x]) as saved:
        y = ckptkern.linear_act(x, frozen, None, "identity")
    assert saved.bytes == sum(part.nbytes for part in frozen.parts)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(4, 12) @ dense)


def test_the_scales_of_bitsandbytes_are_a_parameters_parts():
    nn = pytest.importorskip("bitsandbytes").nn
    weight = nn.Params4bit(torch.randn(16, 64), requires_grad=False, quant_type="nf4").to("cpu")
    storages = {part.data_ptr() for part in dense_parts(weight)}
    assert storages >= {part.data_ptr() for part in Frozen(weight).parts}
