"""TRL's DPOTrainer, three ways: as it is, with gradient checkpointing, and converted. The losses are equal up to rounding, the
peak is not. The frozen reference needs no conversion: it saves nothing.

Install: pip install trl transformers tokenizers datasets
Run: python examples/trl_dpo.py
"""

import itertools
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, set_seed
from trl import DPOConfig, DPOTrainer

import ckptkern
from ckptkern.memory import format_size, memory_timeline

VOCABULARY = 2048
words = {word: i for i, word in enumerate(["<pad>", "<eos>", *map(str, range(VOCABULARY - 2))])}
tokens = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>")


def text(first: int, factor: int) -> str:
    """Each word follows from the one before it."""
    numbers = [first % 64]
    for _ in range(30):
        numbers.append((factor * numbers[-1] + 7) % 64)
    return " ".join(map(str, numbers))


data = Dataset.from_dict({
    "prompt": [f"{i % 64} " for i in range(64)],
    "chosen": [text(i, 5) for i in range(64)],
    "rejected": [text(i, 3) for i in range(64)],
})  # fmt: skip


def build() -> LlamaForCausalLM:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(name: str, model: LlamaForCausalLM, checkpointing: bool = False) -> torch.Tensor:
    """Returns the loss and the gradient's norm of each step."""
    with tempfile.TemporaryDirectory() as folder:
        settings = DPOConfig(
            folder, per_device_train_batch_size=4, max_steps=6, learning_rate=2e-3,
            lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
            dataloader_pin_memory=False, use_cpu=True, bf16=False,
            gradient_checkpointing=checkpointing,  # TRL's default is True
        )  # fmt: skip
        trainer = DPOTrainer(model, build(), settings, train_dataset=data, processing_class=tokenizer)
        trainer.remove_callback(PrinterCallback)
        with memory_timeline("cpu") as timeline:
            trainer.train()
    largest = max(after - before for before, after in itertools.pairwise([0, *timeline.bytes]))
    print(f"{name}: peak {format_size(timeline.peak)}, largest tensor {format_size(largest)}")
    logged = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {logged[0][0]:.2f} -> {logged[-1][0]:.2f}")
    return torch.tensor(logged)


plain = train("as it is", build())
train("gradient checkpointing", build(), checkpointing=True)

model = build()
batch = tokenizer([text(0, 5), text(1, 5)], return_tensors="pt")
print(conversion := ckptkern.convert(model, **batch, labels=batch["input_ids"], workspace="1MiB"))
ckptkern.patch_trl(workspace="1MiB")  # TRL reads the head's weight itself, and never calls the head
converted = train("converted", model)
print("calls", conversion.calls)
print(f"logits of a batch of 4 pairs: {format_size(4 * 8 * 32 * VOCABULARY)}")
difference = ((converted - plain).abs() / plain.abs().amax(0)).max().item()
print(f"largest difference of a loss or a gradient's norm: {difference:.1e}")
assert difference < 1e-3
