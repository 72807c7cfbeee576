"""ckptkern.report: its bytes are those that a forward saves, and its text, table and picture show them."""

import copy
import csv
import itertools

import pytest
import torch
from support.architectures import ids
from support.planned import CASES, counted, model_of
from torch import nn

import ckptkern
from ckptkern import memory
from ckptkern.planning.segments import EAGER, Strategy, segments_of

MODES = ("none", "selective", "full")


@pytest.fixture(scope="module")
def llama():
    """Its gradients are there when a step begins."""
    model = model_of("llama")
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return ckptkern.report(model, ids())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("decoder", "encoder", "ours") else pytest.mark.long)
        for name in CASES
        if name != "convolutions"  # test_activation_checkpoints
    ],
)
def test_bytes_are_those_of_a_forward_of_each_mode(name):
    torch.manual_seed(0)
    model, inputs = CASES[name]()
    ours = bool(segments_of(model))
    report = ckptkern.report(model, *inputs)
    assert bool(segments_of(model)) == ours
    assert ours or report.totals[EAGER] == counted(model, *inputs)
    for mode in MODES:
        other = copy.deepcopy(model)
        if not ours:
            ckptkern.convert(other, *inputs)
        for segment in segments_of(other):
            segment.set(Strategy(mode))
        assert report.totals[mode] == counted(other, *inputs), mode


def test_a_converted_model_is_as_before():
    model = model_of("llama")
    ckptkern.convert(model, ids(), recompute="full")
    model.layers[1].forward.recompute = ("selective", "none")
    before = [m.__dict__.get("forward") for m in model.modules()]
    ckptkern.report(model, ids())
    assert before == [m.__dict__.get("forward") for m in model.modules()]
    assert [segment.strategy.mode for segment in segments_of(model)] == ["full", ("selective", "none")]


def test_statistics_of_batches_are_as_before():
    """torch writes them without counting a version."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    before = copy.deepcopy(model.state_dict())
    ckptkern.report(model, torch.randn(5, 8))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_gradients_that_are_accumulated_in_place():
    """Their `main_grad` is no tensor: it stands for `.grad`."""
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), torch.randn(4, 8)
    report = ckptkern.report(model, x)
    ckptkern.accumulate_in_place(model)
    assert ckptkern.report(model, x).totals == report.totals
    assert all(p.main_grad == "grad" and p.grad is None for p in model.parameters())


def test_activation_checkpoints():
    block = [nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.GELU(), nn.Conv1d(8, 4, 1)) for _ in range(2)]
    model, x = nn.Sequential(nn.Conv1d(4, 4, 1), *block), torch.randn(2, 4, 6)
    report = ckptkern.report(model, x)
    assert {line.replaced_by for line in report.lines} == {"checkpoint"}
    by_mode = {line.mode: line.saved for line in report.lines if line.name == "1"}
    assert by_mode.pop(EAGER) == by_mode["none"]
    # its input; what each convolution and the GELU read
    assert by_mode == {"none": 4 * 2 * 6 * (4 + 8 + 8), "full": 4 * 2 * 6 * 4}
    assert report.totals["none"] == report.totals[EAGER] == counted(model, x)


def test_csv_and_text(llama, tmp_path):
    llama.csv(tmp_path / "report.csv")
    rows = list(csv.DictReader((tmp_path / "report.csv").open()))
    assert [(row["name"], row["mode"]) for row in rows] == [
        (f"layers.{i}", mode) for i in range(2) for mode in (EAGER, *MODES)
    ]
    assert [int(row["saved"]) for row in rows] == [line.saved for line in llama.lines]
    text = str(llama)
    assert "layers.* (2)  transformer_layer  eager PyTorch" in text
    assert all(memory.format_size(saved) in text for saved in llama.totals.values())


def test_memory_over_a_step(llama, tmp_path):
    """It rises in forward to more than what is saved, and in backward falls to nothing."""
    assert list(llama.timelines) == list(llama.totals)
    for mode, timeline in llama.timelines.items():
        moments = zip(timeline.milliseconds, timeline.bytes, strict=True)
        at_backward = [n for t, n in moments if t <= timeline.marks["backward"]][-1]
        assert timeline.peak >= at_backward >= llama.totals[mode] - ids().nbytes, mode
        assert timeline.bytes[-1] <= 64, "scalars"
        assert all(a <= b for a, b in itertools.pairwise(timeline.milliseconds))
    assert llama.timelines[EAGER].peak > llama.timelines["full"].peak * 0.5
    llama.figure(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_on_the_meta_device():
    layers = nn.Sequential(*(ckptkern.nn.MLP(8, 32, device="meta") for _ in range(2)))
    report = ckptkern.report(layers, torch.empty(3, 8, device="meta", requires_grad=True))
    assert list(report.totals) == list(MODES), "there is no original forward"
    assert report.totals["full"] == 2 * 3 * 8 * 4
    assert {line.seconds for line in report.lines} == {None}
    assert all(line.flops > 0 for line in report.lines)
    assert "ms" not in str(report)
    assert report.timelines["full"].peak == sum(tensor.bytes for tensor in report.standing["full"]) > 2 * 3 * 8 * 4
