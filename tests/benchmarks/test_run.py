"""``python -m ckptkern bench`` end to end on tiny cases: every variant gets its row, whatever the others do."""

import argparse
import csv
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptkern
from ckptkern import __main__
from ckptkern.benchmarks import cases, forecast, measure, models, report, run

TINY = cases.Case(
    "tiny",
    lambda width: models.MLP(width, nn.GELU()),
    lambda model, mode: (
        lambda x: ckptkern.mlp(
            x, model.fc1.weight, model.fc1.bias, model.fc2.weight, model.fc2.bias, "gelu", recompute=mode
        )
    ),
    {"cpu": [cases.Size(16, 24)], "cuda": [cases.Size(16, 24)]},
    priority=1,
)


def with_variants(**baselines) -> cases.Case:
    return cases.Case(TINY.name, TINY.model, TINY.ours, TINY.sizes, TINY.priority, baselines=baselines)


def bench(monkeypatch, out: Path, *arguments: str, case: cases.Case = TINY) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit status, and the rows by variant."""
    monkeypatch.setattr(cases, "CASES", [case])
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    status = run.main(parser.parse_args(["--device", "cpu", "--rounds", "2", "--out", str(out), *arguments]))
    with open(out / "results.csv", newline="") as file:
        return status, {row["variant"]: row for row in csv.DictReader(file)}


def test_writes_rows_for_every_variant_environment_and_report(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    status, rows = bench(monkeypatch, tmp_path / "new")
    assert status == 0
    assert list(rows) == list(cases.variants(TINY))
    assert {"eager", "torch checkpoint", "ckptkern none", "ckptkern selective", "ckptkern full"} <= set(rows)
    for row in rows.values():
        assert row["status"] == "ok", row
        assert (row["case"], row["rounds"], row["dtype"]) == ("tiny/d16x24", "2", "float32")
        assert 0 < float(row["p20_ms"]) <= float(row["ms"]) <= float(row["p80_ms"])
        assert float(row["ratio"]) == pytest.approx(float(row["ms"]) / float(rows["eager"]["ms"]), rel=1e-3)
        assert float(row["error_ratio"]) <= 2
        assert int(row["peak_bytes"]) > 0
    token = 4 * 16  # bytes of x; z and h are four times as wide
    assert int(rows["ckptkern full"]["saved_bytes"]) == 24 * token
    assert int(rows["ckptkern selective"]["saved_bytes"]) == 24 * 5 * token
    assert int(rows["ckptkern none"]["saved_bytes"]) == int(rows["eager"]["saved_bytes"]) == 24 * 9 * token
    assert int(rows["torch checkpoint"]["saved_bytes"]) == 24 * token

    env = json.loads((tmp_path / "new" / "env.json").read_text())
    assert env["versions"]["torch"] == torch.__version__
    assert {"date", "commit", "device", "settings", "sdpa"} <= set(env)
    private = Path.home(), Path(run.__file__).parents[1]
    assert [path for path in private if str(path) in json.dumps(env)] == []
    text = (tmp_path / "new" / "report.md").read_text()
    assert "## tiny/d16x24, float32" in text
    assert re.search(r"\| ckptkern full \| \d+\.\d\d \| \d+\.\d\d \| \d+% \| 1\.5 KiB \|", text)
    (figure,) = (tmp_path / "new" / "figures").iterdir()
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_a_wide_spread_and_a_busy_machine_are_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(run.env, "load_warning", lambda threads: "Others run here.")
    bench(monkeypatch, tmp_path)
    assert "Others run here." in capsys.readouterr().err
    path = tmp_path / "results.csv"
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    for row, p80 in zip(rows, (12, 13, *[10] * (len(rows) - 2)), strict=True):
        row.update(ms="10", p20_ms="10", p80_ms=str(p80))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, measure.FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    text = report.report(tmp_path)
    assert "**Others run here.**" in text
    assert f"- spread above 25%, so measure again on a quiet machine: {rows[1]['variant']}\n" in text
    assert "| eager | 1.00 | 1.00 | 20% |" in text


def test_what_a_case_needs_is_said_and_what_does_not_fit_is_not_run(monkeypatch, tmp_path, capsys):
    bench(monkeypatch, tmp_path)
    printed = capsys.readouterr().err
    assert f"cases: 1, variants: {len(cases.variants(TINY))}; about 1 s, the budget is 4 minutes" in printed
    assert re.search(r"  eager +ok +\S+ ms \(\S+ to \S+\), 1.00 of eager", printed)
    for needed, reason in (
        (
            forecast.Forecast(2**60, 0.0, 0.0),
            "tiny/d16x24 needs at least 1073741824 GiB, its float64 reference included",
        ),
        (
            forecast.Forecast(0, 60.0, 600.0),
            "tiny/d16x24 needs about 10 minutes here, 60 s for a step of eager, and 4 minutes of",
        ),
    ):
        monkeypatch.setattr(forecast, "forecast", lambda *args, needed=needed: needed)
        _, rows = bench(monkeypatch, tmp_path)
        assert [row["status"] for row in rows.values()] == ["dropped"]
        assert reason in rows[""]["note"]
        assert reason in (tmp_path / "report.md").read_text()
        assert "dropped, for the reasons in report.md: tiny/d16x24" in capsys.readouterr().err


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


def test_a_variant_that_is_wrong_or_fails_is_not_timed_and_the_rest_goes_on(monkeypatch, tmp_path, capsys):
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
    status, rows = bench(monkeypatch, tmp_path, case=with_variants(**{name: one[0] for name, one in expected.items()}))
    assert status == 0, "a baseline's error is not ours"
    for variant, (_, verdict, note) in expected.items():
        assert rows[variant]["status"] == verdict
        assert note in rows[variant]["note"]
        assert rows[variant]["ms"] == rows[variant]["ratio"] == ""
        assert verdict != "wrong" or float(rows[variant]["error_ratio"]) > measure.BASELINES_AT_MOST
    assert rows["ckptkern full"]["status"] == "ok"
    text = (tmp_path / "report.md").read_text()
    assert "output: wrong" in text
    assert "- baseline: missing: ModuleNotFoundError" in text

    ours = {
        "ckptkern mine": lambda model, x: lambda x: model(x) * (1.0 if deterministic() else 1.001),
        "ckptkern forgetful": lambda model, x: lambda x: model(Partial.apply(x)),
    }
    status, rows = bench(monkeypatch, tmp_path, case=with_variants(**ours))
    assert status == 1
    assert {rows[variant]["status"] for variant in ours} == {"wrong"}
    assert rows["ckptkern forgetful"]["error_ratio"] == "inf"
    assert "NOT RIGHT: tiny/d16x24 ckptkern mine: wrong" in capsys.readouterr().err
    assert not deterministic()


def test_ours_may_err_twice_as_much_as_eager_and_baselines_eight_times(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "error_ratio", lambda *_: (3.0, "x"))
    _, rows = bench(monkeypatch, tmp_path)
    assert {variant: row["status"] for variant, row in rows.items()} == {
        variant: "wrong" if "ckptkern" in variant else "ok" for variant in rows
    }


def test_what_torch_compiles_is_measured_after_everything_else_and_eager_once(monkeypatch, tmp_path):
    monkeypatch.setattr(cases, "COMPILED", {"compile": lambda model, x: model})
    status, rows = bench(monkeypatch, tmp_path, "--compile")
    assert status == 0
    assert list(rows) == [*cases.variants(TINY), "compile"]
    assert {row["status"] for row in rows.values()} == {"ok"}
    with open(tmp_path / "results.csv") as file:
        assert len(file.readlines()) == 1 + len(rows)


def test_a_fault_of_the_device_fails_the_rows_of_its_case(monkeypatch):
    """A kernel's error shows at the next synchronization, in whichever variant that is."""

    def lost(*_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(measure, "interleaved", lost)
    rows = rows_of(cases.Item(TINY, cases.Size(16, 24), 0), "eager", "ckptkern full")
    assert {variant: (row.status, row.note) for variant, row in rows.items()} == dict.fromkeys(
        ("eager", "ckptkern full"), ("failed", "RuntimeError: an illegal memory access was encountered")
    )


def test_over_budget_the_least_important_are_dropped_and_named(monkeypatch, tmp_path, capsys):
    _, rows = bench(monkeypatch, tmp_path, "--budget-minutes", "0")
    assert [row["status"] for row in rows.values()] == ["dropped"]
    assert "tiny/d16x24" in capsys.readouterr().err
    for device in ("cpu", "cuda"):
        priorities = [item.priority for item in cases.items(device)]
        assert priorities == sorted(priorities)


def test_the_first_figures_are_the_headline_cases():
    """Layers, MLPs, the head and experts, each at d = 1024 and 4096, and nothing else, before every other case."""
    names = [item.name for item in cases.items("cuda") if item.priority <= cases.HEADLINE]
    kinds = {"gpt_layer", "llama_layer", "mlp-gelu", "gated_mlp-silu", "moe_mlp-silu", "linear_cross_entropy"}
    assert {tuple(name.partition("x")[0].split("/")) for name in names} == {
        (k, d) for k in kinds for d in ("d1024", "d4096")
    }
    assert [item.name for item in run.select("", "cuda")][: len(names)] == names


def test_a_resumed_run_measures_what_is_missing(monkeypatch, tmp_path, capsys):
    """Rows that stand are neither measured nor changed; what failed, and what is only checked, is measured again."""
    _, before = bench(monkeypatch, tmp_path)
    text = (tmp_path / "results.csv").read_text()
    assert bench(monkeypatch, tmp_path, "--resume") == (0, before)
    lines = text.splitlines(keepends=True)
    again = {"ckptkern full": ",ok,", "torch checkpoint": ",ok,"}
    changed = [
        line.replace(",ok,", ",failed,") if ",ckptkern full," in line else line.replace(",ok,", ",checked,")
        if ",torch checkpoint," in line else line for line in lines
    ]  # fmt: skip
    (tmp_path / "results.csv").write_text("".join(changed))
    capsys.readouterr()
    status, after = bench(monkeypatch, tmp_path, "--resume")
    assert status == 0
    assert {row["status"] for row in after.values()} == {"ok"}
    assert {variant for variant in before if before[variant]["ms"] != after[variant]["ms"]} <= again.keys()
    assert "ckptkern none" not in capsys.readouterr().err
    env = json.loads((tmp_path / "env.json").read_text())
    env["versions"]["triton"] = "3.1"
    (tmp_path / "env.json").write_text(json.dumps(env))
    assert bench(monkeypatch, tmp_path, "--resume")[0] == 2
    assert "'triton': '3.1'" in capsys.readouterr().err


def test_a_row_and_the_report_are_on_the_disk_before_the_run_ends(monkeypatch, tmp_path):
    """A variant's as soon as it is checked; the report after the case, also where the next one ends the process."""

    def ends(model, x):
        with open(tmp_path / "results.csv", newline="") as file:
            statuses.update({row["variant"]: row["status"] for row in csv.DictReader(file)})
        raise KeyboardInterrupt

    statuses = {}
    status, _ = bench(monkeypatch, tmp_path, case=with_variants(baseline=ends))
    assert status == 1
    assert statuses == dict.fromkeys(
        ("eager", "torch checkpoint", *(f"ckptkern {one}" for one in cases.MODES)), "checked"
    )
    assert (tmp_path / "report.md").exists()


def test_a_variant_that_comes_too_late_is_dropped_and_the_others_are_timed(monkeypatch):
    item = cases.Item(TINY, cases.Size(16, 24), 0)
    rows: dict[str, measure.Row] = {}
    measure.measure(
        item, cases.variants(TINY), torch.device("cpu"), lambda row: rows.update({row.variant: row}), 1, deadline=0.0
    )
    assert {variant: row.status for variant, row in rows.items()} == {
        variant: "ok" if variant == "eager" else "dropped" for variant in cases.variants(TINY)
    }
    assert rows["eager"].ms > 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_list_names_all_cases_and_variants(capsys, device):
    if device == "cpu":
        assert __main__.main(["bench", "--list", "--device", "cpu", "--compile"]) == 0
        listed = capsys.readouterr().out
        for item in cases.items(device):
            assert item.name in listed
        variants = ("ckptkern selective", "compile, budget 0.5", "liger-kernel SwiGLU", "QuACK mlp_func", "flash-attn")
        for variant in (*variants, "torch checkpoint, SDPA saved", "SDPA flash"):
            assert variant in listed
    names = [item.name for item in cases.items(device)]
    assert len(set(names)) == len(names)
    for op in (
        "mlp-gelu", "mlp-relu", "gated_mlp", "linear_stack", "linear_act", "dropout", "host", "attention/",
        "attention-dropout", "attention-gqa/", "attention-gqa-dropout", "gpt_layer", "llama_layer",
    ):  # fmt: skip
        assert any(name.startswith(op) for name in names)


def test_arguments_that_match_nothing_say_so(capsys):
    assert __main__.main(["bench", "--cases", "no such", "--device", "cpu"]) == 2
    assert "mlp-gelu/d128x1024" in capsys.readouterr().err
    assert __main__.main(["bench", "--cases", "(", "--device", "cpu"]) == 2
    assert [item.case.name for item in run.select("^host/,^dropout", "cpu")] == ["host", "dropout"]
    assert __main__.main(["bench", "--rounds", "0", "--device", "cpu"]) == 2
    assert "--rounds: wanted at least 1 but got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "item", list({item.case.name: item for item in cases.items("cpu")}.values()), ids=lambda item: item.case.name
)
def test_ours_are_right_in_every_case(item):
    """Checks only correctness of the real cases, at a size that takes no time."""
    small = item._replace(size=cases.Size(32, 200, 50 if item.size.length else None))
    model, x, dy = cases.build(small, torch.device("cpu"))
    checker = measure.Checker(small, model, x, dy)
    for mode in item.case.modes:
        assert checker.ratio(item.case.ours(model, mode))[0] <= 2


def only(name: str) -> cases.Item:
    """The case of this name at a size that takes no time: width 32, 2 heads of 16, 4 sequences of 50."""
    case = next(case for case in cases.CASES if case.name == name)
    return cases.Item(case, cases.Size(32, 200, 50), 0)


def rows_of(item: cases.Item, *variants: str, **more) -> dict[str, measure.Row]:
    makers = {variant: make for variant, make in cases.variants(item.case).items() if variant in variants} | more
    rows: dict[str, measure.Row] = {}
    measure.measure(item, makers, torch.device("cpu"), lambda row: rows.update({row.variant: row}), rounds=1)
    return rows


@pytest.mark.parametrize(
    ("name", "none", "extra"),
    [
        # per token at "none": q, k, v and o, each 32 wide unless two query heads share k and v; 2 logsumexps
        ("attention", 4 * 32 + 2, 0),
        ("attention-dropout", 4 * 32 + 2, 16),
        ("attention-gqa", 2 * 32 + 2 * 16 + 2, 0),
        ("gpt_layer", 4 * 32 + 2 + 32 + 2 * 128, 0),  # the second half's x, z and h of the MLP
        ("llama_layer", 2 * 32 + 2 * 16 + 2 + 32 + 3 * 88, 0),
    ],
)
def test_attention_cases_save_what_the_documentation_says(name, none, extra):
    """Saved: x, o and the logsumexp at "selective", as by the checkpoint that saves SDPA's results; x at "full"."""
    modes = ("ckptkern none", "ckptkern selective", "ckptkern full")
    selective = "torch checkpoint, SDPA saved"
    rows = rows_of(only(name), *modes, selective)
    assert {variant: row.status for variant, row in rows.items()} == dict.fromkeys([*modes, selective], "ok")
    x = 200 * 4 * 32
    assert rows["ckptkern none"].saved_bytes == x + 200 * 4 * none + extra
    assert rows["ckptkern selective"].saved_bytes == x + 200 * 4 * (32 + 2) + extra
    assert rows["ckptkern full"].saved_bytes == x + extra
    if not extra:  # on a CPU torch's attention with dropout is not a single op
        assert rows[selective].saved_bytes == rows["ckptkern selective"].saved_bytes


def test_dropout_of_attention_is_off_where_a_variant_is_checked_and_on_where_it_is_timed():
    seen = []

    def watched(model, x):
        def function(x):
            seen.append(model.training)
            return model(x)

        return function

    rows = rows_of(only("attention-dropout"), "ckptkern selective", watched=watched)
    assert {row.status for row in rows.values()} == {"ok"}
    assert {row.note for row in rows.values()} == {measure.DROPS}
    checked = seen.index(True)
    assert checked == 1
    assert all(seen[checked:])
    rows = rows_of(only("attention"), "ckptkern selective")
    assert rows["ckptkern selective"].note == ""


def test_flash_alone_is_missing_without_a_gpu():
    (row,) = rows_of(only("attention"), "SDPA flash").values()
    assert (row.status, row.note) == ("missing", "ImportError: SDPA has several fused backends on CUDA only")


def test_attention_in_float64_is_sdpas():
    q, k, v = (torch.randn(2, heads, 7, 4, dtype=torch.float64) for heads in (4, 2, 2))
    expected = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(models.attend(q, k, v), expected)


def test_dropout_that_keeps_too_much_is_wrong():
    (item,) = (item for item in cases.items("cpu") if item.case.name == "dropout")
    model, x, dy = cases.build(item, torch.device("cpu"))
    checker = measure.Checker(item, model, x, dy)
    with pytest.raises(ValueError, match="keeps"):
        checker.ratio(lambda x: nn.functional.dropout(x, 0.1) * (0.9 / 0.875))


def test_rounds_are_interleaved_and_end_after_enough():
    calls = []
    steps = {name: lambda index, name=name: calls.append((index, name)) for name in "ab"}
    times, errors = measure.interleaved(steps, _one, 3)
    assert calls == [(0, "a"), (0, "b"), (1, "a"), (1, "b"), (2, "a"), (2, "b")]
    assert times == {"a": [1.0] * 3, "b": [1.0] * 3}
    assert errors == {}
    times, _ = measure.interleaved(steps, _one, 100, seconds=0.0)
    assert len(times["a"]) == measure.ENOUGH


def _one(step, index):
    step(index)
    return lambda: 1.0


def test_a_page_is_written_and_a_stale_one_is_noticed(monkeypatch, tmp_path, capsys):
    results, page = tmp_path / "results", tmp_path / "figures.md"
    bench(monkeypatch, results / "cpu")
    page.write_text(f"# before\n{report.BEGIN}\n{report.END}\nafter\n")
    arguments = ["--page", str(page), "--results", str(results)]
    assert report.main([*arguments, "--check"]) == 1
    assert "not current" in capsys.readouterr().out
    assert report.main(arguments) == 0
    text = page.read_text()
    assert text.startswith(f"# before\n{report.BEGIN}\n")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "| tiny/d16x24 | 1.00 · 13.5 KiB |" in text
    assert report.main([*arguments, "--check"]) == 0
    csv_text = (results / "cpu" / "results.csv").read_text()
    (results / "cpu" / "results.csv").write_text(csv_text.replace("tiny", "other"))
    assert report.main([*arguments, "--check"]) == 1
    page.write_text("no markers")
    with pytest.raises(SystemExit):
        report.main(arguments)


@pytest.mark.gpu
def test_runs_on_the_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(cases, "CASES", [TINY])
    assert __main__.main(["bench", "--out", str(tmp_path), "--rounds", "3", "--no-compile"]) == 0
    with open(tmp_path / "results.csv", newline="") as file:
        rows = {row["variant"]: row for row in csv.DictReader(file)}
    assert {"copy 1 GiB", "bf16 matmul 8192"} <= set(rows)
    assert rows["ckptkern full"]["status"] == "ok"
    assert float(rows["ckptkern full"]["graph_ms"]) > 0


def test_trade_writes_its_table_and_figure(tmp_path):
    """The figure of docs/concepts/segments.md: more regions save less, until their inputs outweigh the rest."""
    from benchmarks.dev import trade

    assert (
        trade.main(["--out", str(tmp_path), "--device", "cpu", "--width", "16", "--rows", "64", "--rounds", "1"]) == 0
    )
    with (tmp_path / "segments.csv").open() as file:
        saved = {row["segments"]: int(row["saved_bytes"]) for row in csv.DictReader(file)}
    assert saved["eager"] > saved["2"] > saved["4"] > saved["8"] > saved["every 1"] == trade.LAYERS * 64 * 16 * 4
    assert (tmp_path / "segments.png").stat().st_size > 5000


def test_trade_names_the_strategy_that_failed(monkeypatch):
    from benchmarks.dev import trade

    def clock(step, index):
        raise MemoryError("no room")

    monkeypatch.setattr(trade.measure, "cpu_clock", clock)
    with pytest.raises(RuntimeError, match="eager: MemoryError: no room; 2: "):
        trade.run(torch.device("cpu"), 16, 64, 1)


def test_report_without_matplotlib_says_how_to_get_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(report, "report", lambda folder: "text")
    report.write_all(tmp_path)
    assert capsys.readouterr().err == "no figures: matplotlib is not installed: pip install matplotlib\n"
    assert (tmp_path / "report.md").read_text() == "text"
