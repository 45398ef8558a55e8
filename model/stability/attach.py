"""Query/key control for any PyTorch training loop, through hooks on a torch optimizer.

    from model.stability.attach import QueryKeyHooks, llama_weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    hooks = QueryKeyHooks(optimizer, llama_weights(model), alpha=0.1)

The weights must not be sharded (no ZeRO, no FSDP), but they need no parameter group of their own. The hooks scale the
step by alpha times the head's ratio. For an optimizer whose step is proportional to its learning rate, that is
equivalent to a lower learning rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from model.parameters import Kind
from model.stability.heads import add_squared_norms, scale_step
from model.stability.policies import quack_ratios


@dataclass(frozen=True)
class AttentionWeights:
    """One layer's query and key matrices, each (heads · head_dim, inputs); keys may have fewer heads."""

    query: nn.Parameter
    key: nn.Parameter
    head_dim: int


def llama_weights(model: Any) -> list[AttentionWeights]:
    """Returns the layers of a `transformers` decoder with Llama's module names (Qwen, Mistral, SmolLM and others).

    Raises:
        ValueError: The model has no `model.layers[*].self_attn.q_proj` and `k_proj`.
    """
    try:
        modules = [layer.self_attn for layer in model.model.layers]
        return [AttentionWeights(part.q_proj.weight, part.k_proj.weight, part.head_dim) for part in modules]
    except AttributeError as error:
        raise ValueError(f"{type(model).__name__} does not have Llama's module names: {error}") from None


class QueryKeyHooks:
    """Scales each head's step by alpha and, with `quack`, by its ratio (see `model.stability.policies`).

    Args:
        optimizer: A torch optimizer over at least these weights.
        layers: Attention layers with equal numbers and widths of heads.
        alpha: Factor of the query/key learning rate.
        policy: `constant` or `quack`.
        has_qk_norm: Whether the model normalises queries and keys.
        max_ratio: Upper limit of the ratios; None: no limit.

    Raises:
        ValueError: alpha is not positive, the policy is unknown, there are no layers, or a head is zero.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        layers: Sequence[AttentionWeights],
        alpha: float,
        policy: str = "quack",
        has_qk_norm: bool = False,
        max_ratio: float | None = None,
    ) -> None:
        if alpha <= 0:
            raise ValueError(f"alpha is {alpha}; expected a positive number")
        if policy not in ("constant", "quack"):
            raise ValueError(f"policy is {policy!r}; expected constant or quack")
        if not layers:
            raise ValueError("layers is empty; expected at least one attention layer")
        self._layers = layers
        self._alpha = alpha
        self._policy = policy
        self._has_qk_norm = has_qk_norm
        self._max_ratio = max_ratio
        self._initial = self._norms()
        for kind, norms in self._initial.items():
            if policy == "quack" and not norms.all():
                layer, head = (norms == 0).nonzero()[0].tolist()
                raise ValueError(
                    f"head {head} of the {kind.value} matrix of layer {layer} is zero; quack divides by its norm"
                )
        self.ratios: dict[Kind, Tensor] = {}
        self._old: list[tuple[Tensor, Tensor]] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the initial norms, which must be stored in checkpoints."""
        return {kind.value: norms for kind, norms in self._initial.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores the initial norms of a checkpoint."""
        self._initial = {Kind(kind): norms.to(self._device) for kind, norms in state.items()}

    def remove(self) -> None:
        """Removes the hooks from the optimizer."""
        for handle in self._handles:
            handle.remove()

    @property
    def _device(self) -> torch.device:
        return self._layers[0].query.device

    @torch.no_grad()
    def _norms(self) -> dict[Kind, Tensor]:
        """Returns the norms of all heads: kind -> (L, heads), fp64."""
        tables: dict[Kind, list[Tensor]] = {Kind.QUERY: [], Kind.KEY: []}
        for layer in self._layers:
            for kind, weight in ((Kind.QUERY, layer.query), (Kind.KEY, layer.key)):
                squares = torch.zeros(weight.shape[0] // layer.head_dim, dtype=torch.float64, device=weight.device)
                add_squared_norms(weight.detach().reshape(-1), 0, layer.head_dim * weight.shape[1], squares)
                tables[kind].append(squares.sqrt())
        return {kind: torch.stack(rows) for kind, rows in tables.items()}

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._policy == "quack":
            self.ratios = quack_ratios(self._norms(), self._initial, self._has_qk_norm, self._max_ratio)
        else:
            self.ratios = {kind: torch.ones_like(norms) for kind, norms in self._initial.items()}
        self._old = [(layer.query.detach().clone(), layer.key.detach().clone()) for layer in self._layers]

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for index, (layer, (old_query, old_key)) in enumerate(zip(self._layers, self._old, strict=True)):
            for kind, weight, old in ((Kind.QUERY, layer.query, old_query), (Kind.KEY, layer.key, old_key)):
                scale_H = (self._alpha * self.ratios[kind][index]).to(weight.dtype)
                numel = layer.head_dim * weight.shape[1]
                scale_step(weight.detach().view(-1), old.view(-1), 0, numel, scale_H)
        self._old = []
