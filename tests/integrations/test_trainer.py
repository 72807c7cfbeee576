"""`TrainerCallback` in transformers' Trainer and in TRL's trainers, against the same run without it."""

import importlib
import runpy
import sys
import warnings
from contextlib import suppress

import pytest
import torch
from test_architecture import ROOT

from ckptkern import integrations

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")
trainer_module = importlib.import_module("ckptkern.integrations.trainer")
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
IDS = (torch.arange(16)[:, None] + 5 * torch.arange(24)) % 64
QUIET = dict(report_to="none", disable_tqdm=True, dataloader_pin_memory=False, use_cpu=True, logging_steps=1)
CASES = {
    "alone": {},
    "bf16": {"bf16": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "gradient checkpointing": {"gradient_checkpointing": True},
}


def build(**options):
    transformers.set_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | options))


def trained(folder, callback=None, model=None, **options):
    """A Trainer that has trained four steps."""
    settings = dict(per_device_train_batch_size=4, max_steps=4, learning_rate=1e-2, save_strategy="no", **QUIET)
    trainer = transformers.Trainer(
        model or build(),
        transformers.TrainingArguments(folder, **settings | options),
        train_dataset=[{"input_ids": row, "labels": row} for row in IDS],
        eval_dataset=[{"input_ids": row, "labels": row} for row in IDS[:4]],
        callbacks=[] if callback is None else [callback],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_losses_are_those_without_the_callback(case, tmp_path, capsys):
    options = CASES[case] | dict(eval_strategy="steps", eval_steps=2)
    callback = integrations.TrainerCallback(recompute="full")
    expected, actual = trained(tmp_path, **options), trained(tmp_path, callback, **options)
    rtol = 2e-2 if "bf16" in case else 1e-4
    for name, count in (("loss", 4), ("grad_norm", 4), ("eval_loss", 2)):
        assert len(logged(actual, name)) == count
        torch.testing.assert_close(logged(actual, name), logged(expected, name), rtol=rtol, atol=0.0)
    converted = len(callback.conversion.converted)
    calls = options.get("gradient_accumulation_steps", 1) * converted
    assert converted > 2
    assert logged(actual, "calls_fused") == [calls * step for step in (1, 2, 3, 4)]
    assert {*logged(actual, "calls_checkpointed"), *logged(actual, "calls_original")} == {0}
    assert capsys.readouterr().out.count(f"{converted} modules converted") == 1


@pytest.mark.slow
def test_what_is_saved_is_a_model_of_transformers(tmp_path, capsys):
    """A tokenizer is saved beside it, and a run resumes from a checkpoint with and without the callback."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({str(word): word for word in range(64)}, unk_token="0")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), pad_token="0")
    callback = integrations.TrainerCallback(recompute="full")
    settings = transformers.TrainingArguments(
        tmp_path, per_device_train_batch_size=4, max_steps=4, save_steps=2, learning_rate=1e-2, **QUIET
    )
    data = [{"input_ids": row, "labels": row} for row in IDS]
    options = dict(train_dataset=data, processing_class=tokenizer)
    trainer = transformers.Trainer(build(), settings, callbacks=[callback], **options)
    trainer.train()
    trainer.save_model(tmp_path / "last")
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "last")
    torch.testing.assert_close(dict(loaded.state_dict()), dict(trainer.model.state_dict()), rtol=0, atol=0)
    assert len(transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "last")) == 64
    for callbacks in ([integrations.TrainerCallback(recompute="full")], []):
        resumed = transformers.Trainer(build(), settings, callbacks=callbacks, **options)
        capsys.readouterr()
        resumed.train(resume_from_checkpoint=tmp_path / "checkpoint-2")
        assert capsys.readouterr().out.count("modules converted") == len(callbacks)
        torch.testing.assert_close(logged(resumed, "loss"), logged(trainer, "loss"), rtol=1e-4, atol=0.0)
        assert len(logged(resumed, "calls_fused")) == 2 + 2 * len(callbacks)  # two before the checkpoint


@pytest.mark.slow
def test_lost_fusion_is_warned_of_and_logged(tmp_path):
    class Hook(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, *, model, **_):
            if state.global_step == 2:
                model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, args, y: y)

    model, callback = build(), integrations.TrainerCallback(recompute="full")
    settings = transformers.TrainingArguments(
        tmp_path, per_device_train_batch_size=4, max_steps=4, save_strategy="no", **QUIET
    )
    data = [{"input_ids": row, "labels": row} for row in IDS]
    trainer = transformers.Trainer(model, settings, train_dataset=data, callbacks=[Hook(), callback])
    with pytest.warns(UserWarning, match="ckptkern") as caught:
        trainer.train()
    messages = [str(warning.message) for warning in caught]
    counts = [int(message.split()[1]) for message in messages if "were not fused, of model.layers.1" in message]
    assert counts == [1, 2]
    assert any("up_proj has a hook" in message for message in messages)
    assert logged(trainer, "calls_checkpointed") == [0, 0, 1, 2]


@pytest.mark.slow
def test_a_batch_of_which_two_samples_do_not_run(tmp_path):
    """The example is the whole batch then."""

    class Whole(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, **kwargs):
            if input_ids.size(0) != 4:
                raise ValueError(f"{input_ids.size(0)} samples")
            return super().forward(input_ids, **kwargs)

    transformers.set_seed(0)
    model, callback = Whole(transformers.LlamaConfig(**SIZES)), integrations.TrainerCallback(include="*.mlp")
    trained(tmp_path, callback, model, remove_unused_columns=False)
    assert callback.conversion.calls == {"fused": 8, "checkpointed": 0, "original": 0}


@pytest.mark.slow
def test_training_that_is_interrupted_begins_anew(tmp_path, capsys):
    class Interrupted(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if self.raises:
                raise KeyboardInterrupt

    callback, interrupted = integrations.TrainerCallback(recompute="full"), Interrupted()
    settings = transformers.TrainingArguments(
        tmp_path, per_device_train_batch_size=4, max_steps=2, save_strategy="no", **QUIET
    )
    data = [{"input_ids": row, "labels": row} for row in IDS]
    trainer = transformers.Trainer(build(), settings, train_dataset=data, callbacks=[callback, interrupted])
    for interrupted.raises in (True, False):
        with suppress(KeyboardInterrupt):
            trainer.train()
    converted = len(callback.conversion.converted)
    assert logged(trainer, "calls_fused") == [converted, 2 * converted]
    assert capsys.readouterr().out.count("modules converted") == 1


def test_another_version_of_trl_is_warned_of(monkeypatch):
    """It may be imported by what trains without it."""

    def refuse(workspace):
        raise RuntimeError("another version of TRL")

    monkeypatch.setitem(sys.modules, "trl", sys)
    monkeypatch.setattr(trainer_module, "patch_trl", refuse)
    callback, state = integrations.TrainerCallback(), transformers.TrainerState()
    with pytest.warns(UserWarning, match="another version of TRL"):
        callback.on_train_begin(None, state, None, model=build())
    callback.on_train_end(None, state, None)


def test_an_option_that_convert_does_not_have(tmp_path):
    with pytest.raises(TypeError, match="recomputed"):
        trained(tmp_path, integrations.TrainerCallback(recomputed="full"))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_trl(kind):
    """Layers stay fused with TRL's default, `gradient_checkpointing=True`, which DPO switches off and on in each step."""
    pytest.importorskip("trl")
    recipe = runpy.run_path(str(ROOT / "examples/trl_trainers.py"))
    callback = integrations.TrainerCallback(recompute="full", workspace="1MiB")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ckptkern")
        ours = recipe["train"](recipe[kind], recipe["build"](), callback)
    theirs = recipe["train"](recipe[kind], recipe["build"]())
    for name in ("loss", "grad_norm"):
        torch.testing.assert_close([row[name] for row in ours], [row[name] for row in theirs], rtol=2e-3, atol=1e-3)
    last = ours[-1]
    assert last["calls_fused"] == 2 * len(ours)  # two layers; TRL computes the head itself
    assert last["calls_checkpointed"] == last["calls_original"] == 0
