"""The fence between cp.async and wgmma, which Triton 3.6 leaves out and 3.7 puts in (triton#9610).

cp.async writes shared memory through the generic proxy, wgmma reads it through the asynchronous one, and PTX orders the two by
fence.proxy.async alone. Under Triton 3.6 our kernels are compiled with the fence behind each wait for copies: a thread fences
what it has copied, and the barrier that follows shows it to all.
"""

from __future__ import annotations

import hashlib
import re
import threading

import triton
from triton.runtime.jit import JITFunction

MISSING = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)

_lock = threading.Lock()  # Triton's hook is process-wide


def fenced(ptx: str) -> str:
    """Returns the PTX with a fence behind each wait for copies, if it has a wgmma."""
    if "wgmma.mma_async" not in ptx:
        return ptx
    return re.sub(r"(cp\.async\.wait_group\s+\d+;)", r"\1\n\tfence.proxy.async.shared::cta;", ptx)


def fence(stages: dict) -> None:
    """Changes a compilation's stages, so that its PTX is `fenced`."""
    to_ptx = stages["ptx"]
    stages["ptx"] = lambda module, metadata: fenced(to_ptx(module, metadata))


def compile_with(name: str, change, source, target=None, options=None, **others):
    """Calls triton.compile with the compilation's stages changed by `change(stages)`.

    name: distinguishes the result in Triton's cache, which in 3.6 does not know of the hook.
    """

    def hook(backend=None, stages=None, options=None, language=None, capability=None):
        if stages is None:  # 3.7 asks for a cache key
            return name, name
        change(stages)

    unchanged = source.hash
    source.hash = lambda: hashlib.sha256(f"{unchanged()} {name}".encode()).hexdigest()
    with _lock, triton.knobs.runtime.scope():
        triton.knobs.runtime.add_stages_inspection_hook = hook
        return triton.compile(source, target=target, options=options, **others)


def compile_fenced(source, target=None, options=None, **others):
    """Calls triton.compile with `fenced` PTX."""
    return compile_with("ckptkern: fenced", fence, source, target, options, **others)


class FencedFunction(JITFunction):
    """A kernel whose launches compile it fenced: a `compile` that `create_binder` sets for each device has no effect."""

    compile = property(lambda self: compile_fenced, lambda self, value: None)


def fence_launches_of(kernel) -> None:
    """Makes a kernel a `FencedFunction`. Interpreted kernels stay as they are."""
    if type(kernel) is JITFunction:
        kernel.__class__ = FencedFunction
