"""How much of the package a reader meets who follows one call, and the host runs: files and functions."""

import pytest
from support.entered import by_file, calls, entered

from ckptkern.state import LOADED

MOST = {  # files and functions
    "mlp": (8, 45),
    "linear_cross_entropy": (10, 65),
    "attention_block": (16, 150),
    "transformer_layer": (20, 200),
}


@pytest.mark.parametrize("name", MOST)
def test_a_call_enters_few_files_and_functions(name):
    counts = entered(calls()[name])
    files, functions = len(by_file(counts)), len(counts)
    print(f"{name}: {files} files, {functions} functions, {sum(counts.values())} calls; at most {MOST[name]}")
    assert min(files, functions) >= 4, "nothing was seen"
    most_files, most_functions = MOST[name]
    assert files <= most_files
    # without the extension a weight's check is Python's: `check_tensor`
    assert functions <= most_functions + (LOADED.module is None)
