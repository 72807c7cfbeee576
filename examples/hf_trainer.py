"""Hugging Face's Trainer, two ways: a callback that converts the model, or its own activation checkpointing (gradient
checkpointing) on ckptkern's regions. Choose one of them.

Install: pip install transformers accelerate
Run: python examples/hf_trainer.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments, set_seed

import ckptkern
from ckptkern.integrations import TrainerCallback

ids = (torch.arange(96)[:, None] + 5 * torch.arange(32)) % 64  # each token follows from the one before it
data = [{"input_ids": row, "labels": row} for row in ids]


def build() -> LlamaForCausalLM:
    set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            use_cache=False,
        )
    )


def train(model: LlamaForCausalLM, *callbacks: TrainerCallback, **arguments) -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            per_device_train_batch_size=8,
            max_steps=12,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **arguments,
        )
        trainer = Trainer(model, settings, train_dataset=data, callbacks=[*callbacks])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")


train(build(), TrainerCallback(recompute="full"))

model = build()
with ckptkern.patch_torch():  # torch.utils.checkpoint is ckptkern's, which transformers calls
    train(model, gradient_checkpointing=True)  # newer versions say activation_checkpointing
    with ckptkern.memory.saved_tensors(model) as saved:
        model(ids[:8].to(model.device))
    print("regions save", ckptkern.memory.format_size(saved.bytes))
