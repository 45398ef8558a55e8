"""Writing a safetensors file piece by piece: nothing is copied whole, and the hash is there when the file is.

The format: 8 bytes with the header's length, a JSON header with type, shape and byte range of every tensor, the bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from data.files import sync

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
_ALIGNMENT_BYTES = 8


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor of the file.

    Attributes:
        dtype: in the file.
        pieces: makes its values, flattened or not, in order, on any device and of any type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Callable[[], Iterable[Tensor]]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> StreamedTensor:
        """A tensor that is in memory."""
        return cls(name, tuple(tensor.shape), tensor.dtype, lambda: [tensor])

    @property
    def num_values(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)


def write_safetensors(
    path: Path,
    tensors: Sequence[StreamedTensor],
    metadata: dict[str, str],
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> str:
    """Writes all tensors and forces the file to the disk.

    Args:
        on_bytes: is called with the number of bytes after every piece.

    Returns:
        Hex xxh3-128 of the file.

    Raises:
        OSError: with the path, when the disk takes no more.
    """
    digest = xxhash.xxh3_128()
    try:
        with path.open("wb") as file:
            header = _header(tensors, metadata)
            digest.update(header)
            file.write(header)
            for tensor in tensors:
                written = 0
                for piece in tensor.pieces():
                    values = piece.detach().to("cpu", tensor.dtype).contiguous().view(-1)
                    data = values.view(torch.uint8).numpy().data
                    digest.update(data)
                    file.write(data)
                    written += values.numel()
                    on_bytes(values.nbytes)
                assert written == tensor.num_values, f"{tensor.name}: {written} values for the shape {tensor.shape}"
    except OSError as error:
        raise OSError(f"{path}: {error.strerror or error}") from None
    sync(path)
    return digest.hexdigest()


def _header(tensors: Sequence[StreamedTensor], metadata: dict[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": metadata}
    start = 0
    for tensor in tensors:
        stop = start + tensor.num_values * tensor.dtype.itemsize
        dtype = _NAMES[tensor.dtype]
        header[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text
