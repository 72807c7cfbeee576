"""From a launch to its PTX, for any compute capability and without a driver: what the code-generation check reads and
the emulator runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from ckptkern.benchmarks.compiling import instead_of_launches

PTX_ONLY = "ckptkern: PTX only"  # in the keys of Triton's cache, which must not take these for whole kernels


def catch_launches(call: Callable, arch: int) -> list[tuple]:
    """Every (kernel, args, kwargs) that `call()` would have launched on compute capability `arch`."""
    caught = []
    with instead_of_launches(lambda kernel, grid, args, kwargs: caught.append((kernel, args, kwargs)), arch):
        call()
    return caught


@dataclasses.dataclass(frozen=True)
class Specialized:
    """What a launch is compiled for: types, constants and divisibility of its arguments, and options."""

    kernel: Any
    target: Any
    backend: Any
    bound: dict[str, object]
    options: Any
    signature: dict[str, object]
    constexprs: dict
    attrs: dict

    @property
    def source(self):
        """What Triton compiles."""
        from triton.compiler import ASTSource

        return ASTSource(self.kernel, self.signature, self.constexprs, self.attrs)

    @property
    def key(self) -> str:
        """Equal for launches that share a compilation."""
        return repr((self.kernel.fn.__name__, self.target, self.options, self.signature, self.constexprs, self.attrs))


def specialize(kernel, args, kwargs, arch: int) -> Specialized:
    """What Triton would compile that launch for on compute capability `arch`."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    kwargs = dict(kwargs, debug=False)
    bound, specialization, options = binder(*args, **kwargs)
    packed = kernel._pack_args(backend, kwargs, bound, specialization, options)
    return Specialized(kernel, target, backend, bound, *packed)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A launch as PTX. arguments: (Triton's type, value) of what is no constant, in the order of the PTX's parameters."""

    ptx: str
    shared: int  # bytes that a block uses
    scratch: int  # bytes of global memory that a block gets for itself
    bound: dict[str, object]  # every argument by name, for a grid that is a function of them
    arguments: list[tuple[str, object]]
    assemble: Callable[[], bytes]  # the cubin


def _leaves(kind, value) -> Iterator[tuple[str, object]]:
    """The members of arguments that are tuples."""
    if isinstance(kind, (tuple, list)):
        for part_kind, part in zip(kind, value, strict=True):
            yield from _leaves(part_kind, part)
    elif kind != "constexpr":
        yield kind, value


def compile_launch(kernel, args, kwargs, arch: int) -> Compiled:
    """The PTX of a launch for compute capability `arch`, compiled as that launch would be; Triton's cache keeps it."""
    from ckptkern.triton_kernels import fences

    def stop_at_ptx(stages: dict) -> None:
        if fences.MISSING:
            fences.fence(stages)
        stages["cubin"] = lambda ptx, metadata: b""

    specialized = specialize(kernel, args, kwargs, arch)
    compiled = fences.compile_with(
        PTX_ONLY, stop_at_ptx, specialized.source, specialized.target, specialized.options.__dict__
    )
    ptx, metadata = compiled.asm["ptx"], compiled.metadata
    arguments = [
        leaf for name, kind in specialized.signature.items() for leaf in _leaves(kind, specialized.bound[name])
    ]
    return Compiled(
        ptx,
        metadata.shared,
        metadata.global_scratch_size,
        specialized.bound,
        arguments,
        lambda: specialized.backend.make_cubin(ptx, {}, specialized.options, arch),
    )
