"""Recomputes feed-forwards in torchtitan: an override for its command line."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torchtitan.config import derive, override
from torchtitan.models.common.feed_forward import FeedForward

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

    def forward(self, x: Tensor) -> Tensor:
        return gated_mlp(x, self.w1.weight, self.w3.weight, self.w2.weight, **self.options)


@override(target=FeedForward.Config, exact=True, description="ckptkern.gated_mlp: saves its input alone")
def feed_forward(config: FeedForward.Config, recompute: str = "full", workspace: int | str | None = None):
    """Replaces each feed-forward that is exactly `FeedForward`; not for tensor parallelism.

    --override.imports 'ckptkern.integrations.torchtitan.feed_forward={"workspace": "64MiB"}'
    """
    return derive(config, RecomputedFeedForward.Config, recompute=recompute, workspace=workspace)
