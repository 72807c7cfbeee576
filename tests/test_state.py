"""State of a region: Philox, masks, the draw in every mode of torch, the precision guard."""

import sys
import threading
import types

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ckptkern import state
from ckptkern.state import (
    MOST_NEEDS,
    NEEDS,
    Observed,
    Precision,
    draw,
    keep_mask,
    layer_fits,
    observe,
    philox4x32_10,
    threshold_scale,
)

KEY_STREAM = (-0x1234_5678_9ABC_DEF0, 0x0FED_CBA9_8765_4321)


# --- Philox and the layout, against a slow reference in Python integers


def reference_philox(key: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key % 2**32, key // 2**32 % 2**32
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def reference_value(key: int, stream: int, plane: int, row: int, col: int, total_rows: int) -> int:
    """The 16-bit value of one element, by the layout as csrc/philox.h describes it: eight values per call."""
    c0 = 8 * (col // 32) + col % 8
    c1 = 8 * (plane * ((total_rows + 15) // 16) + row // 16) + row % 8
    words = reference_philox(key % 2**64, (c0 % 2**32, c1 % 2**32, stream % 2**32, stream // 2**32 % 2**32))
    return words[col // 8 % 4] >> (16 * (row // 8 % 2)) & 0xFFFF


@pytest.mark.parametrize("philox", [philox4x32_10, reference_philox], ids=["extension", "reference"])
def test_philox_known_answers(philox):
    # The three vectors of Random123's kat_vectors.
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


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("mask_of", ["extension", "torch ops"])
def test_layout(place, mask_of):
    planes, rows, cols, plane_base, row_base, col_base, total_rows = place
    kernel = torch.ops.ckptkern.keep_mask if mask_of == "extension" else state._keep_mask_torch
    threshold = 30_000
    mask = kernel(torch.tensor(KEY_STREAM), threshold, *place)
    expected = torch.tensor(
        [
            [
                [
                    reference_value(*KEY_STREAM, plane_base + z, row_base + r, col_base + c, total_rows) >= threshold
                    for c in range(cols)
                ]
                for r in range(rows)
            ]
            for z in range(planes)
        ]
    )
    assert mask.dtype == torch.bool
    assert torch.equal(mask, expected)


def test_parts_are_parts_of_the_whole():
    seed = draw(torch.empty(0))
    whole = keep_mask(seed, 0.4, 100, 130, planes=3)
    for z, r, c in [(0, 0, 0), (1, 17, 1), (2, 99, 129), (1, 8, 64)]:
        part = keep_mask(
            seed, 0.4, 100 - r, 130 - c, planes=3 - z, plane_base=z, row_base=r, col_base=c, total_rows=100
        )
        assert torch.equal(part, whole[z:, r:, c:])
    assert torch.equal(keep_mask(seed, 0.4, 100, 130), whole[0])


def test_threads_do_not_change_the_mask():
    seed, before = draw(torch.empty(0)), torch.get_num_threads()
    masks = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            masks.append(keep_mask(seed, 0.5, 500, 1000))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 4), (2, 4, 0)], ids=str)
@pytest.mark.parametrize("kernel", [torch.ops.ckptkern.keep_mask, state._keep_mask_torch], ids=["C++", "torch ops"])
def test_empty(shape, kernel):
    mask = kernel(torch.tensor(KEY_STREAM), 100, *shape, 0, 3, 5, 16)
    assert mask.shape == shape
    assert mask.dtype == torch.bool


def test_strided_state():
    seeds = torch.tensor([[KEY_STREAM[0], 7], [KEY_STREAM[1], 9]])
    assert torch.equal(keep_mask(seeds[:, 0], 0.5, 20, 40), keep_mask(torch.tensor(KEY_STREAM), 0.5, 20, 40))


# --- statistics

SIDE = 1024
SIGMAS = 5  # each bound is missed by chance once in 1.7 million


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1 / 65536])
def test_keep_rate(p):
    mask = keep_mask(draw(torch.empty(0)), p, SIDE, SIDE, planes=4)
    saved, n = mask.sum().item(), mask.numel()
    assert abs(saved - n * (1 - p)) <= SIGMAS * (n * p * (1 - p)) ** 0.5


def signs(seed: torch.Tensor, planes: int = 1) -> torch.Tensor:
    return keep_mask(seed, 0.5, SIDE, SIDE, planes=planes).float() * 2 - 1


@pytest.mark.parametrize("dim", [1, 2], ids=["rows", "columns"])
@pytest.mark.parametrize("lag", [1, 2, 4, 7, 8, 16, 24, 32, 64, 512])
def test_rows_and_columns_do_not_correlate(dim, lag):
    x = signs(draw(torch.empty(0)))
    matmuls = x.narrow(dim, lag, SIDE - lag) * x.narrow(dim, 0, SIDE - lag)
    assert abs(matmuls.sum().item()) <= SIGMAS * matmuls.numel() ** 0.5


def test_planes_and_seeds_do_not_correlate():
    seed = draw(torch.empty(0))
    planes, other = signs(seed, 4), signs(draw(torch.empty(0)), 4)
    near_key = signs(seed + torch.tensor([1, 0]), 4)
    near_stream = signs(seed + torch.tensor([0, 1]), 4)
    pairs = [
        (planes[:-1], planes[1:]),
        (planes[0], planes[3]),
        (planes, other),
        (planes, near_key),
        (planes, near_stream),
    ]
    for a, b in pairs:
        assert abs((a * b).sum().item()) <= SIGMAS * a.numel() ** 0.5


def test_values_are_uniform():
    """The 65,536 values of the low and of the high halves, in 256 bins: chi-square with 255 degrees of freedom."""
    seed = torch.tensor(KEY_STREAM)
    thresholds = range(256, 65536, 256)
    saved = [keep_mask(seed, t / 65536, 512, 512).view(-1, 2, 8, 512).sum((0, 2, 3)) for t in thresholds]
    at_least = torch.stack([torch.full((2,), 512 * 256), *saved, torch.zeros(2, dtype=torch.long)])
    counts = at_least[:-1] - at_least[1:]
    expected = 512 * 256 / 256
    chi2 = ((counts - expected) ** 2 / expected).sum(0)
    assert counts.shape == (256, 2)
    assert ((chi2 > 255 - 5 * 510**0.5) & (chi2 < 255 + 5 * 510**0.5)).all(), chi2


# --- probability


def test_threshold_scale():
    assert threshold_scale(0.0) == (0, 1.0)
    assert threshold_scale(1.0) == (65536, 0.0)
    assert threshold_scale(0.5) == (32768, 2.0)
    assert threshold_scale(0.1) == (6554, 65536 / 58982)
    assert threshold_scale(0.25 / 65536) == (0, 1.0)


@pytest.mark.parametrize("p", [-1e-9, 1.0001, float("nan")])
def test_probability_out_of_range(p):
    with pytest.raises(ValueError, match=r"probability must lie in \[0, 1\] but is"):
        keep_mask(torch.tensor(KEY_STREAM), p, 2, 2)


@pytest.mark.parametrize("kernel", [torch.ops.ckptkern.keep_mask, state._keep_mask_torch], ids=["C++", "torch ops"])
def test_probability_edges(kernel):
    arguments = 2, 64, 64, 0, 0, 0, 64
    assert kernel(torch.tensor(KEY_STREAM), 0, *arguments).all()
    assert not kernel(torch.tensor(KEY_STREAM), 65536, *arguments).any()


def test_wrong_arguments_raise():
    seed, op = torch.tensor(KEY_STREAM), torch.ops.ckptkern.keep_mask
    with pytest.raises(RuntimeError, match=r"threshold must lie in \[0, 65536\] but is 65537"):
        op(seed, 65537, 1, 2, 2, 0, 0, 0, 2)
    with pytest.raises(RuntimeError, match="total_rows=9 is less than row_base \\+ rows = 10"):
        op(seed, 1, 1, 2, 2, 0, 8, 0, 9)
    with pytest.raises(RuntimeError, match="must not be negative but are planes=1, rows=2, cols=2, plane_base=-1"):
        op(seed, 1, 1, 2, 2, -1, 0, 0, 2)
    for wrong in (seed.int(), seed[:1], seed[None]):
        with pytest.raises(RuntimeError, match="state must be a CPU int64 tensor of shape"):
            op(wrong, 1, 1, 2, 2, 0, 0, 0, 2)


# --- the draw


def test_draw_is_torch_randint():
    torch.manual_seed(11)
    seeds = [draw(torch.empty(3, dtype=torch.bfloat16)) for _ in range(3)]
    torch.manual_seed(11)
    expected = [torch.randint(-(2**63), 2**63 - 1, (2,)) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(seeds, expected, strict=True))
    assert not torch.equal(seeds[0], seeds[1])
    assert seeds[0].dtype == torch.int64


def test_draw_leaves_the_generator_where_randint_does():
    torch.manual_seed(11)
    rng = torch.get_rng_state()
    first = draw(torch.empty(0))
    after = torch.get_rng_state()
    torch.set_rng_state(rng)
    assert torch.equal(draw(torch.empty(0)), first)
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(after, rng)


def test_draw_covers_64_bits():
    seeds = torch.stack([draw(torch.empty(0)) for _ in range(256)])
    for bit in range(64):
        ones = (seeds >> bit & 1).sum().item()
        assert abs(ones - 256) <= SIGMAS * 512**0.5 / 2, f"bit {bit}"


def two_dropouts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first = keep_mask(draw(x), 0.5, *x.shape)
    second = keep_mask(draw(x), 0.5, *x.shape)
    return x * first, x * second


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled(backend, dynamic):
    compiled = torch.compile(two_dropouts, fullgraph=True, backend=backend, dynamic=dynamic)
    for shape in [(40, 70), (41, 99)] if dynamic else [(40, 70)]:
        x = torch.rand(shape, requires_grad=True)
        torch.manual_seed(3)
        a, b = compiled(x)
        torch.manual_seed(3)
        expected_a, expected_b = two_dropouts(x)
        assert not torch.equal(a, b)
        assert torch.equal(a, expected_a)
        assert torch.equal(b, expected_b)
        (dx,) = torch.autograd.grad(a.sum() + 2 * b.sum(), x)
        assert torch.equal(dx, (a != 0) + 2.0 * (b != 0))


def dropout_sum(x: torch.Tensor) -> torch.Tensor:
    return (x * keep_mask(draw(x), 0.5, *x.shape)).sum()


def test_func_grad():
    x = torch.ones(40, 70)
    torch.manual_seed(3)
    dx = torch.func.grad(dropout_sum)(x)
    torch.manual_seed(3)
    assert torch.equal(dx, keep_mask(draw(x), 0.5, 40, 70).float())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_vmap(compiled):
    x = torch.ones(3, 40, 70)

    def dropped(x):
        return x * keep_mask(draw(x), 0.5, *x.shape)

    def masks(randomness):
        if compiled:
            return torch.compile(torch.func.vmap(dropped, randomness=randomness), fullgraph=True)(x)
        return torch.func.vmap(torch.func.grad(dropout_sum), randomness=randomness)(x)

    different, same = masks("different"), masks("same")
    assert 0.4 < different.mean() < 0.6
    assert not torch.equal(different[0], different[1])
    assert not torch.equal(different[1], different[2])
    assert torch.equal(same[0], same[1])
    if not compiled:
        with pytest.raises(RuntimeError, match="randomness"):
            masks("error")


def test_vmap_of_keep_mask_equals_a_loop():
    seeds = torch.stack([draw(torch.empty(0)) for _ in range(3)])
    expected = torch.stack([keep_mask(seed, 0.3, 20, 40, row_base=5) for seed in seeds])
    for in_dim, batch in ((0, seeds), (1, seeds.T.contiguous())):
        batched = torch.func.vmap(lambda seed: keep_mask(seed, 0.3, 20, 40, row_base=5), in_dims=in_dim)(batch)
        assert torch.equal(batched, expected)


def test_opcheck():
    # This tag keeps torch's partitioner from drawing again in backward.
    assert torch.Tag.nondeterministic_seeded in torch.ops.ckptkern.rng_state.default.tags
    torch.library.opcheck(torch.ops.ckptkern.rng_state, (torch.empty(0),))
    torch.library.opcheck(torch.ops.ckptkern.keep_mask, (torch.tensor(KEY_STREAM), 1000, 3, 37, 70, 2, 5, 9, 60))


def test_meta_device():
    seed = draw(torch.empty(0, device="meta"))
    mask = keep_mask(seed, 0.5, 7, 9)
    assert (seed.device.type, seed.shape, seed.dtype) == ("meta", (2,), torch.int64)
    assert (mask.device.type, mask.shape, mask.dtype) == ("meta", (7, 9), torch.bool)


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

# name: (get, set, one value, another)
SETTINGS = {
    "autocast cpu": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda value: torch.set_autocast_enabled("cpu", value),
        True,
        False,
    ),
    "autocast cuda": (
        lambda: torch.is_autocast_enabled("cuda"),
        lambda value: torch.set_autocast_enabled("cuda", value),
        True,
        False,
    ),
    "autocast cpu dtype": (
        lambda: torch.get_autocast_dtype("cpu"),
        lambda value: torch.set_autocast_dtype("cpu", value),
        torch.float16,
        torch.bfloat16,
    ),
    "autocast mps dtype": (
        lambda: torch.get_autocast_dtype("mps"),
        lambda value: torch.set_autocast_dtype("mps", value),
        torch.bfloat16,
        torch.float16,
    ),
    "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False, True),
    "cuda matmul fp32": (
        lambda: matmul.fp32_precision,
        lambda value: setattr(matmul, "fp32_precision", value),
        "tf32",
        "ieee",
    ),
    "cuda conv fp32": (
        lambda: conv.fp32_precision,
        lambda value: setattr(conv, "fp32_precision", value),
        "ieee",
        "tf32",
    ),
    "oneDNN matmul fp32": (
        lambda: onednn.fp32_precision,
        lambda value: setattr(onednn, "fp32_precision", value),
        "bf16",
        "ieee",
    ),
    "fp16 reduction": (
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
        lambda value: setattr(matmul, "allow_fp16_reduced_precision_reduction", value),
        (False, True),
        (True, True),
    ),
    "bf16 reduction": (
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
        lambda value: setattr(matmul, "allow_bf16_reduced_precision_reduction", value),
        (False, False),
        (True, True),
    ),
    "fp16 accumulation": (
        lambda: matmul.allow_fp16_accumulation,
        lambda value: setattr(matmul, "allow_fp16_accumulation", value),
        True,
        False,
    ),
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
    float32 = torch._C._get_fp32_precision_getter
    before = {name: get() for name, (get, *_) in SETTINGS.items()}
    generic, every = float32("generic", "all"), float32("cuda", "all")
    unset = {key: float32(*key) for key in [("cuda", "matmul"), ("mkldnn", "matmul"), ("mkldnn", "all")]}
    yield
    torch._C._set_fp32_precision_setter("generic", "all", generic)
    torch._C._set_fp32_precision_setter("cuda", "all", every)
    for name, (get, set_value, *_) in SETTINGS.items():
        if get() != before[name]:
            set_value(before[name])
    for key, value in unset.items():
        torch._C._set_fp32_precision_setter(*key, value)


class BodyError(Exception):
    pass


@pytest.mark.parametrize("name", SETTINGS)
def test_guard_sets_and_gives_back(name):
    get, set_value, inner, outer = SETTINGS[name]
    set_value(inner)
    snapshot = Precision()
    set_value(outer)
    assert get() == outer
    with snapshot:
        assert get() == inner
    assert get() == outer

    def body():
        with snapshot:
            assert get() == inner
            raise BodyError

    with pytest.raises(BodyError):
        body()
    assert get() == outer


@pytest.mark.parametrize("name", SETTINGS)
def test_guard_in_another_thread(name):
    get, set_value, inner, outer = SETTINGS[name]
    set_value(inner)
    snapshot = Precision()
    set_value(outer)
    seen = []

    def work():
        seen.append(get())
        with snapshot:
            seen.append(get())
        seen.append(get())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen[1] == inner
    assert seen[0] == seen[2]
    assert get() == outer


def test_guards_nest_and_reenter():
    get, set_value, tf32, ieee = SETTINGS["cuda matmul fp32"]
    set_value(tf32)
    with torch.autocast("cpu", torch.bfloat16):
        high = Precision()
    set_value(ieee)
    low = Precision()

    def seen():
        return get(), torch.is_autocast_enabled("cpu")

    for _ in range(2):
        with high:
            assert seen() == (tf32, True)
            with low:
                assert seen() == (ieee, False)
                with high:
                    assert seen() == (tf32, True)
                    with high:
                        assert seen() == (tf32, True)
                    assert seen() == (tf32, True)
                assert seen() == (ieee, False)
            assert seen() == (tf32, True)
        assert seen() == (ieee, False)


@pytest.mark.parametrize("first_out", [0, 1])
@pytest.mark.parametrize("second_differs", [False, True])
def test_overlapping_threads_end_where_they_began(first_out, second_differs):
    get, set_value, tf32, ieee = SETTINGS["cuda matmul fp32"]
    set_value(tf32)
    first = second = Precision()
    if second_differs:
        set_value(ieee)
        second = Precision()
    set_value(ieee)
    wanted = [threading.Event(), threading.Event()]
    left = [threading.Event(), threading.Event()]
    entered = [threading.Event(), threading.Event()]

    def work(index, snapshot):
        with snapshot:
            entered[index].set()
            wanted[index].wait(10)
        left[index].set()

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate((first, second))]
    for thread, event in zip(threads, entered, strict=True):
        thread.start()
        assert event.wait(10)
    inside = ieee if second_differs else tf32
    assert get() == inside
    wanted[first_out].set()
    assert left[first_out].wait(10)
    if first_out == 0:  # the one still inside saves what it asked for
        assert get() == inside
    wanted[1 - first_out].set()
    for thread in threads:
        thread.join(10)
    assert get() == ieee


def resolved_under_every_parent() -> list[str]:
    """How the fp32 precision settings depend on each other, which tells an inherited value from an equal one."""
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    parents = [("generic", "all"), ("cuda", "all"), ("mkldnn", "all")]
    leaves = [(backend, op) for backend in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn")]
    held = read("generic", "all"), read("cuda", "all"), read("mkldnn", "all")
    answers = [read(*leaf) for leaf in leaves]
    for generic in ("none", "ieee", "tf32"):
        write("generic", "all", generic)
        answers += [read(*leaf) for leaf in parents + leaves]
    write("generic", "all", held[0])
    return answers


@pytest.mark.parametrize(
    "between",
    [
        {("generic", "all"): "tf32"},
        {("generic", "all"): "ieee"},
        {("generic", "all"): "bf16"},
        {("cuda", "all"): "tf32"},
        {("cuda", "all"): "tf32", ("cuda", "matmul"): "tf32"},
        {("generic", "all"): "tf32", ("cuda", "all"): "tf32"},
        {("generic", "all"): "tf32", ("cuda", "matmul"): "ieee", ("mkldnn", "conv"): "tf32"},
        {("mkldnn", "matmul"): "bf16", ("cuda", "rnn"): "none"},
    ],
    ids=str,
)
def test_inherited_precision_stays_inherited(between):
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    snapshot = Precision()
    before = read("cuda", "rnn")
    for key, value in between.items():
        write(*key, value)
    try:
        expected = resolved_under_every_parent()
        with snapshot:
            assert read("cuda", "matmul") in ("none", "ieee")
            assert read("cuda", "conv") == "tf32"
            assert read("mkldnn", "matmul") in ("none", "ieee")
        assert resolved_under_every_parent() == expected
    finally:
        for key in between:
            write(*key, before if key == ("cuda", "rnn") else "none")


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
    weight = torch.ones(4, 4, requires_grad=True)
    x = torch.ones(1, 4)
    with snapshot:
        assert torch.nn.functional.linear(x, weight).sum() == 16
    weight.data.mul_(2)
    with snapshot:
        y = torch.nn.functional.linear(x, weight)
    assert y.dtype == torch.bfloat16
    assert y.sum() == 32


def test_guards_left_in_the_wrong_order_raise():
    one, two = Precision(), Precision()
    with pytest.raises(RuntimeError, match="last entered first"):
        one.__exit__(None, None, None)
    with one, two, pytest.raises(RuntimeError, match="last entered first"):
        one.__exit__(None, None, None)


def test_snapshot_tells_what_it_holds():
    matmul.fp32_precision = "tf32"
    torch.use_deterministic_algorithms(True)
    with torch.autocast("cpu", torch.bfloat16):
        snapshot = Precision()
    torch.use_deterministic_algorithms(False)
    assert snapshot.autocast_dtype("cpu") == torch.bfloat16
    assert snapshot.autocast_dtype("cuda") is None
    assert snapshot.fp32_precision("cuda", "matmul") == "tf32"
    assert snapshot.fp32_precision("mkldnn", "conv") == "ieee"
    assert snapshot.deterministic
    assert not Precision().deterministic
    with pytest.raises(RuntimeError, match="but they are 'cuda' and 'mul'"):
        snapshot.fp32_precision("cuda", "mul")


# --- the extension itself


def test_missing_extension_says_how_to_build_it(monkeypatch):
    monkeypatch.delattr("ckptkern._C")
    monkeypatch.setitem(sys.modules, "ckptkern._C", None)
    with pytest.raises(ImportError, match=r"ckptkern\._C cannot be loaded.*pip install --no-build-isolation \."):
        state._load_extension()


def test_stale_extension_says_how_to_build_it(monkeypatch):
    stale = types.ModuleType("ckptkern._C")
    stale.torch_version = "2.9.1+cpu"
    monkeypatch.setattr("ckptkern._C", stale)
    monkeypatch.setitem(sys.modules, "ckptkern._C", stale)
    with pytest.raises(ImportError, match=r"was built for torch 2\.9\.1\+cpu\. .*pip install --no-build-isolation \."):
        state._load_extension()


def test_extension_info():
    info = state.extension_info()
    assert "_C" in info["path"]
    assert info["built for torch"].split(".")[:2] == torch.__version__.split(".")[:2]


# -- observe -----------------------------------------------------------------------------------------------------------


def test_what_observes_a_call_is_as_torchs_own_queries_say():
    x, w = torch.randn(3), torch.nn.Parameter(torch.randn(3))
    bits = {}

    def inside(name: str, tensors=(x,)) -> Observed:
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
    assert all(layer_fits(x, *one, 8) for one in ((w, b), (w, None), (w.bfloat16(), b.double())))
    meta = torch.empty(5, 8, device="meta")
    subclass = torch.masked.masked_tensor(torch.randn(5, 8), torch.ones(5, 8, dtype=torch.bool))
    weights = (None, [1.0], w[0], w.t(), torch.randn(2, 5, 8), w.int(), w.to_sparse(), meta, subclass)
    biases = ([1.0], torch.randn(1, 5), torch.randn(8), torch.tensor(1.0), b.int(), b.to_sparse(), meta[:, 0])
    assert not any(layer_fits(x, weight, b, 8) for weight in weights)
    assert not any(layer_fits(x, w, bias, 8) for bias in biases)
    assert not any(layer_fits(*one) for one in ((x, w, b, 7), (x, w, b, 8.0), ([1.0], w, b, 8)))
    assert layer_fits(x.to("meta"), meta, meta[:, 0], 8)
