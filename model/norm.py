"""RMSNorm (Zhang & Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.parameters import Kind, ParameterSpec


class RMSNorm(nn.Module):
    """Computes gain * x / sqrt(mean(x²) + eps) over the last dimension.

    The computation is in fp32 whatever the dtypes of x and the gain; the result has x's dtype.
    """

    def __init__(self, dim: int, eps: float, kind: Kind = Kind.NORM_GAIN) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.kind = kind
        self.weight = nn.Parameter(torch.empty(dim))

    def parameter_specs(self) -> dict[str, ParameterSpec]:
        return {"weight": ParameterSpec(self.kind)}

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            # The kernel computes in fp32 and rounds once, so 16-bit inputs do not need a cast.
            return F.rms_norm(x, (self.dim,), self.weight, self.eps).to(x.dtype)
        return F.rms_norm(x.float(), (self.dim,), self.weight.float(), self.eps).to(x.dtype)
