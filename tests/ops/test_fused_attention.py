"""Torch's attention kernels of a GPU, which twins on a CPU stand for: they compute what ATen documents, demand the layouts that
its kernels demand, and leave NaN where these leave what memory held."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ckptkern import eager
from ckptkern.eager import fused_attention
from ckptkern.ops.attention import core as attention_core

B, H, S, D = 2, 4, 70, 16
DTYPES = {"cudnn": torch.bfloat16, "flash": torch.bfloat16, "efficient": torch.float32}


def scores(q: Tensor, k: Tensor, bias: Tensor | None, hidden: Tensor, scale: float) -> Tensor:
    """In float32 of q and k [B, H, S, D], as the kernels have them; hidden ones are -inf."""
    s = q.float() @ k.float().transpose(-1, -2) * scale
    return (s if bias is None else s + bias.float()).masked_fill(hidden, -math.inf)


def forward(q, k, v, bias, hidden, scale) -> tuple[Tensor, Tensor]:
    s = scores(q, k, bias, hidden, scale)
    return (torch.softmax(s, -1) @ v.float()).to(q.dtype), torch.logsumexp(s, -1)


def backward(do, q, k, v, o, lse, bias, hidden, scale) -> tuple[Tensor, Tensor, Tensor]:
    p = torch.exp(scores(q, k, bias, hidden, scale) - lse[..., None])
    ds = p * (do.float() @ v.float().transpose(-1, -2) - (do.float() * o.float()).sum(-1, keepdim=True))
    grads = scale * ds @ k.float(), scale * ds.transpose(-1, -2) @ q.float(), p.transpose(-1, -2) @ do.float()
    return tuple(one.to(q.dtype) for one in grads)


def outside(rows: int, columns: int, left: int, right: int) -> Tensor:
    """What a window hides, counted from the lower right; -1: no bound."""
    i, j = torch.arange(rows)[:, None] + columns - rows, torch.arange(columns)
    return ((j > i + right) if right >= 0 else j < 0) | ((j < i - left) if left >= 0 else j < 0)


def repeated(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)


def summed(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(1, (heads, -1)).sum(2)


class Twins:
    """ATen's ops, by name. Each call is counted."""

    def __init__(self):
        self.calls: list[str] = []

    def namespace(self) -> SimpleNamespace:
        def counted(op):
            def run(*args, **kwargs):
                self.calls.append(op.__name__)
                for x in args:
                    assert not isinstance(x, Tensor) or x.dim() == 0 or x.stride(-1) == 1
                return op(*args, **kwargs)

            return run

        ops = (self._scaled_dot_product_cudnn_attention, self._scaled_dot_product_cudnn_attention_backward,
               self._flash_attention_forward, self._flash_attention_backward,
               self._scaled_dot_product_efficient_attention, self._scaled_dot_product_efficient_attention_backward)  # fmt: skip
        of_cpu = [f"_scaled_dot_product_flash_attention_for_cpu{end}" for end in ("", "_backward")]
        own = {name: getattr(torch.ops.aten, name) for name in of_cpu}  # what computes ours
        return SimpleNamespace(**own, **{op.__name__: counted(op) for op in ops})

    @staticmethod
    def _scaled_dot_product_cudnn_attention(q, k, v, bias, lse, p, causal, *, scale):
        assert p == 0.0
        assert bias is None or (bias.dtype == q.dtype and bias.isfinite().all())
        hidden = outside(q.shape[2], k.shape[2], -1, 0 if causal else -1)
        o, lse = forward(q, *(repeated(x, q.shape[1]) for x in (k, v)), bias, hidden, scale)
        return o, lse[..., None], None

    @staticmethod
    def _scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, lse, seed, offset, bias, cu_q, cu_k, max_q, max_k, p, causal, *, scale
    ):
        assert lse.shape == (*q.shape[:3], 1)
        assert (max_q, max_k, p) == (q.shape[2], k.shape[2], 0.0)
        hidden = outside(q.shape[2], k.shape[2], -1, 0 if causal else -1)
        dq, *dkv = backward(do, q, *(repeated(x, q.shape[1]) for x in (k, v)), o, lse[..., 0], bias, hidden, scale)
        return dq, *(summed(x, k.shape[1]) for x in dkv)

    @staticmethod
    def _hidden(q, k, causal, left, right):
        return outside(q.shape[2], k.shape[2], left, 0 if causal else right)

    def _flash_attention_forward(
        self, q, k, v, cu_q, cu_k, max_q, max_k, p, causal, debug, *, scale, window_size_left, window_size_right
    ):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        assert (cu_q, cu_k, max_q, max_k, p) == (None, None, q.shape[2], k.shape[2], 0.0)
        hidden = self._hidden(q, k, causal, window_size_left, window_size_right)
        o, lse = forward(q, *(repeated(x, q.shape[1]) for x in (k, v)), None, hidden, scale)
        return o.transpose(1, 2), lse, None

    def _flash_attention_backward(
        self, do, q, k, v, o, lse, cu_q, cu_k, max_q, max_k, p, causal, rng, unused, *, scale, window_size_left,
        window_size_right,
    ):  # fmt: skip
        do, q, k, v, o = (x.transpose(1, 2) for x in (do, q, k, v, o))
        assert (cu_q, cu_k, max_q, max_k, p) == (None, None, q.shape[2], k.shape[2], 0.0)
        hidden = self._hidden(q, k, causal, window_size_left, window_size_right)
        dq, *dkv = backward(do, q, *(repeated(x, q.shape[1]) for x in (k, v)), o, lse, None, hidden, scale)
        return tuple(x.transpose(1, 2) for x in (dq, *(summed(x, k.shape[1]) for x in dkv)))

    @staticmethod
    def _check_bias(bias, q, k):
        if bias is not None:
            assert bias.dtype == q.dtype
            assert bias.shape == (*q.shape[:3], k.shape[2])
            assert bias.stride(-1) == 1
            assert not any(n * bias.itemsize % 16 for n in bias.stride()[:-1])
            assert bias.isfinite().all()

    def _scaled_dot_product_efficient_attention(self, q, k, v, bias, lse, p, causal, *, scale):
        assert q.shape[1] == k.shape[1] == v.shape[1]
        self._check_bias(bias, q, k)
        hidden = outside(q.shape[2], k.shape[2], -1, 0 if causal else -1)
        o, lse = forward(q, k, v, bias, hidden, scale)
        padded = lse.new_full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), math.inf)
        padded[..., : lse.shape[2]] = lse
        return o, padded, None, None

    def _scaled_dot_product_efficient_attention_backward(
        self, do, q, k, v, bias, o, lse, seed, offset, p, needs, causal, *, scale
    ):
        assert q.shape[1] == k.shape[1] == v.shape[1]
        assert lse.shape[2] == -(-q.shape[2] // 32) * 32
        assert (lse[..., q.shape[2] :] == math.inf).all()
        assert needs == [True, True, True, False]
        self._check_bias(bias, q, k)
        hidden = outside(q.shape[2], k.shape[2], -1, 0 if causal else -1)
        return *backward(do, q, k, v, o, lse[..., : q.shape[2]], bias, hidden, scale), None


@pytest.fixture
def twins(monkeypatch) -> Twins:
    made = Twins()
    monkeypatch.setattr(fused_attention, "_aten", made.namespace())
    return made


def masks_of(kind: str, dtype: torch.dtype) -> Tensor | None:
    """Of which each has a row that sees nothing, where it has rows of its own, or a sample."""
    if kind == "none":
        return None
    if kind == "padding":
        seen = torch.arange(S) < torch.tensor([S - 9, 0])[:, None]
        return seen[:, None, None].to(torch.int8)
    if kind == "of rows":
        return torch.ones(B, 1, S, 1, dtype=torch.int8).index_fill(2, torch.tensor([3, 60]), 0)
    mask = torch.randn(1, H, S, S)
    mask[:, :, 5] = -math.inf
    mask[:, 1, :, 30:] = -math.inf
    mask[:, 2, 7, 3:] = -1e30  # beyond what 16 bits hold in float16
    return mask if kind == "additive, float32" else mask.to(dtype)


def run(core: eager.AttentionCore, *given: Tensor) -> dict[str, Tensor]:
    q, k, v, do = given
    o, lse, _ = attention_core.attend(eager, q, k, v, core)
    grads = attention_core.attention_grads(eager, q, k, v, do, o, lse, core)[:3]
    assert lse.shape == q.shape[:3]
    assert lse.is_contiguous()
    return dict(zip(("o", "dq", "dk", "dv"), (o, *grads), strict=True))


KINDS = {
    "cudnn": ((None, None), (None, 0)),
    "flash": ((None, None), (None, 0), (5, 0), (0, 3), (7, 200), (None, 4), (200, None)),
    "efficient": ((None, None), (None, 0)),
}
MASKS = ("padding", "of rows", "additive", "additive, float32")


@pytest.mark.parametrize("layout", ["heads", "tokens"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    ("fused", "window", "mask"),
    [(fused, window, "none") for fused, windows in KINDS.items() for window in windows]
    + [(fused, (None, None), mask) for fused in ("cudnn", "efficient") for mask in MASKS],
)
def test_numbers(fused, window, mask, kv_heads, layout, twins):
    """O and gradients are as exact as those of ours; rows that see nothing give zeros, and none of their gradient goes on."""
    dtype = DTYPES[fused]
    mask = masks_of(mask, dtype)
    given = [torch.randn(B, heads, S, D).to(dtype) for heads in (H, kv_heads, kv_heads, H)]
    if layout == "tokens":
        given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
    core = eager.AttentionCore(D**-0.5, "ieee", window, mask)
    exact = run(
        core._replace(mask=mask if mask is None or mask.dtype == torch.int8 else mask.double()),
        *(x.double() for x in given),
    )
    ours, torchs = run(core, *given), run(core._replace(fused=fused), *given)
    assert len(twins.calls) == 2
    for name, reference in exact.items():
        error, allowed = ((one[name].double() - reference).norm() / reference.norm() for one in (torchs, ours))
        assert error <= max(2 * allowed, 1e-6), name
        assert torchs[name].isfinite().all()
    if mask is not None:
        blind = exact["o"] == 0
        assert blind.any()
        assert (torchs["o"][blind] == 0).all()
        assert (torchs["dq"][blind] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_bias_is_finite_in_its_dtype(dtype):
    """-inf - -inf is NaN in a row that sees nothing; and a sum of a score and the lowest number must not be -inf."""
    q = torch.empty(1, 1, 3, 8, dtype=dtype)
    mask = torch.tensor([0.0, -math.inf, -1e30, torch.finfo(dtype).min, 2.0])[None, None, None].expand(1, 1, 3, 5)
    bias, blind = fused_attention._added(
        q, torch.empty(1, 1, 5, 8, dtype=dtype), eager.AttentionCore(1.0, "ieee", mask=mask)
    )
    assert bias.dtype == dtype
    assert (bias + torch.finfo(dtype).min / 4).isfinite().all()
    assert not blind.any()
    assert bias[0, 0, 0, 0] == 0
    assert bias[0, 0, 0, 4] == 2
