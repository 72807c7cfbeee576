"""Hugging Face's Trainer, two ways: `ckptkern.convert` in one line before it, or its gradient checkpointing as it is, but on
ckptkern's regions. Choose one of them.

Install: pip install transformers accelerate
Run: python examples/hf_trainer.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments, set_seed

import ckptkern


class Chains(torch.utils.data.Dataset):
    """Each token follows from the one before it."""

    def __len__(self):
        return 96

    def __getitem__(self, i):
        ids = [i % 64]
        for _ in range(31):
            ids.append((5 * ids[-1] + 7) % 64)
        return {"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)}


def build() -> LlamaForCausalLM:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, use_cache=False,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, **arguments) -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, per_device_train_batch_size=8, max_steps=12, learning_rate=1e-2, logging_steps=1, save_strategy="no",
            report_to="none", disable_tqdm=True, dataloader_pin_memory=False, **arguments,
        )  # fmt: skip
        trainer = Trainer(model, settings, train_dataset=Chains())
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    assert losses[-1] < losses[0] / 2


ids = torch.stack([Chains()[i]["input_ids"] for i in range(8)])
model = build()
print(ckptkern.convert(model, input_ids=ids, labels=ids))
train(model)

model = build()
with ckptkern.patch_torch():  # torch.utils.checkpoint is ckptkern's, which transformers calls
    train(model, gradient_checkpointing=True)  # newer versions say activation_checkpointing
    with ckptkern.memory.saved_tensors(model) as saved:
        model(ids.to(model.device))
    print("regions save", ckptkern.memory.format_size(saved.bytes))
