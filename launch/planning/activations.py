"""Activation memory: bytes that the forward pass of one micro-batch saves for the backward pass, and those of the loss.

Counted for eager PyTorch, as Korthikanti et al. (arXiv 2205.05198) do for a GPT with biases, dropout and a matrix of
scores. Fused attention saves its inputs, its output and one logsumexp per query, never the T x S scores.
`torch.compile` fuses and recomputes operations, and saves less.

RMSNorm differs between CPU and GPU: the CUDA kernel saves its input, the CPU's composite saves fp32 copies of it and of
the normalised values. At stage 0 in bf16 the weights are fp32; autocast rounds them, and it rounds a norm's output once
for every product that uses it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from configs.schema import Config, ModelConfig
from model.attention.mla import latent_sizes
from model.attention.sink import WIDTH_STEP
from model.cross_entropy import MAX_CHUNK_BYTES

FP32_BYTES = 4


@dataclass(frozen=True)
class _Widths:
    """What the bytes depend on besides the model's shape.

    Attributes:
        value: Bytes per element in the compute dtype.
        stream: Bytes per element of the residual stream.
        is_autocast: Whether products round their inputs.
    """

    value: int
    stream: int
    is_autocast: bool
    on_gpu: bool

    @classmethod
    def of(cls, config: Config, stage: int, on_gpu: bool) -> _Widths:
        in_bf16 = config.train.precision == "bf16"
        is_autocast = in_bf16 and stage == 0
        return cls(2 if in_bf16 else 4, 2 if in_bf16 and not is_autocast else 4, is_autocast, on_gpu)

    def norm(self, width: int, value_bytes: int) -> int:
        """Bytes that an RMSNorm over `width` elements saves per row: its input and the inverse RMS."""
        return (value_bytes if self.on_gpu else 2 * FP32_BYTES) * width + FP32_BYTES

    def inputs(self, width: int, num_products: int) -> int:
        """Bytes of a norm's output, as saved by the products that use it."""
        return self.value * width * (num_products if self.is_autocast else 1)


def activation_bytes(config: Config, stage: int, on_gpu: bool) -> float:
    """Bytes at the end of the forward pass of one micro-batch, without the loss."""
    model, widths = config.model, _Widths.of(config, stage, on_gpu)
    final = widths.norm(model.dim, widths.stream) + widths.stream * model.dim  # also the gradient of the head's input
    if config.train.activation_checkpointing:
        return _num_tokens(config) * float(model.num_layers * widths.stream * model.dim + final)
    return _num_tokens(config) * float(model.num_layers * _layer_bytes(model, widths) + final)


def working_bytes(config: Config, stage: int, on_gpu: bool) -> float:
    """Further bytes during the backward pass of one layer: gradients in flight, and recomputed activations."""
    model, widths = config.model, _Widths.of(config, stage, on_gpu)
    assert model.ffn_dim is not None
    in_flight = widths.value * 2 * model.ffn_dim + widths.stream * 2 * model.dim
    recomputed = _layer_bytes(model, widths) if config.train.activation_checkpointing else 0
    return _num_tokens(config) * float(in_flight + recomputed)


def head_bytes(config: Config, stage: int) -> float:
    """Bytes of the output head's weight gradient, which the loss computes in the forward pass."""
    assert config.model.vocab_size is not None
    return float(_weight_bytes(config, stage) * config.model.vocab_size * config.model.dim)


def loss_bytes(config: Config, stage: int) -> float:
    """Further bytes at the peak of the loss: the logits of a chunk and the head's gradient.

    A chunk's fp32 matrix holds first the logits, then their exponentials, then the gradient. Its matrices are freed
    after the next chunk's are allocated, so with two or more chunks two sets exist. Each matrix has a copy in the
    compute dtype. The head's gradient is summed in fp32, from products in the compute dtype.
    """
    assert config.model.vocab_size is not None
    in_bf16 = config.train.precision == "bf16"
    numel = config.model.vocab_size * config.model.dim
    whole = FP32_BYTES * _num_tokens(config) * config.model.vocab_size
    chunk_tokens = max(1, MAX_CHUNK_BYTES // (FP32_BYTES * config.model.vocab_size))
    num_chunks = math.ceil(_num_tokens(config) / chunk_tokens)
    chunk = min(whole, FP32_BYTES * chunk_tokens * config.model.vocab_size)
    logits = chunk * (1.5 if in_bf16 else 1.0) * (1 if num_chunks == 1 else 2)
    rounded_weight = 2 * numel if in_bf16 and _weight_bytes(config, stage) == FP32_BYTES else 0
    product = 2 * numel if in_bf16 else 0
    return float(logits + FP32_BYTES * numel + product + rounded_weight)


def _weight_bytes(config: Config, stage: int) -> int:
    """Bytes per element of the model's weights and their gradients."""
    return 2 if config.train.precision == "bf16" and stage > 0 else 4


def _num_tokens(config: Config) -> int:
    assert config.data.seq_len is not None
    return config.train.micro_batch_size * config.data.seq_len


def _layer_bytes(model: ModelConfig, widths: _Widths) -> int:
    """Bytes that one block saves per token."""
    assert model.ffn_dim is not None
    norms = 2 * widths.norm(model.dim, widths.stream)
    feed_forward = widths.inputs(model.dim, 2) + widths.value * 4 * model.ffn_dim  # gate, silu(gate), up and product
    attention = _mla_bytes(model, widths) if model.attention.kind == "mla" else _mha_bytes(model, widths)
    return norms + attention + feed_forward


def _mha_bytes(model: ModelConfig, widths: _Widths) -> int:
    assert model.head_dim is not None
    assert model.num_kv_heads is not None
    heads, kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
    num_bytes = widths.inputs(model.dim, 3 + model.attention.gated)
    if model.attention.qk_norm:
        num_bytes += (heads + kv_heads) * widths.norm(head_dim, widths.value)
    if widths.on_gpu and widths.value == FP32_BYTES:
        kv_heads = heads  # no fused fp32 kernel supports grouped heads, so keys and values are repeated
    return num_bytes + _kernel_bytes(model, widths, kv_heads, head_dim, head_dim)


def _mla_bytes(model: ModelConfig, widths: _Widths) -> int:
    sizes, has_norm = latent_sizes(model), model.attention.mla.latent_norm
    num_products = (4 if sizes.q_latent_dim is None else 3) + model.attention.gated
    num_bytes = widths.inputs(model.dim, num_products)
    for latent in (sizes.q_latent_dim, sizes.kv_latent_dim):
        if latent is not None:
            num_bytes += widths.value * latent + (widths.norm(latent, widths.value) if has_norm else 0)
    if model.attention.qk_norm:
        num_bytes += 2 * model.num_heads * widths.norm(sizes.query_key_dim, widths.value)
    return num_bytes + _kernel_bytes(model, widths, model.num_heads, sizes.query_key_dim, sizes.value_dim)


def _kernel_bytes(model: ModelConfig, widths: _Widths, kv_heads: int, key_width: int, value_width: int) -> int:
    """Bytes per token of queries, keys, values, output, logsumexp, and what the options around the kernel save."""
    attention, heads = model.attention, model.num_heads
    output = widths.value * heads * value_width
    if attention.sink:
        key_width = -(-(key_width + 1) // WIDTH_STEP) * WIDTH_STEP
    width = max(key_width, value_width)  # the kernel takes one width; narrower tensors are padded with zeros
    num_bytes = widths.value * (2 * heads + 2 * kv_heads) * width + FP32_BYTES * heads
    if key_width != value_width:
        num_bytes += output  # in another layout, or without the padding, for the output matrix
    if attention.ssmax:
        num_bytes += FP32_BYTES * heads * key_width
    if attention.gated:
        num_bytes += 2 * output
    return num_bytes
