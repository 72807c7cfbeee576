"""What setup.py says of a build: the version that git gives it, and the torch it is for.

.ci/wheels builds and installs the wheels themselves; these tests compile nothing.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_architecture import ROOT

# in the tree: an installed one may end in its commit
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "ckptkern/__init__.py").read_text(), re.MULTILINE)[1]
RELEASE = ".".join(torch.__version__.split(".")[:2])
WITHOUT_TORCH = "sys.modules['torch'] = None"
# what pip's build isolation does to the path: the environment's packages are not on it
ISOLATED = "sys.path = [entry for entry in sys.path if not entry.endswith('-packages')]"
PACKAGES = ("ckptkern", "triton_kernels", "benchmarks")
CODE = "import runpy, setuptools, sys; {before}; sys.argv = ['setup.py', {arguments}]; runpy.run_path('setup.py')"


@pytest.fixture
def tree(tmp_path):
    """The files that say what a build is, in a folder of their own."""
    names = ("setup.py", "pyproject.toml", "README.md", *(f"{folder}/__init__.py" for folder in PACKAGES))
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    return tmp_path


def setup(tree: Path, *arguments: str, before: str = "", **environment: str) -> subprocess.CompletedProcess:
    code = CODE.format(before=before or "pass", arguments=", ".join(map(repr, arguments)))
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
    )


def git(tree: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    nobodys = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    subprocess.run(["git", "-C", str(tree), *identity, *arguments], env=nobodys, check=True, capture_output=True)


def commit(tree: Path, *tags: str) -> None:
    git(tree, "init")
    git(tree, "add", ".")
    git(tree, "commit", "-m", "all")
    for tag in tags:
        git(tree, "tag", tag)


def refused(tree: Path) -> None:
    (tree / ".git").write_text("gitdir: nowhere")


def sdist(tree: Path) -> None:
    commit(tree)  # an sdist that somebody keeps in git is still what it was
    (tree / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: ckptkern\nVersion: 7.8.9\n")


VERSIONS = {
    "a tarball": (lambda tree: None, re.escape(VERSION)),
    "a commit": (commit, re.escape(VERSION) + r"\.dev1"),
    "its tag": (lambda tree: commit(tree, "other", f"v{VERSION}"), re.escape(VERSION)),
    "git refuses": (refused, re.escape(VERSION) + r"\.dev0"),
    "an sdist": (sdist, r"7\.8\.9"),
}


@pytest.mark.parametrize("case", VERSIONS)
def test_the_version_is_the_release_only_where_git_does_not_contradict(case, tree):
    make, expected = VERSIONS[case]
    make(tree)
    result = setup(tree, "--version", "sdist", before=WITHOUT_TORCH)
    assert re.fullmatch(expected, result.stdout.strip()), result.stdout + result.stderr


def test_a_tag_of_another_version_is_an_error_that_names_both(tree):
    commit(tree, "v99.1.0")
    result = setup(tree, "--version", "sdist", before=WITHOUT_TORCH)
    assert result.returncode == 1
    assert f"HEAD has the tag v99.1.0, and ckptkern/__init__.py says {VERSION}" in result.stderr


WHEELS = {
    "for every machine": ("pass", {}, VERSION, {"torch<2.16,>=2.11"}),
    "with the extension inside": (
        ISOLATED, {"CKPTKERN_WITH_EXTENSION": "1"}, f"{VERSION}+torch{RELEASE}", {f"torch=={RELEASE}.*"},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", WHEELS)
def test_pip_reads_for_which_torch_a_wheel_is(case, tree):
    before, environment, version, required = WHEELS[case]
    (tree / "info").mkdir()
    result = setup(tree, "--quiet", "dist_info", "--output-dir", "info", before=before, **environment)
    assert result.returncode == 0, result.stderr
    (metadata,) = (tree / "info").glob("*/METADATA")
    lines = metadata.read_text().splitlines()
    assert f"Version: {version}" in lines
    assert {line.split(": ")[1] for line in lines if line.startswith("Requires-Dist: torch")} == required


def test_the_releases_of_the_wheels_are_the_range_that_is_required():
    text = (ROOT / "setup.py").read_text()
    minors = [
        int(minor) for minor in re.findall(r'"2\.(\d+)"', re.search(r"^TORCH_RELEASES = .*$", text, re.MULTILINE)[0])
    ]
    oldest, beyond = re.search(r'^TORCH_RANGE = "torch>=2\.(\d+),<2\.(\d+)"$', text, re.MULTILINE).groups()
    assert minors == [*range(int(oldest), int(beyond))]
