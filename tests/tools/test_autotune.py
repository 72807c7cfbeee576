"""The tuned table: what is timed and chosen, what is written, and which files are refused."""

import argparse
import functools
import json
import re
import subprocess
import types
import warnings
from unittest import mock

import pytest
import torch
from support import outside

import ckptkern
from ckptkern import triton_kernels
from ckptkern.__main__ import main
from ckptkern.ops.dispatch import choices as _choices
from ckptkern.ops.dispatch import implementations as _impls
from ckptkern.ops.dispatch import tuned as _tuned
from ckptkern.tools import autotune, race
from ckptkern.tools.compiling import Built

FP16, BF16 = torch.float16, torch.bfloat16
CPU = torch.device("cpu")
PROBLEM = autotune.Problem("mlp", 24, 40, 24, FP16, 32)
MANY = PROBLEM._replace(tokens=9000)  # where kernels run: 32 rows are few there


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Nobody's table before, and none after."""
    monkeypatch.setenv("CKPTKERN_CACHE", str(tmp_path))
    forget()
    yield tmp_path
    forget()


@pytest.fixture
def two_routes(monkeypatch):
    """Two implementations of interpreted kernels on a CPU, few rows as many."""
    monkeypatch.setattr(
        _choices, "choose_backend", lambda op, x: "eager" if _choices._choice.backend == "eager" else "triton"
    )
    monkeypatch.setattr(_choices, "candidates", lambda *key: ("triton", "library"))
    monkeypatch.setattr(_choices, "few_rows", lambda *key: 0)


def forget() -> None:
    """As a process that starts."""
    _tuned.table.cache_clear()
    _choices._impl.cache_clear()


def impl(dtype=FP16, features=24, op="mlp", device="cpu", rows=9000) -> str:
    x = torch.empty(rows, features, dtype=dtype, device=device)
    return _choices.choose_impl(op, x, features, 40, features)


def file_of_this_machine():
    return _tuned.path("cpu", None)


def write(impl="library", rows="many", **changes) -> None:
    row = {"op": "mlp", "dtype": "float16", "features": 256, "rows": rows, "impl": impl}
    _tuned.write(file_of_this_machine(), _tuned.machine("cpu", None) | changes, [row])
    forget()


# -- choosing ----------------------------------------------------------------------------------------------------------


def planned(ms: dict[str, list[float]]):
    """A timer whose implementations take these ms, again and again."""

    def timer(problem, impl, t):
        times = iter(ms[impl] * 1000)
        return lambda: next(times)

    return timer


@pytest.mark.parametrize(
    ("ms", "chosen"),
    [
        ({"triton": [10.0], "library": [5.0]}, "library"),
        ({"triton": [10.0], "library": [20.0]}, "triton"),
        ({"triton": [10.0], "library": [9.9]}, "triton"),  # within the margin
        ({"triton": [10.0], "library": [5.0, 5.0, 11.0]}, "triton"),  # every third step is slower than the default
        ({"triton": [10.0, 30.0], "library": [5.0]}, "library"),
    ],
)
def test_an_implementation_has_to_be_surely_quicker(two_routes, ms, chosen):
    assert autotune.choice(autotune.measure(PROBLEM, CPU, 60, timer=planned(ms))) == chosen


KERNELS = _choices.candidates("triton", "cpu", None, FP16)


def raced(ms: dict[str, float], **options) -> autotune.Outcome:
    """Of the kernel implementations, which take 5 ms unless `ms` says another time."""
    with ckptkern.backend("triton"):
        return autotune.measure(
            MANY, CPU, 60, timer=planned({name: [ms.get(name, 5.0)] for name in KERNELS}), **options
        )


@pytest.mark.parametrize(
    "slow", ["triton", *(pytest.param(one, marks=pytest.mark.long) for one in ("persistent", "library"))]
)
def test_a_slow_kernel_is_not_chosen_and_two_runs_choose_the_same(slow):
    """The default among them, too."""
    ms = {name: 9.0 if name == slow else 1.0 + n for n, name in enumerate(_impls.OF_KERNELS)}
    first, second = (raced(ms) for _ in range(2))
    assert set(_impls.OF_KERNELS) <= first.ms.keys()
    assert autotune.choice(first) == autotune.choice(second) == ("persistent" if slow == "triton" else "triton")


# -- tiles


def test_tiles_of_the_quickest_implementations_are_timed_beside_them():
    """Two implementations are near, and so is cuBLAS's, which has no tiles."""
    said = []
    outcome = raced(
        {"triton": 1.05, "persistent": 1.0, "dual": 1.2, "library": 1.0, "persistent:256x128": 0.9}, say=said.append
    )
    tried = {*_impls.with_tiles("triton", 90), *_impls.with_tiles("persistent", 90)}
    assert outcome.ms.keys() == {*_impls.OF_KERNELS, *tried}
    [row] = autotune.rows_of([outcome])
    assert autotune.choice(outcome) == row["impl"] == "persistent:256x128"
    assert row["ms"]["persistent:256x128"] == 0.9
    assert f"{MANY}: persistent:256x128" in said
    assert "persistent:256x128 0.9 ms" in autotune.line(outcome)


@pytest.mark.parametrize(
    ("ms", "chosen"),
    [
        ({"triton:128x256": 8.0}, "triton"),
        pytest.param({"triton:128x256": 1.0}, "triton:128x256", marks=pytest.mark.long),
    ],
)
def test_tiles_have_to_be_surely_quicker(ms, chosen):
    assert autotune.choice(raced(ms)) == chosen


def test_the_default_is_timed_again_with_the_tiles_of_others():
    """It warms up: 9 ms in the first five rounds, 3 in those beside the tiles, of which none takes less."""
    times = {name: [4.0] for name in KERNELS} | {"triton": [9.0] * (1 + race.ENOUGH) + [3.0] * 1000, "dual": [5.0]}
    with ckptkern.backend("triton"):
        outcome = autotune.measure(MANY, CPU, 0.0, timer=planned(times))
    assert "dual:128x64" not in outcome.ms
    assert outcome.medians["triton"] == 3.0
    assert autotune.choice(outcome) == "triton"


@pytest.mark.parametrize(
    ("bug", "why"),
    [
        pytest.param(lambda dz: dz.mul_(1.01), "times eager's", marks=pytest.mark.long),
        (lambda dz: dz[5:9].zero_(), "times eager's"),
        pytest.param(lambda dz: 1 / 0, "ZeroDivisionError: division by zero", marks=pytest.mark.long),
    ],
)
def test_wrong_tiles_are_not_timed(bug, why, monkeypatch):
    """Quick as they are. They cost themselves alone."""
    right = triton_kernels.act_grad

    def act_grad(*args, variant="", **options):
        results = right(*args, variant=variant, **options)
        if variant == "64x256":
            bug(results[0])
        return results

    monkeypatch.setattr(triton_kernels, "act_grad", act_grad)
    outcome = raced({"triton:64x256": 0.1, "triton:128x256": 0.2})
    assert list(outcome.wrong) == ["triton:64x256"]
    assert why in outcome.wrong["triton:64x256"]
    assert autotune.choice(outcome) == "triton:128x256"


class Minutes:
    """A clock that a candidate takes a minute of."""

    def __init__(self, monkeypatch, minute=0):
        self.minute, self.said = minute, []
        monkeypatch.setattr(race, "time", types.SimpleNamespace(perf_counter=lambda: self.minute))

    def say(self, text: str) -> None:
        self.minute += 1
        self.said.append(text)


@pytest.mark.parametrize(
    "minutes", [1, pytest.param(3, marks=pytest.mark.long), len(_impls.OF_KERNELS), len(_impls.OF_KERNELS) + 2]
)
def test_no_candidate_after_the_deadline(minutes, monkeypatch):
    """It is looked at before each, whether implementation or tiles. The default comes first, since all are compared with it."""
    monkeypatch.setattr(_choices, "default_impl", lambda *key: "dual")
    clock = Minutes(monkeypatch)
    outcome = raced({"triton": 1.0, "triton:128x256": 0.5}, deadline=minutes - 0.5, say=clock.say)
    assert len(clock.said) == len(outcome.ms) == minutes
    assert clock.said[0] == f"{MANY}: dual"
    best = "triton" if minutes > 1 else "dual"
    assert set(outcome.left) == {*_impls.OF_KERNELS, *_impls.with_tiles(best, 90)} - outcome.ms.keys()
    assert f"the time is over, {len(outcome.left)} not tried" in autotune.line(outcome)
    assert autotune.choice(outcome) == ("triton:128x256" if "triton:128x256" in outcome.ms else best)
    assert [row["left"] for row in autotune.rows_of([outcome])] == ([outcome.left] if minutes > 1 else [])


def test_what_is_tuned_is_what_runs(monkeypatch, capsys):
    """From the table's file: the implementation, its tiles in forward and backward, and what `env` says."""
    tiles = []
    for name in ("linear_fwd", "act_grad"):
        whole = getattr(triton_kernels, name)
        monkeypatch.setattr(
            triton_kernels,
            name,
            lambda *args, whole=whole, **options: tiles.append(options.get("variant")) or whole(*args, **options),
        )
    write("triton:256x128", "few")
    with ckptkern.backend("triton"):
        assert [impl(rows=rows) for rows in (4, 9000)] == ["triton:256x128", "triton"]
        problem = PROBLEM._replace(tokens=4)
        y = race.forward(problem, race.tensors_of(problem, CPU, 4))
    y.sum().backward()
    assert tiles == ["256x128"] * 3
    assert main(["env"]) == 0
    assert "mlp float16, up to 256 features, few rows: triton:256x128\n" in capsys.readouterr().out


def test_tiles_that_spill_or_do_not_fit_are_not_run(monkeypatch):
    """The default ones may have a spill, which others of that kernel are forgiven, too."""
    forward, backward = (
        Built("_linear_fwd_kernel", "128x256x64", 0, 9000),
        Built("_act_grad_kernel", "128x128x64", 8, 9000),
    )
    compiled = {
        "triton:128x128": [forward._replace(tile="128x128x64"), backward._replace(shared=10_000)],
        "triton:128x256": [forward._replace(stack=4), backward],
        "triton:256x128": [forward, backward._replace(stack=16)],
        "triton:64x256": [forward, backward._replace(shared=10_001)],
    }
    monkeypatch.setattr(race.Race, "_compiled", lambda race, impl: compiled.get(impl, [forward, backward]))
    monkeypatch.setattr(race.Race, "shared_memory", 10_000)
    outcome = raced({"persistent": 9.0, "dual": 9.0, "triton:64x256": 0.1})
    assert outcome.ms.keys() == {*_impls.OF_KERNELS, "triton:128x128"}  # 128x64 and 64x128 are the default tiles here
    assert outcome.wrong == {
        "triton:128x256": "_linear_fwd_kernel of 128x256x64 spills 4 bytes",
        "triton:256x128": "_act_grad_kernel of 128x128x64 spills 16 bytes",
        "triton:64x256": "_act_grad_kernel of 128x128x64 takes 10001 bytes of shared memory, and a block has 10000",
    }


@functools.cache
def learned(what: str) -> dict:
    """From a process whose kernels can be compiled."""
    process = outside.start(str(outside.ROOT / "tests" / "support" / "compiled.py"), what, stdout=subprocess.PIPE)
    out, _ = process.communicate()
    assert process.returncode == 0
    return json.loads(out)


def test_a_launch_finds_what_pruning_compiled():
    """By the name in Triton's cache, so that tiles are compiled once."""
    found = learned("cached")
    assert found["built"] == found["launched"]
    assert len(found["built"]) == 1


def test_a_launch_is_whole_and_fenced():
    """Where the emulator has asked for the kernel's PTX before, too; Triton 3.6 has no fence of its own."""
    found = learned("cached")
    assert min(found["bytes"]) > 0
    assert min(found["wgmmas"]) > 0
    assert min(found["fences"]) > 0


@pytest.mark.long
def test_pruning_reads_what_the_compiler_made():
    """For an H200 that is not here."""
    found = learned("pruned")
    assert found["triton:128x256"] == found["triton:128x128"] == ""
    assert found["triton:128x64"] == "default"  # of an MLP's two kernels none has such a tile
    assert re.fullmatch(r"_act_grad_kernel of 64x256x64, 4 warps, 3 stages, SUB 1 spills \d+ bytes", found["spill"])
    assert re.fullmatch(
        r"_act_grad_kernel of .* takes 245760 bytes of shared memory, and a block has 232448", found["shared"]
    )


@pytest.mark.parametrize(("library", "chosen"), [(0.999, "triton:128x128"), (0.9, "library")])
def test_a_default_with_tiles_that_a_problem_does_not_use(library, chosen, monkeypatch):
    """Rows of odd length run the default ones. Its implementation replaces it."""
    monkeypatch.setattr(_choices, "default_impl", lambda *key: "triton:128x128")
    monkeypatch.setattr(race.Race, "_compiled", lambda race, impl: [Built("kernel", "default", 0, 9000)])
    monkeypatch.setattr(race.Race, "shared_memory", 10_000)
    outcome = raced({"triton": 1.0, "library": library})
    assert outcome.ms.keys() == set(_impls.OF_KERNELS)
    assert autotune.choice(outcome) == chosen


def timed(features: int, default: str = "triton", **ms: float) -> autotune.Outcome:
    problem = PROBLEM._replace(features=features, out=features)
    return autotune.Outcome(problem, default, {name: [one] * 5 for name, one in ms.items()})


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [
        ({"triton": 1.0, "dual": 0.8}, {"triton": 1.0, "dual": 1.3}, "triton"),
        ({"triton": 1.0, "dual": 0.8}, {"triton": 9.0, "dual": 9.9}, "triton"),  # the larger one has more of the time
        ({"triton": 1.0, "dual": 1.3}, {"triton": 9.0, "dual": 8.0}, "dual"),
        ({"triton": 1.0, "dual": 0.5, "library": 0.9}, {"triton": 1.0, "library": 0.9}, "library"),  # where dual failed
    ],
)
def test_problems_of_one_row_choose_together(first, second, chosen):
    for pair in ((first, second), (second, first)):
        [row] = autotune.rows_of([timed(features, **ms) for features, ms in zip((140, 200), pair, strict=True)])
        assert row["impl"] == chosen
        assert row["measured"] == [[140, 40, 140, 32], [200, 40, 200, 32]]
    assert len(autotune.rows_of([timed(140, **first), timed(300, **second)])) == 2


def test_tiles_that_one_problem_of_a_row_does_not_use():
    """There they take the time of their implementation."""
    odd, even = timed(141, triton=1.0), timed(200, triton=5.0)
    odd.same, even.ms["triton:128x128"] = ["triton:128x128"], [4.0]
    assert autotune.choice(odd, even) == "triton:128x128"


def test_what_is_printed_is_what_the_table_has(two_routes, monkeypatch, capsys):
    """Of two problems in one row, which would choose otherwise alone."""
    times = {140: {"triton": [10.0], "library": [5.0]}, 200: {"triton": [20.0], "library": [30.0]}}
    measured = autotune.measure
    monkeypatch.setattr(
        autotune,
        "measure",
        lambda problem, *args, **say: measured(problem, *args, timer=planned(times[problem.features]), **say),
    )
    assert main(["autotune", "--ops", "mlp", "--dtype", "fp16", "--shapes", "200x40,140x40", "--tokens", "16"]) == 0
    forget()
    assert impl() == "triton"
    assert capsys.readouterr().out.count("mlp float16, up to 256 features: triton\n") == 1


def test_a_wrong_implementation_is_not_timed(two_routes, monkeypatch):
    monkeypatch.setattr(_impls.Library, "mm", staticmethod(lambda a, b, **out: _impls.eager.mm(a, b, **out) * 1.01))
    outcome = autotune.measure(PROBLEM, CPU, 60, timer=planned({"triton": [10.0], "library": [1.0]}))
    assert autotune.choice(outcome) == "triton"
    assert outcome.ms.keys() == {"triton"}
    assert "times eager's" in outcome.wrong["library"]


def test_an_implementation_that_fails_costs_itself_alone(two_routes, monkeypatch):
    monkeypatch.setattr(_impls.Library, "mm", staticmethod(lambda a, b, **out: 1 / 0))
    outcome = autotune.measure(PROBLEM, CPU, 60, timer=planned({"triton": [10.0]}))
    assert outcome.wrong == {"library": "ZeroDivisionError: division by zero"}
    assert autotune.choice(outcome) == "triton"


@pytest.mark.parametrize("op", autotune.OPS)
def test_every_op_is_timed_for_real(two_routes, op):
    problem = PROBLEM._replace(op=op, hidden=0 if op == "linear_act" else 40, out=300)
    outcome = autotune.measure(problem, CPU, 0.0)
    assert outcome.wrong == {}
    _choices._choice.seen = seen = []
    try:
        race.forward(problem, race.tensors_of(problem, CPU, 3))
    finally:
        _choices._choice.seen = None
    assert seen == [problem[:5]]  # the row that is written is the row that is read
    assert [row["features"] for row in autotune.rows_of([outcome])] == [512]
    assert {len(times) for times in outcome.ms.values()} == {race.ENOUGH}
    assert min(map(min, outcome.ms.values())) > 0


@pytest.mark.gpu
def test_tiles_are_tuned_on_a_gpu():
    """Every tile is timed, unless it spills, does not fit, or is the default one; none is wrong."""
    device = torch.device("cuda", torch.cuda.current_device())
    problem = autotune.Problem("mlp", 1024, 4096, 1024, BF16, 8192)
    outcome = autotune.measure(problem, device, 1.0)
    assert all(re.search(r" spills | bytes of shared memory", why) for why in outcome.wrong.values()), outcome.wrong
    assert autotune.choice(outcome) in outcome.ms
    assert min(map(min, outcome.ms.values())) > 0


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def library_is_quicker(two_routes, monkeypatch):
    timer = planned({"triton": [10.0], "library": [5.0]})
    measured = autotune.measure
    monkeypatch.setattr(autotune, "measure", functools.partial(measured, timer=timer))


def test_the_table_is_written_and_followed(library_is_quicker, capsys):
    assert impl() == "triton"
    assert main(["autotune", "--ops", "mlp", "--dtype", "fp16", "--shapes", "24x40", "--tokens", "16"]) == 0
    assert "mlp 24x40x24 float16, 16 tokens" in capsys.readouterr().out
    assert impl() == "triton"  # of this process the table is read
    forget()
    assert impl() == "library"
    assert [impl(BF16), impl(features=257), impl(op="gated_mlp")] == ["triton"] * 3
    assert main(["autotune", "--ops", "gated_mlp", "--dtype", "fp16", "--shapes", "24x40", "--tokens", "16"]) == 0
    forget()
    assert [impl(), impl(op="gated_mlp")] == ["library", "library"]  # the earlier rows stay
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert f"table: {file_of_this_machine()}\n" in printed
    assert "mlp float16, up to 256 features: library\n" in printed
    assert main(["autotune", "--reset"]) == 0
    forget()
    assert impl() == "triton"
    assert main(["autotune", "--reset"]) == 0
    assert "there is no table" in capsys.readouterr().out


def test_nothing_is_written_in_a_dry_run_or_without_time(library_is_quicker, cache, capsys):
    arguments = ["autotune", "--ops", "mlp", "--dtype", "fp16", "--shapes", "24x40", "--tokens", "16"]
    assert main([*arguments, "--dry-run"]) == 0
    assert main([*arguments, "--minutes", "0"]) == 1
    assert "the time is over: 1 of 1 matmuls were not reached, and 0 only in part. The same" in capsys.readouterr().out
    assert not list(cache.iterdir())


MODEL = """
import torch, ckptkern

def build():
    layer = ckptkern.nn.MLP(24, 40, dtype=torch.float16)
    return torch.nn.Sequential(layer, ckptkern.nn.GatedMLP(24, 32, dtype=torch.float16)), torch.randn(3, 24).half()

def plain():
    return torch.nn.Linear(3, 4), torch.randn(2, 3)
"""


def test_the_matmuls_of_a_model(tmp_path, library_is_quicker, capsys):
    file = tmp_path / "its_model.py"
    file.write_text(MODEL)
    found = autotune.of_model(f"{file}:build")
    assert found == [("mlp", 24, 40, 24, FP16), ("gated_mlp", 24, 32, 24, FP16)]
    assert [dtype for *_, dtype in autotune.of_model(f"{file}:build", [BF16])] == [BF16, BF16]
    assert main(["autotune", "--model", f"{file}:build", "--ops", "mlp"]) == 2
    assert "--ops cannot be combined with it" in capsys.readouterr().err
    assert main(["autotune", "--model", f"{file}:plain"]) == 2
    assert "runs no fused MLP" in capsys.readouterr().err
    assert main(["autotune", "--model", f"{file}:nothing"]) == 2


@pytest.mark.parametrize("shapes", ["12", "12x", "0x4", "axb", "1x2x3"])
def test_shapes_that_are_none(shapes, capsys):
    with pytest.raises(SystemExit):
        main(["autotune", "--shapes", shapes])
    assert f"wanted FEATURESxHIDDEN, such as 1024x4096,2048x8192, but got {shapes!r}" in capsys.readouterr().err


# -- files that are refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda file: file.write_text(file.read_text()[:-9]), "it is damaged (JSONDecodeError"),
        (lambda file: file.write_bytes(b"\xff\xfe{}"), "it is damaged (UnicodeDecodeError"),
        (lambda file: file.write_text("[]"), "it is damaged (TypeError"),
        (lambda file: file.write_text('{"format": 9}'), "another version of ckptkern wrote it: its format is 9, not 3"),
        (lambda file: file.write_text(file.read_text().replace("256", "255")), "it is damaged (ValueError"),
        (lambda file: file.write_text(file.read_text().replace("many", "all")), "it is damaged (ValueError"),
        (lambda file: file.write_text(file.read_text().replace('"rows"', '"row"')), "it is damaged (KeyError: 'rows'"),
        (lambda file: write(device="another"), "it was made for device another, not "),
        (lambda file: write(torch="1.0"), "it was made for torch 1.0, not "),
        (lambda file: write(ckptkern="0.0.1"), "it was made for ckptkern 0.0.1, not "),
        (lambda file: write("warp"), "it names unknown implementations: warp"),
        (lambda file: write("triton:96x96"), "it names unknown implementations: triton:96x96"),
        (
            lambda file: file.write_text(file.read_text().replace('"format": 3', '"format": 2')),
            "another version of ckptkern wrote it: its format is 2, not 3",
        ),
        (lambda file: write(["library"]), "it is damaged (TypeError: an implementation that is not a string"),
        (lambda file: (file.unlink(), file.mkdir()), "[Errno 21] Is a directory"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_once(two_routes, spoil, why, capsys):
    write()
    assert impl() == "library"
    spoil(file_of_this_machine())
    forget()
    with pytest.warns(UserWarning, match=re.escape(why)) as said:
        assert impl() == "triton"
    assert len(said) == 1
    assert f"{file_of_this_machine()} is not used, because {why}" in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert impl(features=2000) == "triton"
    assert main(["env"]) == 0
    assert f"is not used: {why}" in capsys.readouterr().out


def test_without_a_home_nothing_is_tuned(two_routes, monkeypatch):
    monkeypatch.delenv("CKPTKERN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(_tuned.Path, "home", mock.Mock(side_effect=RuntimeError("Could not determine home directory.")))
    with pytest.warns(UserWarning, match="the table of tuned implementations is not used, because Could not determine"):
        assert impl() == "triton"


def test_nothing_can_be_chosen_where_no_kernel_runs(capsys):
    assert main(["autotune", "--ops", "mlp", "--device", "cpu"]) == 2
    assert "nothing can be chosen on cpu: only PyTorch's ops run there" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_said_before_measuring(two_routes, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CKPTKERN_CACHE", str(tmp_path / "file" / "folder"))
    monkeypatch.setattr(autotune, "measure", mock.Mock(side_effect=AssertionError("measured")))
    assert main(["autotune", "--ops", "mlp", "--shapes", "24x40"]) == 2
    assert "ckptkern autotune: [Errno 20] Not a directory" in capsys.readouterr().err


def test_the_next_run_begins_with_what_is_left(library_is_quicker, monkeypatch, capsys):
    """Of two matmuls each takes more than the time. A whole table is measured anew, in the order of the command line."""
    quick, clock, reached = autotune.measure, Minutes(monkeypatch), []
    monkeypatch.setattr(autotune, "time", race.time)

    def measure(problem, *given, **said):
        reached.append(problem.features)
        outcome = quick(problem, *given, **said)
        clock.minute += 61
        return outcome

    monkeypatch.setattr(autotune, "measure", measure)
    arguments = ["--ops", "mlp", "--dtype", "fp16", "--shapes", "24x40,300x40", "--tokens", "16", "--minutes", "1"]
    for after in ([24], [24, 300], [24, 300, 24]):
        assert main(["autotune", *arguments]) == 0
        assert reached == after
        said = "the time is over: 1 of 2 matmuls were not reached, and 0 only in part. The same command again begins with them"
        assert said in capsys.readouterr().out
    forget()
    assert [impl(features=features) for features in (24, 300)] == ["library", "library"]
    clock.minute = 0
    assert main(["autotune", *arguments[:-1], "9"]) == 0
    assert "the time is over" not in capsys.readouterr().out


def test_rows_that_are_whole():
    first, second, other = PROBLEM, PROBLEM._replace(tokens=64), PROBLEM._replace(features=300)
    todo = [first, second, other]

    def finished(*outcomes: autotune.Outcome) -> set:
        return autotune.finished(json.loads(json.dumps(autotune.rows_of(outcomes))), todo, CPU)

    def outcome(problem: autotune.Problem, **changes) -> autotune.Outcome:
        return autotune.Outcome(problem, "triton", {"triton": [1.0], "library": [2.0]}, **changes)

    assert finished() == set()
    assert finished(outcome(other)) == {other}
    assert finished(outcome(other, left=["dual"])) == set()
    assert finished(outcome(other, few=True)) == set()  # a row of another class
    assert finished(outcome(first)) == set()  # its row has two problems, which choose together
    assert finished(outcome(first), outcome(second)) == {first, second}
    assert autotune.finished([{"op": "mlp", "dtype": "float16", "features": 512, "rows": "many"}], todo, CPU) == set()


def test_what_is_measured_by_default(monkeypatch):
    """The most valuable first: bfloat16, many rows, 2048 features; few rows of 16 bits for a GPU, of a size and op once."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(_choices, "choose_backend", lambda op, x: "triton" if op == "autotune" else 1 / 0)
    monkeypatch.setattr(torch, "empty", lambda *shape, **given: None)
    parser = argparse.ArgumentParser()
    autotune.add_arguments(parser)
    found = autotune.problems(parser.parse_args([]), torch.device("cuda", 0))
    assert found[0] == autotune.Problem("mlp", 2048, 8192, 2048, BF16, 8192)
    assert len(set(found)) == len(found) == 3 * 5 * 2 * 2
    assert [(one.dtype, one.tokens) for one in found[::15]] == [(BF16, 8192), (BF16, 128), (FP16, 8192), (FP16, 128)]
    single = autotune.problems(parser.parse_args(["--dtype", "fp32", "bf16"]), torch.device("cuda", 0))
    assert [(one.dtype, one.tokens) for one in single[::15]] == [(torch.float32, 8192), (BF16, 8192), (BF16, 128)]
    assert {one.tokens for one in autotune.problems(parser.parse_args(["--tokens", "9"]), torch.device("cuda", 0))} == {
        9
    }


def test_an_older_table_is_made_anew(library_is_quicker, capsys):
    write()
    file_of_this_machine().write_text(file_of_this_machine().read_text().replace('"format": 3', '"format": 2'))
    assert main(["autotune", "--ops", "mlp", "--dtype", "fp16", "--shapes", "300x40", "--tokens", "16"]) == 0
    why = "is made anew, because another version of ckptkern wrote it: its format is 2, not 3"
    assert f"{file_of_this_machine()} {why}" in capsys.readouterr().out
    assert [row["features"] for row in _tuned.rows(file_of_this_machine())] == [512]


def test_an_interrupt_loses_nothing(library_is_quicker, monkeypatch):
    quick, done = autotune.measure, []

    def measure(*arguments, **said):
        if done:
            raise KeyboardInterrupt
        done.append(arguments)
        return quick(*arguments, **said)

    monkeypatch.setattr(autotune, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        main(["autotune", "--ops", "mlp", "gated_mlp", "--dtype", "fp16", "--shapes", "24x40", "--tokens", "16"])
    forget()
    assert [impl(), impl(op="gated_mlp")] == ["library", "triton"]


def test_an_implementation_that_fails_later_is_dropped(two_routes):
    def timer(problem, name, t):
        times = iter([1.0, 1.0] if name == "library" else [5.0] * 99)
        return lambda: next(times)

    outcome = autotune.measure(PROBLEM, CPU, 60, timer=timer)
    assert outcome.wrong == {"library": "StopIteration: "}
    assert autotune.choice(outcome) == "triton"


def test_a_row_that_does_not_apply_is_passed_over():
    """A table of kernel implementations, where PyTorch ops run, and the other way round."""
    write("dual")
    assert impl() == "eager"
    write("eager")
    with ckptkern.backend("triton"):
        assert impl() in _impls.OF_KERNELS


def test_a_table_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    row = {"op": "mlp", "dtype": "bfloat16", "features": 2048, "rows": "few", "impl": "dual"}
    file = _tuned.path("cuda", 0)
    assert file.name == "implementations-nvidia-h200.json"
    _tuned.write(file, _tuned.machine("cuda", 0), [row])
    assert _choices._impl("mlp", "triton", "cuda", 0, BF16, _impls.size_class(2048)) == (1664, "dual", "triton")
    assert _choices._impl("mlp", "triton", "cuda", 0, FP16, _impls.size_class(2048)) == (1664, "triton", "triton")
    assert json.loads(file.read_text())["machine"]["device"] == "NVIDIA H200"
