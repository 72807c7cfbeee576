"""The compile gate: every kernel compiled to a cubin for sm_80 and sm_90 without a GPU, and its machine code read.

    python -m ckptkern.benchmarks.gate            the shipped tiles (what `make test` runs)
    python -m ckptkern.benchmarks.gate --all      every activation and flag too (`make gate`)

Launchers are called on meta tensors and their launches caught, so a kernel is compiled with exactly the types,
divisibility and constants of a real launch. What is asserted is in `machine_code.Report.faults`.
"""
