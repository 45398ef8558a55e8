"""Reads Llama models in GGUF files (llama.cpp), quantised or not, by the `gguf` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.errors import ConfigError
from launch.errors import RunError
from launch.hf.layouts import Shapes

_PREFIX = "llama."
_CONTROL, _USER_DEFINED = 3, 4
# llama.cpp's names of pre-tokenizers, and whether each splits numbers into digits.
_DIGITS_ALONE = {"smollm": True, "gpt-2": False}
# Keys `llama.…` that are read here, or that do not affect what a dense model computes.
_KNOWN_KEYS = (
    *("embedding_length", "feed_forward_length", "block_count", "context_length", "expert_count", "vocab_size"),
    *("rope.freq_base", "rope.dimension_count", "rope.scaling.type", "expert_used_count", "tensor_data_layout"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    "attention.layer_norm_rms_epsilon",
)


class GgufFile:
    """A GGUF file.

    Attributes:
        shapes: The shape of every tensor.
    """

    def __init__(self, path: Path) -> None:
        """Raises RunError if the file cannot be read or the `gguf` package is missing."""
        try:
            import gguf
        except ImportError:
            raise RunError(f"{path}: reading GGUF needs the gguf package (pip install gguf)") from None
        try:
            reader = gguf.GGUFReader(str(path))
            self._fields = {name: field.contents() for name, field in reader.fields.items()}
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise RunError(f"{path}: is not a readable GGUF file: {' '.join(str(error).split())}") from None
        self.path = path
        self._dequantize = gguf.dequantize
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.shapes: Shapes = {
            name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> Tensor:
        """Reads a tensor as fp32, dequantised if necessary. Raises RunError if that is not possible."""
        tensor = self._tensors[name]
        try:
            values = self._dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise RunError(f"{self.path}: {name} of type {tensor.tensor_type.name} cannot be read: {error}") from None
        return torch.from_numpy(np.array(values, dtype=np.float32)).view(self.shapes[name])

    def config(self) -> dict[str, Any]:
        """The file's model as the content of a Llama's config.json.

        Raises:
            RunError: It has another architecture, or a size is missing or not a number.
            ConfigError: With a line for every unknown setting.
        """
        architecture = self._fields.get("general.architecture")
        if architecture != "llama":
            raise RunError(f"{self.path}: general.architecture {architecture!r} is not supported; only 'llama' is")
        if self._number("expert_count", 0):
            raise RunError(f"{self.path}: mixture of experts is not supported")
        unknown = [
            name for name in self._fields if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in _KNOWN_KEYS
        ]
        if unknown:
            raise ConfigError(
                [f"{self.path}: {name} is unknown and might change what the model computes" for name in unknown]
            )
        dim, num_heads = self._number("embedding_length"), self._number("attention.head_count")
        head_dim = self._number("attention.key_length", dim // max(1, num_heads))
        scaling = self._fields.get(f"{_PREFIX}rope.scaling.type", "none")
        return {
            "model_type": "llama",
            "vocab_size": self.shapes.get("token_embd.weight", (0,))[0],
            "hidden_size": dim,
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._number("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._number("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._number("rope.freq_base", 10000.0),
            "rope_scaling": {"rope_type": "default" if scaling == "none" else scaling},
            "partial_rotary_factor": self._number("rope.dimension_count", head_dim) / max(1, head_dim),
            "tie_word_embeddings": "output.weight" not in self.shapes,
            "eos_token_id": self._fields.get("tokenizer.ggml.eos_token_id"),
        }

    def tokenizer_json(self) -> tuple[bytes | None, str]:
        """Converts the file's byte-level tokenizer to a tokenizer.json; or returns None and the reason."""
        kind, cut = self._fields.get("tokenizer.ggml.model"), self._fields.get("tokenizer.ggml.pre", "default")
        if kind != "gpt2" or cut not in _DIGITS_ALONE:
            reason = f"the file's tokenizer ({kind}, {cut}) cannot be converted"
            return None, f"{reason}; pass its tokenizer.json to later commands with --tokenizer"
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        try:
            tokens, kinds = self._fields["tokenizer.ggml.tokens"], self._fields["tokenizer.ggml.token_type"]
            merges = [tuple(merge.split(" ", 1)) for merge in self._fields["tokenizer.ggml.merges"]]
            named = [
                (token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)
            ]
            fast = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
        except Exception as error:  # the library raises no specific exception
            return None, f"the file's tokenizer cannot be converted: {' '.join(str(error).split())}"
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if _DIGITS_ALONE[cut] else []
        fast.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
        fast.decoder = decoders.ByteLevel()
        fast.add_special_tokens([AddedToken(token, normalized=False) for token, kind in named if kind == _CONTROL])
        fast.add_tokens([AddedToken(token, normalized=False) for token, kind in named if kind == _USER_DEFINED])
        return fast.to_str(pretty=True).encode(), ""

    def _number(self, key: str, default: float | None = None) -> Any:
        """Reads a setting. Raises RunError if it is not a number, or is missing and has no default."""
        value = self._fields.get(_PREFIX + key, default)
        if value is None:
            raise RunError(f"{self.path}: has no {_PREFIX}{key}")
        if not isinstance(value, int | float):
            raise RunError(f"{self.path}: {_PREFIX}{key} is {value!r}; expected a number")
        return value
