"""What the code-generation check lets pass: the spills of every kernel that has some, and why there was no better tile."""

from __future__ import annotations

import re
from importlib.metadata import version

COMPILERS = ("3.7", "3.6")  # Triton's versions whose spills are named: that of CI, and of the reference GPU stack
# Pattern of "case kernel" -> bytes of stack under each of them; 3.6 was read for sm_80 and sm_90 alone. In attention the tile
# without spills is half as large, and half of its eight warps would repeat the work of the others: for TF32 and heads of 256
# that is up to twice the matmuls (benchmarks/NOTES.md), while the spills are some ten local instructions of a thousand. The
# same holds for 64 columns in dkdv for heads of 80 to 128 on sm_90. gated_act_grad's three results want a few registers more
# than the 128 at which two programs share an SM.
DEFAULT_SPILLS: dict[str, tuple[int, int]] = {
    r"attn_bwd/sm_80/b?float16/d(80|96)\+causal\+dropout _attn_dq_kernel": (24, 24),
    r"attn_bwd/sm_90/b?float16/d(80|96)(\+causal)?(\+dropout)? _attn_dkdv_kernel": (104, 208),
    r"attn_bwd/sm_90/b?float16/d128(\+gqa|\+varlen)?\+causal(\+dropout)? _attn_dkdv_kernel": (88, 184),
    r"attn_bwd/sm_90/bfloat16/d128\+softcap(\+causal)?\+dropout _attn_dkdv_kernel": (8, 48),
    r"attn_bwd/sm_90/b?float16/d256\S* _attn_dq_kernel": (144, 144),
    r"attn_fwd(_delta)?/sm_90/bfloat16/d256\+(bool|additive)(\+causal)?\+dropout _attn_fwd_kernel": (40, 40),
    r"attn_\w+/sm_80/b?float16/d256\S* \w+": (48, 160),
    r"attn_\w+/sm_80/float32/d(40|64|128)(?!\+ieee)\S* _attn_(fwd|dkdv)_kernel": (96, 88),
    r"attn_fwd(_delta)?/sm_90/float32/d(128|256)(?!\+ieee)\S* _attn_fwd_kernel": (24, 24),
    r"attn_bwd/sm_90/float32/d\d+(?!\d|\+ieee)\S* _attn_(dkdv|dq)_kernel": (128, 128),
    r"attn_dmask/sm_90/b?float16/d256\S* _attn_dmask_kernel": (72, 72),
    r"attn_dmask/sm_90/float32/d128(?!\+ieee)\S* _attn_dmask_kernel": (80, 80),
    r"gated_act_grad/sm_90/b?float16/\w+\+((few|16B)\+)?aligned\+dropout\+extras _gated_act_grad_kernel": (128, 128),
    r"linear_bwd/sm_80/float32/gelu\+ieee\+aligned\+extras _linear_bwd_kernel": (16, 0),
    r"cross_entropy_fwd/sm_120/bfloat16/everything\+aligned\+extras _cross_entropy_fwd_kernel": (16, 16),
    r"cross_entropy_bwd/sm_89/float32/everything\+aligned\+extras _cross_entropy_bwd_kernel": (8, 8),
    r"attn_bwd/sm_90/bfloat16/d128\+bool\+causal\+dropout _attn_dkdv_kernel": (8, 0),
    r"attn_bwd/sm_80/bfloat16/d(40|64)\+causal\+dropout _attn_dkdv_kernel": (8, 0),
    r"attn_bwd/sm_80/float32/d256\+additive\+causal\+dropout _attn_dkdv_kernel": (32, 32),
    r"attn_bwd/sm_10[03]/bfloat16/d256\+additive\+causal\+dropout _attn_dkdv_kernel": (24, 24),
    r"attn_bwd/sm_120/bfloat16/d64\+causal\+dropout _attn_dkdv_kernel": (40, 40),
    # Triton 3.6 alone
    r"cross_entropy_fwd/sm_90/bfloat16/everything\+aligned\+extras _cross_entropy_fwd_kernel": (0, 88),
    r"experts_act_grad/sm_\d+/float32/gelu\+ieee\+aligned\+extras _experts_act_grad_kernel": (0, 16),
    r"attn_dmask/sm_90/bfloat16/d(96|128)\+causal\+dropout _attn_dmask_kernel": (0, 8),
    r"attn_dmask/sm_80/float32/d128\+ieee\+causal\+dropout _attn_dmask_kernel": (0, 8),
    r"attn_bwd/sm_80/float32/d128\+additive\+causal\+dropout _attn_dq_kernel": (0, 8),
    # elementwise kernels: the assembler keeps to fewer registers than a thread may have and sets two to four values aside
    r"norm_bwd/sm_10[03]/bfloat16/layer\+aligned\+extras _norm_bwd_kernel": (8, 8),
    r"heads_fwd/sm_10[03]/bfloat16/layer\+aligned\+extras _heads_fwd_kernel": (16, 16),
    r"dropout/sm_120/bfloat16/gelu\+aligned\+extras _dropout_kernel": (16, 16),
}
# The same for what only `--all` compiles, under the first of them. No tile avoids these spills in every case: the same tiles
# spill nothing with another flag or head dim. The 176 bytes are float32 at IEEE precision, 96 dims, on the ordinary cores.
OTHER_SPILLS: dict[str, int] = {
    r"experts_hidden_grad/sm_90/float16/silu\+unaligned _experts_hidden_grad_kernel": 8,
    r"cross_entropy_fwd/sm_80/float32/\w+\+ieee\+aligned(\+extras)? _cross_entropy_fwd_kernel": 24,
    r"attn_dmask/sm_90/bfloat16/d256\+(keys|window|alibi|gqa|softcap).* _attn_dmask_kernel": 88,
    r"attn_dmask/sm_90/bfloat16/d(80|96)\+(keys|window|alibi|gqa|softcap).* _attn_dmask_kernel": 32,
    r"attn_dmask/sm_90/float32/d(80|96)(?!\+ieee)\S* _attn_dmask_kernel": 80,
    r"attn_dmask/sm_90/float32/d64\+softcap\S* _attn_dmask_kernel": 8,
    r"attn_dmask/sm_\d+/float32/d(32|64|96)\+ieee\S* _attn_dmask_kernel": 8,
    r"attn_dmask/sm_80/bfloat16/d256\+alibi\S* _attn_dmask_kernel": 176,
    r"stack_bwd/sm_90/float16/gelu\+unaligned\+extras _stack_bwd_kernel": 16,
    r"attn_bwd/sm_90/bfloat16/d(80|96)\+(additive|alibi|bool|gqa|keys|varlen|window|softcap).* _attn_dkdv_kernel": 104,
    r"attn_bwd/sm_80/bfloat16/d32\+varlen _attn_dq_kernel": 8,
    r"attn_fwd(_delta)?/sm_90/bfloat16/d256\+gqa(\+causal)?(\+dropout)? _attn_fwd_kernel": 40,
    r"attn_bwd/sm_\d+/float32/d\d+\+ieee.* _attn_(dkdv|dq)_kernel": 16,
    r"attn_fwd(_delta)?/sm_80/float32/d96\+ieee(\+causal)? _attn_fwd_kernel": 16,
    r"attn_fwd(_delta)?/sm_90/float32/d96\+ieee.* _attn_fwd_kernel": 176,
    r"stack_(fwd|bwd)/sm_80/\w+/(?!(relu|gelu|identity)\+)\w+\+(narrow\+)?(aligned|unaligned\+extras|unaligned) \w+": 16,
    r"stack_bwd/sm_80/bfloat16/gelu\+narrow\+unaligned(\+extras)? _stack_bwd_kernel": 24,
    r"gated_(fwd|bwd)/sm_\d+/float32/\w+\+ieee\+unaligned.* \w+": 88,
    r"gated_bwd/sm_\d+/float32/\w+(\+ieee)?\+aligned\+dropout\+extras _gated_bwd_kernel": 32,
    r"(act_grad|mlp_bwd)/sm_80/float32/\w+\+ieee\+unaligned \w+": 8,
    r"linear_bwd/sm_80/float32/(relu2|gelu_tanh)\+ieee\+aligned.* _linear_bwd_kernel": 8,
    r"(linear_fwd|act_grad)/sm_\d+/float32/relu\+ieee\+aligned\+dropout\+extras \w+": 16,
    r"linear_bwd/sm_90/b?float16/gelu_tanh\+aligned _linear_bwd_kernel": 16,
    r"act_grad/sm_80/float32/gelu\+aligned _act_grad_kernel": 8,
}
# Kernels without HGMMA on sm_90, which needs tiles of 64: dk and dv of 64 columns x 256 dims take 256 registers per thread,
# those of TF32 x 128 dims spill 450 bytes, and TF32 x 256 dims does not fit into shared memory. Without UTCHMMA on sm_100,
# whose results have 64 rows at least: the tiles of sm_80 have 32 there.
ALLOWED_HMMA = re.compile(
    r"attn_bwd/sm_(90|10[03])/(\w+/d256|float32/d(80|96|128))\S* _attn_dkdv_kernel|attn_\w+/sm_90/float32/d256"
)
# Kernels in which several warps compute the same matmul: larger tiles do not fit into shared memory.
ALLOWED_TWICE = re.compile(
    r"attn_bwd/sm_\d+/float32/d256\S* _attn_dkdv_kernel|attn_\w+/sm_(80/\w+/d\d+\+small|(89|120)/(\w+/d256|float32/d128))"
)


def compiler(version: str) -> int | None:
    """The place of a version of Triton among COMPILERS; None if its spills are not named."""
    minor = ".".join(version.split(".")[:2])
    return COMPILERS.index(minor) if minor in COMPILERS else None


def allowed_stack(launch: str, version: str) -> int | None:
    """The stack that "case kernel" may use, in bytes; None if the spills of this version of Triton are not named."""
    place = compiler(version)
    if place is None:
        return None
    named = {pattern: sizes[place] for pattern, sizes in DEFAULT_SPILLS.items()} | OTHER_SPILLS
    return max((size for pattern, size in named.items() if re.fullmatch(pattern, launch)), default=0)


def misplaced(spilling: list[str]) -> list[str]:
    """What is wrong with the tables, given every default "case kernel" that spills: none may be fixed and still excused."""
    place = compiler(version("triton"))
    if place is None:
        return []
    faults = [
        f"spills.py: no default kernel spills under Triton {COMPILERS[place]} that {pattern} excuses"
        for pattern, sizes in DEFAULT_SPILLS.items()
        if sizes[place] and not any(re.fullmatch(pattern, launch) for launch in spilling)
    ]
    return faults + [
        f"spills.py: {pattern} belongs to DEFAULT_SPILLS, because of {launch}"
        for pattern in OTHER_SPILLS
        for launch in spilling
        if place == 0 and re.fullmatch(pattern, launch)
    ]
