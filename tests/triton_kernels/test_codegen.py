"""The code-generation check: the default tiles pass it, injected faults do not, and no value compiles a kernel again.

CI runs it by name, beside `make codegen-check`."""

import itertools
import json
import os
import re
import subprocess
from importlib import metadata

import pytest
from codegen import cases, sass, spills
from support import outside

from ckptkern.triton_kernels.tile import TILES


def outcome(*command: str) -> tuple[int, str, str]:
    """(status, output, errors) of Python with these arguments, outside of the interpreter."""
    process = outside.start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, error = process.communicate()
    return process.returncode, out, error


def learned(part: str) -> dict:
    status, out, error = outcome(str(outside.ROOT / "tests" / "support" / "compiled.py"), part)
    assert status == 0, error
    return json.loads(out)


def test_the_default_cases():
    """Every kernel, tile row, architecture and dtype, aligned and unaligned: what `make codegen-check` compiles."""
    default = cases.default_cases()
    assert len(default) <= 750
    kinds = {(case.op, case.arch, case.kind) for case in default}
    for kernel, arch in TILES:
        for op in (launcher for launcher in cases.LAUNCHERS.values() if launcher.tiles == kernel):
            assert {(op.name, arch, kind) for kind in ("ieee", "few", "16B")} <= kinds
    sizes = {(case.op, case.arch, case.unaligned) for case in default if case.dtype == "bfloat16"}
    assert sizes >= set(itertools.product(cases.OPS, cases.ARCHS, (False, True)))
    assert sizes >= set(
        itertools.product((*cases.OPS, "attn_fwd_delta", "attn_bwd", "attn_dmask"), cases.OTHER_ARCHS, (False,))
    )


@pytest.mark.long
def test_a_default_tile_of_every_kernel_passes():
    """No spill, tensor cores, asynchronous copies. CI runs `make codegen-check`, which compiles all default tiles."""
    beside_others = "PYTEST_XDIST_WORKER" in os.environ  # which keep the other cores busy
    workers = "1" if beside_others else "2"
    status, out, error = outcome("-m", "tests.codegen", "--sample", "--workers", workers)
    assert status == 0, f"{out[-4000:]}\n{error[-4000:]}"
    *table, verdict = out.splitlines()
    compiled = {line.split()[0] for line in table if re.search(r" reg +\d+ stack +\d+ smem ", line)}
    assert compiled == {case.name for case in cases.sample_cases()}
    assert re.fullmatch(r"code-generation check: \d+ kernels, no fault", verdict)
    dropout = [line.split() for line in table if " instructions of dropout " in line]
    assert {kernel for _, kernel, *_ in dropout} == set(sass.ATTENTION)


FAULTS = {
    "spill": r"spills: \d+ B of stack",
    "unaligned": r"\d+ two-byte global loads on the aligned path",
    "unaligned on sm_80": r"no asynchronous copy in the main loop",
    "shared memory": r"245760 B of shared memory, the GPU has 232448",
    "not pipelined": r"no asynchronous copy in the main loop",
    "no tensor core": r"no tensor-core instruction",
    "HMMA on sm_90": r"\d+ other instructions where HGMMA was meant",
    "narrow HGMMA": r"HGMMA in a tile of N32",
    "nested tuple": r"an early return beside a nested tuple",
    "computed twice": r"196608 multiplies of the tensor cores a warp where 131072 would do",
    "does not compile": r"act_grad/sm_90/bfloat16/tanh\+aligned: CompilationError",
}


@pytest.mark.long
@pytest.mark.parametrize("which", ["some_injected", "injected"])
def test_injected_faults_are_found(which):
    """And nothing is found where nothing is injected."""
    injected = learned(which)
    assert injected.pop("none") == []
    assert which == "some_injected" or injected.keys() == FAULTS.keys()
    for name, faults in injected.items():
        if (
            name != "spill" or spills.compiler(metadata.version("triton")) is not None
        ):  # the spills of this compiler are named
            assert any(re.match(FAULTS[name], fault) for fault in faults), f"{name}: {faults}"


WITH_BITS = [f"{op}, relu" for op in cases.OPS if op not in cases.VARIANTS]
LAUNCHES = {*cases.OPS, *WITH_BITS, *cases.ATTENTION_OPS, "attn_dmask"}


@pytest.mark.long
def test_what_launches_compile():
    answers = learned("at_once")

    assert answers["options"] == [], "a constant's value or a pointer that comes with an option of an op is in no case"

    # Triton compiles anew for a 1, for a multiple of 16 and for the rest, unless told not to. Row counts, thresholds and
    # first rows enter no address. Seeds are tensors: their values are never seen. Matmuls have one tile for few rows and one
    # for many. Of widths that are multiples of 16 bytes the compiler is told what divides them, and not what they are.
    for question, names in (("specialized", LAUNCHES), ("widths", cases.OPS)):
        of_many, of_one = answers[question]
        assert of_many.keys() == LAUNCHES
        again = {name: of_many[name] for name in names if of_many[name] != of_one[name]}
        assert not again, f"{question}: these compile more than once: {again}"

    # A matmul and sum fused in forward and not in recompute would differ in the last bit.
    fused = {
        name
        for name, keys in answers["specialized"][0].items()
        for key in keys
        if "'enable_fp_fusion': False" not in key
    }
    assert not fused, f"multiply-adds of {fused} are fused"

    # An aligned tile spilled where the rows were aligned in length alone, or only the output's were not.
    assert len(answers["uneven"]) == 4
    assert not any(answers["uneven"].values()), (
        f"unaligned in one respect, but with an aligned tile: {answers['uneven']}"
    )

    # tl.maximum drops NaN unless told not to; the interpreter's keeps it either way. Of .f32, or Triton 3.9's .bf16x2.
    assert answers["maxima"].keys() == {"relu", "relu2", "relu2 backward"}
    assert all(kinds and all(kind.startswith("max.NaN.") for kind in kinds) for kinds in answers["maxima"].values()), (
        answers["maxima"]
    )


def test_a_launch_is_whole_and_fenced():
    """Where the emulator has asked for the kernel's PTX before, too; Triton 3.6 has no fence of its own."""
    answers = learned("launched")
    assert [len(counts) for counts in answers.values()] == [1] * 3
    assert min(*answers["bytes"], *answers["wgmmas"], *answers["fences"]) > 0


def test_the_gate_refuses_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="run it in a process without TRITON_INTERPRET=1"):
        sass.run(cases.default_cases()[:1])
