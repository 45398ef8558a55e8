"""The SwiGLU feed-forward layer (Shazeer, arXiv 2002.05202).

Shapes: B batch, T time, D model width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import ModelConfig
from model.linear import Linear
from model.parameters import Kind, ParameterSpec, residual_init_std


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.ffn_dim is not None, "the configuration must be resolved"
        residual_std = residual_init_std(config.init_std, config.num_layers)
        in_spec = ParameterSpec(Kind.FFN_IN, init_std=config.init_std)
        out_spec = ParameterSpec(Kind.FFN_OUT, init_std=residual_std)
        self.gate = Linear(config.dim, config.ffn_dim, in_spec)
        self.up = Linear(config.dim, config.ffn_dim, in_spec)
        self.down = Linear(config.ffn_dim, config.dim, out_spec)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
