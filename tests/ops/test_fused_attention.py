"""torch's own attention kernels behind the core, each in float64 by what torch documents of it, against the reference."""

import itertools
import math

import pytest
import torch
from support.aten_attention import Aten

from ckptkern import eager
from ckptkern.eager import fused_attention
from ckptkern.ops.attention import core as attention_core

FLOAT = torch.float64


def packed(q: list[int], k: list[int], max_q: int, max_k: int) -> dict:
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32) for ends in (q, k))
    return dict(cu_q=cu_q, cu_k=cu_k, max_q=max_q, max_k=max_k)


def hides_padding(*outer: int) -> torch.Tensor:
    mask = torch.ones(*outer, 20, dtype=torch.int8)
    mask[0, ..., 13:] = 0
    return mask


def of_two_rows(low: float) -> torch.Tensor:
    """Added to the scores; it hides all of the first row, and by -inf a part of the second."""
    mask = torch.linspace(-1, 1, 2 * 20 * 20, dtype=FLOAT).view(2, 1, 20, 20)
    mask[:, :, 0], mask[:, :, 1, 5:] = low, -math.inf
    return mask


def one_row_sees_nothing() -> torch.Tensor:
    mask = hides_padding(2, 1, 20)
    mask[1, 0, 3] = 0
    return mask


CAUSAL, ALL = {"window": (None, 0)}, {}
BOTH_ENDS = packed(
    [2, 5, 5, 14, 17], [1, 4, 9, 15, 17], 9, 6
)  # rows before, after; an empty one; fewer keys than queries
TOO_LONG = packed([2, 5, 5, 14, 17], [1, 4, 9, 15, 19], 4, 3)
WHOLE = packed([2, 5, 5, 14, 17], [1, 4, 9, 15, 17], 20, 20)
OWN_KEYS = BOTH_ENDS | {"cu_k": BOTH_ENDS["cu_q"], "max_q": 4, "max_k": 4}
MASKS = {
    "padding": lambda: {"mask": hides_padding(2, 1, 1)},
    "a mask of every row": lambda: {"mask": one_row_sees_nothing()},
    "a column": lambda: {"mask": one_row_sees_nothing()[..., :1].contiguous()},
    "an additive mask": lambda: {"mask": of_two_rows(-math.inf)},
}
CASES = {  # what each kernel is chosen for
    "cudnn": {"all": lambda: ALL, "causal": lambda: CAUSAL} | MASKS,
    "efficient": {"all": lambda: ALL, "causal": lambda: CAUSAL} | MASKS,
    "flash": {
        name: lambda options=options: options
        for name, options in {
            "all": ALL, "causal": CAUSAL, "left": {"window": (3, 0)}, "right": {"window": (None, 2)},
            "both sides": {"window": (3, 2)}, "later columns": {"window": (2, None)}, "wide": {"window": (2**40, 2)},
            "packed": BOTH_ENDS, "packed, causal": BOTH_ENDS | CAUSAL, "packed, window": BOTH_ENDS | {"window": (2, 1)},
            "packed, right bound beyond the keys": BOTH_ENDS | {"window": (None, 6)},
            "packed, left bound alone": BOTH_ENDS | {"window": (1, None)},
            "longer than said": TOO_LONG, "longer than said, causal": TOO_LONG | CAUSAL,
            "longer than said, window": TOO_LONG | {"window": (1, 1)},
            "the longest is not known": WHOLE, "the longest is not known, causal": WHOLE | CAUSAL,
            "its own keys": OWN_KEYS | CAUSAL,
            "its own keys, of which fewer are seen": OWN_KEYS | {"max_k": 2},
            "one row a sequence": packed([2, 5, 14, 17], [1, 4, 15, 17], 1, 6),
            "no row": packed([2, 5, 14, 17], [1, 4, 15, 17], 0, 0),
        }.items()
    },
}  # fmt: skip


def tensors(core: eager.AttentionCore, kv_heads: int) -> list[torch.Tensor]:
    """q, k, v, do; what is packed is cut out of wider rows, as projections give it."""
    generator = torch.Generator().manual_seed(0)
    B, width = (1, 3) if core.cu_q is not None else (2, 1)
    return [
        torch.randn(B, 20, heads, 8 * width, generator=generator, dtype=FLOAT)[..., :8].transpose(1, 2)
        for heads in (4, kv_heads, kv_heads, 4)
    ]


def run(core: eager.AttentionCore, q, k, v, do) -> tuple:
    o, lse, _ = attention_core.attend(None, q, k, v, core)
    return o, lse, attention_core.attention_grads(None, q, k, v, do, o, lse, core)[:3]


@pytest.fixture
def aten(monkeypatch) -> Aten:
    aten = Aten()
    monkeypatch.setattr(fused_attention, "_aten", aten)
    return aten


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in CASES.items() for case in cases])
def test_torchs_kernels_compute_the_core(name, case, kv_heads, aten):
    """o, lse and gradients are the reference's; also what the kernel has not written, and what no key is seen from."""
    core = eager.AttentionCore(0.3, "ieee", **CASES[name][case](), fused=name)
    q, k, v, do = tensors(core, kv_heads)
    o, lse, grads = run(core, q, k, v, do)
    assert aten.calls == [name, f"{name} backward"]
    assert o.transpose(1, 2).is_contiguous() or core.cu_q is not None
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = eager.attention_reference(*leaves, core._replace(fused=""))
    pairs = zip((o, *grads), (wanted, *torch.autograd.grad(wanted, leaves, do)), strict=True)
    for which, (got, exact) in zip(("o", "dq", "dk", "dv"), pairs, strict=True):
        torch.testing.assert_close(got, exact, rtol=0, atol=1e-12, msg=lambda text, which=which: f"{which}: {text}")
    assert lse.shape == q.shape[:3]
    assert lse.is_contiguous()
    assert not lse.isnan().any()


@pytest.mark.parametrize("name", ["cudnn", "efficient"])
@pytest.mark.parametrize("low", [-1e30, torch.finfo(FLOAT).min])
def test_a_row_hidden_by_large_numbers_has_the_mean_and_no_gradient(low, name, aten):
    core = eager.AttentionCore(0.3, "ieee", mask=of_two_rows(low), fused=name)
    q, k, v, do = tensors(core, 4)
    o, _, grads = run(core, q, k, v, do)
    torch.testing.assert_close(o[:, :, 0], v.mean(2), rtol=0, atol=1e-12)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    do[:, :, 0] = 0
    exact = torch.autograd.grad(eager.attention_reference(*leaves, core._replace(fused="")), leaves, do)
    for got, wanted in zip(grads, exact, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "lowest"), [(torch.float16, -65504.0), (torch.bfloat16, -(2.0**126))], ids=str)
def test_what_a_mask_adds(dtype, lowest):
    """What it hides stays finite where a kernel multiplies it by log2(e), and is as low as the dtype allows."""
    q = torch.zeros(2, 4, 20, 8, dtype=dtype)
    for mask in (one_row_sees_nothing(), of_two_rows(-math.inf).to(dtype)):
        bias = fused_attention._filled_bias(q, q, eager.AttentionCore(1.0, "ieee", mask=mask), 4)
        assert bias.dtype == dtype
        assert bias.min() == lowest
        assert bias.shape == (2, 4, 20, 20)
        assert math.isfinite(float(bias.min().float() * math.log2(math.e)))


@pytest.mark.parametrize("options", [TOO_LONG, WHOLE, OWN_KEYS])
def test_boundaries_are_formed_without_reading_the_device(options):
    """A meta tensor has no values that the host could read."""
    on_meta = {id(cu): cu.to("meta") for cu in (options["cu_q"], options["cu_k"])}
    core = eager.AttentionCore(0.3, "ieee", **{name: on_meta.get(id(value), value) for name, value in options.items()})
    q, k, *_ = (x.to("meta") for x in tensors(core, 4))
    (outside_q, outside_k), *_ = fused_attention._for_flash(q, k, core)
    assert outside_q.shape == outside_k.shape == (20,)
    assert (outside_q is outside_k) == (options is OWN_KEYS), "formed twice"


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in CASES.items() for case in cases])
def test_torchs_kernels_on_a_gpu(name, case, kv_heads):
    """The same cases, with lengths 32 times as large for what is packed, against twice the error of the backend's kernels."""
    from ckptkern.ops.dispatch.choices import primitives

    options, dtype = CASES[name][case](), torch.float32 if name == "efficient" else torch.bfloat16
    times = 32
    for field in ("cu_q", "cu_k"):
        if field in options:
            options = options | {field: (options[field] * times).cuda()}
    for field in ("max_q", "max_k"):
        if options.get(field, 0) > 1:
            options = options | {field: options[field] * times}
    if (mask := options.get("mask")) is not None:
        grown = [n if n == 1 or i < 2 else n * times for i, n in enumerate(mask.shape)]
        mask = mask.repeat_interleave(grown[2] // mask.shape[2], 2).repeat_interleave(grown[3] // mask.shape[3], 3)
        options = options | {"mask": (mask if mask.dtype == torch.int8 else mask.to(dtype)).cuda()}
    core = eager.AttentionCore(64**-0.5, "ieee", **options)
    q, k, v, do = (
        torch.randn(1 if core.cu_q is not None else 2, heads, 20 * times, 64, device="cuda").to(dtype)
        for heads in (4, kv_heads, kv_heads, 4)
    )
    p = primitives("triton")
    results = []
    for backend, attended, of in ((eager, core, FLOAT), (p, core, dtype), (p, core._replace(fused=name), dtype)):
        heads = [x.to(of) for x in (q, k, v, do)]
        o, lse, _ = attention_core.attend(backend, *heads[:3], attended)
        results.append((o, *attention_core.attention_grads(backend, *heads, o, lse, attended)[:3]))
    for exact, own, got in zip(*results, strict=True):
        error, allowed = ((x.double() - exact).norm() / exact.norm().clamp(min=1e-30) for x in (got, own))
        assert error <= max(2 * allowed, 1e-5), (error, allowed)


def test_every_case_is_one_that_a_kernel_is_chosen_for():
    """`kernel_order` names the kernel for such a core on some GPU."""
    for (name, cases), capability in itertools.product(CASES.items(), [(9, 0)]):
        for case in cases.values():
            core = eager.AttentionCore(1.0, "ieee", **case())
            bounded = core.window != (None, None)
            windowed = bounded and core.window != (None, 0)
            of = dict(bounded=bounded, windowed=windowed, packed=core.cu_q is not None, masked=core.mask is not None)
            asked = attention_core.CoreCase(float32=name == "efficient", D=64, grouped=False, **of)
            assert name in attention_core.kernel_order(capability, asked)
