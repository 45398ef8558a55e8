"""A fixed probe batch, on which attention is measured during training.

Queries, keys and values are computed in fp32 in one scratch layer that loads the fp32 masters of each layer in turn, so
that the training step's hooks, compiled code and casts are not involved, at any ZeRO stage. (A step can be smaller than
the rounding of bf16 weights.) Only the layers' inputs are computed by the model itself. Each sequence counts as one
document, even if training masks attention across documents (data.mask_documents).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist

from launch.distributed.shards import Shard
from model.attention import ATTENTION
from model.gpt import GPT
from model.stability.drift import rms_change, sampled_logits, sampled_positions


class Probe:
    """Runs the probe batch through a model, layer by layer.

    Args:
        model: The model whose layers are measured.
        tokens_BT: The probe batch, the same on all ranks.
        num_queries: The number of sampled query positions per sequence.
        device: The model's device.
        shards: This rank's shards of all parameters.
        is_replicated: Whether every rank holds all weights (ZeRO stage 0).

    Attributes:
        positions_Q: The sampled positions.
        layer: The scratch attention layer, in fp32.
    """

    def __init__(
        self,
        model: GPT,
        tokens_BT: Tensor,
        num_queries: int,
        device: torch.device,
        shards: Sequence[Shard],
        is_replicated: bool,
    ) -> None:
        self.tokens_BT = tokens_BT
        self.positions_Q = sampled_positions(tokens_BT.shape[1], num_queries).to(device)
        self.device = device
        self.layer = cast(Any, ATTENTION[model.config.attention.kind](model.config))
        self.layer.to(device=device, dtype=torch.float32).requires_grad_(False)
        self._model = model
        self._is_replicated = is_replicated
        self._shards = {shard.name: shard for shard in shards}
        self._full_names = {id(parameter): name for name, parameter in model.named_parameters()}

    def layers(self) -> Iterator[Tensor]:
        """Yields each layer's attention inputs (B, T, D), with that layer's masters in `layer`. Collective."""
        was_training = self._model.training
        self._model.eval()
        for index, x_BTD in enumerate(self._model.attention_inputs(self.tokens_BT.to(self.device))):
            self._load_weights(cast(Any, self._model.blocks[index]).attention)
            yield x_BTD
        self._model.train(was_training)

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries, keys and values of the current layer, in fp32."""
        positions_T = torch.arange(x_BTD.shape[1], device=self.device)
        projected: tuple[Tensor, Tensor, Tensor] = self.layer.project(x_BTD.float(), self._model.rotary(positions_T))
        return projected

    def logits(self, x_BTD: Tensor) -> Tensor:
        """The `sampled_logits` of the current layer (B, H, Q, T)."""
        q_BHTK, k_BGTK, _ = self.project(x_BTD)
        return sampled_logits(q_BHTK, k_BGTK, self.positions_Q)

    def _load_weights(self, attention: nn.Module) -> None:
        """Loads the masters from all ranks' shards into `layer`. Collective: one all-reduce."""
        own = dict(self.layer.named_parameters())
        whole = torch.zeros(sum(parameter.numel() for parameter in own.values()), device=self.device)
        parts = dict(zip(own, whole.split([parameter.numel() for parameter in own.values()]), strict=True))
        for name, parameter in attention.named_parameters():
            shard = self._shards.get(self._full_names[id(parameter)])
            if shard is not None:
                parts[name][shard.start : shard.stop] = shard.master
        if not self._is_replicated:
            dist.all_reduce(whole)
        for name, parameter in own.items():
            parameter.copy_(parts[name].view_as(parameter))


class DriftProbe:
    """Compares each layer's logits with those of the last measurement, which are kept in host memory."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._inputs: list[Tensor] = []
        self._logits: list[Tensor] = []

    @torch.no_grad()
    def measure(self, clipping_LH: Tensor | None = None) -> tuple[list[float], list[float]] | None:
        """Compares with the last measurement and replaces it. Collective.

        Args:
            clipping_LH: The factor that clipping applied to the logits since then, which is not drift; None: none.

        Returns:
            The RMS change of each layer's logits: on the last measurement's inputs, which is the change caused by the
            query/key weights, and on the current inputs. None at the first measurement.
        """
        probe, inputs, logits, changes = self._probe, [], [], []
        for layer, x_BTD in enumerate(probe.layers()):
            now = probe.logits(x_BTD)
            if self._inputs:
                old = self._logits[layer].to(probe.device)
                if clipping_LH is not None:
                    old = old * clipping_LH[layer][:, None, None]
                own = probe.logits(self._inputs[layer].to(probe.device))
                changes.append(torch.stack([rms_change(new, old, probe.positions_Q) for new in (own, now)]))
            inputs.append(x_BTD.cpu())
            logits.append(now.cpu())
        self._inputs, self._logits = inputs, logits
        if not changes:
            return None
        changes_L2 = torch.stack(changes)
        dist.broadcast(changes_L2, src=0)  # kernels may round differently on other ranks
        own_L, total_L = changes_L2.T.tolist()
        return own_L, total_L

    def tensors(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint: the probe batch, and inputs (L, B, T, D) and logits (L, B, H, Q, T) if any."""
        tensors = {"tokens": self._probe.tokens_BT}
        if self._inputs:
            tensors |= {"inputs": torch.stack(self._inputs), "logits": torch.stack(self._logits)}
        return tensors

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> bool:
        """Restores the tensors of a checkpoint. Returns False without effect if they do not fit this probe batch."""
        shape = (len(self._probe.positions_Q), *self._probe.tokens_BT.shape)
        if "inputs" not in tensors or (tensors["logits"].shape[-2], *tensors["tokens"].shape) != shape:
            return False
        self._probe.tokens_BT = tensors["tokens"]
        self._inputs, self._logits = list(tensors["inputs"]), list(tensors["logits"])
        return True
