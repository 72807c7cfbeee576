"""The base class of layers, with the options of the op that a layer calls and `from_torch`; and Dropout, which saves 16 bytes
for backward instead of a mask."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn

from .. import ops
from ..ops.dispatch.choices import Bytes, check_count, check_options, modes_of_sublayers, parse_bytes

Own = TypeVar("Own", bound="Layer")


def check_counts(op: str, least: int = 1, **counts: int | None) -> None:
    """Raises ValueError for a count that is not an integer of at least `least`. None stands for a default."""
    for name, count in counts.items():
        if count is not None:
            check_count(op, name, count, least)


def weights(module: nn.Module, **layers: str) -> dict[str, Tensor | None]:
    """Returns {role}_weight and {role}_bias of the module's linear layers. layers: their names by role."""
    linear = {role: getattr(module, name) for role, name in layers.items()}
    return {f"{role}_{kind}": getattr(layer, kind) for role, layer in linear.items() for kind in ("weight", "bias")}


class Layer(nn.Module):
    """A module with the options of an op as attributes, which its repr shows.

    torch_class: the class that `from_torch` takes. shown: attributes in the repr. has_sublayers: recompute may be a pair.
    """

    torch_class: type[nn.Module] | None = None
    has_sublayers = False
    shown: tuple[str, ...] = (
        "num_experts",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "rope_theta",
        "activation",
        "dropout",
        "resid_dropout",
        "recompute",
        "workspace",
    )

    def set_options(self, recompute: Any = "selective", workspace: Bytes = None, **own: Any) -> None:
        """Checks options and sets them as attributes."""
        op = type(self).__name__
        for mode in modes_of_sublayers(op, recompute) if self.has_sublayers else (recompute,):
            check_options(op, own.get("activation", "identity"), mode, own.get("dropout", 0.0))
        parse_bytes(op, workspace)
        self.__dict__.update(own, recompute=recompute, workspace=workspace)

    @property
    def modes(self) -> dict[str, Any]:
        """Returns the arguments recompute and workspace of any op."""
        return {"recompute": self.recompute, "workspace": self.workspace}

    @classmethod
    def from_torch(cls: type[Own], module: nn.Module, *options: Any, **named: Any) -> Own:
        """Returns a drop-in replacement of torch's `module` that shares its parameters, buffers, hooks and settings.

        options: this class's own, such as recompute. Raises TypeError for another class, and for a module with a forward set on
        the instance.
        """
        op, kind = cls.__name__, type(module)
        if cls.torch_class is None:
            raise TypeError(f"{op}: torch.nn has no class of this name; use ckptkern.convert")
        if kind not in (cls.torch_class, cls):
            raise TypeError(f"{op}: module must be a torch.nn.{cls.torch_class.__name__}, not {kind.__name__}")
        if "forward" in module.__dict__:
            raise TypeError(f"{op}: {kind.__name__} has a forward set on the instance")
        drop_in = cls.__new__(cls)
        drop_in.__dict__.update({**module.__dict__, "_modules": dict(module._modules)})
        drop_in.set_options(*options, **named)
        return drop_in

    def _composed(self, *args: Any) -> Any:
        """Computes forward by calling the submodules: as torch's class does."""
        return super().forward(*args)

    def extra_repr(self) -> str:
        values = {name: self.__dict__[name] for name in self.shown if name in self.__dict__}
        return ", ".join(f"{name}={value!r}" for name, value in values.items() if not callable(value))

    def __prepare_scriptable__(self):
        """Raises NotImplementedError; torch.jit.script calls this method of every module."""
        raise NotImplementedError(
            f"torch.jit.script: {type(self).__name__} is a layer of ckptkern.nn, which cannot be scripted. Use torch.compile "
            "or torch.export, or torch's own layer"
        )


class Dropout(Layer, nn.Dropout):
    """Replaces torch.nn.Dropout; backward samples the mask again. `inplace` copies the result back into the input."""

    torch_class = nn.Dropout
    shown = ("p", "inplace")

    def set_options(self) -> None:  # type: ignore[override]
        """Takes no options."""

    def forward(self, input: Tensor) -> Tensor:
        if self.p < 0.0 or self.p > 1.0:
            return super().forward(input)  # torch's own error
        output = ops.dropout(input, self.p, self.training)
        return input.copy_(output) if self.inplace and output is not input else output
