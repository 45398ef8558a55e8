"""Writes a safetensors file chunk by chunk and hashes it on the way, so that no tensor is copied whole.

The format: 8 bytes with the header's length; a JSON header with the type, shape and byte range of every tensor; data.
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
    """A tensor to write.

    Attributes:
        dtype: The type in the file.
        chunks: Returns the elements in order, as tensors of any shape, type and device.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Callable[[], Iterable[Tensor]]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> StreamedTensor:
        """Wraps a tensor that is in memory."""
        return cls(name, tuple(tensor.shape), tensor.dtype, lambda: [tensor])

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


def write_safetensors(
    path: Path,
    tensors: Sequence[StreamedTensor],
    metadata: dict[str, str],
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> str:
    """Writes all tensors and syncs the file to disk.

    Args:
        on_bytes: Called with the number of bytes after every chunk.

    Returns:
        The xxh3-128 of the file, in hexadecimal.

    Raises:
        OSError: The file cannot be written; the message names it.
    """
    digest = xxhash.xxh3_128()
    try:
        with path.open("wb") as file:
            header = _header(tensors, metadata)
            digest.update(header)
            file.write(header)
            for tensor in tensors:
                written = 0
                for chunk in tensor.chunks():
                    values = chunk.detach().to("cpu", tensor.dtype).contiguous().view(-1)
                    data = values.view(torch.uint8).numpy().data
                    digest.update(data)
                    file.write(data)
                    written += values.numel()
                    on_bytes(values.nbytes)
                assert written == tensor.numel, f"{tensor.name}: {written} elements for the shape {tensor.shape}"
    except OSError as error:
        raise OSError(f"{path}: {error.strerror or error}") from None
    sync(path)
    return digest.hexdigest()


def _header(tensors: Sequence[StreamedTensor], metadata: dict[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": metadata}
    start = 0
    for tensor in tensors:
        stop = start + tensor.numel * tensor.dtype.itemsize
        dtype = _NAMES[tensor.dtype]
        header[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text
