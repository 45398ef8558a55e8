"""The DeepSpeed engine of one rank: one training step, and validation.

A step of ours does not wait for a GPU: what it measures is gathered on the device, copied to the host in the
background, and read one step later. (DeepSpeed's optimizers do wait, for the gradient norm; and so do QK-Clip, for
every layer's bound, the probe batch at its interval, and a check for anomalies before the step is applied.)
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Mapping
from typing import Any

import psutil
import torch
from torch import Tensor
from torch import distributed as dist

from configs.schema import Config
from data.loader import MicroBatch, StepBatch
from launch.attention_control.build import build_control, build_monitor, build_probe
from launch.attention_control.monitor import AttentionReport
from launch.distributed.shards import Shard
from launch.distributed.topology import Topology
from launch.engine import deepspeed_internals
from launch.engine.anomalies import AnomalyCheck, StepCheck
from launch.engine.deepspeed_config import deepspeed_config
from launch.engine.deepspeed_internals import import_deepspeed
from launch.engine.step_report import PendingReport, StepValues, gather_report
from launch.engine.timing import Stopwatch
from launch.errors import RunError
from launch.optim.muon import MuonWithAdamW
from launch.optim.optimizer import build_optimizer, muon_blocks, optimizer_groups
from model.gpt import GPT
from model.parameters import collect_specs
from model.stability.groups import GroupName


class Engine:
    """The DeepSpeed engine with our parameter groups, learning rates and measurements.

    Attributes:
        device: Where this rank computes.
        groups: Parameter names of every optimizer group.
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
        accumulation: Micro-batches of a step.
        probe_tokens_BT: What attention is measured on, the same on all ranks; None: nothing is measured.
        """
        self.device = device
        specs = collect_specs(model)
        self.groups = optimizer_groups(specs, config)
        self._config = config
        self._topology = topology
        self._is_replicated = config.deepspeed.zero_stage == 0
        self._squared_norms: dict[str, Tensor] = {}
        self._used_rates: dict[str, float] = {}
        self._forward_watch = Stopwatch(device)
        self._check: StepCheck | None = None
        self._engine = self._start_deepspeed(model, accumulation)
        if config.train.compile:
            self.module.compile_blocks()
        self.base_optimizer: torch.optim.Optimizer = self._engine.basic_optimizer
        if isinstance(self.base_optimizer, MuonWithAdamW):
            blocks = muon_blocks(specs, self.parameter_shapes(), config)
            self.base_optimizer.bind(blocks, self.shards(), deepspeed_internals.local_flats(self._engine))
        probe = None
        if probe_tokens_BT is not None:
            probe = build_probe(config, self.module, probe_tokens_BT, self.shards(), device)
        self._monitor = build_monitor(config, probe, topology.is_main)
        self._control = build_control(config, self.module, specs, self.parameter_shapes(), self.shards(), device, probe)
        self.base_optimizer.register_step_pre_hook(self._before_base_step)
        self.base_optimizer.register_step_post_hook(self._after_base_step)

    def _start_deepspeed(self, model: GPT, accumulation: int) -> Any:
        deepspeed = import_deepspeed(self.device)
        deepspeed.init_distributed(verbose=False)
        num_parameters = sum(map(deepspeed_internals.whole_numel, model.parameters()))
        settings = deepspeed_config(self._config, self._topology.world_size, accumulation, num_parameters)
        optimizer = build_optimizer(model, collect_specs(model), self._config)
        with deepspeed_internals.configuration_errors(), contextlib.redirect_stdout(io.StringIO()):
            # It prints to stdout whatever its log level.
            engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        deepspeed_internals.check_internals(engine)
        return engine

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
        """Makes DeepSpeed drop the model, so that its memory is free when nothing else refers to it."""
        deepspeed_internals.destroy(self._engine)

    def shards(self) -> list[Shard]:
        """This rank's shards of the fp32 master weights."""
        return deepspeed_internals.local_shards(self._engine)

    def policy_state(self) -> dict[str, Any]:
        """What a query/key policy must remember, for a checkpoint; the same on all ranks."""
        return self._control.state() if self._control else {}

    def policy_tensors(self) -> dict[str, Tensor]:
        """The policy's tensors for a checkpoint, likewise."""
        return self._control.tensors() if self._control else {}

    def load_policy(self, state: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Takes the policy's part of a checkpoint."""
        if self._control:
            self._control.load(state, tensors)

    def publish_masters(self) -> None:
        """Brings the working weights in line after the masters were changed from outside. Collective."""
        deepspeed_internals.publish_masters(self._engine)

    def train_step(
        self,
        step: int,
        batch: StepBatch,
        rates: dict[str, float],
        data_seconds: float,
        stop_requested: bool,
        anomaly_check: AnomalyCheck | None = None,
    ) -> PendingReport:
        """Forward and backward passes over the micro-batches, then one optimizer step. Collective.

        The gradient is that of the mean loss over the target tokens of the whole global batch, on any number of
        ranks: each rank scales its sums by ranks / targets, and DeepSpeed averages over the ranks.

        Args:
            step: Finished optimizer steps.
            batch: This rank's micro-batches.
            rates: The learning rate of every group.
            data_seconds: How long this rank waited for the batch.
            stop_requested: Reported to all ranks.
            anomaly_check: May have the step skipped: then neither weights nor the optimizer's state change. The host
                waits for the values that it checks, and the ranks exchange them once more.

        Raises:
            RunError: The optimizer used another learning rate than it was given.
        """
        self._prepare_step(step, rates)
        forward_seconds = self._forward_watch.take()
        totals = _BatchTotals(batch.num_targets, self.world_size, self.device)
        for index, micro_batch in enumerate(batch.micro_batches):
            self._forward_watch.start()
            objective, cross_entropy, z_loss = self._forward(micro_batch)
            self._forward_watch.stop()
            totals.add(index, cross_entropy, z_loss)
            self._engine.backward(objective * totals.scale, scale_wrt_gas=False)
            if index == len(batch.micro_batches) - 1:
                self._after_last_backward(totals.local_loss(), anomaly_check)
            self._engine.step()
        check, self._check = self._check, None
        is_applied = self._engine.was_step_applied() and not (check and check.skips_step)
        if is_applied:
            self._verify_step(rates)
        attention = self._measure_attention()
        values = StepValues(
            host={
                "num_targets": batch.num_targets,
                "is_applied": is_applied,
                "stop_requested": stop_requested,
                "forward_seconds": forward_seconds,
                "data_seconds": data_seconds,
                "memory_bytes": self._memory_bytes(),
            },
            device={**totals.columns(), **self._reported_norm()},
            squared_norms={group.value: self._squared_norms.get(group.value, 0.0) for group in self.groups},
            statistics=self._control.statistics() if self._control else {},
            qk_record=self._control.record() if self._control else {},
            attention=attention if is_applied else None,
            was_checked=check is not None and check.was_made,
            anomaly=check.anomaly if check is not None else None,
        )
        return gather_report(values, self.device, self._is_replicated)

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
        """Name -> whole shape of every parameter."""
        return {name: deepspeed_internals.whole_shape(tensor) for name, tensor in self.module.named_parameters()}

    def _prepare_step(self, step: int, rates: dict[str, float]) -> None:
        """Sets the learning rates, and has attention measured before the step where that is due. Collective."""
        self._used_rates, self._squared_norms = {}, {}
        for group in self.base_optimizer.param_groups:
            group["lr"] = rates[group["name"]]
        if self._control is None:
            return
        if self._monitor is not None and self._monitor.is_due(step):
            self._monitor.before_step()
            self._control.measure_step()
        self._control.prepare(step, rates[GroupName.DECAY.value] / self._config.optim.lr)

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

    def _after_last_backward(self, local_loss: Tensor, anomaly_check: AnomalyCheck | None) -> None:
        if self._control:
            self._control.after_backward()
        if anomaly_check is not None:
            self._check = StepCheck(anomaly_check, local_loss)

    def _measure_attention(self) -> AttentionReport | None:
        """The measurement around the step, where one is due, on the ranks that keep it. Collective."""
        meter = self._control.take_meter() if self._control else None
        return None if meter is None or self._monitor is None else self._monitor.after_step(meter)

    def _verify_step(self, rates: dict[str, float]) -> None:
        if self._used_rates != rates:
            raise RunError(f"the optimizer used the learning rates {self._used_rates}, but {rates} were set")
        if self._control:
            self._control.check_applied()

    def _before_base_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Records the learning rates that the optimizer is about to use and the squared norms of its gradients.

        DeepSpeed calls the base optimizer once in all, once per group, or once per sub-group, by stage.
        """
        for group in optimizer.param_groups:
            gradients = [flat.grad for flat in group["params"] if flat.grad is not None]
            if gradients:
                square = torch.nn.utils.get_total_norm(gradients).double().square()
                name = group["name"]
                self._squared_norms[name] = self._squared_norms.get(name, 0.0) + square
                self._used_rates[name] = group["lr"]
        if self._check is not None:
            self._check.make(self._global_norm)
            if self._check.skips_step:
                for flat in _all_params(optimizer):
                    flat.grad = None  # an optimizer passes over what has no gradient
                return
        if self._is_replicated and self._config.optim.grad_clip > 0:
            # DeepSpeed's own clipping at stage 0 keeps the norm to itself, so it is off there.
            norm = self._global_norm()
            torch.nn.utils.clip_grads_with_norm_(_all_params(optimizer), self._config.optim.grad_clip, norm)
        if self._control:
            self._control.before_base_step(_all_params(optimizer))

    def _after_base_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._control and not (self._check is not None and self._check.skips_step):
            self._control.after_base_step(_all_params(optimizer))

    def _global_norm(self) -> Tensor:
        """Gradient norm before clipping, during the optimizer's step."""
        if self._is_replicated:
            return torch.stack(list(self._squared_norms.values())).sum().sqrt()
        norm = deepspeed_internals.norm_during_step(self._engine)
        return torch.as_tensor(norm, dtype=torch.float64, device=self.device)

    def _reported_norm(self) -> dict[str, Tensor]:
        """DeepSpeed's gradient norm after a step, where it has one."""
        norm = None if self._is_replicated else self._engine.get_global_grad_norm()
        return {} if norm is None else {"grad_norm": norm}

    def _memory_bytes(self) -> float:
        if self.device.type == "cuda":
            return float(torch.cuda.max_memory_allocated())
        return float(psutil.Process().memory_info().rss)


class _BatchTotals:
    """Sums over the micro-batches of one step, on the device.

    Args:
        num_targets: Target tokens of this rank's micro-batches.

    Attributes:
        scale: Factor of every micro-batch's objective: ranks / targets of the global batch.
    """

    def __init__(self, num_targets: int, world_size: int, device: torch.device) -> None:
        """Collective."""
        total = torch.full((), float(num_targets), device=device)
        dist.all_reduce(total)
        # Documents of one token have no target, and a batch may hold nothing else.
        self._num_targets = total.clamp(min=1)
        self.scale = world_size / self._num_targets
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._z_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._bad_micro_batch = torch.full((), -1.0, dtype=torch.float64, device=device)

    def add(self, index: int, cross_entropy: Tensor, z_loss: Tensor) -> None:
        """Adds the sums of micro-batch `index`."""
        self._loss_sum += cross_entropy
        self._z_sum += z_loss
        is_first_bad = ~torch.isfinite(cross_entropy) & (self._bad_micro_batch < 0)
        self._bad_micro_batch = torch.where(is_first_bad, float(index), self._bad_micro_batch)

    def local_loss(self) -> Tensor:
        """This rank's part of the loss."""
        return self._loss_sum / self._num_targets

    def columns(self) -> dict[str, Tensor]:
        """Device columns of the step's report."""
        return {"loss_sum": self._loss_sum, "z_sum": self._z_sum, "bad_micro_batch": self._bad_micro_batch}


def _all_params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors that the optimizer is about to change in this call."""
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]
