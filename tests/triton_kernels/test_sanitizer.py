"""Every kernel is launched under the sanitizer, and its report is about the right kernel."""

import json
import os
import subprocess
import sys
import time

import pytest
from codegen import sanitizer
from support import outside

COVERED = """
import json, pkgutil, importlib
from triton.runtime.jit import JITFunction
from codegen.sanitizer import cases_of, large_tiles
from ckptkern import triton_kernels
from codegen.compiling import catch_launches

launched = set()
with large_tiles(90):
    for case in cases_of(90):
        launched |= {kernel.fn.__name__ for kernel, _, _ in catch_launches(case.launch, 90)}
names = [f"{triton_kernels.__name__}.{one.name}" for one in pkgutil.iter_modules(triton_kernels.__path__)]
modules = [*map(importlib.import_module, names)]
defined = {value.fn.__name__ for module in modules for value in vars(module).values() if isinstance(value, JITFunction)}
print(json.dumps(sorted(name for name in defined - launched if name.endswith("_kernel"))))
print(json.dumps(len(launched)))
"""


def printed(*command: str) -> str:
    process = outside.start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, error = process.communicate()
    assert process.returncode == 0, error[-4000:]
    return out


@pytest.mark.slow
def test_every_kernel_is_launched():
    not_launched, count = map(json.loads, printed("-c", COVERED).splitlines())
    assert not not_launched
    assert count > 30


MEMCHECK = """\
========= COMPUTE-SANITIZER
case linear_fwd/sm_90
launch _linear_fwd_kernel
case linear_bwd/sm_90
launch _linear_bwd_kernel
========= Invalid __global__ read of size 2 bytes
=========     at _linear_bwd_kernel+0x1a30 in linear.py:88
=========     by thread (23,0,0) in block (1,0,0)
=========     Access to 0x7f32c4ffe004 is out of bounds
=========     and is 5 bytes after the nearest allocation at 0x7f32c4ff0000 of size 57344 bytes
=========
========= Invalid __global__ read of size 2 bytes
=========     at 0x1a30 in /a/linear.py:88:_linear_bwd_kernel
=========     by thread (24,0,0) in block (1,0,0)
=========
launch _sum_rows_kernel
all launched
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
case norm_bwd/sm_90
launch _norm_bwd_kernel
========= Error: Race reported between Write access at _norm_bwd_kernel+0x1a0 in norm.py:32
=========     and Read access at _norm_bwd_kernel+0x2b0 in norm.py:33 [1024 hazards]
=========
launch _sum_rows_kernel
========= Error: Potential WAW hazard detected at __shared__ 0x404 in block (0,0,0) :
=========     Write Thread (23,0,0) at _sum_rows_kernel+0x1a0 in tile.py:32
=========
========= Barrier error detected. Missing wait.
all launched
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""


def test_reports_are_about_the_kernel_that_they_name():
    reports, running = sanitizer.attributed(MEMCHECK)
    assert running is None
    assert {kernel: len(texts) for (kernel, _), texts in reports.items()} == {
        "_linear_fwd_kernel": 0,
        "_linear_bwd_kernel": 2,
        "_sum_rows_kernel": 0,
    }
    lines = sanitizer.lines_of("memcheck", reports, ["norm_fwd/sm_90"])
    assert lines == [
        "memcheck  REPORTS _linear_bwd_kernel: 2: Invalid __global__ read of size 2 bytes at _linear_bwd_kernel+0x1a30 in "
        "linear.py:88 (linear_bwd/sm_90)",
        "memcheck    clean _linear_fwd_kernel",
        "memcheck    clean _sum_rows_kernel",
        "memcheck  not run norm_fwd/sm_90",
    ]


def test_reports_without_a_name_are_about_the_launch_before():
    reports, _ = sanitizer.attributed(RACECHECK)
    assert {kernel: len(texts) for (kernel, _), texts in reports.items()} == {
        "_norm_bwd_kernel": 1,
        "_sum_rows_kernel": 2,
    }
    assert "tile.py:32" in reports["_sum_rows_kernel", "norm_bwd/sm_90"][0]


TOOL = f"""#!{sys.executable}
import re, sys
only = sys.argv[sys.argv.index("--only") + 1]
for case in ("a+1", "b", "c"):
    if re.search(only, case):
        print("case", case)
        print("launch", f"_{{case[0]}}_kernel", flush=True)
        if case == "b":
            print("RuntimeError: CUDA error")
            sys.exit(3)
print("all launched")
"""


def test_a_tool_goes_on_behind_a_case_that_ends_it(tmp_path, monkeypatch, capsys):
    program = tmp_path / "compute-sanitizer"
    program.write_text(TOOL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert sanitizer.watch(["a+1", "b", "c"], "cuda", 60) == 1
    assert capsys.readouterr().out.splitlines() == [
        line
        for tool in sanitizer.TOOLS
        for line in (
            f"{tool}  REPORTS _b_kernel: 1: the process ended with status 3: RuntimeError: CUDA error (b)",
            f"{tool}    clean _a_kernel",
            f"{tool}    clean _c_kernel",
        )
    ]


def test_without_the_tool_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sanitizer, "FOLDER", str(tmp_path))
    assert sanitizer.watch(["a"], "cuda", 60) == 1
    assert "compute-sanitizer is neither on PATH" in capsys.readouterr().out


@pytest.mark.long
def test_a_tool_is_given_the_launches(tmp_path, monkeypatch):
    """The tool here runs what it is given, on the emulator."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(f'#!/bin/bash\nwhile [ "$1" != {sys.executable} ]; do shift; done\nexec "$@"\n')
    program.chmod(0o755)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", outside.TRITON_CACHE)
    monkeypatch.setenv("PYTHONPATH", str(outside.ROOT), prepend=os.pathsep)
    names = [case.name for case in sanitizer.cases_of(90) if case.op == "norm_bwd"]
    reports, left = sanitizer.run("memcheck", str(program), names, "cpu", time.monotonic() + 600)
    assert not left
    assert reports == {(kernel, name): [] for name in names for kernel in ("_norm_bwd_kernel", "_sum_rows_kernel")}
