"""What one run of the demo trains, and the defaults for a CPU and a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ckptkern.memory import parse_size

# what --variants takes: what tables and pictures call it
VARIANTS = {
    "eager": "eager",
    "checkpointing": "gradient checkpointing",
    "chunked": "checkpointing, chunked loss",
    "convert": "ckptkern",
    "bounded": 'ckptkern, "{recompute}", {workspace}',
}
OURS = ("convert", "bounded")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRESETS = {
    "cpu": {
        "steps": 30, "batch_size": 2, "seq_len": 2048, "vocabulary": 8192, "text_mib": 4, "layers": 8, "d_model": 128,
        "heads": 4, "lr": 1e-3, "dtype": "fp32",
    },
    "cuda": {
        "steps": 100, "batch_size": 4, "seq_len": 4096, "vocabulary": 32768, "text_mib": 16, "layers": 12,
        "d_model": 1024, "heads": 16, "lr": 6e-4, "dtype": "bf16",
    },
}  # fmt: skip
QUICK = {"steps": 6, "batch_size": 1, "seq_len": 1024, "vocabulary": 2048, "text_mib": 1, "layers": 4}


@dataclass(frozen=True)
class Config:
    """What one run trains; raises ValueError where the numbers do not go together."""

    device: str
    dtype: str
    steps: int
    batch_size: int
    seq_len: int
    vocabulary: int
    text_mib: int
    layers: int
    d_model: int
    heads: int
    lr: float
    dropout: float
    activation: str
    recompute: str
    workspace: str
    experts: int  # of each block; 0: a plain MLP
    top_k: int
    seed: int
    variants: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "seq_len", "text_mib", "layers", "d_model", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')}: wanted at least 1 but got {getattr(self, name)}")
        if self.vocabulary < 256:
            raise ValueError(f"--vocabulary: wanted at least the 256 bytes but got {self.vocabulary}")
        if self.d_model % self.heads:
            raise ValueError(f"--d-model: wanted a multiple of --heads {self.heads} but got {self.d_model}")
        if self.experts and self.d_model % 8:
            raise ValueError(f"--d-model: wanted a multiple of 8, as torch's grouped_mm does, but got {self.d_model}")
        if not 1 <= self.top_k <= (self.experts or self.top_k):
            raise ValueError(f"--top-k: wanted from 1 to all {self.experts} --experts but got {self.top_k}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"--dropout: wanted a probability in [0, 1) but got {self.dropout}")
        if not self.lr > 0.0:
            raise ValueError(f"--lr: wanted a positive learning rate but got {self.lr}")
        if not parse_size(self.workspace):
            raise ValueError(f'--workspace: wanted a size like "4MiB" but got {self.workspace}')
        if len(set(self.variants)) != len(self.variants):
            raise ValueError(f"--variants: wanted each variant once but got {' '.join(self.variants)}")

    @property
    def model(self) -> str:
        """Its kind, for titles."""
        return "GPT" + (f" of {self.experts} experts, {self.top_k} a token" if self.experts else "")

    def label(self, variant: str) -> str:
        """What tables and pictures call a variant."""
        return VARIANTS[variant].format(recompute=self.recompute, workspace=self.workspace)
