"""Scalable-Softmax (Nakanishi, arXiv 2501.19399): logits scaled by the logarithm of the number of visible keys.

Shapes: B batch, T time, H query heads, K head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from model.parameters import Kind, ParameterSpec


class SoftmaxScale(nn.Module):
    """Scales queries, q <- q s_h log(n), where s_h is learned per query head and n is the number of visible keys.

    Every s_h starts at 1/log(max_seq_len), so that the initial scale is 1 for the last query of a full context and
    smaller for earlier ones. This initial value is not from the paper.
    """

    def __init__(self, num_heads: int, max_seq_len: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        # With a context of one token log(n) is 0, so that the factor does not matter.
        self.init_value = 1 / math.log(max(max_seq_len, 2))
        self.weight = nn.Parameter(torch.empty(num_heads))

    def parameter_specs(self) -> dict[str, ParameterSpec]:
        return {"weight": ParameterSpec(Kind.SOFTMAX_SCALE, self.num_heads, 1, init_value=self.init_value)}

    def forward(self, q_BHTK: Tensor, first_position: int, positions_BT: Tensor | None = None) -> Tensor:
        """Scales the queries in fp32; the result has q's dtype.

        Args:
            first_position: 0-based position of the first query; the other queries follow it.
            positions_BT: Positions within documents, outside which no keys are visible; replaces first_position.
        """
        if positions_BT is not None:
            visible_B1T = (positions_BT + 1).unsqueeze(1)
            scale_BHT = self.weight.float().unsqueeze(1) * visible_B1T.float().log()
            return (q_BHTK.float() * scale_BHT.unsqueeze(3)).to(q_BHTK.dtype)
        visible_T = torch.arange(first_position + 1, first_position + q_BHTK.shape[2] + 1, device=q_BHTK.device)
        scale_HT1 = (self.weight.float().unsqueeze(1) * visible_T.float().log()).unsqueeze(2)
        return (q_BHTK.float() * scale_HT1).to(q_BHTK.dtype)
