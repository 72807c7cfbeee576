"""Errors about arguments, caught as torch's are: torch raises RuntimeError for a shape, a dtype or a device that does not
fit, Python's custom is ValueError and TypeError. Each class here is both."""


class ShapeError(ValueError, RuntimeError):
    """A tensor's shape does not fit the others'."""


class DtypeError(TypeError, RuntimeError):
    """A tensor's dtype is not one that the op takes, or not that of the others."""


class DeviceError(ValueError, RuntimeError):
    """A tensor is on another device than the input."""


class LayoutError(TypeError, NotImplementedError):
    """A tensor is sparse or nested where the op reads dense ones. NotImplementedError, as torch's, is a RuntimeError."""
