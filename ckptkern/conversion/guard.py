"""Guards a converted module: compares what its forward reads inside with what was checked: attributes of its modules, and of
the objects that these hold, such as configurations."""

from __future__ import annotations

import copy
import enum
import functools
import itertools
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..frozen import Frozen
from ..nn.unmodified import collecting_nothing, collects_first, dormant, hooked, untouched
from ..segments.recorded import class_forward
from ..subclasses import PLAIN
from .protection import FULLY_SHARD, seeded, unmoved
from .quantized import REPACKS, is_quantised
from .report import AGAIN, warn_of
from .trace import PLAIN_VALUES, Call, leaves_of, recomputed

# The attributes of an object that were read, by name, with the Reads of their values. None: any attribute.
Reads = dict[str, Any]

OF_EVERY_MODULE = frozenset((*vars(nn.Module()), "forward"))  # attributes of every module, which are not compared
CONTAINERS = (list, dict, set, tuple)
# Compared by ==.
VALUES = (*PLAIN_VALUES, bytes, complex, slice, range, torch.dtype, torch.device, torch.Size, enum.Enum)
CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, type, types.ModuleType)
UNREAD = (*VALUES, *CONTAINERS, *CODE, nn.Module, Tensor)  # values whose attributes are not noted


class _Recorder:
    """Notes attributes that are read while classes have its `__getattribute__`. of: objects by id, with the names that were
    read and, where that is an object, the value."""

    def __init__(self, module: nn.Module):
        self.of: dict[int, tuple[object, dict]] = {id(m): (m, {}) for m in module.modules()}
        self.whole: set[int] = set()  # ids of objects whose __dict__ was read, or whose reads cannot be seen
        self.classes: dict[type, Callable | None] = {}  # with their own __getattribute__, if any
        for m in list(module.modules()):
            self.observe(m)

    def observe(self, owner) -> None:
        kind = type(owner)
        if kind in self.classes:
            return
        read, own = kind.__getattribute__, vars(kind).get("__getattribute__")

        def noted(self_, name):
            if id(self_) not in self.of:
                return read(self_, name)
            names = self.of[id(self_)][1]
            names.setdefault(name, None)
            value = read(self_, name)
            if name == "__dict__":
                # nn.Module looks there for parameters
                if sys._getframe(1).f_code.co_filename != nn.modules.module.__file__:
                    self.whole.add(id(self_))
            elif id(value) in self.of and not isinstance(value, nn.Module):
                names[name] = value
            elif not isinstance(value, UNREAD) and isinstance(getattr(value, "__dict__", None), dict):
                names[name] = value
                self.of[id(value)] = value, {}
                self.observe(value)
            return value

        try:
            kind.__getattribute__ = noted  # type: ignore[method-assign, assignment]
        except TypeError:  # a class that is not written in Python
            self.whole.add(id(owner))
        else:
            self.classes[kind] = own

    def stop(self) -> None:
        for kind, own in self.classes.items():
            if own is None:
                del kind.__getattribute__
            else:
                kind.__getattribute__ = own  # type: ignore[method-assign]

    def reads(self, owner, above: frozenset[int] = frozenset()) -> Reads | None:
        if id(owner) in self.whole:
            return None
        common, above = (OF_EVERY_MODULE if isinstance(owner, nn.Module) else ()), above | {id(owner)}
        return {
            name: {} if value is None or id(value) in above else self.reads(value, above)
            for name, value in self.of[id(owner)][1].items()
            if name not in common and not name.startswith("__") and not hasattr(nn.Module, name)
        }


def reads_of(module: nn.Module, call: Call) -> dict[str, Reads | None]:
    """Returns what the class's forward reads in training and in evaluation, by the path of each module inside."""
    with seeded(), unmoved(module), torch.no_grad(), collecting_nothing():
        (args, kwargs), reads = call, {}
        for mode in (True, False):
            module.train(mode)  # what it reads does not count
            recorder = _Recorder(module)
            try:
                class_forward(module, args, kwargs)
            finally:
                recorder.stop()
            reads = all_reads(reads, {path: recorder.reads(m) for path, m in module.named_modules()})
        return reads


def all_reads(reads: Reads | None, other: Reads | None):
    """Returns all that either has read."""
    if reads is None or other is None:
        return None
    return {name: all_reads(reads.get(name, {}), other.get(name, {})) for name in {**reads, **other}}


# Attributes that change no result: `not_repacked` switches the first off while a module is read, and by the others
# transformers decides whether to checkpoint what is a checkpoint already.
HARMLESS = (REPACKS, "gradient_checkpointing", "_gradient_checkpointing_func")


def is_container(value) -> bool:
    """Returns whether the value is a container whose == has a truth value."""
    if not isinstance(value, CONTAINERS):
        return False
    held = value.values() if isinstance(value, dict) else value
    return not any(
        hasattr(item, "__array__") or (isinstance(item, CONTAINERS) and not is_container(item)) for item in held
    )


def snapshot(value):
    """Returns a copy of nested containers, which later changes in place do not reach."""
    return recomputed(value, (copy.copy(v) if isinstance(v, CONTAINERS) else v for v in leaves_of(value)))


def ties_of(module: nn.Module) -> list[tuple[nn.Module, str, nn.Module, str]]:
    """Returns (module, name, module, name) for each pair of tied parameters. The fused call takes the first."""
    first: dict[int, tuple[nn.Module, str]] = {}
    ties = []
    for m in module.modules():
        for name, p in m._parameters.items():
            if p is not None and first.setdefault(id(p), (m, name)) != (m, name):
                ties.append((*first[id(p)], m, name))
    return ties


class Held(NamedTuple):
    """Holds the attributes that forward reads of a module, or of an object that it holds.

    path: of the module, and of the attributes that lead to the object. values: plain values and containers, by name; objects:
    others, which are compared by identity; absent: names that were not there; known: all names, where forward may read any
    attribute.
    """

    owner: Any
    path: str
    values: dict
    objects: dict
    absent: frozenset[str]
    known: frozenset[str] | None = None


def held_of(owner, path: str, reads: Reads | None, skipped: Collection[str] = ()) -> Iterator[Held]:
    """Yields the Held of the owner, and of the objects that it holds."""
    own, is_module = vars(owner), isinstance(owner, nn.Module)
    names = [name for name in (own if reads is None else reads) if name not in skipped]
    if is_module:
        names = [name for name in names if name not in OF_EVERY_MODULE and not name.startswith(FULLY_SHARD)]
    absent = frozenset(names) - own.keys()
    if is_module:
        absent -= owner._parameters.keys() | owner._buffers.keys() | owner._modules.keys()
    held = Held(owner, path, {}, {}, absent, frozenset(own) if reads is None else None)
    for name in names:
        value = own.get(name)
        if name not in own or isinstance(value, Tensor):
            continue
        if isinstance(value, VALUES) or is_container(value):
            held.values[name] = snapshot(value)
        else:
            held.objects[name] = value
            if reads is not None and reads[name] != {} and isinstance(getattr(value, "__dict__", None), dict):
                yield from held_of(value, joined(path, name), reads[name])
    if any(held[2:]):
        yield held


class Watch:
    """Tells whether the inside of a module is still what was checked: submodules, their classes and hooks, the attributes that
    its forward reads of them and of what they hold, such as a configuration, and plain parameters.

    A call costs a few comparisons of lists. A change that does not matter, such as another attribute, is compared in full once.
    """

    def __init__(
        self,
        module: nn.Module,
        reads: dict[str, Reads | None],
        live: Collection[tuple[str, str]] = (),
        routers: Collection[str] = (),
    ):
        """Notes the present inside. reads: by the path of each module (reads_of); live: (path, attribute) that each call
        reads anew; routers: paths of modules whose hooks collect logits."""
        self.module, self.routers = module, [module.get_submodule(path) for path in routers]
        # paths, modules, their classes, children and own forwards, as those of converted parts
        self.structure = [
            (path, m, type(m), dict(m._modules), vars(m).get("forward")) for path, m in module.named_modules()
        ]
        held = [
            item
            for path, m in module.named_modules()
            for item in held_of(m, path, reads.get(path, {}), {*HARMLESS, *(name for of, name in live if of == path)})
        ]
        self.held = list({id(item.owner): item for item in held}.values())  # a shared configuration counts once
        self.ties = ties_of(module)
        self.kinds = PLAIN.union(type(p) for p in module.parameters() if is_quantised(p) or isinstance(p, Frozen))
        self.compared: Callable[[bool], bool] | None = None

    def __getstate__(self) -> dict:
        return self.__dict__ | {"compared": None}

    def comparison(self) -> Callable[[bool], bool]:
        """Returns the function that `unchanged` calls, with what it compares looked up beforehand: live views, and their
        checked values."""
        _, modules, (_, *classes), children, _ = map(list, zip(*self.structure, strict=True))
        live, inner = [m._modules for m in modules], modules[1:]
        hooks = [
            d for m in inner for d in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        ]
        collecting = {id(m._forward_hooks) for m in self.routers}  # the hooks of routers, which get the logits
        valued = [(vars(held.owner), held.values) for held in self.held if held.values]
        settings = [(operator.itemgetter(*names), d) for d, names in valued]
        values = [operator.itemgetter(*names)(names) for _, names in valued]
        parameters = [m._parameters.values() for m in modules if m._parameters]
        modes = [vars(m) for m in inner if m._modules]
        attributes = list(({id(m): vars(m) for m in inner} | {id(h.owner): vars(h.owner) for h in self.held}).values())
        counts = [-1] * len(attributes)
        objects = [(vars(held.owner), name, value) for held in self.held for name, value in held.objects.items()]

        def is_equal(collects):
            training = self.module.training
            if list(map(len, attributes)) != counts:
                if next(self.added(), None):
                    return False
                counts[:] = map(len, attributes)
            return (
                live == children
                and list(map(type, inner)) == classes
                and (
                    not any(hooks)
                    or all(collects_first(d) if collects and id(d) in collecting else dormant(d) for d in hooks if d)
                )
                and [get(d) for get, d in settings] == values
                and self.kinds.issuperset(map(type, itertools.chain.from_iterable(parameters)))
                and all([mode["training"] is training for mode in modes])  # noqa: C419 (a list is quicker than a generator)
                and not (objects and any(d.get(name) is not value for d, name, value in objects))
                and not (
                    self.ties and any(a._parameters[name] is not b._parameters[as_] for a, name, b, as_ in self.ties)
                )
            )

        return is_equal

    def unchanged(self, collects: bool = True) -> bool:
        """Returns whether the inside is what was checked. collects: hooks of routers may collect logits."""
        try:
            self.compared = self.compared or self.comparison()
            return self.compared(collects)
        except Exception:  # comparing someone's objects may raise anything: tensors in lists have no truth value
            return False

    def added(self) -> Iterator[str]:
        """Yields the new attributes and hooks that forward would read or run."""
        for path, m, _, _, forward in self.structure[1:]:
            if not untouched(m) and (hooked(m) or vars(m).get("forward") is not forward):
                yield f"{path} has a hook, or a forward of its own"
        for owner, path, _, _, absent, known in self.held:
            now = vars(owner).keys()
            for name in now & absent if known is None else now - known - OF_EVERY_MODULE:
                yield f"{joined(path, name)} is {vars(owner)[name]!r}"

    def differences(self) -> Iterator[str]:
        """Yields what differs from what was checked."""
        training = self.module.training
        for path, m, kind, children, _ in self.structure:
            if path and type(m) is not kind:
                yield f"{path} is of class {type(m).__name__}, and was {kind.__name__}"
            for name in m._modules.keys() | children.keys():
                now, was = m._modules.get(name), children.get(name)
                if now is not was:
                    yield f"{joined(path, name)} is another module: a {type(now).__name__}, and was a {type(was).__name__}"
            for name, p in m._parameters.items():
                if type(p) not in self.kinds:
                    yield f"{joined(path, name)} is a {type(p).__name__}"
            if children and m.training is not training:
                yield f"{path} is in {'training' if m.training else 'evaluation'} mode, unlike the layer that it is in"
        yield from self.added()
        for path, m, *_ in self.structure:
            if m in self.routers and m._forward_hooks and not collects_first(m._forward_hooks):
                yield f"{path} has a hook that does not collect its logits"
        for owner, path, values, objects, *_ in self.held:
            for name, was in (values | objects).items():
                now = vars(owner).get(name)
                if now is not was and (name in objects or now != was):
                    yield f"{joined(path, name)} is {now!r}, and was {was!r}"
        for a, name, b, as_ in self.ties:
            if a._parameters[name] is not b._parameters[as_]:
                yield f"the parameters {name} and {as_} are no longer tied"

    def difference(self) -> str:
        """Returns the first difference from what was checked, with the remedy."""
        try:
            cause = next(self.differences(), "something inside cannot be compared")
        except Exception as error:  # comparing someone's objects may raise anything
            cause = f"comparing what is inside raises {type(error).__name__}: {error}"
        return f"{cause}. {AGAIN}"

    def warn(self, name: str) -> None:
        """Warns that a compiled call of the module runs as an activation checkpoint."""
        warn_of(name, "checkpointed", type(self.module).__name__, self.difference())


def joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# torch.compile calls them once, and does not trace them
Watch.unchanged._dynamo_marked_constant = Watch.warn._dynamo_marked_constant = True
