"""Finding and building the extension: nothing is built twice, nothing that others may write is loaded, and Python runs where
there is none. What compiles the real sources is the installation; here a compiler is a script that fails."""

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import types

import pytest
import torch
from test_architecture import ROOT

from ckptkern.state import LOADED, extension
from ckptkern.state.extension import Unavailable

IMPORT = "from ckptkern.state import LOADED; print('C++' if LOADED.module is not None else 'Python')"
with_extension = pytest.mark.skipif(LOADED.module is None, reason=f"there is no extension: {LOADED.why}")


def run(code: str = IMPORT, **environment: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def broken(tmp_path):
    """The environment of a compiler that fails and says how often it ran, and of an empty cache."""
    script, log = tmp_path / "cxx", tmp_path / "runs"
    script.write_text(
        f"#!/bin/sh\ncase $1 in -v|--version|-dumpfullversion) echo g++ 99; exit 0;; esac\n"
        f"echo run >> {log}\necho no such compiler >&2\nexit 1\n"
    )
    script.chmod(0o755)
    return {"CXX": str(script), "CKPTKERN_CACHE": str(tmp_path / "cache"), "CKPTKERN_EXTENSION": "auto"}


@pytest.mark.slow
def test_a_build_that_failed_is_said_and_not_tried_again(broken, tmp_path):
    first, again = run(**broken), run(**broken)
    assert (first.stdout, again.stdout) == ("Python\n", "Python\n"), first.stderr
    assert "building its C++ extension for torch" in first.stderr
    assert "the build failed" in first.stderr
    (said,) = (tmp_path / "cache").rglob("failed.txt")
    assert "no such compiler" in said.read_text()
    assert "building" not in again.stderr
    assert "failed before" in again.stderr
    assert "python -m ckptkern build" in again.stderr
    runs = (tmp_path / "runs").read_text()
    required = run(**broken | {"CKPTKERN_EXTENSION": "required"})
    assert "ImportError: ckptkern: CKPTKERN_EXTENSION=required, but there is no C++ extension" in required.stderr
    assert (tmp_path / "runs").read_text() == runs
    build = run("import sys; from ckptkern.__main__ import main; sys.exit(main(['build']))", **broken)
    assert build.returncode == 1
    assert (tmp_path / "runs").read_text() != runs


def test_python_runs_by_choice_without_a_word(tmp_path):
    process = run(CKPTKERN_EXTENSION="python", CKPTKERN_CACHE=str(tmp_path))
    assert (process.stdout, process.stderr) == ("Python\n", "")
    assert list(tmp_path.iterdir()) == []
    process = run(CKPTKERN_EXTENSION="c++")
    assert (
        "ValueError: CKPTKERN_EXTENSION must be one of auto, cached, python, required, but is 'c++'" in process.stderr
    )


REMEDIES = {
    "no compiler": (dict(CXX="no-such-compiler", PATH=""), "there is no C\\+\\+ compiler"),
    "no home": (dict(CKPTKERN_CACHE="/proc/nowhere"), "FileNotFoundError|PermissionError|OSError"),
    "cached": (dict(CKPTKERN_EXTENSION="cached"), "CKPTKERN_EXTENSION=cached builds none"),
}


@pytest.mark.parametrize("case", REMEDIES)
def test_where_nothing_can_be_built_python_runs(case, monkeypatch, tmp_path):
    environment, why = REMEDIES[case]
    monkeypatch.setattr(extension, "HERE", tmp_path / "state")  # no extension inside
    monkeypatch.setattr(extension, "folder_of_sources", lambda: ROOT / "csrc")
    for name, value in (dict(CKPTKERN_CACHE=str(tmp_path), CKPTKERN_EXTENSION="auto") | environment).items():
        monkeypatch.setenv(name, value)
    if case == "cached":
        loaded = extension.loaded()
    else:
        with pytest.warns(UserWarning, match="ckptkern runs in Python, with equal results and more host time"):
            loaded = extension.loaded()
    assert loaded.module is None
    assert pytest.raises(AssertionError, match=why).matches(AssertionError(loaded.why)), loaded.why


@pytest.mark.parametrize("open_to_all", ["the file", "its folder", "the folder of all"])
def test_what_others_may_write_is_not_loaded(open_to_all, monkeypatch, tmp_path):
    monkeypatch.setenv("CKPTKERN_CACHE", str(tmp_path))
    folder, _ = extension.folders()
    folder.mkdir(parents=True, mode=0o700)
    for path in (folder.parent, folder):
        path.chmod(0o700)
    library = folder / "_C.so"
    library.touch(mode=0o700)
    # one process can load one
    monkeypatch.setattr(extension, "imported", lambda path: extension.Loaded(None, str(path)))
    assert extension.cached().why == str(library)
    {"the file": library, "its folder": folder, "the folder of all": folder.parent}[open_to_all].chmod(0o777)
    with pytest.raises(Unavailable, match="others may write"):
        extension.cached()


def test_a_wheel_for_another_torch_says_so(monkeypatch, tmp_path):
    (tmp_path / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}").touch()
    monkeypatch.setattr(extension, "HERE", tmp_path / "state")
    monkeypatch.setenv("CKPTKERN_EXTENSION", "auto")
    other = types.SimpleNamespace(torch_version="2.9.1")
    monkeypatch.setattr(extension, "imported", lambda _: extension.Loaded(other, ""))
    with pytest.raises(ImportError, match=r"was built for torch 2\.9\.1, and torch .* runs.*pip install"):
        extension.loaded()


def test_another_process_is_waited_for_and_not_for_good(monkeypatch, tmp_path):
    monkeypatch.setattr(extension, "WAIT", 0.3)
    with open(tmp_path / "lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match="another process has been building"), extension.alone(tmp_path):
            pass
        monkeypatch.setattr(extension, "WAIT", 60)
        events: list[str] = []

        def release() -> None:
            events.append("released")
            fcntl.flock(other, fcntl.LOCK_UN)

        threading.Timer(0.3, release).start()
        with extension.alone(tmp_path):
            assert events == ["released"]


def test_another_source_torch_or_compiler_is_another_build(monkeypatch, tmp_path):
    own, candidates = extension.folders()
    assert own in candidates
    csrc, compiler = tmp_path / "csrc", tmp_path / "c++"
    shutil.copytree(ROOT / "csrc", csrc)
    monkeypatch.setattr(extension, "folder_of_sources", lambda: csrc)
    assert extension.folders()[0] == own
    (csrc / "philox.cpp").write_text((csrc / "philox.cpp").read_text() + "//\n")
    folders = [own, extension.folders()[0]]
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    folders.append(extension.folders()[0])
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    folders.append(extension.folders()[0])
    assert len(set(folders)) == len(folders)


STEP = """
import hashlib
import torch
from torch import nn
import ckptkern
from ckptkern import state

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 32), nn.BatchNorm1d(32))
        self.mlp = ckptkern.nn.MLP(32, 64, dropout=0.2)
        self.tail = nn.Linear(32, 48).bfloat16()
        self.steps = 0

    def region(self, x, scales):
        self.steps += 1
        return self.block(x) * scales["one"][0] + ckptkern.dropout(x, 0.5) * self.steps

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.steps % 2 == 0):
            y = ckptkern.checkpoint(self.region, x, {"one": (torch.full((32,), 0.5),)})
        y = self.mlp(y.float()) + y.float()
        return ckptkern.tiled(self.tail, y.bfloat16(), chunks=4)

torch.manual_seed(0)
torch.set_num_threads(1)
model, digest = Model(), hashlib.sha256()
for step in range(3):
    loss = model(torch.randn(512, 32, requires_grad=True)).float().square().mean()
    loss.backward()
    for tensor in (loss, torch.get_rng_state(), *model.buffers(), *(p.grad for p in model.parameters())):
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
print(state.LOADED.module is None, digest.hexdigest())
"""


@pytest.mark.slow
@with_extension
def test_both_implementations_train_with_the_same_bits():
    """Random state, masks, autocast, statistics, attributes and sums of 16-bit gradients."""
    processes = [run(STEP, CKPTKERN_EXTENSION=choice) for choice in ("required", "python")]
    (of_c, bits), (of_python, same) = (process.stdout.split() or pytest.fail(process.stderr) for process in processes)
    assert (of_c, of_python) == ("False", "True")
    assert bits == same
