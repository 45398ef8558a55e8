"""Operations on the heads within a shard of a flattened matrix: squared norms, and scaled steps and weights.

A query/key matrix has shape (heads · width, inputs), so a head is one contiguous range of the flattened matrix. A rank
may hold any range [start, stop) of it, which may start and end within a head:

    head        |    0    |    1    |    2    |
    shard            [####|#########|##]
                    partial  whole  partial
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def head_ranges(start: int, stop: int, head_numel: int) -> Iterator[tuple[int, int, int, int]]:
    """Splits a shard [start, stop) into runs of whole heads and partial heads.

    Yields:
        (first head, number of heads, offset in the shard, number of elements); a partial head counts as 1.
    """
    position = start
    while position < stop:
        head, within = divmod(position, head_numel)
        whole = (stop - position) // head_numel if within == 0 else 0
        length = whole * head_numel if whole else min(head_numel - within, stop - position)
        yield head, max(whole, 1), position - start, length
        position += length


def add_squared_norms(shard: Tensor, start: int, head_numel: int, out_H: Tensor) -> None:
    """Adds the squared norm of each head's elements in a shard to `out_H`.

    Args:
        shard: 1-D, elements [start, start + len) of the flattened matrix.
        out_H: fp32 or fp64, one element per head of the whole matrix.
    """
    for head, heads, offset, length in head_ranges(start, start + shard.numel(), head_numel):
        part = shard.narrow(0, offset, length).view(heads, -1)
        out_H[head : head + heads] += (
            torch.linalg.vector_norm(part, dim=1, dtype=torch.float32).to(out_H.dtype).square()
        )


def scale_step(shard: Tensor, old: Tensor, start: int, head_numel: int, ratio_H: Tensor) -> None:
    """Multiplies the step from `old` to `shard` by each head's ratio, in place; a ratio of exactly 1 changes nothing.

    Args:
        shard, old: 1-D, elements [start, start + len) of the flattened matrix after and before the optimizer's step.
        ratio_H: One ratio per head of the whole matrix.
    """
    for head, heads, offset, length in head_ranges(start, start + shard.numel(), head_numel):
        new = shard.narrow(0, offset, length).view(heads, -1)
        before = old.narrow(0, offset, length).view(heads, -1)
        ratio = ratio_H[head : head + heads, None]
        new.copy_(torch.where(ratio == 1, new, before + ratio * (new - before)))


def scale_heads(shard: Tensor, start: int, head_numel: int, factor_H: Tensor) -> None:
    """Multiplies each head's elements in a shard by the head's factor, in place.

    Args:
        shard: 1-D, elements [start, start + len) of the flattened matrix.
        factor_H: One factor per head of the whole matrix.
    """
    for head, heads, offset, length in head_ranges(start, start + shard.numel(), head_numel):
        shard.narrow(0, offset, length).view(heads, -1).mul_(factor_H[head : head + heads, None])
