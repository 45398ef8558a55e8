"""The DeepSpeed engine of one rank: start, one training step, and validation.

Only this module imports DeepSpeed. A step of ours does not wait for a GPU: what it measures is gathered on the device,
copied to the host in the background, and read one step later. (DeepSpeed's optimizers do wait, for the gradient norm;
and so do QK-Clip, for every layer's bound, the probe batch at its interval, and a judge of the step's figures.)
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import getclosurevars
from typing import Any

import psutil
import torch
from pydantic import ValidationError
from torch import Tensor
from torch import distributed as dist

from configs.errors import ConfigError
from configs.schema import Config
from data.loader import MicroBatch, StepBatch
from launch.attention_control.control import Clipper, QueryKeyControl
from launch.attention_control.head_weights import HeadWeights
from launch.attention_control.monitor import AttentionMonitor, AttentionReport
from launch.attention_control.probe import DriftProbe, Probe
from launch.attention_control.rules import AdaptiveRule, QuackRule, Rule
from launch.distributed.shards import Shard, local_flats, local_shards, publish_masters
from launch.distributed.topology import Topology
from launch.engine.anomalies import Fault
from launch.engine.deepspeed_config import deepspeed_config
from launch.engine.step_report import NUM_FIXED_COLUMNS, PendingReport
from launch.engine.timing import Stopwatch
from launch.errors import RunError
from launch.optim.muon import MuonWithAdamW
from launch.optim.optimizer import build_optimizer, muon_blocks, optimizer_groups
from model.gpt import GPT
from model.initialisation import init_parameter, initialise
from model.parameters import ParameterSpec, collect_specs
from model.stability.clip import attach_logit_maxima
from model.stability.groups import GroupName
from model.stability.layers import collect_layouts

# Told the loss and the gradient norm of a step before it is applied; a fault whose action is "skip" leaves it out.
Judge = Callable[[float, float], Fault | None]


def import_deepspeed(device: torch.device) -> Any:
    """Imports DeepSpeed quietly; its import takes seconds, so it comes late."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # Building this CPU op takes minutes, and a killed build leaves a lock on which every later start hangs.
    __compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextlib.contextmanager
def _engine_errors() -> Iterator[None]:
    """Turns DeepSpeed's complaints about its configuration into ours: the schema generates all but the overrides."""
    try:
        yield
    except ValidationError as error:
        raise ConfigError(
            [
                f"deepspeed.overrides.zero_optimization.{'.'.join(map(str, item['loc']))}: {item['msg']}"
                for item in error.errors()
            ]
        ) from None


def build_model(config: Config, topology: Topology, device: torch.device) -> GPT:
    """The model with its initial weights, which do not depend on the number of ranks or the ZeRO stage. Collective.

    In bf16 from stage 1 on, DeepSpeed makes the fp32 masters from the bf16 weights, so the initial values are rounded.
    At stage 3 the model is never whole in memory: each parameter is drawn, and then split over the ranks.
    """
    activation_checkpointing = config.train.activation_checkpointing
    if config.deepspeed.zero_stage < 3:
        with torch.device("meta"):
            model = GPT(config.model, activation_checkpointing)
        in_bf16 = config.train.precision == "bf16" and config.deepspeed.zero_stage > 0
        model = model.to(torch.bfloat16 if in_bf16 else torch.float32).to_empty(device=device)
        initialise(model, config.run.seed)
        return model
    deepspeed = import_deepspeed(device)
    deepspeed.init_distributed(verbose=False)
    settings = deepspeed_config(config, topology.world_size, accumulation=1, num_parameters=0)
    with _engine_errors(), deepspeed.zero.Init(config_dict_or_path=settings):
        model = GPT(config.model, activation_checkpointing)
    specs = collect_specs(model)
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if topology.is_main:
                init_parameter(name, parameter, specs[name], config.run.seed)
    return model


class Engine:
    """The DeepSpeed engine with our groups, rates and measurements.

    Attributes:
        device: where this rank computes.
        groups: parameter names of every optimizer group.
    """

    def __init__(
        self,
        model: GPT,
        config: Config,
        topology: Topology,
        device: torch.device,
        accumulation: int,
        probe_tokens_BT: Tensor | None = None,
    ) -> None:
        """Args:
        accumulation: micro-batches of a step.
        probe_tokens_BT: what attention is measured on, the same on all ranks; None: nothing is measured.
        """
        self.device = device
        specs = collect_specs(model)
        self.groups = optimizer_groups(specs, config)
        self._config = config
        self._topology = topology
        self._replicated = config.deepspeed.zero_stage == 0
        self._squares: dict[str, Any] = {}
        self._used_rates: dict[str, float] = {}
        self._forward_watch = Stopwatch(device)
        self._judgement: _Judgement | None = None
        deepspeed = import_deepspeed(device)
        deepspeed.init_distributed(verbose=False)
        num_parameters = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
        settings = deepspeed_config(config, topology.world_size, accumulation, num_parameters)
        optimizer = build_optimizer(model, specs, config)
        with _engine_errors(), contextlib.redirect_stdout(io.StringIO()):  # it prints whatever its log level
            self._engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        if config.train.compile:
            self.module.compile_blocks()
        self.base_optimizer: torch.optim.Optimizer = self._engine.basic_optimizer
        if isinstance(self.base_optimizer, MuonWithAdamW):
            blocks = muon_blocks(specs, self.parameter_shapes(), config)
            self.base_optimizer.bind(blocks, self.shards(), local_flats(self._engine))
        probe = None if probe_tokens_BT is None else self._build_probe(probe_tokens_BT)
        self._control = self._build_control(specs, probe)
        self._monitor = None if probe is None else self._build_monitor(probe)
        self.base_optimizer.register_step_pre_hook(self._before_base_step)
        self.base_optimizer.register_step_post_hook(self._after_base_step)

    @property
    def module(self) -> Any:
        """The model that DeepSpeed runs."""
        return self._engine.module

    @property
    def world_size(self) -> int:
        return self._topology.world_size

    @property
    def rank(self) -> int:
        return self._topology.rank

    def close(self) -> None:
        """Lets DeepSpeed forget the model, so that its memory is free when nothing else refers to it."""
        from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
        from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

        self._engine.destroy()
        # At stage 3 both of these keep the model: the module that was run last, and the cache of a method.
        FWD_MODULE_STACK.clear()
        release = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
        getclosurevars(release).nonlocals["func"].cache_clear()

    def shards(self) -> list[Shard]:
        """This rank's pieces of the fp32 master weights."""
        return local_shards(self._engine)

    def policy_state(self) -> dict[str, Any]:
        """What a query/key policy must remember, for a checkpoint; the same on all ranks."""
        return self._control.state() if self._control else {}

    def policy_tensors(self) -> dict[str, Tensor]:
        """Its tensors, likewise."""
        return self._control.tensors() if self._control else {}

    def load_policy(self, state: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Takes the policy's part of a checkpoint."""
        if self._control:
            self._control.load(state, tensors)

    def publish_masters(self) -> None:
        """After the masters were changed from outside: brings the working weights in line. Collective."""
        publish_masters(self._engine)

    def train_step(
        self,
        step: int,
        batch: StepBatch,
        rates: dict[str, float],
        data_seconds: float,
        stop_requested: bool,
        judge: Judge | None = None,
    ) -> PendingReport:
        """Forward and backward passes over the micro-batches, then one optimizer step. Collective.

        The gradient is that of the mean loss over the target tokens of the whole global batch, on any number of
        ranks: each rank scales its sums by ranks / targets, and DeepSpeed averages over the ranks.

        Args:
            step: finished optimizer steps.
            batch: this rank's micro-batches.
            rates: the learning rate of every group.
            data_seconds: how long this rank waited for the batch.
            stop_requested: reported to all ranks.
            judge: may have the step skipped: then neither weights nor the optimizer's state change. The host waits for
                the figures that it is told, and the ranks exchange them once more.

        Raises:
            RunError: the optimizer used another rate than it was given.
        """
        self._set_rates(rates)
        meter = None
        if self._monitor is not None and self._control is not None and self._monitor.is_due(step):
            self._monitor.before_step()
            meter = self._control.measure_step()
        if self._control:
            self._control.prepare(step, rates[GroupName.DECAY.value] / self._config.optim.lr)
        forward_seconds = self._forward_watch.take()
        num_targets = torch.full((), float(batch.num_targets), device=self.device)
        dist.all_reduce(num_targets)
        # Documents of one token have no target, and a batch may hold nothing else.
        scale = self.world_size / num_targets.clamp(min=1)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        z_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        bad_micro_batch = torch.full((), -1.0, dtype=torch.float64, device=self.device)
        for index, micro_batch in enumerate(batch.micro_batches):
            self._forward_watch.start()
            objective, cross_entropy, z_loss = self._forward(micro_batch)
            self._forward_watch.stop()
            loss_sum += cross_entropy
            z_sum += z_loss
            is_first_bad = ~torch.isfinite(cross_entropy) & (bad_micro_batch < 0)
            bad_micro_batch = torch.where(is_first_bad, float(index), bad_micro_batch)
            self._engine.backward(objective * scale, scale_wrt_gas=False)
            if index == len(batch.micro_batches) - 1:
                if self._control:
                    self._control.after_backward()
                if judge is not None:
                    self._judgement = _Judgement(judge, loss_sum / num_targets.clamp(min=1))
            self._engine.step()
        judgement, self._judgement = self._judgement, None
        is_applied = self._engine.was_step_applied() and not (judgement and judgement.is_skipped)
        if is_applied and self._used_rates != rates:
            raise RunError(f"the optimizer used the learning rates {self._used_rates}, but {rates} were set")
        if is_applied and self._control:
            self._control.check_applied()
        host_values = [
            batch.num_targets,
            -1.0,
            is_applied,
            stop_requested,
            forward_seconds,
            data_seconds,
            self._memory_bytes(),
        ]
        attention = None
        if self._monitor is not None and self._control is not None and meter is not None:
            attention = self._monitor.after_step(meter)
            self._control.meter = None
        report = self._gather(loss_sum, z_sum, bad_micro_batch, host_values, attention if is_applied else None)
        report.verdicts = judgement.verdicts if judgement else []
        return report

    def evaluate(self, batches: Iterable[MicroBatch]) -> float:
        """Cross-entropy in nats per target over all ranks' batches; every rank passes equally many. Collective."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        num_targets = 0
        self._engine.eval()
        with torch.no_grad():
            for micro_batch in batches:
                num_targets += int((micro_batch.targets >= 0).sum())
                on_gpu = self.device.type == "cuda"
                _, cross_entropy, _ = self._forward(micro_batch.pin_memory() if on_gpu else micro_batch)
                loss_sum += cross_entropy
        self._engine.train()
        sums = torch.stack([loss_sum, torch.full_like(loss_sum, num_targets)])
        dist.all_reduce(sums)
        total_loss, total_targets = sums.tolist()
        return float(total_loss / max(total_targets, 1))

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> whole shape of every parameter (ZeRO-3 hides it behind an empty tensor)."""
        parameters = self.module.named_parameters()
        return {name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in parameters}

    def _forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        tokens = micro_batch.tokens.to(self.device, non_blocking=True)
        targets = micro_batch.targets.to(self.device, non_blocking=True)
        if self._control and self.module.training:
            self._control.before_micro_batch(targets)
        positions = None
        if micro_batch.positions is not None:
            positions = micro_batch.positions.to(self.device, non_blocking=True)
        objective, cross_entropy, z_loss = self._engine(tokens, targets, self._config.train.z_loss, positions)
        return objective, cross_entropy, z_loss

    def _set_rates(self, rates: dict[str, float]) -> None:
        self._used_rates = {}
        self._squares = {}
        for group in self.base_optimizer.param_groups:
            group["lr"] = rates[group["name"]]

    def _before_base_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Notes the rates that the optimizer is about to use and the squared norms of its gradients.

        DeepSpeed calls the base optimizer once in all, once per group, or once per sub-group, by stage.
        """
        for group in optimizer.param_groups:
            gradients = [flat.grad for flat in group["params"] if flat.grad is not None]
            if gradients:
                square = torch.nn.utils.get_total_norm(gradients).double().square()
                name = group["name"]
                self._squares[name] = self._squares.get(name, 0.0) + square
                self._used_rates[name] = group["lr"]
        if self._judgement is not None and self._judgement.asks_to_skip(self._global_norm):
            for flat in _all_params(optimizer):
                flat.grad = None  # an optimizer passes over what has no gradient
            return
        if self._replicated and self._config.optim.grad_clip > 0:
            # DeepSpeed's own clipping at stage 0 keeps the norm to itself, so it is off there.
            norm = self._global_norm()
            torch.nn.utils.clip_grads_with_norm_(_all_params(optimizer), self._config.optim.grad_clip, norm)
        if self._control:
            self._control.before_base_step(_all_params(optimizer))

    def _after_base_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._control and not (self._judgement is not None and self._judgement.is_skipped):
            self._control.after_base_step(_all_params(optimizer))

    def _global_norm(self) -> Tensor:
        """Gradient norm before clipping, during the optimizer's step."""
        if self._replicated:
            return torch.stack(list(self._squares.values())).sum().sqrt()
        return torch.as_tensor(self._engine.optimizer._global_grad_norm, dtype=torch.float64, device=self.device)

    def _build_control(self, specs: Mapping[str, ParameterSpec], probe: Probe | None) -> QueryKeyControl | None:
        """What `qk_control` asks for beyond the groups' rates; None when there is nothing to do or to measure."""
        settings, model = self._config.qk_control, self._config.model
        is_idle = settings.policy in ("none", "constant") and settings.clip_threshold is None
        if is_idle and probe is None:
            return None
        heads = {name: spec.num_heads for name, spec in specs.items()}
        numel = {name: math.prod(shape) for name, shape in self.parameter_shapes().items()}
        weights = HeadWeights(collect_layouts(self.module, heads, numel), self.shards(), self.device, self._replicated)
        rule: Rule | None = None
        if settings.policy == "quack":
            kv_latent_dim = model.attention.mla.kv_latent_dim
            rule = QuackRule(weights, model.attention.qk_norm, settings.max_ratio, kv_latent_dim)
        elif settings.policy == "adaptive":
            assert probe is not None, "the caller gives the probe batch"
            drift_probe, steps = DriftProbe(probe), self._config.train.steps
            warmup_steps = self._config.optim.warmup_steps
            rule = AdaptiveRule(weights, drift_probe, settings.adaptive, settings.alpha, warmup_steps, steps)
        clipper = None
        if settings.clip_threshold is not None:
            maxima = attach_logit_maxima(self.module, settings.clip_threshold, self.device)
            num_key_heads = model.num_kv_heads if model.attention.kind == "mha" else None
            clipper = Clipper(maxima, settings.clip_threshold, num_key_heads)
        return QueryKeyControl(weights, rule, clipper)

    def _build_probe(self, tokens_BT: Tensor) -> Probe:
        queries = self._config.monitor.probe_queries
        return Probe(self.module, tokens_BT, queries, self.device, self.shards(), self._replicated)

    def _build_monitor(self, probe: Probe) -> AttentionMonitor | None:
        every_steps = self._config.monitor.every_steps
        return None if every_steps is None else AttentionMonitor(probe, every_steps, self._topology.is_main)

    def _gather(
        self,
        loss_sum: Tensor,
        z_sum: Tensor,
        bad_micro_batch: Tensor,
        host_values: list[Any],
        attention: AttentionReport | None,
    ) -> PendingReport:
        names = [group.value for group in self.groups]
        values = [0.0, 0.0, *map(float, host_values), 0.0, *[0.0] * len(names)]
        row = torch.tensor(values, dtype=torch.float64, pin_memory=self.device.type == "cuda")
        assert row.numel() == NUM_FIXED_COLUMNS + len(names)
        row = row.to(self.device, non_blocking=True)
        row[0], row[1], row[NUM_FIXED_COLUMNS - 1] = loss_sum, z_sum, bad_micro_batch
        norm = None if self._replicated else self._engine.get_global_grad_norm()
        if norm is not None:
            row[3] = norm
        for column, name in enumerate(names, start=NUM_FIXED_COLUMNS):
            row[column] = self._squares.get(name, 0.0)
        statistics = self._control.statistics() if self._control else {}
        row = torch.cat([row, *(values.flatten() for values in statistics.values())])
        rows = row.new_empty(self.world_size * row.numel())
        dist.all_gather_into_tensor(rows, row)
        widths = {name: values.numel() for name, values in statistics.items()}
        record = self._control.record() if self._control else {}
        return PendingReport(rows.view(self.world_size, -1), names, widths, record, attention, self._replicated)

    def _memory_bytes(self) -> float:
        if self.device.type == "cuda":
            return float(torch.cuda.max_memory_allocated())
        return float(psutil.Process().memory_info().rss)


class _Judgement:
    """Asks a judge about one step, once, however many calls of the base optimizer the step takes.

    A step that DeepSpeed drops by itself, for its gradients are not finite at ZeRO stage 3 in fp32, is never asked
    about.

    Attributes:
        verdicts: the one answer, once it was asked for.
    """

    def __init__(self, judge: Judge, local_loss: Tensor) -> None:
        """Args:
        local_loss: this rank's part of the loss.
        """
        self._judge = judge
        self._local_loss = local_loss
        self.verdicts: list[Fault | None] = []

    @property
    def is_skipped(self) -> bool:
        """Whether the step was judged, and is to be skipped."""
        return any(fault is not None and fault.action == "skip" for fault in self.verdicts)

    def asks_to_skip(self, norm: Callable[[], Tensor]) -> bool:
        """Whether the step is to be skipped; the same on all ranks. Collective at the first call.

        Args:
            norm: gives the global gradient norm, negative where DeepSpeed has found it to be no number.
        """
        if not self.verdicts:
            norms = norm().to(self._local_loss)
            both = torch.stack([self._local_loss, norms.where(norms >= 0, torch.nan) / dist.get_world_size()])
            dist.all_reduce(both)
            self.verdicts.append(self._judge(*both.tolist()))
        return self.is_skipped


def _all_params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors that the optimizer is about to change in this call."""
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]
