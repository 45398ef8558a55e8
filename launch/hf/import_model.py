"""Creates a checkpoint from a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from configs.errors import ConfigError
from configs.load import to_yaml
from configs.schema import Config, DataConfig, ModelConfig, RunConfig, SourceConfig, TrainConfig, resolve
from data.command_line import Progress
from data.files import write_file
from data.huggingface_tokenizer import HuggingFaceTokenizer
from data.load_tokenizer import load_tokenizer
from data.tokenizer import Tokenizer
from launch.checkpoint.files import (
    CONFIG,
    MANIFEST,
    MASTER,
    STATE,
    TrainingState,
    file_entry,
    rank_file,
    write_state,
)
from launch.checkpoint.safetensors_stream import StreamedTensor, write_safetensors
from launch.cli import new_folder
from launch.errors import RunError
from launch.hf.architecture import Imported, from_hf_config
from launch.hf.gguf_file import GgufFile
from launch.hf.layouts import Rule, Shapes, parameter_shapes, rules
from launch.hf.weights import SafetensorsFolder, Weights, read_json


def import_model(path: Path, out: Path) -> None:
    """Writes the checkpoint `out` at step 0, for `run.init_from` and every command that takes a checkpoint.

    Raises:
        RunError, ConfigError, OSError: `path` cannot be imported (with a line for every setting or tensor), or `out`
            cannot be written. Then `out` does not exist.
    """
    with contextlib.ExitStack() as stack:
        weights, imported, layout, tokenizer, remarks = _open(path, stack)
        table = rules(layout, imported.model, imported.is_rope_interleaved)
        shapes = parameter_shapes(imported.model)
        problems = list(tensor_problems({rule.name: rule.shape(shapes) for rule in table}, weights.shapes))
        problems = _without_tied_head(problems, weights, imported.model)
        if problems:
            raise ConfigError([f"{path}: {problem}" for problem in problems])
        if tokenizer is not None and tokenizer.vocab_size > (imported.model.vocab_size or 0):
            remarks.append(
                f"the tokenizer is omitted: it has {tokenizer.vocab_size} ids, the model {imported.model.vocab_size}"
            )
            tokenizer = None
        folder = stack.enter_context(new_folder(out))
        config = _configuration(path, out, imported)
        _write_checkpoint(folder, config, table, shapes, weights, tokenizer)
    for remark in remarks:
        print(f"note: {remark}", file=sys.stderr)
    num_parameters = sum(math.prod(shape) for shape in shapes.values())
    print(f"{out}: {imported.architecture}, {num_parameters:,} parameters")


def tensor_problems(wanted: Shapes, found: Shapes) -> Iterator[str]:
    """Yields a line for every tensor that is missing, unexpected or of another shape."""
    for name, shape in wanted.items():
        if name not in found:
            yield f"{name}: is missing"
        elif found[name] != shape:
            yield f"{name}: has shape {list(found[name])}, expected {list(shape)}"
    for name in found:
        if name not in wanted:
            yield f"{name}: is not part of this model"


class _Source(NamedTuple):
    """An opened model to import.

    Attributes:
        layout: The layout of the weights, for `launch.hf.layouts.rules`.
        remarks: Notes for the user.
    """

    weights: Weights
    imported: Imported
    layout: str
    tokenizer: Tokenizer | None
    remarks: list[str]


def _open(path: Path, stack: contextlib.ExitStack) -> _Source:
    if path.suffix == ".gguf" and path.is_file():
        file = GgufFile(path)
        imported = from_hf_config(file.config(), str(path))
        content, remark = file.tokenizer_json()
        if content is None:
            return _Source(file, imported, "gguf", None, [remark])
        return _Source(file, imported, "gguf", HuggingFaceTokenizer(path, content), [])
    if not path.is_dir():
        raise RunError(f"{path}: neither a folder nor a .gguf file")
    imported = from_hf_config(read_json(path / "config.json"), str(path / "config.json"))
    folder = SafetensorsFolder(path, stack)
    tokenizers, remarks = [], []
    for name in ("tokenizer.model", "tokenizer.json"):
        if (path / name).is_file():
            try:
                tokenizers.append(load_tokenizer(path / name))
            except ValueError as error:
                remarks.append(str(error))
    # A tokenizer.json may have tokens in addition to those of the SentencePiece model next to it.
    best = max(tokenizers, key=lambda tokenizer: tokenizer.vocab_size, default=None)
    if best is None:
        remarks.append(f"{path} has no readable tokenizer, so the checkpoint has none")
    return _Source(folder, imported, imported.architecture, best, remarks)


def _without_tied_head(problems: list[str], weights: Weights, model: ModelConfig) -> list[str]:
    """Removes the problem of a stored output head if it equals the tied embedding."""
    head = "lm_head.weight"
    if not model.tie_embeddings or head not in weights.shapes or "model.embed_tokens.weight" not in weights.shapes:
        return problems
    problems = [problem for problem in problems if not problem.startswith(f"{head}:")]
    if not torch.equal(weights.read(head), weights.read("model.embed_tokens.weight")):
        problems.append(f"{head}: differs from the embedding, although tie_word_embeddings is true")
    return problems


def _configuration(path: Path, out: Path, imported: Imported) -> Config:
    """A configuration for the checkpoint. Only its model and end-of-document id are meaningful."""
    return resolve(
        Config(
            run=RunConfig(name=out.resolve().name),
            model=imported.model,
            data=DataConfig(
                sources=(SourceConfig(path=f"unknown (imported from {path.name})"),), eod_id=imported.eod_id
            ),
            train=TrainConfig(steps=1, global_batch_tokens=imported.model.max_seq_len),
        )
    )


def _write_checkpoint(
    folder: Path, config: Config, table: Sequence[Rule], shapes: Shapes, weights: Weights, tokenizer: Tokenizer | None
) -> None:
    """Writes the files of a checkpoint, as one rank would before the first step."""
    numel = {name: math.prod(shape) for name, shape in shapes.items()}
    ranges = {name: (0, count) for name, count in numel.items()}
    tensors = [
        StreamedTensor(
            f"{MASTER}/{part.name}",
            (numel[part.name],),
            torch.float32,
            functools.partial(_read, weights, rule, shapes, part.name),
        )
        for rule in table
        for part in rule.parts
    ]
    done_bytes = 0
    with Progress("weights", 4 * sum(numel.values())) as progress:

        def advance(num_bytes: int) -> None:
            nonlocal done_bytes
            done_bytes += num_bytes
            progress.update(done_bytes)

        path = folder / rank_file(0)
        digest = write_safetensors(path, tensors, {"ranges": json.dumps(ranges)}, on_bytes=advance)
    files = {path.name: {"bytes": path.stat().st_size, "xxh3_128": digest}}
    names = [STATE, CONFIG]
    if tokenizer is not None:
        write_file(folder / tokenizer.file_name, tokenizer.content)
        names.append(tokenizer.file_name)
    state = TrainingState(
        step=0,
        consumed_samples=0,
        num_ranks=1,
        zero_stage=0,
        parameters={name: list(shape) for name, shape in shapes.items()},
        groups={},
        optimizer_tensors=[],
        optimizer_scalars={},
        policy_state={},
        data_fingerprints=[],
        tokenizer_sha256=None if tokenizer is None else tokenizer.sha256,
        tokenizer_file=None if tokenizer is None else tokenizer.file_name,
        loss=math.nan,
    )
    write_state(folder, state)
    write_file(folder / CONFIG, to_yaml(config).encode())
    files |= {name: file_entry(folder / name) for name in names}
    write_file(folder / MANIFEST, json.dumps({"files": files}, indent=1).encode())


def _read(weights: Weights, rule: Rule, shapes: Shapes, name: str) -> Iterator[Tensor]:
    """Yields a parameter of the model, extracted from a public tensor, as one chunk.

    Raises:
        RunError: The tensor has NaN or infinite elements.
    """
    tensor = weights.read(rule.name)
    if not tensor.isfinite().all():
        raise RunError(f"{rule.name}: has NaN or infinite elements")
    yield rule.unpack(tensor, shapes)[name]
