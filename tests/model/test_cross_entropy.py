"""The chunked cross-entropy, compared with the textbook formula in float64."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model.cross_entropy import linear_cross_entropy

FP32_BYTES = 4


def random_inputs(num_tokens: int, dim: int, vocab_size: int, num_ignored: int, seed: int = 0) -> tuple:
    """Returns hidden states, weight and targets; the first two are float64 and require gradients."""
    generator = torch.Generator().manual_seed(seed)
    hidden_ND = torch.randn(num_tokens, dim, generator=generator, dtype=torch.float64).float().double()
    weight_VD = torch.randn(vocab_size, dim, generator=generator, dtype=torch.float64).float().double()
    targets_N = torch.randint(vocab_size, (num_tokens,), generator=generator)
    targets_N[torch.randperm(num_tokens, generator=generator)[:num_ignored]] = -100
    return hidden_ND.requires_grad_(), weight_VD.requires_grad_(), targets_N


def reference(hidden_ND, weight_VD, targets_N, z_loss_weight):
    """Computes the textbook formula with the full logits in float64."""
    logits_NV = hidden_ND @ weight_VD.T
    cross_entropy = torch.nn.functional.cross_entropy(logits_NV, targets_N, ignore_index=-100, reduction="sum")
    z_loss = logits_NV.logsumexp(1).square()[targets_N != -100].sum()
    return cross_entropy + z_loss_weight * z_loss, cross_entropy, z_loss


def cast_copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().to(dtype).requires_grad_()


@given(
    num_tokens=st.integers(1, 23),
    dim=st.integers(1, 9),
    vocab_size=st.integers(2, 33),
    chunk_tokens=st.integers(1, 24),
    ignored_fraction=st.floats(0, 1),
    z_loss_weight=st.sampled_from([0.0, 1e-4, 0.3]),
    upstream=st.sampled_from([1.0, -0.25, 1e-3]),
)
@settings(max_examples=60, deadline=None)
def test_values_and_gradients_match_the_float64_reference(
    num_tokens, dim, vocab_size, chunk_tokens, ignored_fraction, z_loss_weight, upstream
):
    hidden, weight, targets = random_inputs(num_tokens, dim, vocab_size, round(ignored_fraction * num_tokens))
    expected = reference(hidden, weight, targets, z_loss_weight)
    (expected[0] * upstream).backward()

    hidden32, weight32 = cast_copy(hidden, torch.float32), cast_copy(weight, torch.float32)
    max_chunk_bytes = chunk_tokens * vocab_size * FP32_BYTES
    sums = linear_cross_entropy(hidden32, weight32, targets, z_loss_weight, max_chunk_bytes)
    (sums[0] * upstream).backward()

    for value, expected_value in zip(sums, expected, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected_value, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden32.grad.double(), hidden.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight32.grad.double(), weight.grad, rtol=1e-4, atol=1e-5)
    assert [value.requires_grad for value in sums] == [True, False, False]


def test_all_targets_ignored_gives_zeros():
    hidden, weight, targets = random_inputs(7, 4, 11, num_ignored=7)
    hidden32, weight32 = cast_copy(hidden, torch.float32), cast_copy(weight, torch.float32)
    sums = linear_cross_entropy(hidden32, weight32, targets, 1e-4, 3 * 11 * FP32_BYTES)
    sums[0].backward()
    assert [value.item() for value in sums] == [0, 0, 0]
    assert not hidden32.grad.any()
    assert not weight32.grad.any()


def test_large_logits_do_not_overflow():
    hidden, weight, targets = random_inputs(7, 4, 11, num_ignored=0)
    hidden32, weight32 = cast_copy(1e4 * hidden, torch.float32), cast_copy(weight, torch.float32)
    objective = linear_cross_entropy(hidden32, weight32, targets)[0]
    objective.backward()
    torch.testing.assert_close(objective.double(), reference(1e4 * hidden, weight, targets, 0.0)[0])
    assert hidden32.grad.isfinite().all()
    assert weight32.grad.isfinite().all()


@pytest.mark.parametrize("mode", ["bf16", "autocast"])
def test_bf16_is_close_to_fp32_and_sums_the_weight_gradient_accurately_over_many_chunks(mode):
    """A gradient summed in bf16 over 300 one-token chunks would lose most of its precision."""
    hidden, weight, targets = random_inputs(300, 16, 37, num_ignored=20)
    expected = reference(hidden, weight, targets, 1e-4)
    expected[0].backward()
    dtype = torch.bfloat16 if mode == "bf16" else torch.float32
    hidden16, weight16 = cast_copy(hidden, dtype), cast_copy(weight, dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        sums = linear_cross_entropy(hidden16, weight16, targets, 1e-4, 37 * FP32_BYTES)
    sums[0].backward()
    assert sums[0].dtype == torch.float32
    assert hidden16.grad.dtype == weight16.grad.dtype == dtype
    torch.testing.assert_close(sums[0].double(), expected[0], rtol=5e-3, atol=0)
    for gradient, expected_gradient in ((hidden16.grad, hidden.grad), (weight16.grad, weight.grad)):
        assert (gradient - expected_gradient).norm() < 0.01 * expected_gradient.norm()


def test_no_gradients_are_computed_under_no_grad():
    hidden, weight, targets = random_inputs(9, 4, 11, num_ignored=2)
    hidden32, weight32 = cast_copy(hidden, torch.float32), cast_copy(weight, torch.float32)
    with_gradients = linear_cross_entropy(hidden32, weight32, targets, 1e-4)
    with torch.no_grad(), LargestTensor() as recorder:
        without_gradients = linear_cross_entropy(hidden32, weight32, targets, 1e-4)
    assert [value.requires_grad for value in without_gradients] == [False, False, False]
    assert [value.item() for value in without_gradients] == [value.item() for value in with_gradients]
    # The logits need one product of hidden and weight; gradients would need two more.
    assert recorder.num_products == 1


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor that any operation returns, and the number of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        self.num_products += func.overloadpacket.__name__ in ("mm", "addmm", "addmm_")
        return result


def test_logits_of_the_whole_batch_are_never_allocated():
    num_tokens, dim, vocab_size, chunk_tokens = 256, 4, 101, 16
    hidden, weight, targets = random_inputs(num_tokens, dim, vocab_size, num_ignored=5)
    hidden32, weight32 = cast_copy(hidden, torch.float32), cast_copy(weight, torch.float32)
    with LargestTensor() as recorder:
        max_chunk_bytes = chunk_tokens * vocab_size * FP32_BYTES
        linear_cross_entropy(hidden32, weight32, targets, 1e-4, max_chunk_bytes)[0].backward()
    assert recorder.numel == chunk_tokens * vocab_size
    # One product for the logits and two for the gradients of each chunk; nothing is recomputed.
    assert recorder.num_products == 3 * num_tokens // chunk_tokens
