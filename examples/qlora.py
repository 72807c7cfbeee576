"""QLoRA on a small Llama: NF4 weights loaded by transformers, and peft's adapters. convert fuses its layers, which dequantise a
weight where they read it; weights, state_dict and merging stay bitsandbytes'.

Install: pip install transformers peft bitsandbytes accelerate
Run: python examples/qlora.py
"""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import ckptkern

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4)
nf4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
)
lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", modules_to_save=["lm_head"])
with tempfile.TemporaryDirectory() as folder:  # stands for a name on the Hub
    LlamaForCausalLM(config).save_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=nf4, dtype=torch.bfloat16, device_map="cpu")
model = get_peft_model(base, lora)

# each token follows from the one before it
batches = [(torch.randint(64, (8, 1)) + 5 * torch.arange(32)) % 64 for _ in range(20)]
print(ckptkern.convert(model, input_ids=batches[0], labels=batches[0], use_cache=False))

model.train()
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer, losses = torch.optim.AdamW(trained, 1e-2), []
for ids in batches:
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
