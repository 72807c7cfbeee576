"""Errors about arguments. torch raises RuntimeError for a shape, a dtype or a device that does not fit; Python code expects
ValueError or TypeError. Each class here is both, so that either `except` catches it."""


class ShapeError(ValueError, RuntimeError):
    """A tensor's shape does not fit the others'."""


class DtypeError(TypeError, RuntimeError):
    """A tensor's dtype is not one that the op takes, or differs from the others'."""


class DeviceError(ValueError, RuntimeError):
    """A tensor is on another device than the input."""


class LayoutError(TypeError, NotImplementedError):
    """A tensor is sparse or nested where the op needs a dense one. torch raises NotImplementedError, a RuntimeError, here."""


class BudgetError(ValueError, RuntimeError):
    """A budget that no choice of strategies meets. least: the bytes that would do."""

    def __init__(self, message: str, least: int = 0):
        super().__init__(message, least)
        self.least = least

    def __str__(self) -> str:
        return self.args[0]
