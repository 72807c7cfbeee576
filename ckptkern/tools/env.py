"""Prints what a bug report or a benchmark result needs to say about the machine: ``python -m ckptkern env``.

No function here raises an error: missing parts are reported with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import shutil
import subprocess
import sysconfig
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from .. import __version__, state
from ..ops import backend, mlp
from ..ops.dispatch import choices, implementations, tuned
from ..segments.checkpoint import checkpoint

GIB = 1 << 30
NOT_INSTALLED = "not installed"


def answer(*command: str) -> str | None:
    """Returns what a program prints, or None if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


_package_version = functools.partial(tuned.version_of, missing=NOT_INSTALLED)


def device_types() -> tuple[str, ...]:
    """Returns the types of the devices that torch has here."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def _versions() -> dict[str, str]:
    driver = answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "ckptkern": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _package_version("triton"),
        "numpy": _package_version("numpy"),
        "CUDA": torch.version.cuda or "none: torch was built without it",
        "cuDNN": str(cudnn or "none"),
        "NVIDIA driver": (driver or "unknown: nvidia-smi is missing or failed").split("\n")[0],
    }


def _system() -> dict:
    return {
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "CPUs": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
    }


def _devices() -> dict[str, dict]:
    devices = {}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices[f"cuda:{index}"] = {
            "name": properties.name,
            "compute capability": f"{properties.major}.{properties.minor}",
            "memory GiB": round(properties.total_memory / GIB, 1),
            "SMs": properties.multi_processor_count,
        }
    return devices or {"cuda": {"missing": "torch sees no CUDA device"}}


def _backends() -> dict[str, str]:
    backends = {"CKPTKERN_BACKEND": os.environ.get("CKPTKERN_BACKEND", "auto, not set")}
    backends |= {"cpu": "none", "cuda": "no device"}
    for device in device_types():
        backends[device], reason = "none", choices._device_reason(device, None)
        with contextlib.suppress(RuntimeError):  # CKPTKERN_BACKEND is "triton", which cannot run here
            backends[device] = choices.choose_backend("env", torch.empty(0, device=device))
        backends[device] += f" ({reason})" if reason else ""
    return backends


def _launchers() -> dict[str, str]:
    """Returns what Triton builds in C at run time to launch kernels, and the tools that it needs."""
    version = _package_version("triton")
    if version == NOT_INSTALLED:
        built = f"none: Triton is {version}"
    elif TorchVersion(version) < (3, 7):
        built = "one for each signature of a kernel, at its first launch"
    else:
        built = "one for all kernels, once"
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang")), None)
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's scheme, which Triton also replaces
        scheme = "posix_prefix"
    header = Path(sysconfig.get_paths(scheme=scheme)["include"], "Python.h")
    return {
        "built": built,
        "compiler": compiler or "none: no gcc or clang on PATH, and CC is not set; kernels cannot be launched on a GPU",
        # no paths unless something is wrong, because env.json is published
        "Python.h": "found" if header.exists() else f"none in {header.parent}: install Python's development package",
    }


def _fp32_precision() -> dict[str, str]:
    backends = torch.backends
    return {
        "all": backends.fp32_precision,
        "cuda matmul": backends.cuda.matmul.fp32_precision,
        "cuDNN conv": backends.cudnn.conv.fp32_precision,
        "CPU matmul": backends.mkldnn.matmul.fp32_precision,
    }


def _sdpa() -> dict[str, bool]:
    cuda = torch.backends.cuda
    return {
        "flash": cuda.flash_sdp_enabled(),
        "memory efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
        "cuDNN": cuda.cudnn_sdp_enabled(),
    }


def _tuned_impls() -> dict:
    """Returns each device's table of `python -m ckptkern autotune`, the implementation of every op, dtype and size; or why
    it is not used."""
    answer = {}
    for device in device_types():
        index = torch.cuda.current_device() if device == "cuda" else None
        file = tuned.path(device, index)
        rows, why = tuned.read(file, tuned.machine(device, index))
        impls = {
            f"{op} {dtype}, {implementations.size_text(size)}": row["impl"]
            for (op, dtype, size), row in sorted(rows.items())
        }
        if impls:
            answer[device] = {"table": str(file), **impls}
        else:
            answer[device] = f"{file} is not used: {why}" if why else "none: python -m ckptkern autotune"
    return answer


def _extension() -> dict:
    """Returns which implementation of `ckptkern.state` runs, why, and its host time beside torch's checkpoint."""
    module, why = state.LOADED
    runs = {"runs": "Python", "why": why, "built for torch": "none"}
    if module is not None:
        runs = {"runs": "C++", "path": Path(why).name, "built for torch": module.torch_version}
    layer, x = torch.nn.Linear(8, 8, device="meta").to_empty(device="cpu"), torch.ones(1, 8, requires_grad=True)
    calls = {
        "ckptkern.checkpoint": lambda: checkpoint(layer, x),
        "torch.utils.checkpoint": lambda: torch_checkpoint(layer, x, use_reentrant=False),
        "ckptkern.mlp": lambda: mlp(x, layer.weight, None, layer.weight, None),
    }

    def microseconds(call):
        times = timeit.repeat(lambda: call().sum().backward(), number=20, repeat=6)
        return f"{min(times) * 1e6 / 20:.0f} us"

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with backend("eager"):
            times = {name: microseconds(call) for name, call in calls.items()}
    finally:
        torch.set_num_threads(threads)
    return runs | {"host time, forward and backward": times}


SECTIONS: dict[str, Callable[[], Any]] = {
    "versions": _versions,
    "system": _system,
    "devices": _devices,
    "extension": _extension,
    "backends": _backends,
    "C launchers": _launchers,
    "fp32_precision": _fp32_precision,
    "sdpa": _sdpa,
    "tuned implementations": _tuned_impls,
}


def collect() -> dict:
    """Returns all sections as data that json can write. A section that fails is replaced by the reason."""
    data = {}
    for name, section in SECTIONS.items():
        try:
            data[name] = section()
        except Exception as error:  # a broken driver or a half-installed package raises anything
            data[name] = {"missing": f"{type(error).__name__}: {error}"}
    return data


def lines(data: dict, indent: int = 0) -> list[str]:
    """Returns data as indented plain text, one value per line."""
    result = []
    for name, value in data.items():
        if isinstance(value, dict):
            result += [" " * indent + f"{name}", *lines(value, indent + 2)]
        else:
            result.append(" " * indent + f"{name}: {value}")
    return result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m ckptkern env``."""
    parser.description = "Print versions, devices, the extension's state, and the backend of each device."
    parser.add_argument("--json", action="store_true", help="print JSON instead of plain text")


def main(args: argparse.Namespace) -> int:
    """Prints all sections and returns 0, whatever is missing."""
    data = collect()
    print(json.dumps(data, indent=2) if args.json else "\n".join(lines(data)))
    return 0
