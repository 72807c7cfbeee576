"""``python -m ckptkern``: the commands, their help, and ``env``."""

import importlib
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from support.outside import ROOT

import ckptkern
from ckptkern import __main__, extras, state
from ckptkern.ops.dispatch import choices as _choices
from ckptkern.tools import env


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as exit_:
        __main__.main(["--help"])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    for name, (_, summary, _) in __main__.COMMANDS.items():
        assert name in printed
        assert summary in " ".join(printed.split())


@pytest.mark.parametrize("command", sorted(__main__.COMMANDS))
def test_help_of_a_command(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as exit_:
        __main__.main([command, "--help"])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert f"python -m ckptkern {command}" in printed
    assert max(map(len, printed.splitlines())) <= 80


PROGRAMS = [path for path in (ROOT / "benchmarks").rglob("*.py") if '== "__main__":' in path.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_help_of_a_program_fits_80_columns(path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    name = f"ckptkern.{name}" if path.parent.name == "benchmarks" else name  # installed
    environment = os.environ | {"COLUMNS": "80"}
    run = subprocess.run(
        [sys.executable, "-m", name, "--help"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert [line for line in run.stdout.splitlines() if len(line) > 80] == []


def test_demo_help_shows_the_defaults(capsys):
    with pytest.raises(SystemExit):
        __main__.main(["demo", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "(default: 10 on a CPU, 100 on a GPU)" in printed
    assert "(default: fp32 on a CPU, bf16 on a GPU)" in printed
    assert "(default: gelu, of experts silu)" in printed


@pytest.mark.parametrize("arguments", [[], ["train"]])
def test_no_or_another_command_is_a_usage_error(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        __main__.main(arguments)
    assert exit_.value.code == 2
    assert "usage: python -m ckptkern" in capsys.readouterr().err


def test_version_and_env_print_a_value_a_line(capsys):
    with pytest.raises(SystemExit):
        __main__.main(["--version"])
    assert capsys.readouterr().out == f"ckptkern {ckptkern.__version__}\n"
    assert __main__.main(["env"]) == 0
    assert {"extension", f"  torch: {torch.__version__}"} <= {*capsys.readouterr().out.splitlines()}


WITHOUT_EXTRAS = f"""import runpy, sys
sys.path.append({str(ROOT)!r})  # in a checkout, whichever ckptkern is installed
sys.modules.update(dict.fromkeys(("matplotlib", "numpy", "pandas", "rich")))
from ckptkern.__main__ import COMMANDS, main
for command in COMMANDS:
    try:
        main([command, "--help"])
    except SystemExit as end:
        assert end.code == 0, command
sys.argv = ["ckptkern", "env", "--json"]
runpy.run_module("ckptkern", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_help_and_env_need_torch_alone_and_take_the_backend_of_the_environment(backend):
    environment = os.environ | {"CKPTKERN_BACKEND": backend}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", WITHOUT_EXTRAS]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert answer.returncode == 0, answer.stderr
    for command in __main__.COMMANDS:
        assert f"usage: python -m ckptkern {command} [-h]" in answer.stdout
    data = json.loads(answer.stdout[answer.stdout.index("\n{\n") :])
    assert list(data) == [
        "versions",
        "system",
        "devices",
        "extension",
        "backends",
        "C launchers",
        "fp32_precision",
        "sdpa",
        "tuned implementations",
    ]
    assert data["versions"]["torch"] == torch.__version__
    assert data["extension"]["built for torch"] in (torch.__version__.partition("+")[0], "none")
    assert data["versions"]["ckptkern"] == ckptkern.__version__
    assert data["backends"]["cpu"].startswith({"eager": "eager (", "triton": "none ("}[backend])
    assert set(data["sdpa"]) == {"flash", "memory efficient", "math", "cuDNN"}
    assert "missing" not in data["fp32_precision"]


@pytest.mark.parametrize(
    ("packages", "hint"),
    [
        (["rich"], "rich is not installed: pip install rich\n"),
        (["matplotlib", "rich"], "matplotlib and rich are not installed: pip install matplotlib rich\n"),
    ],
)
def test_missing_packages_are_named_before_any_work(packages, hint, capsys, monkeypatch, tmp_path):
    """The hint names the packages themselves, because pip would look for an extra of ckptkern's on PyPI."""
    module, summary, _ = __main__.COMMANDS["demo"]
    monkeypatch.setitem(__main__.COMMANDS, "demo", (module, summary, ("matplotlib", "rich")))
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as exit_:
        __main__.main(["demo", "--out", str(tmp_path / "out")])
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"ckptkern demo: {hint}"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("command", "module"), [("demo --quick", "demo"), ("examples --help", "tutorials")])
def test_where_the_wheel_alone_is_installed_it_is_said_how_to_get_a_checkout(
    command, module, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(extras, "CHECKOUT", tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "examples").is_dir()])
    for name in [name for name in sys.modules if name.partition(".")[0] == "examples"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as exit_:
        __main__.main(command.split())
    assert exit_.value.code == 2
    program = command.split()[0]
    first, clone, run = capsys.readouterr().err.splitlines()
    assert first.startswith(f"ckptkern {program}: it is part of a checkout, and here only the package is installed")
    assert clone.strip().startswith("git clone")
    assert run.strip() == f"python -m ckptkern {program}"

    folder = tmp_path / "examples" / module  # a checkout's, whose own faults are no missing checkout
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").write_text("import no_such_module")
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        __main__.main(command.split())


def test_a_missing_module_of_ours_is_no_missing_package(monkeypatch):
    monkeypatch.setitem(__main__.COMMANDS, "demo", (".no_such_module", "", ()))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        __main__.main(["demo"])


def test_env_names_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(state, "LOADED", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 / 0)
    data = env.collect()
    assert data["extension"] == {"missing": "TypeError: cannot unpack non-iterable NoneType object"}
    assert data["devices"] == {"missing": "ZeroDivisionError: division by zero"}
    assert data["versions"]["torch"] == torch.__version__
    json.dumps(data)


@pytest.mark.parametrize(
    ("version", "built"),
    [
        ("3.6.0", "one for each signature of a kernel, at its first launch"),
        ("3.7.1", "one for all kernels, once"),
        ("3.10.0+git", "one for all kernels, once"),
        ("not installed", "none: Triton is not installed"),
    ],
)
def test_env_names_what_launches_need(version, built, monkeypatch, tmp_path):
    """Triton looks for them at run time, where an image may have no compiler and no headers."""
    monkeypatch.setattr(env, "_package_version", lambda name: version)
    monkeypatch.setenv("CC", "clang-of-mine")
    data = env.collect()["C launchers"]
    assert data["built"] == built
    assert data["compiler"] == "clang-of-mine"
    assert data["Python.h"] == "found"
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_paths", lambda **_: {"include": str(tmp_path)})
    data = env.collect()["C launchers"]
    assert data["compiler"].startswith("none: no gcc or clang on PATH")
    assert data["Python.h"] == f"none in {tmp_path}: install Python's development package"
    for name in ("clang", "gcc"):
        (tmp_path / name).touch(mode=0o755)
        assert env.collect()["C launchers"]["compiler"] == name


def test_env_names_a_backend_that_does_not_exist(monkeypatch):
    monkeypatch.setenv("CKPTKERN_BACKEND", "quick")
    monkeypatch.setattr(_choices, "_choice", _choices._Choice())
    assert "ValueError" in env.collect()["backends"]["missing"]
