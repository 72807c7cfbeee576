"""Faults of triton_kernels: padding, tails, tables of two halves, sums over slices, rounding, masks."""

from __future__ import annotations

from .anchors import Fault

KERNELS = [
    Fault(
        "norm: the padding of a row counts in its variance",
        "triton_kernels/norm.py",
        "x = «tl.where(mask, x - (tl.sum(x, axis=1) / D)[:, None], 0.0)»",
        "x - (tl.sum(x, axis=1) / D)[:, None]",
        ("tests/triton_kernels/test_norm.py",),
    ),
    Fault(
        "rotary: backward reads the sine of the other half",
        "triton_kernels/rotary.py",
        "a, b = «a * cos_a + b * sin_b, b * cos_b - a * sin_a»",
        "a * cos_a + b * sin_a, b * cos_b - a * sin_b",
        ("tests/triton_kernels/test_norm.py -k heads",),
    ),
    Fault(
        "rotary: a program leaves out all tiles of tokens but its first",
        "triton_kernels/rotary.py",
        "for tile in range(tl.program_id(0) * tiles, «(tl.program_id(0) + 1) * tiles»):",
        "tl.program_id(0) * tiles + 1",
        ("tests/triton_kernels/test_norm.py -k heads",),
    ),
    Fault(
        "elementwise: a NaN does not pass relu's mask of bits",
        "triton_kernels/elementwise.py",
        "mask_byte, pack_bits(«~(h <= 0.0)»,",
        "h > 0.0",
        ("tests/triton_kernels/test_elementwise.py -k bits",),
    ),
    Fault(
        "attention: dq has another slope of the softcap",
        "triton_kernels/attention_backward.py",
        "p *= «1.0 - qk * qk» dp = dot(do, tl.trans(v)",
        "1.0 - qk",
        ("tests/triton_kernels/test_attention.py",),
    ),
    Fault(
        "attention: a group's heads share a tail tile of rows",
        "triton_kernels/attention_backward.py",
        "rows = «hi - lo if GROUP == 1 else tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_M) * BLOCK_M»",
        "hi - lo",
        ("tests/triton_kernels/test_attention.py",),
    ),
    Fault(
        "loss: a sum over slices is not rescaled to the largest",
        "triton_kernels/cross_entropy.py",
        "total = total «* before» + tl.sum(share, axis=0)",
        "",
        ("tests/triton_kernels/test_cross_entropy.py",),
    ),
    Fault(
        "experts: backward's hidden layer is not rounded as forward's",
        "triton_kernels/experts_backward.py",
        "h = «upcast(cast(a * upcast(u), g.dtype))»",
        "a * upcast(u)",
        ("tests/triton_kernels/test_experts.py",),
    ),
    Fault(
        "experts: the pass between a library's matmuls takes the weights in the order of rows",
        "triton_kernels/experts_backward.py",
        "dh = upcast(load_tile(dh_rows, rows, offs_n, mask)) pairs = «tl.load(order_ptr + rows, mask=rows < R, other=0)»",
        "rows",
        ("tests/triton_kernels/test_experts.py -k hidden_grad",),
    ),
    Fault(
        "linear: a NaN does not pass relu's mask of bits",
        "triton_kernels/linear.py",
        "bits = pack_bits(«~(upcast(z) <= 0.0)»,",
        "upcast(z) > 0.0",
        ("tests/triton_kernels/test_elementwise.py -k whole_range",),
    ),
    Fault(
        "gated mlp: the activation is rounded before the product",
        "triton_kernels/mlp.py",
        "def gated_tile(g, u, dropout, first_row, first_col, ACT: tl.constexpr):"
        ' """Computes h = dropout(round(act(g) u)) in g\'s type.""" h = cast(«act(g, ACT)» * upcast(u), g.dtype)',
        "upcast(cast(act(g, ACT), g.dtype))",
        ("tests/triton_kernels/test_mlp.py",),
    ),
    Fault(
        "dropout: a chunk that begins inside a block of 16 rows",
        "triton_kernels/elementwise.py",
        "c1 = «row_base // 16 * 8» + pid_m",
        "row_base // 2",
        ("tests/triton_kernels/test_philox.py",),
    ),
    Fault(
        "stack: a weight's gradient reads the layer below before its activation",
        "triton_kernels/stack.py",
        "h = «cast(act(saved, ACT), saved.dtype)»",
        "saved",
        ("tests/triton_kernels/test_stack.py",),
    ),
]
