"""Sources of attention for `launch.diagnose`: our checkpoints, and decoders of `transformers` without conversion."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from launch.errors import RunError
from model.diagnostics.weights import SampledAttention, sampled_attention
from model.stability.drift import sampled_logits

MAX_REASON = 300  # characters of a message of another library
_UNSUPPORTED = "models are not supported: their attention cannot be replaced through transformers' interface"


@dataclass(frozen=True)
class ModelShape:
    """What an analysis needs to know about a model."""

    name: str
    num_layers: int
    num_heads: int
    max_seq_len: int
    num_parameters: int
    vocab_size: int


class AttentionSource(Protocol):
    """A model whose attention can be captured."""

    shape: ModelShape

    def encode(self, text: str) -> list[int]:
        """Returns token ids, without a start token."""

    def layers(self, tokens_T: Tensor, positions_Q: Tensor) -> Iterator[tuple[int, SampledAttention]]:
        """Yields the attention of each layer for one sequence (B = 1), in fp64."""


def open_source(path: Path, tokenizer: Path | None) -> AttentionSource:
    """Opens a Hugging Face folder if it has a config.json with a model type, else one of our checkpoints.

    Raises:
        RunError: The path is neither, or cannot be read.
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
    """One of our checkpoints."""

    def __init__(self, path: Path, tokenizer: Path | None) -> None:
        """Raises RunError if there is no undamaged checkpoint or no tokenizer."""
        from launch.inference.load_model import load_model, load_tokenizer

        self._model, checkpoint = load_model(path, torch.device("cpu"), torch.float32)
        vocab_size = self._model.embedding.weight.shape[0]
        self._tokenizer = load_tokenizer(checkpoint, tokenizer, vocab_size)
        config = self._model.config
        self.shape = ModelShape(
            str(path),
            config.num_layers,
            config.num_heads,
            config.max_seq_len,
            self._model.num_parameters,
            vocab_size,
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
    """A decoder of `transformers`, without conversion: our attention function receives queries, keys and values."""

    def __init__(self, path: Path, tokenizer: Path | None) -> None:
        """Raises RunError if `transformers` is missing or cannot load the folder."""
        try:
            from transformers import AttentionInterface, AttentionMaskInterface
            from transformers.masking_utils import eager_mask
            from transformers.utils import logging
        except ImportError:
            raise RunError(f"{path} is a Hugging Face folder; reading it needs: pip install transformers") from None
        logging.disable_progress_bar()
        logging.set_verbosity_error()  # problems are reported in one line below
        attention = f"steadyhead_{id(self)}"
        AttentionInterface.register(attention, self._attend)
        # Without a mask function of this name, the attention function would not receive the mask of a layer.
        AttentionMaskInterface.register(attention, eager_mask)
        self._model: Any = _load_decoder(path, attention)
        self._encode = _load_encoder(path, tokenizer)
        config = self._model.config.get_text_config()
        num_layers, num_heads, max_seq_len = (
            getattr(config, name, None)
            for name in ("num_hidden_layers", "num_attention_heads", "max_position_embeddings")
        )
        if num_layers is None or num_heads is None or max_seq_len is None:
            raise RunError(f"{path}: {config.model_type} {_UNSUPPORTED}")
        num_parameters = sum(parameter.numel() for parameter in self._model.parameters())
        vocab_size = self._model.get_input_embeddings().weight.shape[0]
        self.shape = ModelShape(str(path), num_layers, num_heads, max_seq_len, num_parameters, vocab_size)
        self._seen: list[SampledAttention] = []
        self._positions_Q = torch.empty(0)

    def encode(self, text: str) -> list[int]:
        return self._encode(text)

    @torch.no_grad()
    def layers(self, tokens_T: Tensor, positions_Q: Tensor) -> Iterator[tuple[int, SampledAttention]]:
        self._seen, self._positions_Q = [], positions_Q
        self._model(tokens_T[None], use_cache=False)
        if len(self._seen) != self.shape.num_layers:
            raise RunError(
                f"{self.shape.name}: {len(self._seen)} of {self.shape.num_layers} layers call an attention function; "
                f"{self._model.config.model_type} {_UNSUPPORTED}"
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
        """Implements the attention function of `transformers`: records the measurements, and attends as usual."""
        T, shared = query.shape[2], query.shape[1] // key.shape[1]
        if sliding_window is not None and sliding_window < T:
            raise RunError(
                f"{self.shape.name}: attends in windows of {sliding_window} tokens; only full attention is supported; "
                f"choose --lengths up to {sliding_window}"
            )
        hidden = torch.ones(T, T, dtype=torch.bool, device=query.device).triu(1)
        if attention_mask is None or not torch.equal(attention_mask[0, 0, :, :T] != 0, hidden):
            raise RunError(
                f"{self.shape.name}: a layer does not have a plain causal mask (it is bidirectional, or attends in "
                "windows or chunks); only full causal attention is supported"
            )
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        # `sampled_logits` divides by sqrt(K); a model may scale differently.
        scaled = query.double() * (factor * query.shape[-1] ** 0.5)
        logits = sampled_logits(scaled, key.double(), self._positions_Q)
        sinks = getattr(module, "sinks", None)
        self._seen.append(sampled_attention(logits, value.double(), self._positions_Q, softcap, sinks))
        scores = query @ key.repeat_interleave(shared, dim=1).mT * factor
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = scores.softmax(dim=-1)
        out = weights.to(value.dtype) @ value.repeat_interleave(shared, dim=1)
        return out.transpose(1, 2).contiguous(), None


def _load_decoder(path: Path, attention: str) -> Any:
    """Loads the model in fp32, with the attention function of that name. Raises RunError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            attn_implementation=attention,
            dtype=torch.float32,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # they are reported below
            output_loading_info=True,
        )
    except Exception as error:  # each architecture and weight format raises its own types
        if attention in str(error):
            raise RunError(f"{path}: {config.model_type} {_UNSUPPORTED}") from None
        raise RunError(f"{path}: transformers cannot load it: {_one_line(error)}") from None
    for fault, keys in (
        ("no weights", report["missing_keys"]),
        ("weights of the wrong shape", report["mismatched_keys"]),
    ):
        if keys:
            names = sorted(key if isinstance(key, str) else key[0] for key in keys)
            raise RunError(f"{path}: has {fault} for {', '.join(names[:3])} ({len(names)} in total)")
    return model.eval()


def _load_encoder(path: Path, tokenizer: Path | None) -> Callable[[str], list[int]]:
    """Returns the encoder of the given tokenizer, or of the one in the model's folder. Raises RunError."""
    from transformers import AutoTokenizer

    from data.load_tokenizer import load_tokenizer

    if tokenizer is not None:
        return load_tokenizer(tokenizer).encode
    try:
        own: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # each tokenizer class raises its own types
        raise RunError(f"{path}: has no tokenizer; give one with --tokenizer ({_one_line(error)})") from None
    if len(own) <= len(own.all_special_tokens):
        # If the files are missing, `transformers` creates an empty tokenizer of the model's type.
        raise RunError(f"{path}: has no tokenizer; give one with --tokenizer")
    return lambda text: list(own(text, add_special_tokens=False, verbose=False)["input_ids"])


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:MAX_REASON] or type(error).__name__
