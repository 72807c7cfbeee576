"""Implements the saved-tensor hooks of an activation checkpoint, and sums of gradients: csrc/saved_tensors.h in Python."""

from __future__ import annotations

import functools
import sys
from typing import Any
from weakref import ref

import torch
from torch import _C, Tensor, nn
from torch.utils.weak import TensorWeakRef

from .modules import unseen, version_of

HELD = -1  # the key of values for every backward pass over a retained graph
HALVES = (torch.float16, torch.bfloat16)


class SavedTensors:
    """Base class of a region. places: weak references to the placeholders. metadata: of every place, or of none if not
    compared. watched: (weak reference, version) of parameters by id. completed: forward has returned. lenient: a backward
    pass inside forward recomputed the region, so the number of tensors says nothing."""

    def __new__(cls, *_, **__) -> SavedTensors:
        self = super().__new__(cls)
        self.places, self._metadata, self.watched = [], [], {}
        self.compares = self.stops_early = True
        self.completed = self.lenient = False
        return self

    def __len__(self) -> int:
        return len(self.places)

    @unseen
    def pack(self, x: Tensor) -> Placeholder:
        """Returns a placeholder for x: forward's pack hook."""
        leaf = x._base if x._is_view() else x
        if leaf.is_leaf and (leaf.requires_grad or type(leaf) is nn.Parameter):
            known = self.watched.get(id(leaf))
            if known is None or known[0]() is not leaf:  # the entry belongs to a tensor that is gone
                self.watch(leaf)
        if self.compares:
            self._metadata.append((x.shape, x.dtype, x.device))
        placeholder = Placeholder(self, len(self.places))
        self.places.append(ref(placeholder))
        return placeholder

    @unseen
    def watch(self, parameter: Tensor) -> None:
        """Notes the version of a parameter."""
        if not parameter.is_inference():
            self.watched[id(parameter)] = TensorWeakRef(parameter), parameter._version

    def moved(self) -> list[tuple[int, Tensor, int]]:
        return [
            (key, x, version)
            for key, (reference, version) in self.watched.items()
            if (x := reference()) is not None and x._version != version
        ]

    def changed(self) -> tuple[Tensor, int, int] | None:
        """Returns (parameter, its version now, its version in forward) of the first changed one; None if there is none."""
        return next(((x, x._version, version) for _, x, version in self.moved()), None)

    def forget_moved(self) -> None:
        """Stops watching parameters that forward itself has changed (a clamp, an embedding's max_norm). Called after
        forward."""
        for key, *_ in self.moved():
            del self.watched[key]

    def keep_versions(self) -> None:
        """Notes the versions after a recompute that changes parameters as forward did (a clamp), so that the next one does
        not raise."""
        for _, x, _ in self.moved():
            self.watch(x)

    def metadata(self, place: int) -> tuple[torch.Size, torch.dtype, torch.device]:
        """Returns (shape, dtype, device) of the tensor that forward saved at a place."""
        return self._metadata[place]

    def placeholders(self) -> list[Placeholder]:
        """Returns the placeholders that backward can still unpack."""
        return [placeholder for reference in self.places if (placeholder := reference()) is not None]

    def drop(self, key: int) -> None:
        """Frees the tensors of a failed recompute."""
        for placeholder in self.placeholders():
            placeholder.values.pop(key, None)

    @unseen
    def hold(self, key: int, limit: int) -> int | None:
        """Keeps a recompute's tensors for every later pass, and returns their bytes without parameters. Returns None, and
        does not keep them, if that is more than limit; limit < 0: any number."""
        counted = {
            x.untyped_storage()._cdata
            for reference, _ in self.watched.values()
            if (x := reference()) is not None and _C._has_storage(x)
        }
        size, filled = 0, [placeholder for placeholder in self.placeholders() if key in placeholder.values]
        for placeholder in filled:
            x, _ = placeholder.values[key]
            if not _C._has_storage(x):  # sparse, jagged and other subclasses: their bytes are not known here
                return None
            storage = x.untyped_storage()
            if storage._cdata not in counted:
                counted.add(storage._cdata)
                size += storage.nbytes()
        if 0 <= limit < size:
            return None
        for placeholder in filled:
            x, _ = placeholder.values.pop(key)
            placeholder.values[HELD] = x, version_of(x)
        return size

    def leaves_out(self) -> bool:
        """Returns whether the running backward pass leaves out the gradient of a leaf that the region reads."""
        leaves = [x for reference, _ in self.watched.values() if (x := reference()) is not None]
        return not left_out().isdisjoint(map(id, leaves))


class Placeholder:
    """Stands for a saved tensor in forward's graph. values: the recomputed tensor and its version, by backward pass."""

    __slots__ = ("__weakref__", "place", "segment", "values")

    def __init__(self, segment: SavedTensors, place: int):
        self.segment, self.place = segment, place
        self.values: dict[int, tuple[Tensor, int]] = {}

    def take(self, key: int) -> Tensor | None:
        """Returns the recomputed tensor once, then None. A held tensor is returned again and again while it is unchanged."""
        if key != HELD:
            return self.values.pop(key, (None,))[0]
        x, version = self.values.get(key, (None, -1))
        return x if x is not None and version_of(x) == version else None


class Recompute:
    """Runs a region again for a backward pass `key`. stop: the exception class that ends it. device: of the first tensor.
    count: tensors saved so far. different: [(place, tensor)] whose metadata differ from forward's."""

    fresh = 0  # reference count, in `pack`, of a tensor that Python has not seen before

    def __init__(self, segment: SavedTensors, key: int, stop: type[Exception]):
        self.segment, self.key, self.stop = segment, key, stop
        self.device: torch.device | None = None
        self.count, self.unfilled = 0, -1
        self.different: list[tuple[int, Tensor]] = []

    @unseen
    def pack(self, x: Tensor) -> Tensor:
        """Hands x, detached, to the placeholder at its place: the recompute's pack hook."""
        # Inputs are packed before their op's kernel runs, so that stopping there skips the kernel. Do not stop if x is the
        # kernel's output, which would save nothing, or if the kernel has yet to fill an input, as rrelu's fills its noise
        # (pytorch#193671): Python has not seen such a tensor.
        now, segment, place = _C._autograd._get_sequence_nr(), self.segment, self.count
        self.references = sys.getrefcount(x)
        if self.references <= Recompute.fresh and not x.requires_grad and not x._is_view():
            self.unfilled = now
        ends = segment.stops_early and place + 1 == len(segment.places) and self.unfilled != now
        ends = ends and not (x.grad_fn is not None and x.grad_fn._sequence_nr() + 1 == now)
        # detached: otherwise the tensor would keep this run's graph alive, and a saved output would keep itself alive
        detached = x.detach() if x.requires_grad else x
        self.device = self.device or x.device
        self.count += 1
        if place >= len(segment.places):
            if segment.completed:
                segment.too_many()
            segment.lenient = True  # a backward pass inside forward: later tensors are not asked for yet
            return detached
        placeholder = segment.places[place]()
        if placeholder is not None:
            placeholder.values[self.key] = detached, -1
            if segment.compares and segment.metadata(place) != (x.shape, x.dtype, x.device):
                self.different.append((place, detached))
        if ends:
            raise self.stop
        return detached


_first = Recompute(SavedTensors(), 0, Exception)
with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_first.pack, lambda x: x):
    torch.zeros(1, device="cpu", requires_grad=True).exp()
Recompute.fresh = _first.references


def unpack_saved(placeholder: Placeholder) -> Tensor:
    """Returns the placeholder's tensor, recomputed if need be: forward's unpack hook."""
    if type(placeholder) is not Placeholder:
        raise TypeError(f"unpack_saved: wanted a Placeholder but got {type(placeholder).__name__}")
    if _C._get_graph_exec_group() is None:
        task = _C._current_graph_task_id()
        if task >= 0 and (value := placeholder.take(task)) is not None:
            return value
    return placeholder.segment.unpack(placeholder)


def executes(node) -> tuple[bool, bool]:
    """Returns whether the running backward pass wants this node's gradient, and whether it certainly leaves others out."""
    try:
        return _C._will_engine_execute_node(node), False
    except RuntimeError:  # raised in torch.autograd.grad of this leaf
        return True, True


_left_out: tuple[int, frozenset[int]] = -1, frozenset()  # the last backward pass examined, and its result


def left_out() -> frozenset[int]:
    """Returns the ids of the leaves whose gradients the running backward pass does not want, among those below the node that
    first asks: torch tells Python of no other leaf whether it is in the graph."""
    global _left_out
    task, node = _C._current_graph_task_id(), _C._current_autograd_node()
    if task == -1 or node is None:
        return frozenset()
    looked_at, leaves = _left_out  # read at once: another thread may write it
    if task != looked_at:
        pending, seen, ids = [node], {node}, set()
        for visited in pending:
            for following, _ in visited.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    pending.append(following)
                    leaf = getattr(following, "variable", None)
                    if leaf is not None and not executes(following)[0]:
                        ids.add(id(leaf))
        _left_out = task, leaves = task, frozenset(ids)
    return leaves


def asks_for_some() -> bool:
    """Returns whether the running backward pass leaves gradients out."""
    return bool(left_out())


class GradientSums:
    """Sums in float32 the gradients that several chunks of a graph send to one 16-bit tensor, and rounds once, where autograd
    would round once per chunk (csrc/gradient_sums.h). Hooks of the chunks' nodes hold their gradients back; the last one sends
    the sum.

    A chunk's nodes are those created since this object, or since the previous chunk's `redirect`. The object holds these nodes,
    and their hooks hold it weakly, else no graph would ever be freed: a node behind all of them must hold it.
    """

    def __init__(self) -> None:
        self.since = _C._autograd._get_sequence_nr()
        self.nodes = []  # that send gradients
        self.senders: dict[tuple[Any, int], set[int]] = {}  # (node outside, input) -> indices in `nodes`
        # by (node, input) and backward pass: the nodes that have not added to it yet, and the sum, if there is one
        self.sums: dict[tuple, tuple[set[int], list[Tensor]]] = {}

    def redirect(self, output: Tensor) -> None:
        """Registers the hooks of a chunk. output: the chunk's."""
        since, self.since = self.since, _C._autograd._get_sequence_nr()
        root = output.grad_fn
        if root is None or not since <= root._sequence_nr() < self.since:
            return
        pending, seen = [root], {root}
        for node in pending:
            places: dict[tuple[Any, int], list[int]] = {}
            for i, (following, slot) in enumerate(node.next_functions):
                if following is None:
                    continue
                if since <= following._sequence_nr() < self.since:
                    if following not in seen:
                        seen.add(following)
                        pending.append(following)
                elif following._input_metadata[slot].dtype in HALVES:
                    places.setdefault((following, slot), []).append(i)
            if places:
                for place in places:
                    self.senders.setdefault(place, set()).add(len(self.nodes))
                node.register_hook(functools.partial(_hold_back, ref(self), len(self.nodes), places))
                self.nodes.append(node)


def _hold_back(
    reference: ref[GradientSums], sender: int, places: dict[tuple[Any, int], list[int]], grads: tuple, _
) -> tuple[Tensor | None, ...]:
    """Adds a node's gradients to the sums of their places, and returns these where the node is the last in this backward pass:
    its hook. places: (node, input) -> indices of the gradients sent there."""
    sums, sent = reference(), list(grads)
    for place, slots in places.items():
        key, present = (place, _C._current_graph_task_id()), [i for i in slots if grads[i] is not None]
        if key not in sums.sums:
            sums.sums[key] = {node for node in sums.senders[place] if executes(sums.nodes[node])[0]}, []
        waits, total = sums.sums[key]
        for i in present:
            wide = grads[i].float()
            total[:] = [wide if not total else total[0] + wide if wide.requires_grad else total[0].add_(wide)]
            sent[i] = None
        waits.discard(sender)
        if waits:
            continue
        del sums.sums[key]
        if total and not present:
            raise RuntimeError(
                f"ckptkern.tiled: {sums.nodes[sender].name()}, the last of a sum, has no gradient. Run with ckptkern's C++ "
                "extension (python -m ckptkern env), or give chunks=1"
            )
        if total:
            sent[present[0]] = total[0].to(grads[present[0]].dtype)
    return tuple(sent)
