"""The default tiles, compiled: every kernel on aligned and unaligned sizes, in both classes of dtypes, with every mask.

These are the code-generation check's cases on small tensors with data. They run on a GPU (`-m gpu`) and in the emulator
(`--device emulated`; `make test` runs them there on both architectures).
"""

import dataclasses
import itertools

import pytest
import torch
from support.kernel_cases import LAUNCHERS, MATMULS, Small, check_like_eager

from benchmarks.codegen.cases import (
    ARCHS,
    ATTENTION_KINDS,
    DMASK_KINDS,
    DROPOUT_OPS,
    OPS,
    PERSISTENT_OPS,
    PRODUCT_OPS,
    VARIANTS,
    AttentionCase,
    Case,
)  # fmt: skip
from ckptkern.triton_kernels import experts_tiles
from ckptkern.triton_kernels.tile import SMS, arch_of, family_of

TF32 = 2.0**-9  # operands have 11 bits
TF32_CHAIN = 2.0**-6  # of eight layers, forward and backward


def of_matmuls() -> list[Case]:
    """In the sample with SiLU, whose code is short; with GELU, as the code-generation check compiles them, besides."""
    sample = [("bfloat16", False), ("bfloat16", True), ("float32", False), ("float32", True, "ieee")]
    variants = {(op.name, kind) for op in MATMULS for arch in ARCHS for kind in op.variants(arch)}
    cases = []
    for op in PRODUCT_OPS:
        light, *others = VARIANTS.get(op, ("silu", "gelu"))
        kinds = ["narrow" if op.startswith("stack_") else "few", "16B", *["persistent"] * (op in PERSISTENT_OPS)]
        kinds += sorted(kind for name, kind in variants if name == op)
        settings = [*sample, ("float32", False, "16B"), *(("bfloat16", False, kind) for kind in kinds)]
        more = sample[:1] if op in VARIANTS else [*sample, ("float32", False, "ieee")]
        chosen = [(light, *one) for one in settings] + [(other, *one) for other in others for one in more]
        for activation, dtype, unaligned, *kind in chosen:
            cases.append(Case(op, 80, dtype, unaligned, activation, op in DROPOUT_OPS, True, *kind))
    return cases


def of_others() -> list[Case]:
    """The heaviest variant in all four ways, the others in two."""
    cases = []
    for op in sorted(OPS.keys() - set(PRODUCT_OPS)):
        heavy, *others = ("",) if op == "dropout" else VARIANTS.get(op, ("silu", "relu"))
        chosen = [(heavy, *setting) for setting in itertools.product(("bfloat16", "float32"), (False, True))]
        if not op.startswith("heads_") and op != "cross_entropy_saved_bwd":
            chosen.append((heavy, "bfloat16", False, "16B"))
        for variant in others:
            chosen += [
                (variant, "bfloat16", False),
                (variant, "bfloat16" if "autocast" in variant else "float32", True),
            ]
        for variant, dtype, unaligned, *kind in chosen:
            cases.append(Case(op, 80, dtype, unaligned, variant, op == "dropout", True, *kind))
    return cases


def of_attention() -> list[AttentionCase]:
    """Every mask with dropout and without at 64 dims, which is the sample; at 128 the heaviest, which the
    code-generation check compiles too."""
    ops, kinds = ("attn_fwd_delta", "attn_bwd"), ("", *ATTENTION_KINDS)

    def case(op: str, head_dim: int, dropout: bool, kind: str = "", dtype: str = "bfloat16") -> AttentionCase:
        return AttentionCase(op, 80, dtype, head_dim, dropout or not kind, dropout, kind)

    sample = [case(op, 64, dropout, kind) for op, dropout, kind in itertools.product(ops, (True, False), kinds)]
    sample += [case("attn_dmask", 64, True, kind) for kind in ("", *DMASK_KINDS)]
    sample += [case(op, 40, True) for op in (*ops, "attn_dmask")]
    sample += [case(op, 64, True, "ieee", "float32") for op in (*ops, "attn_dmask")]
    heavy = [case(op, 128, True, kind) for op, kind in itertools.product(ops, kinds)]
    return sample + heavy + [case("attn_dmask", 128, True, kind) for kind in ("", *DMASK_KINDS)]


CASES = [*of_matmuls(), *of_others(), *of_attention()]


def in_sample(case: Case | AttentionCase, arch: int) -> bool:
    """Of `--sample`, a third of all: on either architecture, of every kernel, aligned sizes in one class of dtypes and
    unaligned ones in the other; every mask, with dropout on one and without on the other; other tiles and variants on one."""
    place = CASES.index(case) + arch // 10
    if isinstance(case, AttentionCase):
        masks = case.op != "attn_dmask" and case.head_dim == 64 and case.kind != "ieee"
        either = case.dropout == (case.op == "attn_fwd_delta") or not masks  # dropout in forward, none in backward
        return case.head_dim < 128 and either and place % 2 == 0
    if case.op in PRODUCT_OPS and case.activation == "gelu":
        return False
    if case.kind in ("", "ieee") and case.activation in ("", "silu", "gelu", "layer", "everything"):
        return (case.unaligned + (case.dtype == "float32") + list(OPS).index(case.op) + arch // 10) % 2 == 0
    return place % 2 == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace("/sm_80", ""))
def test_results(case, device, architecture, interpreted, monkeypatch, request):
    """Twice eager's error at most against eager PyTorch, for everything that a launcher can give."""
    if interpreted:
        pytest.skip("the interpreter has one tile for all sizes")
    family = family_of(architecture or arch_of(torch.empty(0, device=device)))
    if family != 90 and case.kind == "persistent":
        pytest.skip("no TMA")
    if ":" in case.kind and case.kind not in LAUNCHERS[case.op].variants(family):
        pytest.skip("tiles of the other architecture")
    if family != 80 and "narrow" in case.kind:
        pytest.skip("chains this narrow have a tile of their own on sm_80 alone")
    if request.config.option.sample and not in_sample(case, family):
        pytest.skip("not in the sample")
    case = dataclasses.replace(case, arch=family)
    if case.kind != "few":  # a GPU with one SM is never idle: the tiles of large launches
        monkeypatch.setitem(SMS, family, 1)
        monkeypatch.setattr(experts_tiles, "FEW_ROWS", 0)
    tf32 = case.dtype == "float32" and "ieee" not in case.kind and case.op in PRODUCT_OPS
    slack = {"slack": TF32_CHAIN if case.op.startswith("stack_") else TF32} if tf32 else {}
    check_like_eager(case, Small, device, **slack)
