"""Guards a converted module: compares its inside with what was checked."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..frozen import Frozen
from ..nn.unmodified import collects_first, dormant, untouched
from ..subclasses import PLAIN
from .quantized import REPACKS, is_quantised
from .trace import PLAIN_VALUES, plain_attributes

OF_EVERY_MODULE = frozenset((*vars(nn.Module()), "forward"))  # attributes
COMPOSED = "__composable_api_state_key"  # begins the names of those in which fully_shard keeps its state


def inside(value: object) -> list | dict | set | None:
    """What a container or an object holds, to be compared later; None if it holds tensors or arrays, whose == has no truth
    value."""
    held = value if isinstance(value, (list, dict, set)) else getattr(value, "__dict__", None)
    if not isinstance(held, (list, dict, set)):
        return None
    items = held.values() if isinstance(held, dict) else held
    return None if any(hasattr(one, "__array__") for one in items) else held


def is_container(value: object) -> bool:
    """Is it a list, dict or set that can be compared?"""
    return type(value) in (list, dict, set) and inside(value) is not None


def objects_of(module: nn.Module) -> list[tuple[nn.Module, str, object]]:
    """(module, name, value) of attributes that are neither plain nor tensors: functions, lists, configurations."""
    return [
        (m, name, value)
        for m in module.modules()
        for name, value in m.__dict__.items()
        if not (name in OF_EVERY_MODULE or type(value) in PLAIN_VALUES or isinstance(value, Tensor))
        and not name.startswith(COMPOSED)
    ]


def ties_of(module: nn.Module) -> list[tuple[nn.Module, str, nn.Module, str]]:
    """(module, name, module, name) of parameters that are one: the fused call takes the first."""
    first: dict[int, tuple[nn.Module, str]] = {}
    ties = []
    for m in module.modules():
        for name, p in m._parameters.items():
            if p is not None and first.setdefault(id(p), (m, name)) != (m, name):
                ties.append((*first[id(p)], m, name))
    return ties


class Compared(NamedTuple):
    """What a call of Watch.unchanged compares, looked up beforehand: views of live things, and what they were."""

    hooks: list[dict]  # all empty
    children: list[Any]  # views of each parent's children
    below: list[nn.Module]  # what they were, in one list
    classes: list[type]  # of these
    settings: list[tuple[Callable, dict]]  # getters of plain attributes, and the dicts that they read
    values: list[Any]
    parameters: list[Any]  # views of each module's
    modes: list[dict]  # that hold `training`, of modules with children
    attributes: list[dict]
    counts: list[int]  # of the attributes
    objects: list[tuple[dict, str, object]]
    containers: list[tuple[dict, str]]
    were: list[object]
    contents: list[Any]  # what containers and configurations hold
    held: list[Any]
    given: list[dict]  # hooks of routers, which a call gives the logits


class Watch:
    """Whether the inside of a module is still what was checked: its submodules, their classes, hooks and attributes, what
    configurations and lists among these hold, and parameters that are plain memory.

    A call pays for a few comparisons of lists. A change that does not matter, such as another attribute, is compared in full
    once.
    """

    def __init__(self, module: nn.Module, live: Collection[tuple[str, str]], given: Collection[str] = ()):
        """live: (path, attribute) of what each call reads anew; given: paths of modules whose hooks a call gives what they
        collect."""
        self.module, self.given = module, [module.get_submodule(path) for path in given]
        self.structure = [
            (m, type(m), tuple(m._modules.items()), self.settings(path, m, live)) for path, m in module.named_modules()
        ]
        objects = objects_of(module)
        # another container that holds the same is as good: libraries replace them
        self.containers = [one for one in objects if is_container(one[2])]
        self.were = [copy.copy(value) for *_, value in self.containers]
        self.objects = [one for one in objects if not is_container(one[2])]
        # a configuration that several modules share is compared once
        held = {id(value): (value, inside(value)) for _, _, value in self.objects}
        self.contents = [(value, copy.copy(now)) for value, now in held.values() if now]
        self.ties = ties_of(module)
        self.kinds = PLAIN.union(type(p) for p in module.parameters() if is_quantised(p) or isinstance(p, Frozen))
        self.compared: Compared | None = None
        self.counts: list[int] | None = None  # in a copy, those of its original: it may change before its first call

    @staticmethod
    def settings(path: str, module: nn.Module, live: Collection[tuple[str, str]]) -> dict[str, Any]:
        if type(module) is nn.Linear:  # its attributes only describe it
            return {}
        # `not_repacked` switches REPACKS off while a module is read; it changes no result
        others = {"training", REPACKS, *(name for where, name in live if where == path)}
        return {name: value for name, value in plain_attributes(module).items() if name not in others}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"compared": None, "counts": self.compared and list(self.compared.counts)}

    def prepared(self) -> Compared:
        modules = [m for m, *_ in self.structure]
        inner = modules[1:]
        below = [child for _, _, children, _ in self.structure for _, child in children]
        kinds = {id(None): type(None), **{id(m): kind for m, kind, *_ in self.structure}}  # a child may be None
        plain = [(m.__dict__, settings) for m, _, _, settings in self.structure if settings]
        settings = [(operator.itemgetter(*names), d) for d, names in plain]
        attributes = [m.__dict__ for m in inner]
        self.compared = Compared(
            hooks=[
                d
                for m in inner
                for d in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
                if not (d is m._forward_hooks and m in self.given)
            ],
            children=[m._modules.values() for m, _, children, _ in self.structure if children],
            below=below,
            classes=[kinds[id(m)] for m in below],
            settings=settings,
            values=[get(names) for (get, _), (_, names) in zip(settings, plain, strict=True)],
            parameters=[m._parameters.values() for m in modules if m._parameters],
            modes=[m.__dict__ for m, _, children, _ in self.structure[1:] if children],
            attributes=attributes,
            counts=self.counts or list(map(len, attributes)),
            objects=[(m.__dict__, name, value) for m, name, value in self.objects],
            containers=[(m.__dict__, name) for m, name, _ in self.containers],
            were=self.were,
            contents=[inside(value) for value, _ in self.contents],
            held=[was for _, was in self.contents],
            given=[m._forward_hooks for m in self.given],
        )
        return self.compared

    def unchanged(self, collects: bool = True) -> bool:
        """collects: may hooks of routers collect logits?"""
        try:
            return self.is_equal(collects)
        except Exception:  # comparing someone's objects may raise anything: tensors in lists have no truth value
            return False

    def is_equal(self, collects: bool) -> bool:
        (
            hooks, children, below, classes, settings, values, parameters, modes, attributes, counts, objects, containers, were,
            contents, held, given,
        ) = self.compared or self.prepared()  # fmt: skip
        training, flat = self.module.training, itertools.chain.from_iterable
        if list(map(len, attributes)) != counts:
            if not all(untouched(m) for m, *_ in self.structure[1:]) or any(
                names.keys() - m.__dict__ for m, *_, names in self.structure
            ):
                return False
            counts[:] = map(len, attributes)
        live = list(flat(children))
        return (
            live == below
            and list(map(type, live)) == classes
            and (not any(hooks) or all(map(dormant, filter(None, hooks))))
            and (not any(given) or all(map(collects_first if collects else dormant, given)))
            and [get(d) for get, d in settings] == values
            and self.kinds.issuperset(map(type, flat(parameters)))
            and all([mode["training"] is training for mode in modes])  # noqa: C419 (a list is quicker than a generator)
            and (contents == held or _differ_in_caches(contents, held))
            and [d.get(name) for d, name in containers] == were
            and not (objects and any(d.get(name) is not value for d, name, value in objects))
            and not (self.ties and any(a._parameters[name] is not b._parameters[as_] for a, name, b, as_ in self.ties))
        )


def _differ_in_caches(contents: list[Any], held: list[Any]) -> bool:
    """Do these differ in use_cache alone, which trainers set, and the model reads, not its layers? Then they are noted."""
    for i, (now, was) in enumerate(zip(contents, held, strict=True)):
        if now != was:
            if not isinstance(now, dict) or {**now, "use_cache": None} != {**was, "use_cache": None}:
                return False
            held[i] = copy.copy(now)
    return True


Watch.unchanged._dynamo_marked_constant = True  # torch.compile calls it once, and does not trace it
