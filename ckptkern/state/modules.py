"""Records the state of a region's modules and closure in forward, and restores it for a recompute: csrc/module_state.h in
Python."""

from __future__ import annotations

import functools
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, SimpleNamespace
from typing import Any

import torch
from torch import _C, Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.weak import TensorWeakRef

SMALL = 64 * 1024  # bytes: what is copied, in case forward updates it
FEW = 64  # items of a list or dict that are copied
SCALARS = frozenset((type(None), bool, int, float, str))
HOOKS = (  # attributes with a module's forward hooks and how they are called
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)  # fmt: skip
DICTS = frozenset((*HOOKS, "_modules"))
TABLES = ("_parameters", "_buffers", "_modules")
EXACT = (Tensor, nn.Parameter)
ABSENT = object()  # marks a missing value
Copies = dict[int, Any]  # (original, copy) by the id of a tensor, or of its storage
_KEYS = _C.DispatchKey
_OTHERS = (_KEYS.Python, _KEYS.FuncTorchBatched, _KEYS.FuncTorchGradWrapper, _KEYS.Functionalize)


def unseen(function: Callable) -> Callable:
    """Wraps a function so that neither tensor subclasses nor torch function modes see it."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        with _C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run


def is_of(value, kind: type) -> bool:
    """Returns whether the value's own type is of this class; isinstance would also accept a proxy."""
    return issubclass(type(value), kind)


def is_plain(x: Tensor) -> bool:
    """Returns whether x is neither a subclass with its own dispatch nor a tensor of a torch.func transform."""
    return x.layout is torch.strided and not any(map(_C._dispatch_keys(x).has, _OTHERS))


def version_of(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def copy_of(x: Tensor, copies: Copies) -> Tensor:
    """Copies x outside of the caller's modes. Copies of tensors on one small storage share memory as the tensors do. copies:
    the copies, by id, with their originals, so that the ids are not reused."""
    with torch.no_grad(), _C._DisableTorchDispatch():
        storage = x.untyped_storage()
        if storage.nbytes() > SMALL:
            return copies.setdefault(id(x), (x, x.clone()))[1]
        if storage._cdata not in copies:
            copies[storage._cdata] = storage, storage.clone()
        copy = x.new_empty(0).set_(copies[storage._cdata][1], x.storage_offset(), x.shape, x.stride())
        _C._set_conj(copy, x.is_conj())
        _C._set_neg(copy, x.is_neg())
        return copy


def item(space, name):
    """Returns the item of a dict, of another mapping (a ScriptModule's) or of a cell, or ABSENT."""
    try:
        return space.cell_contents if type(space) is CellType else space[name]
    except (KeyError, ValueError):
        return ABSENT


def put(space, name, value) -> None:
    if type(space) is CellType:
        space.cell_contents = value
    elif value is ABSENT:
        del space[name]
    else:
        space[name] = value


def exchangeable(space: Space, now, then) -> bool:
    """Returns whether the present value may be exchanged for the recorded one."""
    if not (is_of(now, Tensor) and is_of(then, Tensor)):
        return True
    is_resized = space.kind == "parameters" and now.shape != then.shape
    if is_resized or any(_C._dispatch_keys(x).has(_KEYS.Python) for x in (now, then)):
        return False
    if not (is_plain(now) and is_plain(then)):
        return True
    was, given = ((x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()) for x in (now, then))
    return was != given


def are_scalars(values) -> bool:
    return len(values) <= FEW and all(type(value) in SCALARS for value in values)


def is_container(value) -> bool:
    """Returns whether the value is a list or dict of few scalars, such as adapters' scales, or one that forward fills."""
    return are_scalars(value.values() if type(value) is dict else value) if type(value) in (list, dict) else False


def is_saved(value) -> bool:
    """Returns whether an attribute with this value is restored."""
    if type(value) in SCALARS or is_of(value, Tensor):
        return True
    return (
        are_scalars(value) if isinstance(value, tuple) else is_container(value) and value != {}
    )  # an empty dict holds hooks


@dataclass(eq=False)
class Space:
    """A dict, another mapping, a cell or None (`object`) that belongs to a module. own: the call certainly runs the module.
    norm: the buffers of a norm in training, which native ops update without moving versions. updated: whether forward
    updated one."""

    object: Any
    module: nn.Module | None
    kind: str
    own: bool = False
    norm: bool = False
    updated: bool = False


@dataclass(eq=False)
class Entry:
    """A name in a space. value: ABSENT for an attribute that forward adds. tensor: the value, detached if it has a graph,
    which must not live as long as the region's; original: then a weak reference to it. before: a small tensor's copy from
    before forward. updated: forward itself updated it. items: the value is a copy of a dict of hooks or submodules."""

    space: Space
    name: Any
    value: Any
    items: bool = False
    tensor: Tensor | None = None
    original: TensorWeakRef | None = None
    before: Tensor | None = None
    version: int = 0
    requires_grad: bool = False
    updated: bool = False

    def is_there(self, now) -> bool:
        if self.items:
            same_names = is_of(now, dict) and list(now) == list(self.value)
            return same_names and all(map(operator.is_, now.values(), self.value.values()))
        return now is self.value or (self.original is not None and is_of(now, Tensor) and now is self.original())

    def is_lost(self) -> bool:
        """Returns whether forward updated the tensor and its value from before is unknown. A norm's statistics, parameters
        (a clamp, merged adapters) and what cannot be exchanged stay as forward leaves them."""
        stays = self.requires_grad or self.space.norm or self.space.kind in ("parameters", "tensor")
        return self.updated and self.before is None and not stays

    def wanted(self, is_there: bool, copies: Copies, objects: dict[int, Tensor]):
        """Returns the value that the recompute reads."""
        space, x = self.space, self.tensor
        if self.items and not is_there:
            return self.value.copy()
        # Statistics must not be updated twice: by a norm that the call may not run, or one whose updates move no version.
        is_statistic = x is not None and space.norm and (space.own or space.updated) and is_plain(x)
        if x is None or not (self.before is not None or is_statistic or self.is_lost()):
            return self.value
        if id(x) not in objects:
            objects[id(x)] = copy = copy_of(x if self.before is None else self.before, copies)
            copy.__dict__.update(self.value.__dict__)
        return objects[id(x)]


class ModuleState:
    """The recorded state of modules and cells. values: running statistics are copied even where the call may not run their
    norm."""

    def __init__(self, values: bool):
        self.values, self.settled = values, False
        self.generators: list[torch.Generator] = []
        self.reached: list[nn.Module] = []
        self.attributes: list[tuple[Space, type, int]] = []  # attributes of each module, its class, and their number
        self.entries: list[Entry] = []
        self.containers: list[tuple[Any, Any]] = []  # (container, copy)
        self.seen: set[int] = set()
        self.copies: Copies = {}

    def is_new(self, value) -> bool:
        is_new = id(value) not in self.seen
        self.seen.add(id(value))
        return is_new

    def add_entry(self, space: Space, name, value) -> None:
        entry = Entry(space, name, value)
        self.entries.append(entry)
        if not is_of(value, Tensor):
            return
        entry.requires_grad, entry.version, entry.tensor = value.requires_grad, version_of(value), value
        if value.grad_fn is not None:
            entry.original = TensorWeakRef(value)
            entry.tensor = entry.value = value.detach().requires_grad_(entry.requires_grad)
        elif (
            not (entry.requires_grad or value.is_inference())
            and type(value) in EXACT
            and space.kind not in ("parameters", "tensor")
            and (not space.norm or space.own or self.values)
            and is_plain(value)
            and value.nbytes <= SMALL
        ):
            entry.before = copy_of(value, self.copies)

    def add_module(self, root: nn.Module, own: bool) -> None:
        """Records a module and its submodules before forward runs. own: the call certainly runs it."""
        self.reached.append(root)
        pending = [root]
        for module in filter(self.is_new, pending):
            attributes = object.__getattribute__(module, "__dict__")
            # a ScriptModule does not have them as attributes
            tables = {name: attributes.get(name) or getattr(module, name) for name in TABLES}
            is_norm = attributes.get("training") is True and is_of(module, _NormBase)
            for kind in ("parameters", "buffers"):
                space = Space(tables[f"_{kind}"], module, kind, own, is_norm and kind == "buffers")
                for name, value in space.object.items():
                    self.add_entry(space, name, value)
            pending += [child for _, child in tables["_modules"].items() if child is not None]
            space = Space(attributes, module, "attributes", own)
            self.attributes.append((space, type(module), len(attributes)))
            self.add_dicts(space)
            for name, value in attributes.items():
                if name in tables or name in DICTS:
                    continue
                if is_saved(value):
                    self.add_entry(space, name, value)
                    if is_container(value) and self.is_new(value):
                        self.containers.append((value, value.copy()))
                elif is_of(value, torch.Generator):
                    self.generators.append(value)

    def add_dicts(self, space: Space) -> None:
        """Adds copies of the dicts of hooks and submodules."""
        for name in DICTS & space.object.keys():
            value = space.object[name]
            if is_of(value, dict):
                self.entries.append(Entry(space, name, value.copy() if value else OrderedDict(), items=True))

    def reach(self, value, depth: int = 0) -> None:
        """Records what a function reads besides its saved arguments."""
        if is_of(value, Tensor):
            if self.is_new(value):
                self.add_entry(Space(None, None, "tensor"), None, value)
        elif is_of(value, torch.Generator):
            self.generators.append(value)
        elif type(value) is CellType:
            content = item(value, None)
            if content is not ABSENT:  # an ABSENT cell is not filled yet
                if self.is_new(value):
                    self.add_entry(Space(value, None, "cell"), None, content)
                if not is_of(content, Tensor):
                    self.reach(content, depth)
        elif is_of(value, nn.Module):
            self.add_module(value, own=False)
        elif depth == 0 and type(value) in (tuple, list):
            for element in value:
                self.reach(element, 1)

    def settle(self) -> None:
        """Notes after forward what it updated, which is not an error later, and what it added to attributes, which is absent
        in a recompute. Only the first call counts, because other calls of the region may follow."""
        if self.settled:
            return
        self.settled = True
        for i, (space, kind, count) in enumerate(self.attributes):
            if len(space.object) != count:
                known = {*TABLES, *(entry.name for entry in self.entries if entry.space is space)}
                added = [name for name, value in space.object.items() if name not in known and is_saved(value)]
                self.entries += [Entry(space, name, ABSENT) for name in added]
            if kind is not type(space.module):  # a lazy module, which also removes its hook
                self.attributes[i] = space, type(space.module), count
                self.entries = [entry for entry in self.entries if not (entry.items and entry.space is space)]
                self.add_dicts(space)
        for entry in self.entries:
            if entry.tensor is not None:
                version = version_of(entry.tensor)
                entry.updated, entry.version = version != entry.version, version
                entry.space.updated |= entry.updated
                # a buffer's copy stays in any case: a native op, such as batch_norm, updates it and moves no version
                if not entry.updated and entry.space.kind != "buffers":
                    entry.before = None
        self.copies = {}

    def parameters(self) -> list[Tensor]:
        """Returns the parameters of the module that the call runs."""
        own = [entry for entry in self.entries if entry.space.own and entry.space.kind == "parameters"]
        return [entry.value for entry in own if entry.tensor is not None and entry.original is None]

    def roots(self) -> list[nn.Module]:
        """Returns the modules that the call can reach, without their submodules."""
        return list(self.reached)

    def reclassed(self) -> list[tuple[nn.Module, type]]:
        """Returns (module, its class in forward) of each module whose class has changed: it cannot run."""
        return [(space.module, kind) for space, kind, _ in self.attributes if kind is not type(space.module)]

    @unseen
    def changed(self) -> list[tuple]:
        """Returns (objects, module or None, name, version now, version after forward) of each tensor that was changed in
        place since forward, or that forward updated without a copy from before. A recompute must not read them. Called after
        enter()."""
        changes = []
        for entry in self.entries:
            space, x = entry.space, entry.tensor
            if x is None or x.is_inference() or space.norm:
                continue
            now, lost = version_of(x), entry.is_lost()
            if not lost and (entry.updated or now == entry.version):
                continue
            there = ABSENT if space.object is None else item(space.object, entry.name)
            original = entry.original and entry.original()
            is_fsdps = is_of(there, Tensor) and not (entry.is_there(there) or entry.before is not None or lost)
            if is_fsdps and not exchangeable(space, there, entry.value):
                continue
            objects = [value for value in (entry.value, there, original) if is_of(value, Tensor)]
            changes.append((objects, space.module, entry.name, now, entry.version))
        return changes

    def enter_modules(self, undo: list[Callable[[], None]]) -> None:
        """Restores the recorded values. Adds to `undo` a function that undoes this and the recompute's own assignments.
        Parameters that are sharded or of another shape stay, because FSDP has put the right ones there."""
        contents = [(container, container.copy()) for container, _ in self.containers]
        values: list[tuple] = []
        required: list[tuple[Tensor, bool]] = []

        def put_all_back():
            for entry, before, exchanged in values:
                space, name = entry.space, entry.name
                now = item(space.object, name)
                if now is not before and (exchanged or exchangeable(space, now, before)):
                    try:
                        put(space.object, name, before)
                    except Exception as error:  # the others are still restored
                        told = SimpleNamespace(
                            exc_type=type(error),
                            exc_value=error,
                            exc_traceback=error.__traceback__,
                            object=name,
                            err_msg="Exception ignored in a region's recompute",
                        )
                        sys.unraisablehook(told)
            for tensor, requires_grad in required:
                tensor.requires_grad_(requires_grad)
            for container, before in contents:
                fill(container, before)

        undo.append(put_all_back)
        for container, then in self.containers:
            fill(container, then)
        copies: Copies = {}
        objects: dict[int, Tensor] = {}
        for entry in self.entries:
            space, x = entry.space, entry.tensor
            if x is not None and entry.original is None and x.is_leaf and x.requires_grad != entry.requires_grad:
                required.append((x, x.requires_grad))
                x.requires_grad_(entry.requires_grad)
            if space.object is None:
                continue
            now = item(space.object, entry.name)
            is_there = entry.is_there(now)
            value = entry.wanted(is_there, copies, objects)
            exchanges = (value is not entry.value or not is_there) and (is_there or exchangeable(space, now, value))
            values.append((entry, now, exchanges))
            if exchanges:
                put(space.object, entry.name, value)


def fill(container, contents) -> None:
    container.clear()
    (container.update if type(container) is dict else container.extend)(contents)
