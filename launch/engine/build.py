"""Builds the model with its initial weights, at any ZeRO stage."""

from __future__ import annotations

import torch

from configs.schema import Config
from launch.distributed.topology import Topology
from launch.engine.deepspeed_config import deepspeed_config
from launch.engine.deepspeed_internals import configuration_errors, import_deepspeed
from model.gpt import GPT
from model.initialisation import init_parameter, initialise
from model.parameters import collect_specs


def build_model(config: Config, topology: Topology, device: torch.device) -> GPT:
    """Returns the model with its initial weights, the same on any number of ranks and at any ZeRO stage. Collective.

    In bf16 from stage 1 on, DeepSpeed creates the fp32 masters from the bf16 weights, so initial values are rounded. At
    stage 3 the whole model is never in memory: each parameter is initialised and then partitioned.
    """
    if config.deepspeed.zero_stage < 3:
        return _build_whole(config, device)
    return _build_partitioned(config, topology, device)


def _build_whole(config: Config, device: torch.device) -> GPT:
    with torch.device("meta"):
        model = GPT(config.model, config.train.activation_checkpointing)
    in_bf16 = config.train.precision == "bf16" and config.deepspeed.zero_stage > 0
    model = model.to(torch.bfloat16 if in_bf16 else torch.float32).to_empty(device=device)
    initialise(model, config.run.seed)
    return model


def _build_partitioned(config: Config, topology: Topology, device: torch.device) -> GPT:
    deepspeed = import_deepspeed(device)
    deepspeed.init_distributed(verbose=False)
    settings = deepspeed_config(config, topology.world_size, accumulation=1, num_parameters=0)
    with configuration_errors(), deepspeed.zero.Init(config_dict_or_path=settings):
        model = GPT(config.model, config.train.activation_checkpointing)
    specs = collect_specs(model)
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if topology.is_main:
                init_parameter(name, parameter, specs[name], config.run.seed)
    return model
