"""What is saved from forward to backward, and where: on the host, compressed, or spread over ranks.

::

    keep = ckptkern.storage.offload()        # made once: its buffers are reused in every step
    for x, target in data:
        with keep:
            loss = criterion(model(x), target)
        loss.backward()

Every context here is a ``Store``: saved-tensor hooks that flatten what autograd saves to one run of elements, hand it to
``put`` in forward and ask ``get`` for it in backward. They work on whatever autograd saves: in unmodified modules, in
ckptkern's fused layers, and on the inputs of checkpointed regions. They chain: ``compress("int8", then=offload())``
keeps the codes on the host. Of two nested contexts the inner one counts, as with torch's own hooks.

All of them promise:

- Parameters and views of them stay where they are, and so do tensors below ``min_bytes``, tensors on other devices, and
  what is not plain strided memory (sparse, quantized, conjugated). What stays is checked for in-place changes in
  backward, with torch's RuntimeError. A DTensor or another wrapper is stored as its parts.
- Size, strides, dtype and ``requires_grad`` come back as they were; the values too, bit for bit, except with ``"fp8"`` and
  ``"int8"``. A tensor saved twice inside one ``with``, also as another view of the same elements, is saved once.
- ``retain_graph``, second-order gradients and unpacking twice work. A graph that is dropped frees what was saved for it.
- A model compiled by torch.compile saves what its compiled graph saves. Entering a context *inside* a compiled function
  breaks the graph, which ``fullgraph=True`` reports as an error; ``torch.func`` transforms refuse saved-tensor hooks.
"""

from .compress import compress
from .offload import offload
from .partition import partition
from .store import Store

__all__ = ["Store", "compress", "offload", "partition"]
