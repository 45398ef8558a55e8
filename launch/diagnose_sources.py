"""Where attention comes from for `launch.diagnose`: checkpoints of ours, and decoders of `transformers` as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from launch.errors import RunError
from model.diagnostics.weights import SampledAttention, sampled_attention
from model.stability.drift import sampled_logits


@dataclass(frozen=True)
class ModelShape:
    """What an analysis needs to know of a model."""

    name: str
    num_layers: int
    num_heads: int
    max_seq_len: int
    num_parameters: int


class AttentionSource(Protocol):
    """A model that shows its attention."""

    shape: ModelShape

    def encode(self, text: str) -> list[int]:
        """Token ids, without a start token."""

    def layers(self, tokens_T: Tensor, positions_Q: Tensor) -> Iterator[tuple[int, SampledAttention]]:
        """The attention of every layer for one sequence (B = 1), layer by layer, in fp64."""


def open_source(path: Path, tokenizer: Path | None) -> AttentionSource:
    """A Hugging Face folder when it has a config.json with an architecture, else a checkpoint of ours.

    Raises:
        RunError: it is neither, or cannot be read.
    """
    config = path / "config.json"
    if config.is_file():
        try:
            is_decoder = "model_type" in json.loads(config.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise RunError(f"{config}: cannot be read: {error}") from None
        if is_decoder:
            return TransformersSource(path, tokenizer)
    return CheckpointSource(path, tokenizer)


class CheckpointSource:
    """A checkpoint of ours."""

    def __init__(self, path: Path, tokenizer: Path | None) -> None:
        """Raises RunError when there is no good checkpoint or no tokenizer."""
        from data.tokenizer import Tokenizer
        from launch.load_model import load_model

        self._model, checkpoint = load_model(path, torch.device("cpu"), torch.float32)
        tokenizer = tokenizer or next(iter(sorted(checkpoint.glob("tokenizer.*"))), None)
        if tokenizer is None:
            raise RunError(f"{checkpoint} holds no tokenizer (its data had none); name one with --tokenizer")
        self._tokenizer = Tokenizer.load(tokenizer)
        config = self._model.config
        self.shape = ModelShape(
            str(path), config.num_layers, config.num_heads, config.max_seq_len, self._model.num_parameters
        )

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    @torch.no_grad()
    def layers(self, tokens_T: Tensor, positions_Q: Tensor) -> Iterator[tuple[int, SampledAttention]]:
        rotary = self._model.rotary(torch.arange(len(tokens_T)))
        inputs = self._model.attention_inputs(tokens_T[None])
        for layer, (block, x_BTD) in enumerate(zip(self._model.blocks, inputs, strict=True)):
            attention: Any = block.attention
            q_BHTK, k_BGTK, v_BGTV = (part.double() for part in attention.project(x_BTD, rotary))
            logits = sampled_logits(q_BHTK, k_BGTK, positions_Q)
            yield layer, sampled_attention(logits, v_BGTV, positions_Q, attention.softcap, attention.sink)


class TransformersSource:
    """A decoder of `transformers`, without conversion: an attention function of ours sees queries, keys and values."""

    def __init__(self, path: Path, tokenizer: Path | None) -> None:
        """Raises RunError when `transformers` is missing or cannot load the folder."""
        try:
            from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
            from transformers.utils import logging
        except ImportError:
            raise RunError(f"{path} is a Hugging Face folder; reading it needs: pip install transformers") from None
        logging.disable_progress_bar()
        attention = f"steadyhead_{id(self)}"
        AttentionInterface.register(attention, self._attend)
        try:
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                path, attn_implementation=attention, dtype=torch.float32, local_files_only=True
            ).eval()
        except (OSError, ValueError, KeyError) as error:
            raise RunError(f"{path}: transformers cannot load it: {str(error).splitlines()[0]}") from None
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer or path, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            first = str(error).splitlines()[0]
            raise RunError(f"{tokenizer or path}: holds no tokenizer; name one with --tokenizer ({first})") from None
        config = self._model.config.get_text_config()
        self.shape = ModelShape(
            str(path),
            config.num_hidden_layers,
            config.num_attention_heads,
            config.max_position_embeddings,
            sum(parameter.numel() for parameter in self._model.parameters()),
        )
        self._seen: list[SampledAttention] = []
        self._positions_Q = torch.empty(0)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    @torch.no_grad()
    def layers(self, tokens_T: Tensor, positions_Q: Tensor) -> Iterator[tuple[int, SampledAttention]]:
        self._seen, self._positions_Q = [], positions_Q
        self._model(tokens_T[None], use_cache=False)
        if len(self._seen) != self.shape.num_layers:
            raise RunError(
                f"{self.shape.name}: {len(self._seen)} of {self.shape.num_layers} layers use the attention of "
                "transformers' interface; this architecture is not supported"
            )
        yield from enumerate(self._seen)

    def _attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """`transformers`' attention function: notes what is measured, and attends as usual."""
        T, shared = query.shape[2], query.shape[1] // key.shape[1]
        if sliding_window is not None and sliding_window < T:
            raise RunError(
                f"{self.shape.name}: attends in windows of {sliding_window} tokens; only full attention is supported"
            )
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        # `sampled_logits` divides by sqrt(K); a model may scale otherwise.
        scaled = query.double() * (factor * query.shape[-1] ** 0.5)
        logits = sampled_logits(scaled, key.double(), self._positions_Q)
        sinks = getattr(module, "sinks", None)
        self._seen.append(sampled_attention(logits, value.double(), self._positions_Q, softcap, sinks))
        scores = query @ key.repeat_interleave(shared, dim=1).mT * factor
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        hidden = torch.ones(T, T, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = scores.softmax(dim=-1)
        out = weights.to(value.dtype) @ value.repeat_interleave(shared, dim=1)
        return out.transpose(1, 2).contiguous(), None
