"""QLoRA on a small Llama: weights in NF4, loaded by transformers, and peft's adapters. convert fuses its layers, which
dequantise a weight where they read it; bitsandbytes keeps its weights, state_dict and merging.

Install: pip install transformers peft bitsandbytes accelerate
Run: python examples/qlora.py
"""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import ckptkern

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
    pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
nf4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
)
lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", modules_to_save=["lm_head"])
with tempfile.TemporaryDirectory() as folder:  # stands for a name on the Hub
    LlamaForCausalLM(config).save_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=nf4, dtype=torch.bfloat16, device_map="cpu")
model = get_peft_model(base, lora)


def batch() -> torch.Tensor:
    """Each token follows from the one before it."""
    ids = [torch.randint(64, (8,))]
    for _ in range(31):
        ids.append((5 * ids[-1] + 7) % 64)
    return torch.stack(ids, 1)


def saved(ids: torch.Tensor) -> str:
    with ckptkern.memory.saved_tensors(model) as tensors:
        model(input_ids=ids, labels=ids, use_cache=False)
    return ckptkern.memory.format_size(tensors.bytes)


example = batch()
plain = saved(example)
print(ckptkern.convert(model, input_ids=example, labels=example, use_cache=False))
print(f"saved for backward: {plain}, converted {saved(example)}")

model.train()
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer, losses = torch.optim.AdamW(trained, 1e-2), []
for _ in range(20):
    ids = batch()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
assert losses[-1] < losses[0] / 2
