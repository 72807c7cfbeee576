"""``python -m ckptkern bench`` end to end on tiny cases: every variant gets its row, whatever the others do."""

import csv
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptkern.benchmarks import cases, measure, micro, report, run, suite
from ckptkern.tools import env

CPU = torch.device("cpu")
TINY = micro.case("mlp", "cpu", title="tiny", features=16, tokens=24)
VARIANTS = cases.variants(TINY)


def with_variants(**baselines):
    return dataclasses.replace(TINY, baselines=baselines)


def small(title):
    """The case of this title at a size that takes no time: width 32, 2 heads of 16, 4 sequences of 50."""
    row = next(row for row in suite.ROWS if row.title == title)
    return row.at("cpu", (32, 200, 50) if len(row.sizes["cpu"][0]) == 3 else (32, 200))


def rows_of(case, *variants, deadline=float("inf"), **more):
    makers = {variant: make for variant, make in cases.variants(case).items() if variant in variants} | more
    rows = {}
    measure.measure(case, makers, CPU, lambda row: rows.update({row.variant: row}), rounds=1, deadline=deadline)
    return rows


def statuses(rows):
    return {variant: row["status"] if isinstance(row, dict) else row.status for variant, row in rows.items()}


def test_rows_for_every_variant_environment_and_report(bench, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    status, rows, printed = bench(case=TINY)
    assert status == 0
    assert statuses(rows) == dict.fromkeys(VARIANTS, "ok")
    for row in rows.values():
        assert (row["case"], row["rounds"], row["dtype"]) == ("tiny/d16x24", "2", "float32")
        assert 0 < float(row["p20_ms"]) <= float(row["ms"]) <= float(row["p80_ms"])
        assert float(row["ratio"]) == pytest.approx(float(row["ms"]) / float(rows["eager"]["ms"]), rel=1e-3)
        assert float(row["error_ratio"]) <= 2
        assert int(row["peak_bytes"]) > 0
    x = 24 * 4 * 16  # z and h are four times as wide
    saved = {variant.split()[-1]: int(row["saved_bytes"]) / x for variant, row in rows.items()}
    assert saved == saved | {"full": 1, "selective": 5, "none": 9, "eager": 9, "checkpoint": 1}
    assert f"cases: 1, variants: {len(VARIANTS)}; the budget is 4 minutes" in printed
    assert re.search(r"  eager +ok +\S+ ms \(\S+ to \S+\), 1.00 of eager", printed)

    written = (tmp_path / "out" / "env.json").read_text()
    assert {"date", "commit", "device", "settings", "sdpa", "versions"} <= set(json.loads(written))
    assert not [path for path in (Path.home(), Path(run.__file__).parents[1]) if str(path) in written]
    text = (tmp_path / "out" / "report.md").read_text()
    assert "## tiny/d16x24, float32" in text
    assert re.search(r"\| ckptkern full \| \d+\.\d\d \| \d+\.\d\d \| \d+% \| 1\.5 KiB \|", text)
    (figure,) = (tmp_path / "out" / "figures").iterdir()
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_a_wide_spread_and_a_busy_machine_are_named(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(run.measure, "load_warning", lambda threads: "Others run here.")
    high = dict.fromkeys(VARIANTS, 10) | {"eager": 12, "ckptkern full": 13}
    monkeypatch.setattr(
        measure,
        "interleaved",
        lambda steps, *_, **__: ({name: [10, 10, 10, high[name], high[name]] for name in steps}, {}),
    )
    assert "Others run here." in bench(case=TINY).printed
    text = (tmp_path / "out" / "report.md").read_text()
    assert "**Others run here.**" in text
    assert "- spread above 25%, so measure again on a quiet machine: ckptkern full\n" in text
    assert "| eager | 1.00 | 1.00 | 20% |" in text


class Partial(torch.autograd.Function):
    """Leaves the first row of the gradient unwritten."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, dy):
        dx = torch.empty_like(dy)
        dx[1:] = dy[1:]
        return dx


def raises(model, x):
    raise RuntimeError("no kernel\nfor this")


def raises_later(model, x):
    calls = []

    def function(x):
        calls.append(x)
        if len(calls) > 8:
            raise RuntimeError("worn out")
        return model(x)

    return function


def missing(model, x):
    import no_such_package  # noqa: F401


def test_a_variant_that_is_wrong_or_fails_is_not_timed_and_the_rest_goes_on(bench, tmp_path):
    """Ours are checked as they are timed, and once more with poison; under deterministic algorithms another core attention
    runs."""
    deterministic = torch.are_deterministic_algorithms_enabled
    expected = {  # variant: its function, its status, what its note says
        "output": (lambda model, x: lambda x: model(x) * 1.001, "wrong", "error of "),
        "gradient": (lambda model, x: lambda x: model(x) + 0.01 * (x - x.detach()), "wrong", "error of x"),
        "first": (raises, "failed", "RuntimeError: no kernel"),
        "later": (raises_later, "failed", "RuntimeError: worn out"),
        "baseline": (missing, "missing", "no_such_package"),
    }
    status, rows, _ = bench(case=with_variants(**{name: row[0] for name, row in expected.items()}))
    assert status == 0, "a baseline's error is not ours"
    assert statuses(rows) == dict.fromkeys(VARIANTS, "ok") | {name: row[1] for name, row in expected.items()}
    for variant, (_, verdict, note) in expected.items():
        assert note in rows[variant]["note"]
        assert rows[variant]["ms"] == rows[variant]["ratio"] == ""
        assert verdict != "wrong" or float(rows[variant]["error_ratio"]) > measure.BASELINES_AT_MOST
    text = (tmp_path / "out" / "report.md").read_text()
    assert "output: wrong" in text
    assert "- baseline: missing: ModuleNotFoundError" in text

    ours = {
        "ckptkern mine": lambda model, x: lambda x: model(x) * (1.0 if deterministic() else 1.001),
        "ckptkern forgetful": lambda model, x: lambda x: model(Partial.apply(x)),
    }
    status, rows, printed = bench(case=with_variants(**ours))
    assert status == 1
    assert {rows[variant]["status"] for variant in ours} == {"wrong"}
    assert rows["ckptkern forgetful"]["error_ratio"] == "inf"
    assert "NOT RIGHT: tiny/d16x24 ckptkern mine: wrong" in printed
    assert not deterministic()


def test_ours_may_err_twice_as_much_as_eager_and_baselines_eight_times(monkeypatch):
    monkeypatch.setattr(measure, "error_ratio", lambda *_: (3.0, "x"))
    assert statuses(rows_of(TINY, *VARIANTS)) == {name: "wrong" if "ckptkern" in name else "ok" for name in VARIANTS}


def test_what_torch_compiles_is_measured_after_everything_else_and_eager_once(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(cases, "COMPILED", {"compile": lambda model, x: model})
    status, rows, _ = bench("--compile", case=TINY)
    assert status == 0
    assert list(rows) == [*VARIANTS, "compile"]
    assert set(statuses(rows).values()) == {"ok"}
    assert len((tmp_path / "out" / "results.csv").read_text().splitlines()) == 1 + len(rows)


def test_where_float64_raises_variants_are_checked_against_eager(bench, monkeypatch, tmp_path):
    """The row says so, and a wrong result is still wrong."""
    monkeypatch.setattr(measure.Checker, "_exact", raises)
    status, rows, _ = bench(case=with_variants(wrong=lambda model, x: lambda x: model(x) * 1.01))
    assert status == 0
    assert statuses(rows) == dict.fromkeys(VARIANTS, "ok") | {"wrong": "wrong"}
    for row in rows.values():
        assert row["note"].startswith("checked against eager: float64: RuntimeError: no kernel"), row["note"]
        assert row["note"].endswith("of its norm from eager's, at most 0.00035")
        assert row["error_ratio"] == ""
    text = (tmp_path / "out" / "report.md").read_text()
    assert re.search("^- checked against eager", text, re.M)


def test_a_fault_of_the_device_fails_the_rows_of_its_case(monkeypatch):
    """A kernel's error shows at the next synchronization, in whichever variant that is."""

    def lost(*_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(measure, "interleaved", lost)
    rows = rows_of(TINY, "eager", "ckptkern full")
    assert statuses(rows) == dict.fromkeys(("eager", "ckptkern full"), "failed")
    assert {row.note for row in rows.values()} == {"RuntimeError: an illegal memory access was encountered"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("headline", [False, True])
def test_cases_have_names_and_the_most_important_come_first(device, headline):
    names, priorities = zip(*((case.name, case.priority) for case in suite.cases_of(device, headline)), strict=True)
    assert len(set(names)) == len(names)
    assert list(priorities) == sorted(priorities)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_first_figures_have_every_op(device):
    """By the op that is called; two cases have other names than their ops."""
    named = {"attention": "attention_block", "gpt_layer": "transformer_layer", "llama_layer": "transformer_layer"}
    names = [re.split("[-/]", case.name)[0] for case in suite.cases_of(device, headline=True)]
    assert {named.get(name, name) for name in names} == micro.OPS.keys()


def test_two_compilers_follow_the_first_figures_and_the_others_come_last():
    chosen = [dataclasses.replace(TINY, priority=0), dataclasses.replace(TINY, name="later", priority=9)]
    jobs = run.jobs_of(chosen, cases.COMPILED, {("later", "compile")})
    assert [(case.name, list(makers)) for case, makers in jobs] == [
        ("tiny/d16x24", [*VARIANTS]),
        ("tiny/d16x24", ["eager", *cases.FIRST_COMPILED]),
        ("later", [*VARIANTS]),
        ("tiny/d16x24", ["eager", "compile + checkpoint", "compile, budget 0.5"]),
        ("later", ["eager", "compile + checkpoint", "compile, budget 0.5", "compile, budget 0"]),
    ]


def test_a_resumed_run_measures_what_is_missing(bench, tmp_path):
    """Rows that stand are neither measured nor changed; what failed, and what is only checked, is measured again."""
    before = bench(case=TINY).rows
    assert bench("--resume").rows == before
    results, env = tmp_path / "out" / "results.csv", tmp_path / "out" / "env.json"
    text = results.read_text()
    for variant, verdict in (("ckptkern full", "failed"), ("torch checkpoint", "checked")):
        text = re.sub(rf"(,{variant},.*),ok,", rf"\1,{verdict},", text)
    results.write_text(text)
    status, after, printed = bench("--resume")
    assert status == 0
    assert statuses(after) == statuses(before)
    measured = {variant for variant in before if before[variant]["ms"] != after[variant]["ms"]}
    assert measured <= {"ckptkern full", "torch checkpoint"}
    assert "ckptkern full" in printed
    assert "ckptkern none" not in printed
    results.unlink()
    assert bench("--resume", "--budget-minutes=0").status == run.UNFINISHED
    env.write_text(re.sub('"triton": .*', '"triton": "3.1",', env.read_text()))
    status, _, printed = bench("--resume")
    assert status == 2
    assert "'triton': '3.1'" in printed


def test_a_row_and_the_report_are_on_the_disk_before_the_run_ends(bench, tmp_path):
    """A variant's as soon as it is checked; the report after the case, also where the next one ends the process."""

    def ends(model, x):
        written.append((tmp_path / "out" / "results.csv").read_text())
        raise KeyboardInterrupt

    written = []
    assert bench(case=with_variants(baseline=ends)).status == 1
    ran = ["eager", "torch checkpoint", *(f"ckptkern {mode}" for mode in cases.MODES)]
    assert re.findall(r"^[^,]*,([^,]*),.*checked", written[0], re.M) == ran
    assert (tmp_path / "out" / "report.md").exists()


def test_a_variant_that_comes_too_late_is_dropped_and_the_others_are_timed():
    rows = rows_of(TINY, *VARIANTS, deadline=0.0)
    assert statuses(rows) == dict.fromkeys(VARIANTS, "dropped") | {"eager": "ok"}
    assert rows["eager"].ms > 0


def test_list_names_all_cases_and_variants(bench):
    status, _, listed = bench("--list", "--compile")
    assert status == 0
    variants = (
        "ckptkern selective", "compile, budget 0.5", "liger-kernel SwiGLU", "QuACK mlp_func", "flash-attn",
        "torch checkpoint, SDPA saved", "SDPA flash",
    )  # fmt: skip
    names = [case.name for case in suite.cases_of("cpu")]
    assert [name for name in (*variants, *names) if name not in listed] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--cases=no such", "mlp-gelu/d128x1024"),
        ("--cases=(", "ckptkern bench: "),
        ("--rounds=0", "--rounds: wanted at least 1 but got 0"),
    ],
)
def test_arguments_that_match_nothing_say_so(bench, arguments, message):
    status, _, printed = bench(arguments)
    assert status == 2
    assert message in printed


def test_patterns_choose_cases():
    selected = run.select("--cases", "^linear_act-relu/d2,^dropout", suite.cases_of("cpu"))
    assert [case.name for case in selected] == ["linear_act-relu/d256x1024", "dropout/d256x1024"]


@pytest.mark.parametrize("title", [row.title for row in suite.ROWS])
def test_ours_are_right_in_every_case(title):
    """Checks only correctness of the real cases, at a size that takes no time."""
    case = small(title)
    model, x, dy = cases.build(case, CPU)
    checker = measure.Checker(model, x, dy)
    for mode in case.modes:
        assert checker.ratio(case.ours(model, mode))[0] <= 2


def test_a_checkpoint_that_saves_sdpas_results_saves_what_selective_does():
    rows = rows_of(small("gpt_layer"), "ckptkern selective", "torch checkpoint, SDPA saved")
    assert {(row.status, row.saved_bytes) for row in rows.values()} == {("ok", 2 * 200 * 4 * 32 + 200 * 4 * 2)}


def test_dropout_of_attention_is_off_where_a_variant_is_checked_and_on_where_it_is_timed():
    seen = []

    def watched(model, x):
        def function(x):
            seen.append(model.training)
            return model(x)

        return function

    rows = rows_of(small("attention-dropout"), "ckptkern selective", watched=watched)
    assert {(row.status, row.note) for row in rows.values()} == {("ok", measure.DROPS)}
    assert seen == [False, *[True] * (len(seen) - 1)]
    assert any(seen)
    assert rows_of(small("attention"), "ckptkern selective")["ckptkern selective"].note == ""


def test_flash_alone_is_missing_without_a_gpu():
    (row,) = rows_of(small("attention"), "SDPA flash").values()
    assert (row.status, row.note) == ("missing", "ImportError: SDPA has several fused backends on CUDA only")


def test_rounds_are_interleaved_and_end_after_enough():
    def clock(step, index):
        step(index)
        return lambda: 1.0

    calls = []
    steps = {name: lambda index, name=name: calls.append((index, name)) for name in "ab"}
    assert measure.interleaved(steps, clock, 3) == ({"a": [1.0] * 3, "b": [1.0] * 3}, {})
    assert calls == [(index, name) for index in range(3) for name in "ab"]
    times, _ = measure.interleaved(steps, clock, 100, seconds=0.0)
    assert len(times["a"]) == measure.ENOUGH


def test_the_commit_is_git_s_or_the_environment_s_or_loudly_unknown(monkeypatch, capsys):
    monkeypatch.setenv("CKPTKERN_COMMIT", "abc")
    assert run.commit() == "abc"
    monkeypatch.delenv("CKPTKERN_COMMIT")
    monkeypatch.setattr(env, "answer", lambda *_: None)
    assert run.commit() == "unknown"
    assert "WARNING: git finds no commit of this tree" in capsys.readouterr().err


def test_a_folder_without_figures_has_three_files_also_after_an_interrupt(bench, monkeypatch, tmp_path):
    """The rows before it stay."""
    rows = bench("--no-figures", case=TINY).rows
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.csv", "env.json", "report.md"}
    sheet = run.Sheet(tmp_path / "out" / "results.csv", [*rows.values()])

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(csv.DictWriter, "writerows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sheet(measure.Row("other", "eager", "cpu", "float32"))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.csv", "env.json", "report.md"}
    with open(tmp_path / "out" / "results.csv", newline="") as file:
        assert [*csv.DictReader(file)] == [*rows.values()]


def test_a_page_is_written_and_a_stale_one_is_noticed(bench, tmp_path, capsys):
    def said(*more):
        return report.main(["--page", str(page), "--results", str(tmp_path), *more])

    page, results = tmp_path / "figures.md", tmp_path / "out" / "results.csv"
    bench(case=TINY)
    page.write_text(f"# before\n{report.BEGIN}\n{report.END}\nafter\n")
    assert said("--check") == 1
    assert "not current" in capsys.readouterr().out
    assert said() == said("--check") == 0
    rows = r"(?s:.*)\n\| tiny/d16x24 \| \d+\.\d\d \|(?s:.*)\n"
    assert re.fullmatch(rf"# before\n{report.BEGIN}{rows}{report.END}\nafter\n", page.read_text())
    results.write_text(results.read_text().replace("tiny", "other"))
    assert said("--check") == 1
    page.write_text("no markers")
    with pytest.raises(SystemExit):
        said()


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_runs_on_the_gpu(bench):
    status, rows, _ = bench("--device=auto", "--rounds=3", "--no-compile", case=TINY)
    assert status == 0
    assert {"copy 1 GiB", "bf16 matmul 8192"} <= set(rows)
    assert rows["ckptkern full"]["status"] == "ok"
    assert float(rows["ckptkern full"]["graph_ms"]) > 0


def test_report_without_matplotlib_says_how_to_get_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(report, "report", lambda folder: "text")
    report.write_all(tmp_path)
    assert capsys.readouterr().err == "no figures: matplotlib is not installed: pip install matplotlib\n"
    assert (tmp_path / "report.md").read_text() == "text"


HANGS = """
import time
from ckptkern.benchmarks import measure
with measure.watched([measure.Row("mlp", "ours", "cuda", "")], lambda row: print(row.variant, row.status, row.note), 0.5):
    time.sleep(600)
"""


def test_what_does_not_end_ends_its_process():
    done = subprocess.run([sys.executable, "-uc", HANGS], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (
        measure.LOST_STATUS,
        f"ours failed {measure.LOST}it did not end within 0 s\n",
    )


def test_a_lost_gpu_ends_the_run_and_the_next_leaves_out_what_it_was_lost_to(bench, monkeypatch):
    def lost(case, makers, device, emit, *_):
        emit(measure.Row(case.name, cases.EAGER, "cpu", "", ms=1.0))
        monkeypatch.setattr(torch.cuda, "synchronize", raises_on_cuda)
        measure.raise_if_lost([measure.Row(case.name, "ckptkern none", "cpu", "", "failed", note="illegal")], emit)

    def raises_on_cuda():
        raise RuntimeError("CUDA error")

    with monkeypatch.context() as patch:
        patch.setattr(measure, "measure", lost)
        status, rows, printed = bench(case=TINY)
    assert status == measure.LOST_STATUS
    assert rows["ckptkern none"]["note"] == f"{measure.LOST}illegal"
    assert "--resume goes on in another process" in printed
    status, after, _ = bench("--resume")
    assert status == 0
    assert after["ckptkern none"] == rows["ckptkern none"]
    assert statuses(after) == dict.fromkeys(VARIANTS, "ok") | {"ckptkern none": "failed"}


def test_rows_of_other_cases_stay_in_a_resumed_run(bench, monkeypatch, tmp_path):
    """Also what failed there. Each row has the commit that it was measured at."""
    monkeypatch.setenv("CKPTKERN_COMMIT", "before")
    wrong = with_variants(ours=lambda model, x: lambda x: model(x) * 2)
    bench(case=dataclasses.replace(wrong, name="other/d16x24", baselines={"ckptkern wrong": wrong.baselines["ours"]}))
    monkeypatch.setenv("CKPTKERN_COMMIT", "after")
    bench("--resume", case=TINY)
    with open(tmp_path / "out" / "results.csv", newline="") as file:
        rows = {(row["case"], row["variant"]): (row["status"], row["commit"]) for row in csv.DictReader(file)}
    assert rows["other/d16x24", "ckptkern wrong"] == ("wrong", "before")
    assert rows["tiny/d16x24", cases.EAGER] == ("ok", "after")


@pytest.mark.parametrize(("nbytes", "cache"), [(10, 0), (10, 5), (10, 10), (10, 95), (3 * 2**20, 50 * 2**20)])
def test_operands_by_turns_fill_the_cache(nbytes, cache):
    """Between two turns of one the others go through the cache. None is there for nothing."""
    others = measure.copies(nbytes, cache) - 1
    assert (others - 1) * nbytes < cache <= others * nbytes
    assert measure.copies(1, 2**40) == measure.copies(0, 2**40) == measure.MOST_COPIES


@pytest.mark.gpu
def test_a_captured_step_on_a_gpu():
    """It runs three times before the capture, and then only where it is replayed."""
    x = torch.zeros(4, device="cuda")
    replay = measure.captured(lambda: x.add_(1))
    assert x.tolist() == [3.0] * 4
    replay()
    replay()
    assert x.tolist() == [5.0] * 4
