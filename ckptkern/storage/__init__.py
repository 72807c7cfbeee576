"""Decides where tensors are saved for backward: on the host, compressed, or partitioned over ranks.

::

    keep = ckptkern.storage.offload()        # made once: its buffers are reused in every step
    for x, target in data:
        with keep:
            loss = criterion(model(x), target)
        loss.backward()

Every context here is a ``Store``: saved-tensor hooks that flatten each saved tensor to one run of elements, pass it to
``put`` in forward and read it with ``get`` in backward. They work on everything that autograd saves: in unmodified
modules, in ckptkern's fused layers, and on the inputs of checkpointed regions. They chain: ``compress("int8",
then=offload())`` moves the codes to the host. The inner of two nested contexts applies, as with torch's own hooks.

Common guarantees:

- Parameters and views of them stay where they are, and so do tensors below ``min_bytes``, tensors on other devices, and
  what is not plain strided memory (sparse, quantized, conjugated). Backward checks these for in-place changes and
  raises torch's RuntimeError. A DTensor or another wrapper is stored as its parts, except offsets and lengths of a jagged
  tensor, which stay.
- Size, strides, dtype and ``requires_grad`` are restored, and the values bit for bit, except with
  ``compress``. A tensor that is saved twice inside one ``with``, also as another view of the same elements, is stored
  once, if its version did not change: a write through ``.data`` or numpy is not seen.
- ``retain_graph``, second-order gradients and unpacking twice work. A graph that is deleted frees its saved tensors.
- A model compiled by torch.compile saves what its compiled graph saves. Entering a context *inside* a compiled function
  breaks the graph, which ``fullgraph=True`` reports as an error; ``torch.func`` transforms refuse saved-tensor hooks.
"""

from .compress import compress
from .offload import offload
from .partition import partition
from .store import Store

__all__ = ["Store", "compress", "offload", "partition"]
