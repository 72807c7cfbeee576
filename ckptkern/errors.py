"""Defines errors about arguments. torch raises RuntimeError for a wrong shape, dtype or device; Python code expects
ValueError or TypeError. Each class here is both, so either `except` catches it."""


class ShapeError(ValueError, RuntimeError):
    """Says that a tensor's shape does not fit the others'."""


class DtypeError(TypeError, RuntimeError):
    """Says that the op does not take a tensor's dtype, or that dtypes differ."""


class DeviceError(ValueError, RuntimeError):
    """Says that a tensor is on another device than the input."""


class LayoutError(TypeError, NotImplementedError):
    """Says that a tensor is sparse or nested where the op needs a dense one. torch raises NotImplementedError, a
    RuntimeError, here."""


class BudgetError(ValueError, RuntimeError):
    """Says that no choice of strategies meets a budget. least: the smallest feasible budget, in bytes."""

    def __init__(self, message: str, least: int = 0):
        super().__init__(message, least)
        self.least = least

    def __str__(self) -> str:
        return self.args[0]
