"""Heads within flat pieces of matrices: squared norms per head, and scaled steps per head.

A query/key matrix has shape (heads · width, inputs), so that a head is one contiguous range of the flattened matrix. A
rank may hold any range [start, stop) of it, which may begin and end within a head:

    head        |    0    |    1    |    2    |
    piece            [####|#########|##]
                      first  whole   last
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def head_ranges(start: int, stop: int, head_numel: int) -> Iterator[tuple[int, int, int, int]]:
    """Cuts a piece into runs of whole heads and partial ones.

    Yields:
        (first head, heads, offset in the piece, numbers): `heads` is 1 for a partial head.
    """
    position = start
    while position < stop:
        head, within = divmod(position, head_numel)
        whole = (stop - position) // head_numel if within == 0 else 0
        length = whole * head_numel if whole else min(head_numel - within, stop - position)
        yield head, max(whole, 1), position - start, length
        position += length


def add_squared_norms(piece: Tensor, start: int, head_numel: int, out_H: Tensor) -> None:
    """Adds the squared norm of each head's part of a flat piece to `out_H`.

    Args:
        piece: 1-D, numbers [start, start + len) of the flattened matrix.
        out_H: fp32 or fp64, one value a head of the whole matrix.
    """
    for head, heads, offset, length in head_ranges(start, start + piece.numel(), head_numel):
        part = piece.narrow(0, offset, length).view(heads, -1)
        out_H[head : head + heads] += (
            torch.linalg.vector_norm(part, dim=1, dtype=torch.float32).to(out_H.dtype).square()
        )


def scale_step(piece: Tensor, old: Tensor, start: int, head_numel: int, ratio_H: Tensor) -> None:
    """Multiplies the step from `old` to `piece` by each head's ratio, in place; a ratio of exactly 1 changes nothing.

    Args:
        piece, old: 1-D, numbers [start, start + len) of the flattened matrix after and before the optimizer's step.
        ratio_H: one ratio a head of the whole matrix.
    """
    for head, heads, offset, length in head_ranges(start, start + piece.numel(), head_numel):
        new = piece.narrow(0, offset, length).view(heads, -1)
        before = old.narrow(0, offset, length).view(heads, -1)
        ratio = ratio_H[head : head + heads, None]
        new.copy_(torch.where(ratio == 1, new, before + ratio * (new - before)))


def scale_heads(piece: Tensor, start: int, head_numel: int, factor_H: Tensor) -> None:
    """Multiplies each head's part of a flat piece by its factor, in place.

    Args:
        piece: 1-D, numbers [start, start + len) of the flattened matrix.
        factor_H: one factor a head of the whole matrix.
    """
    for head, heads, offset, length in head_ranges(start, start + piece.numel(), head_numel):
        piece.narrow(0, offset, length).view(heads, -1).mul_(factor_H[head : head + heads, None])
