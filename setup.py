"""Builds ckptkern._C, C++ only, against the torch that is installed. Metadata is in pyproject.toml."""

import sys

from setuptools import find_packages, setup

# torch is no build requirement: an isolated build would fetch gigabytes of another torch and build against that.
NO_TORCH = """
ckptkern builds its C++ extension against the torch that will run it, and this Python has none to import ({error}).
Install torch first (2.11 to 2.15, CPU or CUDA: https://pytorch.org/get-started/locally), then:
    pip install setuptools wheel
    pip install --no-build-isolation .
"""

SOURCES = [
    "csrc/bindings.cpp",
    "csrc/gradient_sums.cpp",
    "csrc/philox.cpp",
    "csrc/precision.cpp",
    "csrc/saved_tensors.cpp",
    "csrc/segment_state.cpp",
]
HEADERS = ["csrc/gradient_sums.h", "csrc/philox.h", "csrc/precision.h", "csrc/saved_tensors.h", "csrc/segment_state.h"]


def extension_arguments() -> dict:
    try:
        import torch
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError as error:
        if {"sdist", "egg_info"} & set(sys.argv):  # these two compile nothing
            return {}
        sys.exit(NO_TORCH.format(error=error))

    compile_args = ["-O3", "-fvisibility=hidden", f'-DCKPTKERN_TORCH_VERSION="{torch.__version__}"']
    if sys.platform == "linux":
        # For at::parallel_for. Not a link flag: the symbols then come from the OpenMP runtime that torch
        # ships, so that there is one thread pool and not two.
        compile_args.append("-fopenmp")
    extension = CppExtension("ckptkern._C", SOURCES, depends=HEADERS, extra_compile_args=compile_args)
    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildExtension}}


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
    **extension_arguments(),
)
