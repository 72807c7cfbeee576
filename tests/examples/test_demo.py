"""``python -m ckptkern demo`` end to end at a tiny size, and what its comparison rests on."""

import copy
import functools
import json
import math
from argparse import Namespace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from benchmarks.dev import demo as page
from ckptkern import __main__
from ckptkern.benchmarks import measure
from ckptkern.memory import Timeline
from examples import demo
from examples.demo import config, data, model, results, training

TINY = (
    "--device=cpu --dtype=fp32 --steps=4 --batch-size=2 --seq-len=64 --vocabulary=300 --text-mib=1 --layers=2 --d-model=16 "
    "--heads=2 --threads=1 --workspace=16KiB"
)


@pytest.fixture(scope="module", autouse=True)
def _read_once():
    """The corpus is a part of the standard library, most of a tiny run's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "load_corpus", functools.cache(demo.load_corpus))
        yield


class Ran(NamedTuple):
    """losses: by variant; printed: without line ends; written: of results.json."""

    status: int
    losses: dict[str, list[float]]
    printed: str
    written: dict


@pytest.fixture
def run(tmp_path, capsys):
    """run(arguments) of the demo, into tmp_path / "out"."""

    def ran(arguments=""):
        capsys.readouterr()
        out = tmp_path / "out"
        status = __main__.main(["demo", *TINY.split(), f"--out={out}", *arguments.split()])
        written = json.loads((out / "results.json").read_text()) if out.exists() else {"losses": {}}
        return Ran(status, written["losses"], "".join(capsys.readouterr()).replace("\n", " "), written)

    return ran


def tiny(**changes):
    settings = dict(
        steps=4,
        batch_size=2,
        seq_len=16,
        vocabulary=256,
        text_mib=1,
        layers=2,
        d_model=16,
        heads=2,
        lr=1e-3,
        device="cpu",
        dtype="fp32",
        dropout=0.0,
        activation="gelu",
        seed=0,
        recompute="full",
        workspace="1MiB",
        experts=0,
        top_k=2,
        variants=[*config.VARIANTS],
        threads=0,
    )
    return Namespace(**(settings | changes))


@pytest.mark.slow
def test_end_to_end(run, tmp_path):
    """At a size at which activations outweigh what is the same in all variants, each peaks below the one before it."""
    status, losses, printed, written = run("--d-model=32 --layers=4 --seq-len=256 --vocabulary=600")
    assert status == 0
    report = (tmp_path / "out" / "report.md").read_text()
    labels = [row["label"] for row in written["table"]]
    assert labels[3:] == ["ckptkern", 'ckptkern, "full", 16KiB']
    for text in ("loss", "saved", "peak", "tokens/s", "ratio", "p20–p80", f"A step of {labels[4]} peaks at", *labels):
        assert text in report
    assert report.replace("\n", " ") in printed

    assert tuple(losses) == tuple(config.VARIANTS)
    for curve in losses.values():
        assert len(curve) == 4
        assert curve[-1] < curve[0] < 1.1 * math.log(600)
        torch.testing.assert_close(curve, losses["eager"], rtol=results.AGREEMENT, atol=0.0)
    assert all(row["limited"] and row["difference"] <= results.AGREEMENT for row in written["table"])
    assert {*written["milliseconds"]} == {*losses}
    assert written["environment"]["versions"]["torch"] == torch.__version__

    eager, checkpointing, chunked, convert, bounded = written["table"]
    assert bounded["peak_bytes"] < chunked["peak_bytes"] < checkpointing["peak_bytes"] < eager["peak_bytes"]
    assert convert["peak_bytes"] < checkpointing["peak_bytes"]
    assert bounded["saved_bytes"] <= 1.02 * chunked["saved_bytes"] < convert["saved_bytes"] < eager["saved_bytes"] / 3
    assert eager["ratio"] == eager["p20_ratio"] == eager["p80_ratio"] == 1.0

    (tmp_path / "index.md").write_text("before\n<!-- demo:begin -->\nold\n<!-- demo:end -->\nafter\n")
    page.refresh(tmp_path / "out", tmp_path)
    assert (tmp_path / "index.md").read_text() == f"before\n<!-- demo:begin -->\n{report}<!-- demo:end -->\nafter\n"
    png = (tmp_path / "demo.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 20_000


def test_losses_that_disagree_fail(run, monkeypatch):
    chunked = model.chunked_loss
    monkeypatch.setattr(model, "chunked_loss", lambda *tensors: 1.002 * chunked(*tensors))
    status, _, printed, _ = run("--variants eager checkpointing chunked")
    assert status == 1
    for message in (
        "the losses do not agree",
        "checkpointing against eager: equal bit for bit (within",
        "(more than the limit of 0.001)",
    ):
        assert message in printed


def one_run(variant, losses, milliseconds=(1.0,), peak=0):
    run = training.Run(variant, None, None, None, losses=list(losses), milliseconds=list(milliseconds))
    run.saved_bytes, run.timeline = peak, Timeline([0.0], [peak])
    return run


def test_a_loss_that_is_not_a_number_fails():
    runs = [one_run("eager", (1.0, 2.0)), one_run("chunked", (1.0, 2.0)), one_run("convert", (1.0, math.nan))]
    assert [row.failed for row in results.summarize(tiny(), runs)] == [False, False, True]


def test_ratios_are_of_a_steps_own_times_and_warm_up_is_left_out():
    """The machine is ten times slower in the last step; both variants feel it."""
    runs = [
        one_run("eager", [1.0] * 6, [99.0] * 3 + [10.0, 10.0, 100.0]),
        one_run("convert", [1.0] * 6, [1.0] * 3 + [20.0, 30.0, 250.0]),
    ]
    _, row = results.summarize(tiny(steps=6), runs)
    assert (row.ms, row.ratio, row.p20_ratio, row.p80_ratio) == (30.0, 2.5, 2.0, 3.0)


def test_the_gain_in_words():
    settings, figures = tiny(steps=1), zip(config.VARIANTS, (10, 14, 15, 12, 12), (800, 400, 100, 120, 50), strict=True)
    runs = [one_run(variant, (1.0,), (float(ms),), mib << 20) for variant, ms, mib in figures]
    assert results.gain(results.summarize(settings, runs)) == (
        'A step of ckptkern, "full", 1MiB peaks at 50 MiB, where eager takes 800 MiB (16×) and checkpointing, chunked loss, '
        "the lowest of the others, 100 MiB (2×); it takes 1.20 of eager's time and 0.80 of that one's."
    )
    for some in (runs[1:], runs[:3], [runs[0], runs[4]]):  # without eager, ours, the others
        assert results.gain(results.summarize(settings, some)) is None


def test_dropout_is_replayed(run):
    none = run("--dropout=0.2 --recompute=none").losses["bounded"]
    _, losses, printed, _ = run("--dropout=0.2 --recompute=full")
    assert "no limit: their dropout masks come from different random streams" in printed
    assert losses["eager"] == losses["checkpointing"] != losses["bounded"]
    # a mask that backward drew anew would give other gradients, so other losses from the second step on
    for other in (none, losses["convert"]):
        torch.testing.assert_close(losses["bounded"], other, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(
    "arguments",
    [
        "--experts=4 --dtype=fp16",
        pytest.param("--dtype=bf16", marks=pytest.mark.long),
        pytest.param("--experts=4 --top-k=1 --activation=relu2", marks=pytest.mark.long),
    ],
)
def test_precisions_and_experts_train_alike(run, arguments):
    """Torch's grouped matmuls, the same in a checkpoint, and ckptkern's experts, on the choice of experts of the first."""
    low = "dtype" in arguments
    status, losses, printed, written = run(arguments)
    assert status == 0
    assert ("no limit: only fp32 on a CPU has one" in printed) == low
    for curve in losses.values():
        assert all(map(math.isfinite, curve))
        torch.testing.assert_close(curve, losses["eager"], rtol=0.02 if low else 1e-5, atol=0.0)
    if "experts" in arguments:
        assert f"of 4 experts, {1 if 'top-k' in arguments else 2} a token" in printed
        assert written["settings"]["lr"] == pytest.approx(1e-3 / 3)
        eager, *_, ours = written["table"]
        assert ours["saved_bytes"] < eager["saved_bytes"] * 0.4


def test_variants_follow_one_choice_of_experts_in_training_alone():
    torch.manual_seed(0)
    layer = model.MoE(tiny(experts=4, activation="silu", top_k=1))
    other = copy.deepcopy(layer)
    other.choice = layer.choice
    with torch.no_grad():
        other.router.weight.neg_()  # likes others
    x = torch.randn(1, 8, 16)
    layer(x)
    (chosen,) = layer.choice
    followed, _ = other(x)
    assert other.choice[0] is chosen
    assert not torch.equal(other.eval()(x)[0], followed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--experts -1", "--experts: wanted at least 0 but got -1"),
        ("--experts 4 --top-k 5", "--top-k: wanted from 1 to all 4 --experts but got 5"),
        ("--experts 4 --d-model 20", "--d-model: wanted a multiple of 8, as torch's grouped_mm does, but got 20"),
        ("--top-k 2", "--top-k: wanted from 1 to all 0 --experts but got 2"),
        ("--heads 3", "--d-model: wanted a multiple of --heads 3 but got 16"),
        ("--dropout 1.5", "--dropout: wanted a probability in [0, 1) but got 1.5"),
        ("--steps 0", "--steps: wanted at least 1 but got 0"),
        ("--batch-size -2", "--batch-size: wanted at least 1 but got -2"),
        ("--threads -1", "--threads: wanted at least 0 but got -1"),
        ("--lr 0", "--lr: wanted a positive learning rate but got 0.0"),
        ("--variants eager eager", "--variants: wanted each variant once but got ['eager', 'eager']"),
        ("--seq-len 100000000 --vocabulary 290", "tokens but got 100000000"),
        ("--vocabulary 255", "--vocabulary: wanted at least 256 but got 255"),
        ("--workspace much", '--workspace: wanted a size like "4MiB" but got much'),
        ("", "--vocabulary: the text has only 290 tokens: take more --text-mib"),
        ("--device=cuda", "--device: wanted cuda but torch sees no CUDA device"),
    ],
)
def test_arguments_that_make_no_sense(run, monkeypatch, tmp_path, arguments, message):
    few = torch.arange(400), [b"a"] * 290
    monkeypatch.setattr(demo, "load_corpus", lambda vocabulary, max_bytes: few)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, _, printed, _ = run(arguments)
    assert status == 2
    assert message in printed
    assert not (tmp_path / "out").exists()


def test_quick_and_full_are_presets_under_explicit_options(monkeypatch):
    seen = []
    monkeypatch.setattr(demo, "main", lambda args: config.settle(args) or seen.append(args) or 0)
    for arguments in ([], ["--quick"], ["--quick", "--layers=3"], ["--full"]):
        assert __main__.main(["demo", "--device=cpu", *arguments]) == 0
    whole, quick, chosen, full = seen
    smaller = {name: preset.quick for name, preset in config.PRESETS.items() if preset.quick}
    assert smaller == {name: getattr(quick, name) for name in smaller}
    assert quick.d_model == whole.d_model
    assert (chosen.layers, chosen.steps) == (3, quick.steps)
    assert {name for name in config.PRESETS if getattr(full, name) != getattr(whole, name)} == {"steps"}
    assert full.steps > whole.steps > quick.steps


def test_other_programs_on_the_machine_are_named(monkeypatch):
    monkeypatch.setattr(measure.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(measure.os, "getloadavg", lambda: (1.4, 0.0, 0.0))
    assert measure.load_warning(1) is None
    assert "load average 1.4 on 2 cores" in measure.load_warning(2)


def test_text_is_sorted_source_files_once(tmp_path):
    files = {
        "b/sub/c.py": b"two", "b/a.py": b"one", "b/again.py": b"one", "empty.py": b"", "site-packages/other.py": b"other",
        "b/tests/test_a.py": b"test", "b/data.txt": b"text",
    }  # fmt: skip
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(text)
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    assert data.load_text(tmp_path) == [b"one", b"two"]
    assert data.load_text(tmp_path, max_bytes=5) == [b"one"]


def test_no_text_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="wanted Python source files of at most 16777216 bytes below"):
        data.load_text(tmp_path)


@pytest.mark.parametrize(("size", "tokens"), [(256, 22), (257, 16), (259, 7), (400, 7)])
def test_tokens_are_the_bytes_and_the_most_frequent_words(size, tokens):
    text = b"aaab aab ab aab\xff ab ab"
    ids, vocabulary = data.tokenized(text, size)
    assert b"".join(vocabulary[token] for token in ids) == text
    assert vocabulary[:256] == [bytes([byte]) for byte in range(256)]
    assert vocabulary[256:] == [b" ab", b" aab", b"aaab"][: size - 256]
    assert len(ids) == tokens


def test_batches_come_from_the_seed_and_targets_are_the_next_tokens():
    batches, again, other = (list(data.batches(tiny(seed=seed), torch.arange(200))) for seed in (3, 3, 4))
    torch.testing.assert_close(batches, again)
    assert [tokens.shape for tokens, _ in batches] == [(2, 16)] * 4
    assert all(torch.equal(targets, tokens + 1) for tokens, targets in batches)
    assert not torch.equal(batches[0][0], other[0][0])


@pytest.mark.parametrize("experts", [0, 4])
def test_the_variant_changes_layers_and_not_the_state_dict(experts):
    runs = training.start_runs(tiny(experts=experts, activation="silu"))
    first = runs[0].model.state_dict()
    for run in runs[1:]:
        state = run.model.state_dict()
        assert list(state) == list(first)
        assert all(torch.equal(state[name], first[name]) for name in first)


def test_threads_are_chosen_and_given_back(monkeypatch):
    def spinning(*tensors):  # as if a second thread had no core to run on
        clock[0] += torch.get_num_threads() ** 2
        return linear(*tensors)

    clock, linear, outer = [0.0], F.linear, torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for wanted, counts in ((0, {1, 2}), (1, {1}), (0, {1})):
            with training.cpu_threads(tiny(threads=wanted)) as threads:
                assert threads in counts
                assert torch.get_num_threads() == threads
            assert torch.get_num_threads() == 2
            if wanted:
                monkeypatch.setattr(F, "linear", spinning)
                monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    finally:
        torch.set_num_threads(outer)
