"""Decides where tensors are saved for backward: on the host, compressed, or partitioned over ranks.

::

    keep = ckptkern.storage.offload()        # once: its buffers are reused in every step
    for x, target in data:
        with keep:
            loss = criterion(model(x), target)
        loss.backward()

Each context is a ``Store``: saved-tensor hooks that flatten each saved tensor to one run of elements, pass it to ``put`` in
forward and read it with ``get`` in backward. Stores chain: ``compress("int8", then=offload())`` moves the codes to the host.
The inner of two nested contexts applies. docs/how-to/storage.md lists what all stores guarantee.
"""

from .compress import compress
from .offload import offload
from .partition import partition
from .store import Store

__all__ = ["Store", "compress", "offload", "partition"]
