"""Finds the modules that the example's call did not run, about which convert knows nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from .trace import is_leaf, leaves_of

NOT_RUN = "the example's call did not run it. Give convert a call that does"


class Ran(TorchFunctionMode):
    """Notes the modules that are called inside, and the parameters that functions take there."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: set[nn.Module] = set()
        self.taken: set[int] = set()  # tensors by id

    def __enter__(self):
        self.hook = register_module_forward_pre_hook(self.note)
        return super().__enter__()

    def __exit__(self, *error):
        self.hook.remove()
        return super().__exit__(*error)

    def note(self, module: nn.Module, args: tuple) -> None:
        is_compiled = isinstance(module, torch.jit.ScriptModule) or "_orig_mod" in module._modules
        self.modules.update(module.modules() if is_compiled else (module,))  # whose inner calls are not seen

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        self.taken.update(id(one) for one in leaves_of((args, kwargs)) if isinstance(one, Tensor))
        return function(*args, **kwargs)

    def misses(self, module: nn.Module) -> bool:
        """Returns whether the module, with matrices among its parameters, was not run: neither it nor a module inside was
        called, nor did a function take its parameters, as with a tied head. Of leaf modules, linear layers alone."""
        parameters = list(module.parameters())
        if all(p.dim() < 2 for p in parameters) or not self.modules.isdisjoint(module.modules()):
            return False
        taken = self.taken
        if not is_leaf(module):  # may share an embedding with modules that were called
            taken = taken.difference(id(p) for m in self.modules for p in m.parameters(recurse=False))
        elif not isinstance(module, nn.Linear):
            return False
        return taken.isdisjoint(map(id, parameters))
