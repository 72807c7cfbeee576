"""The cases of the code-generation check: a launcher on meta tensors with one set of flags each."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from unittest import mock

import torch
from torch import Tensor

from ckptkern import triton_kernels
from ckptkern.eager import ACTIVATIONS, AttentionCore, Groups
from ckptkern.triton_kernels import attention

from . import cross_entropy, experts
from .launchers import LAUNCHERS, precision_of

ARCHS = (80, 90)  # with tiles of their own
OTHER_ARCHS = (89, 100, 103, 120)  # take those of sm_80
DTYPES = ("float16", "bfloat16")
SMALL_GPU = 101376  # bytes of shared memory that a block may use on sm_86, sm_89 and sm_120
SHARED_LIMIT = {80: 166912, 90: 232448, 100: 232448, 103: 232448} | dict.fromkeys((89, 120), SMALL_GPU)


@dataclasses.dataclass(frozen=True)
class _Launch:
    op: str
    arch: int
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.op}/sm_{self.arch}/{self.dtype}/{'+'.join(self.flags())}"

    @property
    def shared(self) -> int:
        """The GPU's shared memory, in bytes per block."""
        return SHARED_LIMIT[self.arch]

    def launch(self, inputs: Inputs | None = None):
        """The launcher's results on `given`."""
        return OPS.get(self.op, _launch_attention)(self, inputs or Inputs())


@dataclasses.dataclass(frozen=True)
class Case(_Launch):
    """One compile: a launcher on meta tensors with one set of flags."""

    unaligned: bool
    activation: str  # or another of VARIANTS
    dropout: bool
    extras: bool  # the optional inputs and outputs: z, h, masks, q/k norms, parameters' gradients
    # "ieee": float32 without tf32, torch's default; "narrow": a chain of at most 32 features, on sm_80; "few": rows; "16B":
    # sizes that are multiples of 16 bytes and not of 16 elements
    kind: str = ""

    def flags(self) -> list[str]:
        flags = [self.activation, *self.kind.split(), "unaligned" if self.unaligned else "aligned"]
        return flags + ["dropout"] * self.dropout + ["extras"] * self.extras


@dataclasses.dataclass(frozen=True)
class AttentionCase(_Launch):
    """The attention launches of one kind: fwd, fwd_delta (the recompute), bwd (dkdv and dq), or dmask."""

    head_dim: int
    causal: bool
    dropout: bool
    kind: str = ""  # one of ATTENTION_KINDS
    unaligned = False

    def flags(self) -> list[str]:
        return [f"d{self.head_dim}", *filter(None, [self.kind])] + ["causal"] * self.causal + ["dropout"] * self.dropout

    @property
    def shared(self) -> int:
        return SMALL_GPU if self.kind == "small" else super().shared


def attention_cases(
    dtype: str, head_dims: Sequence[int], kinds: Sequence[str] = ("",), ops: Sequence[str] = ()
) -> list[AttentionCase]:
    """Every attention launch x architecture x head dim x causal x dropout x kind."""
    return [
        AttentionCase(op, arch, dtype, head_dim, causal, dropout, kind)
        for op, arch, kind, head_dim, causal, dropout in itertools.product(
            ops or ATTENTION_OPS, ARCHS, kinds, head_dims, (False, True), (False, True)
        )
    ]


def default_attention() -> list[AttentionCase]:
    """Each head dim causal, with and without dropout, which dropout's table compares; each kind with the heaviest flags at 128
    dims, and what has tiles of its own.

    The recompute, which is the forward kernel with delta, stands for forward too.
    """
    heavy, dmask = ("attn_fwd_delta", "attn_bwd"), ("attn_dmask",)
    both = attention_cases("bfloat16", HEAD_DIMS, ops=(*heavy, *dmask))
    heaviest = (
        ("bfloat16", (128,), ("",), ("attn_fwd",)),
        ("bfloat16", (128,), ATTENTION_KINDS, heavy),
        ("bfloat16", (64, 256), ("additive",), heavy),
        ("bfloat16", PADDED_DIMS[:1], ("",), heavy),
        ("float32", (128,), ("ieee",), heavy),
        ("float32", (64, 128, 256), ("additive",), heavy),
        ("bfloat16", (128,), DMASK_KINDS, dmask),
        ("float32", (64, 128, 256), ("",), dmask),
        ("float32", (128,), ("ieee",), dmask),
    )
    others = itertools.chain.from_iterable(itertools.starmap(attention_cases, heaviest))
    return [
        *(case for case in both if case.causal),
        *(case for case in others if case.causal and case.dropout),
        *small_cases(),
    ]


def small_cases() -> list[AttentionCase]:
    """Every tile that only GPUs with less shared memory take, with an additive mask, which needs some of that memory."""
    cases = [("attn_fwd_delta", "bfloat16", 256), ("attn_bwd", "bfloat16", 256), ("attn_fwd_delta", "float32", 128)]
    cases += [("attn_bwd", "float32", 128), ("attn_fwd_delta", "float32", 256)]
    cases += [("attn_dmask", "bfloat16", head_dim) for head_dim in (128, 256)]
    cases += [("attn_dmask", "float32", head_dim) for head_dim in (64, 128, 256)]
    return [AttentionCase(op, 80, dtype, head_dim, True, True, "small") for op, dtype, head_dim in cases]


def kinds_of(op: str, arch: int) -> list[tuple[str, str]]:
    """All (dtype, kind) of a kernel other than attention's."""
    dtypes = [(dtype, "") for dtype in (*DTYPES, "float32")]
    dtypes += [("float32", "ieee")] * (op in MATMUL_OPS)
    if op in MATMUL_OPS and not op.startswith("stack_"):
        dtypes += [(dtype, "few") for dtype in DTYPES]
    if op.startswith("stack_") and arch == 80:
        dtypes += [(dtype, f"narrow {kind}".strip()) for dtype, kind in dtypes]
    # strides of heads are another matter; of an LM head's vocabulary nothing is told, so its biases are loaded one by one
    if not op.startswith(("heads_", "cross_entropy_")):
        dtypes += [("bfloat16", "16B"), ("float32", "16B")]
    return dtypes


def default_cases() -> list[Case | AttentionCase]:
    """Every kernel x tile row x architecture, aligned and unaligned, with the heaviest flags; also matmuls at torch's default
    precision of float32, and narrow chains; and what other GPUs run.

    All in bfloat16: float16 differs in the names of a few instructions only, and `--all` compiles it.
    """
    cases = [
        heaviest(op, arch, dtype, kind)
        for op, arch in itertools.product(OPS, ARCHS)
        for dtype, kind in kinds_of(op, arch)
        if kind and (dtype != "float16" or kind == "16B") and (dtype, kind) != ("float32", "narrow")
        if dtype == "bfloat16" or op in MATMUL_OPS
    ]
    for op, arch in itertools.product(OPS, ARCHS):
        cases += [heaviest(op, arch, "bfloat16", unaligned=unaligned) for unaligned in (False, True)]
        for variant in VARIANTS.get(op, ())[1:]:
            cases.append(Case(op, arch, "bfloat16", False, variant, False, False))
    return cases + default_attention() + other_gpus()


def heaviest(op: str, arch: int, dtype: str, kind: str = "", unaligned: bool = False) -> Case:
    return Case(op, arch, dtype, unaligned, VARIANTS.get(op, ("gelu",))[0], op in DROPOUT_OPS, True, kind)


def other_gpus() -> list[Case | AttentionCase]:
    """Every kernel in bfloat16 and the matmuls in float32, for the GPUs without tiles of their own."""
    cases: list[Case | AttentionCase] = []
    for arch in OTHER_ARCHS:
        cases += [heaviest(op, arch, "bfloat16") for op in OPS]
        cases += [heaviest(op, arch, "float32") for op in MATMUL_OPS]
        for op, head_dim in itertools.product(("attn_fwd_delta", "attn_bwd", "attn_dmask"), (64, 128, 256)):
            kind = "additive" if head_dim == 256 and op != "attn_dmask" else ""  # needs the most shared memory
            cases.append(AttentionCase(op, arch, "bfloat16", head_dim, True, True, kind))
        cases += [AttentionCase(op, arch, "float32", 128, True, True) for op in ("attn_fwd_delta", "attn_bwd")]
    return cases


def sample_cases() -> list[Case | AttentionCase]:
    """The first default case, in bfloat16 where there is one, of every kernel, for one architecture and then the other; of
    attention with dropout and without."""
    chosen: dict[tuple, Case | AttentionCase] = {}
    for case in sorted(default_cases(), key=lambda case: (bool(case.kind), case.dtype != "bfloat16")):
        chosen.setdefault((case.arch, case.op, isinstance(case, AttentionCase) and case.dropout), case)
    attention = [case for (arch, *_), case in chosen.items() if isinstance(case, AttentionCase) and arch == 90]
    others = [case for case in chosen.values() if isinstance(case, Case)]
    return [case for case in others if case.arch == ARCHS[list(OPS).index(case.op) % len(ARCHS)]] + attention


def all_cases() -> list[Case | AttentionCase]:
    dims, wide_dims = (*HEAD_DIMS, *PADDED_DIMS), (64, 128, 256)
    attention = [
        (dtype, dims, ("",), ops) for ops in (ATTENTION_OPS, ("attn_dmask",)) for dtype in (*DTYPES, "float32")
    ]
    for kinds, ops in ((ATTENTION_KINDS, ATTENTION_OPS), (DMASK_KINDS, ("attn_dmask",))):
        attention += [("bfloat16", dims, kinds, ops), ("float32", wide_dims, kinds, ops)]
        attention += [("float32", HEAD_DIMS, ("ieee",), ops)]
    return [
        *(
            Case(op, arch, dtype, unaligned, activation, full and op in DROPOUT_OPS, full, kind)
            for op, arch in itertools.product(OPS, ARCHS)
            for (dtype, kind), unaligned, activation, full in itertools.product(
                kinds_of(op, arch), (False, True), VARIANTS.get(op, ACTIVATIONS), (False, True)
            )
            if (op, activation) != ("linear_bwd", "identity")  # its gradient reads no z: no matmul to recompute
            and not (unaligned and kind in ("few", "16B"))  # any number of rows; a contradiction
        ),
        *itertools.chain.from_iterable(itertools.starmap(attention_cases, attention)),
        *small_cases(),
    ]


class Inputs:
    """What a case is launched on: tensors without data, large enough that the default tiles are chosen.

    The emulator's tests launch the same cases, so the same compilations, on small tensors with data: they override all.
    """

    ROWS, FEATURES, HIDDEN = 4096, 1024, 4096
    UNALIGNED = (1001, 515, 1037, 517)  # rows, features in, hidden, features out
    BATCH, LENGTH, HEADS = 2, 4096, 16
    EXPERTS, TOP_K = 8, 2
    first_row = 0  # of the unsharded tensor that dropout's masks, planes of attention and classes are counted in
    backend = triton_kernels

    def __call__(self, *shape: int, dtype: str | torch.dtype, scale: float = 1.0) -> Tensor:
        """Normal numbers times `scale`; whole ones of an integer type, at most as large as fits."""
        return self.tensor(shape, self.dtype(dtype) if isinstance(dtype, str) else dtype, scale)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, scale: float) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    def dtype(self, name: str) -> torch.dtype:
        return getattr(torch, name)

    def sizes(self, case: Case) -> dict[str, int]:
        """Of a matmul: rows M, features in K, hidden N, features out D."""
        more = step_of(case)
        rows = 64 if case.kind == "few" else self.ROWS
        aligned = (rows, *(n + more for n in (self.FEATURES, self.HIDDEN, self.FEATURES)))
        return dict(zip("MKND", self.UNALIGNED if case.unaligned else aligned, strict=True))

    def matrix(self, case: Case) -> Tensor:
        """[M, N]."""
        sizes = self.sizes(case)
        return self(sizes["M"], sizes["N"], dtype=case.dtype)

    def bits(self, rows: int, columns: int) -> Tensor:
        return self(rows, -(-columns // 8), dtype="uint8")

    def dropout(self, wanted: bool) -> tuple:
        return (self(2, dtype="int64"), 6554, 1.1111, 0) if wanted else (None, 0, 1.0, 0)

    def lengths(self, batch: int, length: int) -> dict:
        """Of packed sequences."""
        return dict.fromkeys(("cu_q", "cu_k"), self(batch + 1, dtype="int32")) | {"max_q": length, "max_k": length}

    def groups(self, tokens: int) -> Groups:
        """Every token-expert pair has an expert."""
        pairs = self.TOP_K * tokens
        return Groups(*(self(n, dtype="int32") for n in (pairs, pairs, self.EXPERTS + 1)), self.TOP_K)

    def statistics(self, q, k, v, do, core) -> tuple[Tensor, Tensor]:
        """lse and delta, as forward gives them."""
        lse = torch.empty_like(do[..., 0], dtype=torch.float32)
        return lse, lse


def step_of(case: Case) -> int:
    """What sizes of the kind "16B" are beyond a multiple of 16; 0 of other kinds."""
    return (4 if case.dtype == "float32" else 8) if case.kind == "16B" else 0


def launch_table(case: Case, inputs: Inputs):
    """Launches what the table of launchers describes."""
    launcher, sizes, tensors = LAUNCHERS[case.op], inputs.sizes(case), []
    for name, letters in launcher.inputs.items():
        scale = sizes[letters.replace("N", "")] ** -0.5 if name.startswith("w") else 1.0
        tensors.append(inputs(*(sizes[letter] for letter in letters), dtype=case.dtype, scale=scale))
    options = dict.fromkeys(launcher.wants, case.extras)
    if launcher.dropout:
        options |= {"dropout": inputs.dropout(case.dropout), "row_base": inputs.first_row}
    if case.activation != "relu":  # only relu's backward needs no more of z than its sign
        options.pop("save_bits", None)
    precision = [precision_of(case)] if launcher.matmul else []
    return getattr(inputs.backend, case.op)(*tensors, case.activation, *precision, **options)


def _launch_act_fwd(case: Case, inputs: Inputs):
    z, u = inputs.matrix(case), inputs.matrix(case) if case.extras else None
    return inputs.backend.act_fwd(z, u, case.activation)


def _launch_act_bwd(case: Case, inputs: Inputs):
    dy, has_bits = inputs.matrix(case), case.activation == "relu"
    saved = inputs.bits(*dy.shape) if has_bits else inputs.matrix(case)
    return inputs.backend.act_bwd(dy, saved, case.activation, **{"bits": True} if has_bits else {}, db=case.extras)


def _narrow(case: Case, inputs: Inputs):
    M, width, L = inputs.sizes(case)["M"], 32 if "narrow" in case.kind else 64, 8
    K, N = (width - 3, width - 11) if case.unaligned else (width - step_of(case), width - 3 * step_of(case))
    weights = inputs(L, width, width, dtype=case.dtype, scale=width**-0.5)
    biases = inputs(L, width, dtype=case.dtype) if case.extras else None
    bits = inputs.bits(M, N) if case.activation == "relu" else None
    return inputs(M, K, dtype=case.dtype), weights, biases, inputs(M, N, dtype=case.dtype), bits


def _launch_stack_fwd(case: Case, inputs: Inputs):
    x, w, b, dy, bits = _narrow(case, inputs)
    return inputs.backend.stack_fwd(
        x, w, b, dy.shape[1], case.activation, precision_of(case), save_bits=bits is not None
    )


def _launch_stack_bwd(case: Case, inputs: Inputs):
    return inputs.backend.stack_bwd(*_narrow(case, inputs), case.activation, precision_of(case))


def _norm(case: Case, inputs: Inputs):
    """(kind, x [M, K], a parameter [K]): "layer-autocast" is a float32 stream of activations round bf16 ops."""
    kind, _, autocast = case.activation.partition("-")
    sizes, dtype = inputs.sizes(case), "float32" if autocast else case.dtype
    return kind, inputs(sizes["M"], sizes["K"], dtype=dtype), inputs(sizes["K"], dtype=dtype)


def _launch_norm_fwd(case: Case, inputs: Inputs):
    kind, x, weight = _norm(case, inputs)
    bias = weight if kind == "layer" else None
    return inputs.backend.norm_fwd(x, weight, bias, 1e-5, kind, inputs.dtype(case.dtype))


def _launch_norm_bwd(case: Case, inputs: Inputs):
    kind, x, weight = _norm(case, inputs)
    dy, residual = inputs(*x.shape, dtype=case.dtype), inputs(*x.shape, dtype=x.dtype)
    return inputs.backend.norm_bwd(
        dy,
        x,
        weight,
        1e-5,
        kind,
        residual=None if kind == "rms" and not case.extras else residual,
        need_dweight=weight.dtype,
        need_dbias=kind == "layer" and weight.dtype,
    )


def _heads(case: Case, inputs: Inputs):
    """(q as a view of one projection, its norm's weight and bias, cos and sin, options): what attention_block hands over, in
    place."""
    B, S, H, D, R = (3, inputs.UNALIGNED[0], 5, 75, 50) if case.unaligned else (2, inputs.LENGTH, 8, 128, 128)
    q = inputs(B, S, 2 * H, D, dtype=case.dtype)[:, :, :H]
    rotates, kind = case.activation != "unrotated", "layer" if case.activation == "layer" else "rms"
    angles = (inputs(S, R, dtype="float32"), inputs(S, R, dtype="float32")) if rotates else (None, None)
    weight = inputs(D, dtype=case.dtype) if case.extras or not rotates else None
    bias = weight if kind == "layer" else None
    return q, weight, bias, (1e-6, *angles, case.activation == "interleaved"), kind


def _launch_heads_fwd(case: Case, inputs: Inputs):
    q, weight, bias, options, kind = _heads(case, inputs)
    return inputs.backend.heads_fwd(q, weight, *options, bias=bias, kind=kind, out=q)


def _launch_heads_bwd(case: Case, inputs: Inputs):
    q, weight, bias, options, kind = _heads(case, inputs)
    dq = inputs(*q.shape, dtype=q.dtype)
    needs = {
        name: tensor is not None and tensor.dtype for name, tensor in (("need_dweight", weight), ("need_dbias", bias))
    }
    return inputs.backend.heads_bwd(dq, q, weight, *options, kind=kind, out=dq, **needs)


def _launch_attention(case: AttentionCase, inputs: Inputs):
    B, S, H = inputs.BATCH, inputs.LENGTH, inputs.HEADS
    H_kv = H // 4 if case.kind == "gqa" else H
    rows = 1 if case.kind == "varlen" else B
    qkv = inputs(rows, S, H + 2 * H_kv, case.head_dim, dtype=case.dtype)  # as one packed projection returns it
    q, k, v = (part.transpose(1, 2) for part in qkv.split((H, H_kv, H_kv), 2))
    do = inputs(rows, H, S, case.head_dim, dtype=case.dtype)
    reach = S // 8 if case.kind == "window" else None
    shape = (1, H, 1 if case.kind == "keys" else S, S)  # of a mask that trains
    options = {
        "bool": lambda: {"mask": inputs(B, 1, S, S, dtype="int8")},
        "additive": lambda: {"mask": inputs(1, H, S, S, dtype=case.dtype)},
        "keys": lambda: {"mask": inputs(B, 1, 1, S, dtype="int8")},
        "alibi": lambda: {"slopes": inputs(1, H, dtype="float32")},
        "softcap": lambda: {"softcap": 50.0},
        "varlen": lambda: inputs.lengths(B, S),
    }.get("additive" if case.kind == "small" else case.kind, dict)()
    if case.op == "attn_dmask":
        options["mask"] = inputs(*shape, dtype=case.dtype)
    options |= {"plane_base": inputs.first_row, "planes": inputs.first_row, "dropout": inputs.dropout(case.dropout)}
    core = AttentionCore(0.125, precision_of(case), (reach, 0 if case.causal else reach), **options)
    with mock.patch.object(attention, "shared_memory_of", return_value=case.shared):
        if case.op in ("attn_fwd", "attn_fwd_delta"):
            return inputs.backend.attn_fwd(q, k, v, core, do=do if case.op == "attn_fwd_delta" else None)
        lse, delta = inputs.statistics(q, k, v, do, core)
        if case.op == "attn_dmask":
            return inputs.backend.attn_dmask(q, k, v, do, lse, delta, core, shape)
        gradients = inputs.backend.attn_bwd(q, k, v, do, lse, delta, core)
        if case.kind in ("", "varlen"):  # delta depends on no other kind, nor on causal nor dropout
            gradients += (inputs.backend.attn_delta(do, do, core),)
        return gradients


ATTENTION_OPS = ("attn_fwd", "attn_fwd_delta", "attn_bwd")
HEAD_DIMS = (32, 64, 96, 128, 256)
PADDED_DIMS = (40, 80)  # not powers of two, yet loads are 16 bytes wide
DMASK_KINDS = ("keys", "window", "alibi", "gqa", "softcap")
ATTENTION_KINDS = (
    "bool",
    "additive",
    *DMASK_KINDS[:4],
    "varlen",
    "softcap",
)  # and "ieee": without tf32, torch's default
MATMUL_OPS = (
    *("stack_fwd", "stack_bwd"),
    *(launcher.name for launcher in LAUNCHERS.values() if launcher.matmul),
    *experts.MATMULS,
    *cross_entropy.MATMULS,
)
DROPOUT_OPS = {launcher.name for launcher in LAUNCHERS.values() if launcher.dropout}
OPS = {
    "stack_fwd": _launch_stack_fwd,
    "stack_bwd": _launch_stack_bwd,
    **{launcher.name: launch_table for launcher in LAUNCHERS.values() if launcher.matmul},
    "act_fwd": _launch_act_fwd,
    "relu_bits": lambda case, inputs: inputs.backend.relu_bits(inputs.matrix(case)),
    "act_bwd": _launch_act_bwd,
    "hidden_grad": launch_table,
    "gated_hidden_grad": launch_table,
    "dropout": lambda case, inputs: inputs.backend.dropout(
        inputs.matrix(case), *inputs.dropout(True), row_base=inputs.first_row
    ),
    "norm_fwd": _launch_norm_fwd,
    "norm_bwd": _launch_norm_bwd,
    "heads_fwd": _launch_heads_fwd,
    "heads_bwd": _launch_heads_bwd,
    **cross_entropy.LAUNCHES,
    **experts.LAUNCHES,
}
# What takes an activation's place in launchers without one, the heaviest first.
VARIANTS = {
    **dict.fromkeys(("norm_fwd", "norm_bwd"), ("layer", "rms", "layer-autocast")),
    **dict.fromkeys(("heads_fwd", "heads_bwd"), ("layer", "halves", "interleaved", "unrotated")),
    **cross_entropy.VARIANTS,
    **experts.VARIANTS,
}
