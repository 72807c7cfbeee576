"""Splits fused blocks, and sequences, over the ranks of a device mesh, beside torch's own parallel styles.

roles    chooses the parameters of a block that are split, and the dimensions
forward  the style for tensor parallelism, and the forward of a block on a shard
context  the same for context parallelism
"""

from .context import ContextParallel, context_parallel, shard_sequence, unshard_sequence
from .forward import TensorParallel

__all__ = ["ContextParallel", "TensorParallel", "context_parallel", "shard_sequence", "unshard_sequence"]
