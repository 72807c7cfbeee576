"""convert in the loops in which people train: what is fused at step 1 stays fused, whatever happens between the steps.

Each case is a loop, something that happens in it, and a model: any two of these are together in one case at least.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter

import pytest
import torch
from conversion.steps import calls_of

for library in ("accelerate", "peft", "pytorch_lightning", "tokenizers"):
    pytest.importorskip(library)
pytest.importorskip("transformers", minversion="5.0")

from support.events import EVENTS, MODELS, STEPS, Training  # noqa: E402
from support.loops import LOOPS, trained  # noqa: E402

# the loop of each pair of an event and a model; "-": BERT and ViT generate nothing, and ViT reads no tokens
MATRIX = """
                        Llama       GPT-2       BERT        T5          ViT         Qwen3-MoE   LLaVA
save                    Trainer     Lightning   accelerate  own         Trainer     Lightning   accelerate
evaluate                Lightning   accelerate  own         Trainer     Lightning   accelerate  own
tokenizer               Trainer     Lightning   accelerate  own         -           Lightning   accelerate
resume                  own         Trainer     Lightning   accelerate  own         Trainer     Lightning
generate                accelerate  own         -           Lightning   -           own         Trainer
gradient checkpointing  Trainer     Lightning   accelerate  own         Trainer     Lightning   accelerate
adapters                accelerate  own         Trainer     Lightning   accelerate  own         Trainer
EMA                     own         Trainer     Lightning   accelerate  own         Trainer     Lightning
two forwards            Lightning   accelerate  own         Trainer     Lightning   accelerate  own
accumulation            accelerate  own         Trainer     Lightning   accelerate  own         Trainer
label smoothing         Trainer     Lightning   accelerate  own         Trainer     Lightning   accelerate
lengths                 own         Trainer     Lightning   accelerate  -           Trainer     Lightning
freezing                Lightning   accelerate  own         Trainer     Lightning   accelerate  own
"""
LEFT_OUT = {("generate", "BERT"), ("generate", "ViT"), ("tokenizer", "ViT"), ("lengths", "ViT")}
# the modules that convert replaces, by what replaces them, without norms in chunks
REPLACED = {name: {"transformer_layer": 2, "linear_cross_entropy": 1} for name in MODELS}
REPLACED["T5"] |= {"checkpoint": 2, "mlp_block": 2}  # in each stack the first layer returns its position bias, too
REPLACED["LLaVA"] |= {"transformer_layer": 4, "mlp_block": 1}
REPLACED["BERT"] |= {"checkpoint": 1}  # its embeddings, of which nothing trains beside adapters
ADAPTED = REPLACED | {  # with LoRA on all linear layers
    "BERT": {"transformer_layer": 2, "linear_cross_entropy": 1},
    "T5": {"transformer_layer": 2, "checkpoint": 2, "linear_cross_entropy": 1},
    "Qwen3-MoE": {"checkpoint": 2, "linear_cross_entropy": 1},  # of the router, too
}
SLACK = 1.06  # of peaks: padding of unequal samples needs a mask
TOLERANCE = {"losses": 1e-5, "metrics": 1e-5, "parameters": 3e-4}


def cases() -> list[tuple[str, str, str]]:
    """Returns (loop, event, model) of each case."""
    heading, *rows = (line.split("  ") for line in MATRIX.strip("\n").splitlines())
    names, *rows = ([cell.strip() for cell in row if cell.strip()] for row in (heading, *rows))
    return [
        (loop, event, name) for event, *loops in rows for name, loop in zip(names, loops, strict=True) if loop != "-"
    ]


def test_every_pair_is_in_a_case():
    loops, events, models = LOOPS, EVENTS, MODELS
    assert {(event, name) for _, event, name in cases()} == {*itertools.product(events, models)} - LEFT_OUT
    assert {(loop, event) for loop, event, _ in cases()} == {*itertools.product(loops, events)}
    assert {(loop, name) for loop, _, name in cases()} == {*itertools.product(loops, models)}


def as_numbers(values: list) -> torch.Tensor:
    return torch.cat([torch.as_tensor(number, dtype=torch.float64).detach().flatten() for number in values or [0.0]])


def assert_as_usual(training: Training) -> None:
    """Every call of every step is one that the table promises, and none takes more memory than one right after convert."""
    rows = training.conversion.converted
    replaced = (ADAPTED if training.event.adapters else REPLACED)[training.name]
    assert Counter(row.replaced_by for row in rows if row.replaced_by != "tiled") == replaced, str(training.conversion)
    # a checkpoint of transformers around one of ours stops its recompute before the last call in it is counted
    usual = training.ran[0] if training.event.gradient_checkpointing else training.usual
    for step, ran in enumerate(training.ran, 1):
        for row, calls, were in zip(rows, ran, usual, strict=True):
            kind = "checkpointed" if row.replaced_by == "checkpoint" else "fused"
            others = {how: count for how, count in calls.items() if how != kind and count}
            assert not others, f"step {step}: {row.name}, {row.replaced_by} in the table, ran {others}"
            assert calls == were, f"step {step}: {row.name} ran {calls}, and {were} in a step without the loop"
            assert calls[kind], f"step {step}: {row.name}, {row.replaced_by} in the table, ran nothing that is counted"
    assert training.conversion.calls["original"] == 0
    # the first call may learn, on convert's example, that layers do not look at a keyword argument such as num_items_in_batch
    assert max(training.peaks[1:]) <= SLACK * training.alone, (
        f"peaks of the steps: {training.peaks} bytes; of a step right after convert: {training.alone}"
    )


def assert_same_training(ours: Training, theirs: Training) -> None:
    """The same losses, metrics and parameters, as far as these moved."""
    for kind in ("losses", "metrics"):
        mine, want = (as_numbers(getattr(training, kind)) for training in (ours, theirs))
        assert len(mine) == len(want), f"{len(mine)} {kind} instead of {len(want)}"
        error = float((mine - want).abs().max() / want.abs().max().clamp(min=1e-3))
        assert error <= TOLERANCE[kind], f"{kind} differ by {error:.1e}: {mine.tolist()} instead of {want.tolist()}"
    before = theirs.before
    moved = {name: (p - before[name]).norm() for name, p in theirs.model.named_parameters() if name in before}
    least = 0.01 * max(moved.values())  # of rounding alone, as a key bias's
    for name, p in ours.model.named_parameters():
        if name in before:
            error = float((p - dict(theirs.model.named_parameters())[name]).norm() / (moved[name] + least))
            assert error <= TOLERANCE["parameters"], (
                f"{name} is {error:.1e} of its way from that of the original, allowed {TOLERANCE['parameters']:.1e}"
            )


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "event", "name"), cases())
def test_what_is_fused_at_step_1_stays_fused(loop, event, name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    theirs = trained(loop, event, name, tmp_path / "original", converts=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = trained(loop, event, name, tmp_path / "converted", converts=True)
    said = {str(warning.message) for warning in caught if str(warning.message).startswith("ckptkern")}
    assert sum(len(training.ran) for training in ours) == STEPS
    for mine, want in zip(ours, theirs, strict=True):
        assert_as_usual(mine)
        assert_same_training(mine, want)
        if mine.copied is not None:
            assert calls_of(mine.copied)["original"] == 0
    assert not said
