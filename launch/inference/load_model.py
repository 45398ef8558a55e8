"""Loads a model and its tokenizer from a checkpoint of any ZeRO stage and number of ranks, without DeepSpeed."""

from __future__ import annotations

from pathlib import Path

import torch

from configs.schema import Config
from data.load_tokenizer import load_tokenizer as load_tokenizer_file
from data.tokenizer import Tokenizer
from launch.checkpoint.files import (
    CheckpointReader,
    find_checkpoint,
    find_faults,
    parameter_mismatches,
    read_config,
    read_state,
)
from launch.errors import RunError
from model.gpt import GPT


def load_model(path: Path, device: torch.device, dtype: torch.dtype) -> tuple[GPT, Path]:
    """Returns the model and the checkpoint's folder.

    Args:
        path: A checkpoint, or a run's folder (its newest checkpoint).
        dtype: The type of the loaded weights; checkpoints hold fp32.

    Raises:
        RunError: There is no checkpoint, it is damaged, or its parameters do not match its model.
    """
    checkpoint = find_checkpoint(path)
    faults = find_faults(checkpoint)
    if faults:
        raise RunError("; ".join(faults))
    with device:
        model = GPT(read_config(checkpoint).model).to(dtype).eval()
    parameters = dict(model.named_parameters())
    with CheckpointReader(checkpoint) as reader, torch.no_grad():
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        mismatches = list(parameter_mismatches(reader.state.parameters, shapes))
        if mismatches:
            raise RunError(f"{checkpoint} does not match its model: {'; '.join(mismatches)}")
        for name, parameter in parameters.items():
            parameter.copy_(reader.read_parameter(name))
    return model, checkpoint


def load_tokenizer(checkpoint: Path, chosen: Path | None, vocab_size: int | None) -> Tokenizer:
    """Returns the chosen tokenizer, or else the checkpoint's.

    Args:
        checkpoint: A checkpoint's folder.
        chosen: A tokenizer file.
        vocab_size: The number of rows of the model's embedding.

    Raises:
        RunError: There is neither, or it has ids beyond the vocabulary.
        DataError: The file is not a tokenizer.
    """
    name = read_state(checkpoint).tokenizer_file
    if chosen is None and name is None:
        raise RunError(f"{checkpoint}: has no tokenizer (its data had none); specify one with --tokenizer")
    tokenizer = load_tokenizer_file(chosen or checkpoint / str(name))
    if tokenizer.vocab_size > (vocab_size or 0):
        raise RunError(
            f"{tokenizer.path}: has {tokenizer.vocab_size} ids, more than the model's vocabulary of {vocab_size}"
        )
    return tokenizer


def end_of_document_id(config: Config, tokenizer: Tokenizer | None) -> int | None:
    """The id that ends a document: the training data's if known, else the tokenizer's."""
    if config.data.eod_id is not None:
        return config.data.eod_id
    return None if tokenizer is None else tokenizer.eod_id
