"""Guards a converted module: compares its inside with what was checked."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..frozen import Frozen
from ..nn.unmodified import collects_first, dormant, untouched
from ..subclasses import PLAIN
from .quantized import REPACKS, is_quantised
from .reads import CONTAINERS, OF_EVERY_MODULE, VALUES, Reads
from .report import AGAIN, warn_of
from .trace import PLAIN_VALUES

COMPOSED = "__composable_api_state_key"  # begins the names of those in which fully_shard keeps its state
# They change no result: `not_repacked` switches the first off while a module is read, and transformers asks for the other
# whether it makes a checkpoint of what is one already.
HARMLESS = (REPACKS, "gradient_checkpointing")


def inside(value: object) -> list | dict | set | None:
    """What a container or an object holds, to be compared later; None if it holds tensors or arrays, whose == has no truth
    value."""
    held = value if isinstance(value, (list, dict, set)) else getattr(value, "__dict__", None)
    if not isinstance(held, (list, dict, set)):
        return None
    items = held.values() if isinstance(held, dict) else held
    return None if any(hasattr(one, "__array__") for one in items) else held


def is_container(value: object) -> bool:
    """Returns whether it is a container of things whose == has a truth value."""
    if not isinstance(value, CONTAINERS):
        return False
    held = value.values() if isinstance(value, dict) else value
    return not any(
        hasattr(one, "__array__") or (isinstance(one, (list, dict, set, tuple)) and not is_container(one))
        for one in held
    )


def snapshot(value: Any) -> Any:
    """A copy of nested containers, which later changes in place do not reach."""
    if type(value) in (list, tuple):
        return type(value)(map(snapshot, value))
    if type(value) is dict:
        return {key: snapshot(one) for key, one in value.items()}
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value


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


class Held(NamedTuple):
    """What a module, or an object that it holds, had of the attributes that forward reads.

    path: of the module, or of the module and the attributes that lead to the object. values: plain ones and containers, by
    name; objects: others, which are compared by identity; absent: names that it had not; known: where forward may read any
    attribute, those that it had.
    """

    owner: Any
    path: str
    values: dict[str, Any]
    objects: dict[str, Any]
    absent: frozenset[str]
    known: frozenset[str] | None = None

    def added(self) -> set[str]:
        """The names of new attributes that forward would read."""
        now = vars(self.owner).keys()
        return now & self.absent if self.known is None else now - self.known - OF_EVERY_MODULE


def held_of(owner: Any, path: str, reads: Reads | None, skipped: Collection[str] = ()) -> Iterator[Held]:
    """The owner's and those of the objects that it holds."""
    own, is_module = vars(owner), isinstance(owner, nn.Module)
    names = own.keys() if reads is None else reads.keys()
    if is_module:
        names = [name for name in names if name not in OF_EVERY_MODULE and not name.startswith(COMPOSED)]
    absent = frozenset(names) - own.keys() - {*skipped}
    if is_module:
        absent -= owner._parameters.keys() | owner._buffers.keys() | owner._modules.keys()
    found = Held(owner, path, {}, {}, absent, frozenset(own) if reads is None else None)
    for name in names:
        value = own.get(name)
        if name not in own or name in skipped or isinstance(value, Tensor):
            continue
        if isinstance(value, VALUES) or is_container(value):
            found.values[name] = snapshot(value)
        else:
            found.objects[name] = value
            if (
                reads is not None
                and (reads[name] is None or reads[name])
                and isinstance(getattr(value, "__dict__", None), dict)
            ):
                yield from held_of(value, joined(path, name), reads[name])
    if any(found[2:]):
        yield found


class Compared(NamedTuple):
    """What a call of Watch.unchanged compares, looked up beforehand: views of live things, and what they were."""

    hooks: list[dict]  # all empty
    children: list[Any]  # views of each parent's children
    below: list[nn.Module]  # what they were, in one list
    classes: list[type]  # of these
    settings: list[tuple[Callable, dict]]  # getters of attributes, and the dicts that they read
    values: list[Any]
    parameters: list[Any]  # views of each module's
    modes: list[dict]  # that hold `training`, of modules with children
    attributes: list[dict]
    counts: list[int]  # of the attributes
    objects: list[tuple[dict, str, object]]
    given: list[dict]  # hooks of routers, which a call gives the logits


class Watch:
    """Tells whether the inside of a module is still what was checked: submodules, their classes and hooks, the attributes that
    its forward reads of them and of what they hold, such as a configuration, and parameters that are plain memory.

    A call pays for a few comparisons of lists. A change that does not matter, such as another attribute, is compared in full
    once.
    """

    def __init__(
        self, module: nn.Module, reads: dict[str, Reads | None], live: Collection[tuple[str, str]] = (),
        given: Collection[str] = (),
    ):  # fmt: skip
        """reads: by the path of each module (reads.reads_of); live: (path, attribute) of what each call reads anew; given:
        paths of modules whose hooks a call gives what they collect."""
        self.module, self.given = module, [module.get_submodule(path) for path in given]
        self.structure = [(m, path, type(m), tuple(m._modules.items())) for path, m in module.named_modules()]
        found = [
            one
            for path, m in module.named_modules()
            for one in held_of(m, path, reads.get(path, {}), {*HARMLESS, *(name for of, name in live if of == path)})
        ]
        self.held = list({id(one.owner): one for one in found}.values())  # a configuration that several share, once
        self.ties = ties_of(module)
        self.kinds = PLAIN.union(type(p) for p in module.parameters() if is_quantised(p) or isinstance(p, Frozen))
        self.compared: Compared | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"compared": None}

    def prepared(self) -> Compared:
        modules = [m for m, *_ in self.structure]
        inner = modules[1:]
        below = [child for *_, children in self.structure for _, child in children]
        kinds = {id(None): type(None), **{id(m): kind for m, _, kind, _ in self.structure}}  # a child may be None
        valued = [(vars(one.owner), one.values) for one in self.held if one.values]
        others = {id(one.owner): vars(one.owner) for one in self.held}
        attributes = list(({id(m): vars(m) for m in inner} | others).values())
        self.compared = Compared(
            hooks=[
                d
                for m in inner
                for d in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
                if not (d is m._forward_hooks and m in self.given)
            ],
            children=[m._modules.values() for m, *_, children in self.structure if children],
            below=below,
            classes=[kinds[id(m)] for m in below],
            settings=[(operator.itemgetter(*names), d) for d, names in valued],
            values=[operator.itemgetter(*names)(names) for _, names in valued],
            parameters=[m._parameters.values() for m in modules if m._parameters],
            modes=[vars(m) for m, *_, children in self.structure[1:] if children],
            attributes=attributes,
            counts=[-1] * len(attributes),
            objects=[(vars(one.owner), name, value) for one in self.held for name, value in one.objects.items()],
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
            hooks, children, below, classes, settings, values, parameters, modes, attributes, counts, objects, given,
        ) = self.compared or self.prepared()  # fmt: skip
        training, flat = self.module.training, itertools.chain.from_iterable
        if list(map(len, attributes)) != counts:
            if next(self.added(), None):
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
            and not (objects and any(d.get(name) is not value for d, name, value in objects))
            and not (self.ties and any(a._parameters[name] is not b._parameters[as_] for a, name, b, as_ in self.ties))
        )

    def added(self) -> Iterator[str]:
        """Says which attributes there are that forward would read, or run."""
        for m, path, *_ in self.structure[1:]:
            if not untouched(m):
                yield f"{path} has a hook, or a forward of its own"
        for one in self.held:
            for name in one.added():
                yield f"{joined(one.path, name)} is {vars(one.owner)[name]!r}"

    def differences(self, collects: bool = True) -> Iterator[str]:
        """Says what is not as it was checked."""
        training = self.module.training
        for m, path, kind, children in self.structure:
            if m is not self.module and type(m) is not kind:
                yield f"{path} is of class {type(m).__name__}, and was {kind.__name__}"
            for name in m._modules.keys() | dict(children).keys():
                was, now = (type(of.get(name)).__name__ for of in (dict(children), m._modules))
                if dict(children).get(name) is not m._modules.get(name):
                    yield f"{joined(path, name)} is another module: a {now}, and was a {was}"
            for name, p in m._parameters.items():
                if type(p) not in self.kinds:
                    yield f"{joined(path, name)} is a {type(p).__name__}"
            if children and m.training is not training:
                yield f"{path} is in {'training' if m.training else 'evaluation'} mode, other than the layer that it is in"
        yield from self.added()
        for m, path, *_ in self.structure[1:]:
            if m in self.given and m._forward_hooks and not collects_first(m._forward_hooks):
                yield f"{path} has a hook that does not collect its logits"
        for owner, path, values, objects, *_ in self.held:
            for name, was in (values | objects).items():
                now = vars(owner).get(name)
                if now is not was and (name in objects or now != was):
                    yield f"{joined(path, name)} is {now!r}, and was {was!r}"
        for a, name, b, as_ in self.ties:
            if a._parameters[name] is not b._parameters[as_]:
                yield f"the parameters {name} and {as_} are not one any more"

    def difference(self) -> str:
        """Says what is not as it was checked, where it is first, and the remedy."""
        try:
            found = next(self.differences(), "something inside cannot be compared")
        except Exception as error:  # comparing someone's objects may raise anything
            found = f"comparing what is inside raises {type(error).__name__}: {error}"
        return f"{found}. {AGAIN}"

    def warn(self, name: str) -> None:
        """Warns of a compiled call of the module, which is an activation checkpoint."""
        warn_of(name, "checkpointed", type(self.module).__name__, self.difference())


def joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# torch.compile calls them once, and does not trace them
Watch.unchanged._dynamo_marked_constant = Watch.warn._dynamo_marked_constant = True
