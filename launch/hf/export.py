"""Exports a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import functools
import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from data.command_line import Progress
from data.load_tokenizer import load_tokenizer
from data.tokenizer import Tokenizer
from launch.checkpoint.safetensors_stream import StreamedTensor, write_safetensors
from launch.cli import new_folder
from launch.hf import DTYPES
from launch.hf.architecture import OWN, choose_architecture, to_hf_config
from launch.hf.layouts import rules
from launch.hf.masters import Masters
from launch.hf.model_card import write_model_card
from launch.hf.tokenizer import export_tokenizer
from launch.inference.load_model import end_of_document_id

_ELEMENT_BYTES = {"bf16": 2, "fp32": 4}
# With more ids without a token, generation_config.json does not list them, to stay short.
_MAX_SUPPRESSED = 1024
_INDENT = 2


def export(checkpoint: Path, out: Path, dtype: str = "bf16", max_shard_bytes: int = 5 * 10**9) -> None:
    """Writes the folder `out` from a checkpoint of any ZeRO stage and number of ranks.

    It needs no GPU, and holds at most a few tensors of one layer in memory at a time.

    Args:
        checkpoint: A checkpoint, or a run's folder (its newest checkpoint).
        dtype: `bf16` or `fp32`.
        max_shard_bytes: The largest size of a weight file; a larger tensor gets a file of its own.

    Raises:
        RunError, ConfigError, OSError: The checkpoint cannot be read, or `out` cannot be written. Then `out` does not
            exist.
    """
    with new_folder(out) as folder, Masters(checkpoint) as masters:
        model = masters.config.model
        tokenizer = _find_tokenizer(masters)
        eod_id = end_of_document_id(masters.config, tokenizer)
        _write_weights(folder, masters, dtype, max_shard_bytes)
        _write_json(folder / "config.json", to_hf_config(model, DTYPES[dtype], eod_id))
        vocab_size = None if tokenizer is None else tokenizer.vocab_size
        assert model.vocab_size is not None
        _write_json(folder / "generation_config.json", generation_config(eod_id, vocab_size, model.vocab_size))
        if choose_architecture(model) == OWN:
            shutil.copyfile(Path(__file__).parent / "modeling_steadyhead.py", folder / "modeling_steadyhead.py")
        remarks = _write_tokenizer(folder, masters, tokenizer, eod_id)
        write_model_card(folder, masters.checkpoint, masters.config, masters.state, masters.shapes, dtype, remarks)
    for remark in remarks:
        print(f"note: {remark}", file=sys.stderr)
    print(f"{out}: {choose_architecture(model)}, {dtype}")


def plan_shards(sizes: Sequence[int], max_bytes: int) -> list[list[int]]:
    """Returns the indices of each file's tensors: consecutive ones, as many as fit but at least one."""
    shards: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if not shards or size > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(index)
        room -= size
    return shards


def generation_config(eod_id: int | None, num_token_ids: int | None, vocab_size: int) -> dict[str, Any]:
    """The content of generation_config.json: greedy decoding, without the embedding rows that have no token."""
    config: dict[str, Any] = {"do_sample": False}
    if eod_id is not None:
        config |= {"bos_token_id": eod_id, "eos_token_id": eod_id, "pad_token_id": eod_id}
    if num_token_ids is not None and 0 < vocab_size - num_token_ids <= _MAX_SUPPRESSED:
        config["suppress_tokens"] = list(range(num_token_ids, vocab_size))
    return config


def _write_weights(folder: Path, masters: Masters, dtype: str, max_shard_bytes: int) -> None:
    """Writes the weight files and their index."""
    table = rules(choose_architecture(masters.config.model), masters.config.model)
    sizes = [_ELEMENT_BYTES[dtype] * math.prod(rule.shape(masters.shapes)) for rule in table]
    shards = [[table[index] for index in shard] for shard in plan_shards(sizes, max_shard_bytes)]
    file_by_tensor = {}
    done_bytes = 0
    with Progress("weights", sum(sizes)) as progress:

        def advance(num_bytes: int) -> None:
            nonlocal done_bytes
            done_bytes += num_bytes
            progress.update(done_bytes)

        for number, shard in enumerate(shards, start=1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            file_by_tensor.update({rule.name: name for rule in shard})
            tensors = [
                StreamedTensor(
                    rule.name,
                    rule.shape(masters.shapes),
                    getattr(torch, DTYPES[dtype]),
                    functools.partial(masters.read, rule),
                )
                for rule in shard
            ]
            write_safetensors(folder / name, tensors, {"format": "pt"}, advance)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": file_by_tensor}
    _write_json(folder / "model.safetensors.index.json", index)


def _find_tokenizer(masters: Masters) -> Tokenizer | None:
    name = masters.state.tokenizer_file
    return None if name is None else load_tokenizer(masters.checkpoint / name)


def _write_tokenizer(folder: Path, masters: Masters, tokenizer: Tokenizer | None, eod_id: int | None) -> list[str]:
    """Writes the tokenizer's files. Returns remarks for the user."""
    if tokenizer is None:
        return ["the checkpoint has no tokenizer (its data had none), so the folder has none either"]
    exported = export_tokenizer(tokenizer, eod_id, masters.config.model.max_seq_len)
    for name, content in exported.files.items():
        (folder / name).write_bytes(content)
    return exported.remarks


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=_INDENT, ensure_ascii=False) + "\n", encoding="utf-8")
