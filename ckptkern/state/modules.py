"""What a region's modules and closure hold in forward, so that a recompute finds it, in Python; as csrc/module_state.h says."""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import CellType, SimpleNamespace
from typing import Any

import torch
from torch import _C, Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.weak import TensorWeakRef

SMALL = 64 * 1024  # bytes: what is copied, in case forward updates it
FEW = 64  # items of a list or dict that are copied
SCALARS = frozenset((type(None), bool, int, float, str))
DICTS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called", "_modules",
)  # fmt: skip
TABLES = frozenset(("_parameters", "_buffers", "_modules"))  # of a module whose parameters, say, are all None
EXACT = (Tensor, nn.Parameter)
ABSENT = object()  # what is not held
_KEYS = _C.DispatchKey
OTHERS = (_KEYS.Python, _KEYS.FuncTorchBatched, _KEYS.FuncTorchGradWrapper, _KEYS.Functionalize)


def unseen(function: Callable) -> Callable:
    """Runs a function so that neither subclasses nor modes of torch functions see it."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run


def is_of(value: Any, kind: type) -> bool:
    """Is it of this class? A proxy says so of itself, too."""
    return issubclass(type(value), kind)


def has_own_dispatch(x: Tensor) -> bool:
    return type(x) not in EXACT and _C._dispatch_keys(x).has(_KEYS.Python)


def is_plain(x: Tensor) -> bool:
    """Neither a subclass with operations of its own nor a tensor of a torch.func transform."""
    keys = _C._dispatch_keys(x)
    return x.layout is torch.strided and not any(map(keys.has, OTHERS))


def version_of(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def memory_of(x: Tensor) -> tuple:
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()


def copy_of(x: Tensor, copies: dict[int, Any]) -> Tensor:
    """A copy of x, outside of the caller's modes, which shares memory with the other copies as x does with what they are of, if
    its storage is small. copies: by what they are of, with that, so that no other gets its id."""
    with torch.no_grad(), _C._DisableTorchDispatch():
        storage = x.untyped_storage()
        if storage.nbytes() > SMALL:
            return copies.setdefault(id(x), (x, x.clone()))[1]
        if storage._cdata not in copies:
            copies[storage._cdata] = storage, storage.clone()
        return x.new_empty(0).set_(copies[storage._cdata][1], x.storage_offset(), x.shape, x.stride())


def item(space: Any, name: Any) -> Any:
    """What a dict, another mapping or a cell holds, or ABSENT."""
    try:
        return space.cell_contents if type(space) is CellType else space[name]
    except (KeyError, ValueError):
        return ABSENT


def put(space: Any, name: Any, value: Any) -> None:
    if type(space) is CellType:
        if value is ABSENT:
            del space.cell_contents
        else:
            space.cell_contents = value
    elif value is ABSENT:
        del space[name]
    else:
        space[name] = value


def exchangeable(now: Any, then: Any, of_parameters: bool) -> bool:
    """May what is there be exchanged for what was?"""
    if not (is_of(now, Tensor) and is_of(then, Tensor)):
        return True
    if has_own_dispatch(now) or has_own_dispatch(then):
        return False
    if of_parameters and now.shape != then.shape:
        return False
    return not (is_plain(now) and is_plain(then) and memory_of(now) == memory_of(then))


def is_scalars(values: Any) -> bool:
    return len(values) <= FEW and all(type(one) in SCALARS for one in values)


def is_container(value: Any) -> bool:
    """A list or dict of few scalars, such as the scales of adapters, or that which forward fills; an empty dict is of hooks."""
    return (
        is_scalars(value) if type(value) is list else type(value) is dict and value != {} and is_scalars(value.values())
    )


def is_constant(value: Any) -> bool:
    return is_scalars(value) if isinstance(value, tuple) else type(value) in SCALARS


def same_items(a: dict, b: dict) -> bool:
    return len(a) == len(b) and all(x is y and i == j for (i, x), (j, y) in zip(a.items(), b.items(), strict=True))


class Space(SimpleNamespace):
    """object: a dict, another mapping, a cell, or None; module: whose it is; kind: "attributes", "parameters", "buffers", "cell"
    or "tensor"; own: the call runs the module for sure; norm: one that trains, whose native ops update its buffers and move no
    version; updated: is one of its buffers? Of attributes: size, type (the module's class), dicts (copies of DICTS)."""

    own = norm = updated = False
    dicts: dict[str, dict] = {}  # noqa: RUF012 (of other kinds)
    type = None


class Entry:
    """A name in a space. tensor: of the value; detached if it has a graph, which must not live as long as the region's;
    original: a weak reference to that one. before: a small tensor's copy from before forward. updated: by forward itself;
    absent: an attribute that forward adds."""

    __slots__ = (
        "absent",
        "before",
        "name",
        "original",
        "requires_grad",
        "space",
        "tensor",
        "updated",
        "value",
        "version",
    )

    def __init__(self, space: Space, name: Any, value: Any = ABSENT):
        self.space, self.name, self.value, self.absent = space, name, value, value is ABSENT
        self.tensor = self.original = self.before = None
        self.requires_grad = self.updated = False

    def is_there(self, now: Any) -> bool:
        return now is not ABSENT and (
            now is self.value or (self.original is not None and is_of(now, Tensor) and now is self.original())
        )

    def is_lost(self) -> bool:
        """Was it updated by forward, so that its value from before is not known? Statistics of norms, parameters (a clamp, merged
        adapters) and what cannot be exchanged are as forward leaves them."""
        space = self.space
        return (
            self.updated
            and self.before is None
            and not (self.requires_grad or space.norm)
            and space.kind not in ("parameters", "tensor")
        )

    def wanted(self, copies: dict[int, Any], objects: dict[int, Tensor]) -> Any:
        """What the recompute shall find."""
        space, x = self.space, self.tensor
        # What a norm that the call may not run has updated, or one that moves no version, is not to be updated twice.
        if x is None or (
            self.before is None
            and not (space.norm and space.kind == "buffers" and (space.own or space.updated) and is_plain(x))
            and not self.is_lost()
        ):
            return self.value
        if id(x) not in objects:
            objects[id(x)] = copy = copy_of(x if self.before is None else self.before, copies)
            copy.__dict__.update(self.value.__dict__)
        return objects[id(x)]


class ModuleState:
    """What modules and cells hold. values: running statistics are copied too where the call may not run their norm."""

    def __init__(self, values: bool):
        self.values, self.settled = values, False
        self.generators: list[torch.Generator] = []
        self.roots: list[nn.Module] = []
        self.spaces: list[Space] = []
        self.entries: list[Entry] = []
        self.containers: list[tuple[Any, Any]] = []  # and their copies
        self.seen: set[int] = set()
        self.copies: dict[int, Any] = {}

    def add_entry(self, space: Space, name: Any, value: Any) -> None:
        entry = Entry(space, name, value)
        self.entries.append(entry)
        if not is_of(value, Tensor):
            return
        entry.requires_grad, entry.version, entry.tensor = value.requires_grad, version_of(value), value
        if value.grad_fn is not None:
            entry.original = TensorWeakRef(value)
            entry.tensor = entry.value = value.detach().requires_grad_(entry.requires_grad)
        elif (
            not entry.requires_grad
            and type(value) in EXACT
            and space.kind not in ("parameters", "tensor")
            and (not space.norm or space.own or self.values)
            and not value.is_inference()
            and is_plain(value)
            and value.nbytes <= SMALL
        ):
            entry.before = copy_of(value, self.copies)

    def add_space(self, space: Space) -> None:
        self.spaces.append(space)
        for name, value in list(space.object.items()):
            if space.kind != "attributes" or is_of(value, Tensor) or is_constant(value):
                self.add_entry(space, name, value)
            elif is_container(value):
                if name not in TABLES:
                    self.add_entry(space, name, value)
                    if id(value) not in self.seen:
                        self.seen.add(id(value))
                        self.containers.append((value, value.copy()))
            elif is_of(value, torch.Generator):
                self.generators.append(value)

    def add_module(self, root: nn.Module, own: bool) -> None:
        """In forward, before it runs. A module comes with those inside. own: the call runs it for sure."""
        self.roots.append(root)
        pending = [root]
        for module in pending:
            if id(module) in self.seen:
                continue
            self.seen.add(id(module))
            attributes = object.__getattribute__(module, "__dict__")

            def mapping(name: str, attributes: dict = attributes, module: nn.Module = module) -> Any:
                return attributes[name] if name in attributes else getattr(module, name)  # a ScriptModule's

            if found := mapping("_parameters"):
                self.add_space(Space(object=found, module=module, kind="parameters", own=own))
            if found := mapping("_buffers"):
                norm = attributes.get("training") is True and isinstance(module, _NormBase)
                self.add_space(Space(object=found, module=module, kind="buffers", own=own, norm=norm))
            if found := mapping("_modules"):
                pending += [child for _, child in found.items() if child is not None]
            space = Space(object=attributes, module=module, kind="attributes", own=own)
            space.type, space.size, space.dicts = type(module), len(attributes), dicts_of(attributes)
            self.add_space(space)

    def add_cell(self, cell: CellType) -> None:
        value = item(cell, None)
        if value is not ABSENT and id(cell) not in self.seen:  # else it is not filled yet
            self.seen.add(id(cell))
            self.spaces.append(Space(object=cell, module=None, kind="cell"))
            self.add_entry(self.spaces[-1], None, value)

    def add_tensor(self, captured: Tensor) -> None:
        if id(captured) not in self.seen:
            self.seen.add(id(captured))
            self.spaces.append(Space(object=None, module=None, kind="tensor"))
            self.add_entry(self.spaces[-1], None, captured)

    def settle(self) -> None:
        """After forward, once: other calls of the same region may follow. What forward updated itself is not an error later, and
        what it has added to attributes is not there when it runs again."""
        if self.settled:
            return
        self.settled = True
        for space in self.spaces:
            if space.kind != "attributes":
                continue
            if len(space.object) != space.size:
                known = {entry.name for entry in self.entries if entry.space is space}
                self.entries += [
                    Entry(space, name)
                    for name, value in space.object.items()
                    if name not in known and (is_of(value, Tensor) or is_constant(value) or is_container(value))
                ]
            if space.type is not type(space.module):  # a lazy module, which also removes its hook
                space.type, space.dicts = type(space.module), dicts_of(space.object)
        for entry in self.entries:
            if entry.tensor is not None:
                version = version_of(entry.tensor)
                entry.updated, entry.version = version != entry.version, version
                entry.space.updated |= entry.updated
                # a buffer's copy stays in any case: a native op, such as batch_norm, updates it and moves no version
                if not entry.updated and entry.space.kind != "buffers":
                    entry.before = None
        self.copies = {}

    def parameters(self) -> list[nn.Parameter]:
        """Returns those of own modules."""
        return [
            entry.value
            for entry in self.entries
            if entry.space.own
            and entry.space.kind == "parameters"
            and entry.tensor is not None
            and entry.original is None
        ]

    def reclassed(self) -> list[tuple[nn.Module, type]]:
        """Returns (module, its class in forward) of modules that have another class now: they cannot run."""
        return [
            (space.module, space.type)
            for space in self.spaces
            if space.type is not None and space.type is not type(space.module)
        ]

    def changed(self) -> list[tuple]:
        """After enter(): (objects, module or None, name, version now, version after forward) of what was changed in place since,
        and of what forward updated without a copy from before. A recompute must not read these objects."""
        found = []
        for entry in self.entries:
            space, x = entry.space, entry.tensor
            if x is None or x.is_inference() or (space.norm and space.kind == "buffers"):
                continue
            now, lost = version_of(x), entry.is_lost()
            if not lost and (entry.updated or now == entry.version):
                continue
            objects, there = [entry.value], ABSENT if space.object is None else item(space.object, entry.name)
            if is_of(there, Tensor):
                if not (
                    entry.is_there(there)
                    or entry.before is not None
                    or lost
                    or exchangeable(there, entry.value, space.kind == "parameters")
                ):
                    continue  # FSDP's
                objects.append(there)
            if entry.original is not None and (original := entry.original()) is not None:
                objects.append(original)
            found.append((objects, space.module, entry.name, now, entry.version))
        return found

    def enter(self, undo: list[Callable[[], None]]) -> None:
        """Puts back what differs; adds to `undo` what undoes it, and also what the recompute assigned. Parameters that are sharded
        or of another shape stay: whoever exchanged them (FSDP) has put the right ones there."""
        contents = [(container, container.copy()) for container, _ in self.containers]
        dicts, values, required = [], [], []

        def put_all_back() -> None:
            for space, name, before, exchanged, of_parameters in values:
                now = item(space, name)
                if now is not before and (exchanged or exchangeable(now, before, of_parameters)):
                    put_back(space, name, before)
            for tensor, requires_grad in required:
                tensor.requires_grad_(requires_grad)
            for container, before in contents:
                fill(container, before)
            for space, name, before in dicts:
                put_back(space, name, before)

        undo.append(put_all_back)
        for container, then in self.containers:
            fill(container, then)
        for space in self.spaces:
            for name in DICTS if space.type is not None else ():
                now, then = space.object.get(name), space.dicts.get(name, {})
                if isinstance(now, dict) and not same_items(now, then):
                    dicts.append((space.object, name, now))
                    space.object[name] = then.copy() if then else OrderedDict()
        copies: dict[int, Any] = {}
        objects: dict[int, Tensor] = {}
        for entry in self.entries:
            space, x = entry.space, entry.tensor
            now = ABSENT if space.object is None else item(space.object, entry.name)
            if x is not None and entry.original is None and x.is_leaf and x.requires_grad != entry.requires_grad:
                required.append((x, x.requires_grad))
                x.requires_grad_(entry.requires_grad)
            if space.object is None:
                continue
            of_parameters, is_there = space.kind == "parameters", entry.is_there(now)
            value = entry.wanted(copies, objects)
            exchanges = now is not ABSENT if entry.absent else (
                (value is not entry.value or not is_there) and (is_there or exchangeable(now, value, of_parameters))
            )  # fmt: skip
            values.append((space.object, entry.name, now, exchanges, of_parameters))
            if exchanges:
                put(space.object, entry.name, value)


def dicts_of(attributes: dict[str, Any]) -> dict[str, dict]:
    """Copies of hooks and submodules, of those that are not empty."""
    return {name: one.copy() for name in DICTS if isinstance(one := attributes.get(name), dict) and one}


def fill(container: Any, contents: Any) -> None:
    if isinstance(container, dict):
        container.clear()
        container.update(contents)
    else:
        container[:] = contents


def put_back(space: Any, name: Any, value: Any) -> None:
    try:
        put(space, name, value)
    except Exception as error:  # the others are put back all the same
        sys.unraisablehook(
            SimpleNamespace(
                exc_type=type(error), exc_value=error, exc_traceback=error.__traceback__,
                err_msg="Exception ignored in a region's recompute", object=None,
            )
        )  # fmt: skip


def reach(value: Any, modules: ModuleState, generators: list[torch.Generator], depth: int = 0) -> None:
    """Adds what a function reads besides arguments that are saved."""
    if is_of(value, Tensor):
        modules.add_tensor(value)
    elif is_of(value, torch.Generator):
        generators.append(value)
    elif type(value) is CellType:
        modules.add_cell(value)
        content = item(value, None)
        if content is not ABSENT and not is_of(content, Tensor):
            reach(content, modules, generators, depth)
    elif is_of(value, nn.Module):
        modules.add_module(value, own=False)
    elif depth == 0 and type(value) in (tuple, list):
        for one in value:
            reach(one, modules, generators, 1)
