"""A model from a checkpoint in one process, without DeepSpeed, whatever the run's ZeRO stage and number of ranks."""

from __future__ import annotations

from pathlib import Path

import torch

from launch.checkpoint_files import CheckpointReader, find_checkpoint, find_faults, parameter_mismatches, read_config
from launch.errors import RunError
from model.gpt import GPT


def load_model(path: Path, device: torch.device, dtype: torch.dtype) -> tuple[GPT, Path]:
    """The model and the checkpoint's folder.

    Args:
        path: one checkpoint, or a run's folder (its newest checkpoint).
        dtype: of the weights; checkpoints hold fp32.

    Raises:
        RunError: there is no checkpoint, it is damaged, or its parameters are not the model's.
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
            raise RunError(f"{checkpoint} does not fit its model: {'; '.join(mismatches)}")
        for name, parameter in parameters.items():
            parameter.copy_(reader.read_parameter(name))
    return model, checkpoint
