"""State of a region: Philox, masks, the draw in every mode of torch, the precision guard."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.masks import keep_mask
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ckptkern import state
from ckptkern.state import (
    MOST_NEEDS,
    NEEDS,
    Observed,
    Precision,
    draw,
    layer_fits,
    observe,
    threshold_scale,
)

KEY_STREAM = (-0x1234_5678_9ABC_DEF0, 0x0FED_CBA9_8765_4321)
both_kernels = pytest.mark.parametrize(
    "kernel", [torch.ops.ckptkern.keep_mask, state._keep_mask_torch], ids=["extension", "torch ops"]
)


# --- Philox against known answers, and the layout against a slow reference in Python integers


def philox4x32_10(key, counter):
    """One call: four uint32 words from a uint64 key and four uint32 counter words."""
    (c0, c1, c2, c3), k0, k1 = counter, key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = (product1 >> 32) ^ c1 ^ k0, (product0 >> 32) ^ c3 ^ k1
        c1, c3 = product1 & 0xFFFFFFFF, product0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def reference_value(key, stream, plane, row, col, total_rows):
    """The 16-bit value of one element, by the layout as csrc/philox.h describes it: eight values per call."""
    c0 = 8 * (col // 32) + col % 8
    c1 = 8 * (plane * ((total_rows + 15) // 16) + row // 16) + row % 8
    words = philox4x32_10(key % 2**64, (c0 % 2**32, c1 % 2**32, stream % 2**32, stream // 2**32 % 2**32))
    return words[col // 8 % 4] >> (16 * (row // 8 % 2)) & 0xFFFF


def test_philox_known_answers():
    """The three vectors of Random123's kat_vectors."""
    philox = philox4x32_10
    assert philox(0, (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 2**32 - 1
    assert philox(2**64 - 1, (ones,) * 4) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox(0x299F31D0_A4093822, pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


# planes, rows, cols, plane_base, row_base, col_base, total_rows
PLACES = [
    (1, 40, 70, 0, 0, 0, 40),
    (2, 33, 65, 3, 0, 0, 33),
    (1, 9, 9, 0, 5, 13, 14),
    (3, 21, 37, 1, 11, 31, 50),
    (1, 1, 300, 0, 8, 255, 9),
    (1, 50, 1, 0, 7, 7, 64),
    (1, 4, 40, 2**28 + 1, 2**20 + 3, 2**20 + 5, 2**21),  # c1 beyond 2**32
    (1, 2, 40, 0, 0, 2**34 - 17, 2),  # c0 beyond 2**32
]
EMPTY = [(*shape, 0, 3, 5, 16) for shape in [(0, 4, 4), (2, 0, 4), (2, 4, 0)]]


@pytest.mark.parametrize("place", PLACES + EMPTY, ids=str)
@both_kernels
def test_layout(place, kernel):
    planes, rows, cols, plane_base, row_base, col_base, total_rows = place
    threshold = 30_000
    mask = kernel(torch.tensor(KEY_STREAM), threshold, *place)
    expected = [
        reference_value(*KEY_STREAM, plane_base + z, row_base + r, col_base + c, total_rows) >= threshold
        for z in range(planes)
        for r in range(rows)
        for c in range(cols)
    ]
    assert (mask.dtype, mask.shape) == (torch.bool, (planes, rows, cols))
    wrong = mask.flatten() != torch.tensor(expected, dtype=torch.bool)
    assert not wrong.any(), f"{wrong.sum()} of {wrong.numel()} values differ, the first at {wrong.nonzero()[0].item()}"
    assert kernel(torch.tensor(KEY_STREAM), 0, *place).all()
    assert not kernel(torch.tensor(KEY_STREAM), 65536, *place).any()


def test_parts_are_parts_of_the_whole():
    seed = draw(torch.empty(0))
    whole = keep_mask(seed, 0.4, 100, 130, planes=3)
    for z, r, c in [(0, 0, 0), (1, 17, 1), (2, 99, 129), (1, 8, 64)]:
        bases = {"plane_base": z, "row_base": r, "col_base": c}
        part = keep_mask(seed, 0.4, 100 - r, 130 - c, planes=3 - z, total_rows=100, **bases)
        assert torch.equal(part, whole[z:, r:, c:])
    assert torch.equal(keep_mask(seed, 0.4, 100, 130), whole[0])
    strided = torch.stack([seed, seed + 1], 1)[:, 0]
    assert torch.equal(keep_mask(strided, 0.4, 100, 130), whole[0])


def test_threads_do_not_change_the_mask():
    seed, before = draw(torch.empty(0)), torch.get_num_threads()
    masks = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            masks.append(keep_mask(seed, 0.5, 500, 1000))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(masks[0], other) for other in masks[1:])


# --- statistics (tests/ops/test_dropout.py has the rate)

SIGMAS = 5  # each bound is missed by chance once in 1.7 million


def signs(seed):
    return keep_mask(seed, 0.5, 1024, 1024, planes=4).float() * 2 - 1


def test_rows_columns_planes_and_seeds_do_not_correlate():
    seed = draw(torch.empty(0))
    x = signs(seed)
    pairs = {
        "planes": (x[:-1], x[1:]),
        "seeds": (x, signs(draw(torch.empty(0)))),
        "keys": (x, signs(seed + torch.tensor([1, 0]))),
        "streams": (x, signs(seed + torch.tensor([0, 1]))),
    }
    for lag in (1, 2, 4, 7, 8, 16, 24, 32, 64, 512):
        pairs[f"rows {lag} apart"] = x[0, lag:], x[0, :-lag]
        pairs[f"columns {lag} apart"] = x[0, :, lag:], x[0, :, :-lag]
    far = {of: (a * b).sum().item() / a.numel() ** 0.5 for of, (a, b) in pairs.items()}
    assert {of: sigmas for of, sigmas in far.items() if abs(sigmas) > SIGMAS} == {}


# --- probability


def test_threshold_scale():
    wanted = {0.0: (0, 1.0), 1.0: (65536, 0.0), 0.5: (32768, 2.0), 0.1: (6554, 65536 / 58982), 0.25 / 65536: (0, 1.0)}
    assert {p: threshold_scale(p) for p in wanted} == wanted


def test_wrong_arguments_raise():
    seed, op = torch.tensor(KEY_STREAM), torch.ops.ckptkern.keep_mask
    for p in (-1e-9, 1.0001, float("nan")):
        with pytest.raises(ValueError, match=r"probability must lie in \[0, 1\] but is"):
            keep_mask(seed, p, 2, 2)
    wrong = {
        r"threshold must lie in \[0, 65536\] but is 65537": (65537, 1, 2, 2, 0, 0, 0, 2),
        r"total_rows=9 is less than row_base \+ rows = 10": (1, 1, 2, 2, 0, 8, 0, 9),
        "must not be negative but are planes=1, rows=2, cols=2, plane_base=-1": (1, 1, 2, 2, -1, 0, 0, 2),
    }
    for message, place in wrong.items():
        with pytest.raises(RuntimeError, match=message):
            op(seed, *place)
    for state_of in (seed.int(), seed[:1], seed[None]):
        with pytest.raises(RuntimeError, match=r"state must be an? .*int64 tensor of shape"):
            op(state_of, 1, 1, 2, 2, 0, 0, 0, 2)


# --- the draw


def test_draw_is_torch_randint():
    """It leaves the generator where randint does, too."""
    torch.manual_seed(11)
    seeds = [draw(torch.empty(3, dtype=torch.bfloat16)) for _ in range(3)]
    after = torch.get_rng_state()
    torch.manual_seed(11)
    expected = [torch.randint(-(2**63), 2**63 - 1, (2,)) for _ in range(3)]
    assert all(map(torch.equal, seeds, expected))
    assert torch.equal(after, torch.get_rng_state())
    assert not torch.equal(seeds[0], seeds[1])
    assert seeds[0].dtype == torch.int64


def apply_dropout(x):
    return x * keep_mask(draw(x), 0.5, *x.shape)


def gradient(x):
    return torch.func.grad(lambda x: apply_dropout(x).sum())(x)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_vmap(compiled):
    def masks(randomness):
        mapped = torch.func.vmap(apply_dropout if compiled else gradient, randomness=randomness)
        return (torch.compile(mapped, fullgraph=True, backend="aot_eager") if compiled else mapped)(
            torch.ones(3, 40, 70)
        )

    different, same = masks("different"), masks("same")
    assert 0.4 < different.mean() < 0.6
    assert not torch.equal(different[0], different[1])
    assert not torch.equal(different[1], different[2])
    assert torch.equal(same[0], same[1])
    if not compiled:
        with pytest.raises(RuntimeError, match="randomness"):
            masks("error")


def test_vmap_of_keep_mask_equals_a_loop():
    def mask(seed):
        return keep_mask(seed, 0.3, 20, 40, row_base=5)

    seeds = torch.stack([draw(torch.empty(0)) for _ in range(3)])
    expected = torch.stack([mask(seed) for seed in seeds])
    for in_dim, batch in ((0, seeds), (1, seeds.T.contiguous())):
        assert torch.equal(torch.func.vmap(mask, in_dims=in_dim)(batch), expected)


def test_opcheck():
    # This tag keeps torch's partitioner from drawing again in backward.
    assert torch.Tag.nondeterministic_seeded in torch.ops.ckptkern.rng_state.default.tags
    torch.library.opcheck(torch.ops.ckptkern.rng_state, (torch.empty(0),))
    torch.library.opcheck(torch.ops.ckptkern.keep_mask, (torch.tensor(KEY_STREAM), 1000, 3, 37, 70, 2, 5, 9, 60))


@pytest.mark.gpu
def test_cuda_masks_and_draws():
    seed = torch.tensor(KEY_STREAM)
    for place in PLACES:
        on_cpu = torch.ops.ckptkern.keep_mask(seed, 30_000, *place)
        on_gpu = torch.ops.ckptkern.keep_mask(seed.cuda(), 30_000, *place)
        assert torch.equal(on_cpu, on_gpu.cpu())
    like = torch.empty(0, device="cuda")
    torch.manual_seed(5)
    first, second = draw(like), draw(like)
    torch.manual_seed(5)
    assert torch.equal(draw(like), first)
    assert not torch.equal(first, second)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = draw(like)
    replays = []
    for _ in range(2):
        graph.replay()
        replays.append(captured.clone())
    assert not torch.equal(*replays)


# --- precision

matmul, conv, onednn = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul
float32, set_float32 = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter


def attribute(owner, name):
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def of_device(device, get, set_value):
    return lambda: get(device), lambda value: set_value(device, value)


enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
autocast_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
# name: (get, set, one value, another)
SETTINGS = {
    "autocast cpu": (*of_device("cpu", *enabled), True, False),
    "autocast cuda": (*of_device("cuda", *enabled), True, False),
    "autocast cpu dtype": (*of_device("cpu", *autocast_dtype), torch.float16, torch.bfloat16),
    "autocast mps dtype": (*of_device("mps", *autocast_dtype), torch.bfloat16, torch.float16),
    "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False, True),
    "cuda matmul fp32": (*attribute(matmul, "fp32_precision"), "tf32", "ieee"),
    "cuda conv fp32": (*attribute(conv, "fp32_precision"), "ieee", "tf32"),
    "oneDNN matmul fp32": (*attribute(onednn, "fp32_precision"), "bf16", "ieee"),
    "fp16 reduction": (
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
        attribute(matmul, "allow_fp16_reduced_precision_reduction")[1],
        (False, True),
        (True, True),
    ),
    "bf16 reduction": (
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
        attribute(matmul, "allow_bf16_reduced_precision_reduction")[1],
        (False, False),
        (True, True),
    ),
    "fp16 accumulation": (*attribute(matmul, "allow_fp16_accumulation"), True, False),
    "math SDP reduction": (
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp,
        True,
        False,
    ),
    "deterministic": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        (True, True),
        (True, False),
    ),
}


@pytest.fixture(autouse=True)
def _settings_given_back():
    """Restores the raw settings that a test has changed, without the code under test."""
    before = {name: get() for name, (get, *_) in SETTINGS.items()}
    parents = [("generic", "all"), ("cuda", "all")]
    unset = [("cuda", "matmul"), ("mkldnn", "matmul"), ("mkldnn", "all")]
    held = {key: float32(*key) for key in parents + unset}
    yield
    for key in parents:
        set_float32(*key, held[key])
    for name, (get, set_value, *_) in SETTINGS.items():
        if get() != before[name]:
            set_value(before[name])
    for key in unset:
        set_float32(*key, held[key])


@pytest.mark.parametrize("name", SETTINGS)
def test_guard_sets_and_gives_back(name):
    """After an error too, and in another thread."""
    get, set_value, inner, outer = SETTINGS[name]
    set_value(inner)
    snapshot = Precision()
    set_value(outer)

    def seen():
        values = [get()]
        for error in (False, True):
            with contextlib.suppress(ZeroDivisionError), snapshot:
                values.append(get())
                if error:
                    raise ZeroDivisionError
            values.append(get())
        return values

    assert seen() == [outer, inner, outer, inner, outer]
    with ThreadPoolExecutor(1) as pool:
        own, *values = pool.submit(seen).result()
    assert values == [inner, own, inner, own]
    assert get() == outer


def test_guards_nest_and_reenter():
    get, set_value, tf32, ieee = SETTINGS["cuda matmul fp32"]
    set_value(tf32)
    with torch.autocast("cpu", torch.bfloat16):
        high = Precision()
    set_value(ieee)
    low = Precision()
    seen = []

    def enter(*guards):
        seen.append((get(), torch.is_autocast_enabled("cpu")))
        if guards:
            with guards[0]:
                enter(*guards[1:])
            seen.append((get(), torch.is_autocast_enabled("cpu")))

    for _ in range(2):
        seen.clear()
        enter(high, low, high, high)
        upper, lower = (tf32, True), (ieee, False)
        assert seen == [lower, upper, lower, upper, upper, upper, lower, upper, lower]
    with pytest.raises(RuntimeError, match="last entered first"):
        high.__exit__(None, None, None)
    with high, low, pytest.raises(RuntimeError, match="last entered first"):
        high.__exit__(None, None, None)


@pytest.mark.parametrize("first_out", [0, 1])
@pytest.mark.parametrize("second_differs", [False, True])
def test_overlapping_threads_end_where_they_began(first_out, second_differs):
    get, set_value, tf32, ieee = SETTINGS["cuda matmul fp32"]
    set_value(tf32)
    guards = [Precision()] * 2
    set_value(ieee)
    if second_differs:
        guards[1] = Precision()
    inside = ieee if second_differs else tf32
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as other:
        threads = first, other
        for thread, guard in zip(threads, guards, strict=True):
            thread.submit(guard.__enter__).result()
        assert get() == inside
        threads[first_out].submit(guards[first_out].__exit__, None, None, None).result()
        if first_out == 0:  # the one still inside has what it asked for
            assert get() == inside
        threads[1 - first_out].submit(guards[1 - first_out].__exit__, None, None, None).result()
    assert get() == ieee


def resolved_under_every_parent():
    """How the fp32 precision settings depend on each other, which tells an inherited value from an equal one."""
    parents = [("generic", "all"), ("cuda", "all"), ("mkldnn", "all")]
    leaves = [(backend, op) for backend in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn")]
    held = float32("generic", "all")
    answers = [float32(*leaf) for leaf in leaves]
    for generic in ("none", "ieee", "tf32"):
        set_float32("generic", "all", generic)
        answers += [float32(*leaf) for leaf in parents + leaves]
    set_float32("generic", "all", held)
    return answers


@pytest.mark.parametrize(
    "between",
    [
        {("generic", "all"): "tf32"},
        {("cuda", "all"): "tf32"},
        {("generic", "all"): "tf32", ("cuda", "all"): "tf32"},
        {("generic", "all"): "tf32", ("cuda", "matmul"): "ieee", ("mkldnn", "conv"): "tf32"},
        {("mkldnn", "matmul"): "bf16", ("cuda", "rnn"): "none"},
    ],
    ids=str,
)
def test_inherited_precision_stays_inherited(between):
    snapshot = Precision()
    before = float32("cuda", "rnn")
    for key, value in between.items():
        set_float32(*key, value)
    try:
        expected = resolved_under_every_parent()
        with snapshot:
            assert float32("cuda", "matmul") in ("none", "ieee")
            assert float32("cuda", "conv") == "tf32"
            assert float32("mkldnn", "matmul") in ("none", "ieee")
        assert resolved_under_every_parent() == expected
    finally:
        for key in between:
            set_float32(*key, before if key == ("cuda", "rnn") else "none")


def test_older_interface_still_reads_after_the_guard():
    snapshot = Precision()
    torch.set_float32_matmul_precision("high")
    try:
        with snapshot:
            assert matmul.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "high"
        assert matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")


def test_cast_weights_do_not_outlive_the_guard():
    """Autocast's cache of cast weights is emptied when the outermost region ends, also if that region is the guard."""
    with torch.autocast("cpu", torch.bfloat16):
        snapshot = Precision()
    weight, x = torch.ones(4, 4, requires_grad=True), torch.ones(1, 4)
    for expected in (16, 32):
        with snapshot:
            y = torch.nn.functional.linear(x, weight)
        assert (y.dtype, y.sum()) == (torch.bfloat16, expected)
        weight.data.mul_(2)


# -- observe -----------------------------------------------------------------------------------------------------------


def test_what_observes_a_call_is_as_torchs_own_queries_say():
    x, w = torch.randn(3), torch.nn.Parameter(torch.randn(3))
    bits = {}

    def inside(name, tensors=(x,)):
        bits[name] = Observed(observe(tensors) & (1 << NEEDS) - 1)
        return bits[name]

    assert inside("nothing") == Observed(0)
    assert torch.func.grad(lambda t: (inside("transform", (t,)), t.sum())[1])(x) is not None
    assert inside("after") == Observed(0)
    with FlopCounterMode(display=False):
        inside("mode")
    with torch.autograd.profiler.profile():
        inside("profiler")
    with torch.autograd.graph.save_on_cpu():
        inside("hooks")
    with torch.autocast("cpu", torch.bfloat16):
        inside("autocast")
    y = (x * w).sum()
    y.register_hook(lambda grad: inside("backward") and None)
    y.backward()
    marked = torch.nn.Parameter(torch.randn(3))
    marked.main_grad = torch.zeros(3)
    inside("main_grad", (x, None, marked))
    inside("subclass", (x, Plain(x)))
    expected = {
        "nothing": 0, "after": 0, "transform": Observed.TRANSFORMS | Observed.WRAPPED, "mode": Observed.MODES,
        "profiler": Observed.PROFILER, "hooks": Observed.HOOKS, "autocast": Observed.AUTOCAST, "backward": Observed.BACKWARD,
        "main_grad": Observed.MAIN_GRAD, "subclass": Observed.SUBCLASS,
    }  # fmt: skip
    assert bits == {name: Observed(value) for name, value in expected.items()}


class Plain(torch.Tensor):
    pass


def test_observe_says_which_tensors_need_a_gradient():
    needs = [torch.zeros(1, requires_grad=i % 3 == 0) if i % 2 else None for i in range(MOST_NEEDS)]
    expected = sum(1 << i for i, t in enumerate(needs) if t is not None and t.requires_grad)
    assert observe(needs) >> NEEDS == expected
    assert observe(tuple(needs)) >> NEEDS == expected
    with torch.no_grad():
        assert observe(needs) >> NEEDS == 0
    with pytest.raises(TypeError, match="tensors and None, not int"):
        observe((1,))


def test_a_batch_of_gradients_is_observed():
    x, seen = torch.randn(3, requires_grad=True), []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, dy):
            seen.append(Observed(observe((dy,)) & (1 << NEEDS) - 1))
            return 2 * ctx.saved_tensors[0] * dy

    torch.autograd.grad(Square.apply(x), x, torch.ones(2, 3), is_grads_batched=True)
    assert seen == [Observed.BATCHED | Observed.BACKWARD]


# -- layer_fits --------------------------------------------------------------------------------------------------------


def test_a_layer_fits_where_nothing_is_wrong_with_it():
    x, w, b = torch.randn(3, 8), torch.nn.Parameter(torch.randn(5, 8)), torch.randn(5)
    meta = w.detach().to("meta")
    subclass = torch.masked.masked_tensor(torch.randn(5, 8), torch.ones(5, 8, dtype=torch.bool))
    fit = (x, w, b, 8), (x, w, None, 8), (x, w.bfloat16(), b.double(), 8), (x.to("meta"), meta, meta[:, 0], 8)
    wrong_weights = None, [1.0], w[0], w.t(), torch.randn(2, 5, 8), w.int(), w.to_sparse(), meta, subclass
    wrong_biases = [1.0], b[None], torch.randn(8), b[0], b.int(), b.to_sparse(), meta[:, 0]
    wrong = [(x, weight, b, 8) for weight in wrong_weights] + [(x, w, bias, 8) for bias in wrong_biases]
    wrong += (x, w, b, 7), (x, w, b, 8.0), ([1.0], w, b, 8)
    assert [arguments for arguments in fit if not layer_fits(*arguments)] == (
        [] if state.LOADED.module else list(fit)
    )  # Python is never sure
    assert [arguments for arguments in wrong if layer_fits(*arguments)] == []


@pytest.mark.parametrize(
    "kernels",
    [
        [SDPBackend.MATH],
        [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
        [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    ],
    ids=str,
)
def test_attention_kernels_are_those_of_the_snapshot(kernels):
    """Which ones may run, and the order in which they are tried."""

    def current():
        allowed = [
            torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled(),
        ]  # fmt: skip
        return allowed, torch._C._get_sdp_priority_order()

    before = current()
    with sdpa_kernel(kernels, set_priority=True):
        inside, snapshot = current(), state.Precision()
    assert current() == before != inside
    with snapshot:
        assert current() == inside
    assert current() == before
