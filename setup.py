"""Builds one wheel for every machine, of Python, with the sources of the C++ extension inside: ckptkern builds that on first
use (ckptkern/state/extension.py). Most of the metadata is in pyproject.toml.

With CKPTKERN_WITH_EXTENSION=1 the wheel has the extension inside, compiled for the torch that is installed, and requires that
torch: `make wheels` builds these as files of a release.
"""

import email
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

TREE = Path(__file__).resolve().parent
TORCH_RELEASES = ["2.11", "2.12", "2.13", "2.14", "2.15"]  # .ci/wheels reads this line
TORCH_RANGE = "torch>=2.11,<2.16"

NO_TORCH = """
CKPTKERN_WITH_EXTENSION=1 compiles the extension for the torch that is installed, and this Python has none to import ({error}).
"""
WRONG_TAG = """
HEAD has the tag {tags}, and ckptkern/__init__.py says {release}. Set __version__ to the tag's version, and tag that commit.
"""


def git(*arguments: str) -> str:
    """Returns git's output for this checkout. Raises OSError or CalledProcessError if there is none."""
    command = ["git", "-C", str(TREE), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def version() -> str:
    """Returns __version__ at its own tag, v and the number, and where there is no git; else .dev and the number of commits,
    because an index does not accept a local version."""
    if (TREE / "PKG-INFO").exists():  # an sdist
        return email.message_from_string((TREE / "PKG-INFO").read_text())["Version"]
    release = re.search(r'^__version__ = "(.+)"$', (TREE / "ckptkern/__init__.py").read_text(), re.MULTILINE)[1]
    if not (TREE / ".git").exists():
        return release
    try:
        tags = git("tag", "--points-at", "HEAD", "--list", "v[0-9]*").split()
        count = git("rev-list", "--count", "HEAD")
    except (OSError, subprocess.CalledProcessError):  # git is missing, or refuses another user's checkout
        return f"{release}.dev0"
    if f"v{release}" in tags:
        return release
    if tags:
        sys.exit(WRONG_TAG.format(tags=", ".join(tags), release=release))
    return f"{release}.dev{count}"


class BuildPy(build_py):
    """Writes the built version into the copy of ckptkern/__init__.py."""

    def build_module(self, module, module_file, package):
        """Copies a module, and writes the version into the package's own."""
        copy, copied = super().build_module(module, module_file, package)
        if (package, module) == ("ckptkern", "__init__") and copied:
            line = f'__version__ = "{self.distribution.get_version()}"'
            text = re.sub(r'^__version__ = ".+"$', line, Path(copy).read_text(), flags=re.MULTILINE)
            Path(copy).write_text(text)
        return copy, copied


def with_extension() -> dict:
    """Returns the arguments of setup() for a wheel with the extension inside, for one release of torch."""
    try:
        try:
            import torch
        except ImportError:  # pip's isolated build hides the packages of the environment that it installs into
            sys.path += dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
            import torch
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError as error:
        sys.exit(NO_TORCH.format(error=error))
    sources = [str(path.relative_to(TREE)) for path in sorted((TREE / "csrc").glob("*.cpp"))]
    headers = [str(path.relative_to(TREE)) for path in sorted((TREE / "csrc").glob("*.h"))]
    flags = ["-O3", "-g0", "-fvisibility=hidden", *(["-fopenmp"] if sys.platform == "linux" else [])]  # as on first use
    release = ".".join(torch.__version__.split(".")[:2])
    return {
        "version": f"{version()}+torch{release}",
        "install_requires": [f"torch=={release}.*", *REQUIRES[1:]],
        "ext_modules": [CppExtension("ckptkern._C", sources, depends=headers, extra_compile_args=flags)],
        "cmdclass": {"build_ext": BuildExtension, "build_py": BuildPy},
    }


REQUIRES = [TORCH_RANGE, "triton>=3.6; platform_system == 'Linux'", "ninja; platform_system == 'Linux'"]
arguments = {"version": version(), "install_requires": REQUIRES, "cmdclass": {"build_py": BuildPy}}
if os.environ.get("CKPTKERN_WITH_EXTENSION") == "1" and "sdist" not in sys.argv:
    arguments = with_extension()

setup(
    license="MIT",
    # `triton_kernels` and `benchmarks` must never be installed under these names at top level: the first
    # belongs to triton-lang's own package.
    packages=[
        "ckptkern",
        *(f"ckptkern.{name}" for name in find_packages("ckptkern")),
        "ckptkern.csrc",
        "ckptkern.triton_kernels",
        "ckptkern.benchmarks",  # what `python -m ckptkern bench` needs; the folders below it are run from a checkout
    ],
    package_dir={
        "ckptkern.csrc": "csrc",
        "ckptkern.triton_kernels": "triton_kernels",
        "ckptkern.benchmarks": "benchmarks",
    },
    package_data={"ckptkern": ["py.typed", "hub/torch-universal/*"], "ckptkern.csrc": ["*.cpp", "*.h"]},
    include_package_data=False,  # else what MANIFEST.in names below a package is installed with it
    **arguments,
)
