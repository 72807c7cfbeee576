"""In `make test`: the compiled kernels on the emulator, in processes of their own, because here kernels are interpreted."""

import re
import subprocess

import pytest
import triton
from support import outside

# file, and what of it
PARTS = {
    "default tiles of sm_80": ("test_default_tiles.py", "sm_80"),
    "default tiles of sm_90": ("test_default_tiles.py", "sm_90"),
    "what only it can show": ("test_compiled_kernels.py", ""),
}


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
def test_compiled_kernels(part):
    """tests/triton_kernels/FILE --device emulated --sample -k WHAT: all pass, and some run."""
    if not triton.knobs.runtime.interpret:
        pytest.skip("these run here anyway")
    file, chosen = PARTS[part]
    process = outside.start(
        "-m", "pytest", f"triton_kernels/{file}", "--device", "emulated", "--sample", "-k", chosen, "-q",
        "-p", "no:cacheprovider", "-p", "no:xdist", stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    out, _ = process.communicate()
    assert process.returncode == 0, out[-8000:]
    assert int(re.search(r"(\d+) passed", out)[1]) >= 20, out[-2000:]
