"""Named by CI: a kernel of each family as compiled, on the emulator, in a process of its own, because here kernels are
interpreted. CI also runs the tiles of sm_90, and `make emulate` everything."""

import subprocess

import pytest
import triton
from support import outside

CASES = {
    "sm_90": (
        "linear_fwd/bfloat16/silu+aligned+dropout+extras", "attn_fwd_delta/bfloat16/d128+varlen+causal+dropout",
        "norm_bwd/bfloat16/layer+unaligned+extras", "stack_bwd/bfloat16/silu+unaligned+extras",
        "experts_fwd/bfloat16/silu+unaligned+extras", "linear_bwd/float32/silu+aligned+extras",
    ),
    "sm_80": (
        "mlp_bwd/bfloat16/silu+16B+aligned+dropout+extras", "attn_bwd/bfloat16/d64+additive+causal+dropout",
        "dropout/bfloat16/silu+unaligned+extras", "heads_bwd/bfloat16/layer+unaligned+extras",
        "cross_entropy_bwd/bfloat16/everything+unaligned+extras",
    ),
}  # fmt: skip


@pytest.mark.long
def test_compiled_kernels():
    """These cases of test_default_tiles.py pass with --device emulated."""
    if not triton.knobs.runtime.interpret:
        pytest.skip("these run here anyway")
    names = [
        f"triton_kernels/test_default_tiles.py::test_results[cpu-{arch}-{case}]"
        for arch, cases in CASES.items()
        for case in cases
    ]
    options = "--device", "emulated", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"
    process = outside.start("-m", "pytest", *names, *options, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out, _ = process.communicate()
    assert process.returncode == 0, out[-8000:]
    assert f"{len(names)} passed" in out, out[-2000:]
