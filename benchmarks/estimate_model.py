"""Builds the language model of a transformers configuration on the meta device, at its real widths, and converts it there.

convert checks numbers, which meta tensors do not have. So it runs on a narrow model of the same configuration on the CPU, with
the first layers of each kind, a narrow MLP and a small vocabulary. The forwards that it sets are copied to the real model: each
layer gets that of the narrow layer of its kind. Which op replaces a layer does not depend on widths; a layer that an op refuses
nevertheless runs its original forward, and `original_of` names it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..conversion import Conversion, convert, masks
from ..conversion.alike import same_inside
from ..conversion.binding import Forward, Fused

NARROW, CLASSES, TOKENS = 64, 256, 8  # of the narrow model: its MLP's width, its vocabulary, the tokens of its call
HEAD = 8  # the narrow model's width, for each head: rotary embeddings halve it, and some rotate a half of it
MLP_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size")  # how names of settings end


def read_config(path: str) -> Any:
    """Returns the configuration in a config.json, or in a folder with one. Raises ValueError with the reason."""
    from transformers import CONFIG_MAPPING

    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise ValueError(
            f"there is no file {file}. CONFIG is a config.json of transformers, or a folder with one; nothing is downloaded. "
            "Get it from the model's page, as with: hf download NAME config.json --local-dir FOLDER"
        )
    try:
        fields = json.loads(file.read_text())
        kind = fields["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} is not a config.json of transformers ({type(error).__name__}: {error}): pass a JSON object with a "
            "model_type"
        ) from None
    if kind not in CONFIG_MAPPING:
        raise ValueError(
            f"{file} has model_type {kind!r}, which the installed transformers does not know: upgrade transformers"
        )
    config = CONFIG_MAPPING[kind].from_dict(fields)
    return config.get_text_config()


class LoRA(NamedTuple):
    """Adapters of a rank and dtype. targets: suffixes of the names of layers that get one; None: all linear layers."""

    rank: int
    dtype: torch.dtype
    targets: tuple[str, ...] | None = None


class Adapter(nn.Module):
    """A frozen linear layer with a low-rank update, in the structure of peft's `lora.Linear` (0.21), which convert reads."""

    def __init__(self, base: nn.Module, lora: LoRA):
        super().__init__()
        n, k = base.weight.shape if isinstance(base, nn.Linear) else base.weight.shape[::-1]  # a Conv1D's is transposed
        like = {"bias": False, "dtype": lora.dtype, "device": base.weight.device}
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(k, lora.rank, **like)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(lora.rank, n, **like)})
        self.scaling = {"default": 2.0}

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        a, b = self.lora_A["default"], self.lora_B["default"]
        return (y + b(a(x.to(a.weight.dtype))) * self.scaling["default"]).to(y.dtype)


def adapt(model: nn.Module, lora: LoRA) -> nn.Module:
    """Freezes the model and puts adapters around linear layers of its layers, as peft's "all-linear" or target_modules does.
    Raises ValueError if no name matches."""
    from transformers.pytorch_utils import Conv1D

    name, layers = layers_of(model.requires_grad_(False))
    linear = {path: module for path, module in layers.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
    ends = tuple(f".{target}" for target in lora.targets or ())
    taken = [path for path in linear if lora.targets is None or f".{path}".endswith(ends)]
    if not taken:
        known = dict.fromkeys(path.rpartition(".")[2] for path in linear)
        raise ValueError(
            f"--lora-targets: no linear layer of {name} is of these names, but {', '.join(known) or 'none'}"
        )
    for path in taken:
        owner, _, last = path.rpartition(".")
        setattr(layers.get_submodule(owner), last, Adapter(linear[path], lora))
    return model


def built(config: Any, dtype: torch.dtype, device: str, lora: LoRA | None = None) -> nn.Module:
    """Returns the causal language model of a configuration, in training mode, with random parameters. Raises ValueError for
    others."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{config.model_type} is not a causal language model of transformers: use `python -m ckptkern report` with a "
            "function that returns the model and its inputs"
        )
    with torch.random.fork_rng([]), torch.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        own = copy.deepcopy(config)  # which convert changes
        model = AutoModelForCausalLM.from_config(own, dtype=dtype, attn_implementation="sdpa").train()
        return adapt(model, lora) if lora else model


def layers_of(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Returns the name and the list of the model's layers. Raises ValueError if no list is as long as the configuration
    says."""
    count = model.config.num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise ValueError(f"{type(model).__name__} has no list of its {count} layers: use `python -m ckptkern report`")


def kinds_of(model: nn.Module) -> list[int]:
    """Returns for each layer the index of the first layer that is like it."""
    name, layers = layers_of(model)
    first: list[int] = []
    for i, layer in enumerate(layers):
        like = (j for j in dict.fromkeys(first) if same_inside(f"{name}.{i}", layer, f"{name}.{j}", layers[j]))
        first.append(next(like, i))
    return first


def pick_layers(config: Any, places: Sequence[int]) -> None:
    """Leaves a configuration these layers, in this order, and their values in its lists with a value per layer."""
    for name, value in list(vars(config).items()):
        if isinstance(value, (list, tuple)) and len(value) == config.num_hidden_layers:
            setattr(config, name, [value[i] for i in places])
    config.num_hidden_layers = len(places)


def narrow_config(config: Any, layers: int) -> Any:
    """Returns the configuration with fewer layers, a narrow MLP and a small vocabulary."""
    narrow = copy.deepcopy(config)
    width, heads = config.hidden_size, config.num_attention_heads
    pick_layers(narrow, range(layers))
    for name, value in list(vars(narrow).items()):
        if name.endswith(MLP_WIDTHS):
            value = [min(n, NARROW) for n in value] if isinstance(value, list) else value and min(value, NARROW)
        if name.endswith("token_id") and isinstance(value, int) and value >= CLASSES:
            value = 0
        setattr(narrow, name, value)
    if getattr(config, "head_dim", None) is None:
        narrow.head_dim = width // heads
    narrow.hidden_size, narrow.vocab_size = min(width, HEAD * heads), CLASSES
    return narrow


def convert_like_narrow(real: nn.Module, lora: LoRA | None = None) -> Conversion:
    """Converts a model on the meta device as `convert` converts a narrow one, and returns the narrow one's Conversion."""
    first = kinds_of(real)
    dtype = next(real.parameters()).dtype
    narrow = built(narrow_config(real.config, max(2, 1 + max(first))), dtype, "cpu", lora)
    ids = torch.arange(TOKENS)[None]
    with one_thread():
        conversion = convert(narrow, input_ids=ids, labels=ids, use_cache=False)
    masks.adopt(real)
    bind(narrow, real, first)
    return conversion


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Runs narrow matmuls in one thread: on two busy cores threads wait for each other, and convert took 30 times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def bind(narrow: nn.Module, real: nn.Module, first: Sequence[int]) -> None:
    """Copies the forwards of the narrow model's modules to the real model's. first: of each real layer, the narrow one."""
    of, modules = layers_of(real)[0], dict(narrow.named_modules())
    for name, module in real.named_modules():
        ours = theirs = of
        inner = name.removeprefix(f"{of}.")
        if inner != name:
            number = inner.partition(".")[0]
            ours, theirs = f"{of}.{number}", f"{of}.{first[int(number)]}"
        source = modules[name.replace(ours, theirs, 1)].__dict__.get("forward")
        if source is not None:
            module.forward = copy.deepcopy(source, counterparts(narrow, real, theirs, ours))
    watch_anew(real)


def counterparts(narrow: nn.Module, real: nn.Module, theirs: str, ours: str) -> dict[int, Any]:
    """Returns deepcopy's memo in which each module, parameter, buffer and configuration of the narrow model has the real
    one's as its copy. theirs, ours: the narrow model's layer, and the real one in its place."""
    memo: dict[int, Any] = {}
    modules = dict(real.named_modules())
    for name, module in narrow.named_modules():
        is_inside = f"{name}.".startswith(f"{theirs}.")
        other = modules[f"{ours}{name.removeprefix(theirs)}" if is_inside else name]
        memo[id(module)] = other
        for own, others in ((module._parameters, other._parameters), (module._buffers, other._buffers)):
            memo |= {id(tensor): others[key] for key, tensor in own.items() if tensor is not None}
        if hasattr(module, "config"):
            memo[id(module.config)] = other.config
    return memo


def forwards_of(model: nn.Module) -> Iterator[Forward]:
    """Returns the forwards that convert set, and those of runs in an nn.Sequential."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, Forward):
            yield forward
            yield from (run for *_, run in getattr(forward, "runs", ()))


def watch_anew(model: nn.Module) -> None:
    """Makes the present state of all layers and their configuration the checked one."""
    for forward in forwards_of(model):
        if isinstance(forward, Fused):
            forward.watch_anew()


def original_of(model: nn.Module) -> list[str]:
    """Returns the classes of modules whose original forward ran in training since their conversion, also as a checkpoint
    that was not a part of it."""
    ran = (forward for forward in forwards_of(model) if forward.calls["original"] or forward.differs)
    return list(dict.fromkeys(type(forward.module).__name__ for forward in ran))


@contextlib.contextmanager
def only(model: nn.Module, picks: Sequence[int]) -> Iterator[None]:
    """Leaves the model only these layers, in this order, inside the block, and its configuration their values."""
    name, layers = layers_of(model)
    before = dict(vars(model.config))
    parent = model.get_submodule(name.rpartition(".")[0])
    try:
        setattr(parent, name.rpartition(".")[2], nn.ModuleList([layers[i] for i in picks]))
        pick_layers(model.config, picks)
        watch_anew(model)
        yield
    finally:
        setattr(parent, name.rpartition(".")[2], layers)
        vars(model.config).update(before)
        watch_anew(model)
