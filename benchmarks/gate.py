"""The compile gate: every kernel compiled to a cubin for sm_80 and sm_90 without a GPU, and its machine code read.

    python -m ckptkern.benchmarks.gate            the shipped tiles (what `make test` runs)
    python -m ckptkern.benchmarks.gate --all      every activation and flag too (`make gate`)

Launchers are called on meta tensors and their launches caught, so a kernel is compiled with exactly the types,
divisibility and constants of a real launch. What is asserted is in `Report.faults`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import csv
import dataclasses
import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

ARCHS = (80, 90)
DTYPES = ("float16", "bfloat16")
# Multiplications by one of Philox's two constants, as the assembler writes them.
PHILOX_MULTIPLY = re.compile(
    r"(?:IMAD\.HI\.U32|IMAD\.WIDE\.U32)[^\n]*(?:-0x2daee0ad|-0x326172a9|0xd2511f53|0xcd9e8d57)"
)
SHARED_LIMIT = {80: 166912, 90: 232448}  # bytes a block may use; A100 and H100/H200
SMALL_CARD = 101376  # the same of sm_86, sm_89 and sm_120, which take the tiles of sm_80
TILE_KEYS = (
    "BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK_D", "BLOCK_S", "BLOCK_HALF", "BLOCK_REST", "WIDTH", "num_warps",
    "num_stages", "SUB",
)  # fmt: skip
TRITON = "3.7."  # the compiler that the tiles were chosen with; another one spills here and there
# Pattern of "case kernel" -> bytes of stack. In attention the tile without spills is half as large, and with eight warps half
# of them would compute what the others do: for TF32 and heads of 256 up to twice the products (benchmarks/NOTES.md), against
# some ten local instructions of a thousand. For heads of 80 to 128 on sm_90 so would 64 columns in dkdv.
SHIPPED_SPILLS: dict[str, int] = {
    r"attn_bwd/sm_90/b?float16/d(80|96)(\+causal)?(\+dropout)? _attn_dkdv_kernel": 48,
    r"attn_bwd/sm_90/bfloat16/d128\+additive\+causal\+dropout _attn_dkdv_kernel": 8,
    r"attn_bwd/sm_90/bfloat16/d128\+gqa(\+causal)?\+dropout _attn_dkdv_kernel": 64,
    r"attn_bwd/sm_90/b?float16/d256\S* _attn_dq_kernel": 144,
    r"attn_fwd(_delta)?/sm_90/bfloat16/d256\+(bool|additive)(\+causal)?\+dropout _attn_fwd_kernel": 40,
    r"attn_\w+/sm_80/b?float16/d256\S* \w+": 48,
    r"attn_\w+/sm_80/float32/d(40|64|128)(?!\+ieee)\S* _attn_(fwd|dkdv)_kernel": 64,
    r"attn_fwd(_delta)?/sm_90/float32/d(128|256)(?!\+ieee)\S* _attn_fwd_kernel": 24,
    r"attn_bwd/sm_90/float32/d\d+(?!\d|\+ieee)\S* _attn_(dkdv|dq)_kernel": 128,
    r"stack_bwd/sm_80/bfloat16/gelu\+narrow\+aligned\+extras _stack_bwd_kernel": 8,
    r"linear_bwd/sm_80/float32/gelu\+ieee\+aligned\+extras _linear_bwd_kernel": 16,
}
# The same of what `--all` compiles besides. No tile holds the last rows of it without spills everywhere: the same tiles spill
# nothing with another flag or head dim. 176 bytes are float32's at IEEE precision, 96 dims, on the ordinary cores.
OTHER_SPILLS: dict[str, int] = {
    r"stack_bwd/sm_90/float16/gelu\+ragged\+extras _stack_bwd_kernel": 16,
    r"attn_bwd/sm_90/bfloat16/d(80|96)\+(additive|alibi|bool|gqa|keys|varlen|window).* _attn_dkdv_kernel": 72,
    r"attn_bwd/sm_80/bfloat16/d32\+varlen _attn_dq_kernel": 8,
    r"attn_fwd(_delta)?/sm_90/bfloat16/d256\+gqa(\+causal)?(\+dropout)? _attn_fwd_kernel": 40,
    r"attn_bwd/sm_\d+/float32/d\d+\+ieee.* _attn_(dkdv|dq)_kernel": 16,
    r"attn_fwd(_delta)?/sm_80/float32/d96\+ieee(\+causal)? _attn_fwd_kernel": 16,
    r"attn_fwd(_delta)?/sm_90/float32/d96\+ieee.* _attn_fwd_kernel": 176,
    r"stack_bwd/sm_80/\w+/(relu2|gelu_tanh|silu)\+(narrow\+)?(aligned|ragged\+extras|ragged) _stack_bwd_kernel": 16,
    r"stack_bwd/sm_80/bfloat16/gelu\+narrow\+ragged(\+extras)? _stack_bwd_kernel": 24,
    r"gated_(fwd|bwd)/sm_\d+/float32/\w+\+ieee\+ragged.* \w+": 88,
    r"gated_bwd/sm_80/float32/\w+(\+ieee)?\+aligned\+dropout\+extras _gated_bwd_kernel": 32,
    r"gated_act_grad/sm_90/b?float16/(gelu_tanh|silu)\+few\+aligned\+dropout\+extras _gated_act_grad_kernel": 32,
    r"(act_grad|mlp_bwd)/sm_80/float32/\w+\+ieee\+ragged \w+": 8,
    r"linear_bwd/sm_80/float32/(relu2|gelu_tanh)\+ieee\+aligned.* _linear_bwd_kernel": 8,
    r"(linear_fwd|act_grad)/sm_\d+/float32/relu\+ieee\+aligned\+dropout\+extras \w+": 16,
    r"linear_bwd/sm_90/b?float16/gelu_tanh\+aligned _linear_bwd_kernel": 16,
    r"act_grad/sm_80/float32/gelu\+aligned _act_grad_kernel": 8,
}
# What does without HGMMA on sm_90, which needs tiles of 64: dk and dv of 64 columns x 256 dims are 256 registers a thread, and
# of TF32 x 128 dims spill 450 bytes; TF32 x 256 dims does not fit into shared memory.
ALLOWED_HMMA = re.compile(
    r"attn_bwd/sm_90/(\w+/d256|float32/d(80|96|128))\S* _attn_dkdv_kernel|attn_\w+/sm_90/float32/d256"
)
# What several warps compute at once: larger tiles do not fit into shared memory.
ALLOWED_TWICE = re.compile(r"attn_bwd/sm_\d+/float32/d256\S* _attn_dkdv_kernel|attn_\w+/sm_80/\w+/d\d+\+small")


def allowed_stack(launch: str) -> int:
    """Of "case kernel", in bytes."""
    table = SHIPPED_SPILLS | OTHER_SPILLS
    return max((size for pattern, size in table.items() if re.fullmatch(pattern, launch)), default=0)


@dataclasses.dataclass(frozen=True)
class Case:
    """One compile: a launcher on meta tensors with one set of flags."""

    op: str
    arch: int
    dtype: str
    ragged: bool
    activation: str  # or another of VARIANTS
    dropout: bool
    extras: bool  # the optional inputs and outputs: z, h, masks, q/k norms, parameters' gradients
    kind: str = ""  # "ieee": float32 without tf32, torch's default; "narrow": a chain of at most 32 features, on sm_80;
    # "few": rows

    @property
    def name(self) -> str:
        flags = [self.activation, *self.kind.split(), "ragged" if self.ragged else "aligned"]
        flags += ["dropout"] * self.dropout + ["extras"] * self.extras
        return f"{self.op}/sm_{self.arch}/{self.dtype}/{'+'.join(flags)}"

    @property
    def shared(self) -> int:
        """What the card has, in bytes a block."""
        return SHARED_LIMIT[self.arch]

    def launch(self) -> None:
        OPS[self.op](self)


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """The attention launches of one kind: fwd, fwd_delta (the recompute), or bwd (dkdv and dq)."""

    op: str
    arch: int
    dtype: str
    head_dim: int
    causal: bool
    dropout: bool
    kind: str = ""  # one of ATTENTION_KINDS
    ragged = False

    @property
    def name(self) -> str:
        flags = [f"d{self.head_dim}"] + [self.kind] * bool(self.kind)
        flags += ["causal"] * self.causal + ["dropout"] * self.dropout
        return f"{self.op}/sm_{self.arch}/{self.dtype}/{'+'.join(flags)}"

    @property
    def shared(self) -> int:
        return SMALL_CARD if self.kind == "small" else SHARED_LIMIT[self.arch]

    def launch(self) -> None:
        _launch_attention(self)


@dataclasses.dataclass
class Report:
    """What the machine code of one case says."""

    case: str
    kernel: str
    tile: str
    registers: int
    stack: int
    local: int  # STL + LDL instructions
    shared: int
    tensor_core: int  # HGMMA on sm_90, HMMA on sm_80
    wrong_tensor_core: int  # HMMA where HGMMA was meant
    multiplies: int  # of one warp's tensor-core instructions
    async_copies: int  # LDGSTS (cp.async) or UTMALDG (TMA)
    narrow_loads: int  # 2-byte global loads
    instructions: int
    philox: int  # integer multiplies by the Philox constants; 0 without dropout

    def faults(self, case: Case | AttentionCase, product: bool, min_shared: int, multiplies: float) -> list[str]:
        """product: tensor cores are meant. min_shared, multiplies: what the tile takes."""
        found = []
        launch = f"{self.case} {self.kernel}"
        allowed = allowed_stack(launch)
        if self.stack > allowed or (self.local and not allowed):
            found.append(f"spills: {self.stack} B of stack, {self.local} local loads and stores")
        if self.shared > case.shared:
            found.append(f"{self.shared} B of shared memory, the card has {case.shared}")
        other = self.wrong_tensor_core and ALLOWED_HMMA.match(launch)
        if product and not self.tensor_core and not other:
            found.append("no tensor-core instruction")
        if product and self.wrong_tensor_core and not other:
            found.append(f"{self.wrong_tensor_core} HMMA instructions where HGMMA was meant")
        if product and self.multiplies > multiplies and not ALLOWED_TWICE.match(launch):
            found.append(f"{self.multiplies} multiplies of the tensor cores a warp where {multiplies:.0f} would do")
        narrow = [side for side in re.findall(r"\b[MN]\d+", self.tile) if int(side[1:]) < 64]
        if case.arch == 90 and self.tensor_core and narrow:  # triton#11366
            found.append(f"HGMMA in a tile of {narrow[0]}: products narrower than 64 have failed")
        if product and not case.ragged and (min_shared or " K" in self.tile):
            if not self.async_copies:
                found.append("no asynchronous copy in the main loop")
            if self.shared < min_shared:
                found.append(f"{self.shared} B of shared memory: less than stages x tile = {min_shared}, not pipelined")
        if self.narrow_loads and not case.ragged and case.kind != "keys":  # a row of int8, two columns a thread
            found.append(f"{self.narrow_loads} two-byte global loads on the aligned path")
        return found


def attention_cases(
    dtypes: dict[str, tuple[int, ...]], kinds: tuple[str, ...] = ("",), ops: tuple[str, ...] = ()
) -> list[AttentionCase]:
    """Every attention launch x architecture x {dtype: head dims} x causal x dropout x kind."""
    return [
        AttentionCase(op, arch, dtype, head_dim, causal, dropout, kind)
        for dtype, head_dims in dtypes.items()
        for op, arch, kind, head_dim, causal, dropout in itertools.product(
            ops or ATTENTION_OPS, ARCHS, kinds, head_dims, (False, True), (False, True)
        )
    ]


def shipped_attention() -> list[AttentionCase]:
    """Each head dim causal, with dropout and without, which the table of dropout compares; 128 also without causal; each kind
    with the heaviest flags, where rows of the tables differ.

    The recompute is the forward kernel and delta: it stands for both.
    """
    heavy = ("attn_fwd_delta", "attn_bwd")
    cases = [
        case for case in attention_cases({"bfloat16": HEAD_DIMS}, ops=heavy)
        if case.head_dim == 128 or case.causal
    ]  # fmt: skip
    others = attention_cases({"float16": (128,)}, ops=heavy) + attention_cases({"bfloat16": (128,)}, ops=("attn_fwd",))
    others += attention_cases({"bfloat16": (64, 128)}, ATTENTION_KINDS, heavy)
    others += attention_cases({"bfloat16": (256,)}, ("bool", "additive"), heavy)
    others += attention_cases({"bfloat16": RAGGED_DIMS}, ops=heavy)
    others += attention_cases({"float32": (64, 128)}, ("ieee",), heavy)
    others += attention_cases({"float32": (64, 128, 256)}, ("additive",), heavy)
    cases += [case for case in others if case.causal and case.dropout]
    return cases + small_cases()


def small_cases() -> list[AttentionCase]:
    """Every tile that only cards of less shared memory take, with an additive mask, which takes some of it."""
    cases = [("attn_fwd_delta", "bfloat16", 256), ("attn_bwd", "bfloat16", 256), ("attn_fwd_delta", "float32", 128)]
    cases += [("attn_bwd", "float32", 128), ("attn_fwd_delta", "float32", 256)]
    return [AttentionCase(op, 80, dtype, head_dim, True, True, "small") for op, dtype, head_dim in cases]


def kinds_of(op: str, arch: int) -> list[tuple[str, str]]:
    """(dtype, kind) of a kernel that is not attention's."""
    found = [(dtype, "") for dtype in (*DTYPES, "float32")]
    found += [("float32", "ieee")] * (op in PRODUCT_OPS)
    if op in PRODUCT_OPS and not op.startswith("stack_"):
        found += [(dtype, "few") for dtype in DTYPES]
    if op.startswith("stack_") and arch == 80:
        found += [(dtype, f"narrow {kind}".strip()) for dtype, kind in found]
    return found


def shipped_cases() -> list[Case | AttentionCase]:
    """Every kernel x tile row x architecture x dtype, aligned and (in bfloat16) ragged, with the heaviest flags, and once
    plain; products at torch's default precision of float32, and narrow chains, too."""
    cases = [
        Case(op, arch, dtype, False, "gelu", op in DROPOUT_OPS, True, kind)
        for op, arch in itertools.product(PRODUCT_OPS, ARCHS)
        for dtype, kind in kinds_of(op, arch)
        if kind and (dtype, kind) not in (("float16", "narrow"), ("float32", "narrow"), ("float16", "few"))
    ]
    for op, arch, dtype in itertools.product(OPS, ARCHS, DTYPES):
        heavy, *others = VARIANTS.get(op, ("gelu", "relu"))
        cases.append(Case(op, arch, dtype, False, heavy, op in DROPOUT_OPS, True))
        if dtype == "bfloat16":  # float16 differs in the names of a few instructions; all of it is in `--all`
            cases.append(Case(op, arch, dtype, True, heavy, op in DROPOUT_OPS, True))
            cases += [Case(op, arch, dtype, False, variant, False, False) for variant in others]
    return cases + shipped_attention()


def all_cases() -> list[Case | AttentionCase]:
    from ..eager import ACTIVATIONS

    return [
        Case(op, arch, dtype, ragged, activation, full and op in DROPOUT_OPS, full, kind)
        for op, arch in itertools.product(OPS, ARCHS)
        for (dtype, kind), ragged, activation, full in itertools.product(
            kinds_of(op, arch), (False, True), VARIANTS.get(op, ACTIVATIONS), (False, True)
        )
        if (op, activation) != ("linear_bwd", "identity")  # whose gradient reads no z: no product to rebuild
        and not (kind == "few" and ragged)  # the same tile for any number of rows
    ] + [
        *attention_cases(dict.fromkeys((*DTYPES, "float32"), (*HEAD_DIMS, *RAGGED_DIMS))),
        *attention_cases({"bfloat16": (*HEAD_DIMS, *RAGGED_DIMS), "float32": (64, 128, 256)}, ATTENTION_KINDS),
        *attention_cases({"float32": HEAD_DIMS}, ("ieee",)),
        *small_cases(),
    ]


def _tensors(case: Case):
    import torch

    dtype = getattr(torch, case.dtype)
    M, K, N, D = (1001, 515, 1037, 517) if case.ragged else (64 if case.kind == "few" else 4096, 1024, 4096, 1024)

    def meta(*shape, dtype=dtype):
        return torch.empty(*shape, dtype=dtype, device="meta")

    dropout = (meta(2, dtype=torch.int64), 6554, 1.1111) if case.dropout else (None, 0, 1.0)
    return meta, M, K, N, D, dropout, dtype


def _precision(case: Case | AttentionCase) -> str:
    return "tf32" if case.dtype == "float32" and "ieee" not in case.kind else "ieee"


def _launch_linear_fwd(case):
    from ..triton_kernels import linear

    meta, M, K, N, _, dropout, _ = _tensors(case)
    linear.linear_fwd(
        meta(M, K), meta(N, K), meta(N), case.activation, _precision(case), dropout=dropout, keep_z=case.extras,
        keep_bits=case.extras and case.activation == "relu",
    )  # fmt: skip


def _launch_linear_bwd(case):
    from ..triton_kernels import linear

    meta, M, K, N, _, _, _ = _tensors(case)
    linear.linear_bwd(
        meta(M, K), meta(N, K), meta(N), meta(M, N), case.activation, _precision(case), db=case.extras
    )  # fmt: skip


def _launch_act_grad(case):
    from ..triton_kernels import linear

    meta, M, K, N, _, dropout, _ = _tensors(case)
    linear.act_grad(
        meta(M, K), meta(K, N), meta(M, N), case.activation, _precision(case), dropout=dropout, keep_h=case.extras,
        db=case.extras,
    )  # fmt: skip


def _launch_mlp_bwd(case):
    from ..triton_kernels import mlp

    meta, M, K, N, D, dropout, _ = _tensors(case)
    mlp.mlp_bwd(
        meta(M, K), meta(N, K), meta(N), meta(M, D), meta(D, N), case.activation, _precision(case), dropout=dropout,
        keep_h=case.extras, db=case.extras,
    )  # fmt: skip


def _launch_gated_fwd(case):
    from ..triton_kernels import mlp

    meta, M, K, N, _, dropout, _ = _tensors(case)
    mlp.gated_fwd(
        meta(M, K), meta(N, K), meta(N), meta(N, K), meta(N), case.activation, _precision(case), dropout=dropout,
        keep_gu=case.extras,
    )  # fmt: skip


def _launch_gated_bwd(case):
    from ..triton_kernels import mlp

    meta, M, K, N, D, dropout, _ = _tensors(case)
    mlp.gated_bwd(
        meta(M, K), meta(N, K), meta(N), meta(N, K), meta(N), meta(M, D), meta(D, N), case.activation, _precision(case),
        dropout=dropout, keep_h=case.extras, dbg=case.extras, dbu=case.extras,
    )  # fmt: skip


def _launch_gated_act_grad(case):
    from ..triton_kernels import mlp

    meta, M, K, N, _, dropout, _ = _tensors(case)
    mlp.gated_act_grad(
        meta(M, K), meta(K, N), meta(M, N), meta(M, N), case.activation, _precision(case), dropout=dropout,
        keep_h=case.extras, dbg=case.extras, dbu=case.extras,
    )  # fmt: skip


def _launch_act_fwd(case):
    from ..triton_kernels import elementwise

    meta, M, _, N, _, _, _ = _tensors(case)
    elementwise.act_fwd(meta(M, N), meta(M, N) if case.extras else None, case.activation)


def _launch_act_bwd(case):
    import torch

    from ..triton_kernels import elementwise

    meta, M, _, N, _, _, _ = _tensors(case)
    if case.activation == "relu":
        elementwise.act_bwd(meta(M, N), meta(M, -(-N // 8), dtype=torch.uint8), "relu", bits=True, db=case.extras)
    else:
        elementwise.act_bwd(meta(M, N), meta(M, N), case.activation, db=case.extras)


def _launch_dropout(case):
    import torch

    from ..triton_kernels import elementwise

    meta, M, _, N, _, _, _ = _tensors(case)
    elementwise.dropout(meta(M, N), meta(2, dtype=torch.int64), 6554, 1.1111)


def _narrow(case):
    import torch

    meta, M, *_ = _tensors(case)
    width, L = 32 if "narrow" in case.kind else 64, 8
    K, N = (width - 3, width - 11) if case.ragged else (width, width)
    bits = meta(M, -(-N // 8), dtype=torch.uint8) if case.activation == "relu" else None
    return meta(M, K), meta(L, width, width), meta(L, width) if case.extras else None, meta(M, N), bits


def _launch_stack_fwd(case):
    from ..triton_kernels import stack

    x, w, b, dy, bits = _narrow(case)
    stack.stack_fwd(x, w, b, dy.shape[1], case.activation, _precision(case), keep_bits=bits is not None)


def _launch_stack_bwd(case):
    from ..triton_kernels import stack

    x, w, b, dy, bits = _narrow(case)
    stack.stack_bwd(x, w, b, dy, bits, case.activation, _precision(case))


def _norm(case: Case):
    """(kind, x [M, K], a parameter [K], dtype): "layer-autocast" is a float32 stream of activations round bf16 ops."""
    import torch

    kind, _, autocast = case.activation.partition("-")
    meta, M, K, _, _, _, dtype = _tensors(case)
    wide = torch.float32 if autocast else dtype
    return kind, meta(M, K, dtype=wide), meta(K, dtype=wide), dtype


def _launch_norm_fwd(case):
    from ..triton_kernels import norm

    kind, x, weight, dtype = _norm(case)
    norm.norm_fwd(x, weight, weight if kind == "layer" else None, 1e-5, kind, dtype)


def _launch_norm_bwd(case):
    import torch

    from ..triton_kernels import norm

    kind, x, weight, dtype = _norm(case)
    norm.norm_bwd(
        torch.empty_like(x, dtype=dtype), x, weight, 1e-5, kind, residual=torch.empty_like(x), need_dweight=True,
        need_dbias=kind == "layer",
    )  # fmt: skip


def _heads(case: Case):
    """(q as a view of one projection, its norm's weight, cos and sin): what attention_block hands over, in place."""
    import torch

    B, S, H, D, R = (3, 1001, 5, 75, 50) if case.ragged else (2, 4096, 8, 128, 128)
    dtype = getattr(torch, case.dtype)
    q = torch.empty(B, S, 2 * H, D, dtype=dtype, device="meta")[:, :, :H]
    angles = torch.empty(S, R, dtype=torch.float32, device="meta")
    return q, torch.empty(D, dtype=dtype, device="meta") if case.extras else None, angles, angles


def _launch_heads_fwd(case):
    from ..triton_kernels import rotary

    q, weight, cos, sin = _heads(case)
    rotary.heads_fwd(q, weight, 1e-6, cos, sin, case.activation == "interleaved", out=q)


def _launch_heads_bwd(case):
    import torch

    from ..triton_kernels import rotary

    q, weight, cos, sin = _heads(case)
    dq = torch.empty_like(q, memory_format=torch.preserve_format)
    rotary.heads_bwd(
        dq, q, weight, 1e-6, cos, sin, case.activation == "interleaved", out=dq, need_dweight=weight is not None
    )


def _launch_attention(case: AttentionCase):
    import torch

    from ..eager import AttentionCore
    from ..triton_kernels import attention

    def meta(*shape, dtype=None):
        return torch.empty(*shape, dtype=dtype or getattr(torch, case.dtype), device="meta")

    B, S, H, H_kv = 2, 4096, 16, 4 if case.kind == "gqa" else 16
    qkv = meta(1 if case.kind == "varlen" else B, S, H + 2 * H_kv, case.head_dim)  # as one projection leaves it
    q, k, v = (part.transpose(1, 2) for part in qkv.split((H, H_kv, H_kv), 2))
    do = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty_like(do[..., 0], dtype=torch.float32)
    dropout = (meta(2, dtype=torch.int64), 6554, 1.1111) if case.dropout else (None, 0, 1.0)
    window = (512 if case.kind == "window" else None, 0 if case.causal else 512 if case.kind == "window" else None)
    options = {
        "bool": lambda: {"mask": meta(B, 1, S, S, dtype=torch.int8)},
        "additive": lambda: {"mask": meta(1, H, S, S)},
        "keys": lambda: {"mask": meta(B, 1, 1, S, dtype=torch.int8)},
        "alibi": lambda: {"slopes": meta(1, H, dtype=torch.float32)},
        "varlen": lambda: dict.fromkeys(("cu_q", "cu_k"), meta(B + 1, dtype=torch.int32)) | {"max_q": S, "max_k": S},
    }.get("additive" if case.kind == "small" else case.kind, dict)()
    core = AttentionCore(0.125, _precision(case), window, dropout=dropout, **options)
    with mock.patch.object(attention, "shared_memory_of", return_value=case.shared):
        if case.op == "attn_bwd":
            attention.attn_bwd(q, k, v, do, lse, lse, core)
            if not case.kind:  # delta knows of none, nor of causal and dropout: compiled once for a head dim
                attention.attn_delta(do, do, core)
        else:
            attention.attn_fwd(q, k, v, core, do=do if case.op == "attn_fwd_delta" else None)


ATTENTION_OPS = ("attn_fwd", "attn_fwd_delta", "attn_bwd")
HEAD_DIMS = (32, 64, 96, 128, 256)
RAGGED_DIMS = (40, 80)  # no power of two: loads of 16 bytes all the same
MASKS = ("bool", "additive", "keys")
ATTENTION_KINDS = (*MASKS, "window", "alibi", "gqa", "varlen")  # and "ieee", float32 without tf32: torch's default
# attention kernel -> how often its machine code holds the loop: the forward's has tiles with and without an edge mask
ATTENTION_LOOPS = {"_attn_fwd_kernel": 2, "_attn_dkdv_kernel": 1, "_attn_dq_kernel": 1}
# kernel -> products of a tile, M x N x K or M x N x head dim each, that one pass of a loop makes
PRODUCTS = {
    "_linear_fwd_kernel": 1, "_linear_bwd_kernel": 1, "_act_grad_kernel": 1, "_mlp_bwd_kernel": 2, "_gated_fwd_kernel": 2,
    "_gated_bwd_kernel": 3, "_gated_act_grad_kernel": 1, "_attn_fwd_kernel": 2, "_attn_dkdv_kernel": 4, "_attn_dq_kernel": 3,
}  # fmt: skip
OPS = {
    "stack_fwd": _launch_stack_fwd,
    "stack_bwd": _launch_stack_bwd,
    "linear_fwd": _launch_linear_fwd,
    "linear_bwd": _launch_linear_bwd,
    "act_grad": _launch_act_grad,
    "mlp_bwd": _launch_mlp_bwd,
    "gated_fwd": _launch_gated_fwd,
    "gated_bwd": _launch_gated_bwd,
    "gated_act_grad": _launch_gated_act_grad,
    "act_fwd": _launch_act_fwd,
    "act_bwd": _launch_act_bwd,
    "dropout": _launch_dropout,
    "norm_fwd": _launch_norm_fwd,
    "norm_bwd": _launch_norm_bwd,
    "heads_fwd": _launch_heads_fwd,
    "heads_bwd": _launch_heads_bwd,
}
# What takes an activation's place where there is none, the heaviest first.
VARIANTS = {
    **dict.fromkeys(("norm_fwd", "norm_bwd"), ("layer", "rms", "layer-autocast")),
    **dict.fromkeys(("heads_fwd", "heads_bwd"), ("halves", "interleaved")),
}
PRODUCT_OPS = (
    "stack_fwd", "stack_bwd", "linear_fwd", "linear_bwd", "act_grad", "mlp_bwd", "gated_fwd", "gated_bwd", "gated_act_grad"
)  # fmt: skip
DROPOUT_OPS = {"linear_fwd", "act_grad", "mlp_bwd", "gated_fwd", "gated_bwd", "gated_act_grad"}


def catch_launches(call, arch: int) -> list[tuple]:
    """Every (kernel, args, kwargs) that `call()` would have launched on compute capability `arch`."""
    from triton.runtime.jit import JITFunction

    from ..triton_kernels import attention, elementwise, linear, mlp, norm, stack

    caught = []

    def run(self, *args, grid, warmup, **kwargs):
        caught.append((self, args, kwargs))

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(JITFunction, "run", run))
        for module in (attention, elementwise, linear, mlp, norm, stack):
            patches.enter_context(mock.patch.object(module, "arch_of", return_value=arch))
        call()
    return caught


def compile_launch(kernel, args, kwargs, arch: int):
    """The compiled kernel of a caught launch, for compute capability `arch`; no driver is needed."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    kwargs = dict(kwargs, debug=False)
    bound, specialization, options = binder(*args, **kwargs)
    options, signature, constexprs, attrs = kernel._pack_args(backend, kwargs, bound, specialization, options)
    return triton.compile(ASTSource(kernel, signature, constexprs, attrs), target=target, options=options.__dict__)


def inspect_cubin(compiled, tool: str, option: str) -> str:
    """What one of the tools that Triton ships (cuobjdump, nvdisasm) says of a compiled kernel."""
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        result = subprocess.run([path, option, file.name], capture_output=True, text=True, check=True)
    return result.stdout + result.stderr


def read_cubin(compiled) -> dict[str, int]:
    """Registers, stack, shared memory and instruction counts, from the machine code."""
    usage = inspect_cubin(compiled, "cuobjdump", "-res-usage")
    sass = inspect_cubin(compiled, "nvdisasm", "-c")
    mnemonics = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", sass, re.MULTILINE)

    # four warps make an HGMMA together, one an HMMA, whose 16816 is 16 x 8 x 16
    shapes = [(4, *shape) for shape in re.findall(r"HGMMA\.(\d+)x(\d+)x(\d+)", sass)]
    shapes += [(1, 16, 8, k) for k in re.findall(r"HMMA\.168(\d+)", sass)]

    def count(pattern):
        return sum(bool(re.match(pattern, m)) for m in mnemonics)

    return dict(
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        stack=int(re.search(r"STACK:(\d+)", usage)[1]),
        local=count(r"(STL|LDL)\b"),
        shared=compiled.metadata.shared,
        hgmma=count(r"[HQ]GMMA"),
        hmma=count(r"[HI]MMA"),
        multiplies=sum(int(m) * int(n) * int(k) // warps for warps, m, n, k in shapes),
        async_copies=count(r"LDGSTS|UTMALDG|UBLKCP"),
        narrow_loads=count(r"LDG\S*\.[US]16"),
        instructions=len(mnemonics),
        philox=len(PHILOX_MULTIPLY.findall(sass)),
    )  # fmt: skip


def staged_bytes(kernel: str, options: dict, itemsize: int) -> int:
    """Least shared memory of a pipelined main loop; 0 where the kernel has none.

    The last stage may live in registers on its way in, so stages - 1 tiles are the least it holds.
    """
    stages = options.get("num_stages", 1)
    if kernel in ATTENTION_LOOPS:  # two operands of one shape stream by: k and v, or q and do
        rows = options["BLOCK_M" if kernel == "_attn_dkdv_kernel" else "BLOCK_N"]
        return 2 * rows * options["HEAD_D"] * itemsize * (stages - 1)
    if "BLOCK_K" in options:
        return (options["BLOCK_M"] + options["BLOCK_N"]) * options["BLOCK_K"] * itemsize * (stages - 1)
    return 0


def needed_multiplies(kernel: str, options: dict) -> float:
    """The multiplies of a warp in the machine code of a tile's products, each computed once."""
    loops, length = ATTENTION_LOOPS.get(kernel, 1), options.get("HEAD_D") or options.get("BLOCK_K", 0)
    if kernel == "_attn_fwd_kernel" and options["LEFT"]:  # a second edge; at 256 dims one loop for all
        loops = 3 if length <= 128 else 1
    count = loops * PRODUCTS.get(kernel, 0)
    return count * options.get("BLOCK_M", 0) * options.get("BLOCK_N", 0) * length / options["num_warps"]


def gate(case: Case | AttentionCase) -> list[tuple[Report, list[str]]]:
    """Compile one case; a report and its faults for every kernel that it launches."""
    results = []
    caught = catch_launches(case.launch, case.arch)
    if not caught:
        raise RuntimeError(f"{case.name}: nothing was launched")
    for kernel, args, kwargs in caught:
        read = read_cubin(compile_launch(kernel, args, kwargs, case.arch))
        hgmma, hmma = read.pop("hgmma"), read.pop("hmma")
        sm90 = case.arch == 90
        report = Report(
            case=case.name,
            kernel=kernel.fn.__name__,
            tile=" ".join(f"{key.removeprefix('BLOCK_')}{kwargs[key]}" for key in TILE_KEYS if key in kwargs),
            tensor_core=hgmma if sm90 else hmma,
            wrong_tensor_core=hmma if sm90 else 0,
            **read,
        )
        itemsize = 4 if case.dtype == "float32" else 2
        product = "BLOCK_K" in kwargs or report.kernel in ATTENTION_LOOPS
        product = product and "ieee" not in case.kind  # which no tensor core computes
        takes = staged_bytes(report.kernel, kwargs, itemsize), needed_multiplies(report.kernel, kwargs)
        results.append((report, report.faults(case, product, *takes)))
    return results


DROPOUT_HEADER = ("case", "kernel", "instructions per element", "Philox calls for 8 elements")


def dropout_table(reports: list[Report]) -> list[tuple[str, str, float, float]]:
    """(case, kernel, instructions, Philox calls per 8 elements) that dropout adds for an element of the scores.

    Instructions with dropout less those without, over the elements of a tile that a thread holds, in all copies of the
    loop. A call is 10 rounds of 2 multiplies; one for 8 elements is what the mask's layout allows.
    """
    without = {(report.case, report.kernel): report for report in reports}
    rows = []
    for report in reports:
        plain = without.get((report.case.removesuffix("+dropout"), report.kernel))
        if report.kernel not in ATTENTION_LOOPS or plain is None or plain is report:
            continue
        size = dict(re.findall(r"(M|N|num_warps)(\d+)", report.tile))
        elements = int(size["M"]) * int(size["N"]) / (32 * int(size["num_warps"])) * ATTENTION_LOOPS[report.kernel]
        rows.append((
            report.case, report.kernel, (report.instructions - plain.instructions) / elements,
            report.philox / 20 / (elements / 8),
        ))  # fmt: skip
    return rows


def _gate_or_error(case: Case | AttentionCase):
    try:
        return case, gate(case), None
    except Exception as error:  # a kernel that does not compile is a finding, and the others still want their turn
        return case, [], f"{type(error).__name__}: {error}"


def run(cases: list[Case | AttentionCase], workers: int = 2, progress: bool = True) -> tuple[list[Report], list[str]]:
    """All reports, and one line for every fault. Workers are spawned: a forked child would inherit the interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("the gate compiles kernels: run it in a process without TRITON_INTERPRET=1")
    reports, faults = [], []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for done, (case, results, error) in enumerate(pool.map(_gate_or_error, cases, chunksize=4), 1):
            new = [f"{case.name}: {error}"] if error else []
            for report, found in results:
                reports.append(report)
                new += [f"{report.case} ({report.kernel}): {fault}" for fault in found]
            faults += new
            if progress and (new or done % 20 == 0 or done == len(cases)):
                lines = [*new, f"{done}/{len(cases)} compiled, {len(faults)} faults"]
                print("\n".join(lines), file=sys.stderr, flush=True)
    return reports, faults


def write_csv(reports: list[Report], path: Path) -> None:
    """The table at `path`, and that of dropout beside it as dropout.csv."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names, reported = [field.name for field in dataclasses.fields(Report)], map(dataclasses.astuple, reports)
    for target, header, rows in (
        (path, names, reported), (path.with_name("dropout.csv"), DROPOUT_HEADER, dropout_table(reports))
    ):  # fmt: skip
        with open(target, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(header)
            writer.writerows(rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ckptkern.benchmarks.gate", description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every activation and flag, not only the shipped tiles")
    parser.add_argument("--only", default="", help="regular expression on case names, e.g. 'mlp_bwd/sm_90'")
    parser.add_argument("--workers", type=int, default=2, help="compiling processes (default: 2)")
    parser.add_argument("--csv", type=Path, help="write the table here")
    args = parser.parse_args()
    cases = [case for case in (all_cases() if args.all else shipped_cases()) if re.search(args.only, case.name)]
    if not cases:
        parser.error(f"--only {args.only!r} matches no case")
    reports, faults = run(cases, args.workers)
    if args.csv:
        write_csv(reports, args.csv)
    for report in reports:
        print(
            f"{report.case:64} {report.kernel:24} {report.tile:24} reg {report.registers:3} stack {report.stack:4} "
            f"smem {report.shared:6}"
        )
    if table := dropout_table(reports):
        print("dropout, per element of the scores:")
    for name, kernel, instructions, calls in table:
        print(f"{name:64} {kernel:24} {instructions:5.1f} instructions, {calls:4.2f} Philox calls for 8")
    print("\n".join(faults) or f"compile gate: {len(reports)} kernels, no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
