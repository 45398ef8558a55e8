"""Documents within windows: the position of each token in its document, and which targets are ignored.

Windows are taken from the stream of documents regardless of where documents end:

    tokens       a3 a4 a5 | b0 b1 b2 b3 | c0 c1        a window that begins within document a
    positions     0  1  2 |  0  1  2  3 |  0  1        counted from the beginning of the window or document
    targets      a4 a5 -- | b1 b2 b3 -- | c1 c2        "--": the next token belongs to another document

Position 0 marks each start, so the positions alone determine the attention mask: token t attends to tokens
t - position … t. Document boundaries come from the shards' index, never from a token id.

Shapes: N windows, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

IGNORE = -100  # an ignored target; the default `ignore_index` of PyTorch's cross entropy


@dataclass(frozen=True)
class Packing:
    """How documents in one window are kept apart.

    Attributes:
        mask_documents: Whether attention stays within documents, positions restart in each document, and the first
            token of a document is not a target.
        eod_loss: Whether the last token of a document, its end-of-document token, is a target.
    """

    mask_documents: bool = False
    eod_loss: bool = True

    @property
    def needs_documents(self) -> bool:
        """Whether batches depend on where documents start."""
        return self.mask_documents or not self.eod_loss


UNMASKED = Packing()


def document_positions(starts: Sequence[np.ndarray], seq_len: int) -> np.ndarray:
    """Compute the position of each token within the part of its document that lies in the window: int32 [N, T].

    Args:
        starts: The tokens of each window at which documents start, from 1 on; those from `seq_len` on are ignored.
        seq_len: T, tokens of a sequence.
    """
    rows, columns = _flatten(starts)
    inside = columns < seq_len
    num_tokens = len(starts) * seq_len
    # All rows end to end; each row begins a document too.
    firsts = np.concatenate((rows[inside] * seq_len + columns[inside], np.arange(0, num_tokens + 1, seq_len)))
    firsts.sort()
    positions = np.arange(num_tokens, dtype=np.int32)
    positions -= np.repeat(firsts[:-1].astype(np.int32), np.diff(firsts))
    return positions.reshape(-1, seq_len)


def drop_targets(targets: np.ndarray, starts: Sequence[np.ndarray], packing: Packing) -> int:
    """Set the targets that `packing` excludes to `IGNORE`, in place.

    Args:
        targets: The targets: int64 [N, T]; target t is token t + 1.
        starts: The tokens of each window at which documents start, from 1 to T + 1.
        packing: Which targets to exclude.

    Returns:
        The number of targets set to `IGNORE`.
    """
    rows, columns = _flatten(starts)
    is_dropped = np.zeros(targets.shape, bool)
    if packing.mask_documents:
        inside = columns <= targets.shape[1]
        is_dropped[rows[inside], columns[inside] - 1] = True
    if not packing.eod_loss:
        inside = columns >= 2
        is_dropped[rows[inside], columns[inside] - 2] = True
    targets[is_dropped] = IGNORE
    return int(np.count_nonzero(is_dropped))


def _flatten(starts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return (window, token) of every start."""
    rows = np.repeat(np.arange(len(starts)), [len(row) for row in starts])
    return rows, np.concatenate(starts) if starts else np.empty(0, np.int64)
