"""Splits fused blocks over the ranks of a device mesh, beside torch's own parallel styles.

roles    which parameters of a block are split, and along which dimension
forward  what replaces a block's forward on a shard
style    what parallelize_module takes
"""

from .style import TensorParallel

__all__ = ["TensorParallel"]
