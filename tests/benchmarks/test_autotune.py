"""The tuned table: what is timed and chosen, what is written, and which files are refused."""

import argparse
import json
import re
import types
import warnings
from unittest import mock

import pytest
import torch

import ckptkern
from ckptkern import triton_kernels
from ckptkern.__main__ import main
from ckptkern.benchmarks import autotune, measure
from ckptkern.ops.dispatch import choices as _choices
from ckptkern.ops.dispatch import implementations as _impls
from ckptkern.ops.dispatch import tuned as _tuned

FP16, BF16 = torch.float16, torch.bfloat16
CPU = torch.device("cpu")
PROBLEM = autotune.Problem("mlp", 24, 40, 24, FP16, 32)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Nobody's table before, and none after."""
    monkeypatch.setenv("CKPTKERN_CACHE", str(tmp_path))
    forget()
    yield tmp_path
    forget()


@pytest.fixture
def two_routes(monkeypatch):
    """Interpreted kernels on a CPU, where libraries are the default, as on a GPU."""
    monkeypatch.setattr(
        _choices, "choose_backend", lambda op, x: "eager" if _choices._choice.backend == "eager" else "triton"
    )


def forget() -> None:
    """As a process that starts."""
    _tuned.table.cache_clear()
    _choices._impl.cache_clear()


def impl(dtype=FP16, features=24, op="mlp") -> str:
    x = torch.empty(9, features, dtype=dtype)
    return _choices.choose_impl(op, x, features, 40, features)


def file_of_this_machine():
    return _tuned.path("cpu", None)


def write(impl="triton", **changes) -> None:
    row = {"op": "mlp", "dtype": "float16", "features": 256, "impl": impl}
    autotune.write(file_of_this_machine(), _tuned.machine("cpu", None) | changes, [row])
    forget()


# -- choosing ----------------------------------------------------------------------------------------------------------


def planned(ms: dict[str, list[float]]):
    """Times in turns that are these ms, again and again."""

    def interleaved(steps, clock, rounds, seconds, cuda):
        return {name: (ms[name.removeprefix(autotune.OURS)] * rounds)[:rounds] for name in steps}, {}

    return mock.patch.object(measure, "interleaved", interleaved)


def measured(problem=PROBLEM, seconds=60.0) -> autotune.Outcome:
    with ckptkern.backend("auto"):
        return autotune.outcome_of(problem, CPU, seconds)


@pytest.mark.parametrize(
    ("ms", "chosen"),
    [
        ({"library": [10.0], "triton": [5.0]}, "triton"),
        ({"library": [10.0], "triton": [20.0]}, "library"),
        ({"library": [10.0], "triton": [9.9]}, "library"),  # within the margin
        ({"library": [10.0], "triton": [5.0, 5.0, 11.0]}, "library"),  # every third step is slower than the default
        ({"library": [10.0, 30.0], "triton": [5.0]}, "triton"),
    ],
)
def test_an_implementation_has_to_be_surely_quicker(two_routes, ms, chosen):
    with planned(ms):
        outcome = measured()
    assert outcome.rows.keys() == _impls.OF_KERNELS.keys()
    assert autotune.choice([outcome]) == chosen


def row(impl: str, ms: float) -> measure.Row:
    return measure.Row("", impl, "cpu", "float16", ms=ms, p20_ms=ms, p80_ms=ms)


def timed(features: int, **ms: float) -> autotune.Outcome:
    problem = PROBLEM._replace(features=features, out=features)
    return autotune.Outcome(problem, "library", {name: row(name, time) for name, time in ms.items()})


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [
        ({"library": 1.0, "triton": 0.8}, {"library": 1.0, "triton": 1.3}, "library"),
        (
            {"library": 1.0, "triton": 0.8},
            {"library": 9.0, "triton": 9.9},
            "library",
        ),  # the larger one has more of the time
        ({"library": 1.0, "triton": 1.3}, {"library": 9.0, "triton": 8.0}, "triton"),
        ({"library": 1.0, "triton": 0.5}, {"library": 1.0}, "library"),  # the kernels failed
        ({"library": 1.0, "triton": 9.0}, {"triton": 9.0}, "triton"),  # the default failed
    ],
)
def test_problems_of_one_row_choose_together(first, second, chosen):
    for pair in ((first, second), (second, first)):
        [row] = autotune.rows_of(
            [timed(features, **ms) for features, ms in zip((140, 200), pair, strict=True)]
        ).values()
        assert row["impl"] == chosen
        assert row["measured"] == [[140, 40, 140, 32], [200, 40, 200, 32]]
    assert len(autotune.rows_of([timed(140, **first), timed(300, **second)])) == 2


def test_what_is_printed_is_what_the_table_has(two_routes, monkeypatch, capsys):
    """Of two problems in one row, which would choose otherwise alone."""
    times = {140: {"library": 10.0, "triton": 5.0}, 200: {"library": 20.0, "triton": 30.0}}

    def rows(problem, device, seconds):
        return {impl: row(impl, ms) for impl, ms in times[problem.features].items()}

    monkeypatch.setattr(autotune, "timed", rows)
    assert main(["autotune", "--ops", "mlp", "--dtype", "fp16", "--shapes", "200x40,140x40", "--tokens", "16"]) == 0
    forget()
    assert impl() == "library"
    assert capsys.readouterr().out.count("mlp float16, up to 256 features: library\n") == 1


@pytest.mark.parametrize(
    ("bug", "why"),
    [(lambda dh: dh.mul_(1.01), "times eager's"), (lambda dh: 1 / 0, "ZeroDivisionError: division by zero")],
)
def test_a_wrong_implementation_is_not_timed(two_routes, bug, why, monkeypatch, capsys):
    """Quick and the default as it is. It costs itself alone."""

    def mm(a, b, **out):
        dh = _impls.eager.mm(a, b, **out)
        bug(dh)
        return dh

    monkeypatch.setattr(_impls.Library, "mm", staticmethod(mm))
    with planned({"triton": [10.0], "library": [1.0]}):
        outcome = measured()
    assert outcome.rows.keys() == {"triton"}
    assert autotune.choice([outcome]) == "triton"
    printed = capsys.readouterr().out
    assert "triton 10 ms" in printed
    assert re.search(f"library: .*{why}", printed)


def test_a_problem_that_does_not_run_costs_itself_alone(two_routes, monkeypatch, capsys):
    monkeypatch.setattr(
        measure, "build", mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory\nof 80 GiB"))
    )
    assert measured().rows == {}
    assert "triton: OutOfMemoryError: CUDA out of memory; library: OutOf" in capsys.readouterr().out


@pytest.mark.parametrize("op", autotune.OPS)
def test_every_op_is_timed_for_real(two_routes, op):
    problem = PROBLEM._replace(op=op, hidden=0 if op == "linear_act" else 40, out=300)
    outcome = measured(problem, 0.0)
    assert outcome.rows.keys() == _impls.OF_KERNELS.keys()
    model, x = autotune.build(problem, CPU, problem.dtype)
    _choices._choice.seen = seen = []
    try:
        model(x, "triton")
    finally:
        _choices._choice.seen = None
    assert seen == [problem[:5]]  # the row that is written is the row that is read
    assert [features for *_, features in autotune.rows_of([outcome])] == [512]
    assert {row.rounds for row in outcome.rows.values()} == {measure.ENOUGH}
    assert min(row.ms for row in outcome.rows.values()) > 0


@pytest.mark.parametrize("impl", [*_impls.OF_KERNELS, "eager"])
def test_what_is_timed_is_the_implementation(two_routes, impl):
    model, x = autotune.build(PROBLEM, CPU, FP16)
    with (
        mock.patch.object(_impls.Library, "mlp_bwd", autospec=True, side_effect=_impls.Library.mlp_bwd) as library,
        mock.patch.object(triton_kernels, "mlp_bwd", side_effect=triton_kernels.mlp_bwd) as kernels,
    ):
        model(x, impl).sum().backward()
    assert (library.called, kernels.called) == (impl == "library", impl == "triton")
    assert {name for name, _ in model.named_parameters()} == {
        f"op.fc{n}.{kind}" for n in "12" for kind in ("weight", "bias")
    }


@pytest.mark.gpu
@pytest.mark.parametrize("op", autotune.OPS)
def test_implementations_are_timed_on_a_gpu(op):
    device = torch.device("cuda", torch.cuda.current_device())
    problem = autotune.Problem(op, 1024, 0 if op == "linear_act" else 4096, 1024, BF16, 8192)
    rows = autotune.timed(problem, device, 0.5)
    assert {impl: row.status for impl, row in rows.items()} == dict.fromkeys(_impls.OF_KERNELS, "ok")
    assert min(row.ms for row in rows.values()) > 0


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernels_are_quicker(two_routes, monkeypatch):
    with planned({"triton": [5.0], "library": [10.0]}):
        yield


def test_the_table_is_written_and_followed(kernels_are_quicker, capsys):
    assert impl() == "library"
    assert main(["autotune", "--ops", "mlp", "--dtype", "fp16", "--shapes", "24x40", "--tokens", "16"]) == 0
    assert "mlp 24x40x24 float16, 16 tokens" in capsys.readouterr().out
    assert impl() == "library"  # of this process the table is read
    forget()
    assert impl() == "triton"
    assert [impl(BF16), impl(features=257), impl(op="gated_mlp")] == ["library"] * 3
    assert main(["autotune", "--ops", "gated_mlp", "--dtype", "fp16", "--shapes", "24x40", "--tokens", "16"]) == 0
    forget()
    assert [impl(), impl(op="gated_mlp")] == ["triton", "triton"]  # the earlier rows stay
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert f"table: {file_of_this_machine()}\n" in printed
    assert "mlp float16, up to 256 features: triton\n" in printed
    assert main(["autotune", "--reset"]) == 0
    forget()
    assert impl() == "library"
    assert main(["autotune", "--reset"]) == 0
    assert "this machine has no table" in capsys.readouterr().out


def test_nothing_is_written_in_a_dry_run_or_without_time(kernels_are_quicker, cache, capsys):
    arguments = ["autotune", "--ops", "mlp", "--dtype", "fp16", "--shapes", "24x40", "--tokens", "16"]
    assert main([*arguments, "--dry-run"]) == 0
    assert main([*arguments, "--minutes", "0"]) == 1
    assert "the time is over: 1 of 1 matmuls were not measured. The same command" in capsys.readouterr().out
    assert not list(cache.iterdir())


MODEL = """
import torch, ckptkern

def build():
    layers = ckptkern.nn.MLP(24, 40), ckptkern.nn.GatedMLP(24, 32), ckptkern.nn.LinearStack([24, 24, 24])
    return torch.nn.Sequential(*layers).half(), torch.randn(3, 24).half()

def plain():
    return torch.nn.Linear(3, 4), torch.randn(2, 3)
"""


def test_the_matmuls_of_a_model(tmp_path, kernels_are_quicker, capsys):
    """Of its ops that have a choice: a chain of narrow layers has none."""
    file = tmp_path / "its_model.py"
    file.write_text(MODEL)
    problems = autotune.of_model(f"{file}:build")
    assert problems == [("mlp", 24, 40, 24, FP16), ("gated_mlp", 24, 32, 24, FP16)]
    parser = argparse.ArgumentParser()
    autotune.add_arguments(parser)
    asked = parser.parse_args(["--model", f"{file}:build", "--tokens", "9", "--dtype", "bf16"])
    assert autotune.problems(asked, CPU) == [autotune.Problem(*problem[:4], BF16, 9) for problem in problems]
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
        (lambda file: file.write_text('{"format": 9}'), "another version of ckptkern wrote it: its format is 9, not 4"),
        (lambda file: file.write_text(file.read_text().replace("256", "255")), "it is damaged (ValueError"),
        (lambda file: file.write_text(file.read_text().replace('"op"', '"of"')), "it is damaged (KeyError: 'op'"),
        (lambda file: write(device="another"), "it was made for device another, not "),
        (lambda file: write(torch="1.0"), "it was made for torch 1.0, not "),
        (lambda file: write(ckptkern="0.0.1"), "it was made for ckptkern 0.0.1, not "),
        (lambda file: write("warp"), "it names unknown implementations: warp"),
        (lambda file: write("triton:128x128"), "it names unknown implementations: triton:128x128"),
        (
            lambda file: file.write_text(file.read_text().replace('"format": 4', '"format": 3')),
            "another version of ckptkern wrote it: its format is 3, not 4",
        ),
        (lambda file: write(["library"]), "it is damaged (TypeError: unhashable type: 'list'"),
        (lambda file: (file.unlink(), file.mkdir()), "[Errno 21] Is a directory"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_once(two_routes, spoil, why, capsys):
    write()
    assert impl() == "triton"
    spoil(file_of_this_machine())
    forget()
    with pytest.warns(UserWarning, match=re.escape(why)) as said:
        assert impl() == "library"
    assert len(said) == 1
    assert f"{file_of_this_machine()} is not used, because {why}" in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert impl(features=2000) == "library"
    assert main(["env"]) == 0
    assert f"is not used: {why}" in capsys.readouterr().out


def test_without_a_home_nothing_is_tuned(two_routes, monkeypatch):
    monkeypatch.delenv("CKPTKERN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(_tuned.Path, "home", mock.Mock(side_effect=RuntimeError("Could not determine home directory.")))
    with pytest.warns(UserWarning, match="the table of tuned implementations is not used, because Could not determine"):
        assert impl() == "library"


def test_nothing_can_be_chosen_where_no_kernel_runs(capsys):
    assert main(["autotune", "--ops", "mlp", "--device", "cpu"]) == 2
    assert "cpu offers no choice: only PyTorch's ops run there" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_said_before_measuring(two_routes, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CKPTKERN_CACHE", str(tmp_path / "file" / "folder"))
    monkeypatch.setattr(autotune, "timed", mock.Mock(side_effect=AssertionError("measured")))
    assert main(["autotune", "--ops", "mlp", "--shapes", "24x40"]) == 2
    assert "ckptkern autotune: [Errno 20] Not a directory" in capsys.readouterr().err


def test_the_next_run_begins_with_what_is_left(kernels_are_quicker, monkeypatch, capsys):
    """Of two matmuls each takes more than the time. A whole table is measured anew, in the order of the command line."""
    quick, seconds, reached = autotune.timed, [0.0], []
    monkeypatch.setattr(autotune, "time", types.SimpleNamespace(perf_counter=lambda: seconds[0]))

    def timed(problem, *args):
        reached.append(problem.features)
        seconds[0] += 61
        return quick(problem, *args)

    monkeypatch.setattr(autotune, "timed", timed)
    arguments = ["--ops", "mlp", "--dtype", "fp16", "--shapes", "24x40,300x40", "--tokens", "16", "--minutes", "1"]
    for after in ([24], [24, 300], [24, 300, 24]):
        assert main(["autotune", *arguments]) == 0
        assert reached == after
        said = "the time is over: 1 of 2 matmuls were not measured. The same command starts with them"
        assert said in capsys.readouterr().out
    forget()
    assert [impl(features=features) for features in (24, 300)] == ["triton", "triton"]
    assert main(["autotune", *arguments[:-1], "9"]) == 0
    assert "the time is over" not in capsys.readouterr().out


def test_rows_are_what_json_gives_back():
    rows = autotune.rows_of([timed(140, library=2.0), timed(300, library=2.0, triton=1.0)])
    assert json.loads(json.dumps([*rows.values()])) == [*rows.values()]
    assert {key: row["impl"] for key, row in rows.items()} == {
        ("mlp", "float16", 256): "library",
        ("mlp", "float16", 512): "triton",
    }


def test_what_is_measured_by_default(two_routes):
    """The most valuable first: bfloat16, 2048 features."""
    parser = argparse.ArgumentParser()
    autotune.add_arguments(parser)
    problems = autotune.problems(parser.parse_args([]), CPU)
    assert problems[0] == autotune.Problem("mlp", 2048, 8192, 2048, BF16, 8192)
    assert len(set(problems)) == len(problems) == 3 * 5 * 2
    assert [(problem.dtype, problem.tokens) for problem in problems[::15]] == [(BF16, 8192), (FP16, 8192)]
    others = autotune.problems(parser.parse_args(["--tokens", "9", "--dtype", "fp32", "bf16"]), CPU)
    assert [(problem.dtype, problem.tokens) for problem in others[::15]] == [(torch.float32, 9), (BF16, 9)]


def test_an_older_table_is_made_anew(kernels_are_quicker, capsys):
    write()
    file_of_this_machine().write_text(file_of_this_machine().read_text().replace('"format": 4', '"format": 3'))
    assert main(["autotune", "--ops", "mlp", "--dtype", "fp16", "--shapes", "300x40", "--tokens", "16"]) == 0
    why = "is written anew, because another version of ckptkern wrote it: its format is 3, not 4"
    assert f"{file_of_this_machine()} {why}" in capsys.readouterr().out
    assert [*_tuned.table("cpu", None)] == [("mlp", "float16", 512)]


def test_an_interrupt_loses_nothing(kernels_are_quicker, monkeypatch):
    quick, done = autotune.timed, []

    def timed(*arguments):
        if done:
            raise KeyboardInterrupt
        done.append(arguments)
        return quick(*arguments)

    monkeypatch.setattr(autotune, "timed", timed)
    with pytest.raises(KeyboardInterrupt):
        main(["autotune", "--ops", "mlp", "gated_mlp", "--dtype", "fp16", "--shapes", "24x40", "--tokens", "16"])
    forget()
    assert [impl(), impl(op="gated_mlp")] == ["triton", "library"]


def test_an_implementation_that_fails_later_is_dropped(two_routes, monkeypatch):
    times = {"ckptkern library": [5.0] * 30}, {"ckptkern triton": "RuntimeError: an illegal access"}
    monkeypatch.setattr(measure, "interleaved", lambda *_: times)
    outcome = measured()
    assert outcome.rows.keys() == {"library"}
    assert autotune.choice([outcome]) == "library"


@pytest.mark.parametrize("name", _impls.OF_KERNELS)
def test_a_table_is_of_kernels_on_backend_auto_alone(name):
    write(name)
    assert impl() == "eager"
    with ckptkern.backend("triton"):
        assert impl() == "triton"


def test_a_table_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    file = _tuned.path("cuda", 0)
    assert file.name == "implementations-nvidia-h200.json"
    row = {"op": "mlp", "dtype": "bfloat16", "features": 2048, "impl": "triton"}
    autotune.write(file, _tuned.machine("cuda", 0), [row])
    assert [_choices._impl("mlp", "cuda", 0, dtype, 2048) for dtype in (BF16, FP16)] == ["triton", "library"]
    assert json.loads(file.read_text())["machine"]["device"] == "NVIDIA H200"
