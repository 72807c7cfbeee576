"""Trains one Llama in Trainer, TRL and Lightning, with and without ckptkern.

Prints loss, peak and calls. Saving, a tokenizer and evaluation are on.

Run: python -m benchmarks.dev.hosts [trainer] [trl] [lightning]

The peak is that of forward and backward in the third step on a CPU, with
gradients allocated before. Hub layers need `kernels`: transformers asks for
0.18.2; 0.17.2, with which this was run, has every name that it imports, so its
check of versions is relaxed here.
"""

from __future__ import annotations

import argparse
import inspect
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers.utils.import_utils as imports

inspect.unwrap(imports.is_kernels_available).__defaults__ = ("0.17", "0.19")
imports.is_kernels_available.cache_clear()

import pytorch_lightning as lightning  # noqa: E402 (after the check is relaxed, like what follows)
import transformers  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

import ckptkern  # noqa: E402
from ckptkern import hub, integrations  # noqa: E402
from ckptkern.benchmarks.report import table  # noqa: E402
from ckptkern.memory import format_size, peak_memory  # noqa: E402

VOCABULARY, LENGTH, BATCH, STEPS, MEASURED = (
    8192,
    512,
    2,
    6,
    3,
)  # tokens; tokens; sequences; steps; the step of the peak
FULL: dict[str, Any] = {"recompute": "full", "workspace": "4MiB"}
NORM_AND_MLP = (("RMSNorm", "model.layers.*.post_attention_layernorm"), ("LlamaMLP", "model.layers.*.mlp"))
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    num_attention_heads=4,
    tie_word_embeddings=True,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=1,
)
texts = [" ".join(str((7 * row + 5 * i) % (VOCABULARY - 2)) for i in range(LENGTH)) for row in range(BATCH * STEPS)]


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", *map(str, range(VOCABULARY - 2))])}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>")


class Peak:
    """Measures the peak between two events of the `MEASURED`-th step."""

    bytes = 0

    def begin(self, step: int, model: torch.nn.Module) -> None:
        self.context = None
        if step == MEASURED:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            self.context = peak_memory("cpu")
            self.peak = self.context.__enter__()

    def end(self) -> None:
        if self.context is not None:
            self.context.__exit__(None, None, None)
            self.bytes, self.context = self.peak.bytes, None


class TrainerPeak(Peak, transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, *, model, **_) -> None:
        self.begin(state.global_step + 1, model)

    def on_pre_optimizer_step(self, args, state, control, **_) -> None:
        self.end()


class LightningPeak(Peak, lightning.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx: int) -> None:
        self.begin(batch_idx + 1, pl_module)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self.end()


def fresh(folder: str, **options: Any) -> LlamaForCausalLM:
    """Returns the model with the same first parameters, as it is loaded from a checkpoint."""
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, **options)


def converted(folder: str) -> tuple[LlamaForCausalLM, Callable[[], dict[str, int]]]:
    model, ids = fresh(folder), torch.arange(32)[None]
    conversion = ckptkern.convert(model, input_ids=ids, labels=ids, use_cache=False, **FULL)
    return model, lambda: conversion.calls


def common(folder: str, **options: Any) -> dict[str, Any]:
    return dict(
        output_dir=folder,
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        logging_steps=STEPS,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **options,
    )


def row(name: str, loss: float, peak: Peak, calls: dict[str, int]) -> tuple[str, str, str, str]:
    counted = ", ".join(f"{count} {ran.removeprefix('calls_')}" for ran, count in calls.items() if count)
    return name, f"{loss:.5f}", format_size(peak.bytes), counted


def by_trainer(name: str, model: LlamaForCausalLM, calls: Any = None, callback: Any = None, **options: Any):
    words, peak = tokenizer(), TrainerPeak()
    rows = [dict(input_ids=ids, labels=ids) for ids in words(texts)["input_ids"]]
    callbacks = [peak] if callback is None else [callback, peak]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(**common(folder, **options))
        parts = dict(train_dataset=rows, eval_dataset=rows[:2], processing_class=words, callbacks=callbacks)
        trainer = Trainer(model, arguments, **parts)
        trainer.train()
    return row(name, trainer.state.log_history[-1]["train_loss"], peak, calls() if calls else counts(trainer))


def by_trl(name: str, model: LlamaForCausalLM, callback: Any = None, **options: Any):
    peak, data = TrainerPeak(), Dataset.from_dict({"text": texts})
    callbacks = [peak] if callback is None else [callback, peak]
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(**common(folder, bf16=False, max_length=LENGTH, **options))
        parts = dict(train_dataset=data, eval_dataset=data.take(2), processing_class=tokenizer(), callbacks=callbacks)
        trainer = SFTTrainer(model, settings, **parts)
        trainer.train()
    return row(name, trainer.state.log_history[-1]["train_loss"], peak, counts(trainer))


def counts(trainer: Trainer) -> dict[str, int]:
    return {
        key: value for entry in trainer.state.log_history for key, value in entry.items() if key.startswith("calls_")
    }


class Module(lightning.LightningModule):
    def __init__(self, model: LlamaForCausalLM):
        super().__init__()
        self.model, self.losses = model, []

    def training_step(self, ids, _):
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, ids, _):
        self.log("validation", self.model(input_ids=ids, labels=ids, use_cache=False).loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 5e-5)


def by_lightning(name: str, model: LlamaForCausalLM, callback: Any = None):
    peak, module = LightningPeak(), Module(model)
    ids = torch.tensor(tokenizer()(texts)["input_ids"])
    callbacks = [peak] if callback is None else [callback, peak]
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=1,
            callbacks=callbacks,
            logger=False,
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, torch.utils.data.DataLoader(ids, BATCH), torch.utils.data.DataLoader(ids[:BATCH], BATCH))
    calls = callback.conversions["model"].calls if callback else {}
    return row(name, sum(module.losses) / len(module.losses), peak, calls)


def main() -> None:
    hosts = {"trainer": trainer_rows, "trl": trl_rows, "lightning": lightning_rows}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", nargs="*", choices=[*hosts, []], help="which run (default: all)")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for host in parser.parse_args().hosts or hosts:
        with tempfile.TemporaryDirectory() as folder:
            print(f"\n{host}\n{table(['variant', 'mean loss', 'peak', 'calls'], hosts[host](folder))}", flush=True)


def trainer_rows(folder: str):
    hub.register()
    kernels, layers = dict(use_kernels=True), hub.kernel_config
    yield by_trainer("transformers", fresh(folder))
    yield by_trainer("activation_checkpointing=True", fresh(folder), activation_checkpointing=True)
    yield by_trainer("hub: SwiGLUMLP", fresh(folder, **kernels, kernel_config=layers({"LlamaMLP": "SwiGLUMLP"})))
    fused = fresh(folder, **kernels, kernel_config=layers({NORM_AND_MLP: "RMSNormMLP"}), attn_implementation="ckptkern")
    yield by_trainer("hub: RMSNormMLP, attention", fused)
    yield by_trainer("TrainerCallback()", fresh(folder), callback=integrations.TrainerCallback())
    yield by_trainer('TrainerCallback("full", 4 MiB)', fresh(folder), callback=integrations.TrainerCallback(**FULL))
    yield by_trainer('convert("full", 4 MiB) before', *converted(folder))


def trl_rows(folder: str):
    yield by_trl("TRL", fresh(folder))
    yield by_trl("TRL, gradient_checkpointing=False", fresh(folder), gradient_checkpointing=False)
    yield by_trl('TrainerCallback("full", 4 MiB)', fresh(folder), integrations.TrainerCallback(**FULL))


def lightning_rows(folder: str):
    yield by_lightning("Lightning", fresh(folder))
    yield by_lightning(
        'LightningCallback("model", "full", 4 MiB)', fresh(folder), integrations.LightningCallback("model", **FULL)
    )


if __name__ == "__main__":
    main()
