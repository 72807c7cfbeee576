"""Passes transformers' padding masks on unchanged, [B, S]: an attention implementation with its mask function.

transformers turns a padding mask into a causal mask [B, 1, S, S] before the first layer; under torch.compile it makes one even
where nothing is padded. Under the name NAME, which `convert` sets in a model's configuration and `revert` removes, layers get
the padding mask itself, and are causal without a mask, within the window that they pass as `sliding_window`, as for flash
attention. Otherwise it behaves as "sdpa", which it replaces; or as "eager" in models without "sdpa", whose attention has sinks,
which layers pass as `s_aux`.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function

from .. import ops
from ..ops.attention.core import in_context_parallel
from ..segments.recorded import class_forward, is_traced, traced_call

NAME, REPLACED, WITH_SINKS = "ckptkern", "sdpa", "eager"
ATTRIBUTE = "_attn_implementation_internal"  # of a configuration, which names the implementation
OF_ROWS = ("attention_mask", "position_ids", "past_key_values")  # arguments that say which rows there are


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    dropout_p: float,
    scale: float | None,
    window: int | None,
    is_causal: bool,
) -> Tensor:
    """Computes causal attention o [B, H, S, D]. attn_mask [B, 1, 1, S]: True is seen; window: the number of keys that a row
    sees at most, including its own; sinks [H]. Without is_causal, attn_mask may have any form, and alone decides.

    Modes of torch functions see it as torch's own attention, so that a trace has it as one node.
    """
    tensors = (query, key, value, attn_mask, sinks)
    if has_torch_function(tensors):
        return handle_torch_function(causal_attention, tensors, *tensors, dropout_p, scale, window, is_causal)
    if is_traced():
        along = "nothing" if dropout_p or any(tensor is not None for tensor in (attn_mask, sinks)) else "heads"
        return traced_call(None, causal_attention, (*tensors, dropout_p, scale, window, is_causal), {}, along)
    bounds = window_of(window) if is_causal else None
    return ops.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, scale=scale, enable_gqa=True, window_size=bounds, sinks=sinks
    )


def window_of(window: int | None) -> tuple[int, int]:
    """Returns the ops' window_size for the window of transformers."""
    return -1 if window is None else window - 1, 0


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    s_aux: Tensor | None = None,
    **options,
) -> tuple[Tensor, None]:
    """Implements transformers' attention function: as "sdpa" does, but causal with a padding mask [B, S] or a window, and
    with sinks."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    S, padding, ours, window = query.shape[2], None, False, options.get("sliding_window")
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if attention_mask is None:
        ours = window is not None and causal and key.shape[2] == S
    elif ours := attention_mask.dim() == 2:
        padding = attention_mask[:, None, None]
    unusual = any(options.get(name) is not None for name in ("softcap", "position_bias", "cache"))
    if s_aux is not None:
        if unusual or options.get("output_attentions"):
            raise NotImplementedError(
                f"{NAME}: attention with sinks takes neither softcap, nor position_bias, nor a paged cache, and returns no "
                f"weights; call model.set_attn_implementation({WITH_SINKS!r})"
            )
        causal = ours or (attention_mask is None and causal and S > 1)
        if not ours:  # the mask alone decides, or there is none
            padding, window = attention_mask, None
    elif ours and (unusual or in_context_parallel()):
        # an equal mask [B or 1, 1, S, S]
        rows = torch.arange(S, device=query.device)
        behind = rows[:, None] - rows
        seen = (behind >= 0) & (behind < (window or S))
        attention_mask, ours = seen[None, None] if padding is None else padding & seen, False
    if s_aux is None and not ours:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    how = options.get("dropout", 0.0), options.get("scaling"), window, causal or ours
    return causal_attention(query, key, value, padding, s_aux, *how).transpose(1, 2).contiguous(), None


def mask_function(
    q_length: int, kv_length: int, q_offset=0, attention_mask: Tensor | None = None, **options
) -> Tensor | None:
    """Implements transformers' mask function: as "sdpa" does, but returns the padding mask [B, S], or None if nothing is
    padded, where the mask is only causal, within the configuration's window too, and keys are the queries' own."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    config, size = options.get("config"), options.get("local_size")
    # chunks of attention have a local size, too
    is_window = size is not None and size == getattr(config, "sliding_window", None)
    is_window = is_window and getattr(config, "attention_chunk_size", None) is None
    usual = is_window or options.get("mask_function", causal_mask_function) is causal_mask_function
    whole = not isinstance(q_offset, Tensor) and q_offset == options.get("kv_offset", 0) == 0 and q_length == kv_length
    if usual and whole and not options.get("use_vmap") and options.get("allow_is_causal_skip", True):
        if attention_mask is None:
            return None
        if attention_mask.dim() == 2 and attention_mask.shape[1] == kv_length:
            # kernels are quicker without a mask; what a tensor holds is not known where it is traced
            return None if not is_compiling() and bool(attention_mask.all()) else attention_mask
    if not (options.get("use_vmap") or is_compiling()):
        options["mask_function"] = functools.partial(by_rows, options.get("mask_function", causal_mask_function))
    return sdpa_mask(
        q_length=q_length, kv_length=kv_length, q_offset=q_offset, attention_mask=attention_mask, **options
    )


def by_rows(function: Callable[..., Tensor], batch: Tensor, head: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Evaluates a mask function of transformers for a sixteenth of the rows at a time, because differences of positions, in
    int64, take more than the mask. Arguments: positions that broadcast to [B, H, S, S]; rows: [1, 1, S, 1]."""
    one, two = (function(batch, head, rows[:, :, :count], keys) for count in (1, 2))
    if one.shape == two.shape:  # the mask is the same for all rows, or there is one row
        return function(batch, head, rows, keys)
    return torch.cat([function(batch, head, part, keys) for part in rows.chunk(16, 2)], 2)


def signature_of(forward) -> inspect.Signature:
    """Returns the signature of the class's forward, for an object that replaces it."""
    return inspect.signature(MethodType(type(forward.module).forward, forward.module))


class Unpacked:
    """Replaces the `forward` of a transformers model: a compiled call without mask and positions states that nothing is padded.

    Where positions are only traced, transformers takes them for those of packed sequences and makes a mask [B, 1, S, S]. It is
    an object, as `binding.Forward`, so that deepcopy and pickle follow it.
    """

    def __init__(self, module: nn.Module):
        self.module, self.previous = module, module.__dict__.get("forward")
        self.names = list(inspect.signature(type(module).forward).parameters)[1:]

    __signature__ = property(signature_of)

    def __call__(self, *args, **kwargs):
        if is_compiling():
            arguments = dict(zip(self.names, args, strict=False)) | kwargs
            x = arguments.get("inputs_embeds") if arguments.get("input_ids") is None else arguments["input_ids"]
            if x is not None and all(arguments.get(name) is None for name in OF_ROWS):
                padding = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
                args, kwargs = (), arguments | {"attention_mask": padding}
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return class_forward(self.module, args, kwargs)


def _source(model: nn.Module) -> str:
    """Returns the source of the file of the model's class; "" if there is none."""
    try:
        return inspect.getsource(sys.modules[type(model).__module__])
    except (OSError, TypeError, KeyError):
        return ""


def _replaced(model: nn.Module) -> str:
    """Returns the implementation that NAME replaces in this transformers model."""
    return REPLACED if getattr(type(model), "_supports_sdpa", False) or "s_aux=" not in _source(model) else WITH_SINKS


def _takes_padding(model: nn.Module) -> bool:
    """Returns whether all attention layers of this transformers model pass on the mask, which flash attention wants as [B,
    S], too, and their window. False if the source tests for the implementation that is replaced."""
    kind, source = type(model), _source(model)
    if not (getattr(kind, "_supports_flash_attn", False) and getattr(kind, "_supports_attention_backend", False)):
        return False
    # a row that sees nothing gives zeros here, but with "eager" only if there is a sink
    if _replaced(model) == WITH_SINKS and any(m.sinks is None for m in model.modules() if hasattr(m, "sinks")):
        return False
    name = REPLACED if _replaced(model) == REPLACED else f"['\"]{WITH_SINKS}"  # not eager_attention_forward
    if "ALL_ATTENTION_FUNCTIONS" not in source or re.search(rf"_attn_implementation\W.*{name}", source):
        return False
    if "sliding_window" in (getattr(model.config, "per_layer_attributes", None) or ()):  # each layer has its own
        return False
    window = getattr(model.config, "sliding_window", None)
    if window is None or "create_sliding_window_causal_mask" not in source:
        return True
    own = {m.sliding_window for m in model.modules() if hasattr(m, "sliding_window")}
    return "sliding_window=" in source and own <= {window, None}


def configurations(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Returns (model, configuration) of each transformers model inside."""
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None:
        return []
    return [(m, m.config) for m in model.modules() if isinstance(m, transformers.PreTrainedModel)]


def adopt(model: nn.Module) -> bool:
    """Sets the implementation NAME in the transformers models inside that have the one it replaces. Returns whether there
    are any."""
    configs = [c for m, c in configurations(model) if getattr(c, ATTRIBUTE, None) == _replaced(m) and _takes_padding(m)]
    if configs:
        register()
    for config in configs:
        setattr(config, ATTRIBUTE, NAME)
    return bool(configs)


def open_up(model: nn.Module) -> None:
    """Sets a forward in the outermost models with the implementation NAME, so that no mask is made where none was passed."""
    inner: set[int] = set()
    for m, config in configurations(model):  # the outermost first
        if id(m) not in inner and has_ours(config):
            inner.update(map(id, m.modules()))
            if {"attention_mask", "position_ids"} <= inspect.signature(type(m).forward).parameters.keys():
                m.forward = Unpacked(m)


def give_back(model: nn.Module) -> None:
    """Undoes `adopt` and `open_up`."""
    for m, config in configurations(model):
        forward = m.__dict__.get("forward")
        if isinstance(forward, Unpacked):
            del m.forward
            if forward.previous is not None:
                m.forward = forward.previous
        if has_ours(config):
            setattr(config, ATTRIBUTE, _replaced(m))


def has_ours(config) -> bool:
    """Returns whether a configuration names the implementation NAME."""
    return getattr(config, ATTRIBUTE, None) == NAME


def register() -> None:
    """Registers NAME with transformers, if it is installed and has such interfaces."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError:
        return
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_function)
