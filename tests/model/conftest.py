"""Small models for the tests of the `model` package."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from configs.schema import ModelConfig, resolve_model
from model.gpt import GPT
from model.initialisation import initialise

SMALL: dict[str, Any] = {"vocab_size": 61, "dim": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 48}


@pytest.fixture(scope="session")
def make_config() -> Callable[..., ModelConfig]:
    """Returns a factory of small resolved configurations; `options` overrides the keys of attention."""

    def factory(
        qk_norm: bool = False,
        kind: str = "mha",
        mla: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        **sizes: Any,
    ) -> ModelConfig:
        attention = {"kind": kind, "qk_norm": qk_norm, "mla": mla or {}, **(options or {})}
        return resolve_model(ModelConfig(**{**SMALL, **sizes}, attention=attention))

    return factory


@pytest.fixture(scope="session")
def make_model(make_config: Callable[..., ModelConfig]) -> Callable[..., GPT]:
    """Returns a factory of small initialised models; keywords override keys of the configuration.

    Weights are larger than usual and gains differ from 1, so that every part of the network affects the output.
    """

    def factory(activation_checkpointing: bool = False, **keys: Any) -> GPT:
        model = GPT(make_config(**{"init_std": 0.15, **keys}), activation_checkpointing)
        initialise(model, seed=0)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
        return model

    return factory


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and targets (B=3, T=40) of the small vocabulary; some targets are ignored."""
    generator = torch.Generator().manual_seed(2)
    tokens_BT = torch.randint(SMALL["vocab_size"], (3, 40), generator=generator)
    targets_BT = tokens_BT.roll(-1, dims=1)
    targets_BT[:, -1] = -100
    targets_BT[1, :17] = -100
    return tokens_BT, targets_BT
