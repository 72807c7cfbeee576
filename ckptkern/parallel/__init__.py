"""Splits fused blocks, and sequences, over the ranks of a device mesh, beside torch's own parallel styles.

roles    which parameters of a block are split, and along which dimension
forward  what parallelize_module takes for tensor parallelism, and what replaces a block's forward on a shard
context  the same for sequences that are split
"""

from .context import ContextParallel, context_parallel, shard_sequence, unshard_sequence
from .forward import TensorParallel

__all__ = ["ContextParallel", "TensorParallel", "context_parallel", "shard_sequence", "unshard_sequence"]
