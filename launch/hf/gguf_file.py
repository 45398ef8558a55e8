"""Llama models in GGUF files (llama.cpp), quantised or not. The `gguf` package reads the format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from launch.errors import RunError
from launch.hf.layouts import Shapes

_CONTROL, _USER_DEFINED = 3, 4
# llama.cpp's names of ways to cut a text before byte-pair encoding, and whether each digit stands alone.
_DIGITS_ALONE = {"smollm": True, "gpt-2": False, "default": False}


class GgufFile:
    """One file.

    Attributes:
        shapes: of every tensor.
    """

    def __init__(self, path: Path) -> None:
        """Raises RunError when the file cannot be read or the `gguf` package is missing."""
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
        """A tensor in fp32, dequantised."""
        tensor = self._tensors[name]
        values = self._dequantize(tensor.data, tensor.tensor_type)
        return torch.from_numpy(np.array(values, dtype=np.float32)).view(self.shapes[name])

    def config(self) -> dict[str, Any]:
        """What the file says of the model, by the keys of a Llama's config.json.

        Raises:
            RunError: it is another architecture, or a size is missing.
        """
        architecture = self._fields.get("general.architecture")
        if architecture != "llama":
            raise RunError(f"{self.path}: general.architecture {architecture!r} is not supported; only 'llama' is")
        if self._get("expert_count", 0):
            raise RunError(f"{self.path}: mixture of experts is not supported")
        dim, num_heads = self._need("embedding_length"), self._need("attention.head_count")
        head_dim = self._get("attention.key_length", dim // num_heads)
        scaling = self._get("rope.scaling.type", "none")
        return {
            "model_type": "llama",
            "vocab_size": self.shapes.get("token_embd.weight", (0,))[0],
            "hidden_size": dim,
            "intermediate_size": self._need("feed_forward_length"),
            "num_hidden_layers": self._need("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._get("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._need("context_length"),
            "rms_norm_eps": self._need("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._get("rope.freq_base", 10000.0),
            "rope_scaling": {"rope_type": "default" if scaling == "none" else scaling},
            "partial_rotary_factor": self._get("rope.dimension_count", head_dim) / head_dim,
            "tie_word_embeddings": "output.weight" not in self.shapes,
            "eos_token_id": self._fields.get("tokenizer.ggml.eos_token_id"),
        }

    def tokenizer_json(self) -> tuple[bytes | None, str]:
        """A tokenizer.json of the file's byte-level tokenizer; or None, and why there is none."""
        kind, cut = self._fields.get("tokenizer.ggml.model"), self._fields.get("tokenizer.ggml.pre", "default")
        if kind != "gpt2" or cut not in _DIGITS_ALONE:
            return None, f"the file's tokenizer ({kind}, {cut}) cannot be converted; bring its tokenizer.json"
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        tokens, kinds = self._fields["tokenizer.ggml.tokens"], self._fields["tokenizer.ggml.token_type"]
        merges = [tuple(merge.split(" ", 1)) for merge in self._fields["tokenizer.ggml.merges"]]
        try:
            fast = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
        except Exception as error:  # the library raises nothing more special
            return None, f"the file's tokenizer cannot be converted: {' '.join(str(error).split())}"
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if _DIGITS_ALONE[cut] else []
        fast.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
        fast.decoder = decoders.ByteLevel()
        named = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
        fast.add_special_tokens([AddedToken(token, normalized=False) for token, kind in named if kind == _CONTROL])
        fast.add_tokens([AddedToken(token, normalized=False) for token, kind in named if kind == _USER_DEFINED])
        return fast.to_str(pretty=True).encode(), ""

    def _get(self, key: str, default: Any) -> Any:
        return self._fields.get(f"llama.{key}", default)

    def _need(self, key: str) -> Any:
        if f"llama.{key}" not in self._fields:
            raise RunError(f"{self.path}: has no llama.{key}")
        return self._fields[f"llama.{key}"]
