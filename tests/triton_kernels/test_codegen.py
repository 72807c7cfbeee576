"""The code-generation check: the default tiles pass it, injected faults do not, and no value compiles a kernel again."""

import itertools
import json
import os
import re
import subprocess
from importlib import metadata

import pytest
from support import outside

from benchmarks.codegen import cases, sass, spills
from ckptkern.triton_kernels.tile import TILES


def outcome(*command: str) -> tuple[int, str, str]:
    """(status, output, errors) of Python with these arguments, outside of the interpreter."""
    process = outside.start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, error = process.communicate()
    return process.returncode, out, error


def learned(what: str) -> dict:
    status, out, error = outcome(str(outside.ROOT / "tests" / "support" / "compiled.py"), what)
    assert status == 0, error
    return json.loads(out)


def test_the_default_cases():
    """Every kernel, tile row, architecture and dtype, aligned and unaligned: what `make codegen-check` compiles."""
    default = cases.default_cases()
    assert len(default) <= 750
    other = {(case.op, case.arch, case.kind) for case in default if isinstance(case, cases.Case) and case.kind}
    matmuls = set(itertools.product(cases.PRODUCT_OPS, cases.ARCHS, ("ieee",)))
    few = {(op, arch, "few") for op, arch, _ in matmuls if not op.startswith("stack_")}
    persistent = {(op, 90, "persistent") for op in cases.PERSISTENT_OPS}
    assert other >= matmuls | few | persistent | {("stack_fwd", 80, "narrow"), ("stack_bwd", 80, "narrow ieee")}
    assert not any(kind == "persistent" and arch != 90 for _, arch, kind in other)
    for kernel, arch in TILES:
        ops = [op for op in cases.LAUNCHERS.values() if op.tiles == kernel]
        for kind, _, name in (row.partition(":") for row in TILES[kernel, arch]):
            impl = {"16": "triton", "tma": "persistent"}.get(kind)
            for op in ops if name else ():
                wanted = (op.name, arch, f"{impl}:{name}")
                assert wanted in other or (impl == "persistent" and op.name not in cases.PERSISTENT_OPS), wanted
    some = {(case.op, case.arch) for case in default if case.dtype == "bfloat16"}
    assert some >= set(itertools.product((*cases.OPS, "attn_fwd_delta", "attn_bwd", "attn_dmask"), cases.OTHER_ARCHS))
    narrow = {(case.op, case.arch) for case in default if case.kind == "16B"}
    ops = (op for op in cases.OPS if not re.match("heads_|cross_entropy_", op))
    assert narrow == set(itertools.product(ops, cases.ARCHS))
    for op in cases.OPS:
        for arch in cases.ARCHS:
            kinds = {case.unaligned for case in default if (case.op, case.arch, case.dtype) == (op, arch, "bfloat16")}
            assert kinds == {False, True}, (op, arch)
    attention = [case for case in default if isinstance(case, cases.AttentionCase)]
    kinds = {(case.arch, case.kind) for case in attention}
    assert kinds >= set(itertools.product(cases.ARCHS, ("", "ieee", *cases.ATTENTION_KINDS))) | {(80, "small")}
    unfused = {case.name for case in attention if not case.dropout}
    compared = {case.head_dim for case in attention if case.dropout and case.name.removesuffix("+dropout") in unfused}
    assert compared == set(cases.HEAD_DIMS)


def test_a_default_tile_of_every_kernel_passes():
    """No spill, tensor cores, asynchronous copies. `make codegen-check` compiles all default tiles, four minutes of two
    cores."""
    sample = cases.sample_cases()
    assert {case.op for case in sample} == {case.op for case in cases.default_cases()}
    assert {case.arch for case in sample} == set(cases.ARCHS)
    beside_others = "PYTEST_XDIST_WORKER" in os.environ  # which keep the other cores busy
    status, out, error = outcome("-m", "benchmarks.codegen", "--sample", "--workers", "1" if beside_others else "2")
    assert status == 0, f"{out[-4000:]}\n{error[-4000:]}"
    *table, verdict = out.splitlines()
    compiled = {line.split()[0] for line in table if re.search(r" reg +\d+ stack +\d+ smem ", line)}
    assert compiled == {case.name for case in sample}
    assert re.fullmatch(r"code-generation check: \d+ kernels, no fault", verdict)
    dropout = [line.split() for line in table if " Philox calls for 8" in line]
    assert {kernel for _, kernel, *_ in dropout} == set(sass.ATTENTION)


def test_spills_that_the_tables_name_wrongly():
    spilling = [
        "attn_bwd/sm_90/bfloat16/d256+causal _attn_dq_kernel",
        "act_grad/sm_80/float32/gelu+aligned _act_grad_kernel",
    ]
    found = spills.misplaced(spilling)
    if spills.compiler(metadata.version("triton")) == 0:
        default = [sizes for sizes in spills.DEFAULT_SPILLS.values() if sizes[0]]
        assert len(found) == len(default)  # all patterns but one, and the second launch
        assert any("belongs to DEFAULT_SPILLS, because of act_grad/sm_80/" in line for line in found)
        assert not any("_attn_dq_kernel excuses" in line and "sm_90/b?float16/d256" in line for line in found)


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


@pytest.fixture(scope="module")
def injected() -> dict[str, list[str]]:
    return learned("injected")


@pytest.mark.parametrize("name", FAULTS)
def test_injected_fault_is_found(name, injected):
    if name == "spill" and spills.compiler(metadata.version("triton")) is None:
        pytest.skip("the spills of this compiler are not named")
    assert any(re.match(FAULTS[name], fault) for fault in injected[name]), injected[name]


def test_nothing_is_found_where_nothing_is_injected(injected):
    assert injected.keys() == {*FAULTS, "none"}
    assert injected["none"] == []


@pytest.fixture(scope="module")
def specialized() -> list[dict[str, list[str]]]:
    return learned("specialized")


PERSISTENT = [f"{op}, persistent" for op in cases.PERSISTENT_OPS]
WITH_BITS = [f"{op}, relu" for op in cases.OPS if op not in cases.VARIANTS]
LAUNCHES = [*cases.OPS, *WITH_BITS, *PERSISTENT, *cases.ATTENTION_OPS, "attn_dmask"]


def test_what_each_option_launches_is_compiled():
    """A constant's value or a pointer that comes with an option of an op is in a case."""
    assert learned("options") == []


@pytest.mark.parametrize("name", LAUNCHES)
def test_lengths_probabilities_and_first_rows_compile_once(name, specialized):
    """Triton compiles anew for a 1, for a multiple of 16 and for the rest, unless told not to.

    Row counts, thresholds and first rows enter no address. Seeds are tensors: their values are never seen. Matmuls have one
    tile for few rows and one for many.
    """
    found, of_few_and_many = (compiled[name] for compiled in specialized)
    assert found == of_few_and_many


def test_widths_of_16_bytes_compile_once():
    """The compiler is told what divides them, and not what they are."""
    found, of_one = learned("widths")
    assert found.keys() == {*LAUNCHES}
    for name in cases.OPS:
        assert found[name] == of_one[name], name


@pytest.mark.parametrize("name", LAUNCHES)
def test_no_multiply_add_is_fused(name, specialized):
    """A matmul and sum fused in forward and not in recompute would differ in the last bit."""
    assert all("'enable_fp_fusion': False" in key for key in specialized[0][name])


def test_what_is_unaligned_in_one_respect_gets_the_unaligned_tile():
    """An aligned tile spilled where the rows were aligned in length alone, or only the output's were not."""
    others = learned("uneven")
    assert len(others) == 4
    assert not any(others.values()), others


@pytest.fixture(scope="module")
def maxima() -> dict[str, list[str]]:
    return learned("maxima")


@pytest.mark.parametrize("name", ["relu", "relu2", "relu2 backward"])
def test_relu_keeps_nan_on_the_device(name, maxima):
    """tl.maximum drops NaN unless told not to; the interpreter's keeps it either way."""
    assert maxima[name]
    assert all(instruction.startswith("max.NaN.") for instruction in maxima[name])  # of .f32, or Triton 3.9's .bf16x2


def test_known_answer_of_philox_as_compiled():
    """The interpreter multiplies by numpy, kernels by an instruction that is written in PTX."""
    right_and_wrong = [True, False, False, False, False]
    assert learned("philox_words") == {"sm_80": right_and_wrong, "sm_90": right_and_wrong}


def test_the_gate_refuses_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="run it in a process without TRITON_INTERPRET=1"):
        sass.run(cases.default_cases()[:1])
