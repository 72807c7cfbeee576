"""Cuts a recorded forward into stages, each of which is independent along one axis and runs in slices of it.

The graph is walked from its end backwards. The last needed value becomes the result of a stage, which is cut along the axis
that lets most of the preceding operators join (`axes.followed`). Cheap operators may be in several stages, matmuls in one.
"""

from __future__ import annotations

import collections
import functools
import heapq
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from .axes import GEMMS, VIEWS, Axis, Cut, axes_of, even, followed, name_of, shape_of

WRITING = ("select_scatter", "slice_scatter", "copy")  # in place in the forward; backward needs none of their results
FLOOR = 32  # rows of a matmul, or queries, in the shortest slice: shorter slices cost more than they save
ASSUMED = 12  # a fused MLP's memory in sizes of its result: the graph does not show its inside
SCORES = 4  # tensors like attention's scores that are alive at once
SMALL = 16  # values up to 1/16 of the workspace are recomputed for each stage that reads them
JOINED = 8  # further results that a stage tries to take
LAUNCHED = 2**16  # the most operators in all slices of a stage, which bounds their time, as of a loop over tokens
MOST = 64  # nothing is cut with more values between stages
Nodes = list[fx.Node]


class Uncut(Exception):
    """Raised, with the reason, if a forward cannot run in parts."""


Form = tuple[list[Any], Any]  # a value without its tensors: its leaves, with positions for tensors, and its TreeSpec


@dataclass
class Call:
    """A call that is one operator. module: the recorded one, None for the function `run`. path: the module's. arguments,
    result: their forms, with positions of tensors among the operator's arguments and results."""

    module: nn.Module | None
    arguments: Form
    run: Callable
    result: Form | None = None
    path: str | None = None


@dataclass
class Stage:
    """Operators that run in slices along one axis of n entries, or at once if there are no axes.

    nodes: operators in order, with their cuts. axes: those of their results. inputs: values from other stages, with the axes
    along which slices read them, None for whole. before: operators that compute the inputs from saved values. results: values
    that later stages read. last: values that a node is the last to read.
    """

    n: int = 1
    nodes: dict[fx.Node, Cut] = field(default_factory=dict)
    axes: dict[fx.Node, Axis] = field(default_factory=dict)
    inputs: dict[fx.Node, set[Axis | None]] = field(default_factory=dict)
    before: Nodes = field(default_factory=list)
    results: Nodes = field(default_factory=list)
    last: dict[fx.Node, Nodes] = field(default_factory=dict)
    length: int = 1  # entries of a slice
    # inputs, stages and results of a slice that does not fit the workspace
    inside: tuple[Nodes, list[Stage], Nodes] | None = None
    again: bool = False  # runs at once, and again in backward

    @classmethod
    def whole(cls, nodes: Nodes, results: Nodes, again: bool = False) -> Stage:
        """Returns a stage of these nodes, in order, that runs at once."""
        stage = cls(results=results, again=again)
        stage.nodes = {node: Cut([(source, None) for source in node.all_input_nodes]) for node in nodes}
        read = (source for node in nodes for source in node.all_input_nodes)
        stage.inputs = {source: {None} for source in read if source not in stage.nodes}
        return stage

    @property
    def reads(self) -> list[tuple[fx.Node, Axis | None]]:
        """Returns each input, with each axis along which slices read it."""
        return [(node, axis) for node, axes in self.inputs.items() for axis in axes]

    def find_last(self) -> Stage:
        """Sets `last`."""
        readers = {source: node for node in self.nodes for source in node.all_input_nodes if source in self.nodes}
        for source, node in readers.items():
            if source not in self.results:
                self.last.setdefault(node, []).append(source)
        return self

    @property
    def cost(self) -> int:
        """Returns the bytes of the nodes' results."""
        return sum(map(bytes_of, self.nodes))

    def __str__(self) -> str:
        counts = collections.Counter(name_of(node).strip("_") for node in self.nodes if name_of(node) not in VIEWS)
        named = [name for name in counts if name in GEMMS or "attention" in name]
        calls: list[Call] = [node.meta["call"] for node in self.nodes if name_of(node) == "part"]
        called = dict.fromkeys(call.path or call.run.__name__ for call in calls)
        shown = [f"{name} x{counts[name]}" if counts[name] > 1 else name for name in named] + [*called]
        return ", ".join(shown or list(counts)[:2]) + (f" by {self.n}" if self.axes else "")


def is_list(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (list, tuple))


def size_of(node: fx.Node) -> int:
    value = node.meta["val"]
    return sum(tensor.numel() * tensor.itemsize for tensor in (value if is_list(node) else [value]))


def may_be_trained(node: fx.Node) -> bool:
    """Returns whether the node depends on a parameter or a floating-point argument."""
    if "trained" not in node.meta:
        value = node.meta.get("val")
        of = (
            isinstance(value, nn.Parameter) if node.op == "get_attr" else any(map(may_be_trained, node.all_input_nodes))
        )
        of = (of or node.op == "placeholder") and (is_list(node) or value.is_floating_point())
        node.meta["trained"] = of and name_of(node) not in ("detach", "stopped")
    return node.meta["trained"]


def bytes_of(node: fx.Node) -> int:
    """Returns the bytes that a node allocates."""
    value = node.meta.get("val")
    if name_of(node) in VIEWS or name_of(node) in WRITING or value is None:
        return 0
    size = size_of(node)
    mask = node.kwargs.get("attn_mask")
    if mask is not None and may_be_trained(mask):  # core attention that computes scores, [B, H, S, S]
        q, k = node.args[:2]
        return size + SCORES * size_of(q) // shape_of(q)[-1] * shape_of(k)[2]
    return ASSUMED * size if name_of(node) == "part" and node.args[3] == "tokens" else size


def call_of(node: fx.Node) -> fx.Node | None:
    """Returns the call that the node is a result of, or None."""
    source = node.args[0] if name_of(node) == "getitem" else node
    return source if name_of(source) == "part" else None


def is_heavy(node: fx.Node) -> bool:
    """Returns whether a fused layer, which bounds its own memory, is not cut: the sums of its parameters' gradients over
    slices would take more than its input and result."""
    return name_of(node) == "part" and sum(map(size_of, node.args[1])) > 2 * size_of(node)


def in_turn(nodes: Nodes, workspace: int) -> list[Stage]:
    """Returns stages of successive nodes whose values fit the workspace, such as some steps of a loop over tokens."""
    runs, cost = [[]], 0
    for node in nodes:
        cost += bytes_of(node)
        if cost > workspace and name_of(node) != "getitem":
            runs.append([])
            cost = bytes_of(node)
        runs[-1].append(node)
    stages = []
    for run in filter(None, runs):
        own = set(run)
        results = [node for node in run if not own.issuperset(node.users) and not is_list(node)]
        stages.append(Stage.whole(run, results, again=True).find_last())
    return stages


class Planner:
    """Cuts a graph into stages, from its end backwards."""

    def __init__(self, graph: fx.Graph, workspace: int, slices: int = 0, times: int = 1):
        """Reads the graph, which runs `times` times."""
        self.workspace, self.slices, self.times = workspace, slices, times
        self.placed: set[fx.Node] = set()  # nodes of later stages
        self.ends: set[fx.Node] = set()  # matmuls that end a stage
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.given = {node for node in graph.nodes if node.op in ("placeholder", "get_attr")}
        # parameters, and values computed from parameters only and no larger than these -> the parameters' bytes
        self.fixed = {node: size_of(node) for node in graph.nodes if node.op == "get_attr"}
        self.ancestors: dict[fx.Node, int] = {}
        for node, i in self.order.items():
            inputs = node.all_input_nodes
            if node.op == "call_function" and all(source in self.fixed for source in inputs):
                size = sum(self.fixed[source] for source in inputs)
                if size_of(node) <= max(size, workspace // SMALL):
                    self.fixed[node] = size
            self.ancestors[node] = functools.reduce(operator.or_, (self.ancestors[source] for source in inputs), 1 << i)
        self.ready = self.given | self.fixed.keys()  # inputs, and what is computed from parameters only
        self.output = graph.output_node()

    def plan(self) -> list[Stage]:
        needed = {node for node in self.output.all_input_nodes if node not in self.given}
        stages: list[Stage] = []
        while needed:
            if len(needed) > MOST or len(stages) > MOST:
                raise Uncut("its parts exchange too many values")
            last, *others = sorted(needed, reverse=True)
            axes = () if is_list(last) else axes_of(last)
            cut = [stage for axis, n in axes if (stage := self.grown({last: axis}, n)) is not None]
            if cut:
                best = self.narrowed(max(cut, key=lambda stage: (stage.cost, stage.n)))
                stage = functools.reduce(self.joined, others[:JOINED], best)
                stage.results = [node for node in needed if node in stage.nodes]
            else:  # one operator that is not cut, or a call and all its results
                call = call_of(last)
                results = [node for node in needed if node is last or (call and call_of(node) is call)]
                stage = Stage.whole(list(dict.fromkeys((call or last, *results))), results)
            bases = self.finish(stage)
            stages.append(stage)
            self.placed.update(stage.nodes)
            needed.difference_update(stage.results)
            needed |= bases - self.ready
        return stages[::-1]

    def base_of(self, node: fx.Node) -> fx.Node:
        """Returns the base of a view, through all views; else the node itself."""
        while name_of(node) in VIEWS:
            node = node.args[0]
        return node

    def taken(self, stage: Stage) -> int:
        """Returns the bytes that the stage reads from other stages."""
        return sum(size_of(node) for node in stage.inputs if node not in self.ready)

    def narrowed(self, stage: Stage) -> Stage:
        """Returns the stage. If it reads more than the workspace from other stages, such as scores of all heads: the costliest
        stage of the same result that reads less, because an earlier stage ends in one of its matmuls."""
        if self.taken(stage) <= self.workspace:
            return stage
        (last,), ways = stage.results, []
        for node in [node for node in stage.nodes if name_of(node) in GEMMS][:MOST]:
            self.ends.add(node)
            other = self.grown({last: stage.axes[last]}, stage.n)
            if other is not None and self.taken(other) <= self.workspace:
                ways.append((other.cost, node, other))
            self.ends.remove(node)
        if not ways:
            return stage
        _, node, stage = max(ways, key=lambda way: way[0])
        self.ends.add(node)
        return stage

    def joined(self, stage: Stage, other: fx.Node) -> Stage:
        """Returns the stage with another result if the two share work, else the stage."""
        roots = {node: stage.axes[node] for node in stage.results}
        if other in stage.nodes:  # no other stage needs values computed from it
            return self.grown({**roots, other: stage.axes[other]}, stage.n) or stage
        if other in stage.inputs:
            return stage
        mask = sum(1 << self.order[node] for node in (other, *stage.results))
        wider = []
        for axis, n in axes_of(other):
            if n != stage.n:
                continue
            grown, alone = self.grown({**roots, other: axis}, n), self.grown({other: axis}, n)
            if grown is None or alone is None or any(self.ancestors[source] & mask for source in grown.inputs):
                continue
            common = any(axes & stage.inputs.get(source, set()) for source, axes in alone.inputs.items())
            if common or grown.cost < stage.cost + alone.cost:
                wider.append(grown)
        return max(wider, key=lambda stage: stage.cost, default=stage)

    def grown(self, roots: dict[fx.Node, Axis], n: int) -> Stage | None:
        """Returns the stage with these results, cut along these axes; None if a result cannot be cut so."""
        stage = Stage(n=n, results=list(roots))
        wanted: dict[fx.Node, set[Axis | None]] = {node: {axis} for node, axis in roots.items()}
        heap = [(-self.order[node], node) for node in wanted]
        heapq.heapify(heap)
        shared: set[fx.Node] = set()
        while heap:
            node = heapq.heappop(heap)[1]
            axes = wanted.pop(node)
            cut = None
            is_end = node in self.ready or (node in self.ends and node not in roots)
            if not is_end and len(axes) == 1 and None not in axes:
                (axis,) = axes
                cut = None if is_heavy(node) else followed(node, axis, n)
                if node not in roots and not all(user in stage.nodes or user in self.placed for user in node.users):
                    shared.add(node)
                if node in shared and name_of(node) in GEMMS and node not in roots:
                    cut = None  # the matmul would be computed twice
            if cut is None:
                items = [user for user in node.users if user in stage.nodes] if is_list(node) else [node]
                if not roots.keys().isdisjoint(items):
                    return None
                for source in items:
                    stage.inputs[source] = {stage.axes[source]} if stage.nodes.pop(source, None) else axes
                continue
            stage.nodes[node], stage.axes[node] = cut, axis
            for source, along in cut.inputs:
                if source not in wanted:
                    heapq.heappush(heap, (-self.order[source], source))
                wanted.setdefault(source, set()).add(along)
                if node in shared:
                    shared.add(source)
        # views that together are smaller than their base are left to an earlier stage, if nothing else here reads the base
        views: dict[fx.Node, Nodes] = {}
        for node in stage.nodes:
            if name_of(node) in VIEWS:
                views.setdefault(self.base_of(node), []).append(node)
        for base in [source for source in stage.inputs if source not in self.ready]:
            shown = views.get(base, [])
            ends = [
                node
                for node in (base, *shown)
                if not is_list(node)
                and (node in stage.results or not all(user in shown for user in node.users if user in stage.nodes))
            ]
            if sum(map(size_of, ends)) < size_of(base) and not any(node in stage.results for node in ends):
                del stage.inputs[base]
                for node in shown:
                    del stage.nodes[node]
                stage.inputs.update((node, {stage.axes[node]}) for node in ends)
        return stage

    def finish(self, stage: Stage) -> set[fx.Node]:
        """Orders the nodes, finds the inputs to compute before the stage, and chooses the length of slices. Returns the saved
        values, from which `before` computes the inputs."""
        stage.nodes = {node: stage.nodes[node] for node in sorted(stage.nodes)}
        before, bases = set[fx.Node](), set[fx.Node]()
        todo, shown = list(stage.inputs), collections.Counter()  # bytes of each value that the views of it show
        for node in stage.inputs:
            size = size_of(node)
            while name_of(node) in VIEWS:
                node = node.args[0]
                size = min(size, size_of(node))
                shown[node] += size
        while todo:
            node = todo.pop()
            if node in before or node in bases:
                continue
            is_cheap = node in self.fixed and node.op == "call_function"
            if (
                not is_cheap and name_of(node) in VIEWS
            ):  # that together show all of an earlier value, or are of an input
                source = node.args[0]
                is_whole = self.base_of(source) in self.given or max(size_of(node), shown[source]) >= size_of(source)
                is_item = name_of(node) == "getitem" and not name_of(source).startswith(("split", "unbind"))
                is_cheap = is_whole and not is_item
            if is_cheap:
                before.add(node)
                todo += node.all_input_nodes
            else:
                bases.add(node)
        stage.before = sorted(before)
        if stage.axes:
            rows = [
                shape_of(node)[axis.dim] // stage.n
                for node, axis in stage.axes.items()
                if name_of(node) in ("mm", "addmm") or (axis.dim == 2 and "attention" in name_of(node))
            ]
            floor = -(-FLOOR // max(min(rows), 1)) if rows else 1
            floor = max(floor, -(-stage.n // max(LAUNCHED // (self.times * len(stage.nodes)), 1)))
            most = max(floor, self.workspace * stage.n // max(2 * stage.cost, 1))
            stage.length = -(-stage.n // self.slices) if self.slices else even(stage.n, most)
        if stage.length >= stage.n:  # views of whole weights inside, so that no gradient waits for others
            for node in sorted(before & self.fixed.keys(), reverse=True):
                is_whole = name_of(node) in VIEWS and size_of(node) == size_of(node.args[0])
                if is_whole and stage.inputs.pop(node, None):
                    stage.nodes[node] = Cut([(node.args[0], None)])
                    stage.inputs.setdefault(node.args[0], set()).add(None)
            stage.nodes = dict(sorted(stage.nodes.items()))
        stage.find_last()
        return bases
