"""Tensor subclasses as arguments: what each is to an op, and that nobody's memory is read that means something else."""

import logging
import warnings

import pytest
import torch
from cases import eager_op_names
from torch import Tensor
from torch.nn import functional as F

import ckptkern
from ckptkern import subclasses
from ckptkern.ops import _common
