"""The code-generation check compiles every kernel to a cubin for sm_80, sm_90 and other GPUs without a GPU and reads its
SASS.

    python -m tests.codegen            the default tiles (what `make test` runs)
    python -m tests.codegen --all      every activation and flag too (`make codegen-check`)

Launchers are called on meta tensors and their launches caught, so a kernel is compiled with exactly the types,
divisibility and constants of a real launch. `sass.Report.faults` has the assertions.
"""
