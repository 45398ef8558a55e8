"""Writing a safetensors file piece by piece, so that no tensor need be whole in memory.

The format: 8 bytes with the header's length, a JSON header with type, shape and byte range of every tensor, the bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from data.files import sync

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_ALIGNMENT_BYTES = 8


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor of the file.

    Attributes:
        pieces: makes its values, flattened or not, in order and of any floating type.
    """

    name: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Tensor]]

    @property
    def num_values(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)


def write_safetensors(
    path: Path,
    tensors: Sequence[StreamedTensor],
    dtype: torch.dtype,
    metadata: dict[str, str],
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Writes all tensors as fp32 or bf16 and forces the file to the disk.

    Args:
        on_bytes: is called with the number of bytes after every piece.
    """
    with path.open("wb") as file:
        file.write(_header(tensors, dtype, metadata))
        for tensor in tensors:
            written = 0
            for piece in tensor.pieces():
                values = piece.to(dtype).contiguous().view(-1)
                file.write(values.view(torch.uint8).numpy().data)
                written += values.numel()
                on_bytes(values.nbytes)
            assert written == tensor.num_values, f"{tensor.name}: {written} values for the shape {tensor.shape}"
    sync(path)


def _header(tensors: Sequence[StreamedTensor], dtype: torch.dtype, metadata: dict[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": metadata}
    start = 0
    for tensor in tensors:
        stop = start + tensor.num_values * dtype.itemsize
        header[tensor.name] = {"dtype": _NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text
