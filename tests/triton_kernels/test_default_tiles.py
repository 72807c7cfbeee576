"""The default tiles, compiled: every kernel on aligned and unaligned sizes, in both classes of dtypes, with every mask.

These are the code-generation check's cases on small tensors with data. They run on a GPU (`-m gpu`) and in the emulator
(`--device emulated`; `make test` runs them there on both architectures).
"""

import dataclasses

import pytest
import torch
from codegen.cases import MATMUL_OPS, AttentionCase, Case, default_cases
from support.kernel_cases import Small, check_like_eager

from ckptkern.triton_kernels import experts_tiles
from ckptkern.triton_kernels.tile import SMS, arch_of, family_of

TF32 = 2.0**-9  # operands have 11 bits
TF32_CHAIN = 2.0**-6  # of eight layers, forward and backward


def of_any_architecture() -> list[Case | AttentionCase]:
    """The check's default cases, with SiLU, whose code is short, in place of GELU, and what has no kind in float32, too."""
    cases = []
    for case in default_cases():
        case = dataclasses.replace(case, arch=80)
        if isinstance(case, Case):
            case = dataclasses.replace(case, activation=case.activation.replace("gelu", "silu"))
            cases += [case] if case.kind else [case, dataclasses.replace(case, dtype="float32")]
        elif case.dtype == "bfloat16" or case.kind == "ieee":  # whose error is that of float32
            cases.append(case)
    return [*dict.fromkeys(cases)]


CASES = of_any_architecture()


def in_sample(case: Case | AttentionCase, arch: int) -> bool:
    """Returns whether `--sample` runs the case: another third on each architecture, and no heads wider than 128."""
    wide = isinstance(case, AttentionCase) and case.head_dim > 128
    return not wide and CASES.index(case) % 3 == arch // 10 % 3


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace("/sm_80", ""))
def test_results(case, device, architecture, interpreted, monkeypatch, request):
    """Twice eager's error at most against eager PyTorch, for everything that a launcher can give."""
    if interpreted:
        pytest.skip("the interpreter has one tile for all sizes")
    family = family_of(architecture or arch_of(torch.empty(0, device=device)))
    if family != 80 and ("narrow" in case.kind or case.kind == "small"):
        pytest.skip("narrow chains and GPUs of less shared memory have tiles of their own on sm_80 alone")
    if request.config.option.sample and not in_sample(case, family):
        pytest.skip("not in the sample")
    case = dataclasses.replace(case, arch=family)
    if case.kind != "few":  # a GPU with one SM is never idle: the tiles of large launches
        monkeypatch.setitem(SMS, family, 1)
        monkeypatch.setattr(experts_tiles, "FEW_ROWS", 0)
    tf32 = case.dtype == "float32" and "ieee" not in case.kind and case.op in MATMUL_OPS
    slack = {"slack": TF32_CHAIN if case.op.startswith("stack_") else TF32} if tf32 else {}
    check_like_eager(case, Small, device, **slack)
