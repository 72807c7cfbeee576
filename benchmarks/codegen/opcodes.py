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


def keys_of(case: Case | AttentionCase) -> list[str]:
    """Of each launch of the case, what it is compiled for."""
    from .compiling import catch_launches, specialize

    return [specialize(*launch, case.arch).key for launch in catch_launches(case.launch, case.arch)]


def forms_of(case: Case | AttentionCase, places: list[int] | None = None) -> tuple[list[dict[str, str]], list[str]]:
    """(for each kernel {form: an instruction of it}, a line for what does not translate); places: of which launches."""
    import emulator

    from .compiling import catch_launches, compile_launch

    forms, faults = [], []
    for place, (kernel, args, kwargs) in enumerate(catch_launches(case.launch, case.arch)):
        if places is not None and place not in places:
            continue
        ptx = compile_launch(kernel, args, kwargs, case.arch).ptx
        instructions = emulator.Kernel(ptx).instructions
        forms.append({one.form: one.text for one in reversed(instructions)})
        try:
            emulator.translate(ptx)
        except Exception as unknown:  # also what the translator itself has wrong: the other cases go on
            faults.append(f"{case.name} ({kernel.fn.__name__}): {type(unknown).__name__}: {unknown}")
    return forms, faults


def write_opcodes(cases: list[Case | AttentionCase], path: Path, workers: int) -> list[str]:
    """Writes the table of forms to `path`; what the emulator cannot translate, a line each. Launches of several cases that
    are compiled alike count as one kernel."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("kernels are compiled: run it in a process without TRITON_INTERPRET=1")
    counts, examples, faults = Counter(), {}, []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        seen, firsts = set(), []  # (case, the places of its launches that no case before has)
        for case, keys in zip(cases, pool.map(keys_of, cases, chunksize=16), strict=True):
            new = {key: place for place, key in enumerate(keys) if (case.arch, key) not in seen}
            seen.update((case.arch, key) for key in new)
            if new:
                firsts.append((case, list(new.values())))
        print(f"{len(cases)} cases launch {len(seen)} kernels", file=sys.stderr, flush=True)
        for done, ((case, _), (kernels, unknown)) in enumerate(
            zip(firsts, pool.map(forms_of, *zip(*firsts, strict=True), chunksize=4), strict=True), 1
        ):
            faults += unknown
            for forms in kernels:
                counts.update((form, case.arch) for form in forms)
                examples = forms | examples
            if done % 20 == 0 or done == len(firsts):
                text = f"{done}/{len(firsts)} cases translated, {len(examples)} forms, {len(faults)} unknown"
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
