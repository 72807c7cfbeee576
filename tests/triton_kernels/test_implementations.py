"""The implementations of matmuls with an epilogue: each is right, dropout's masks are the same on all, and backward
takes forward's."""

import itertools
import sys
import weakref
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from codegen import trace
from support.cases import P, check_exactness, expected_mask, output_gradient
from support.catalog import Sizes
from support.properties import OF_OPS, Case, joined
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ckptkern
from ckptkern import eager, triton_kernels
from ckptkern.benchmarks.autotune import forced_impl
from ckptkern.benchmarks.compiling import instead_of_launches
from ckptkern.ops.dispatch import choices as _choices
from ckptkern.ops.dispatch import implementations as _impls
from ckptkern.ops.registration.op import token_chunks

OPS = ("linear_act", "mlp", "gated_mlp", "mlp_block")


def full(name: str, sizes: Sizes = Sizes()) -> Case:  # noqa: B008
    """The op at "full", with the hidden layer's dropout where it has one."""
    entry = OF_OPS[name]
    return Case(entry, ("dropout_p",) if "dropout_p" in entry.parameters else (), "full", sizes)


@pytest.fixture(autouse=True)
def _triton(device):
    with ckptkern.backend("triton"):
        yield
    _choices._impl.cache_clear()


@pytest.mark.parametrize("activation", ["gelu", "silu"])
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("impl", _impls.OF_KERNELS)
def test_gradients_are_as_exact_as_torchs(impl, name, activation, device):
    case = full(name)
    ours, theirs = (lambda t, run=run: joined(run(t, activation=activation)) for run in (case.results, case.oracle))
    with forced_impl(impl):
        check_exactness(ours, theirs, case.make(torch.bfloat16, device))


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("impl", _impls.OF_KERNELS)
def test_masks_do_not_depend_on_the_implementation(impl, mode, device):
    """The second weight I spells the hidden layer; dy = I makes its gradient spell it as backward recomputed it; dy = 1 makes
    the bias's count the units that backward saved."""
    N = 160  # two chunks
    x, w, b = (torch.randn(shape, device=device) for shape in ((N, 7), (N, 7), (N,)))
    eye, ones = torch.eye(N, device=device), torch.ones(N, N, device=device)
    second = eye.clone().requires_grad_()
    b.requires_grad_()
    torch.manual_seed(3)
    with forced_impl(impl):
        y = ckptkern.mlp(x, w, b, second, None, "identity", P, recompute=mode, workspace=1)
        (h,) = torch.autograd.grad(y, second, eye, retain_graph=True)
        (db,) = torch.autograd.grad(y, b, ones)
    saved = expected_mask(P, N, N, seed=3, device=device)
    assert torch.equal(y != 0, saved)
    assert torch.equal(h != 0, saved)
    assert torch.equal((db * (1 - P)).round(), saved.sum(0).float())


@pytest.mark.parametrize("name", OPS[1:])
def test_backward_takes_the_implementation_of_forward(name, device):
    case = full(name)
    tensors = case.make(torch.float32, device)
    with forced_impl("library"):
        y = case(tensors)
    fails = mock.Mock(side_effect=AssertionError("another implementation"))
    names = ("linear_fwd", "act_grad", "mlp_bwd", "gated_bwd", "gated_act_grad")
    with (
        forced_impl("triton"),
        mock.patch.multiple(triton_kernels, **dict.fromkeys(names, fails)),
    ):
        torch.autograd.grad(y, list(tensors.values()), output_gradient(y))


def test_a_compiled_graph_follows_the_implementation(device):
    x, w1, w2 = (torch.randn(shape, device=device, requires_grad=True) for shape in ((6, 8), (16, 8), (8, 16)))
    compiled = torch.compile(ckptkern.mlp, backend="aot_eager", fullgraph=True)
    of_library = _impls.Library.mlp_bwd
    for impl in ("triton", "library", "triton"):
        with (
            forced_impl(impl),
            mock.patch.object(_impls.Library, "mlp_bwd", autospec=True, side_effect=of_library) as spy,
        ):
            compiled(x, w1, None, w2, None).sum().backward()
        assert spy.called == (impl == "library")


class Allocated(TorchDispatchMode):
    """Bytes of the storages that ops inside make: now, and at most."""

    def __init__(self, before):
        super().__init__()
        self.known, self.now, self.peak = {t.untyped_storage()._cdata for t in before}, 0, 0

    def freed(self, address, size):
        self.known.discard(address)
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self.known:
                address, size = storage._cdata, storage.nbytes()
                self.known.add(address)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.freed, address, size)
        return out


@pytest.mark.parametrize("drops", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize(("name", "hidden"), [("mlp", 2), ("gated_mlp", 3)])
def test_workspace_bounds_the_library_too(name, hidden, mode, drops):
    """`hidden` tensors of the hidden layer at once, and one more with dropout, in chunks of 128 rows, as tensors without data
    come and go."""
    case = Case(OF_OPS[name], ("dropout_p",) if drops else (), mode, Sizes((640,), 8, 64, 8))
    rows = 128 * (hidden + drops) * 64 * 2
    of_op = sys.modules["ckptkern.ops.mlp.mlp"]
    with mock.patch.object(of_op, "token_chunks", wraps=token_chunks) as spy, ckptkern.backend("auto"):
        tensors = case.make(torch.bfloat16, "cpu")
        leaves = {name: torch.empty_like(tensor, device="meta", requires_grad=True) for name, tensor in tensors.items()}
        with trace.as_on(120), instead_of_launches(lambda *_: None, 120), Allocated(leaves.values()) as allocated:
            y = case(leaves, workspace=rows, activation="gelu")
            dy, saved = torch.empty_like(y), allocated.now
            allocated.peak = 0
            grads = torch.autograd.grad(y, list(leaves.values()), dy)
    bytes_of_a_row, workspace = spy.call_args.args[1:]
    with trace.as_on(120):
        assert (bytes_of_a_row(), workspace) == ((hidden + drops) * 64 * 2, rows)
    dx, *others = grads
    sums = sum(4 * g.numel() * (6 if g.dim() == 1 else 1) for g in others)  # of chunks, and a bias's of 32 rows
    assert 0.7 * rows < allocated.peak - saved - dx.nbytes - sums <= rows


@pytest.fixture
def epilogues(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of x that cuBLASLt's ReLU is asked for; CPU tensors pass for a GPU's, with PyTorch ops as kernels."""
    calls = []

    def of_a_gpu(b, x, wt):
        calls.append(tuple(x.shape))
        z = torch.addmm(b, x, wt)
        return F.relu(z) if x.shape[1] else z  # as ATen, which forgets the activation there

    monkeypatch.setattr(torch, "_addmm_activation", of_a_gpu)
    monkeypatch.setattr(_choices.primitives("library"), "kernels", eager)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return calls


@pytest.mark.parametrize("device", ["cpu"])
def test_relus_epilogue_runs_where_z_is_not_saved(epilogues, device):
    library = _choices.primitives("library")
    for shape, shapes, options in (
        ((9, 12), ((9, 12), (20, 12), (20,)), {}),
        ((9, 12), ((9, 12), (20, 12), (20,)), {"save_bits": True}),
        (None, ((9, 12), (20, 12)), {}),
        (None, ((9, 12), (20, 12), (20,)), {"save_z": True}),
        (None, ((9, 0), (20, 0), (20,)), {}),
    ):
        x, w, b = *(torch.randn(size, dtype=torch.bfloat16) for size in shapes), *[None] * (3 - len(shapes))
        exact = eager.linear_fwd(*(t if t is None else t.double() for t in (x, w, b)), "relu", "ieee").h
        epilogues.clear()
        outputs = library.linear_fwd(x, w, b, "relu", "ieee", **options)
        assert (outputs.h - exact).abs().max() < 0.05
        assert epilogues == ([] if shape is None else [shape])
        assert outputs.bits is None or torch.equal(outputs.bits, eager.relu_bits(outputs.h))
    assert not library.linear_fwd(x, w, b, "gelu_tanh", "ieee").bits
    assert not epilogues


@pytest.mark.parametrize("device", ["cpu"])
def test_backward_makes_relus_hidden_layer_by_the_matmul_of_forward(epilogues, device):
    """By another one, cuBLAS might sum in another order. z of a tanh-GELU comes from a matmul without it, in both."""
    x, w1, b1, dy, w2 = (torch.randn(shape) for shape in ((9, 12), (20, 12), (20,), (9, 7), (7, 20)))
    library = _choices.primitives("library")
    forward = library.linear_fwd(x, w1, b1, "relu", "ieee").h
    assert torch.equal(library.mlp_bwd(x, w1, b1, dy, w2, "relu", "ieee").h, forward)
    library.linear_bwd(x, w1, b1, dy @ w2, "relu", "ieee")
    assert len(epilogues) == 3
    library.mlp_bwd(x, w1, b1, dy, w2, "gelu_tanh", "ieee")
    assert len(epilogues) == 3


# -- the rule ----------------------------------------------------------------------------------------------------------

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))


def test_libraries_run_what_nobody_measured():
    """Experts on an H200 were measured, in 16 bits: up to 2,048 features our kernels took less time."""
    ours = {
        key
        for key in itertools.product(
            ("linear_act", "mlp", "gated_mlp", "linear_stack", "moe_mlp"),
            CAPABILITIES,
            (BF16, FP16, FP32),
            _impls.SIZES,
        )
        if _impls.default_impl(*key) != "library"
    }
    assert ours == {
        ("moe_mlp", (9, 0), dtype, _impls.size_class(n)) for dtype in (BF16, FP16) for n in (256, 512, 1024, 2048)
    }


def test_classes_of_sizes():
    assert [_impls.size_class(n) for n in (0, 256, 257, 1024, 4097, 2**40)] == [256, 256, 512, 1024, 2**62, 2**62]
    assert [_impls.size_text(_impls.SIZES[place]) for place in (0, 5)] == [
        "up to 256 features",
        "more than 4096 features",
    ]
    with pytest.raises(ValueError, match="features must be at most 4611686018427387904"):
        _impls.size_class(2**62 + 1)


def chosen(op: str, gpu: tuple[int, int], features: int, backend: str = "auto", dtype: torch.dtype = BF16) -> str:
    x = mock.Mock(spec=torch.Tensor, is_cuda=True, dtype=dtype, device=torch.device("cuda", 0))
    _choices._impl.cache_clear()
    with (
        ckptkern.backend(backend),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=gpu),
        mock.patch.object(_choices, "_device_reason", return_value=None),
    ):
        return _choices.choose_impl(op, x, 8, 8, features)


@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_a_backend_that_is_asked_for_takes_no_library(backend):
    for op, gpu, features in itertools.product(("mlp", "moe_mlp"), CAPABILITIES, (64, 8192)):
        assert chosen(op, gpu, features, backend) == backend
        assert chosen(op, gpu, features) in _impls.OF_KERNELS


def test_a_tuned_table_overrules(monkeypatch):
    """In its op, dtype and class of sizes alone."""
    rows = {("mlp", "bfloat16", 1024): {"impl": "triton"}, ("moe_mlp", "float16", 512): {"impl": "library"}}
    monkeypatch.setattr(_choices._tuned, "table", lambda *device: rows)
    assert chosen("mlp", (9, 0), 1024) == chosen("mlp", (12, 0), 513) == "triton"
    assert (
        chosen("mlp", (9, 0), 1024, dtype=FP16)
        == chosen("mlp", (9, 0), 512)
        == chosen("gated_mlp", (9, 0), 1024)
        == "library"
    )
    assert chosen("moe_mlp", (9, 0), 300, dtype=FP16) == "library"
    assert chosen("moe_mlp", (9, 0), 300) == "triton"
    assert chosen("mlp", (9, 0), 1024, backend="eager") == "eager"


@pytest.mark.parametrize("name", ["fast", "dual", "triton:128x128", ""])
def test_an_implementation_that_does_not_exist(name):
    with (
        pytest.raises(ValueError, match=rf"forced_impl: name must be .*'library'.*'{name}'"),
        forced_impl(name),
    ):
        pass


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("impl", _impls.OF_KERNELS)
def test_stacks_that_are_too_wide_for_one_kernel(impl, activation, mode, device):
    """In two chunks of 128 rows at most."""
    case = Case(OF_OPS["linear_stack"], (), mode, Sizes((140,), 72, 80, 66))
    options = {"activation": activation, "workspace": 1}
    ours, theirs = (lambda t, run=run: joined(run(t, **options)) for run in (case.results, case.oracle))
    with forced_impl(impl):
        check_exactness(ours, theirs, case.make(torch.bfloat16, device))
