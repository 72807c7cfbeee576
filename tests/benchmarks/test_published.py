"""Figures that others published, and those of whole models, in results.csv and report.md."""

import dataclasses
import re

import pytest
import torch

from ckptkern.benchmarks import cases, measure, micro, published, report, run

CPU = torch.device("cpu")
CASE = micro.case("linear_act", "cpu", features=8, tokens=4)


def test_published_figures_stand_beside_ours(bench, tmp_path):
    """They are rows of the same case, which a resumed run keeps, and which a comparison does not read."""
    figure = cases.Figure("published: Liger, H100", "where#1; setting", 192.0, 2**30)
    case = dataclasses.replace(CASE, figures=[figure])
    results = tmp_path / "out" / "results.csv"
    for arguments in ((), ("--resume",), ("--resume", "--compare", str(results))):
        status, rows, printed = bench(*arguments, case=case)
        assert status == 0
        assert {variant: row["status"] for variant, row in rows.items()} == dict.fromkeys(
            cases.variants(case), "ok"
        ) | {figure.variant: "published"}
        assert (rows[figure.variant]["ms"], rows[figure.variant]["source"]) == ("192", figure.source)
    assert figure.variant not in printed
    text = (tmp_path / "out" / "report.md").read_text()
    assert re.search(r"\| published: Liger, H100 \| – \| – \| – \| – \| 1024 MiB \| – \| where#1; setting \|", text)
    assert re.search(r"\| eager \| 1.00 \|.*\|  \|\n", text)


def test_published_figures_belong_to_sizes():
    """On a GPU those of the case's own size; a CPU has the cases without, at sizes that take no time."""
    figures_of = {case.name: case.figures for case in published.cases_of("cuda")}
    assert all(figures_of.values())
    assert len(figures_of) == len(published.GROUPS)
    figures = {figure.variant: figure for figure in figures_of["linear_cross_entropy-V151936-mean-nobias/d4096x8192"]}
    liger = measure.row_of_figure("case", "cuda", figures["published: Liger, H100"])
    assert (liger.ms, liger.peak_bytes) == (192, round(6.1 * 2**30))
    assert liger.source == "huggingface/trl#7244; forward + backward"
    small = published.cases_of("cpu")
    assert not any(case.figures for case in small)
    assert len({case.name for case in small}) == len(small)


@pytest.mark.parametrize("group", published.GROUPS, ids=lambda group: group.op)
def test_ours_are_right_in_every_published_case(group):
    case = group.case("cpu", tokens=24)
    model, x, dy = cases.build(case, CPU)
    checker = measure.Checker(model, x, dy)
    makers = {name: make for name, make in cases.variants(case).items() if "ckptkern" in name or "tiled" in name}
    for make in makers.values():
        assert checker.ratio(make(model, x))[0] <= 2


def test_a_whole_model_has_tokens_a_second_and_its_longest_sequence(tmp_path):
    (tmp_path / "env.json").write_text("{}")
    sheet = run.Sheet(tmp_path / "results.csv")
    sheet(measure.Row("Llama-1B/4x2048", "eager", "cuda", "bfloat16", "failed", note="OutOfMemoryError: 80 GB"))
    sheet(
        measure.Row(
            "Llama-1B/4x2048",
            "ckptkern full",
            "cuda",
            "bfloat16",
            "ok",
            500.0,
            499.0,
            501.0,
            peak_bytes=2**30,
            tokens=8192,
            longest=65536,
            note="loss 0.1 of eager's error",
        )
    )
    text = report.report(tmp_path)
    assert "| ckptkern full | 0% | 1024 MiB | 500.000 (499.000–501.000) | 16,384 | 65,536 |" in text
    assert "- loss 0.1 of eager's error" in text
    assert "- eager: failed: OutOfMemoryError: 80 GB" in text
