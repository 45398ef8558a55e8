import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from model.norm import RMSNorm


def reference(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    x, gain = x.double(), gain.double()
    return gain * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gain_dtype", [torch.float32, torch.bfloat16])
def test_computed_in_fp32_and_rounded_once(x_dtype, gain_dtype):
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(48, eps=1e-5)
    norm.weight.data = (1 + 0.3 * torch.randn(48, generator=generator)).to(gain_dtype)
    x = (100 * torch.randn(64, 48, generator=generator)).to(x_dtype)
    result, expected = norm(x), reference(x, norm.weight)
    assert result.dtype == x_dtype
    # Half a unit in the last place is the error of one rounding.
    half_ulp = torch.finfo(x_dtype).eps / 2
    assert torch.all((result.double() - expected).abs() <= (1.01 * half_ulp + 1e-6) * expected.abs())


def test_not_less_exact_than_hugging_face_in_bf16():
    generator = torch.Generator().manual_seed(0)
    norm, llama_norm = RMSNorm(48, eps=1e-5).bfloat16(), LlamaRMSNorm(48, eps=1e-5).bfloat16()
    gain = (1 + 0.3 * torch.randn(48, generator=generator)).bfloat16()
    norm.weight.data = llama_norm.weight.data = gain
    x = torch.randn(64, 48, generator=generator).bfloat16()
    expected = reference(x, gain)
    assert (norm(x) - expected).abs().max() <= (llama_norm(x) - expected).abs().max()
