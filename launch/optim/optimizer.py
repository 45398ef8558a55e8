"""The optimizer with its named parameter groups, and the learning rate of each group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from configs.schema import Config
from launch.optim.muon import ADAMW, MUON, Block, MuonWithAdamW, split_into_blocks
from launch.optim.schedule import learning_rate
from model.parameters import ParameterSpec
from model.stability.groups import GroupName, group_names


def optimizer_groups(specs: Mapping[str, ParameterSpec], config: Config) -> dict[GroupName, list[str]]:
    """The parameter names of every group; with Muon the output head is a separate group."""
    return group_names(specs, separate_head=config.optim.name == MUON)


def group_algorithm(group: GroupName, config: Config) -> str:
    """The algorithm that updates a group: `muon` or `adamw`."""
    return MUON if config.optim.name == MUON and group.is_hidden else ADAMW


def build_optimizer(model: nn.Module, specs: Mapping[str, ParameterSpec], config: Config) -> torch.optim.Optimizer:
    """Returns the optimizer with one group per `GroupName`, whose name is under the key `name`.

    `adamw` is torch's fused AdamW. `muon` chooses each group's algorithm by the key `algorithm`.
    """
    parameters = dict(model.named_parameters())
    groups = [
        {
            "name": group.value,
            "params": [parameters[name] for name in names],
            "weight_decay": config.optim.weight_decay if group.is_decayed else 0.0,
            "algorithm": group_algorithm(group, config),
        }
        for group, names in optimizer_groups(specs, config).items()
    ]
    optim = config.optim
    if optim.name == MUON:
        return MuonWithAdamW(
            groups, optim.lr, optim.betas, optim.eps, optim.muon.momentum, optim.muon.newton_schulz_steps
        )
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def muon_blocks(
    specs: Mapping[str, ParameterSpec], shapes: Mapping[str, Sequence[int]], config: Config
) -> dict[str, list[Block]]:
    """The blocks that Muon orthogonalises: whole matrices, or with `per_head` each head of a query/key matrix."""
    blocks = {}
    for group, names in optimizer_groups(specs, config).items():
        if group_algorithm(group, config) == MUON:
            for name in names:
                by_head = config.optim.muon.per_head and specs[name].is_query_key
                num_heads = specs[name].num_heads if by_head else None
                blocks[name] = split_into_blocks(name, shapes[name], num_heads or 1)
    return blocks


def group_learning_rates(step: int, config: Config, groups: Iterable[GroupName]) -> dict[str, float]:
    """The learning rate of every group at optimizer step `step` (0-based).

    With Muon, the groups that AdamW updates follow the same schedule with the peak `optim.muon.adamw_lr`.
    """
    optim, control = config.optim, config.qk_control
    peaks = {MUON: optim.lr, ADAMW: optim.muon.adamw_lr or optim.lr}
    base = {
        algorithm: learning_rate(step, config.train.steps, optim.model_copy(update={"lr": peak}))
        for algorithm, peak in peaks.items()
    }
    return {
        group.value: base[group_algorithm(group, config)]
        * control.chosen.learning_rate_scale(control.alpha, group.is_query_key)
        for group in groups
    }
