"""TRL's GRPOTrainer, three ways: as it is, with gradient checkpointing, and converted, which also generates the completions.
Rewards and gradients are equal up to rounding, the peak is not.

Install: pip install trl transformers tokenizers datasets
Run: python examples/trl_grpo.py
"""

import itertools
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

import ckptkern
from ckptkern.memory import format_size, memory_timeline

VOCABULARY = 2048
words = {word: i for i, word in enumerate(["<pad>", "<eos>", *map(str, range(VOCABULARY - 2))])}
tokens = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", padding_side="left")
prompts = [" ".join(str((5 * i + j) % 64) for j in range(8)) for i in range(64)]
data = Dataset.from_dict({"prompt": prompts})


def reward(completions: list[str], **_) -> list[float]:
    """Returns the share of words that are even numbers."""
    return [sum(int(word) % 2 == 0 for word in one.split()) / 24 for one in completions]


def build() -> LlamaForCausalLM:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(name: str, model: LlamaForCausalLM, checkpointing: bool = False) -> torch.Tensor:
    """Returns the reward and the gradient's norm of each step; the loss is 0 before a second update with the same samples."""
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            folder, per_device_train_batch_size=8, num_generations=8, max_completion_length=24, temperature=0.9, max_steps=12,
            learning_rate=2.5e-2, lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to="none",
            disable_tqdm=True, dataloader_pin_memory=False, use_cpu=True, bf16=False,
            gradient_checkpointing=checkpointing,  # TRL's default is True
        )  # fmt: skip
        trainer = GRPOTrainer(model, reward, settings, data, processing_class=tokenizer)
        trainer.remove_callback(PrinterCallback)
        with memory_timeline("cpu") as timeline:
            trainer.train()
    largest = max(after - before for before, after in itertools.pairwise([0, *timeline.bytes]))
    print(f"{name}: peak {format_size(timeline.peak)}, largest tensor {format_size(largest)}")
    names = "reward", "grad_norm"
    logged = [[entry[name] for name in names] for entry in trainer.state.log_history if "loss" in entry]
    print(f"reward {logged[0][0]:.2f} -> {logged[-1][0]:.2f}")
    return torch.tensor(logged)


plain = train("as it is", build())
train("gradient checkpointing", build(), checkpointing=True)

model = build()
batch = tokenizer(prompts[:2], return_tensors="pt")
print(conversion := ckptkern.convert(model, **batch, labels=batch["input_ids"], workspace="1MiB"))
ckptkern.patch_trl(workspace="1MiB")  # TRL reads the head's weight itself, and never calls the head
converted = train("converted", model)
print("calls", conversion.calls)
print(f"logits of a batch of 8 completions: {format_size(4 * 8 * 32 * VOCABULARY)}")
difference = ((converted - plain).abs() / plain.abs().amax(0))[:4].max().item()  # before rounding changes a sample
print(f"largest difference of a reward or a gradient's norm in four steps: {difference:.1e}")
assert difference < 1e-3
