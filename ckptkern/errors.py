"""Defines errors about arguments that are both torch's RuntimeError and Python's ValueError or TypeError, so that either
`except` catches them."""


class ShapeError(ValueError, RuntimeError):
    """Raised if a tensor's shape does not fit the others'."""


class DtypeError(TypeError, RuntimeError):
    """Raised if an op does not take a tensor's dtype, or if dtypes differ."""


class DeviceError(ValueError, RuntimeError):
    """Raised if a tensor is on another device than the input."""


class LayoutError(TypeError, NotImplementedError):
    """Raised if a tensor is sparse or nested where the op needs a dense one."""


class BudgetError(ValueError, RuntimeError):
    """Raised if no choice of strategies meets a budget. least: the smallest feasible budget, in bytes."""

    def __init__(self, message: str, least: int = 0):
        super().__init__(message, least)
        self.least = least

    def __str__(self) -> str:
        return self.args[0]
