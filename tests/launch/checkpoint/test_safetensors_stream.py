"""Streamed files against the `safetensors` library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from data.files import hash_file
from launch.checkpoint.safetensors_stream import StreamedTensor, write_safetensors


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=4),
    dtypes=st.lists(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), min_size=4, max_size=4),
    chunk=st.integers(1, 7),
)
@settings(max_examples=50)
def test_streamed_files_are_what_safetensors_reads(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], dtypes: list[torch.dtype], chunk: int
) -> None:
    tensors = {f"t{number}": torch.randn(shape) for number, shape in enumerate(shapes)}
    path = tmp_path_factory.mktemp("stream") / "file.safetensors"
    streamed = [
        StreamedTensor(name, tuple(tensor.shape), dtype, lambda tensor=tensor: tensor.flatten().split(chunk))
        for (name, tensor), dtype in zip(tensors.items(), dtypes, strict=False)
    ]
    written: list[int] = []
    digest = write_safetensors(path, streamed, {"format": "pt"}, written.append)
    assert digest == hash_file(path)
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for (name, tensor), dtype in zip(tensors.items(), dtypes, strict=False):
        assert torch.equal(loaded[name], tensor.to(dtype))
        assert loaded[name].dtype == dtype
    assert sum(written) == sum(tensor.nbytes for tensor in loaded.values())


def test_whole_tensors_of_any_layout_and_type(tmp_path: Path) -> None:
    tensors = {
        "random state": torch.get_rng_state(),
        "transposed": torch.randn(3, 4).t(),
        "strided": torch.arange(10)[::2],
        "single": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    path = tmp_path / "file.safetensors"
    write_safetensors(path, [StreamedTensor.of(name, tensor) for name, tensor in tensors.items()], {})
    for name, found in load_file(path).items():
        assert torch.equal(found, tensors[name])
        assert found.dtype == tensors[name].dtype


def test_a_tensor_with_too_few_values_is_a_fault_of_ours(tmp_path: Path) -> None:
    short = StreamedTensor("short", (3,), torch.float32, lambda: [torch.zeros(2)])
    with pytest.raises(AssertionError, match="short: 2 elements"):
        write_safetensors(tmp_path / "file.safetensors", [short], {})


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"gone/file\.safetensors: No such file or directory"):
        write_safetensors(tmp_path / "gone/file.safetensors", [], {})
