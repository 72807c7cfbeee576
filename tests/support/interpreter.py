"""Triton's interpreter as the tests use it: without its idle work, which is 16 to 45 % of the time of the files that use it
most, and with masks of Booleans alone."""

from __future__ import annotations

import dataclasses
import functools
import inspect

import numpy as np


@functools.cache
def quicken() -> None:
    from triton.language import core
    from triton.runtime import interpreter

    # Every integer + - * is done again in int64 to compare it with int32's range, and without `debug` nobody reads the answer.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _quick_dtype(interpreter._get_np_dtype)
    core.block_type.__init__ = _quick_block(core.block_type.__init__)
    core.block_type.name = functools.cached_property(lambda block: f"<{block.shape}, {block.element_ty}>")
    core.block_type.name.__set_name__(core.block_type, "name")
    interpreter.InterpretedFunction.__call__ = _quick_helper(interpreter.InterpretedFunction.__call__)


@functools.cache
def check_masks() -> None:
    """A mask that is no tile of Booleans is an error in every Triton, as it is in 3.9's interpreter."""
    from triton.runtime.interpreter import InterpreterBuilder

    for name in ("create_masked_load", "create_masked_store"):
        setattr(InterpreterBuilder, name, _with_checked_mask(getattr(InterpreterBuilder, name)))


def _with_checked_mask(access):
    at = list(inspect.signature(access).parameters).index("mask")

    def checked(*args, **kwargs):
        mask = kwargs["mask"] if "mask" in kwargs else args[at]
        dtype = mask.data.dtype
        if dtype != np.bool_:
            raise TypeError(
                f"{access.__name__}: the mask's elements are {dtype}, not bool. Of a scalar's int1 the interpreter "
                "makes an int32 tile: compare tiles, `row + tl.zeros_like(offs) < rows` instead of `row < rows`."
            )
        return access(*args, **kwargs)

    return checked


def _quick_dtype(numpy_dtype):
    """The table of all dtypes is made once for each of them, not once a call."""
    known = functools.cache(numpy_dtype)

    def quick(dtype):
        scalar = dtype.scalar
        return numpy_dtype(scalar) if scalar.is_ptr() else known(scalar)

    return quick


def _quick_block(initialize):
    """A shape is validated once, not in every result of that shape."""
    known = {}

    def quick(block, element_ty, shape):
        sizes = tuple(shape)
        if sizes not in known:
            initialize(block, element_ty, shape)
            known[sizes] = {"shape": block.shape, "numel": block.numel}
        block.__dict__.update(known[sizes], element_ty=element_ty)

    return quick


def _quick_helper(call):
    """The language is patched in a launch, and not again whenever a helper is called.

    A helper's first call has to, because the library's own helpers see another module of the language than kernels do.
    """
    called = set()

    def quick(helper, *args, **kwargs):
        if helper.fn in called:
            return helper.rewrite()(*args, **kwargs)
        called.add(helper.fn)
        return call(helper, *args, **kwargs)

    return quick
