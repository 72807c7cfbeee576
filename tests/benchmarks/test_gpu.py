"""``make gpu``: what its parts leave when they end or are cut, what they take over, and what they say is not right."""

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import caches

ROOT = Path(__file__).resolve().parents[2]
KERNEL = """
import triton, triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def add_one(x_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) + 1, mask=offs < n)

knobs.compilation.listener = lambda cache_hit, **_: print("cached" if cache_hit else "compiled")
source = ASTSource(add_one, {"x_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {"BLOCK": 128})
triton.compile(source, target=GPUTarget("cuda", 90, 32))
"""


def said():
    lines = []
    return lines, lines.append


def test_a_program_ends_by_itself_or_is_interrupted_or_killed(tmp_path):
    def python(text, seconds):
        lines, log = said()
        return gpu.run([sys.executable, "-uc", text], seconds, log, tmp_path), lines

    assert python("print('one'); print('two'); raise SystemExit(3)", 60) == (3, ["one", "two"])
    waits = "import time\ntry:\n  print('begins'); time.sleep(60)\nexcept KeyboardInterrupt: print('interrupted')"
    assert python(waits, 8) == (gpu.CUT, ["begins", "interrupted"])


def test_a_program_that_is_deaf_to_interrupts_is_killed_with_what_it_started(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "FINISH", 3)
    child = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    text = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    lines, log = said()
    begin = time.monotonic()
    assert gpu.run([sys.executable, "-uc", text], 3, log, tmp_path) == gpu.CUT
    assert time.monotonic() - begin < 50
    assert lines[0] == "deaf"


def test_results_that_do_not_come_back_are_named(tmp_path, monkeypatch):
    for name in range(8):
        (tmp_path / str(name)).write_bytes(b"1234")
    assert gpu.too_much(tmp_path) == []
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "one.png").touch()
    assert gpu.too_much(tmp_path) == ["9 files, at most 8: 0, 1, 2, 3, 4, 5, 6, 7, figures/one.png"]
    monkeypatch.setattr(gpu, "MOST_BYTES", 3)
    assert gpu.too_much(tmp_path)[0] == "0: 4 bytes, at most 3"


def test_failures_are_those_of_ours_and_of_each_tests_last_run(tmp_path):
    rows = [("mlp", "eager", "failed"), ("mlp", "ckptkern full", "wrong"), ("mlp", "ckptkern none", "ok")]
    with (tmp_path / "results.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("case", "variant", "status", "note"), *((*row, "why") for row in rows)])
    tests = [
        ("a", "failed", "was"),
        ("b", "failed", "is"),
        ("a", "passed", ""),
        ("c", "skipped", ""),
        ("d", "error", "x"),
    ]
    with (tmp_path / "tests.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("test", "outcome", "message"), *tests])
    assert gpu.failures(tmp_path) == ["mlp ckptkern full: wrong: why", "b: is", "d: x"]


def test_an_option_of_pytest_with_spaces_is_one_option(tmp_path):
    """As make gives it to the shell."""
    done = subprocess.run(
        ["make", "-n", "gpu", "OUT=o", """TESTS=-k "launchers or graph" --lf"""],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert """--tests='-k "launchers or graph" --lf'""" in done.stdout
    options = gpu.parser().parse_args(["--out", "o", """--tests=-k "launchers or graph" --lf"""])
    command = gpu.Run(tmp_path, tmp_path, True, "", "", gpu.words(options.tests), 2).pytest()
    assert command[command.index("-k") + 1 :][:2] == ["launchers or graph", "--lf"]
    assert str(ROOT / "tests") in command
    test = "tests/test_docs.py::test_one"  # of the repository, although pytest runs in the folder of the build
    command = gpu.Run(tmp_path, tmp_path, True, "", "", [test, "--lf"], 2).pytest()
    assert str(ROOT / test) in command
    assert not {test, str(ROOT / "tests")} & set(command)


def test_compiled_kernels_and_the_extension_are_taken_over(tmp_path, monkeypatch):
    """In another folder, which is why Triton's own lists of files would not do."""
    extension = tmp_path / "a/tag/lib/ckptkern/_C.cpython-311.so"
    extension.parent.mkdir(parents=True)
    extension.touch()
    os.utime(extension, (1, 1))
    script = tmp_path / "kernel.py"
    script.write_text(KERNEL)

    def compiled(work):
        environment = os.environ | {"TRITON_CACHE_DIR": str(work / "cache/triton"), "TRITON_INTERPRET": "0"}
        return subprocess.run(
            [sys.executable, script], env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert compiled(tmp_path / "a") == "compiled\n"
    archive = tmp_path / "caches.tgz"
    assert caches.pack(archive, tmp_path / "a", 2**20) == f"{archive.stat().st_size:,} bytes"
    shutil.rmtree(tmp_path / "a")
    assert caches.unpack(archive, tmp_path / "b").endswith("the extension as it was built")
    assert compiled(tmp_path / "b") == "cached\n"
    taken = tmp_path / "b/tag/lib/ckptkern/_C.cpython-311.so"
    assert taken.stat().st_mtime > 1  # newer than the sources, so that it is not built again
    monkeypatch.setattr(caches, "sources", lambda: "others")
    assert caches.unpack(archive, tmp_path / "c").endswith("the extension is built again")
    archive.write_bytes(archive.read_bytes()[:200])
    assert caches.unpack(archive, tmp_path / "d").startswith("not read, so everything is built and compiled again")
    assert caches.pack(archive, tmp_path / "b", caches.BUFFER + 300).endswith(", 4 files left out")
    assert archive.stat().st_size < caches.BUFFER + 300


STEPS = """
import sys
from pathlib import Path
from benchmarks.gpu import __main__ as gpu

WRITE = '''
import sys, time
for n in range(int(sys.argv[2])):
    time.sleep(0.1)
    open(sys.argv[1], "a").write(str(n) + chr(10))
'''


def step(part, name, share, count):
    def command(run, seconds):
        return [sys.executable, "-c", WRITE, str(run.out / name), str(count)]
    return gpu.Step(part, name, share, command)


gpu.STEPS = step(1, "first", 3, 5), step(1, "second", 1, int(sys.argv[1])), step(2, "third", 1, 3), step(3, "fourth", 1, 2)
gpu.build = lambda work, log: work.mkdir(exist_ok=True) or work
gpu.gpu_of = lambda: "a GPU"
gpu.setting = lambda lib, dry: {"device": "a", "torch": "2", "triton": "3"}
gpu.FINISH, gpu.SMALLEST = 2, 1
sys.exit(gpu.main(sys.argv[2:]))
"""


@pytest.fixture
def parts(tmp_path):
    """Starts a part whose programs write numbers, a tenth of a second each, into files: `first`, `second`, `third`, `fourth`.
    count: of the second."""
    (tmp_path / "steps.py").write_text(STEPS)

    def start(count, out, *arguments):
        command = [
            sys.executable,
            tmp_path / "steps.py",
            count,
            "--out",
            tmp_path / out,
            "--work",
            tmp_path / "work",
            *arguments,
        ]
        return subprocess.Popen(
            [*map(str, command)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "CKPTKERN_COMMIT": "abc"},
        )

    return start


def test_a_part_runs_its_own_steps_then_the_others(parts, tmp_path):
    process = parts("2", "out", "--part", "2", "--seconds", "90")
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == 0, printed
    assert [line.split()[2] for line in printed.splitlines() if "at most" in line] == [
        "third:",
        "first:",
        "second:",
        "fourth:",
    ]
    assert (tmp_path / "out/log.txt").read_text() == printed
    assert "commit abc" in printed
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "first",
        "second",
        "third",
        "fourth",
        "log.txt",
        gpu.CACHES,
    }


def test_a_step_whose_time_is_up_leaves_its_rows_and_goes_on_last(parts, tmp_path):
    process = parts("100000", "out", "--part", "1", "--seconds", "9")
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == 0, printed
    assert "second: status 124, its time was up" in printed
    assert "no time is left for: second, third, fourth" in printed
    assert (tmp_path / "out/second").read_text().startswith("0\n1\n2\n")
    assert (tmp_path / "out" / gpu.CACHES).exists()


def test_a_step_that_lost_the_gpu_begins_again(parts, tmp_path):
    (tmp_path / "steps.py").write_text(STEPS.replace("open(sys", "n > 1 and sys.exit(75); open(sys"))
    process = parts("1", "out", "--part", "2", "--seconds", "6")
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == 0, printed
    assert printed.count("third: status 75") > 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_part_that_is_cut_leaves_its_files_and_the_next_goes_on(parts, tmp_path, number):
    process = parts("100000", "out", "--part", "1", "--seconds", "300")
    while not (tmp_path / "out/second").exists():
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(number)
    process.wait(timeout=60)
    process.stdout.close()
    subprocess.run(
        ["pkill", "-KILL", "-f", str(tmp_path / "out/second")], check=False
    )  # SIGKILL leaves what was started
    left = {path.name for path in (tmp_path / "out").iterdir()}
    for version, takes_over in (("2", True), ("1", False)):
        goes_on(parts, tmp_path, version, takes_over)
    assert left >= {"first", "second", "log.txt"}
    assert "second: at most" in (tmp_path / "out/log.txt").read_text()
    assert gpu.CACHES in left


def goes_on(parts, tmp_path, version, takes_over):
    """The next part, after one with this torch."""
    (tmp_path / "out/env.json").write_text(f'{{"device": "a", "versions": {{"torch": "{version}", "triton": "3"}}}}')
    process = parts("1", f"next{version}", "--in", str(tmp_path / "out"), "--part", "1", "--seconds", "60")
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == 0, printed
    assert "caches: " in printed
    assert ("not taken over" in printed) != takes_over
    assert (tmp_path / f"next{version}/first").read_text() == (1 + takes_over) * "0\n1\n2\n3\n4\n"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "torch sees no GPU here. DRY=1 shows on a CPU what is run"),
        (["--in", "none"], 2, "none is not a folder; name the OUT of the part before"),
        (["--part", "4"], 2, "invalid choice"),
        (["--steps", "benches"], 2, "STEPS: 'benches' is in none of headline cases, tests without a counterpart,"),
    ],
)
def test_arguments_that_make_no_sense(arguments, status, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "gpu_of", lambda: "no GPU")
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--out", str(tmp_path / "out"), *arguments])
    assert ended.value.code == status
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_only_wheels_for_any_python_are_unpacked(tmp_path):
    import zipfile

    for name in ("pure-1-py3-none-any.whl", "built-1-cp311-cp311-linux_x86_64.whl"):
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            wheel.writestr(f"{name.partition('-')[0]}.py", "")
    assert gpu.unpack_wheels(tmp_path, tmp_path / "site") == ["pure-1-py3-none-any.whl"]
    assert [path.name for path in (tmp_path / "site").iterdir()] == ["pure.py"]
    assert gpu.unpack_wheels(tmp_path / "none", tmp_path / "site") == []
