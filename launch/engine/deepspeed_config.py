"""The DeepSpeed configuration file: a pure function of our configuration and the number of ranks."""

from __future__ import annotations

from typing import Any

from configs.schema import Config
from data.loader import derive_accumulation

MAX_BUCKET_ELEMENTS = 200_000_000


def accumulation_steps(config: Config, world_size: int) -> int:
    """Micro-batches that a rank runs in one optimizer step."""
    assert config.data.seq_len is not None
    samples_per_step = config.train.global_batch_tokens // config.data.seq_len
    return derive_accumulation(samples_per_step, config.train.micro_batch_size, world_size)


def deepspeed_config(config: Config, world_size: int, accumulation: int, num_parameters: int) -> dict[str, Any]:
    """Everything that `deepspeed.initialize` needs, generated, with `deepspeed.overrides` merged in.

    bf16 keeps fp32 master weights, accumulates gradients in fp32 and reduces them in fp32. Stage 0 cannot accumulate
    bf16 gradients in fp32 in DeepSpeed, so there the weights stay fp32 and the forward pass runs under bf16 autocast;
    and it does not tell the gradient norm there, so our engine clips at that stage.

    Args:
        accumulation: micro-batches a rank runs in one optimizer step.
        num_parameters: bounds the communication buckets, which DeepSpeed allocates in full.
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
        "timers": {"throughput": {"enabled": False}},  # it waits for the whole GPU twice a micro-batch
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
            # Each bf16 gradient is added to the fp32 sum, and freed, as soon as the backward pass has made it.
            result["bf16"] = {"enabled": True, "immediate_grad_update": True}
            result["data_types"] = {"grad_accum_dtype": "fp32"}
            result["communication_data_type"] = "fp32"
    return merge(result, config.deepspeed.overrides)


def merge(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`base` with the leaves of `overrides` put in or replaced, mappings merged recursively."""
    result = dict(base)
    for key, value in overrides.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result
