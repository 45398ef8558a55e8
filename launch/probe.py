"""A fixed probe batch, on which attention is measured while a model trains.

Everything is computed in fp32 from the model's weights, in one spare attention layer that takes the weights of each
layer in turn: no hook, no compiled code and no cast of the training step is involved, at any ZeRO stage. Each sequence
counts as one document, also where training keeps attention inside documents (data.mask_documents).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist

from model.attention import ATTENTION
from model.gpt import GPT
from model.stability.drift import rms_change, sampled_logits, sampled_positions

if TYPE_CHECKING:
    from model.block import Block

Gather = Callable[[Iterable[nn.Parameter]], AbstractContextManager[None]]


class Probe:
    """Runs the probe batch through a model, layer by layer.

    Args:
        model: whose layers are measured.
        tokens_BT: the probe batch, the same on all ranks.
        num_queries: sampled query positions of every sequence.
        device: where the model computes.
        gather: makes parameters whole within its context (ZeRO stage 3).

    Attributes:
        positions_Q: the sampled positions.
        layer: the spare attention layer, in fp32.
    """

    def __init__(self, model: GPT, tokens_BT: Tensor, num_queries: int, device: torch.device, gather: Gather) -> None:
        self.tokens_BT = tokens_BT
        self.positions_Q = sampled_positions(tokens_BT.shape[1], num_queries).to(device)
        self.device = device
        self.layer = cast(Any, ATTENTION[model.config.attention.kind](model.config))
        self.layer.to(device=device, dtype=torch.float32).requires_grad_(False)
        self._model = model
        self._gather = gather

    def layers(self) -> Iterator[Tensor]:
        """Each layer's attention inputs (B, T, D), while `layer` holds that layer's weights. Collective at stage 3."""
        was_training = self._model.training
        self._model.eval()
        for index, x_BTD in enumerate(self._model.attention_inputs(self.tokens_BT.to(self.device))):
            self._take_weights(cast("Block", self._model.blocks[index]).attention)
            yield x_BTD
        self._model.train(was_training)

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the layer, in fp32."""
        positions_T = torch.arange(x_BTD.shape[1], device=self.device)
        projected: tuple[Tensor, Tensor, Tensor] = self.layer.project(x_BTD.float(), self._model.rotary(positions_T))
        return projected

    def logits(self, x_BTD: Tensor) -> Tensor:
        """`sampled_logits` of the layer (B, H, Q, T)."""
        q_BHTK, k_BGTK, _ = self.project(x_BTD)
        return sampled_logits(q_BHTK, k_BGTK, self.positions_Q)

    def _take_weights(self, attention: Any) -> None:
        parameters = dict(attention.named_parameters())
        with self._gather(parameters.values()):
            for name, own in self.layer.named_parameters():
                own.copy_(parameters[name])


class DriftProbe:
    """Compares each layer's logits with those of the last measurement, which it keeps in host memory."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._inputs: list[Tensor] = []
        self._logits: list[Tensor] = []

    @torch.no_grad()
    def measure(self) -> tuple[list[float], list[float]] | None:
        """Compares with the last measurement and takes its place. Collective.

        Returns:
            RMS change of each layer's logits: with the inputs of the last measurement, which is what the query/key
            weights caused, and with the inputs of now; None at the first measurement.
        """
        probe, inputs, logits, changes = self._probe, [], [], []
        for layer, x_BTD in enumerate(probe.layers()):
            now = probe.logits(x_BTD)
            if self._inputs:
                old = self._logits[layer].to(probe.device)
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
        """For a checkpoint: the probe batch, and inputs (L, B, T, D) and logits (L, B, H, Q, T) if any."""
        tensors = {"tokens": self._probe.tokens_BT}
        if self._inputs:
            tensors |= {"inputs": torch.stack(self._inputs), "logits": torch.stack(self._logits)}
        return tensors

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes those of a checkpoint; measurements of another number of queries are left out."""
        if "inputs" not in tensors or tensors["logits"].shape[-2] != len(self._probe.positions_Q):
            return
        self._probe.tokens_BT = tensors["tokens"]
        self._inputs, self._logits = list(tensors["inputs"]), list(tensors["logits"])
