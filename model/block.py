"""A pre-norm transformer block, as in Llama.

Shapes: B batch, T time, D model width.
"""

from __future__ import annotations

from torch import Tensor, nn

from configs.schema import ModelConfig
from model.attention import ATTENTION
from model.attention.cache import LayerCache
from model.attention.documents import Documents
from model.feed_forward import FeedForward
from model.norm import RMSNorm


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = ATTENTION[config.attention.kind](config)
        self.feed_forward_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: LayerCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary, cache, documents)
        return x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))
