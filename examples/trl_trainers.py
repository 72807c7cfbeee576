"""TRL's SFTTrainer with packed sequences, DPOTrainer and GRPOTrainer, each with the callback. Use one of them. TRL's
`gradient_checkpointing=True` may stay. DPO's frozen reference model needs no conversion: it saves nothing.

Install: pip install trl transformers tokenizers datasets
Run: python examples/trl_trainers.py
"""

import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, Trainer, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from ckptkern.integrations import TrainerCallback

words = {word: i for i, word in enumerate(["<pad>", "<eos>", *map(str, range(2046))])}
tokens = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", padding_side="left")
quiet = dict(logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False)


def text(first: int, step: int, length: int) -> str:
    """Returns words, each determined by the one before it."""
    return " ".join(str((first + step * place) % 64) for place in range(length))


def build() -> LlamaForCausalLM:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def sft(model: LlamaForCausalLM, **options) -> Trainer:
    data = Dataset.from_dict({"text": [text(i, 5, 20 + i % 30) for i in range(96)]})
    settings = SFTConfig(
        packing=True, max_length=128, per_device_train_batch_size=2, max_steps=12, learning_rate=1e-2, **options
    )
    return SFTTrainer(model, settings, train_dataset=data, processing_class=tokenizer)


def dpo(model: LlamaForCausalLM, **options) -> Trainer:
    texts = {"prompt": [f"{i} " for i in range(64)]}
    texts |= {name: [text(i, step, 31) for i in range(64)] for name, step in (("chosen", 5), ("rejected", 3))}
    settings = DPOConfig(per_device_train_batch_size=4, max_steps=6, learning_rate=2e-3, **options)
    return DPOTrainer(model, build(), settings, train_dataset=Dataset.from_dict(texts), processing_class=tokenizer)


def even(completions: list[str], **_) -> list[float]:
    """Returns each completion's share of even numbers."""
    return [sum(int(word) % 2 == 0 for word in completion.split()) / 24 for completion in completions]


def grpo(model: LlamaForCausalLM, **options) -> Trainer:
    data = Dataset.from_dict({"prompt": [text(5 * i, 1, 8) for i in range(64)]})
    settings = GRPOConfig(
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=24,
        temperature=0.9,
        max_steps=12,
        learning_rate=2.5e-2,
        **options,
    )
    return GRPOTrainer(model, even, settings, data, processing_class=tokenizer)


def train(trainer_of, model: LlamaForCausalLM, *callbacks: TrainerCallback, **options) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        options = dict(output_dir=folder, lr_scheduler_type="constant", use_cpu=True, bf16=False) | quiet | options
        trainer = trainer_of(model, **options)
        for callback in callbacks:
            trainer.add_callback(callback)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    for trainer_of, key in ((sft, "loss"), (dpo, "loss"), (grpo, "reward")):
        first, *_, last = train(trainer_of, build(), TrainerCallback(recompute="full", workspace="1MiB"))
        print("fused calls", last["calls_fused"], "others", last["calls_checkpointed"] + last["calls_original"])
        print(f"{key} {first[key]:.2f} -> {last[key]:.2f}")
