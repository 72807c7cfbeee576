"""Recomputes in torchtitan: overrides for its command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import derive, override
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear

from ..conversion.later import convert_later
from ..ops import gated_mlp


class RecomputedFeedForward(FeedForward):
    """Computes torchtitan's SwiGLU feed-forward by `ckptkern.gated_mlp`, which saves its input alone."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        recompute: str = "full"
        workspace: int | str | None = None

    def __init__(self, config: Config):
        super().__init__(config)
        self.options = {"recompute": config.recompute, "workspace": config.workspace}

    def parallelize(self, parallel_dims) -> None:
        if parallel_dims.tp_enabled and parallel_dims.spmd_backend == "spmd_types":
            raise ValueError(
                "feed_forward: with the backend spmd_types, tensor parallelism adds partial sums in w2's own forward, which "
                "gated_mlp does not call. Use --parallelism.spmd_backend partial_dtensor"
            )
        super().parallelize(parallel_dims)

    def forward(self, x: Tensor) -> Tensor:
        return gated_mlp(x, self.w1.weight, self.w3.weight, self.w2.weight, **self.options)


@override(target=FeedForward.Config, exact=True, description="ckptkern.gated_mlp: saves its input alone")
def feed_forward(config: FeedForward.Config, recompute: str = "full", workspace: int | str | None = None):
    """Replaces each feed-forward that is exactly `FeedForward` and whose linear layers are plain, without biases.

    --override.imports 'ckptkern.integrations.torchtitan.feed_forward={"workspace": "64MiB"}'
    """
    if any(type(w) is not Linear.Config or w.bias for w in (config.w1, config.w2, config.w3)):
        return config
    return derive(config, RecomputedFeedForward.Config, recompute=recompute, workspace=workspace)


class ConvertingOptimizers(OptimizersContainer):
    """Converts the model, or each of its pipeline stages, at its first training call; optimizers see it built and sharded."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]):
        super().__init__(config, model_parts=model_parts)
        for part in model_parts:
            convert_later(part, **config.options)


@override(target=OptimizersContainer.Config, exact=True, description="ckptkern.convert at the first training call")
def convert(config: OptimizersContainer.Config, **options: Any):
    """Converts the model; set its activation checkpointing to None. options: those of ckptkern.convert.

    --override.imports 'ckptkern.integrations.torchtitan.convert={"recompute": "full"}'
    """
    return derive(config, ConvertingOptimizers.Config, options=options)
