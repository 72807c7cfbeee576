"""Evaluates the arguments of a fused op from the module and the call, by a template with an entry for each argument."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..frozen import Frozen, is_made_of
from ..subclasses import PLAIN
from .computed import Computed, Inputs, templates
from .quantized import compute_dtype
from .reading import SCALING, Argument, Probability, Scale, Update, Weight

# Each of these returns one argument's value in a call. They are objects or partial functions, not closures, so that deepcopy
# and pickle work; `parameters` is the module's own dict, and a copy refers to the dict of the copied module.


@dataclass
class Parameter:
    parameters: dict[str, Tensor]
    name: str
    taken: Weight
    owner: nn.Module
    frozen: Frozen | None = None  # replaces a quantised parameter in an op

    def __call__(self, call: Inputs) -> Tensor:
        value, (_, form, part, count) = self.parameters[self.name], self.taken
        is_plain = type(value) in PLAIN and value.is_floating_point()
        if not (is_plain or isinstance(value, Frozen)) and self.hold():
            value = self.frozen
        if form == "a":
            return value.unflatten(0, (count, -1))
        if form == "b":
            return value.unflatten(1, (-1, count)).permute(2, 0, 1)
        if count == 1:
            return in_form(value, form, call.length)
        key = id(self.parameters), self.name, count
        if key not in call.parts:
            call.parts[key] = in_form(value, form, call.length).chunk(count)
        return call.parts[key][part]

    def hold(self) -> bool:
        """Creates the Frozen of a quantised parameter, unless the held one has the same tensors and dtype. Returns True."""
        value, held, dtype = self.parameters[self.name], self.frozen, compute_dtype(self.owner)
        value = self.owner if type(value) in PLAIN else value  # bitsandbytes' parametrization of it
        if held is None or not is_made_of(value, held.parts) or held.dtype != (dtype or held.dtype):
            self.frozen = Frozen(value, dtype=dtype)
        return True

    def __getstate__(self) -> dict:
        return self.__dict__ | {"frozen": None}


Parameter.hold._dynamo_marked_constant = (
    True  # torch.compile calls it once, and its graph takes what is held as an input
)


def argument_of(index: int, form: str, call: Inputs):
    return in_form(call.flat[index], form, call.length)


def probability_of(module: nn.Module | None, attribute: str, value: float, call: Inputs) -> float:
    if module is None:
        return value if call.training else 0.0
    return getattr(module, attribute) if module.training else 0.0


def scale_of(module: nn.Module, adapter: str, call: Inputs) -> float:
    return getattr(module, SCALING)[adapter]


@dataclass
class Arguments:
    """Evaluates a template in a call. live: the entries that each call evaluates; kind: dict (by name), tuple or list;
    switches: by the name of a low-rank update, the layer whose SWITCH leaves it out."""

    template: dict
    live: list[tuple[Any, Callable[[Inputs], Any]]]
    kind: type
    switches: dict[str, nn.Module]

    def __call__(self, call: Inputs):
        arguments = self.template | {name: get(call) for name, get in self.live}
        for name, layer in self.switches.items():
            if getattr(layer, SWITCH):
                del arguments[name]
        if self.switches and not arguments:
            return None
        return arguments if self.kind is dict else self.kind(arguments.values())


SWITCH = "_disable_adapters"  # of peft's layers: true while the low-rank update is left out, as in disable_adapter()


def switch_of(module: nn.Module, update: Update) -> str | None:
    """Returns the path of the layer that leaves the update out while its SWITCH is true; None if there is none."""
    path = update.a.path
    while path:
        path = path.rpartition(".")[0]
        if SWITCH in vars(module.get_submodule(path)):
            return path
    return None


def live_attributes(module: nn.Module, template) -> set[tuple[str, str]]:
    """Returns the (path, name) of each attribute that every call reads anew."""
    switches = (switch_of(module, update) for update in templates(template, Update))
    return {
        *((probability.path, probability.attribute) for probability in templates(template, Probability)),
        *((scale.path, SCALING) for scale in templates(template, Scale)),
        *((path, SWITCH) for path in switches if path is not None),
    }


@contextlib.contextmanager
def rescaled(module: nn.Module, template: dict) -> Iterator[bool]:
    """Changes the scales of low-rank updates for a while. Yields whether there are any."""
    held = {scale: getattr(module.get_submodule(scale.path), SCALING) for scale in templates(template, Scale)}
    before = [dict(scales) for scales in held.values()]
    for i, (scale, scales) in enumerate(held.items()):
        scales[scale.adapter] *= 1.5 + i
    try:
        yield bool(held)
    finally:
        for scales, was in zip(held.values(), before, strict=True):
            scales.update(was)


def getter(module: nn.Module, value) -> Callable[[Inputs], Any] | None:
    """Returns a function from a call's Inputs to the live value of a template's entry; None for a constant."""
    if isinstance(value, Weight):
        path, _, name = value.path.rpartition(".")
        owner = module.get_submodule(path)
        return Parameter(owner._parameters if name in owner._parameters else owner._buffers, name, value, owner)
    if isinstance(value, Argument):
        return partial(argument_of, *value)
    if isinstance(value, Computed):
        return partial(value.of, module)
    if isinstance(value, Probability):
        owner = module.get_submodule(value.path) if value.attribute else None
        return partial(probability_of, owner, value.attribute, value.value)
    if isinstance(value, Scale):
        return partial(scale_of, module.get_submodule(value.path), value.adapter)
    if isinstance(value, (dict, tuple, list)):
        arguments = arguments_getter(module, value)
        return arguments if arguments.live else None
    return None


def arguments_getter(module: nn.Module, template: dict | tuple | list) -> Arguments:
    kind = tuple if isinstance(template, tuple) else type(template)
    values = template if kind is dict else dict(enumerate(template))
    live = [(name, get) for name, value in values.items() if (get := getter(module, value))]
    switches = {
        name: module.get_submodule(path)
        for name, value in values.items()
        if isinstance(value, Update) and (path := switch_of(module, value)) is not None
    }
    return Arguments(values, live, kind, switches)


# Rotary tables in the op's form, by the original tensor, which the layers of one forward share.
_TABLES = WeakTensorKeyDictionary()


def in_form(tensor: Tensor, form: str, length: int) -> Tensor:
    """Returns an argument in the form that the op reads: "" unchanged, "t" transposed, "+1" plus one.

    Masks: "last columns" takes the last `length` columns; "all heads" adds the dimension of heads to [B, S] of keys or
    [B, S, S] of rows and keys.
    Rotary tables, [..., 1, S, R] or [B, S, 1, R], cut to `length` rows: "table" unchanged; "twice", "each twice" and
    "sublayers" repeat columns that are stored once, or in another order than the op's; "real" and "imag" take a part of a
    complex table [..., S, R / 2].
    """
    if not form:
        return tensor
    if form in ("t", "+1"):
        return tensor.t() if form == "t" else tensor + 1
    if form == "last columns":
        return tensor[..., -length:]
    if form == "all heads":
        return tensor[:, None, None] if tensor.dim() == 2 else tensor[:, None]
    if (
        form == "table"
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or tensor.requires_grad
        or tensor.is_inference()
        or torch.is_inference_mode_enabled()
        or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return table_of(tensor, form, length)
    state = tensor._version, tensor.data_ptr()
    held = _TABLES.get(tensor)
    if held is None or held[0] != state:
        held = _TABLES[tensor] = state, {}
    tables = held[1]
    if (form, length) not in tables:
        tables[form, length] = table_of(tensor, form, length)
    return tables[form, length]


def table_of(tensor: Tensor, form: str, length: int) -> Tensor:
    """Returns a rotary table in the form that the op reads."""
    if tensor.dim() == 4:
        tensor = tensor.squeeze(1 if tensor.shape[1] == 1 else 2)
    tensor = tensor[..., :length, :]
    if form in ("real", "imag"):
        tensor, form = getattr(tensor, form), "each twice"
    if form == "sublayers":
        tensor, form = tensor[..., : tensor.shape[-1] // 2], "each twice"
    if form == "twice":
        return torch.cat((tensor, tensor), -1)
    return tensor.repeat_interleave(2, -1) if form == "each twice" else tensor


def values_of(template: dict, *names: str) -> Iterator:
    """Yields the values that an op, or each of its sublayers, has under these argument names."""
    for key, value in template.items():
        if isinstance(value, dict):
            yield from values_of(value, *names)
        elif key in names:
            yield value


def named(template: dict, *names: str) -> Iterator[Argument]:
    """Returns the call's arguments that an op, or each of its sublayers, has under these argument names."""
    return templates(list(values_of(template, *names)), Argument)
