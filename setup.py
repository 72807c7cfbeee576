"""Builds ckptkern._C, C++ only, against the torch that is installed. Most of the metadata is in pyproject.toml.

With CKPTKERN_TORCH_IN_VERSION=1 the wheel is one to hand on: its version ends in +torch2.13 and it requires that torch. `make
wheels` sets it. Otherwise the wheel is for the environment that builds it.
"""

import email
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import find_packages, setup
from setuptools._distutils import log  # its INFO is 2 in setuptools 64, which requires no newer one, and 20 today
from setuptools.command.build_py import build_py

TREE = Path(__file__).resolve().parent
TORCH_RELEASES = ["2.11", "2.12", "2.13", "2.14", "2.15"]  # .ci/wheels reads this line
TORCH_RANGE = "torch>=2.11,<2.16"

# torch is no build requirement: an isolated build would fetch gigabytes of another torch and build against that.
NO_TORCH = """
ckptkern builds its C++ extension against the torch that will run it, and this Python has none to import ({error}).
Install torch first (2.11 to 2.15, CPU or CUDA: https://pytorch.org/get-started/locally), then `pip install .`, which finds it.
Front ends that build in another Python than they install into (uv, build), and a torch outside of a virtual environment, need:
    pip install setuptools wheel
    pip install --no-build-isolation .
"""
WRONG_TAG = """
HEAD has the tag {tags}, and ckptkern/__init__.py says {release}. Set __version__ to the tag's version, and tag that commit.
"""

SOURCES = [
    "csrc/bindings.cpp",
    "csrc/gradient_sums.cpp",
    "csrc/module_state.cpp",
    "csrc/philox.cpp",
    "csrc/precision.cpp",
    "csrc/saved_tensors.cpp",
    "csrc/segment_state.cpp",
]
HEADERS = [
    "csrc/gradient_sums.h",
    "csrc/module_state.h",
    "csrc/philox.h",
    "csrc/precision.h",
    "csrc/saved_tensors.h",
    "csrc/segment_state.h",
]


def import_torch():
    """Imports the torch that will run what is built here, also from pip's isolated build.

    pip runs that with the Python of the environment it installs into, and hides the environment's packages. Other
    front ends (build, uv) run another Python, which has no torch.
    """
    try:
        import torch
    except ImportError:
        sys.path += dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
        import torch
    return torch


def git(*arguments: str) -> str:
    """Returns what git says of this checkout; raises OSError or CalledProcessError where it says nothing."""
    command = ["git", "-C", str(TREE), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def version() -> str:
    """Returns __version__ at its own tag, v and the number, and where there is no git; else .dev0+g and the commit."""
    if (TREE / "PKG-INFO").exists():  # an sdist
        return email.message_from_string((TREE / "PKG-INFO").read_text())["Version"]
    release = re.search(r'^__version__ = "(.+)"$', (TREE / "ckptkern/__init__.py").read_text(), re.MULTILINE)[1]
    if not (TREE / ".git").exists():
        return release
    try:
        tags = git("tag", "--points-at", "HEAD", "--list", "v[0-9]*").split()
        commit = git("rev-parse", "--short=8", "HEAD")
    except (OSError, subprocess.CalledProcessError):  # git is missing, or refuses another user's checkout
        return f"{release}.dev0"
    if f"v{release}" in tags:
        return release
    if tags:
        sys.exit(WRONG_TAG.format(tags=", ".join(tags), release=release))
    return f"{release}.dev0+g{commit}"


class BuildPy(build_py):
    """Writes the version that is built into the copy of ckptkern/__init__.py."""

    def build_module(self, module, module_file, package):
        """Copies a module, and the version into the package's own."""
        copy, copied = super().build_module(module, module_file, package)
        if (package, module) == ("ckptkern", "__init__") and copied:
            line = f'__version__ = "{self.distribution.get_version()}"'
            text = re.sub(r'^__version__ = ".+"$', line, Path(copy).read_text(), flags=re.MULTILINE)
            Path(copy).write_text(text)
        return copy, copied


def build_arguments() -> dict:
    """Returns the arguments of setup() that depend on torch, or without it, for an sdist, those that do not."""
    arguments = {"version": version(), "install_requires": [TORCH_RANGE, "triton>=3.6; platform_system == 'Linux'"]}
    try:
        torch = import_torch()
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError as error:
        if {"sdist", "egg_info"} & set(sys.argv):  # these two compile nothing
            return arguments
        sys.exit(NO_TORCH.format(error=error))

    class BuildExt(BuildExtension):
        """Says what is compiled, and for which torch."""

        def run(self):
            """Compiles the extension."""
            built_for = f"torch {torch.__version__} in {Path(torch.__file__).parent}"
            needs = "which needs a C++ compiler; a release has wheels that need none"
            self.announce(f"compiling ckptkern._C for {built_for}, {needs}", log.INFO)
            super().run()

    release = ".".join(torch.__version__.split(".")[:2])
    if os.environ.get("CKPTKERN_TORCH_IN_VERSION") == "1":
        arguments["version"] += f"{'.' if '+' in arguments['version'] else '+'}torch{release}"
        arguments["install_requires"][0] = f"torch=={release}.*"

    # -g0: with the debug information that Python's own flags ask for, the extension is 35 times as large.
    compile_args = ["-O3", "-g0", "-fvisibility=hidden", f'-DCKPTKERN_TORCH_VERSION="{torch.__version__}"']
    if sys.platform == "linux":
        # For at::parallel_for. Not a link flag: the symbols then come from the OpenMP runtime that torch
        # ships, so that there is one thread pool and not two.
        compile_args.append("-fopenmp")
    extension = CppExtension("ckptkern._C", SOURCES, depends=HEADERS, extra_compile_args=compile_args)
    return {**arguments, "ext_modules": [extension], "cmdclass": {"build_ext": BuildExt, "build_py": BuildPy}}


setup(
    license="MIT",
    # `triton_kernels` and `benchmarks` must never be installed under these names at top level: the first
    # belongs to triton-lang's own package.
    packages=[
        "ckptkern",
        *(f"ckptkern.{name}" for name in find_packages("ckptkern")),
        "ckptkern.triton_kernels",
        "ckptkern.benchmarks",  # what `python -m ckptkern bench` needs; the folders below it are run from a checkout
    ],
    package_dir={"ckptkern.triton_kernels": "triton_kernels", "ckptkern.benchmarks": "benchmarks"},
    package_data={"ckptkern": ["py.typed"]},
    include_package_data=False,  # else what MANIFEST.in names below a package is installed with it
    **build_arguments(),
)
