"""Attention with capped logits: chunks, precision, memory, and FlexAttention."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model.attention.softcap import chunked_softcap_attention, flex_softcap_attention
from tests.model.attention.reference import reference_attention


def random_inputs(num_queries: int, num_keys: int, value_dim: int = 16, dtype=torch.float64) -> list[torch.Tensor]:
    """Returns queries, keys, values and sinks of 6 query heads and 2 key heads of width 16."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 6, num_queries, 16), (2, 2, num_keys, 16), (2, 2, num_keys, value_dim), (6,)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("num_keys", [23, 31])
def test_the_chunk_size_does_not_change_the_result(num_keys, has_sink):
    *qkv, sink = random_inputs(23, num_keys, value_dim=9)
    inputs = [*qkv, sink] if has_sink else qkv
    results = []
    for chunk_queries in (23, 1, 7, None):
        out = chunked_softcap_attention(*qkv, 2.0, sink if has_sink else None, chunk_queries)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-10, atol=1e-10)


def test_autocast_does_not_round_the_logits():
    arguments = [tensor.bfloat16() for tensor in random_inputs(23, 31)]
    expected = chunked_softcap_attention(*arguments[:3], 2.0, arguments[3])
    with torch.autocast("cpu", torch.bfloat16):
        out = chunked_softcap_attention(*arguments[:3], 2.0, arguments[3])
    assert torch.equal(out, expected)
    assert out.dtype == torch.bfloat16


class PeakMemory(TorchDispatchMode):
    """Records the peak size in bytes of all tensors created under it."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.live:
                    self.live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return result


def test_memory_grows_linearly_with_the_length():
    peaks = []
    for length in (256, 1024):
        *qkv, _ = random_inputs(length, length, dtype=torch.float32)
        with PeakMemory() as memory:
            chunked_softcap_attention(*qkv, 2.0, chunk_queries=4096 // length).sum().backward()
        peaks.append(memory.peak)
    assert peaks[1] < 5 * peaks[0]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize(("length", "value_dim"), [(23, 16), (130, 24)])
@torch.no_grad()
def test_flex_attention_matches_the_formula(length, value_dim, has_sink):
    """Only the forward pass, since the backward pass needs a GPU."""
    *qkv, sink = [tensor.detach() for tensor in random_inputs(length, length, value_dim, torch.float32)]
    arguments = (*qkv, 1.5, sink if has_sink else None)
    expected = reference_attention(*arguments).float()
    torch.testing.assert_close(chunked_softcap_attention(*arguments), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(flex_softcap_attention(*arguments), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_flex_attention_compiles_without_graph_breaks():
    *qkv, sink = [tensor.detach() for tensor in random_inputs(130, 130, 24, torch.float32)]
    expected = reference_attention(*qkv, 1.5, sink).float()
    compiled = torch.compile(flex_softcap_attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*qkv, 1.5, sink), expected, rtol=1e-5, atol=1e-5)
