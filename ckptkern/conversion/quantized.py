"""Reads quantised weights of the libraries that convert knows: what replaces them in a fused call and in a check of a module,
and what keeps a module from being fused.

Frozen knows which weights can be dequantised. A layer whose own forward does something else with its weight, such as quantising
its input, is not fused: its forward is compared with that of the dequantised weight.
"""

from __future__ import annotations

import contextlib
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import ParametrizationList

from ..frozen import Frozen, why_not
from ..ops.dispatch.choices import setting
from ..subclasses import own_dispatch

LIBRARIES = ("bitsandbytes", "torchao")
REPACKS = "support_avx512bf16_for_cpu"  # of bitsandbytes' layers: a call without gradients may repack the weight for inference
LIKE_TORCH = 0.02  # relative error of a 16-bit forward that rounds elsewhere; a wrong scale or layout differs by more


def is_quantised(parameter) -> bool:
    """Returns whether the parameter is a quantised weight of a library that Frozen knows."""
    return type(parameter).__module__.partition(".")[0] in LIBRARIES


def frozen_of(weight: Tensor) -> Tensor:
    """Returns what replaces a weight in an op: a Frozen if the weight is quantised, not trained, and supported by Frozen;
    else the weight."""
    return weight if not is_quantised(weight) or weight.requires_grad or why_not(weight) else Frozen(weight)


def why_unreadable(module: nn.Module) -> str:
    """Returns which of the module's parameters no op supports, and why; "" if there is none."""
    for name, parameter in module.named_parameters():
        if is_quantised(parameter):
            if parameter.requires_grad:
                return f"{name} is a {type(parameter).__name__} that is trained, and no op computes its gradient"
            if reason := why_not(parameter):
                return f"{name} is a {type(parameter).__name__}. {reason}"
        elif kind := own_dispatch((parameter,)):
            return f"a parameter is a {kind.__name__}"
        elif parameter.is_floating_point() and parameter.itemsize == 1:
            return f"{name} is {parameter.dtype}, whose scale only its module knows; pass ckptkern.Frozen to the op instead"
    return why_different(module)


def compute_dtype(module: nn.Module) -> torch.dtype | None:
    """Returns the dtype in which bitsandbytes' layer multiplies; None for other modules."""
    dtype = getattr(module, "compute_dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def autocast_like(module: nn.Module, x: Tensor) -> contextlib.AbstractContextManager:
    """Returns the autocast of training for a module whose quantised layers multiply in 16 bits while x is float32, as after
    peft's prepare_model_for_kbit_training; a null context for others."""
    leaves = [m for m in module.modules() if is_quantised(m._parameters.get("weight"))]
    dtypes = {compute_dtype(m) or Frozen(m.weight).dtype for m in leaves}
    if x.dtype != torch.float32 or len(dtypes) != 1 or x.dtype in dtypes:
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, dtypes.pop())


def multiplies_dequantised(module: nn.Module) -> bool:
    """Returns whether the module is a linear layer of these libraries with a quantised weight, perhaps a bias, and nothing
    else.

    `why_different` compares its forward. A library's layer with another weight, such as one for training with fake
    quantisation, is read as any other module.
    """
    return (
        is_quantised(module)
        and isinstance(module, nn.Linear)
        and is_quantised(module._parameters.get("weight"))
        and not module._modules
        and module._parameters.keys() <= {"weight", "bias"}
    )


def not_repacked(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Keeps bitsandbytes from repacking weights for inference, which it does in place, in a call without gradients, on a CPU
    with AVX512-BF16. Training could not read them then."""
    return setting(REPACKS, False, *(m for m in model.modules() if m.__dict__.get(REPACKS)))


class _Packed(ParametrizationList):
    """Returns the weight that bitsandbytes has quantised as a Frozen, which is dequantised where it is read."""

    def forward(self) -> Tensor:
        return super().forward() if why_not(self) else Frozen(self)


def packed_in(module: nn.Module) -> list[ParametrizationList]:
    """Returns the parametrizations inside of parameters that bitsandbytes has quantised in 4 bits and Frozen supports."""
    return [m for m in module.modules() if isinstance(m, ParametrizationList) and not why_not(m)]


def read_packed(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Makes a forward dequantise experts that bitsandbytes has parametrized one after the other, and save none of them."""
    return setting("__class__", _Packed, *packed_in(module))


def removing_adapters() -> contextlib.AbstractContextManager[None]:
    """Makes peft remove its adapters of experts after each call, also where bitsandbytes parametrizes the experts: peft
    0.21.2 does not recognise its preferred kind of adapter. The other kind adds the whole low-rank update to a weight, also
    in the step before convert."""
    layer = sys.modules.get("peft.tuners.lora.layer")
    return setting("_LoraFactorsProxy", lambda b, a, scale: layer._LoraParameterProxy(scale * b @ a), layer)


def why_different(module: nn.Module) -> str:
    """Returns which quantised linear layer inside computes, by its own forward, something else than its dequantised weight
    does; "" if there is none."""
    for path, leaf in module.named_modules():
        weight = leaf._parameters.get("weight")
        if not is_quantised(weight) or not isinstance(leaf, nn.Linear):
            continue
        frozen, dtype = Frozen(weight), compute_dtype(leaf)
        x = torch.randn(4, frozen.shape[1], dtype=dtype or frozen.dtype, device=frozen.device)
        with torch.enable_grad():  # a call without gradients may repack the weight for inference
            theirs = leaf(x.requires_grad_()).detach().double()
        bias = None if leaf.bias is None else leaf.bias.detach().to(x.dtype)
        ours = F.linear(x.detach(), frozen.dequantize(x.dtype), bias).double()
        error = float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30))
        if not error <= LIKE_TORCH:
            return f"the forward of {path or type(leaf).__name__} differs from its dequantised weight's by {error:.1e}"
    return ""
