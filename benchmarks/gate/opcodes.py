"""Which forms of PTX's opcodes the kernels use, and whether the emulator has a meaning for each."""

from __future__ import annotations

import concurrent.futures
import csv
import multiprocessing
import os
import sys
from collections import Counter
from pathlib import Path

from .cases import AttentionCase, Case

HEADER = ("form", "sm_80 kernels", "sm_90 kernels", "example")


def forms_of(case: Case | AttentionCase) -> tuple[list[dict[str, str]], list[str]]:
    """(for each kernel {form: an instruction of it}, a line for everything that does not translate)"""
    from ... import emulator
    from ...tools.compiling import catch_launches, compile_launch

    forms, faults = [], []
    for kernel, args, kwargs in catch_launches(case.launch, case.arch):
        ptx = compile_launch(kernel, args, kwargs, case.arch).ptx
        instructions = emulator.Kernel(ptx).instructions
        forms.append({one.form: one.text for one in reversed(instructions)})
        try:
            emulator.translate(ptx)
        except emulator.Unknown as unknown:
            faults.append(f"{case.name} ({kernel.fn.__name__}): {unknown}")
    return forms, faults


def write_opcodes(cases: list[Case | AttentionCase], path: Path, workers: int) -> list[str]:
    """Writes the table of forms to `path`; what the emulator cannot translate, a line each."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("kernels are compiled: run it in a process without TRITON_INTERPRET=1")
    counts, examples, faults = Counter(), {}, []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for done, (case, (kernels, unknown)) in enumerate(
            zip(cases, pool.map(forms_of, cases, chunksize=4), strict=True), 1
        ):
            faults += unknown
            for forms in kernels:
                counts.update((form, case.arch) for form in forms)
                examples = forms | examples
            if done % 20 == 0 or done == len(cases):
                text = f"{done}/{len(cases)} translated, {len(examples)} forms, {len(faults)} unknown"
                print(text, file=sys.stderr, flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        for form in sorted(examples):
            text = " ".join(examples[form].split())
            shown = text if len(text) <= 120 else f"{text[:58]} ... {text[-57:]}"
            writer.writerow((form, counts[form, 80], counts[form, 90], shown))
    return faults
