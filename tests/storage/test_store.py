"""Every store: what is saved elsewhere comes back as it was, once, and what should stay stays."""

import contextlib
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from support.stores import Fused, Save, copies, gradients, store_of, through, unfused, watch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import ckptkern
from ckptkern.memory import peak_memory, saved_tensors
from ckptkern.storage import compress, offload, store


class Checkpointed(nn.Module):
    def __init__(self, checkpoint):
        super().__init__()
        self.checkpoint = checkpoint
        self.block = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.3))

    def forward(self, x):
        return self.checkpoint(self.block, self.checkpoint(self.block, x, use_reentrant=False), use_reentrant=False)


MODULES = {
    "plain": unfused,
    "fused full": lambda: Fused("full"),
    "fused selective": lambda: Fused("selective"),
    "general": lambda: Checkpointed(ckptkern.checkpoint),
    "torch's checkpoint": lambda: Checkpointed(torch.utils.checkpoint.checkpoint),
}
EXACT = ["offload(min_bytes=0)", "copies(min_bytes=0)", "copies(min_bytes=0, then=offload())"]


every_store = pytest.mark.parametrize("keep", EXACT)


@pytest.mark.parametrize("module", MODULES)
@every_store
def test_gradients_are_those_without_it(keep, module):
    """Also where backward runs inside of the store."""
    module, keep = MODULES[module](), store_of(keep)
    x = torch.randn(3, 5, 16)
    torch.manual_seed(1)
    expected = gradients(module, x, contextlib.nullcontext())
    puts = watch(keep)
    for _ in range(2):
        torch.manual_seed(1)
        torch.testing.assert_close(gradients(module, x, keep), expected, rtol=0, atol=0)
    assert sum(puts) >= 2 * 2 * x.numel()
    torch.manual_seed(1)
    with keep:
        inside = gradients(module, x, contextlib.nullcontext())
    torch.testing.assert_close(inside, expected, rtol=0, atol=0)


def test_parameters_stay_and_so_do_their_views():
    keep, x = offload(min_bytes=0), torch.randn(3, 8, requires_grad=True)
    puts = watch(keep)
    free, frozen = nn.Linear(8, 6), nn.Linear(6, 5).requires_grad_(False)
    with keep:
        F.linear(frozen(free(x)), free.weight.view(8, 6)[:5, :5])
    assert puts == [x.numel(), 3 * 5]  # inputs of the first and the last


def test_what_is_excluded_small_or_not_selected_stays():
    a, b, c = (torch.randn(n, requires_grad=True) for n in (8, 9, 10))
    assert all(map(torch.equal, through(offload(min_bytes=0), a, b), (a, b)))
    for settings, expected in (
        (dict(min_bytes=9 * 4), [9, 10]),
        (dict(min_bytes=0, exclude=[b]), [8, 10]),
        (dict(min_bytes=0, select=lambda t: len(t) == 10), [10]),
        (dict(), []),
    ):
        keep = offload(**settings)
        puts = watch(keep)
        through(keep, a, b.detach()[1:] if "exclude" in settings else b, c)
        assert puts == expected, settings


def test_a_tensor_saved_twice_is_saved_once():
    keep, base = offload(min_bytes=0), torch.randn(4, 6)
    puts = watch(keep)
    tensors = base, base, base.t(), base.view(24), base.detach().view(2, 12), base[1:], base[:, 1:], base[:3]
    torch.testing.assert_close(through(keep, *tensors), [*tensors], rtol=0, atol=0)
    assert puts == [24, 18, 20, 18]
    puts.clear()
    through(keep, torch.randn(100, 90)[:, :3], torch.randn(1, 7).expand(50, 7))  # gaps and repeats
    assert puts == [300, 7]


def test_what_was_changed_in_between_is_saved_twice():
    keep, base, x = offload(min_bytes=0), torch.zeros(5), torch.ones((), requires_grad=True)
    first, second, third = [], [], []
    with keep:
        y = Save.apply(x, first, base)
        base.add_(1)
        y = Save.apply(y, second, base)
    base.data.add_(1)  # no version tells of this one
    with keep:
        y = Save.apply(y, third, base)
    y.backward()
    assert [values[0][0].item() for values in (first, second, third)] == [0, 1, 2]


CHANGES = {
    "method": lambda base: base.add_(1),
    "of a view": lambda base: base[1:].add_(1),
    "of a detached": lambda base: base.detach().add_(1),
    "by index": lambda base: base.__setitem__(slice(None), 1.0),
    "out": lambda base: torch.add(base, 1, out=base),
    "of a list": lambda base: torch._foreach_add_([base], 1),
}
UNSEEN = {  # by version counters
    "data": lambda base: base.data.add_(1),
    "numpy": lambda base: base.numpy().__setitem__(slice(None), 1.0),
    "dlpack": lambda base: torch.from_dlpack(base.detach()).add_(1),
}


@pytest.mark.parametrize("again", [False, True], ids=["in one block", "in two blocks"])
@pytest.mark.parametrize("change", CHANGES | UNSEEN)
@every_store
def test_what_is_saved_again_after_a_change(keep, change, again):
    """The later value, except where nothing tells of the change: then in another block only."""
    keep, base, x, first, second = store_of(keep), torch.zeros(5), torch.ones((), requires_grad=True), [], []
    with contextlib.ExitStack() as block:
        block.enter_context(keep)
        y = Save.apply(x, first, base)
        (CHANGES | UNSEEN)[change](base)
        if again:
            block.pop_all().close()
            block.enter_context(keep)
        y = Save.apply(y, second, base)
    y.backward()
    assert torch.equal(first[0], torch.zeros(5))
    assert torch.equal(second[0][1:], torch.full((4,), 0.0 if change in UNSEEN and not again else 1.0))


def test_a_tensor_saved_twice_is_fetched_once():
    keep, fetched = offload(min_bytes=0), []
    get = keep.get
    keep.get = lambda saved: (fetched.append(saved), get(saved))[1]
    with keep:  # relu and linear save relu's output, exp its own
        y = nn.Linear(16, 16)(F.relu(torch.randn(7, 16, requires_grad=True).exp())).sum()
    for step in (1, 2):
        y.backward(retain_graph=True)
        assert len(fetched) == 2 * step
    runs = [thing for thing in gc.get_objects() if type(thing) is store._Run and thing.store is keep]
    assert [run.flat for run in runs] == [None, None]


LAYOUTS = {
    "scalar": lambda: torch.randn(()),
    "transposed": lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
    "all strides 0": lambda: torch.randn(1).expand(5, 4),
    "gaps, transposed": lambda: torch.randn(6, 9)[:, ::2].t(),
    "one of three": lambda: torch.randn(2, 5, 3, 4)[:, :, 1].transpose(1, 2),
    "overlapping, gaps": lambda: torch.randn(20).as_strided((2, 4, 3), (11, 1, 1)),
    "size 1, odd stride": lambda: torch.randn(20).as_strided((1, 4), (17, 1)),
    "bool": lambda: torch.randn(3, 4) > 0,
    "complex64": lambda: torch.randn(3, 4, dtype=torch.complex64),
    "bfloat16": lambda: torch.randn(3, 4).bfloat16()[:, 1:],
    "float8": lambda: torch.randn(3, 4).to(torch.float8_e4m3fn),
    "conjugate": lambda: torch.randn(3, 4, dtype=torch.complex64).conj(),
    "empty": lambda: torch.randn(3, 0),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "wrapper": lambda: TwoTensor(torch.randn(3, 4), torch.randn(3, 4)),
}


def bits(tensor):
    dense = tensor.to_dense() if tensor.layout == torch.sparse_coo else tensor.resolve_conj()
    return dense.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("layout", LAYOUTS)
@every_store
def test_layout_and_bits_come_back(keep, layout):
    """A default device does not matter."""
    tensor, keep = LAYOUTS[layout](), store_of(keep)
    puts = watch(keep)
    with torch.device("meta"):
        (restored,) = through(keep, tensor)
    assert type(restored) is type(tensor)
    if isinstance(keep, offload):
        assert len(puts) == {"empty": 0, "sparse": 0, "conjugate": 0, "wrapper": 2}.get(layout, 1)
    for part, wanted in (
        [(restored, tensor)] if layout != "wrapper" else [(restored.a, tensor.a), (restored.b, tensor.b)]
    ):
        assert (part.dtype, part.shape, part.layout) == (wanted.dtype, wanted.shape, wanted.layout)
        if wanted.layout == torch.strided:
            assert (part.stride(), part.is_conj()) == (wanted.stride(), wanted.is_conj())
        assert torch.equal(bits(part), bits(wanted))


@every_store
def test_second_order_and_changes_in_place(keep):
    """Leaves and results come back with requires_grad and their graph."""
    x = torch.randn(64, dtype=torch.float64, requires_grad=True)

    def saved(x):
        with store_of(keep):
            return x.exp().sin() * x

    assert torch.autograd.gradgradcheck(saved, x)
    with store_of(keep):
        relu = F.relu(x - 1)
        square = relu.square().sum()
    assert torch.equal(relu.grad_fn._saved_result, relu)
    with torch.no_grad():
        relu.add_(1)
    assert torch.equal(torch.autograd.grad(square, x)[0], 2 * F.relu(x.detach() - 1))


def test_an_in_place_change_of_what_stayed_is_the_error_of_torch():
    with offload():
        y = torch.randn(3, 4, requires_grad=True).exp()
        z = y.sum()
    y.detach().add_(1)
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation.*version 1; expected version 0 instead\."
    ):
        z.backward()


def test_the_inner_context_counts_and_the_outer_comes_back():
    outer, inner = offload(min_bytes=0), compress("int8", min_bytes=0)
    seen, also = watch(outer), watch(inner)
    x = torch.randn(5, requires_grad=True)
    with outer:
        x.exp()
        with inner:
            x.exp()
            with contextlib.suppress(ZeroDivisionError), outer:
                x.exp()
                1 / 0  # noqa: B018
            x.exp()
        x.exp()
    x.exp()
    assert (seen, also) == ([5, 5, 5], [5, 5])


def test_two_threads_share_a_store():
    keep, module = offload(min_bytes=0), unfused().double()

    def train(x, keep):
        with keep:
            loss = module(x).square().sum()
        return torch.autograd.grad(loss, [*module.parameters()])

    def is_exact(x):
        expected = train(x, contextlib.nullcontext())
        return all(all(map(torch.equal, train(x, keep), expected)) for _ in range(20))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(is_exact, torch.randn(2, 40, 16, dtype=torch.float64)))


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # from hooks that Dynamo tries to compile
@pytest.mark.filterwarnings("error:Dynamo does not know")
def test_transforms():
    """Around a compiled model it stores, inside one it breaks the graph without a warning, and torch.func refuses it."""
    module, x, keep = unfused(), torch.randn(5, 16, requires_grad=True), offload(min_bytes=0)
    expected = gradients(module, x.detach(), contextlib.nullcontext())
    puts = watch(keep)
    torch.testing.assert_close(gradients(torch.compile(module, backend="aot_eager"), x.detach(), keep), expected)
    assert len(puts) >= 3
    assert not {p.numel() for p in module.parameters()} & set(puts)

    def double(x):
        with keep:
            return x.exp() * 2

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(double, backend="eager", fullgraph=True)(x)
    torch.compile(double, backend="eager")(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().exp())
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda x: double(x).sum())(x)


WRONG = {
    "offload(min_bytes=-1)": (ValueError, "min_bytes must be an int of at least 0, not -1"),
    "offload(prefetch=-1)": (ValueError, "prefetch must be an int of at least 0, not -1"),
    "offload(in_flight=None)": (ValueError, "in_flight must be an int"),
    "offload(select=3)": (TypeError, "select must be a function of a tensor, not int"),
    "offload(exclude=[3])": (TypeError, "exclude must hold tensors, not int"),
    "offload(directory='/no/such')": (NotADirectoryError, "'/no/such' is not a directory"),
    "compress('fp4')": (ValueError, "one of 'fp8', 'int8', not 'fp4'"),
    "compress('fp8', block=0)": (ValueError, "block must be an int of at least 1, not 0"),
    "offload(then=offload())": (TypeError, "unexpected keyword argument 'then'"),
    "compress('fp8', then=offload)": (TypeError, r"then must be a store such as offload\(\), not type"),
    "partition()": (RuntimeError, "partition: torch.distributed is not initialized"),
}


@pytest.mark.parametrize("call", WRONG)
def test_wrong_arguments(call):
    error, message = WRONG[call]
    with pytest.raises(error, match=message):
        store_of(call)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("side", [False, True])
@pytest.mark.parametrize("then", [False, True])
def test_on_a_gpu(side, then):
    keep = offload(min_bytes=0)
    if then:
        keep = copies(then=keep, min_bytes=0)
    module = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(1024, 1024), nn.ReLU())]).cuda()
    x = torch.randn(4096, 1024, device="cuda")
    expected = gradients(module, x, contextlib.nullcontext())
    with peak_memory("cuda") as before:
        gradients(module, x, contextlib.nullcontext())
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(5):
            assert all(map(torch.equal, gradients(module, x, keep), expected))
        with peak_memory("cuda") as after:
            gradients(module, x, keep)
    assert after.bytes < 0.75 * before.bytes
    host = keep._then if then else keep
    bytes_before = host.host_bytes
    for _ in range(5):
        gradients(module, x, keep)
    assert host.host_bytes == bytes_before


DEVICE_BYTES = {  # what 512 floats, half of them zeros, leave on the device
    "offload(min_bytes=0)": 0,
    "offload(min_bytes=10_000)": 2048,
    "compress('int8', min_bytes=0)": 512 + 512 // 128 * 4,
    "compress('int8', min_bytes=0, then=offload())": 0,
    "copies(min_bytes=0)": 2048,
}


@pytest.mark.parametrize("store", DEVICE_BYTES)
def test_what_stays_on_the_device_is_counted_around_a_store(store):
    x = torch.cat([torch.randn(256), torch.zeros(256)]).requires_grad_()
    with saved_tensors() as saved, store_of(store):
        y = x.sin()
    assert saved.bytes == DEVICE_BYTES[store]
    y.sum().backward()
