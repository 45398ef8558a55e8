"""Explains errors that end a run in messages that a user can act on."""

from __future__ import annotations

import torch

from launch.distributed.collective import is_lost_contact
from launch.errors import RunError


def explain(error: Exception) -> Exception:
    """Returns the error itself, or a RunError in its place if GPU memory ran out or another rank was lost."""
    if isinstance(error, torch.OutOfMemoryError):
        advice = "lower train.micro_batch_size, or set train.activation_checkpointing or a higher deepspeed.zero_stage"
        return RunError(f"out of GPU memory; {advice} ({str(error).splitlines()[0]})")
    if isinstance(error, RuntimeError) and not isinstance(error, RunError) and is_lost_contact(error):
        return RunError(f"lost contact with another rank, whose message says why ({str(error).splitlines()[0]})")
    return error
