"""Where each parameter's fp32 master weights lie on this rank, at every ZeRO stage.

DeepSpeed hands its base optimizer flat fp32 tensors. A parameter, flattened, is one range of numbers; a rank owns a
piece [start, stop) of it, which lies at `offset` in one of those flat tensors. Checkpoints and per-head rules are
written against these pieces and need not know the stage.

    parameter w (flattened)   0 ........ start ######## stop ..... numel
    flat fp32 tensor                 [ other | ######## | other | padding ]
                                             ^ offset
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """This rank's piece of one parameter.

    Attributes:
        name, shape: of the whole parameter.
        start, stop: the piece's range in the flattened parameter.
        flat: the fp32 tensor that the base optimizer updates; its optimizer state has the same layout.
        offset: where the piece begins in `flat`.
        replicated: whether every rank holds the same piece (ZeRO stage 0).
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    flat: Tensor
    offset: int
    replicated: bool

    def view(self, flat_like: Tensor) -> Tensor:
        """The piece within a tensor laid out like `flat` (masters, a gradient or an optimizer state), 1-D."""
        return flat_like.detach().view(-1).narrow(0, self.offset, self.stop - self.start)

    @property
    def master(self) -> Tensor:
        """The fp32 master weights of the piece, 1-D, sharing memory."""
        return self.view(self.flat)
