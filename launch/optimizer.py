"""AdamW over named parameter groups, and the learning rate that each group must have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from configs.schema import Config
from launch.schedule import learning_rate
from model.parameters import ParameterSpec
from model.stability.groups import GroupName, group_names, learning_rate_scale


def build_optimizer(model: nn.Module, specs: Mapping[str, ParameterSpec], config: Config) -> torch.optim.Optimizer:
    """torch's fused AdamW with one group per `GroupName`; a group carries its name under the key `name`."""
    parameters = dict(model.named_parameters())
    groups = [
        {
            "name": group.value,
            "params": [parameters[name] for name in names],
            "weight_decay": config.optim.weight_decay if group.is_decayed else 0.0,
        }
        for group, names in group_names(specs).items()
    ]
    optim = config.optim
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def group_rates(step: int, config: Config, groups: Iterable[GroupName]) -> dict[str, float]:
    """The learning rate of every group at optimizer step `step` (0-based)."""
    base = learning_rate(step, config.train.steps, config.optim)
    control = config.qk_control
    return {group.value: base * learning_rate_scale(control.policy, control.alpha, group) for group in groups}
