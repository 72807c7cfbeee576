"""Gives transformers our layers and functions: by the `kernels` package, as a repository, and by its own registries."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.nn import Linear

from .functions import attention_forward, causal_lm_loss

__all__ = ["PATH", "causal_lm_loss", "kernel_config", "register"]
PATH = str(Path(__file__).parent)  # of a kernels repository: f"{PATH}:SwiGLUMLP" names a layer
NEIGHBOURS = ("post_attention_layernorm", "mlp")  # of a decoder layer, which RMSNormMLP replaces


def kernel_config(layers: Mapping[Any, str]) -> Any:
    """Returns transformers' KernelConfig with layers of this repository, for training and evaluation on any device.

        config = ckptkern.hub.kernel_config({"LlamaMLP": "SwiGLUMLP"})
        model = LlamaForCausalLM.from_pretrained(name, use_kernels=True, kernel_config=config)

    layers: a layer of ours ("SwiGLUMLP", "GeGLUMLP", "MLP", "RMSNormMLP", "Experts") for each class of the model, name that the
    class has registered, or tuple of (name, pattern) of neighbours: post_attention_layernorm and mlp.

    Raises ImportError without transformers and kernels; ValueError for other neighbours, a name of no module, and a layer
    without mlp(post_attention_layernorm(x)).
    """
    from kernels import LocalLayerRepository, replace_kernel_forward_from_hub
    from transformers import KernelConfig
    from transformers.utils import is_kernels_available
    from transformers.utils.kernel_config import infer_device

    for key, layer in layers.items():
        places = () if isinstance(key, str) else tuple(pattern.rpartition(".")[2] for _, pattern in key)
        if places != (NEIGHBOURS if layer == "RMSNormMLP" else ()):
            raise ValueError(
                f"kernel_config: {layer} for {key!r}. RMSNormMLP takes two neighbours, whose patterns end in "
                f"{' and '.join(NEIGHBOURS)}; other layers take the name of a class"
            )
    if not is_kernels_available():
        raise ImportError(
            "kernel_config: transformers takes another version of kernels: pip install 'transformers[kernels]'"
        )
    repositories = {key: f"{PATH}:{layer}" for key, layer in layers.items()}

    class LocalKernelConfig(KernelConfig):
        def sanitize_kernel_mapping(self, model):
            self.kernel_mapping = dict(repositories)  # for another model
            unpatch(model)
            classes = {type(module) for module in model.modules()}
            self.names = {"RMSNormMLP": "RMSNormMLP"} if "RMSNormMLP" in layers.values() else {}
            for key, layer in layers.items():
                named = [cls for cls in classes if key in (cls.__name__, getattr(cls, "kernel_layer_name", None))]
                for cls in named:
                    if not hasattr(cls, "kernel_layer_name"):
                        replace_kernel_forward_from_hub(cls, key)
                    self.names[cls.kernel_layer_name] = layer
                if isinstance(key, str) and not named:
                    raise ValueError(
                        f"kernel_config: no module of {type(model).__name__} has the class or layer name {key!r}"
                    )

        def create_compatible_mapping(self, model, compile=False):
            device = infer_device(model)
            mapping = {
                name: {device: LocalLayerRepository(Path(PATH), layer_name=layer)} for name, layer in self.names.items()
            }
            model.kernel_config = KernelConfig(mapping, use_local_kernel=True)

    return LocalKernelConfig(dict(repositories), use_local_kernel=True)


def unpatch(model: Any) -> None:
    """Undoes what transformers registers for all later models when it builds decoder layers with RMSNormMLP, and checks these.

    Raises ValueError if RMSNormMLP does not compute what a decoder layer's norm and MLP compute.
    """
    from transformers import conversion_mapping, monkey_patching

    from .layers import RMSNormMLPLayout

    ours = [renaming.source_patterns for renaming in RMSNormMLPLayout.conversion_mapping]
    parents = {type(m): m for m in model.modules() if any(isinstance(c, RMSNormMLPLayout) for c in m.children())}
    if parents:
        name = type(model).config_class.model_type
        others = conversion_mapping.get_checkpoint_conversion_mapping(name)
        others = [conversion for conversion in others if conversion.source_patterns not in ours]
        conversion_mapping.register_checkpoint_conversion_mapping(name, others, overwrite=True)
        patched = {cls.__mro__[1].__name__ for cls in parents} & monkey_patching.get_patch_mapping().keys()
        monkey_patching.unregister_patch_mapping(patched)
    for cls, parent in parents.items():
        source, layout = inspect.getsource(cls.forward), parent.post_attention_layernorm
        called = [len(re.findall(rf"self\.{place}\b", source)) for place in NEIGHBOURS]
        behind = re.search(r"(\w+) = self\.post_attention_layernorm\(\w+\)\n\s*\1 = self\.mlp\(\1\)\n", source)
        plain = all(isinstance(m, Linear) for m in layout.mlp.modules() if m._parameters)
        if not (behind and called == [1, 1] and plain and layout.norm._parameters.keys() == {"weight"}):
            raise ValueError(
                f"kernel_config: RMSNormMLP replaces mlp(post_attention_layernorm(x)) of an RMSNorm and linear layers, "
                f"which {cls.__mro__[1].__name__} does not compute. Replace its MLP alone: SwiGLUMLP"
            )


def register(name: str = "ckptkern") -> None:
    """Registers our attention and experts with transformers 5: `from_pretrained(..., attn_implementation=name,
    experts_implementation=name)`. Raises ImportError without transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    from ..conversion import register_experts

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, sdpa_mask)
    register_experts(name)
