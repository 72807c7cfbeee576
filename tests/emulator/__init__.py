"""Runs the PTX that Triton compiles, for sm_80 and sm_90, on a CPU, and checks every access to memory. See README.md.

    run(ptx, grid, shared, arguments, tensors)

needs numpy alone and knows nothing of whose kernels it runs.
"""

from .launch import Counts, Tensor, run
from .memory import Fault
from .ptx import Kernel, Unknown
from .translate import translate

__all__ = ["Counts", "Fault", "Kernel", "Tensor", "Unknown", "run", "translate"]
