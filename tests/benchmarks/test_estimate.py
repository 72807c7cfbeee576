"""python -m ckptkern estimate: what it counts is what a CPU measures, and what it cannot do it says."""

import contextlib
import copy
import csv
import importlib
import json
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import ckptkern
from ckptkern.__main__ import main
from ckptkern.conversion.recorder import set_gradients
from ckptkern.memory import peak_memory, saved_tensors

pytest.importorskip("transformers")

from transformers import CONFIG_MAPPING

from benchmarks.gpu import variants as gpu_variants
from ckptkern.benchmarks import estimate
from ckptkern.benchmarks import estimate_liger as liger
from ckptkern.benchmarks import estimate_model as models
from ckptkern.benchmarks import estimate_variants as variants

RESULTS = Path(__file__).parents[2] / "benchmarks/results/h200/results.csv"
TOKENS, WORKSPACE = 256, 2**20
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 2000, "max_position_embeddings": 512,
}  # fmt: skip


def file_of(folder, fields):
    path = folder / "config.json"
    path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return path


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return models.read_config(str(file_of(tmp_path_factory.mktemp("llama"), LLAMA)))


LORA = models.LoRA(4, torch.float32)


@pytest.fixture(scope="module")
def on_meta(config):
    """(is_ours, adapters) -> the model."""
    meta_models = {
        (ours, lora): models.built(config, torch.float32, "meta", lora)
        for ours in (False, True)
        for lora in (None, LORA)
    }
    for lora in (None, LORA):
        models.convert_like_narrow(meta_models[True, lora], lora)
    return meta_models


def with_peft(model):
    """peft's own adapters, of the same number of parameters."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=LORA.rank, lora_alpha=2 * LORA.rank, target_modules="all-linear")
    return peft.inject_adapter_in_model(config, model).train()


def quiet(monkeypatch):
    """Liger's kernels launch nothing."""
    kernel = importlib.import_module("liger_kernel.ops.rms_norm")._rms_norm_forward_kernel
    monkeypatch.setattr(type(kernel), "run", lambda self, *args, **kwargs: None)


@contextlib.contextmanager
def as_liger(model, monkeypatch):
    """Liger's own modules and functions, whose kernels launch nothing."""
    patching = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    quiet(monkeypatch)
    with mock.patch.dict(vars(sys.modules[type(model).__module__])):
        patching._apply_liger_kernel_to_instance(model=model)
        yield lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss


SHORT = ("checkpoint", "sac-chunks", "liger", "checkpoint-liger", "ckptkern", "ckptkern-bounded")


@pytest.mark.parametrize("lora", [None, LORA], ids=["all trains", "adapters train"])
@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=() if key in SHORT else pytest.mark.long) for key in variants.VARIANTS]
)
def test_counted_peaks_are_measured_ones(key, lora, config, on_meta, monkeypatch):
    """Of a model with peft's own adapters, and with Liger's own code."""
    variant = variants.VARIANTS[key]
    meta = on_meta[variant.is_ours, lora]
    first = models.kinds_of(meta)
    assert first == [0] * 5
    counted = variants.count_all(meta, first, variant, 1, TOKENS, WORKSPACE)
    real = models.built(config, torch.float32, "cpu")
    real = real if lora is None else with_peft(real)
    trained = [sum(p.numel() for p in module.parameters() if p.requires_grad) for module in (meta, real)]
    assert trained[0] == trained[1]
    ids = torch.randint(0, 2000, (1, TOKENS))
    if variant.is_ours:
        ckptkern.convert(real, input_ids=ids[:, :8], labels=ids[:, :8], use_cache=False)
    with contextlib.ExitStack() as stack:
        stack.enter_context(models.one_thread())  # each has buffers of its own in the attention of a CPU
        step = stack.enter_context(as_liger(real, monkeypatch)) if variant.liger else None
        training = stack.enter_context(variants.prepared(real, variant._replace(liger=False)))
        set_gradients(training.parameters(), {id(p) for p in training.parameters() if p.requires_grad})
        stack.enter_context(ckptkern.workspace(WORKSPACE))
        step = step or training
        step(ids).backward()
        with peak_memory("cpu") as peak:
            step(ids).backward()
    assert abs(counted.peak - peak.bytes) < 0.05 * peak.bytes
    assert not models.original_of(on_meta[True, lora])


def heads(x):
    return (x * 1).transpose(1, 2)


WEIGHT, TABLE, HEAD = torch.ones(32), torch.ones(1, 64, 32), torch.ones(4000, 32, requires_grad=True)
FUNCTIONS = {  # ours: the module and the name of Liger's, and a call
    "RMSNorm": ("rms_norm", "LigerRMSNormFunction", lambda f, x, ours: f(x, WEIGHT, True if ours else 1e-6)),
    "GatedMLP": ("swiglu", "LigerSiLUMulFunction", lambda f, x, ours: f(x * 1, x * 1)),
    "Rotary": ("rope", "LigerRopeFunction", lambda f, x, ours: sum(f(heads(x), heads(x), TABLE, TABLE))),
    "Loss": (
        "fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction",
        lambda f, x, ours: f(x.view(256, 32), HEAD, torch.arange(256)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_allocates_as_liger_s(name, monkeypatch):
    """In forward and backward. Liger's loss has a chunk's gradients of x beside, on a CPU."""
    module, function, call = FUNCTIONS[name]
    theirs = getattr(pytest.importorskip(f"liger_kernel.ops.{module}"), function)
    quiet(monkeypatch)
    x, sizes = torch.ones(1, 64, 4, 32, requires_grad=True), []
    for implementation in (getattr(liger, name), theirs):

        def run(implementation=implementation):
            y = call(implementation.apply, x, implementation is not theirs)
            return y[0] if isinstance(y, tuple) else y

        dy = torch.ones_like(run())
        run().backward(dy)
        with saved_tensors() as saved:
            y = run()
        del y
        with peak_memory("cpu") as peak:
            run().backward(dy)
        sizes.append((saved.bytes, peak.bytes))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.02)


MEASURED = {
    "eager": "eager", "gradient checkpointing": "checkpoint", "Liger": "liger",
    "gradient checkpointing, Liger": "checkpoint-liger", "ckptkern selective": "ckptkern", "ckptkern full": "ckptkern-full",
    "ckptkern full, 256 MiB": "ckptkern-bounded",
}  # fmt: skip


@pytest.mark.parametrize("name", ["llama-1b", pytest.param("qwen3-8b", marks=pytest.mark.long)])
def test_counted_peaks_are_those_of_an_h200(name):
    """With its workspace and ckptkern's kernels, in bfloat16: those that benchmarks/results/h200 has."""
    pytest.importorskip("triton")
    model = next(row for row in gpu_variants.ON_GPU if row.title == name)
    config = CONFIG_MAPPING[model.kind](**model.shape)
    meta_models = {ours: models.built(config, torch.bfloat16, "meta") for ours in (False, True)}
    models.convert_like_narrow(meta_models[True])
    first = models.kinds_of(meta_models[False])
    with open(RESULTS, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["case"] == model.name and row["variant"] in MEASURED]
    counted, measured = {}, {}
    for row in rows:
        variant = variants.VARIANTS[MEASURED[row["variant"]]]
        size = 256 * 2**20 if variant.bounded else estimate.default_workspace("h200")
        arguments = variant, model.batch, model.length, size, "h200"
        counted[row["variant"]] = variants.count_all(meta_models[variant.is_ours], first, *arguments).peak
        measured[row["variant"]] = int(row["peak_bytes"])
    assert len(counted) == len(MEASURED)
    assert counted == pytest.approx(measured, rel=1e-3)


@pytest.mark.parametrize("key", ["checkpoint", "checkpoint-liger", "ckptkern"])
def test_few_layers_tell_the_peak_of_many(key, config):
    """Also where few layers peak in the backward of the embedding, and many in that of layers."""
    config = copy.deepcopy(config)
    config.num_hidden_layers, config.vocab_size, config.tie_word_embeddings = 24, 4000, True
    variant = variants.VARIANTS[key]
    model = models.built(config, torch.float32, "meta")
    if variant.is_ours:
        models.convert_like_narrow(model)
    arguments = variant, 1, TOKENS, WORKSPACE
    assert variants.count_all(model, [0] * 24, *arguments) == variants.count(model, *arguments)


def test_selective_checkpoints_save_attention_and_do_not_run_it_again(on_meta):
    full, selective = (
        variants.count_all(on_meta[False, None], [0] * 5, variants.VARIANTS[key], 1, TOKENS, WORKSPACE)
        for key in ("checkpoint", "sac")
    )
    o, lse, matmul = TOKENS * 64 * 4, TOKENS * 4 * 4, 2 * TOKENS * TOKENS * 64
    assert selective.saved - full.saved == 5 * (o + lse)
    assert full.flops - selective.flops == 5 * 2 * matmul


def test_adapters_are_fused_and_what_runs_otherwise_is_named(on_meta, config):
    variant, ours = variants.VARIANTS["ckptkern"], on_meta[True, LORA]
    variants.count(ours, variant, 1, 8, WORKSPACE)
    (layer, *_) = (forward for forward in models.forwards_of(ours) if forward.module is ours.model.layers[0])
    assert layer.calls["fused"] > 0
    assert layer.calls["checkpointed"] == layer.calls["original"] == 0
    other = models.built(config, torch.float32, "meta", LORA)
    models.convert_like_narrow(other, LORA)
    other.model.layers[1].self_attn.q_proj.scaling["second"] = 1.0
    other.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *_: None)
    variants.count(other, variant, 1, 8, WORKSPACE)
    assert models.original_of(other) == ["LlamaDecoderLayer"]


def test_adapters_around_named_layers_of_every_kind(tmp_path):
    fields = dict(model_type="gpt2", n_embd=32, n_layer=2, n_head=4, vocab_size=100)
    config = models.read_config(str(file_of(tmp_path, fields)))
    model = models.built(config, torch.bfloat16, "meta", LORA._replace(targets=("c_attn", "mlp.c_proj")))
    taken = [name for name, module in model.named_modules() if isinstance(module, models.Adapter)]
    assert taken == [f"transformer.h.{i}.{name}" for i in range(2) for name in ("attn.c_attn", "mlp.c_proj")]
    adapter = model.get_submodule(taken[0])
    assert (adapter.lora_A["default"].weight.shape, adapter.lora_B["default"].weight.shape) == ((4, 32), (96, 4))
    assert adapter(torch.empty(1, 3, 32, dtype=torch.bfloat16, device="meta")).dtype == torch.bfloat16
    assert variants.VARIANTS["checkpoint-liger"].named(model.transformer.h) == "checkpointing, Liger's loss"


def test_modules_of_a_kind_have_the_forward_of_the_narrow_one(on_meta):
    """What is bound is of the real model alone: no tensor, module or configuration of the narrow one."""
    real = on_meta[True, None]
    assert [forward.module for forward in models.forwards_of(real)] == [
        *real.model.layers,
        real.model.norm,
        real.lm_head,
    ]
    for layer in real.model.layers:
        segment = next(iter(layer.forward.segments.values()))
        assert segment.module is layer
        assert layer.forward.watch.unchanged()
        assert layer.forward.form.module is layer


def test_layers_of_each_kind_are_counted_as_often_as_they_are():
    assert variants.depths([0, 0, 2, 0, 0, 2, 0], 1) == ([0, 1, 2], [([3], 3), ([5], 1)])
    assert variants.depths([0] * 32, 4) == ([*range(8)], [([8, 9, 10, 11], 6)])
    assert variants.depths([0], 1) == ([0], [])


@pytest.mark.parametrize(
    ("budget", "expected"), [(1100, (100, False)), (2000, (190, False)), (10**6, (1600, True)), (50, (0, False))]
)
def test_the_longest_lies_on_a_line(budget, expected):
    assert variants.longest(lambda n: 100 + 10 * n, 100, 1100, budget) == expected


def test_states():
    """What is frozen is a parameter alone."""
    trained, frozen = (torch.empty(10, dtype=torch.bfloat16, requires_grad=grad) for grad in (True, False))
    assert estimate.states_of([trained], "adamw", 1) == (20, 20, 40)
    assert estimate.states_of([trained], "adamw-float32", 4) == (5, 5, 30)
    assert estimate.states_of([trained], "sgd", 1).all == 40
    assert estimate.states_of([trained, frozen], "adamw", 1) == (40, 20, 40)


def test_the_command(tmp_path, capsys):
    file_of(tmp_path, LLAMA)
    table, picture = tmp_path / "rows.csv", tmp_path / "picture.png"
    arguments = ["estimate", str(tmp_path), "--tokens", "128", "--memory", "24MiB", "--variants", "checkpoint,ckptkern"]
    assert main([*arguments, "--layers", "2", "--csv", str(table), "--picture", str(picture)]) == 0
    text = capsys.readouterr().out
    for line in (
        "llama: 0.00 billion parameters, 2 layers",
        "measured: nothing here",
        "over checkpointing, with a peak of",
        "ckptkern replaces LlamaDecoderLayer by transformer_layer",
    ):
        assert line in text
    assert max(map(len, text.splitlines())) <= 80
    rows = {row["key"]: row for row in csv.DictReader(table.read_text().splitlines())}
    ours, theirs = ({name: int(rows[key][name]) for name in ("peak", "longest")} for key in ("ckptkern", "checkpoint"))
    assert ours["peak"] < theirs["peak"]
    assert ours["longest"] > theirs["longest"] > 0
    assert int(rows["ckptkern"]["optimizer_bytes"]) == 2 * int(rows["ckptkern"]["parameters_bytes"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_with_adapters(tmp_path, capsys):
    """One answer over checkpointing and over Liger; gradients and states are those of the adapters."""
    file_of(tmp_path, LLAMA)
    table = tmp_path / "rows.csv"
    keys = "checkpoint,checkpoint-chunks,checkpoint-liger,ckptkern-full"
    arguments = ["--tokens=128", "--lora=4", "--layers=2", f"--variants={keys}", f"--csv={table}"]
    assert main(["estimate", str(tmp_path), *arguments]) == 0
    text = capsys.readouterr().out
    assert "LoRA of rank 4 in float32: 0.0 million train" in text
    for line in (
        "over checkpointing, with",
        "over checkpointing, Liger, with",
        "LlamaDecoderLayer by transformer_layer",
    ):
        assert text.count(line) == 1
    assert text.splitlines()[-3:] == estimate.EVIDENCE.splitlines()
    (row, *_) = csv.DictReader(table.read_text().splitlines())
    adapters = 2 * 4 * (4 * 64 + 2 * 32 + 64 + 64 + 3 * (64 + 176))  # of q, k, v, o; gate, up, down: both sides
    assert int(row["gradients_bytes"]) == 4 * adapters
    assert int(row["optimizer_bytes"]) == 8 * adapters


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        (None, (), "there is no file .*nothing is downloaded.*hf download"),
        ("{", (), "is not a config.json of transformers .*model_type"),
        ({"hidden_size": 8}, (), "is not a config.json of transformers .*model_type"),
        ({"model_type": "no_such"}, (), "model_type 'no_such', which the installed transformers does not know"),
        ({"model_type": "vit"}, (), "vit is not a causal language model .*ckptkern report"),
        (LLAMA, ("--layers", "0"), "--layers: wanted auto or a positive number but got '0'"),
        (LLAMA, ("--memory", "much"), "--memory: wanted a size such as 80GiB but got much"),
        (LLAMA, ("--workspace", "big"), "--workspace: wanted a size such as 80GiB but got big"),
        (LLAMA, ("--variants", "eager,magic"), "--variants: unknown magic; choose from eager, "),
        (LLAMA, ("--tokens", "0"), "--tokens: wanted a positive number but got 0"),
        (LLAMA, ("--lora", "0"), "--lora: wanted a positive number but got 0"),
        (LLAMA, ("--lora-targets", "q_proj"), "--lora-targets and --lora-dtype go with --lora"),
        (
            LLAMA,
            ("--lora", "4", "--lora-targets", "c_attn"),
            "--lora-targets: no linear layer .* but q_proj, k_proj, v_proj, ",
        ),
    ],
)
def test_what_it_refuses(fields, options, message, tmp_path, capsys):
    path = tmp_path / "config.json" if fields is None else file_of(tmp_path, fields)
    assert main(["estimate", str(path), *options]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error


def test_a_model_without_its_list_of_layers(on_meta):
    bare = torch.nn.Linear(1, 1)
    bare.config = on_meta[False, None].config
    with pytest.raises(ValueError, match="Linear has no list of its 5 layers: use"):
        models.layers_of(bare)
