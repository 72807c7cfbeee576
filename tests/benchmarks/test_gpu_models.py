"""benchmarks.gpu.models: whole models at small shapes on a CPU, as a GPU would run them."""

from __future__ import annotations

import copy
import csv
import functools
import importlib
import sys
import time
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.gpu import models, variants
from benchmarks.gpu.variants import Runner
from ckptkern.benchmarks import measure, run
from ckptkern.benchmarks.cases import EAGER
from ckptkern.frozen import Frozen
from ckptkern.planning.certify import InFloat64
from ckptkern.tools.selftest import error_ratio, relative_errors

pytest.importorskip("transformers")
CPU = torch.device("cpu")
SMALL = {model.title.removesuffix("-small"): model for model in variants.models("cpu")}
LLAMA, BOUNDED = SMALL["llama-1b"], variants.bounded("cpu")
OURS = {name for name in variants.variants("cpu") if name.startswith("ckptkern")}
EPS = 4 * torch.finfo(torch.float32).eps
LIGER = {"Liger", variants.LIGER}
pytestmark = pytest.mark.slow


class Ran(NamedTuple):
    """rows: of results.csv, by variant; others: of other cases."""

    status: int
    rows: dict[str, dict[str, str]]
    others: list[dict[str, str]]


def rows_of(out):
    with (out / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def ran(out, *arguments):
    status = models.main([f"--out={out}", "--device=cpu", "--only=llama-1b", *arguments])
    rows = rows_of(out) if (out / "results.csv").exists() else []
    return Ran(
        status,
        {row["variant"]: row for row in rows if row["case"] == LLAMA.name},
        [row for row in rows if row["case"] != LLAMA.name],
    )


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """(folder, what ran into it): a whole run."""
    out = tmp_path_factory.mktemp("models")
    return out, ran(out)


def number(row, field):
    return int(row[field])


def test_rows(first):
    _, outcome = first
    assert outcome.status == 0
    assert {name for name, row in outcome.rows.items() if row["status"] == "ok"} == {
        *variants.variants("cpu")
    } - LIGER - {variants.COMPILE}
    assert {name for name, row in outcome.rows.items() if row["status"] == "missing"} == LIGER
    assert {row["tokens"] for row in outcome.rows.values()} == {str(LLAMA.tokens)}
    saved = {name: number(row, "saved_bytes") for name, row in outcome.rows.items() if row["status"] == "ok"}
    assert max(saved[name] for name in OURS) < saved[variants.CHECKPOINTING] < saved[EAGER]
    peaks = {name: number(row, "peak_bytes") for name, row in outcome.rows.items() if row["status"] == "ok"}
    assert peaks[BOUNDED] < peaks[variants.FULL] < peaks[variants.CHECKPOINTING] < peaks[EAGER]
    assert all(
        float(row["ms"]) > 0 and int(row["rounds"]) > 1 for row in outcome.rows.values() if row["status"] == "ok"
    )


def test_the_longest_sequence(first):
    """It fits the budget, and the next that was tried does not, or it is as long as the search goes."""
    _, outcome = first
    longest = {name: number(outcome.rows[name], "longest") for name in models.longest_first("cpu") if name not in LIGER}
    assert longest[EAGER] < longest[variants.CHECKPOINTING] < longest[BOUNDED] == LLAMA.limit
    assert "the search ends there" in outcome.rows[BOUNDED]["note"]
    whole = variants.build(LLAMA, CPU, torch.float32)
    for tokens, fits in ((longest[EAGER], True), (longest[EAGER] + models.MULTIPLE["cpu"], False)):
        runner = variants.variants("cpu")[EAGER](whole, LLAMA.ids(CPU))
        with models.peak_memory(CPU) as peak:
            runner.step(LLAMA.ids(CPU, 1, tokens))
        assert (peak.bytes <= models.CPU_BUDGET) == fits, tokens


def test_a_resumed_run_measures_what_is_missing(first, tmp_path, monkeypatch, capsys):
    """A failed row is measured again, beside eager; what stands keeps its bytes, also rows of other programs."""
    out, before = first
    for name in ("results.csv", "env.json"):
        (tmp_path / name).write_bytes((out / name).read_bytes())
    text = (tmp_path / "results.csv").read_text().splitlines()
    other = f"mlp/d1,eager,cpu,float32,failed{',' * (len(text[0].split(',')) - 5)}"
    again = [line.replace(",ok,", ",failed,", 1) if f",{variants.FULL}," in line else line for line in text]
    (tmp_path / "results.csv").write_text("\n".join([*again, other]) + "\n")
    calls = []
    every = variants.variants("cpu")
    noted = {name: lambda model, ids, name=name: calls.append(name) or every[name](model, ids) for name in every}
    monkeypatch.setattr(variants, "variants", lambda kind: noted)
    outcome = ran(tmp_path)
    assert outcome.status == 0
    assert calls == [EAGER, variants.FULL]
    assert [row["case"] for row in outcome.others] == ["mlp/d1"]
    assert {name: row for name, row in outcome.rows.items() if name != variants.FULL} == {
        name: row for name, row in before.rows.items() if name != variants.FULL
    }
    assert outcome.rows[variants.FULL]["status"] == "ok"
    env = (tmp_path / "env.json").read_text()
    (tmp_path / "env.json").write_text(env.replace('"device": "cpu"', '"device": "nvidia-h100"'))
    assert ran(tmp_path).status == 2
    assert "nvidia-h100" in capsys.readouterr().err


def with_variants(monkeypatch, eager=variants.whole_loss, **extra):
    """Eager and others, each a loss(model, ids)."""
    makers = {
        name: lambda model, ids, loss=loss: Runner(functools.partial(loss, model))
        for name, loss in ({EAGER: eager} | extra).items()
    }
    monkeypatch.setattr(variants, "variants", lambda kind: makers)
    monkeypatch.setattr(models, "longest_first", lambda kind: [])


def test_what_is_not_fused_is_no_figure_of_ours(tmp_path, monkeypatch):
    convert = variants.ckptkern.convert
    monkeypatch.setattr(models, "longest_first", lambda kind: [])
    monkeypatch.setattr(variants.ckptkern, "convert", functools.partial(convert, exclude="model.layers.1"))
    outcome = ran(tmp_path)
    assert outcome.status == 1
    assert {outcome.rows[name]["status"] for name in OURS} == {"failed"}
    assert "convert fused {'transformer_layer': 1" in outcome.rows[variants.FULL]["note"]


def test_calls_that_do_not_run_fused_are_no_figure_of_ours():
    whole, ids = variants.build(LLAMA, CPU, torch.float32), LLAMA.ids(CPU)
    runner = variants.variants("cpu")[variants.DEFAULT](whole, ids)
    runner.step(ids)
    assert runner.check_fused() == "2 transformer_layer, 1 tiled, 1 linear_cross_entropy"
    layer = runner.loss.args[0].model.layers[0]
    layer.mlp.register_forward_hook(lambda *args: None)  # after which the layer's original forward runs
    runner.step(ids)
    with pytest.raises(RuntimeError, match=r"calls of converted modules did not run fused: .*checkpointed"):
        runner.check_fused()


def raises(error):
    def loss(model, ids):
        raise error

    return loss


def half_a_gradient(model, ids):
    """The loss of eager, with a gradient of another size."""
    loss = variants.whole_loss(model, ids)
    return loss.detach() / 2 + loss / 2


def the_other_way(model, ids):
    """The loss of eager, with the gradient of eager times -1, whose norm is the same."""
    loss = variants.whole_loss(model, ids)
    return 2 * loss.detach() - loss


def test_what_is_wrong_fails_or_is_missing(tmp_path, monkeypatch, capsys):
    with_variants(
        monkeypatch,
        out=raises(torch.OutOfMemoryError("CUDA out of memory")),
        absent=raises(ImportError("no liger_kernel")),
        **{
            "ckptkern half": half_a_gradient,
            "ckptkern other": the_other_way,
            "ckptkern raised": raises(ValueError("a\nb")),
        },
        **{"ckptkern right": variants.whole_loss},
    )
    outcome = ran(tmp_path)
    states = {name: (row["status"], bool(row["ms"])) for name, row in outcome.rows.items()}
    assert states == {
        EAGER: ("ok", True),
        "out": ("failed", False),
        "absent": ("missing", False),
        "ckptkern half": ("wrong", False),
        "ckptkern other": ("wrong", False),
        "ckptkern raised": ("failed", False),
        "ckptkern right": ("ok", True),
    }
    assert outcome.rows["out"]["note"] == models.OUT_OF_MEMORY
    assert outcome.rows["ckptkern raised"]["note"] == "ValueError: a"
    assert outcome.status == 1
    printed = capsys.readouterr().err
    assert printed.count("NOT RIGHT") == 3


def test_without_eager_the_first_that_runs_is_the_reference(tmp_path, monkeypatch):
    with_variants(
        monkeypatch,
        raises(torch.OutOfMemoryError("out")),
        second=variants.whole_loss,
        third=half_a_gradient,
        ckptkern=variants.whole_loss,
    )
    outcome = ran(tmp_path)
    assert {name: row["status"] for name, row in outcome.rows.items()} == {
        EAGER: "failed",
        "second": "ok",
        "third": "wrong",
        "ckptkern": "ok",
    }
    assert "from second's" in outcome.rows["ckptkern"]["note"]
    assert outcome.status == 0


def test_a_step_that_takes_long_is_timed_once(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "LONG", 0.0)
    with_variants(monkeypatch, ckptkern=variants.whole_loss)
    outcome = ran(tmp_path)
    assert outcome.status == 0
    assert {row["rounds"] for row in outcome.rows.values()} == {"1"}
    assert all(row["ms"] == row["p20_ms"] and float(row["ratio"]) > 0 for row in outcome.rows.values())


def test_an_interrupted_run_keeps_its_rows(tmp_path, monkeypatch, capsys):
    with_variants(monkeypatch, **{"ckptkern stopped": raises(KeyboardInterrupt())})
    outcome = ran(tmp_path)
    assert outcome.status == 1
    assert {name: row["status"] for name, row in outcome.rows.items()} == {EAGER: "ok"}
    assert run.INTERRUPTED in capsys.readouterr().err


def test_over_the_budget_of_time(tmp_path):
    outcome = ran(tmp_path, "--seconds=-1")
    assert {row["status"] for row in outcome.rows.values()} == {"dropped"}
    assert outcome.status == run.UNFINISHED


def test_a_gpu_that_a_kernel_broke(tmp_path, monkeypatch, capsys):
    """Nothing else is measured in the process; the next one goes on with the other variants."""
    with_variants(monkeypatch, **{"ckptkern broken": raises(RuntimeError("an illegal memory access"))})

    def tidy(of):
        if "ckptkern broken" in str(sys.exc_info()[1]) or isinstance(sys.exc_info()[1], RuntimeError):
            raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(models.Run, "tidy", tidy)
    outcome = ran(tmp_path)
    assert outcome.status == measure.LOST_STATUS
    assert outcome.rows["ckptkern broken"]["note"].startswith(measure.LOST)
    assert outcome.rows[EAGER]["status"] == "ok"
    assert "the next run goes on with the other variants" in capsys.readouterr().err
    monkeypatch.setattr(variants, "build", raises(AssertionError("measured again")))
    assert ran(tmp_path).status == 0


class Allocates(NamedTuple):
    """A runner whose step has a peak of so many bytes a token, and runs out of memory from a length on."""

    bytes_of_a_token: int
    until: int

    def step(self, ids):
        if ids.numel() >= self.until:
            raise torch.OutOfMemoryError("CUDA out of memory")
        torch.empty(ids.numel() * self.bytes_of_a_token, dtype=torch.uint8)


def longest(runner, seconds=1000.0):
    of = models.Run(None, CPU, time.monotonic() + seconds)
    return models.longest_of(of, LLAMA._replace(limit=2**14), runner, time.monotonic() + seconds)


def test_a_search():
    budget = models.CPU_BUDGET
    tokens, note = longest(Allocates(budget // 5000, 2**30))
    assert 5000 - 5000 // 32 <= tokens <= 5000
    assert "at least" not in note
    tokens, _ = longest(Allocates(budget // 50000, 3000))
    assert 3000 - 2 * models.MULTIPLE["cpu"] <= tokens < 3000
    tokens, note = longest(Allocates(2 * budget, 2**30))
    assert tokens is None
    assert "none, because 256 tokens take more" in note
    tokens, note = longest(Allocates(1, 2**30), -1.0)
    assert tokens is None
    assert "the seconds of the search were over" in note


def test_bytes_of_a_quantised_model(monkeypatch):
    """17 bytes for 32 values of MXFP4, float32 for all else, and LoRA's gradients."""
    monkeypatch.setattr(
        variants, "missing", lambda *packages: "bitsandbytes is away" if "bitsandbytes" in packages else None
    )
    whole = variants.build(SMALL["llama-2-7b-qlora"], CPU, torch.float32)
    quantised = sum(p.numel() for p in whole.parameters() if isinstance(p, Frozen))
    trained = sum(p.numel() for p in whole.parameters() if p.requires_grad)
    others = sum(p.numel() for p in whole.parameters()) - quantised - trained
    assert models.bytes_of(whole) == 17 * quantised // 32 + 8 * trained + 4 * others
    ids = SMALL["llama-2-7b-qlora"].ids(CPU)
    runner = variants.variants("cpu")[variants.FULL](whole, ids)
    runner.step(ids)
    runner.check_fused()


@pytest.mark.parametrize("name", SMALL)
def test_errors_against_float64(name, monkeypatch):
    """Ours and the chunked loss have at most twice eager's own."""
    model = SMALL[name]
    monkeypatch.setattr(
        variants, "missing", lambda *packages: "bitsandbytes is away" if "bitsandbytes" in packages else None
    )
    whole, ids = variants.build(model, CPU, torch.float32), model.ids(CPU)
    assert any(isinstance(p, Frozen) for p in whole.parameters()) == model.quantised
    double = copy.deepcopy(whole)
    for module in double.modules():
        for key, p in module._parameters.items():
            if isinstance(p, Frozen):
                module._parameters[key] = nn.Parameter(p.dequantize().double(), requires_grad=False)
    double.set_experts_implementation("eager")  # the grouped matmul has no float64
    double = variants.with_gradients(double.double())

    def gradients(model, runner):
        for p in model.parameters():
            if p.requires_grad:
                p.grad.zero_()
        loss = runner.step(ids)
        return {"y": loss} | {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}

    makers = variants.variants("cpu")
    with InFloat64():  # norms and the loss upcast to float32
        exact = gradients(double, makers[EAGER](double, ids))
    assert all(gradient.norm() > 0 for gradient in exact.values())
    eager = relative_errors(gradients(whole, makers[EAGER](whole, ids)), exact)
    assert eager.pop("y") <= EPS
    for variant in (variants.CHUNKED, variants.DEFAULT, BOUNDED):
        errors = relative_errors(gradients(whole, makers[variant](whole, ids)), exact)
        assert errors.pop("y") <= EPS, (variant, "loss")  # of one number eager may have no error
        ratio, worst = error_ratio(errors, eager, torch.float32)
        assert ratio <= 2, (variant, worst)


def test_attention_is_causal_without_a_mask(monkeypatch):
    """A mask of 131,072 tokens would have 16 GiB."""
    calls = []
    attention = F.scaled_dot_product_attention

    def watched(*args, **kwargs):
        calls.append((kwargs.get("attn_mask"), kwargs.get("is_causal")))
        return attention(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    for model in (LLAMA, SMALL["qwen3-8b"]):
        whole = variants.build(model, CPU, torch.float32)
        variants.variants("cpu")[variants.CHUNKED](whole, model.ids(CPU)).step(model.ids(CPU))
    assert len(calls) == 2 * 2 * 2
    assert set(calls) == {(None, True)}


def test_ligers_functions_are_only_in_its_own_step():
    """Rotary embeddings and the loss, which Triton's interpreter can run of it."""
    patching = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    model = LLAMA._replace(batch=1, length=16)
    whole, ids = variants.build(model, CPU, torch.float32), model.ids(CPU)
    module = importlib.import_module(type(whole).__module__)
    before = dict(vars(module))
    reference = models.result_of(variants._eager(whole, ids), whole, ids)
    checkpointed = variants.checkpointed(variants.shared(whole))
    apply = functools.partial(patching.apply_liger_kernel_to_llama, rms_norm=False, swiglu=False)
    around = variants.patched(module, apply, checkpointed)
    assert dict(vars(module)) == before
    with around():
        assert module.apply_rotary_pos_emb is not before["apply_rotary_pos_emb"]
    runner = Runner(functools.partial(variants.whole_loss, checkpointed), around)
    distances = models.result_of(runner, whole, ids).distances(reference)
    assert max(distances) < 1e-5
    assert distances[2] > 0, "the same bits: Liger's functions did not run"
    assert dict(vars(module)) == before


@pytest.mark.parametrize(
    ("case", "millions", "trained"),
    [
        ("llama-1b/4x2048", 1236, 1236),
        ("llama-8b/1x4096", 8030, 8030),
        ("qwen3-8b/1x8192", 8191, 8191),
        ("qwen3-30b-a3b-2-layers/1x8192", 1869, 1869),
        ("llama-8b-lora/1x8192", 8072, 42),
        ("llama-2-7b-qlora/1x32768", 6758, 20),
    ],
)
def test_sizes_of_the_models(case, millions, trained):
    """As their publishers say, on the meta device."""
    model = next(model for model in variants.ON_GPU if model.name == f"model/{case}")
    whole = variants.build(model._replace(quantised=False), torch.device("meta"), torch.bfloat16)
    assert round(sum(p.numel() for p in whole.parameters()) / 1e6) == millions
    assert round(sum(p.grad.numel() for p in whole.parameters() if p.requires_grad) / 1e6) == trained
    assert {p.dtype for p in whole.parameters()} == {torch.bfloat16}


def test_figures_of_others():
    every = {model.name: model.figures for model in variants.ON_GPU}
    fa2, unsloth = every["model/llama-2-7b-qlora/1x32768"]
    assert fa2.ms == pytest.approx(1e3 * 32768 / 2216)
    assert unsloth.peak == 16e9
    assert all(
        figure.source and figure.variant.startswith("published: ") for figures in every.values() for figure in figures
    )
    fa2, _ = every["model/llama-2-7b-qlora/1x100000"]
    assert (fa2.ms, fa2.note) == (None, models.OUT_OF_MEMORY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only=gpt", "--out=x"], "matches none of model/llama-1b-small/4x64"),
        (["--only=(", "--out=x"], "is not a regular expression"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    assert models.main(["--device=cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_transformers(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(models, "missing", lambda *packages: "transformers is not installed: pip install transformers")
    assert ran(tmp_path).status == 2
    assert "pip install transformers" in capsys.readouterr().err
