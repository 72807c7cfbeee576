"""Calls and peak of each step under Trainer, which saves checkpoints: ``python -m benchmarks.dev.training``.

A small Llama is trained twice by transformers' Trainer with a tokenizer, converted and unmodified. Trainer writes the
tokenizer's special tokens into the model's configuration, and so does each checkpoint with the dtype and the class. The table
has, for each step, both losses, how many calls of converted modules ran fused, as an activation checkpoint and as the original
forward, and the peak of allocated memory in forward and backward, converted and unmodified.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor, nn

import ckptkern
from ckptkern.memory import peak_memory

V, S = 512, 1024
HEADING = ("step", "loss", "unmodified", "fused", "checkpointed", "original", "peak, MiB", "unmodified")


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Returns a tokenizer of V words, made in memory."""
    words = {name: i for i, name in enumerate(("<unk>", "<s>", "</s>", "<pad>"))}
    words |= {f"word{i}": i for i in range(len(words), V)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    special = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def samples(count: int) -> list[dict[str, Tensor]]:
    """Returns texts of S tokens, in which each token follows from the one before it."""
    first = torch.arange(count)[:, None] * 7 + 11
    ids = (first + 13 * torch.arange(S)) % (V - 4) + 4
    return [{"input_ids": one, "labels": one} for one in ids]


class Steps(transformers.TrainerCallback):
    """Notes (loss, calls, peak in bytes) of each step."""

    def __init__(self, conversion: ckptkern.Conversion | None, device: str):
        self.conversion, self.device, self.rows = conversion, device, []
        self.losses: list[float] = []

    def calls(self) -> dict[str, int]:
        return self.conversion.calls if self.conversion else {}

    def on_step_begin(self, args, state, control, **more):
        self.before = self.calls()
        self.measuring = contextlib.ExitStack()
        self.peak = self.measuring.enter_context(peak_memory(self.device))

    def on_pre_optimizer_step(self, args, state, control, **more):
        self.measuring.close()
        ran = {how: count - self.before[how] for how, count in self.calls().items()}
        self.rows.append((self.losses[-1], ran, self.peak.bytes))


class Trainer(transformers.Trainer):
    """transformers' Trainer, which notes its losses."""

    losses: list[float]

    def training_step(self, *args: Any, **more: Any) -> Tensor:
        loss = super().training_step(*args, **more)
        self.losses.append(loss.item())
        return loss


def model(device: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(device).train()


def train(options: argparse.Namespace, converts: bool) -> list[tuple[float, dict[str, int], int]]:
    """Returns (loss, calls, peak in bytes) of each step."""
    trained, data = model(options.device), samples(options.steps)
    conversion = None
    if converts:
        ids = data[0]["input_ids"][None, :64].to(options.device)
        conversion = ckptkern.convert(trained, input_ids=ids, labels=ids, recompute="full", workspace="1MiB")
        print(conversion, end="\n\n")
    steps = Steps(conversion, options.device)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=options.steps, per_device_train_batch_size=1, save_steps=options.save_every, save_total_limit=1,
            use_cpu=options.device == "cpu", report_to=[], disable_tqdm=True, logging_strategy="no", learning_rate=1e-3,
        )  # fmt: skip
        given = tokenizer() if options.tokenizer else None
        trainer = Trainer(trained, arguments, train_dataset=data, processing_class=given, callbacks=[steps])
        trainer.losses = steps.losses
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return steps.rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dev.training", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30, help="of the training (default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument(
        "--tokenizer", action=argparse.BooleanOptionalAction, default=True, help="give Trainer a tokenizer (default)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    ours, theirs = train(options, True), train(options, False)
    print(f"| {' | '.join(HEADING)} |\n|{'---:|' * len(HEADING)}")
    for step, ((loss, ran, peak), (unmodified, _, whole)) in enumerate(zip(ours, theirs, strict=True), 1):
        calls = " | ".join(str(ran[how]) for how in ("fused", "checkpointed", "original"))
        print(f"| {step} | {loss:.5f} | {unmodified:.5f} | {calls} | {peak / 2**20:.1f} | {whole / 2**20:.1f} |")


if __name__ == "__main__":
    main()
