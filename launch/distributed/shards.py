"""Where each parameter's fp32 master weights are stored on this rank, at every ZeRO stage.

DeepSpeed passes flat fp32 tensors to its base optimizer. A rank owns the elements [start, stop) of a flattened
parameter, a shard that is stored at `offset` in one of those flat tensors. Checkpoints and per-head rules work on
shards and do not depend on the stage.

    parameter w (flattened)   0 ........ start ######## stop ..... numel
    flat fp32 tensor                 [ other | ######## | other | padding ]
                                             ^ offset
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """This rank's shard of one parameter.

    Attributes:
        name, shape: The name and shape of the whole parameter.
        start, stop: The shard's range in the flattened parameter.
        flat: The fp32 tensor that the base optimizer updates; its optimizer state has the same layout.
        offset: Where the shard begins in `flat`.
        replicated: Whether every rank holds the same shard (ZeRO stage 0).
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    flat: Tensor
    offset: int
    replicated: bool

    def view(self, flat_like: Tensor) -> Tensor:
        """Returns the shard of a tensor laid out like `flat` (masters, a gradient or an optimizer state), 1-D."""
        return flat_like.detach().view(-1).narrow(0, self.offset, self.stop - self.start)

    @property
    def master(self) -> Tensor:
        """The fp32 master weights of the shard, 1-D, sharing memory."""
        return self.view(self.flat)
