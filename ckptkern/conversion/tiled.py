"""Runs a token-wise module inside a model in chunks of tokens, each an activation checkpoint: before an LM head, where it saves
its input alone, and inside a layer whose forward is not recorded, where it bounds what the layer's backward recomputes at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import noop_context_fn

from ..nn.unmodified import hooked, runs_class_forward
from ..ops.dispatch.choices import choose_workspace
from ..segments.decisions import decides, saved_decisions
from ..segments.tiled import check_token_wise, run_in_chunks
from ..subclasses import PLAIN
from .binding import Forward, requires_grad
from .guard import Watch, reads_of
from .protection import unmoved
from .recorder import saved_bytes
from .report import AGAIN, Row
from .trace import Call, Unreadable, is_floating


def kinds_of(tensors: Iterable[Tensor | None]) -> str:
    """Returns the names of the tensors' classes other than Tensor and Parameter."""
    return " and a ".join(sorted({type(tensor).__name__ for tensor in tensors if type(tensor) not in PLAIN}))


class Tiled(Forward):
    """Runs the class's forward in chunks of tokens that fit the workspace, saves its input, and recomputes each chunk in
    backward. It runs the forward unchanged without gradients, under torch.compile, which recomputes elementwise ops itself,
    and in torch.func's transforms.

    head: the name of an LM head inside, whose result the forward returns: the forward then runs in chunks without the head,
    which is called with all tokens; "" if there is none. is_inside: an activation checkpoint is around it, so that a single
    chunk need not be one. chunks: their number, in a check.
    """

    is_inside = False
    chunks: int | None = None

    def __init__(self, module: nn.Module, recompute: str, x: Tensor, head: str):
        super().__init__(module, recompute)
        self.head = head
        # a module that ends in a head may get another head, or adapters of it
        self.watch = None if head else Watch(module, reads_of(module, ((x,), {})))
        self.context_fn = saved_decisions if decides(self.hidden, x) else noop_context_fn

    def hidden(self, x: Tensor) -> Tensor:
        """Returns the forward's result, or the input of the head. Raises Unreadable if the forward does not return the head's
        result."""
        if not self.head:
            return self.original(x)
        parent, _, name = self.head.rpartition(".")
        modules, passed, identity = self.module.get_submodule(parent)._modules, list[Tensor](), nn.Identity()
        identity.register_forward_hook(lambda *call: passed.append(call[-1]))
        head, modules[name] = modules[name], identity
        try:
            y = self.original(x)
        finally:
            modules[name] = head
        if len(passed) != 1 or passed[0] is not y:
            raise Unreadable(f"its result is not that of {self.head}")
        return y

    def in_chunks(self, x: Tensor) -> Tensor:
        return run_in_chunks(
            self.module,
            self.hidden,
            x,
            x.dim() - 2,
            self.chunks,
            choose_workspace("tiled", self.workspace, x),
            self.is_inside,
            context_fn=self.context_fn,
        )

    def traced(self, x: Tensor) -> Tensor:
        """Returns an empty result, like that of one token: a forward that reads values does not run on fake tensors."""
        with _disable_current_modes(), torch.no_grad():
            y = self.original(torch.zeros(*[1] * (x.dim() - 1), x.shape[-1], dtype=x.dtype, device=x.device))
        return x.new_empty(*x.shape[:-1], y.shape[-1], dtype=y.dtype)

    def run(self, *args, **kwargs):
        if (
            not torch.is_grad_enabled()
            or is_compiling()
            or torch._C._are_functorch_transforms_active()
            or torch.jit.is_tracing()
            or not any(map(requires_grad, (*args, *self.module.parameters())))
        ):
            return self.original(*args, **kwargs)
        why = ""
        if len(args) != 1 or kwargs:
            why = "it is called with more than its input"
        elif others := kinds_of((*args, *self.module.parameters())):
            why = f"its input or weight is a {others}"
        elif args[0].dim() < 2:
            why = "its input has no dimension of tokens"
        elif any(map(hooked, self.module.modules() if self.watch is None else (self.module,))):
            why = "it has a hook"
        watch = self.watch
        if why or not (watch is None or watch.unchanged()):
            return self.unfused(lambda: f"{why}. {AGAIN}" if why else watch.difference(), args, kwargs)
        try:
            y = self.in_chunks(*args)
        except Unreadable as error:
            return self.unfused(lambda why=f"{error}. {AGAIN}": why, args, kwargs)
        self.count("fused")
        return self.module.get_submodule(self.head)(y) if self.head else y


def attributes_of(module: nn.Module) -> list:
    return [value for m in module.modules() for value in vars(m).values()]


def adds_gradients(module: nn.Module, forward: Callable, x: Tensor) -> bool:
    """Returns whether backward gives gradients without one of the result, as with an auxiliary loss, which is a mean over
    tokens."""
    with torch.enable_grad():
        y = forward(x := x.detach().requires_grad_())
        sources = [x, *filter(requires_grad, module.parameters())]
        gradients = torch.autograd.grad(y, sources, torch.zeros_like(y), allow_unused=True)
    return any(gradient is not None and bool(gradient.any()) for gradient in gradients)


def tiled(
    name: str, module: nn.Module, x: Tensor, recompute: str, is_inside: bool = False, head: str = ""
) -> tuple[Row, Tiled] | None:
    """Returns (the module's row in the table, its new forward); None if it is not token-wise, or saves hardly more than its
    input, x. is_inside, head: as in Tiled."""
    row = Row(name, type(module).__name__, "tiled")
    try:
        with unmoved(module):
            forward, before = Tiled(module.eval(), recompute, x, head), attributes_of(module)
            for mode in (False, True):  # some forwards limit an expert's tokens in training only
                module.train(mode)
                check_token_wise(module, forward.hidden, x, x.dim() - 2, x.shape[-2])
                if adds_gradients(module, forward.hidden, x):
                    return None
            after = attributes_of(module.eval())
            if any(a is not b for a, b in itertools.zip_longest(before, after)):  # the last chunk would leave its own
                return None
        runs = forward.hidden, forward.in_chunks
        row.saved_before, row.saved_after = (saved_bytes(module, run, ((x,), {})) for run in runs)
        forward.is_inside = is_inside
    except Exception:  # what cannot be replaced stays as it is
        return None
    return (row, forward) if row.saved_before - row.saved_after >= x.nbytes else None


def tiled_inside(
    name: str, module: nn.Module, call: Call, recompute: str, leaves: Callable[[str, nn.Module], bool]
) -> Iterator[tuple[Row, Tiled]]:
    """Yields what `tiled` returns of modules inside, the outermost that are token-wise. leaves: says which modules to leave."""
    inputs, seen = dict[nn.Module, Tensor](), set[nn.Module]()

    def note(m, args, kwargs):
        if len(args) == 1 and not kwargs and is_floating(args[0]) and args[0].dim() > 1:
            inputs.setdefault(m, args[0])

    with unmoved(module), torch.no_grad():  # `unmoved` also removes hooks
        module.eval()
        for m in module.modules():
            m.register_forward_pre_hook(note, with_kwargs=True)
        module(*call[0], **call[1])

    def visit(path, outer):
        for child, m in outer.named_children():
            own = f"{path}.{child}" if path else child
            if m in seen or not runs_class_forward(m) or leaves(own, m):
                continue
            seen.add(m)
            is_plain = m in inputs and not any(map(hooked, m.modules()))
            if is_plain and (outcome := tiled(own, m, inputs[m], recompute, True)):
                yield outcome
            else:
                yield from visit(own, m)

    yield from visit(name, module)
