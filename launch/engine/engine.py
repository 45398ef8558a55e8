"""The DeepSpeed engine of one rank: one training step, and validation.

The code here does not make the host wait for the GPU during a step: the step's metrics are gathered on the device,
copied to the host in the background, and read one step later. These do wait: DeepSpeed's optimizers (for the gradient
norm), QK-Clip (for every layer's bound), the probe batch at its interval, and an anomaly check before the step is
applied.
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
    """The DeepSpeed engine with Steadyhead's parameter groups, learning rates and measurements.

    Attributes:
        device: The device of this rank.
        groups: The parameter names of every optimizer group.
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
        accumulation: Micro-batches per step.
        probe_tokens_BT: The probe batch on which attention is measured, the same on all ranks; None: no measurement.
        """
        self.device = device
        specs = collect_specs(model)
        self.groups = optimizer_groups(specs, config)
        self._config = config
        self._topology = topology
        self._is_replicated = config.deepspeed.zero_stage == 0
        self._squared_norms: dict[str, Tensor] = {}
        self._used_learning_rates: dict[str, float] = {}
        self._forward_timer = Stopwatch(device)
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
            # DeepSpeed prints to stdout at every log level.
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
        """Releases DeepSpeed's references to the model, so that its memory can be freed."""
        deepspeed_internals.destroy(self._engine)

    def shards(self) -> list[Shard]:
        """This rank's shards of the fp32 master weights."""
        return deepspeed_internals.local_shards(self._engine)

    def policy_state(self) -> dict[str, Any]:
        """The state of the query/key policy for a checkpoint; the same on all ranks."""
        return self._control.state() if self._control else {}

    def policy_tensors(self) -> dict[str, Tensor]:
        """The tensors of the query/key policy for a checkpoint; the same on all ranks."""
        return self._control.tensors() if self._control else {}

    def load_policy(self, state: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restores the query/key policy from a checkpoint."""
        if self._control:
            self._control.load(state, tensors)

    def sync_model_weights(self) -> None:
        """Copies the fp32 masters to the model's weights, after the masters were changed from outside. Collective."""
        deepspeed_internals.sync_model_weights(self._engine)

    def train_step(
        self,
        step: int,
        batch: StepBatch,
        learning_rates: dict[str, float],
        data_seconds: float,
        stop_requested: bool,
        anomaly_check: AnomalyCheck | None = None,
    ) -> PendingReport:
        """Runs the forward and backward passes of all micro-batches, then one optimizer step. Collective.

        The gradient is that of the mean loss over all target tokens of the global batch, for any number of ranks: each
        rank scales its summed loss by ranks / targets, and DeepSpeed averages over the ranks.

        Args:
            step: The number of finished optimizer steps.
            batch: This rank's micro-batches.
            learning_rates: The learning rate of every group.
            data_seconds: How long this rank waited for the batch.
            stop_requested: Whether this rank was asked to stop; reported to all ranks.
            anomaly_check: Decides whether to skip the step, which leaves the weights and the optimizer's state
                unchanged. It costs one more all-reduce, and the host waits for the result.

        Raises:
            RunError: The optimizer used other learning rates than were set.
        """
        self._prepare_step(step, learning_rates)
        forward_seconds = self._forward_timer.take()
        totals = _BatchTotals(batch.num_targets, self.world_size, self.device)
        for index, micro_batch in enumerate(batch.micro_batches):
            self._forward_timer.start()
            objective, cross_entropy, z_loss = self._forward(micro_batch)
            self._forward_timer.stop()
            totals.add(index, cross_entropy, z_loss)
            self._engine.backward(objective * totals.scale, scale_wrt_gas=False)
            if index == len(batch.micro_batches) - 1:
                self._after_last_backward(totals.local_loss(), anomaly_check)
            self._engine.step()
        check, self._check = self._check, None
        is_applied = self._engine.was_step_applied() and not (check and check.skips_step)
        if is_applied:
            self._verify_step(learning_rates)
        attention = self._measure_attention()
        host = {
            "num_targets": batch.num_targets,
            "is_applied": is_applied,
            "stop_requested": stop_requested,
            "forward_seconds": forward_seconds,
            "data_seconds": data_seconds,
            "memory_bytes": self._memory_bytes(),
        }
        values = self._step_values(host, totals, check, attention if is_applied else None)
        return gather_report(values, self.device, self._is_replicated)

    def evaluate(self, batches: Iterable[MicroBatch]) -> float:
        """Cross-entropy in nats per target over all ranks' batches. Collective.

        Every rank must pass the same number of batches.
        """
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
        """The full (unpartitioned) shape of every parameter, by name."""
        return {name: deepspeed_internals.whole_shape(tensor) for name, tensor in self.module.named_parameters()}

    def _prepare_step(self, step: int, learning_rates: dict[str, float]) -> None:
        """Sets learning rates and per-head ratios, and starts a measurement of attention if one is due. Collective."""
        self._used_learning_rates, self._squared_norms = {}, {}
        for group in self.base_optimizer.param_groups:
            group["lr"] = learning_rates[group["name"]]
        if self._control is None:
            return
        if self._monitor is not None and self._monitor.is_due(step):
            self._monitor.before_step()
            self._control.measure_step()
        self._control.prepare(step, learning_rates[GroupName.DECAY.value] / self._config.optim.lr)

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
        """Finishes a measurement that was due; returns it on the ranks that record it. Collective."""
        meter = self._control.pop_meter() if self._control else None
        return None if meter is None or self._monitor is None else self._monitor.after_step(meter)

    def _step_values(
        self, host: dict[str, float], totals: _BatchTotals, check: StepCheck | None, attention: AttentionReport | None
    ) -> StepValues:
        """This rank's contribution to the report of the step that has just run."""
        return StepValues(
            host=host,
            device={**totals.columns(), **self._reported_norm()},
            squared_norms={group.value: self._squared_norms.get(group.value, 0.0) for group in self.groups},
            statistics=self._control.statistics() if self._control else {},
            qk_record=self._control.record() if self._control else {},
            attention=attention,
            was_checked=check is not None and check.was_made,
            anomaly=check.anomaly if check is not None else None,
        )

    def _verify_step(self, learning_rates: dict[str, float]) -> None:
        if self._used_learning_rates != learning_rates:
            raise RunError(
                f"the optimizer used the learning rates {self._used_learning_rates}; expected {learning_rates}"
            )
        if self._control:
            self._control.after_applied_step()

    def _before_base_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Records the learning rates that the optimizer is about to use and the squared norms of its gradients.

        Depending on the stage, DeepSpeed calls the base optimizer once per step, per group, or per sub-group.
        """
        for group in optimizer.param_groups:
            gradients = [flat.grad for flat in group["params"] if flat.grad is not None]
            if gradients:
                square = torch.nn.utils.get_total_norm(gradients).double().square()
                name = group["name"]
                self._squared_norms[name] = self._squared_norms.get(name, 0.0) + square
                self._used_learning_rates[name] = group["lr"]
        if self._check is not None:
            self._check.make(self._global_norm)
            if self._check.skips_step:
                for flat in _all_params(optimizer):
                    flat.grad = None  # optimizers ignore tensors without a gradient
                return
        if self._is_replicated and self._config.optim.grad_clip > 0:
            # At stage 0 DeepSpeed clips without reporting the norm, so its clipping is off there.
            norm = self._global_norm()
            torch.nn.utils.clip_grads_with_norm_(_all_params(optimizer), self._config.optim.grad_clip, norm)
        if self._control:
            self._control.before_base_step(_all_params(optimizer))

    def _after_base_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._control and not (self._check is not None and self._check.skips_step):
            self._control.after_base_step(_all_params(optimizer))

    def _global_norm(self) -> Tensor:
        """The global gradient norm before clipping, during the optimizer's step."""
        if self._is_replicated:
            return torch.stack(list(self._squared_norms.values())).sum().sqrt()
        norm = deepspeed_internals.norm_during_step(self._engine)
        return torch.as_tensor(norm, dtype=torch.float64, device=self.device)

    def _reported_norm(self) -> dict[str, Tensor]:
        """DeepSpeed's gradient norm after a step, if it computed one."""
        norm = None if self._is_replicated else self._engine.get_global_grad_norm()
        return {} if norm is None else {"grad_norm": norm}

    def _memory_bytes(self) -> float:
        if self.device.type == "cuda":
            return float(torch.cuda.max_memory_allocated())
        return float(psutil.Process().memory_info().rss)


class _BatchTotals:
    """Sums over the micro-batches of one step, on the device.

    Args:
        num_targets: The number of target tokens in this rank's micro-batches.

    Attributes:
        scale: The factor of every micro-batch's objective: ranks / targets of the global batch.
    """

    def __init__(self, num_targets: int, world_size: int, device: torch.device) -> None:
        """Collective."""
        total = torch.full((), float(num_targets), device=device)
        dist.all_reduce(total)
        # A batch may hold only one-token documents, which have no target.
        self._num_targets = total.clamp(min=1)
        self.scale = world_size / self._num_targets
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._z_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._bad_micro_batch = torch.full((), -1.0, dtype=torch.float64, device=device)

    def add(self, index: int, cross_entropy: Tensor, z_loss: Tensor) -> None:
        """Adds the losses of micro-batch `index`."""
        self._loss_sum += cross_entropy
        self._z_sum += z_loss
        is_first_bad = ~torch.isfinite(cross_entropy) & (self._bad_micro_batch < 0)
        self._bad_micro_batch = torch.where(is_first_bad, float(index), self._bad_micro_batch)

    def local_loss(self) -> Tensor:
        """This rank's share of the loss of the global batch."""
        return self._loss_sum / self._num_targets

    def columns(self) -> dict[str, Tensor]:
        """The device columns of the step's report."""
        return {"loss_sum": self._loss_sum, "z_sum": self._z_sum, "bad_micro_batch": self._bad_micro_batch}


def _all_params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors that the optimizer updates in this call."""
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]
