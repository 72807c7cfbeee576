"""Gives transformers our layers and functions: by the `kernels` package, as a repository, and by its own registries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .functions import attention_forward, causal_lm_loss

__all__ = ["PATH", "causal_lm_loss", "kernel_config", "register"]
PATH = str(Path(__file__).parent)  # of a kernels repository: f"{PATH}:SwiGLUMLP" names a layer


def kernel_config(layers: Mapping[Any, str]) -> Any:
    """Returns transformers' KernelConfig with layers of this repository, for training and evaluation on any device.

        config = ckptkern.hub.kernel_config({"LlamaMLP": "SwiGLUMLP"})
        model = LlamaForCausalLM.from_pretrained(name, use_kernels=True, kernel_config=config)

    layers: a layer of ours ("SwiGLUMLP", "GeGLUMLP", "MLP", "RMSNormMLP", "Experts") for each class of the model, name that the
    class has registered, or tuple of (name, pattern) of neighbours.

    Raises ImportError without transformers and kernels; ValueError, when the model is built, if no module has a name.
    """
    from kernels import LocalLayerRepository
    from transformers import KernelConfig
    from transformers.utils.kernel_config import infer_device

    class LocalKernelConfig(KernelConfig):
        def sanitize_kernel_mapping(self, model):
            self.store_registered_layer_names(model)

        def create_compatible_mapping(self, model, compile=False):
            names = {
                key: (repo if isinstance(repo, str) else repo[0]).partition(":")[2]
                for key, repo in self.kernel_mapping.items()
            }
            registered = {*self.registered_layer_names.values()}
            for key, layer in names.items():
                if not registered & {name for name, same in names.items() if same == layer}:
                    raise ValueError(
                        f"kernel_config: no module has the layer name {key!r}, and {layer} has no layout for a class. Register "
                        f"the class: kernels.replace_kernel_forward_from_hub(cls, {layer!r}), and take {layer!r} as the key"
                    )
            device = infer_device(model)
            self.kernel_mapping = {
                key: {device: LocalLayerRepository(Path(PATH), layer_name=name)} for key, name in names.items()
            }

    return LocalKernelConfig({key: f"{PATH}:{layer}" for key, layer in layers.items()}, use_local_kernel=True)


def register(name: str = "ckptkern") -> None:
    """Registers our attention and experts with transformers 5: `from_pretrained(..., attn_implementation=name,
    experts_implementation=name)`. Raises ImportError without transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    from ..conversion import register_experts

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, sdpa_mask)
    register_experts(name)
