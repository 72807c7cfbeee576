"""Processes without Triton's interpreter, because a kernel that was decorated under TRITON_INTERPRET cannot be compiled."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRITON_CACHE = str(ROOT / "build" / "triton")  # what the gate and the emulator compile


def start(*command: str, **streams) -> subprocess.Popen:
    """Python with these arguments, run outside the source tree, whose ckptkern would come before the installed one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = TRITON_CACHE
    installed = Path(importlib.util.find_spec("ckptkern").origin).parents[
        1
    ]  # before the checkout and its uninstalled tools
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(installed), str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    )
    return subprocess.Popen([sys.executable, *command], env=environment, text=True, cwd=ROOT / "tests", **streams)
