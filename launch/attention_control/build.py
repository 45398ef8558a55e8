"""Builds query/key control, the probe and the attention monitor from a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from configs.policies import ADAPTIVE, QUACK, QkPolicy
from configs.schema import Config
from launch.attention_control.control import Clipper, QueryKeyControl
from launch.attention_control.head_weights import HeadWeights
from launch.attention_control.monitor import AttentionMonitor
from launch.attention_control.probe import DriftProbe, Probe
from launch.attention_control.rules import AdaptiveRule, QuackRule, Rule
from launch.distributed.shards import Shard
from model.gpt import GPT
from model.parameters import ParameterSpec
from model.stability.clip import attach_logit_maxima
from model.stability.layers import collect_layouts


def build_control(
    config: Config,
    model: nn.Module,
    specs: Mapping[str, ParameterSpec],
    shapes: Mapping[str, tuple[int, ...]],
    shards: Sequence[Shard],
    device: torch.device,
    probe: Probe | None,
) -> QueryKeyControl | None:
    """Builds the part of `qk_control` beyond the groups' learning rates; None if nothing is controlled or measured.

    Args:
        model: The model that runs; QK-Clip attaches its measurement to the layers.
        specs: The specification of every parameter.
        shapes: The full shape of every parameter.
        shards: This rank's shards of the masters.
        probe: The probe batch, which `adaptive` requires.
    """
    settings = config.qk_control
    if not settings.chosen.scales_steps and settings.clip_threshold is None and probe is None:
        return None
    heads = {name: spec.num_heads for name, spec in specs.items()}
    numel = {name: math.prod(shape) for name, shape in shapes.items()}
    is_replicated = config.deepspeed.zero_stage == 0
    weights = HeadWeights(collect_layouts(model, heads, numel), shards, device, is_replicated)
    build_rule = _RULES.get(settings.chosen)
    rule = None if build_rule is None else build_rule(config, weights, probe)
    return QueryKeyControl(weights, rule, _build_clipper(config, model, device))


def build_probe(config: Config, model: GPT, tokens_BT: Tensor, shards: Sequence[Shard], device: torch.device) -> Probe:
    """Builds the probe of a run, which samples `monitor.probe_queries` query positions."""
    is_replicated = config.deepspeed.zero_stage == 0
    return Probe(model, tokens_BT, config.monitor.probe_queries, device, shards, is_replicated)


def build_monitor(config: Config, probe: Probe | None, records: bool) -> AttentionMonitor | None:
    """Builds the attention monitor; None if monitoring is off.

    Args:
        records: Whether this rank records the measurements.
    """
    every_steps = config.monitor.every_steps
    return None if every_steps is None or probe is None else AttentionMonitor(probe, every_steps, records)


def _build_quack(config: Config, weights: HeadWeights, probe: Probe | None) -> Rule:
    model = config.model
    kv_latent_dim = model.attention.mla.kv_latent_dim
    return QuackRule(weights, model.attention.qk_norm, config.qk_control.max_ratio, kv_latent_dim)


def _build_adaptive(config: Config, weights: HeadWeights, probe: Probe | None) -> Rule:
    assert probe is not None, "adaptive requires a probe batch"
    settings = config.qk_control
    warmup_steps, last_step = config.optim.warmup_steps, config.train.steps
    return AdaptiveRule(weights, DriftProbe(probe), settings.adaptive, settings.alpha, warmup_steps, last_step)


# The rules of the policies that scale steps.
_RULES: dict[QkPolicy, Callable[[Config, HeadWeights, Probe | None], Rule]] = {
    QUACK: _build_quack,
    ADAPTIVE: _build_adaptive,
}


def _build_clipper(config: Config, model: nn.Module, device: torch.device) -> Clipper | None:
    threshold = config.qk_control.clip_threshold
    if threshold is None:
        return None
    maxima = attach_logit_maxima(model, threshold, device)
    num_key_heads = config.model.num_kv_heads if config.model.attention.kind == "mha" else None
    return Clipper(maxima, threshold, num_key_heads)
