"""How far attention logits have moved, measured at sampled queries.

Shapes: B sequences, T positions, Q sampled queries, H query heads, G key heads, K query/key width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sampled_positions(seq_len: int, num_queries: int) -> Tensor:
    """Returns at most `num_queries` evenly spaced query positions in ascending order, ending with the last one."""
    return torch.linspace(0, seq_len - 1, min(num_queries + 1, seq_len)).round().long().unique()[-num_queries:]


def sampled_logits(q_BHTK: Tensor, k_BGTK: Tensor, positions_Q: Tensor) -> Tensor:
    """Returns the logits q·k / sqrt(K) of sampled queries (B, H, Q, T), in at least fp32; masked ones are 0."""
    num_queries_per_key = q_BHTK.shape[1] // k_BGTK.shape[1]
    dtype = torch.promote_types(q_BHTK.dtype, torch.float32)
    q_BHQK = q_BHTK[:, :, positions_Q].to(dtype)
    k_BHTK = k_BGTK.to(dtype).repeat_interleave(num_queries_per_key, dim=1)
    logits_BHQT = q_BHQK @ k_BHTK.mT * q_BHTK.shape[-1] ** -0.5
    return logits_BHQT * visible(positions_Q, k_BGTK.shape[2])


def visible(positions_Q: Tensor, num_keys: int) -> Tensor:
    """Returns whether each query sees each key (Q, T)."""
    return torch.arange(num_keys, device=positions_Q.device) <= positions_Q[:, None]


def rms_change(new_BHQT: Tensor, old_BHQT: Tensor, positions_Q: Tensor) -> Tensor:
    """Returns the RMS difference of two `sampled_logits` over their visible elements, an fp64 scalar."""
    B, H, _, T = new_BHQT.shape
    square_sum = (new_BHQT - old_BHQT).double().square().sum()
    return (square_sum / (B * H * visible(positions_Q, T).sum())).sqrt()
