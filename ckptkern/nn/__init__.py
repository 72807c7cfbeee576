"""Drop-in modules: the constructor, parameter names, layout and initialisation of their torch.nn twins.

Their state_dict is the twin's. A layer's keyword argument `recompute` is the level of the op it calls.
"""

from .dropout import Dropout
from .linear import Linear, LinearStack
from .mlp import MLP, GatedMLP

__all__ = ["MLP", "Dropout", "GatedMLP", "Linear", "LinearStack"]
