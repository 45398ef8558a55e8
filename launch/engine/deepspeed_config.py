"""The DeepSpeed configuration: a pure function of the run's configuration and the number of ranks."""

from __future__ import annotations

from typing import Any

from configs.schema import Config
from data.loader import derive_accumulation

MAX_BUCKET_ELEMENTS = 200_000_000


def accumulation_steps(config: Config, world_size: int) -> int:
    """The number of micro-batches that a rank runs in one optimizer step."""
    assert config.data.seq_len is not None
    samples_per_step = config.train.global_batch_tokens // config.data.seq_len
    return derive_accumulation(samples_per_step, config.train.micro_batch_size, world_size)


def deepspeed_config(config: Config, world_size: int, accumulation: int, num_parameters: int) -> dict[str, Any]:
    """Returns the configuration for `deepspeed.initialize`, with `deepspeed.overrides` merged in.

    In bf16, the master weights are fp32, and gradients are accumulated and reduced in fp32. At stage 0 DeepSpeed cannot
    accumulate bf16 gradients in fp32, so the weights stay fp32 and the forward pass runs under bf16 autocast. Nor does
    it report the gradient norm there, so `launch.engine.engine` clips at that stage.

    Args:
        accumulation: The number of micro-batches that a rank runs in one optimizer step.
        num_parameters: An upper bound of the communication buckets, which DeepSpeed allocates in full.
    """
    micro_batch_size = config.train.micro_batch_size
    stage = config.deepspeed.zero_stage
    bucket = min(MAX_BUCKET_ELEMENTS, max(num_parameters, 1024))
    result: dict[str, Any] = {
        "train_batch_size": micro_batch_size * accumulation * world_size,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": config.optim.grad_clip if stage > 0 else 0.0,
        "steps_per_print": 2**62,
        "timers": {"throughput": {"enabled": False}},  # it synchronises with the GPU twice per micro-batch
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "reduce_bucket_size": bucket,
            **({"allgather_bucket_size": bucket} if stage < 3 else {"stage3_prefetch_bucket_size": bucket}),
        },
    }
    if config.train.precision == "bf16":
        if stage == 0:
            result["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
        else:
            # Adds each bf16 gradient to the fp32 sum and frees it as soon as the backward pass has computed it.
            result["bf16"] = {"enabled": True, "immediate_grad_update": True}
            result["data_types"] = {"grad_accum_dtype": "fp32"}
            result["communication_data_type"] = "fp32"
    return merge(result, config.deepspeed.overrides)


def merge(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Returns `base` updated with the leaves of `overrides`, merging mappings recursively."""
    result = dict(base)
    for key, value in overrides.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result
