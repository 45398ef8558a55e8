"""The DeepSpeed engine of one rank: start, one training step, validation, and what its ranks report.

Only this module imports DeepSpeed. A step of ours does not wait for a GPU: what it measures is gathered on the device,
copied to the host in the background, and read one step later. (DeepSpeed's optimizers do wait, for the gradient norm;
and so do QK-Clip, for every layer's bound, and the probe batch at its interval.)
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import random
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from typing import Any, NoReturn

import numpy as np
import psutil
import torch
from pydantic import ValidationError
from torch import Tensor
from torch import distributed as dist

from configs.errors import ConfigError
from configs.schema import Config
from data.loader import MicroBatch, StepBatch
from launch.deepspeed_config import deepspeed_config
from launch.errors import RunError
from launch.head_weights import HeadWeights
from launch.monitor import AttentionMonitor, AttentionReport
from launch.muon import MuonWithAdamW
from launch.optimizer import build_optimizer, muon_blocks, optimizer_groups
from launch.probe import DriftProbe, Probe
from launch.qk_control import Clipper, QueryKeyControl
from launch.qk_rules import AdaptiveRule, QuackRule, Rule
from launch.shards import Shard, local_flats, local_shards, publish_masters
from launch.timing import Stopwatch
from launch.topology import Topology, threads_per_rank
from model.gpt import GPT
from model.initialisation import init_parameter, initialise
from model.parameters import ParameterSpec, collect_specs
from model.stability.clip import attach_logit_maxima
from model.stability.groups import GroupName
from model.stability.layers import collect_layouts

NUM_FIXED_COLUMNS = 9  # columns of a rank's report before the groups' squared gradient norms


@dataclass(frozen=True)
class StepReport:
    """What all ranks measured in one step.

    Attributes:
        loss: cross-entropy in nats per target token, over the whole global batch.
        z_loss: mean squared logsumexp of the logits, unweighted, also when it is not part of the objective.
        num_targets: target tokens of the global batch.
        grad_norm: global gradient norm before clipping; group_grad_norms: the same for every parameter group.
        step_applied: whether the optimizer changed the weights.
        bad_ranks: ranks whose own loss was not finite.
        forward_seconds, data_seconds: per rank; the forward time is that of the step before.
        memory_bytes: per rank; allocated peak on GPU, resident on CPU.
        stop_requested: whether any rank was asked to stop.
        qk_statistics: of query/key control, by name, flattened; see `QueryKeyControl.statistics`.
        qk_record: what the policy itself reports of the step.
        attention: measured around the step, where it was due; on the ranks that compute it.
    """

    loss: float
    z_loss: float
    num_targets: int
    grad_norm: float
    group_grad_norms: dict[str, float]
    step_applied: bool
    bad_ranks: tuple[int, ...]
    forward_seconds: tuple[float, ...]
    data_seconds: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    stop_requested: bool
    qk_statistics: dict[str, list[float]] = field(default_factory=dict)
    qk_record: dict[str, Any] = field(default_factory=dict)
    attention: AttentionReport | None = None


class PendingReport:
    """The gathered rows of a step on their way to the host."""

    def __init__(
        self,
        rows: Tensor,
        group_names: list[str],
        qk_widths: dict[str, int],
        qk_record: dict[str, Any],
        attention: AttentionReport | None,
        replicated: bool,
    ) -> None:
        self._attention = attention
        self._group_names = group_names
        self._qk_widths = qk_widths
        self._qk_record = qk_record
        self._replicated = replicated
        self._event: torch.cuda.Event | None = None
        if rows.is_cuda:
            host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            host.copy_(rows, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
            rows = host
        self._rows = rows

    def read(self) -> StepReport:
        """Waits for the copy (done long ago when read one step late)."""
        if self._event is not None:
            self._event.synchronize()
        rows = self._rows.tolist()
        loss_sum, z_sum, num_targets, grad_norm, applied, stop, forward, data, memory, *rest = zip(*rows, strict=True)
        squares = rest[: len(self._group_names)]
        qk_values = iter([column[0] for column in rest[len(self._group_names) :]])
        targets = int(sum(num_targets))
        copies = len(rows) if self._replicated else 1
        clipped = [math.sqrt(sum(column) / copies) for column in squares]
        total = math.sqrt(sum(norm**2 for norm in clipped))
        # From stage 1 on, the optimizer sees clipped gradients, and DeepSpeed's norm is the one before clipping.
        # Where it has none (-1), at stage 0, the squares are those before clipping.
        global_norm = grad_norm[0] if grad_norm[0] >= 0 or math.isnan(grad_norm[0]) else total
        unclip = global_norm / total if total > 0 else 1.0
        return StepReport(
            loss=sum(loss_sum) / max(targets, 1),
            z_loss=sum(z_sum) / max(targets, 1),
            num_targets=targets,
            grad_norm=global_norm,
            group_grad_norms={name: norm * unclip for name, norm in zip(self._group_names, clipped, strict=True)},
            step_applied=all(applied),
            bad_ranks=tuple(rank for rank, value in enumerate(loss_sum) if not math.isfinite(value)),
            forward_seconds=forward,
            data_seconds=data,
            memory_bytes=memory,
            stop_requested=any(stop),
            qk_statistics={name: list(islice(qk_values, width)) for name, width in self._qk_widths.items()},
            qk_record=self._qk_record,
            attention=self._attention,
        )


def start_distributed(topology: Topology, config: Config) -> torch.device:
    """Joins the process group, seeds every generator and returns this rank's device."""
    threads = threads_per_rank(os.environ, topology.local_world_size)
    if threads is not None:
        torch.set_num_threads(threads)
    if torch.cuda.is_available():
        device = torch.device("cuda", local_device(topology.local_rank, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    _join_process_group(topology, device, timedelta(seconds=config.deepspeed.timeout_seconds))
    _seed_everything(config.run.seed, config.run.deterministic)
    return device


def local_device(local_rank: int, num_visible: int) -> int:
    """Index of this rank's GPU; 0 where the launcher shows each rank only its own.

    Raises:
        RunError: there are several GPUs but fewer than ranks.
    """
    if num_visible == 1:
        return 0
    if local_rank >= num_visible:
        raise RunError(f"LOCAL_RANK={local_rank}, but this node shows {num_visible} GPUs; start one rank for each")
    return local_rank


def _join_process_group(topology: Topology, device: torch.device, timeout: timedelta) -> None:
    # DeepSpeed's own calls of torch's older collective names would print a warning at every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # DeepSpeed reads these itself; only its launcher and torchrun set all of them.
    os.environ.update(
        RANK=str(topology.rank),
        LOCAL_RANK=str(device.index or 0) if device.type == "cuda" else str(topology.local_rank),
        WORLD_SIZE=str(topology.world_size),
        MASTER_ADDR=topology.master_addr,
        MASTER_PORT=str(topology.master_port),
    )
    # DeepSpeed clones groups with torch's default timeout, whatever it is told; so the default itself is set.
    dist.distributed_c10d.default_pg_timeout = timeout
    dist.distributed_c10d.default_pg_nccl_timeout = timeout
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        init_method="env://",
        rank=topology.rank,
        world_size=topology.world_size,
        timeout=timeout,
        # Bound to a device, a lone rank would split a communicator for every group that DeepSpeed makes.
        device_id=device if device.type == "cuda" and topology.world_size > 1 else None,
    )


def _seed_everything(seed: int, deterministic: bool) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("highest" if deterministic else "high")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def leave(exit_code: int) -> NoReturn:
    """Waits for the other ranks and ends the process at once.

    The interpreter's own shutdown tears down gloo's threads and DeepSpeed's groups in an order that now and then aborts
    a process whose run is finished, and a launcher would report that as a failure.
    """
    dist.barrier()
    if dist.get_backend() == "nccl":
        dist.destroy_process_group()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


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
        self, step: int, batch: StepBatch, rates: dict[str, float], data_seconds: float, stop_requested: bool
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
        for index, micro_batch in enumerate(batch.micro_batches):
            self._forward_watch.start()
            objective, cross_entropy, z_loss = self._forward(micro_batch)
            self._forward_watch.stop()
            loss_sum += cross_entropy
            z_sum += z_loss
            self._engine.backward(objective * scale, scale_wrt_gas=False)
            if self._control and index == len(batch.micro_batches) - 1:
                self._control.after_backward()
            self._engine.step()
        if self._engine.was_step_applied() and self._used_rates != rates:
            raise RunError(f"the optimizer used the learning rates {self._used_rates}, but {rates} were set")
        if self._control and self._engine.was_step_applied():
            self._control.check_applied()
        host_values = [
            batch.num_targets,
            -1.0,
            self._engine.was_step_applied(),
            stop_requested,
            forward_seconds,
            data_seconds,
            self._memory_bytes(),
        ]
        attention = None
        if self._monitor is not None and self._control is not None and meter is not None:
            attention = self._monitor.after_step(meter)
            self._control.meter = None
        return self._gather(loss_sum, z_sum, host_values, attention)

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
        if self._replicated and self._config.optim.grad_clip > 0:
            # DeepSpeed's own clipping at stage 0 keeps the norm to itself, so it is off there.
            norm = sum(self._squares.values()).sqrt()
            torch.nn.utils.clip_grads_with_norm_(_all_params(optimizer), self._config.optim.grad_clip, norm)
        if self._control:
            self._control.before_base_step(_all_params(optimizer))

    def _after_base_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._control:
            self._control.after_base_step(_all_params(optimizer))

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
        self, loss_sum: Tensor, z_sum: Tensor, host_values: list[Any], attention: AttentionReport | None
    ) -> PendingReport:
        names = [group.value for group in self.groups]
        values = [0.0, 0.0, *map(float, host_values), *[0.0] * len(names)]
        row = torch.tensor(values, dtype=torch.float64, pin_memory=self.device.type == "cuda")
        assert row.numel() == NUM_FIXED_COLUMNS + len(names)
        row = row.to(self.device, non_blocking=True)
        row[0], row[1] = loss_sum, z_sum
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


def _all_params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors that the optimizer is about to change in this call."""
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]
