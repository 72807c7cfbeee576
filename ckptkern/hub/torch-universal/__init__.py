"""A kernels repository: the layers and functions of the installed ckptkern."""

from ckptkern.hub import layers
from ckptkern.hub.functions import attention_forward, causal_lm_loss

__all__ = ["attention_forward", "causal_lm_loss", "layers"]
