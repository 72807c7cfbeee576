"""Takes the snapshot of precision settings in Python, as csrc/precision.cpp does: those that decide how a recomputed op
rounds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import _C

DEVICES = tuple(_C._autocast_supported_devices())
IMPLICIT = (
    object()
)  # an untouched conv or rnn of torch 2.13 and later: TF32, unless a parent is set; it cannot be written


class Setting(NamedTuple):
    """Reads and writes a setting of the process. read: the effective value, which a snapshot compares; raw: the value to
    write to restore it, if not the same."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    raw: Callable[[], Any] | None = None


_get, _set = _C._get_fp32_precision_getter, _C._set_fp32_precision_setter


def follows(backend: str, op: str, parent: str) -> bool:
    """Returns whether (backend, op) inherits its value from (parent, "all"). Leaves the parent at TF32."""
    _set(parent, "all", "ieee")
    under_ieee = _get(backend, op)
    _set(parent, "all", "tf32")
    return under_ieee != _get(backend, op)


def raw_parent(backend: str) -> str:
    generic, own = _get("generic", "all"), _get(backend, "all")
    inherits = follows(backend, "all", "generic")
    _set("generic", "all", generic)
    return "none" if inherits else own


def float32(backend: str, op: str) -> Setting:
    def read():
        value = _get(backend, op)
        return "ieee" if value == "none" else value  # "not set" runs as IEEE, also if it is written under any parent

    def raw():
        """Returns what (backend, op) itself holds. Moves its parents for a moment to see whether it inherits."""
        generic, parent, own = _get("generic", "all"), raw_parent(backend), _get(backend, op)
        if follows(backend, op, backend):
            _set("generic", "all", "none")
            _set(backend, "all", "none")
            own = "none" if _get(backend, op) == "none" else IMPLICIT
        _set(backend, "all", parent)
        _set("generic", "all", generic)
        return own

    return Setting(read, lambda value: _set(backend, op, value), raw)


CUDA_CONV, CUDA_RNN = 1, 2
SETTINGS = (
    *(float32(backend, op) for backend in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn")),
    Setting(
        _C._get_cublas_allow_fp16_reduced_precision_reduction,
        lambda pair: _C._set_cublas_allow_fp16_reduced_precision_reduction(*pair),
    ),
    Setting(
        _C._get_cublas_allow_bf16_reduced_precision_reduction,
        lambda pair: _C._set_cublas_allow_bf16_reduced_precision_reduction(*pair),
    ),
    Setting(_C._get_cublas_allow_fp16_accumulation, _C._set_cublas_allow_fp16_accumulation),
    Setting(_C._get_cpu_allow_fp16_reduced_precision_reduction, _C._set_cpu_allow_fp16_reduced_precision_reduction),
    Setting(_C._get_math_sdp_allow_fp16_bf16_reduction, _C._set_math_sdp_allow_fp16_bf16_reduction),
    Setting(
        lambda: (_C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()),
        lambda value: _C._set_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    Setting(torch.get_default_dtype, torch.set_default_dtype),
    *(
        Setting(getattr(_C, f"_get_{kind}_sdp_enabled"), getattr(_C, f"_set_sdp_use_{kind}"))
        for kind in ("flash", "mem_efficient", "math", "cudnn", "overrideable")
    ),
    Setting(_C._get_sdp_priority_order, _C._set_sdp_priority_order),
)
READS = tuple(setting.read for setting in SETTINGS)

# What each open guard of any thread overwrote, by index in SETTINGS with (cuda, all) last; oldest guard first. In whatever
# order they exit, the process ends with the settings from before the first.
CUDA_ALL = len(SETTINGS)
LOCK = threading.Lock()
Debt = dict[int, Any]
_debts: list[Debt] = []


def impose(wanted: list, debt: Debt) -> None:
    """Sets `wanted`, and notes in `debt` what it overwrites, also when a write raises."""
    # An implicit setting could not be written back, so its parent is overwritten instead. All implicit settings agree on the
    # parent, now as in the snapshot, because no setting can become implicit.
    for i in (CUDA_CONV, CUDA_RNN):
        if SETTINGS[i].read() != wanted[i] and SETTINGS[i].raw() is IMPLICIT:
            debt[CUDA_ALL] = raw_parent("cuda")
            _set("cuda", "all", wanted[i])
    for i, (read, write, raw) in enumerate(SETTINGS):
        if read() != wanted[i]:
            owed = (raw or read)()
            write(wanted[i])
            debt[i] = owed


def repay(debt: Debt) -> None:
    for i in sorted(debt):
        if i == CUDA_ALL:
            _set("cuda", "all", debt[i])
        else:
            SETTINGS[i].write(debt[i])


def autocast_state() -> tuple[tuple[bool, ...], tuple[torch.dtype, ...], bool]:
    enabled, dtypes = map(_C.is_autocast_enabled, DEVICES), map(_C.get_autocast_dtype, DEVICES)
    return tuple(enabled), tuple(dtypes), _C.is_autocast_cache_enabled()


def set_autocast(state: tuple) -> None:
    for device, enabled, dtype in zip(DEVICES, *state[:2], strict=True):
        _C.set_autocast_dtype(device, dtype)
        _C.set_autocast_enabled(device, enabled)
    _C.set_autocast_cache_enabled(state[2])


class _Thread(threading.local):
    def __init__(self) -> None:
        self.frames: list[tuple[Precision, Any, Any]] = []


_thread = _Thread()


class Precision:
    """A snapshot of the settings that decide precision: autocast, the fp32 precision of matmul, conv and rnn, reductions,
    deterministic mode, the default dtype, and the allowed attention kernels. As a context manager, sets them, and then
    restores the previous ones. It is re-entrant, and usable from any thread."""

    def __init__(self) -> None:
        self.autocast, self.process = autocast_state(), [read() for read in READS]

    def __enter__(self) -> Precision:
        debt: Debt | None = None  # nothing to restore
        with LOCK:
            if _debts or [read() for read in READS] != self.process:
                debt = {}
                try:
                    impose(self.process, debt)
                except BaseException:
                    repay(debt)
                    raise
                _debts.append(debt)
        now = autocast_state()
        if now != self.autocast:
            set_autocast(self.autocast)
        if any(self.autocast[0]):
            _C.autocast_increment_nesting()
        _thread.frames.append((self, None if now == self.autocast else now, debt))
        return self

    def __exit__(self, *_) -> None:
        frames = _thread.frames
        if not frames or frames[-1][0] is not self:
            raise RuntimeError("Precision: guards must be left by the thread that entered them, last entered first")
        _, outer, debt = frames.pop()
        if outer is not None:
            set_autocast(outer)
        # The outermost region clears the cache of cast weights: autograd's thread is in no autocast, and would hold them.
        if any(self.autocast[0]) and _C.autocast_decrement_nesting() == 0:
            _C.clear_autocast_cache()
        if debt is None:
            return
        with LOCK:
            (place,) = (i for i, other in enumerate(_debts) if other is debt)
            if place == len(_debts) - 1:
                repay(debt)
            else:  # a younger guard of another thread is still open, and will restore these too
                _debts[place + 1] |= debt
            del _debts[place]
