"""Cross-entropy of a linear output head that never materialises the logits of the whole batch.

The tokens are processed in chunks. When gradients are needed, the forward pass also computes each chunk's
gradients with respect to its hidden states and to the head's weight, while the chunk's logits are in memory.
So nothing is recomputed, and the backward pass only multiplies by the upstream gradient (Hsu et al., Liger
Kernel, arXiv 2410.10989).

Shapes: N tokens, C tokens in a chunk, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100

# Size of a chunk's fp32 logits; with copies in the compute dtype, up to twice as much is allocated at once. Every
# chunk reads and writes the whole weight gradient, so a chunk should hold several hundred tokens: it holds 512
# with a vocabulary of 131,072 and 2,048 with one of 32,768.
MAX_CHUNK_BYTES = 256 * 2**20


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    z_loss_weight: float = 0.0,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the summed cross-entropy and z-loss of softmax(hidden weightᵀ), skipping `IGNORE_INDEX` targets.

    With lse = logsumexp of a token's logits, the cross-entropy is lse - logits[target] and the z-loss is lse²
    (PaLM, arXiv 2204.02311, section 5). Matrix products run in the inputs' dtype, or in autocast's where it is
    enabled; the softmax and all sums are computed in fp32.

    Args:
        hidden_ND: The head's inputs.
        weight_VD: The head's weight matrix.
        targets_N: Token ids, or `IGNORE_INDEX`.
        z_loss_weight: Weight of the z-loss in the objective.
        max_chunk_bytes: Maximum size of a chunk's fp32 logits; a chunk has at least one token.

    Returns:
        Three fp32 scalars: the objective, cross-entropy + z_loss_weight * z-loss, which is differentiable, and the
        cross-entropy and the z-loss, which are not. All are sums: 0 if every target is ignored.
    """
    device_type = hidden_ND.device.type
    compute_dtype = hidden_ND.dtype
    # The meta device has no autocast, and querying it raises an error.
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        compute_dtype = torch.get_autocast_dtype(device_type)
    chunk_size = max(1, max_chunk_bytes // (4 * weight_VD.shape[0]))
    arguments = (hidden_ND, weight_VD, targets_N, z_loss_weight, chunk_size, compute_dtype)
    if torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad):
        return _LinearCrossEntropy.apply(*arguments)
    cross_entropy, z_loss, _, _ = _sums_and_gradients(*arguments, False)
    return cross_entropy + z_loss_weight * z_loss, cross_entropy, z_loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        z_loss_weight: float,
        chunk_size: int,
        compute_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        cross_entropy, z_loss, grad_hidden_ND, grad_weight_VD = _sums_and_gradients(
            hidden_ND, weight_VD, targets_N, z_loss_weight, chunk_size, compute_dtype, True
        )
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD)
        ctx.mark_non_differentiable(cross_entropy, z_loss)
        return cross_entropy + z_loss_weight * z_loss, cross_entropy, z_loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_objective: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        return grad_hidden_ND * grad_objective, grad_weight_VD * grad_objective, None, None, None, None


def _sums_and_gradients(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    z_loss_weight: float,
    chunk_size: int,
    compute_dtype: torch.dtype,
    needs_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the summed cross-entropy, the summed z-loss, and the objective's gradients for hidden and weight.

    Ids and sums stay on the device, so there is no host synchronisation.
    """
    cross_entropy = torch.zeros((), device=hidden_ND.device)
    z_loss = torch.zeros((), device=hidden_ND.device)
    grad_hidden_ND = torch.empty_like(hidden_ND) if needs_gradients else None
    grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_gradients else None
    compute_weight_VD = weight_VD.to(compute_dtype)

    for start in range(0, hidden_ND.shape[0], chunk_size):
        chunk = slice(start, start + chunk_size)
        hidden_CD = hidden_ND[chunk].to(compute_dtype)
        logits_CV = (hidden_CD @ compute_weight_VD.T).float()
        is_target_C1 = (targets_N[chunk] != IGNORE_INDEX).unsqueeze(1)
        targets_C1 = targets_N[chunk].unsqueeze(1).where(is_target_C1, 0)
        target_logits_C1 = logits_CV.gather(1, targets_C1)

        # In place, so that one fp32 matrix holds the logits, then their exponentials, then the gradient.
        max_C1 = logits_CV.amax(1, keepdim=True)
        exp_CV = logits_CV.sub_(max_C1).exp_()
        exp_sum_C1 = exp_CV.sum(1, keepdim=True)
        lse_C1 = max_C1 + exp_sum_C1.log()
        cross_entropy += (lse_C1 - target_logits_C1).where(is_target_C1, 0.0).sum()
        z_loss += lse_C1.square().where(is_target_C1, 0.0).sum()
        if grad_hidden_ND is None or grad_weight_VD is None:
            continue

        # d lse / d logits = softmax, so d objective / d logits = (1 + 2 z_loss_weight lse) softmax - onehot.
        softmax_factor_C1 = ((1 + 2 * z_loss_weight * lse_C1) / exp_sum_C1).where(is_target_C1, 0.0)
        grad_logits_CV = exp_CV.mul_(softmax_factor_C1)
        grad_logits_CV = grad_logits_CV.scatter_add_(1, targets_C1, -is_target_C1.float()).to(compute_dtype)
        grad_hidden_ND[chunk] = grad_logits_CV @ compute_weight_VD
        if compute_dtype == torch.float32:
            grad_weight_VD.addmm_(grad_logits_CV.T, hidden_CD)
        else:
            grad_weight_VD += grad_logits_CV.T @ hidden_CD

    if grad_weight_VD is not None:
        grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
    return cross_entropy, z_loss, grad_hidden_ND, grad_weight_VD
