"""Runs a layer's forward in parts, each of which fits a workspace in forward and backward.

The forward is recorded as a graph of ATen operators, on fake tensors, once for each kind of call, and cut into stages. A stage
is independent along one axis (`axes.followed`): token-wise operators along tokens; operators that mix tokens, such as attention
or a scan, along heads, channels or samples. A stage runs on as many entries of its axis at a time as fit the workspace, saves
its inputs, and recomputes each slice in backward. Values between stages are stored whole.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import _C, Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ..memory import meta_like, placeholders
from ..ops.dispatch.choices import autocast_dtype, own_modes
from ..subclasses import PLAIN
from .axes import VIEWS, Sizes, argument, name_of, resized, shape_of
from .checkpoint import checkpoint
from .decisions import DECIDES
from .recorded import PLAIN_VALUES, Changed, Reads, Recording, class_forward, filled, recorded, taken
from .slices import in_slices
from .stages import Planner, Stage, Uncut, bytes_of, in_turn, is_list, size_of
from .tiled import is_transformed
from .unread import Unread, when_read

aten = torch.ops.aten
DEPTH = 2  # levels of slices within slices
GROWTHS = 3  # times that a call is planned anew because a module's state changed, such as a table for longer calls
PLANS = 64  # remembered plans of a layer


_planning = threading.RLock()

# -- running

# operators that run as another function. DECIDES: as torch's, which `decisions` sees: a recompute must decide the same
RUNS = {
    aten.view.default: aten.reshape.default,  # a slice's layout may differ from the whole tensor's
    aten._unsafe_view.default: aten.reshape.default,
    aten.copy.default: lambda target, x, non_blocking=False: x.to(target.dtype).expand_as(
        target
    ),  # it has no derivative
    # which takes only contiguous tensors, as slices of channels are not
    aten.native_group_norm.default: lambda x, *args: aten.native_group_norm(x.contiguous(), *args),
    torch.ops.ckptkern.stopped.default: Tensor.detach,
    **DECIDES,
}
# operators whose fifth argument says whether backward follows
FOR_BACKWARD = (aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default)


Modules = dict[str, nn.Module]
Values = dict[fx.Node, Any]


def run(node: fx.Node, value: Callable[[fx.Node], Any], sizes: Sizes = (), count: int = 0):
    """Runs an operator on a slice of `count` entries. sizes: those of its `axes.Cut`."""
    args, kwargs = fx.map_arg((resized(node, sizes, count), node.kwargs), value)
    target = RUNS.get(node.target, node.target)
    if target in FOR_BACKWARD:
        args = [*args[:4], torch.is_grad_enabled(), *args[5:]]
    if target is aten._scaled_dot_product_flash_attention_for_cpu.default:
        mask = kwargs.get("attn_mask")
        if mask is not None and mask.requires_grad:  # the operator has no gradient for masks
            return aten._scaled_dot_product_attention_math.default(
                *args[:3], mask, *args[3:], scale=kwargs.get("scale"), enable_gqa=True
            )
    return target(*args, **kwargs)


def run_stage(stage: Stage, values: Values, modules: Modules) -> None:
    """Computes a stage's results from `values` and adds them to it."""
    inner = dict(values)
    with _C._DisableAutocast():
        for node in stage.before:
            inner[node] = run(node, inner.__getitem__)

    def new(i, _):
        like = stage.results[i].meta["val"]
        with placeholders():
            strided = meta_like(like)
        return torch.empty_like(strided, device=like.device)  # dense, where it was expanded or a part of another tensor

    def compute(count, *parts):
        """Returns the results for `count` entries. parts: the inputs."""
        inputs = {
            (node, axis): part if axis is None else axis.flat(part)
            for (node, axis), part in zip(stage.reads, parts, strict=True)
        }
        computed: Values = {}
        if stage.inside is not None:
            placeholders, stages, ends = stage.inside
            computed.update(zip(placeholders, inputs.values(), strict=True))
            for part in stages:
                run_stage(part, computed, modules)
            return [computed[node] for node in ends]

        def value(source):
            return computed[source] if source in computed else inputs[source, axes[source]]

        for node, cut in stage.nodes.items():
            axes, call = dict(cut.inputs), node.meta.get("call")
            # casts are in the graph; a fused layer inside is a stage of its own
            with own_modes() if call else _C._DisableAutocast():
                if call is None:
                    computed[node] = run(node, value, cut.sizes, count)
                else:
                    tensors, parameters = ([value(source) for source in sources] for sources in node.args[:2])
                    args, kwargs = filled(call.arguments, tensors)
                    if call.path is None:
                        result = call.run(*args, **kwargs)
                    else:  # computes with these parameters in place of the module's own
                        module = modules[call.path]
                        names = [name for name, _ in module.named_parameters()] if parameters else []
                        with _reparametrize_module(module, dict(zip(names, parameters, strict=True)), tie_weights=True):
                            result = module.forward(*args, **kwargs)
                    computed[node] = taken(result)[0]
            for source in stage.last.get(node, ()):
                del computed[source]
        return [computed[node] for node in stage.results]

    if stage.axes:
        results = in_slices(
            lambda count: functools.partial(compute, count),
            [(inner[node], axis) for node, axis in stage.reads],
            [stage.axes[node] for node in stage.results],
            stage.n,
            stage.length,
            lambda returned, _: returned,
            new,
            preserve_rng_state=False,
        )
    else:
        parts = [inner[node] for node, _ in stage.reads]
        results = checkpoint(compute, 1, *parts) if stage.again else compute(1, *parts)
    values.update(zip(stage.results, results, strict=True))


@dataclass
class Plan:
    """The plan of a kind of call. print(plan) shows its stages, each with its number of entries."""

    stages: list[Stage]
    inputs: list[fx.Node]  # tensors among the arguments
    held: Values  # (path of a module, "_parameters" or "_buffers", name), or a constant
    output: fx.Node
    spec: Any = None
    cost: int = 0
    # operators, and the parameters that they change
    writes: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    # results that are computed when they are read, by place
    unread: dict[int, fx.Node] = field(default_factory=dict)
    ends: dict[Callable, tuple] = field(default_factory=dict)  # states in which it leaves generators that it seeds

    def __str__(self) -> str:
        return " | ".join(map(str, self.stages))


def _sizes(workspace: int, args: tuple, kwargs: dict) -> tuple[tuple, list[int]]:
    """Returns a key of calls whose sizes are comparable, and the sizes of all tensors that are not nested."""
    shapes = [value.shape if isinstance(value, Tensor) else None for value in (*args, *kwargs.values())]
    kind = workspace, *(None if shape is None else len(shape) for shape in shapes)
    return kind, [size for shape in shapes if shape is not None for size in shape]


class _Shared:
    """Wraps a mapping that layers use to pass tensors to later layers, so that pytree flattens it."""

    def __init__(self, mapping: MutableMapping):
        self.mapping = mapping


register_pytree_node(
    _Shared, lambda shared: ([dict(shared.mapping)], type(shared.mapping)), lambda held, kind: kind(*held)
)


@contextlib.contextmanager
def noting(module: nn.Module, names: set[str], read: set[str]) -> Iterator[None]:
    """Adds those of these attributes of modules inside that are read to `read`."""
    with contextlib.ExitStack() as stack:
        for m in module.modules():
            for name in names & vars(m).keys():
                noted = property(lambda owner, name=name: (read.add(name), vars(owner)[name])[1])
                stack.enter_context(mock.patch.object(type(m), name, noted, create=True))
        yield


class Parts:
    """Runs the forward of a module's class in parts. plans: by kind of call; None: runs whole. slices: the number for each
    stage, in a check; 0: by the workspace. is_whole: every call runs whole. why: the reason. differing: attributes in which
    the modules that share it differ, such as a layer's index: a forward that reads any of them has a plan of its own."""

    def __init__(self, is_whole: bool = False, differing: Iterable[str] = ()) -> None:
        self.is_whole, self.differing = is_whole, set(differing)
        self.plans: dict[Any, Plan | None] = {}
        self.whole: dict[tuple, list[list[int]]] = {}  # sizes of calls that fit the workspace whole
        self.slices = self.changes = 0
        self.why = ""

    def __reduce__(self) -> tuple:  # a copy plans anew
        return Parts, (self.is_whole, self.differing)

    def share(self, differing: set[str]) -> None:
        """Prepares for one more module, which differs in these attributes."""
        if not differing <= self.differing:
            self.differing |= differing
            self.plans.clear()

    def fits(self, workspace: int, args: tuple, kwargs: dict) -> bool:
        """Returns whether an earlier call at least as large fitted the workspace whole."""
        kind, sizes = _sizes(workspace, args, kwargs)
        return not self.slices and any(all(map(operator.le, sizes, large)) for large in self.whole.get(kind, ()))

    def __call__(self, module: nn.Module, workspace: int, args: tuple, kwargs: dict, later: bool = False):
        """Returns the forward's result. later: attention's probabilities in it are computed when they are read."""
        flat, spec = tree_flatten((args, kwargs))
        if any(isinstance(value, MutableMapping) for value in flat):
            flat, spec = tree_flatten(tree_map_only(MutableMapping, _Shared, (args, kwargs)))
            later = False  # a second run would fill the mapping again
        plan = None
        if not (self.is_whole or is_transformed()):
            plan = self.plan_of(module, flat, spec, workspace, later)
        if plan is None:
            with own_modes():  # fused layers inside bound their own memory
                return class_forward(module, args, kwargs)
        if not self.slices and 2 * plan.cost <= workspace:
            kind, sizes = _sizes(workspace, args, kwargs)
            self.whole.setdefault(kind, []).append(sizes)
            return class_forward(module, args, kwargs)
        values: Values = dict(zip(plan.inputs, (value for value in flat if isinstance(value, Tensor)), strict=True))
        modules = dict(module.named_modules())
        for node, held in plan.held.items():
            values[node] = held if isinstance(held, Tensor) else getattr(modules[held[0]], held[1])[held[2]]
        with torch.no_grad():
            for node, of in plan.writes:
                node.target(values[of].data, *node.args[1:], **node.kwargs)
        if _C._current_graph_task_id() == -1:  # not in a recompute
            for put, state in plan.ends.items():
                put(state)
        for stage in plan.stages:
            run_stage(stage, values, modules)
        leaves = list(fx.map_arg(plan.output.args[0], values.__getitem__))
        if plan.unread:
            original = when_read(functools.partial(type(module).forward, module, *args, **kwargs), module, flat)
            for i, node in plan.unread.items():
                leaves[i] = Unread(original, i, node.meta["val"])
        result, now = tree_unflatten(leaves, plan.spec)
        mappings = (value for value in tree_leaves((args, kwargs)) if isinstance(value, MutableMapping))
        for mapping, held in zip(mappings, now, strict=True):
            mapping.update(held)
        return result

    def plan_of(self, module: nn.Module, flat: list, spec, workspace: int, later: bool) -> Plan | None:
        tensors = [value for value in flat if isinstance(value, Tensor)]
        if not all(type(value) in PLAIN or isinstance(value, PLAIN_VALUES) for value in flat) or not tensors:
            self.why = "an argument is neither a tensor nor a constant"
            return None
        kinds = [
            (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else (type(value), value)
            for value in flat
        ]
        own = [pair for m in module.modules() for d in (m._parameters, m._buffers) for pair in d.items()]
        if any(hasattr(tensor, "main_grad") for _, tensor in own):  # an op sums gradients in it
            self.why = "a parameter has a main_grad"
            return None
        kinds += [(name, tensor if tensor is None else (tensor.shape, tensor.dtype)) for name, tensor in own]
        key = (spec, workspace, later, self.slices, module.training, autocast_dtype(tensors[0]), *kinds)
        keys, read = (key, (key, module)), set[str]()  # modules that are alike may set other seeds
        with _planning:
            for key in keys:
                if key in self.plans:
                    self.plans[key] = plan = self.plans.pop(key)  # the last to be forgotten
                    return plan
            plan = None
            try:
                with (
                    torch.no_grad(),
                    _C.DisableTorchFunction(),
                    _disable_current_modes(),
                    noting(module, self.differing, read),
                ):
                    plan = planned(module, flat, spec, workspace, self.slices, later)
            except Changed as error:
                self.why, self.changes = str(error), self.changes + 1
                if self.changes <= GROWTHS:
                    return None
            except Exception as error:  # any error of a forward on fake tensors
                self.why = str(error) if isinstance(error, Uncut) else f"{type(error).__name__}: {error}"
            self.plans[keys[bool(read or (plan and plan.ends))]] = plan
            if len(self.plans) > PLANS:
                del self.plans[next(iter(self.plans))]
            return plan


def plan_inside(stages: list[Stage], mode: FakeTensorMode, workspace: int, depth: int = 0, times: int = 1) -> None:
    """Cuts slices that do not fit the workspace into stages of their own. times: how often the stages run."""
    for stage in stages:
        fits = 2 * stage.cost * stage.length <= workspace * stage.n
        calls = any("call" in node.meta for node in stage.nodes)
        if fits or calls or not stage.axes or stage.n % stage.length or depth == DEPTH:
            continue
        graph, placeholders, copies = fx.Graph(), {}, {}

        def part(node, axis, stage=stage):
            """Returns fake tensors like a slice of the node's result."""
            value = node.meta["val"]
            if axis is None:
                return value
            parts, size = [], shape_of(node)[axis.dim]
            for tensor in value if is_list(node) else [value]:
                if tensor.shape[axis.dim : axis.dim + 1] == (size,):
                    # an operator on fake tensors takes eight times as long as one on meta tensors
                    like = torch.empty_like(axis.part(meta_like(tensor), 0, stage.length))
                    tensor = FakeTensor(mode, like, tensor.device)
                parts.append(tensor)
            return parts if is_list(node) else parts[0]

        for node, axis in stage.reads:
            placeholders[node, axis] = graph.placeholder(node.name)
            placeholders[node, axis].meta["val"] = part(node, axis)
        for node, cut in stage.nodes.items():
            inputs = {source: copies.get(source) or placeholders[source, axis] for source, axis in cut.inputs}
            copies[node] = copied = graph.node_copy(node, inputs.__getitem__)
            copied.args = resized(copied, cut.sizes, stage.length)
            copied.meta = {"val": part(node, stage.axes.get(node))}
        ends = [copies[node] for node in stage.results]
        graph.output(ends)
        within = times * stage.n // stage.length
        inner = []
        if stage.length < stage.n:
            with contextlib.suppress(Uncut):
                inner = Planner(graph, workspace, times=within).plan()
                plan_inside(inner, mode, workspace, depth + 1, within)
        inner = inner if len(inner) > 1 else in_turn(list(copies.values()), workspace)
        if len(inner) > 1:
            stage.inside = [*placeholders.values()], inner, ends


def is_probabilities(node) -> bool:
    """Returns whether a result is a softmax behind views and casts, as attention's probabilities are."""
    while isinstance(node, fx.Node) and name_of(node) in (*VIEWS, "_to_copy", "clone"):
        node = node.args[0]
    return isinstance(node, fx.Node) and name_of(node) == "_softmax"


def planned(module: nn.Module, flat: list, spec, workspace: int, slices: int, later: bool) -> Plan:
    """Records and cuts a call with these flat values. Raises Uncut, or any error of the forward on fake tensors."""
    inputs, (values, _) = taken(flat)
    plan = Plan([], [], {}, None)

    def forward(*tensors):
        args, kwargs = arguments = filled((values, spec), tensors)
        before, kind = tree_flatten(arguments)
        with _C._EnableTorchFunction(), torch.enable_grad(), Recording(), Reads():
            result = class_forward(module, args, kwargs)
        now, after = tree_flatten(arguments)
        if after != kind or any(value is not other for value, other in zip(now, before, strict=True)):
            raise Uncut("its forward changes a list or dict among its arguments")
        shared = [dict(value) for value in now if isinstance(value, MutableMapping)]
        result, plan.spec = tree_flatten((result, shared))
        return result

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(tensor.detach()) for tensor in inputs]
    graph_module, calls, plan.ends = recorded(module, forward, fakes)
    paths = {m: path for path, m in module.named_modules()}
    held = {
        id(value): (path, kind, name)
        for m, path in paths.items()
        for kind in ("_parameters", "_buffers")
        for name, value in getattr(m, kind).items()
    }
    graph = graph_module.graph
    plan.output = graph.output_node()
    first, *others = plan.output.args[0]
    if later and not plan.ends and isinstance(first, fx.Node):
        # not a router's, which a loss may read
        plan.unread = {
            i: node for i, node in enumerate(others, 1) if is_probabilities(node) and size_of(node) > size_of(first)
        }
    plan.output.args = ([first, *(None if i in plan.unread else node for i, node in enumerate(others, 1))],)
    graph.eliminate_dead_code()
    plan.inputs = graph.find_nodes(op="placeholder")
    same: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        is_view = name_of(node) in VIEWS and all(source.op == "get_attr" for source in node.all_input_nodes)
        if node.op == "get_attr" or is_view:
            first = same.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
            if first is not node:  # else each step of a loop would have a weight, and a gradient, of its own
                node.replace_all_uses_with(first)
                graph.erase_node(node)
    for node in list(graph.nodes):
        name, target = name_of(node), node.target
        if name == "part":
            node.meta["call"] = call = calls[node.args[2]]
            call.path = paths.get(call.module)
            if call.module is not None and call.path is None:
                raise Uncut("its forward calls a module that is not inside it")
        if node.op == "get_attr":
            value = getattr(graph_module, target)
            plan.held[node] = held.get(id(value), value)
            # torch.tensor(0.5) in a forward is copied before it is read
            if id(value) not in held and any(name_of(user) != "lift_fresh_copy" for user in node.users):
                raise Uncut("its forward reads a tensor that is neither a parameter nor a buffer")
            node.meta["val"] = value
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            continue
        if name.startswith("as_strided"):
            raise Uncut("its forward reads memory by strides (as_strided)")
        if target._schema.is_mutable:
            changed = of = node.args[0]
            while name_of(of) in ("detach", "alias"):
                of = of.args[0]
            # a parameter by constants, as in a clamp of weights
            is_parameter = of.op == "get_attr" and plan.held[of][1] == "_parameters"
            if is_parameter and not node.users and node.all_input_nodes == [changed]:
                plan.writes.append((node, of))
                graph.erase_node(node)
                continue
            other = getattr(getattr(aten, name.removesuffix("_"), None), target._overloadname, None)
            # nothing else reads the tensor, as in torch's RMSNorm without a weight
            is_fresh = isinstance(changed.target, torch._ops.OpOverload) and not changed.target.is_view
            is_alike = all(source.meta["val"].dtype == changed.meta["val"].dtype for source in node.all_input_nodes)
            if other is None or other._schema.is_mutable or not (is_fresh and is_alike) or len(changed.users) > 1:
                raise Uncut(f"{target} cannot run in slices")
            node.target = other
        elif torch.Tag.nondeterministic_seeded in target.tags and argument(node, "dropout_p") != 0:  # samples
            raise Uncut(f"{target} cannot run in slices")
    try:
        plan.stages = Planner(graph, workspace, slices).plan()
    except Uncut:  # no axis, as of a loop over tokens that mixes channels
        plan.stages = in_turn([node for node in graph.nodes if node.op == "call_function"], workspace)
    if not slices:
        plan_inside(plan.stages, mode, workspace)
    plan.cost = sum(bytes_of(node) for node in graph.nodes if node.op == "call_function")
    return plan
