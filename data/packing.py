"""Documents within windows: the position of each token in its document, and which targets count.

Windows are cut from the stream of documents without regard to where documents end:

    tokens       a3 a4 a5 | b0 b1 b2 b3 | c0 c1        a window that begins within document a
    positions     0  1  2 |  0  1  2  3 |  0  1        what lies before the window counts as little as another document
    targets      a4 a5 -- | b1 b2 b3 -- | c1 c2        "--": the next token is of another document

A position of 0 marks each start, so that positions alone say which tokens may see each other: token t sees tokens
t - position … t. Boundaries come from the shards' index, never from a token id.

Shapes: N windows, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

IGNORE = -100  # a target that does not count; the default `ignore_index` of PyTorch's cross entropy


@dataclass(frozen=True)
class Packing:
    """How documents in one window are kept apart.

    Attributes:
        mask_documents: attention stays within documents, positions restart in each, and the first token of a document
            is no target.
        eod_loss: the last token of a document, which is its end-of-document token, is a target.
    """

    mask_documents: bool = False
    eod_loss: bool = True

    @property
    def needs_documents(self) -> bool:
        """Whether anything depends on where documents start."""
        return self.mask_documents or not self.eod_loss


UNMASKED = Packing()


def document_positions(starts: Sequence[np.ndarray], seq_len: int) -> np.ndarray:
    """The position of each token within the part of its document that lies in the window: int32 [N, T].

    Args:
        starts: of each window, tokens at which documents start, from 1 on; those from `seq_len` on are left out.
        seq_len: T.
    """
    rows, columns = _flatten(starts)
    inside = columns < seq_len
    num_tokens = len(starts) * seq_len
    # All rows laid end to end; each begins a document too.
    firsts = np.concatenate((rows[inside] * seq_len + columns[inside], np.arange(0, num_tokens + 1, seq_len)))
    firsts.sort()
    positions = np.arange(num_tokens, dtype=np.int32)
    positions -= np.repeat(firsts[:-1].astype(np.int32), np.diff(firsts))
    return positions.reshape(-1, seq_len)


def drop_targets(targets: np.ndarray, starts: Sequence[np.ndarray], packing: Packing) -> int:
    """Sets the targets that `packing` leaves out to `IGNORE`, in place.

    Args:
        targets: int64 [N, T]; target t is token t + 1.
        starts: of each window, tokens at which documents start, from 1 to T + 1.

    Returns:
        How many.
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
    """(window, token) of every start."""
    rows = np.repeat(np.arange(len(starts)), [len(row) for row in starts])
    return rows, np.concatenate(starts) if starts else np.empty(0, np.int64)
