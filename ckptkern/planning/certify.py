"""Compares a training step of a converted model with the unmodified model's, both against float64."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .. import memory
from ..conversion.binding import forward_of, revert
from ..conversion.blocks import is_converted
from ..conversion.check import rms
from ..conversion.convert import convert
from ..conversion.protection import seeded, unmoved
from ..conversion.recorder import Loss, Step, floating_in, loss_of, step_of
from ..conversion.report import RAN, Row, aligned, alike
from ..conversion.trace import Call, mapped, switched
from .segments import check_step, server_of

TOLERANCE = 2.0  # times eager's own error
SHOWN = 5  # parameters shown by print
OTHERS = {"Head": "linear_cross_entropy", "Tiled": "tiled"}  # replacements that are not regions, by their class


@dataclasses.dataclass
class GradientError:
    """Relative errors of a parameter's gradient, ||g - g64|| / ||g64||. ||g64|| counts as at least 1% of the largest
    gradient's (root mean square)."""

    name: str
    eager: float
    ours: float

    @property
    def ratio(self) -> float:
        """Returns ours / eager; 1 if both are 0."""
        return self.ours / self.eager if self.eager else float("inf") if self.ours else 1.0


@dataclasses.dataclass
class Certificate:
    """The result of `certify`; `print(certificate)` summarizes it, and `write(path)` writes all of it as Markdown.

    gradients: errors of each trained parameter's gradient. loss, saved, peak: the loss's error, bytes saved for backward, and
    the step's peak, each as (unmodified, converted). replaced: module name -> its replacement. unused: replaced modules that
    ran as before convert. `passed`: whether it passes; `failures`: names whose error is too large.
    """

    gradients: list[GradientError]
    loss: tuple[float, float]
    saved: tuple[int, int]
    peak: tuple[int, int]
    replaced: dict[str, str]
    unused: list[str]
    dropout: bool
    tolerance: float
    least: float

    def allowed(self, error: float) -> float:
        """Returns the largest error that passes where eager's is `error`."""
        return self.tolerance * max(error, self.least)

    @property
    def failures(self) -> list[str]:
        """Returns the names of parameters, or "loss", whose error is too large or NaN."""
        errors = [GradientError("loss", *self.loss), *self.gradients]
        return [error.name for error in errors if not error.ours <= self.allowed(error.eager)]

    @property
    def passed(self) -> bool:
        """Returns whether modules were replaced, all of them ran, and no error is too large."""
        return not (self.failures or self.unused) and bool(self.replaced)

    def text(self, most: int | None = None) -> str:
        """Returns the certificate as text, with the `most` gradients of the largest ratios; None: all."""
        verdict = "passed: the converted model computes what the unmodified one computes" if self.passed else "FAILED"
        lines = [verdict]
        if self.failures:
            lines.append(f"errors too large: {', '.join(self.failures)}")
        if self.unused:
            lines.append(f"replaced, but ran as before convert: {', '.join(self.unused)}")
        if not self.replaced:
            lines.append("nothing was replaced: print(ckptkern.convert(model, ...)) says why")
        largest = [max(getattr(gradient, of) for gradient in self.gradients) for of in ("eager", "ours")]
        summary = [
            ("against float64", "unmodified", "converted"),
            ("error of the loss", *map("{:.1e}".format, self.loss)),
            ("largest error of a gradient", *map("{:.1e}".format, largest)),
            ("saved for backward", *map(memory.format_size, self.saved)),
            ("peak of the step", *map(memory.format_size, self.peak)),
        ]
        lines += ["", *aligned(summary), ""]
        lines.append(f"passes: at most {self.tolerance:g} times the unmodified model's error, or {self.allowed(0):.1e}")
        off = "off, because ckptkern's masks are not torch's of the same seed"
        lines.append(f"dropout: {'none' if self.dropout else off}")
        order = sorted(self.gradients, key=lambda gradient: -gradient.ours / self.allowed(gradient.eager))
        errors = [
            (gradient.name, f"{gradient.eager:.1e}", f"{gradient.ours:.1e}", f"{gradient.ratio:.2f}")
            for gradient in order[:most]
        ]
        groups = alike(Row(name, "", by) for name, by in self.replaced.items())
        replaced = [(name, str(rows[0].replaced_by)) for name, rows in groups]
        lines += ["", *aligned([("module", "replaced by"), *replaced])]
        lines += ["", *aligned([("gradient of", "unmodified", "converted", "ratio"), *errors])]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text(SHOWN)

    def write(self, path: str | os.PathLike) -> None:
        """Writes the whole certificate as Markdown."""
        verdict, _, rest = self.text().partition("\n")
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        Path(path).write_text(f"# {verdict}\n\n```text\n{rest}\n```\n\ntorch {torch.__version__}, {device}\n")


class InFloat64(TorchDispatchMode):
    """Keeps float64 tensors in float64 where a model upcasts norms and logits to float32."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64:
            wanted = kwargs.get("dtype")
            if wanted is not None and wanted.is_floating_point:
                kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


def certify(
    model: nn.Module,
    *example_inputs: Any,
    loss: Loss | None = None,
    tolerance: float = TOLERANCE,
    **example_kwargs: Any,
) -> Certificate:
    """Compares a training step of the converted model with the unmodified model's: the loss and every gradient, both against
    float64.

        certificate = ckptkern.certify(model, input_ids=ids, labels=ids)
        assert certificate.passed, certificate

    The steps run on copies, one reverted or one converted by `convert`'s defaults. A model with dropout is compared in eval
    mode. The certificate passes if all replaced modules ran and each error is at most `tolerance` times the unmodified model's,
    or times the median of all gradients' errors or the dtype's eps if larger.

    example_inputs, example_kwargs: a training batch. loss: as in `report`; but None weights the tensors by random numbers.

    Raises TypeError for another class of model or missing inputs; ValueError if the model is compiled, sharded or wrapped,
    returns several scalars, has no gradient, is random in eval mode, or cannot be copied or run in float64.
    """
    batch = example_inputs, example_kwargs
    check_step("certify", model, batch)
    try:
        eager, ours = copy.deepcopy(model), copy.deepcopy(model)
    except Exception as error:  # a module's own __deepcopy__ may raise anything
        raise ValueError(f"certify: the model cannot be copied: {type(error).__name__}: {error}") from error
    is_random = random(revert(eager).train(), batch)
    if is_random and random(eager.eval(), batch):
        raise ValueError("certify: two calls of the model in eval mode give different results. Make it deterministic")
    if not replaced_by(model):
        convert(ours, *example_inputs, **example_kwargs)
    forwards = {name: forward for name, m in ours.named_modules() if (forward := forward_of(m))}
    for forward in forwards.values():
        forward.calls = dict.fromkeys(RAN, 0)
    (their_step, theirs), (our_step, converted) = (ran(m, batch, loss, not is_random) for m in (eager, ours))
    unused = [name for name, forward in forwards.items() if not any(forward.calls[how] for how in RAN[:2])]
    replaced = replaced_by(ours)
    del ours, forwards
    try:
        with switched(eager), InFloat64():
            wide = mapped(lambda t: t.double() if t.is_floating_point() else t, batch)
            _, exact = ran(eager.double(), wide, loss, not is_random)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise ValueError(
            f"certify: the unmodified model does not run in float64: {type(error).__name__}: {error}"
        ) from error
    names = list(exact)[1:]
    floor = 1e-2 * max(rms(exact[name]) for name in names)
    (loss_of_theirs, *errors), (loss_of_ours, *errors_of_ours) = (
        [rms(run[name].double() - to) / max(rms(to), floor if name else 0.0, 1e-300) for name, to in exact.items()]
        for run in (theirs, converted)
    )
    eps = max(torch.finfo(theirs[name].dtype).eps for name in names)
    return Certificate(
        list(map(GradientError, names, errors, errors_of_ours)),
        loss=(loss_of_theirs, loss_of_ours),
        saved=(their_step.saved, our_step.saved),
        peak=(their_step.peak, our_step.peak),
        replaced=replaced,
        unused=unused,
        dropout=not is_random,
        tolerance=tolerance,
        least=max(eps, statistics.median(errors)),
    )


def replaced_by(model: nn.Module) -> dict[str, str]:
    """Returns what replaces each module that convert changed, by name."""
    names = {}
    for name, module in model.named_modules():
        if is_converted(module):
            kind = type(forward_of(module)).__name__
            names[name] = OTHERS.get(kind) or server_of(module) or kind
    return names


def random(model: nn.Module, call: Call) -> bool:
    """Returns whether two calls give different results."""
    args, kwargs = call
    with seeded(), unmoved(model), torch.no_grad():
        first, second = (floating_in(model(*args, **kwargs)) for _ in range(2))
    return not all(map(torch.equal, first, second))


def ran(model: nn.Module, call: Call, loss: Loss | None, trains: bool) -> tuple[Step, dict[str, Tensor]]:
    """Runs one step from a fixed seed, with gradients of zeros before. Returns it, and by name the loss, "", and the gradient
    of each parameter."""
    gradients: dict[str, Tensor] = {}
    step = step_of(
        model,
        call,
        loss=functools.partial(loss_of, loss=loss, summed=weighted, op="certify"),
        there=model.parameters(),
        trains=trains,
        ended=lambda: gradients.update({name: p.grad for name, p in model.named_parameters() if p.requires_grad}),
    )
    return step, {"": step.loss, **gradients}


def weighted(wanted: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the tensors, each times fixed random numbers."""
    seed = torch.Generator().manual_seed(0)
    return torch.stack(
        [(tensor * torch.randn(tensor.shape, generator=seed).to(tensor)).double().sum() for tensor in wanted]
    ).sum()
