"""python -m ckptkern estimate: what it counts is what a CPU measures, and what it cannot do it says."""

import csv
import json
import re

import pytest
import torch

import ckptkern
from ckptkern.__main__ import main
from ckptkern.memory import peak_memory
from ckptkern.planning.live import gradients_as_there
from ckptkern.planning.timing import RATES

pytest.importorskip("transformers")
pytest.importorskip("rich")

from ckptkern.tools import estimate
from ckptkern.tools.estimate import model as models
from ckptkern.tools.estimate import variants

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


@pytest.fixture(scope="module")
def on_meta(config):
    """is_ours -> the model."""
    made = {ours: models.built(config, torch.float32, "meta") for ours in (False, True)}
    models.convert_like_narrow(made[True])
    return made


SHORT = ("checkpoint", "sac-chunks", "ckptkern", "ckptkern-bounded")


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=() if key in SHORT else pytest.mark.long) for key in variants.VARIANTS]
)
def test_counted_peaks_are_measured_ones(key, config, on_meta):
    variant = variants.VARIANTS[key]
    first = models.kinds_of(on_meta[variant.is_ours])
    assert first == [0] * 5
    counted = variants.count_all(on_meta[variant.is_ours], first, variant, 1, TOKENS, WORKSPACE)
    real = models.built(config, torch.float32, "cpu")
    ids = torch.randint(0, 2000, (1, TOKENS))
    if variant.is_ours:
        ckptkern.convert(real, input_ids=ids[:, :8], labels=ids[:, :8], use_cache=False)
    with (
        variants.prepared(real, variant) as training,
        gradients_as_there(training, all_there=True),
        ckptkern.workspace(WORKSPACE),
    ):
        training(ids).backward()
        with peak_memory("cpu") as peak:
            training(ids).backward()
    assert abs(counted.peak - peak.bytes) < 0.05 * peak.bytes
    assert not models.original_of(on_meta[True])


def test_selective_checkpoints_save_attention_and_do_not_run_it_again(on_meta):
    rates = RATES["h100"]
    full, selective = (
        variants.count_all(on_meta[False], [0] * 5, variants.VARIANTS[key], 1, TOKENS, WORKSPACE, rates)
        for key in ("checkpoint", "sac")
    )
    o, lse, matmul = TOKENS * 64 * 4, TOKENS * 4 * 4, 2 * TOKENS * TOKENS * 64
    assert selective.saved - full.saved == 5 * (o + lse)
    assert full.flops - selective.flops == 5 * 2 * matmul
    assert selective.seconds < full.seconds


def test_modules_of_a_kind_have_the_forward_of_the_narrow_one(on_meta):
    """What is bound is of the real model alone: no tensor, module or configuration of the narrow one."""
    real = on_meta[True]
    assert [one.module for one in models.forwards_of(real)] == [*real.model.layers, real.model.norm, real.lm_head]
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
    assert estimate.states_of(10, torch.bfloat16, "adamw", 1) == (20, 20, 40)
    assert estimate.states_of(10, torch.bfloat16, "adamw-float32", 4) == (5, 5, 30)
    assert estimate.states_of(10, torch.bfloat16, "sgd", 1).all == 40


def test_the_command(tmp_path, capsys):
    file_of(tmp_path, LLAMA)
    table, picture = tmp_path / "rows.csv", tmp_path / "picture.png"
    given = ["estimate", str(tmp_path), "--tokens", "128", "--memory", "24MiB", "--variants", "checkpoint,ckptkern"]
    assert main([*given, "--layers", "2", "--csv", str(table), "--picture", str(picture)]) == 0
    text = capsys.readouterr().out
    for line in (
        "llama: 0.00 billion parameters, 2 layers", "estimated, not measured", "over checkpointing",
        "ckptkern replaces LlamaDecoderLayer by transformer_layer",
    ):  # fmt: skip
        assert line in text
    assert max(map(len, text.splitlines())) <= 80
    rows = {row["key"]: row for row in csv.DictReader(table.read_text().splitlines())}
    ours, theirs = ({name: int(rows[key][name]) for name in ("peak", "longest")} for key in ("ckptkern", "checkpoint"))
    assert ours["peak"] < theirs["peak"]
    assert ours["longest"] > theirs["longest"] > 0
    assert int(rows["ckptkern"]["optimizer_bytes"]) == 2 * int(rows["ckptkern"]["parameters_bytes"])
    assert picture.read_bytes().startswith(b"\x89PNG")


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
        (LLAMA, ("--variants", "eager,magic"), "--variants: magic is none of eager, "),
        (LLAMA, ("--tokens", "0"), "--tokens: wanted a positive number but got 0"),
    ],
)
def test_what_it_refuses(fields, options, message, tmp_path, capsys):
    path = tmp_path / "config.json" if fields is None else file_of(tmp_path, fields)
    assert main(["estimate", str(path), *options]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error


def test_a_model_without_its_list_of_layers(on_meta):
    bare = torch.nn.Linear(1, 1)
    bare.config = on_meta[False].config
    with pytest.raises(ValueError, match="Linear has no list of its 5 layers: use"):
        models.layers_of(bare)
