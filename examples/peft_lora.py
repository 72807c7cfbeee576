"""LoRA on a small Llama: `get_peft_model` first, then convert. The adapters become part of the fused layers.

Install: pip install transformers peft
Run: python examples/peft_lora.py
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import ckptkern

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4)
lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear", modules_to_save=["lm_head"])
model = get_peft_model(LlamaForCausalLM(config), lora)

# each token follows from the one before it
batches = [(torch.randint(64, (8, 1)) + 5 * torch.arange(32)) % 64 for _ in range(12)]
print(ckptkern.convert(model, input_ids=batches[0], labels=batches[0], use_cache=False))

trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer, losses = torch.optim.AdamW(trained, 1e-2), []
for ids in batches:
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
