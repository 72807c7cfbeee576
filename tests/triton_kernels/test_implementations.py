"""The implementations of matmuls with an epilogue: each is right, dropout's masks are the same on all, and backward
takes forward's."""

import functools
import math
import sys
from unittest import mock

import pytest
import torch
from support.cases import P, check_exactness, expected_mask, output_gradient, whole_numbers
from support.properties import OF_OPS, Case, joined

import ckptkern
from ckptkern import eager, triton_kernels
from ckptkern.memory import peak_memory
from ckptkern.ops.catalog import Sizes
from ckptkern.ops.dispatch import choices as _choices
from ckptkern.ops.dispatch import implementations as _impls
from ckptkern.ops.mlp import branch as mlp_branch
from ckptkern.ops.registration import gradients as _gradients
from ckptkern.triton_kernels import linear, mlp, persistent
from ckptkern.triton_kernels.tile import INTERPRETED_TILE, INTERPRETED_VARIANT, TILES, tile_for

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
@pytest.mark.parametrize("impl", ["triton", "library"])
def test_gradients_are_as_exact_as_torchs(impl, name, activation, device):
    """`dual`, which is the table's for float32 of sizes as small, in test_ops.py."""
    case = full(name)
    ours, theirs = (lambda t, run=run: joined(run(t, activation=activation)) for run in (case.results, case.oracle))
    with _choices.forced_impl(impl):
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
    with _choices.forced_impl(impl):
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
    with _choices.forced_impl("library"):
        y = case(tensors)
    fails = mock.Mock(side_effect=AssertionError("another implementation"))
    names = ("linear_fwd", "act_grad", "mlp_bwd", "gated_bwd", "gated_act_grad")
    with (
        _choices.forced_impl("triton"),
        mock.patch.multiple(triton_kernels, **dict.fromkeys(names, fails)),
    ):
        torch.autograd.grad(y, list(tensors.values()), output_gradient(y))


@pytest.fixture
def tiles(monkeypatch) -> set[tuple]:
    """(kernel, rows, columns) of every matmul that is launched."""
    found = set()

    def spy(launch, kernel, grid, *args, **kwargs):
        if "BLOCK_K" in kwargs:
            found.add((kernel.fn.__name__, kwargs["BLOCK_M"], kwargs["BLOCK_N"]))
        launch(kernel, grid, *args, **kwargs)

    for module in (linear, mlp, persistent):
        monkeypatch.setattr(module, "launch", functools.partial(spy, module.launch))
    return found


@pytest.mark.parametrize("name", OPS[:3])
@pytest.mark.parametrize("impl", ["triton:128x128", "dual:128x64", "persistent:128x256"])
def test_backward_takes_the_tiles_of_forward(impl, name, device, architecture, tiles):
    """Where another implementation is forced meanwhile. Results are those of the implementation "triton"."""
    if architecture or device == "cuda":
        pytest.skip("wants the interpreter's tiles")
    case = full(name, Sizes((140,), 32, 48, 64))
    tensors, results = whole_numbers(case.make(torch.bfloat16)), {}
    base = impl.partition(":")[0]
    for one in dict.fromkeys(("triton", base, impl)):
        tiles.clear()
        with _choices.forced_impl(one):
            (y,) = case.results(tensors, activation="relu")
        with _choices.forced_impl("library"):
            results[one] = y, *torch.autograd.grad(y, list(tensors.values()), torch.ones_like(y))
        shape = INTERPRETED_VARIANT[:2] if one == impl else INTERPRETED_TILE[:2]
        assert {launched[1:] for launched in tiles} == {shape}, tiles
        persistent_ones = any("persistent" in launched[0] for launched in tiles)
        assert persistent_ones == (base == one.partition(":")[0] == "persistent"), tiles
        assert len(tiles) > (name != "linear_act")  # forward's kernels and backward's
    for one, result in results.items():
        assert all(map(torch.equal, result, results["triton"])), one


def test_a_compiled_graph_follows_the_implementation(device):
    x, w1, w2 = (torch.randn(shape, device=device, requires_grad=True) for shape in ((6, 8), (16, 8), (8, 16)))
    compiled = torch.compile(ckptkern.mlp, backend="aot_eager", fullgraph=True)
    of_library = _impls.Library.act_grad
    for impl in ("dual", "library", "dual"):
        with (
            _choices.forced_impl(impl),
            mock.patch.object(_impls.Library, "act_grad", autospec=True, side_effect=of_library) as spy,
        ):
            compiled(x, w1, None, w2, None).sum().backward()
        assert spy.called == (impl == "library")


@pytest.mark.parametrize("device", ["cpu"])  # on a GPU cuBLAS has a workspace of its own
@pytest.mark.parametrize(("name", "hidden"), [("mlp", 4), ("gated_mlp", 6)])
def test_workspace_bounds_the_library_too(name, hidden, device):
    """`hidden` tensors of the hidden layer at once, in chunks of 128 rows. Without kernels: the interpreter copies tensors."""
    case = Case(OF_OPS[name], (), "full", Sizes((640,), 8, 64, 8))
    tensors = case.make(torch.float32, device)
    workspace = 128 * hidden * 64 * 4
    with (
        _choices.forced_impl("library"),
        mock.patch.object(_choices.primitives("library"), "kernels", eager),
        mock.patch.object(mlp_branch, "token_chunks", wraps=_gradients.token_chunks) as spy,
    ):
        y = case(tensors, workspace=workspace, activation="relu")
        dy = output_gradient(y)
        with peak_memory(device) as peak:
            grads = torch.autograd.grad(y, list(tensors.values()), dy)
    assert spy.call_args.args[1:] == (hidden * 64 * 4, workspace)
    transient = peak.bytes - sum(g.numel() * g.element_size() * (2 if g.dim() == 1 else 1) for g in grads)
    assert 0.7 * workspace < transient <= workspace


# -- the table ---------------------------------------------------------------------------------------------------------


def test_the_table():
    sizes = [_impls.size_class(n) for n in (0, 256, 257, 1024, 4097, 2**40)]
    assert sizes == [0, 0, 1, 2, 5, 5]
    assert {len(impls) for impls in _impls.DEFAULT.values()} == {len(_impls.SIZES)}
    assert {len(impls) for impls in _impls.DEFAULT_FEW.values()} == {len(_impls.SIZES)}
    for (_, gpu, size), impls in (
        *_impls.DEFAULT.items(),
        *(((*key, 2), few) for key, few in _impls.DEFAULT_FEW.items()),
    ):
        dtype = torch.bfloat16 if size == 2 else torch.float32
        assert set(impls) <= set(_impls.candidates("triton", dtype, gpu))
    assert _impls.default_impl("mlp", (9, 0), 2, 0) == "triton"
    assert _impls.default_impl("mlp", (9, 0), 4, 0) == "dual"
    assert _impls.default_impl("gated_mlp", (8, 0), 2, 3) == "triton:128x128"
    assert _impls.default_impl("mlp", (12, 0), 2, 0) == "library"
    assert [_impls.size_text(place) for place in (0, 5)] == ["up to 256 features", "more than 4096 features"]
    assert _impls.size_text(1, few=True) == "up to 512 features, few rows"
    few = functools.partial(_impls.default_impl, few=True)
    assert few("linear_act", (8, 0), 2, 4) == "library"
    assert _impls.default_impl("linear_act", (8, 0), 2, 4) == few("linear_act", (8, 0), 4, 4) == "triton"
    assert few("mlp", (12, 0), 2, 0) == "library"
    with pytest.raises(ValueError, match="wanted at most 4611686018427387904 features"):
        _impls.size_class(2**62 + 1)


@pytest.mark.parametrize(("gpu", "family"), [((9, 0), 90), ((8, 0), 80), ((8, 6), 80), ((12, 0), 80)])
@pytest.mark.parametrize("size", range(len(_impls.SIZES)))
def test_rows_are_few_where_the_tile_table_says_so(gpu, family, size):
    """In the narrowest layer of the class: up to that row it takes the tiles "few", and one more takes those of many rows. None
    is few in float32."""
    rows, narrowest = _impls.few_rows(gpu, 2, size), (0, *_impls.SIZES)[size] + 1
    table, x = TILES["linear", family], torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
    for M, few in ((rows, True), (rows + 1, narrowest == 1)):  # half of a tile's columns are few by themselves
        assert (tile_for("linear", family, M, narrowest, x) == table["few"]) == few
    assert tile_for("linear", family, rows, max(narrowest, 129), x) == table["few"] or size == 0
    assert _impls.few_rows(gpu, 4, size) == 0


@pytest.mark.parametrize("op", ["linear_act", "mlp", "gated_mlp", "mlp_block"])
def test_few_rows_have_an_implementation_of_their_own(op, monkeypatch, device):
    """In forward and backward, whatever the shape of the input has before its features."""
    monkeypatch.setattr(_impls, "few_rows", lambda *key: 6)
    monkeypatch.setattr(_choices, "default_impl", lambda *key: "library" if key[-1] else "triton")
    _choices._impl.cache_clear()
    asked, whole = [], _choices.primitives
    for module in [one for name, one in sys.modules.items() if name.startswith("ckptkern.ops.")]:
        if hasattr(module, "primitives"):
            monkeypatch.setattr(module, "primitives", lambda name: asked.append(name) or whole(name))
    function = getattr(ckptkern, op)
    shapes = {"linear_act": [(24, 16), (24,)], "gated_mlp": [(40, 16), (40, 16), (24, 40)]}
    weights = [torch.randn(shape) for shape in shapes.get(op, [(40, 16), (40,), (24, 40), (24,)])]
    options = {"residual": False} if op == "mlp_block" else {}
    for lead in ((2, 3), (7,), (6,), (1, 1, 7)):
        leaves = [one.to(device, torch.bfloat16).requires_grad_() for one in (torch.randn(*lead, 16), *weights)]
        with ckptkern.backend("auto"), mock.patch.object(_choices, "choose_backend", return_value="triton"):
            asked.clear()
            function(*leaves, **options).sum().backward()
        impls = {name for name in asked if name not in ("eager", "triton") or op != "mlp_block"}
        assert (impls == {"library"}) == (math.prod(lead) <= 6), (lead, asked)


@pytest.mark.slow
def test_a_graph_for_any_number_of_rows_has_the_implementation_of_many(monkeypatch, device):
    """One graph, and one that torch.export makes for every batch; a fixed number of rows has its own."""
    monkeypatch.setattr(_impls, "few_rows", lambda *key: 16)
    monkeypatch.setattr(_choices, "default_impl", lambda *key: "dual" if key[-1] else "triton")
    _choices._impl.cache_clear()
    module, found = ckptkern.nn.MLP(32, 48, device=device, dtype=torch.bfloat16).eval(), []

    def saved(graph, inputs):
        found.append([impl for impl in ("dual", "triton") if impl in graph.print_readable(print_output=False)])
        return graph

    few, many = (torch.randn(rows, 32, device=device, dtype=torch.bfloat16) for rows in (8, 40))
    compiled = torch.compile(module, backend=saved, fullgraph=True, dynamic=True)
    compiled(few), compiled(many)
    assert found == [["triton"]]
    torch._dynamo.reset()
    torch.compile(module, backend=saved, fullgraph=True, dynamic=False)(few)
    torch._dynamo.reset()
    assert found[1:] == [["dual"]]
    program = torch.export.export(module, (few,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    (found,) = (node.args[3] for node in program.graph.nodes if "mlp_fwd" in str(node.target))
    assert found == ["gelu", "full", "triton", "ieee"]


@pytest.mark.parametrize(
    ("gpu", "impl", "there"),
    [
        ((9, 0), "triton:256x128", True), ((9, 0), "persistent:256x128", True), ((8, 0), "triton:256x128", True),
        ((8, 0), "persistent:256x128", False), ((12, 0), "dual:64x128", True), ((10, 0), "persistent:256x128", False),
        ((9, 0), "persistent", True), ((8, 0), "persistent", False), ((10, 0), "persistent", False),
    ],
)  # fmt: skip
def test_which_gpus_have_which_tiles(gpu, impl, there, monkeypatch):
    """What is tuned or forced for another GPU is passed over; so it is for float32."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: gpu)
    rows = [("mlp", dtype, 2, False) for dtype in ("bfloat16", "float16", "float32")]
    monkeypatch.setattr(_choices._tuned, "table", lambda *device: dict.fromkeys(rows, impl))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        taken = there and dtype != torch.float32
        _choices._impl.cache_clear()
        found = _choices._impl("mlp", "triton", "cuda", 0, dtype, 2)[-1]
        assert found == (impl if taken else _impls.default_impl("mlp", gpu, dtype.itemsize, 2))
        assert (impl in _choices.candidates("triton", "cuda", 0, dtype)) == taken
        assert impl not in _choices.candidates("eager", "cuda", 0, dtype)


def chosen(gpu: tuple[int, int], features: int, backend: str = "auto") -> str:
    x = mock.Mock(spec=torch.Tensor, is_cuda=True, dtype=torch.bfloat16, device=torch.device("cuda", 0))
    _choices._impl.cache_clear()
    with (
        ckptkern.backend(backend),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=gpu),
        mock.patch.object(_choices, "_device_reason", return_value=None),
    ):
        return _choices.choose_impl("mlp", x, 8, 8, features)


def test_a_gpu_that_nobody_measured_takes_cublas():
    assert chosen((9, 0), 2048) == "triton"
    assert chosen((12, 0), 8192) == "library"
    assert chosen((12, 0), 8192, backend="triton") == "triton"  # nothing replaces a kernel
    assert chosen((12, 0), 8192, backend="eager") == "eager"


@pytest.mark.parametrize("name", ["fast", "triton:96x96", "library:128x128", "persistent:64x256", "triton:"])
def test_an_implementation_that_does_not_exist(name):
    with (
        pytest.raises(ValueError, match=rf"forced_impl: name must be .*'library'.*'{name}'") as said,
        _choices.forced_impl(name),
    ):
        pass
    assert str(said.value).count("'triton:128x256'") == 1
