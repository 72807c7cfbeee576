"""Launches each kernel once under compute-sanitizer, and says which kernel each report is about.

    python -m tests.codegen.sanitizer [--only REGEX] [--seconds S]
    python -m tests.codegen.sanitizer --launch     the launches alone, for the tool that watches them

The cases are those of the code-generation check, in bfloat16, on aligned and unaligned sizes.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

sys.path.append(str(Path(__file__).parents[2] / "tests"))  # not installed: the emulator and the tests' inputs

from emulator.emulated import emulated
from support.kernel_cases import Small

from ckptkern.triton_kernels import experts_tiles
from ckptkern.triton_kernels.tile import SMS, arch_of, family_of
from codegen.cases import PADDED_DIMS, AttentionCase, Case, sample_cases

TOOLS = ("memcheck", "racecheck")
CASE, LAUNCH, END = "case ", "launch ", "all launched"
FOLDER = "/usr/local/cuda/bin"
NO_KERNEL = "no kernel"
# The first line of a report. Its details are indented, and what follows from others, or sums up, is none.
REPORT = re.compile(r"={8,} (?=\S)(?!COMPUTE-SANITIZER|\w+ SUMMARY|and |Target application|Error: process didn't)(.*)")
DETAIL = re.compile(r"={8,}\s{2,}(\S.*)")
Reports = dict[tuple[str, str], list[str]]  # (kernel, case) -> its reports, each with its first detail


def attributed(log: str) -> tuple[Reports, tuple[str, str] | None]:
    """Reads a log: the reports of every launch, none where it is clean, and the launch that had not ended, if any.

    A report is about the launch before it: launches are announced by `CASE` and `LAUNCH` lines, the next one after the last one
    has ended.
    """
    reports: Reports = {}
    case, ended, kernel, has_detail = "", "", "", True
    for line in log.splitlines():
        if line.startswith(CASE):
            case, kernel = line.removeprefix(CASE), NO_KERNEL
        elif line.startswith(LAUNCH):
            kernel = line.removeprefix(LAUNCH)
            reports.setdefault((kernel, case), [])
        elif line == END:
            ended, case = case, ""
        elif header := REPORT.match(line):
            reports.setdefault((kernel or NO_KERNEL, case or ended), []).append(header[1])
            has_detail = False
        elif (detail := DETAIL.match(line)) and not has_detail:
            reports[kernel or NO_KERNEL, case or ended][-1] += f" {detail[1]}"
            has_detail = True
    return reports, (kernel, case) if case else None


def run(tool: str, executable: str, cases: Sequence[str], device: str, end: float) -> tuple[Reports, list[str]]:
    """Returns the reports and the cases that were not reached. Behind a case that ends the process another goes on."""
    all_reports: Reports = {}
    left = list(cases)
    while left and (seconds := end - time.monotonic()) > 0:
        only = "^(" + "|".join(map(re.escape, left)) + ")$"
        log, status = output_of(
            [
                executable,
                "--tool",
                tool,
                "--target-processes",
                "application-only",
                "--destroy-on-device-error",
                "kernel",
                "--show-backtrace",
                "no",
                "--print-limit",
                "0",
                "--error-exitcode",
                "9",
                sys.executable,
                "-m",
                "tests.codegen.sanitizer",
                "--device",
                device,
                "--launch",
                "--only",
                only,
            ],
            seconds,
        )
        new, running = attributed(log)
        kernel, case = running or (NO_KERNEL, "")
        if status is None:  # what runs now is not known to be clean
            new = {launch: reports for launch, reports in new.items() if launch[1] != case or reports}
        elif case or END not in log.splitlines():
            said = [line for line in log.splitlines() if line.strip() and not line.startswith("====")]
            text = f"the process ended with status {status}: {said[-1] if said else 'no output'}"
            new.setdefault((kernel, case), []).append(text)
        all_reports |= new
        if not case:
            return all_reports, [] if END in log.splitlines() else left
        left = left[left.index(case) + (status is not None) :]
    return all_reports, left


def output_of(command: list[str], seconds: float) -> tuple[str, int | None]:
    """Returns what a command printed, and its status: None if its time was over."""
    # every allocation of its own, so that what lies behind a tensor is out of bounds
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        status = process.poll()
        if status is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        file.seek(0)
        return file.read(), status


def lines_of(tool: str, reports: Reports, left: list[str]) -> list[str]:
    """A line per kernel: its number of reports and the first of them, or that it is clean; what has reports first."""
    kernels: dict[str, list[str]] = {}
    for (kernel, case), texts in reports.items():
        kernels.setdefault(kernel, []).extend(f"{text} ({case})" for text in texts)
    lines = [
        f"{tool} {'REPORTS':>8} {kernel}: {len(texts)}: {texts[0][:400]}" for kernel, texts in kernels.items() if texts
    ]
    lines += [f"{tool} {'clean':>8} {kernel}" for kernel, texts in kernels.items() if not texts]
    return lines + [f"{tool} {'not run':>8} {name}" for name in left]


def watch(cases: Sequence[str], device: str, seconds: float) -> int:
    """Runs both tools side by side. Returns 1 if a kernel has reports or a tool did not run."""
    executable = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), FOLDER]))
    if executable is None:
        print(f"compute-sanitizer is neither on PATH nor in {FOLDER}: install the CUDA toolkit")
        return 1
    end = time.monotonic() + seconds
    with concurrent.futures.ThreadPoolExecutor(len(TOOLS)) as pool:
        ran = [(tool, pool.submit(run, tool, executable, cases, device, end)) for tool in TOOLS]
        results = [(tool, *job.result()) for tool, job in ran]
    for tool, reports, left in results:
        print("\n".join(lines_of(tool, reports, left)), flush=True)
    return int(any(not reports or any(reports.values()) for _, reports, _ in results))


# -- the launches


def cases_of(family: int) -> list[Case | AttentionCase]:
    """Returns the cases for tiles of sm_80 or sm_90, aligned before unaligned sizes; SiLU's code is shorter than GELU's."""
    aligned, unaligned = [], []
    for case in sample_cases():
        if isinstance(case, AttentionCase):
            changes, unaligned_changes = {"head_dim": 128}, {"head_dim": PADDED_DIMS[0]}
        else:
            changes, unaligned_changes = {"activation": case.activation.replace("gelu", "silu")}, {"unaligned": True}
        aligned.append(dataclasses.replace(case, arch=family, **changes))
        unaligned.append(dataclasses.replace(aligned[-1], **unaligned_changes))
    return [*dict.fromkeys([*aligned, *unaligned])]


@contextlib.contextmanager
def large_tiles(family: int) -> Iterator[None]:
    """A GPU with one SM is never idle: tiles of large launches."""
    with mock.patch.dict(SMS, {family: 1}), mock.patch.object(experts_tiles, "FEW_ROWS", 0):
        yield


def announce(kernel: str) -> None:
    print(f"{LAUNCH}{kernel}", flush=True)


@contextlib.contextmanager
def announced(device: str, family: int) -> Iterator[None]:
    """Launches end before the next one begins, which is announced before it; on a CPU the emulator's are, behind them."""
    if device == "cpu":
        with emulated(family) as ran:
            yield
        for launched in ran:
            announce(launched.kernel)
        return
    run = JITFunction.run

    def launch(self, *args, **kwargs):
        announce(self.fn.__name__)
        compiled = run(self, *args, **kwargs)
        torch.cuda.synchronize()
        return compiled

    with mock.patch.object(JITFunction, "run", launch):
        yield


def launch_all(cases: list[Case | AttentionCase], device: str) -> None:
    """Launches every case and says so before and after, in the form that `attributed` reads."""
    for case in cases:
        print(f"{CASE}{case.name}", flush=True)
        with large_tiles(case.arch), announced(device, case.arch):
            case.launch(Small(device))
    print(END, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.codegen.sanitizer", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default: cuda)")
    parser.add_argument("--only", default="", metavar="REGEX", help="of case names, such as 'attn|norm'")
    parser.add_argument("--launch", action="store_true", help="launch, without the tool")
    parser.add_argument("--seconds", type=float, default=300, help="end after these (default: 300)")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 compiles no kernel: unset it")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    family = 90 if args.device == "cpu" else family_of(arch_of(torch.empty(0, device=args.device)))
    cases = [case for case in cases_of(family) if re.search(args.only, case.name)]
    if not cases:
        parser.error(f"--only {args.only!r} matches no case")
    if not args.launch:
        return watch([case.name for case in cases], args.device, args.seconds)
    launch_all(cases, args.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
