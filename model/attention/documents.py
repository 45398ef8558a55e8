"""Causal attention within documents, several of which are concatenated in each row of a batch.

Positions restart from 0 in each document, so they determine what is visible: token t of a row sees tokens
t - position … t. On a GPU, FlexAttention skips the fully masked blocks. Elsewhere attention runs once per document, or
once per group of short ones, so that no T x T matrix is materialised.

Shapes: B batch, T time, N = B T tokens, H query heads, G key/value heads, K query/key width, V value width, J blocks of
keys or queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

# Short documents are grouped up to this many tokens; longer ones form their own group.
GROUP_TOKENS = 64
BLOCK_SIZE = 128

# (queries, keys, values, mask (T, T), None: causal) -> (1, H, T, V)
Attend = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]


class Documents(NamedTuple):
    """The documents of a batch.

    Attributes:
        positions_BT: Each token's position in its document; the first token of a row has position 0.
        block_mask: The same information for FlexAttention, on a GPU only.
    """

    positions_BT: Tensor
    block_mask: BlockMask | None = None

    @classmethod
    def of(cls, positions_BT: Tensor, has_sink: bool) -> Documents:
        """Builds the block mask on a GPU, so that all layers share it."""
        return cls(positions_BT, document_block_mask(positions_BT, has_sink) if positions_BT.is_cuda else None)


def attend_by_document(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTV: Tensor,
    positions_BT: Tensor,
    attend: Attend,
    group_tokens: int | None = None,
) -> Tensor:
    """Calls `attend` on one document, or several short ones, at a time; returns (B, H, T, V).

    Args:
        attend: Attention over one row of tokens.
        group_tokens: Maximum number of tokens in a group of documents; None: `GROUP_TOKENS`.
    """
    B, _, T, _ = q_BHTK.shape
    groups = list(group_documents(positions_BT, GROUP_TOKENS if group_tokens is None else group_tokens))
    sizes = [group.shape[0] for group in groups]
    # Split and concatenate once, since the gradient of every slice would be as large as the whole tensor.
    parts = zip(*(_in_one_row(x).split(sizes, dim=2) for x in (q_BHTK, k_BGTK, v_BGTV)), groups, strict=True)
    outputs = [
        attend(q, k, v, None if bool(group[-1] == len(group) - 1) else document_mask(group)) for q, k, v, group in parts
    ]
    out_1HNV = torch.cat(outputs, dim=2)
    return out_1HNV.view(-1, B, T, out_1HNV.shape[-1]).transpose(0, 1)


def group_documents(positions_BT: Tensor, group_tokens: int) -> Iterator[Tensor]:
    """Yields the positions of all tokens, row after row, in groups of whole documents.

    A group has at most `group_tokens` tokens, or is a single document.
    """
    positions_N = positions_BT.flatten().cpu()
    starts = [*(positions_N == 0).nonzero().flatten().tolist(), len(positions_N)]
    first = 0
    for start, stop in pairwise(starts):
        if stop - first > group_tokens and first < start:
            yield positions_N[first:start]
            first = start
    yield positions_N[first:]


def document_mask(positions_T: Tensor) -> Tensor:
    """Returns whether each query sees each key (T, T)."""
    tokens_T = torch.arange(len(positions_T), device=positions_T.device)
    first_T = tokens_T - positions_T
    return (tokens_T <= tokens_T[:, None]) & (tokens_T >= first_T[:, None])


def document_block_mask(positions_BT: Tensor, has_sink: bool) -> BlockMask:
    """Returns FlexAttention's form of the mask.

    The first visible key never decreases along a row, so the first and last tokens of a block determine whether it is
    masked, partial or full.

    Args:
        has_sink: Whether one more token, which all queries see, precedes the others.
    """
    B, T = positions_BT.shape
    first_BT = torch.arange(T, device=positions_BT.device) - positions_BT
    if has_sink:
        first_BT = torch.cat((first_BT.new_zeros(B, 1), first_BT + 1), dim=1)
    length = first_BT.shape[1]
    num_blocks = -(-length // BLOCK_SIZE)
    starts_J = torch.arange(num_blocks, device=first_BT.device) * BLOCK_SIZE
    last_J = (starts_J + BLOCK_SIZE - 1).clamp(max=length - 1)
    # Queries are rows and keys columns.
    is_below_BJJ = last_J[:, None] >= starts_J
    is_seen_BJJ = is_below_BJJ & (last_J >= first_BT[:, starts_J].unsqueeze(-1))
    is_full_BJJ = (starts_J[:, None] >= last_J) & (starts_J >= first_BT[:, last_J].unsqueeze(-1))
    # The kernels treat a short last block as partial.
    is_full_BJJ &= (starts_J + BLOCK_SIZE <= length) & (starts_J + BLOCK_SIZE <= length)[:, None]
    if has_sink:
        is_seen_BJJ |= starts_J == 0
    partial_BJJ = is_seen_BJJ & ~is_full_BJJ

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_document = (key <= query) & (key >= first_BT[batch, query])
        return in_document | (key == 0) if has_sink else in_document

    return BlockMask.from_kv_blocks(
        *_block_lists(partial_BJJ), *_block_lists(is_full_BJJ), BLOCK_SIZE, is_visible, (length, length)
    )


def _block_lists(is_chosen_BJJ: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of key blocks of each query block (B, 1, J), and all indices with those first (B, 1, J, J)."""
    indices = is_chosen_BJJ.int().argsort(dim=-1, descending=True, stable=True)
    return is_chosen_BJJ.sum(-1, dtype=torch.int32).unsqueeze(1), indices.int().unsqueeze(1)


def _in_one_row(x_BHTK: Tensor) -> Tensor:
    """Concatenates the rows of a batch (1, H, N, K)."""
    return x_BHTK.transpose(0, 1).flatten(1, 2).unsqueeze(0)
