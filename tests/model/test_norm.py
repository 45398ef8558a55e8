"""RMSNorm, compared with its formula in float64 and with Hugging Face's."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from model.norm import RMSNorm
from tests.model.attention.reference import rms_norm


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gain_dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_computed_in_fp32_and_rounded_once(x_dtype, gain_dtype):
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(48, eps=1e-5)
    norm.weight.data = (1 + 0.3 * torch.randn(48, generator=generator)).to(gain_dtype)
    x = (100 * torch.randn(64, 48, generator=generator)).to(x_dtype)
    result, expected = norm(x), rms_norm(x.double(), norm.weight, eps=1e-5)
    assert result.dtype == x_dtype
    # Rounding once has an error of at most half a unit in the last place.
    half_ulp = torch.finfo(x_dtype).eps / 2
    assert torch.all((result.double() - expected).abs() <= (1.01 * half_ulp + 1e-6) * expected.abs())


def test_bf16_is_at_least_as_accurate_as_hugging_face():
    generator = torch.Generator().manual_seed(0)
    norm, llama_norm = RMSNorm(48, eps=1e-5).bfloat16(), LlamaRMSNorm(48, eps=1e-5).bfloat16()
    gain = (1 + 0.3 * torch.randn(48, generator=generator)).bfloat16()
    norm.weight.data = llama_norm.weight.data = gain
    x = torch.randn(64, 48, generator=generator).bfloat16()
    expected = rms_norm(x.double(), gain, eps=1e-5)
    assert (norm(x) - expected).abs().max() <= (llama_norm(x) - expected).abs().max()
