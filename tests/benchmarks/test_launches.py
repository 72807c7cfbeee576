"""What a launch passes is bounded here; no time is asserted."""

import json
import subprocess

import pytest
from support import outside

# What Triton's binder looks at one by one, and constants and options, of each kernel of the steps: a launch's host time is in
# proportion to them.
MOST = {
    "_act_fwd_kernel": (8, 6), "_act_bwd_kernel": (9, 7), "_hidden_grad_kernel": (11, 6), "_gated_hidden_grad_kernel": (16, 6),
    "_stack_fwd_kernel": (12, 8), "_stack_bwd_kernel": (17, 8),
    "_norm_fwd_kernel": (13, 6), "_norm_bwd_kernel": (15, 8), "_sum_rows_kernel": (6, 4),
    "_heads_fwd_kernel": (20, 11), "_heads_bwd_kernel": (26, 12),
    "_attn_fwd_kernel": (48, 13), "_attn_dkdv_kernel": (52, 14), "_attn_dq_kernel": (48, 14),
}  # fmt: skip


@pytest.mark.slow
def test_what_a_launch_passes():
    program = outside.ROOT / "tests" / "support" / "launches.py"
    process = outside.start(str(program), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, error = process.communicate()
    assert process.returncode == 0, error
    launches = json.loads(out)
    assert {name for name, *_ in launches} == MOST.keys()
    for name, passed, constants in launches:
        assert (passed, constants) <= MOST[name], name
        assert constants <= MOST[name][1], name
