"""Every use of DeepSpeed beyond its documented interface. No other module imports DeepSpeed or reads its internals.

Written for DeepSpeed 0.19.8. With another version, a run logs a warning at its start; if the engine lacks an attribute
that is used here, it fails and names what is missing.
After an upgrade, tests/launch/engine/test_deepspeed_internals.py checks every ZeRO stage and precision.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from inspect import getclosurevars
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from configs.errors import ConfigError
from launch.distributed.shards import Shard
from launch.errors import RunError

WRITTEN_FOR = "0.19.8"

log = logging.getLogger(__name__)

_ENGINE = ("basic_optimizer", "backward", "step", "was_step_applied", "get_global_grad_norm", "destroy")
_STAGES_1_AND_2 = ("update_lp_params",)  # and _global_grad_norm, which BF16_Optimizer sets in its first step
_STAGE_3 = (
    "_global_grad_norm",
    "grad_position",
    "get_param_id",
    "fp32_partitioned_groups_flat",
    "persistent_parameters",
    "_partition_all_parameters",
    "_reassign_or_swap_out_partitioned_parameters",
)
_PARAMETERS_AT_STAGE_3 = ("ds_id", "ds_numel", "ds_shape", "partition_numel")


def import_deepspeed(device: torch.device) -> Any:
    """Imports DeepSpeed with its log output off. It is imported late because that takes seconds."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # Building this CPU op takes minutes, and a killed build leaves a lock on which every later start hangs.
    __compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextlib.contextmanager
def configuration_errors() -> Iterator[None]:
    """Converts DeepSpeed's configuration errors to ConfigErrors that name the user's key.

    Everything except `deepspeed.overrides` is generated, so an error can only come from there.
    """
    try:
        yield
    except ValidationError as error:
        raise ConfigError(
            [
                f"deepspeed.overrides.zero_optimization.{'.'.join(map(str, item['loc']))}: {item['msg']}"
                for item in error.errors()
            ]
        ) from None


def check_internals(engine: Any) -> None:
    """Checks that a new engine has every attribute that this module uses.

    Raises:
        RunError: An attribute is missing; the message names it and the installed version.
    """
    import deepspeed

    missing = list(_missing_internals(engine))
    if missing:
        raise RunError(
            f"DeepSpeed {deepspeed.__version__} lacks {', '.join(missing)}; launch/engine/deepspeed_internals.py was "
            f"written for {WRITTEN_FOR}: install that version (bash launch/setup.sh)"
        )
    if deepspeed.__version__ != WRITTEN_FOR:
        log.warning("DeepSpeed %s is installed; Steadyhead is tested with %s", deepspeed.__version__, WRITTEN_FOR)


def _missing_internals(engine: Any) -> Iterator[str]:
    yield from _missing_attributes("engine", engine, _ENGINE)
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return
    optimizer = engine.optimizer
    name = type(optimizer).__name__
    yield from _missing_attributes(name, optimizer, _STAGE_3 if stage == 3 else _STAGES_1_AND_2)
    parameters = list(engine.module.parameters())
    if stage == 3:
        yield from _missing_attributes("a parameter", parameters[0], _PARAMETERS_AT_STAGE_3)
        if _released_parameters_cache() is None:
            yield "the cache of PartitionedParameterCoordinator.__params_to_release"
        return
    if not any(hasattr(optimizer, flats) for flats in _FLATS):
        yield f"{name}.{' or .'.join(_FLATS)}"
    mappings = [parameter._hp_mapping for parameter in parameters if getattr(parameter, "_hp_mapping", None)]
    if not all(hasattr(parameter, "_hp_mapping") for parameter in parameters):
        yield "_hp_mapping of a parameter"
    for mapping in mappings[:1]:
        yield from _missing_attributes(
            "_hp_mapping", mapping, ("lp_fragment_address", "hp_fragment_address", "param_group_index")
        )


def _missing_attributes(owner: str, value: Any, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        if not hasattr(value, name):
            yield f"{owner}.{name}"


def local_shards(engine: Any) -> list[Shard]:
    """Returns this rank's shards of all trained parameters, in the model's order.

    Parameters without a local shard are left out.

    Args:
        engine: A DeepSpeed engine at ZeRO stage 0 (fp32 weights), 1, 2 or 3, without offload.
    """
    return [shard for name, parameter in engine.module.named_parameters() for shard in _shards(engine, name, parameter)]


def _shards(engine: Any, name: str, parameter: Any) -> Iterator[Shard]:
    if hasattr(parameter, "ds_id"):
        optimizer = engine.optimizer
        group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = torch.distributed.get_rank() * parameter.partition_numel()
        stop = min(start + parameter.partition_numel(), parameter.ds_numel)
        if start < stop:
            flat = optimizer.fp32_partitioned_groups_flat[group]
            yield Shard(name, tuple(parameter.ds_shape), start, stop, flat, offset, False)
    elif hasattr(parameter, "_hp_mapping"):
        mapping = parameter._hp_mapping
        if mapping is not None:
            address = mapping.lp_fragment_address
            yield Shard(
                name,
                tuple(parameter.shape),
                address.start,
                address.start + address.numel,
                _flat_partitions(engine.optimizer)[mapping.param_group_index],
                mapping.hp_fragment_address.start,
                False,
            )
    else:
        yield Shard(name, tuple(parameter.shape), 0, parameter.numel(), parameter, 0, True)


def local_flats(engine: Any) -> list[Tensor]:
    """The tensors that the base optimizer updates on this rank, in the same order on all ranks."""
    if engine.zero_optimization_stage() == 0:
        return list(engine.module.parameters())
    if hasattr(engine.optimizer, "fp32_partitioned_groups_flat"):
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    return _flat_partitions(engine.optimizer)


_FLATS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition")  # the second is BF16_Optimizer's


def _flat_partitions(zero_optimizer: Any) -> list[Tensor]:
    """This rank's flat fp32 partition of every parameter group (stages 1 and 2)."""
    return list(next(getattr(zero_optimizer, name) for name in _FLATS if hasattr(zero_optimizer, name)))


def sync_model_weights(engine: Any) -> None:
    """Copies the fp32 masters to the model's weights, on all ranks. Collective."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()


def norm_during_step(engine: Any) -> Any:
    """The global gradient norm before clipping, while the ZeRO optimizer's step runs (stages 1 to 3)."""
    return engine.optimizer._global_grad_norm


def whole_numel(parameter: nn.Parameter) -> int:
    """The number of elements of a whole parameter, which ZeRO stage 3 replaces by an empty tensor."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of a whole parameter, at any ZeRO stage."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def destroy(engine: Any) -> None:
    """Destroys the engine and all of DeepSpeed's references to the model, so that its memory can be freed."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    engine.destroy()
    # At stage 3, two references to the model remain: the module that ran last, and a cached method's arguments.
    FWD_MODULE_STACK.clear()
    cache = _released_parameters_cache()
    if cache is not None:
        cache.cache_clear()


def _released_parameters_cache() -> Any:
    """The `functools.lru_cache` around a private method; None if it is not there."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    method = getattr(PartitionedParameterCoordinator, "_PartitionedParameterCoordinator__params_to_release", None)
    cached = None if method is None else getclosurevars(method).nonlocals.get("func")
    return cached if hasattr(cached, "cache_clear") else None
