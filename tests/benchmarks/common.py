"""Shared by the speed measurements: a shard of tokens, shape arguments, and two training loops."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config, ModelConfig, resolve_model
from data.indexed import IndexedShardWriter, token_dtype
from data.loader import StepBatch
from launch.distributed.topology import Topology
from launch.engine.build import build_model
from launch.engine.engine import Engine
from launch.engine.step_report import PendingReport, StepReport
from launch.optim.optimizer import build_optimizer, group_learning_rates
from launch.training.data import TrainingData, batch_geometry, probe_batch, training_batches
from model.gpt import GPT
from model.initialisation import initialise
from model.parameters import collect_specs
from model.stability.groups import group_names

DOCUMENT_TOKENS = 10_000
LARGEST_STRIDE = 3


def write_shard(prefix: Path, num_tokens: int, vocab_size: int) -> Path:
    """Writes a shard with a random walk over the ids, which is learnable, so that wrong losses differ."""
    strides = np.random.default_rng(0).integers(-LARGEST_STRIDE, LARGEST_STRIDE + 1, num_tokens)
    tokens = np.cumsum(strides) % vocab_size
    with IndexedShardWriter(prefix, token_dtype(vocab_size)) as writer:
        for start in range(0, num_tokens, DOCUMENT_TOKENS):
            writer.add_document(tokens[start : start + DOCUMENT_TOKENS])
    return prefix


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `shape` reads."""
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=None, help="default: --heads")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--seq", type=int, default=256, help="tokens per sequence")


def shape(args: argparse.Namespace) -> ModelConfig:
    """Returns the resolved model configuration for the arguments."""
    model = ModelConfig(
        vocab_size=args.vocab,
        dim=args.dim,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        max_seq_len=args.seq,
    )
    return resolve_model(model)


def seconds(action: Callable[[], None]) -> float:
    """Returns the wall-clock seconds of a call; on a GPU, until its work is done."""
    start = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join((first.strip().ljust(widths[0]), *others)))


class EngineLoop:
    """Steadyhead's training loop without checkpoints and metrics; reports are read one step late.

    Attributes:
        reports: The reports read so far.
        data_seconds: How long each step waited for its batch.
    """

    def __init__(self, config: Config, data: TrainingData, topology: Topology, device: torch.device) -> None:
        self._config = config
        geometry = batch_geometry(config, topology.world_size)
        probe_tokens = probe_batch(data, config)
        model = build_model(config, topology, device)
        self.engine = Engine(model, config, topology, device, geometry.accumulation, probe_tokens)
        self._loader = training_batches(data, config, geometry, topology.rank, 0, device)
        self._pending: PendingReport | None = None
        self._step = 0
        self.reports: list[StepReport] = []
        self.data_seconds: list[float] = []

    def step(self) -> None:
        """Runs one optimizer step."""
        start = time.perf_counter()
        batch = next(self._loader)
        self.data_seconds.append(time.perf_counter() - start)
        learning_rates = group_learning_rates(self._step, self._config, self.engine.groups)
        report = self.engine.train_step(self._step, batch, learning_rates, self.data_seconds[-1], stop_requested=False)
        self.read_pending()
        self._pending = report
        self._step += 1

    def read_pending(self) -> None:
        """Reads the report of the last step if it has not been read yet."""
        if self._pending is not None:
            self.reports.append(self._pending.read())
            self._pending = None

    def close(self) -> None:
        self._loader.close()


class BareLoop:
    """The same training in plain PyTorch, with the same model, batches, optimizer and arithmetic.

    In bf16 that means bf16 weights, fp32 masters and gradients summed in fp32. Autocast over fp32 weights would cast
    all weights in every micro-batch, which would favour the engine.

    Attributes:
        losses, grad_norms: The values of all steps, on the device.
    """

    def __init__(self, config: Config, batches: Sequence[StepBatch], device: torch.device) -> None:
        self._config = config
        self._batches = batches
        self._device = device
        with device:
            self._model = GPT(config.model, config.train.activation_checkpointing)
        initialise(self._model, config.run.seed)
        self._masters = self._model
        if config.train.precision == "bf16":
            self._model.bfloat16()
            self._masters = copy.deepcopy(self._model).float()
        if config.train.compile:
            self._model.compile_blocks()
        specs = collect_specs(self._masters)
        self._groups = group_names(specs)
        self._optimizer = build_optimizer(self._masters, specs, config)
        self.losses: list[Tensor] = []
        self.grad_norms: list[Tensor] = []

    def step(self) -> None:
        """Runs one optimizer step."""
        step = len(self.losses)
        batch = self._batches[step % len(self._batches)]
        learning_rates = group_learning_rates(step, self._config, self._groups)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rates[group["name"]]
        loss_sum = torch.zeros((), device=self._device)
        for micro_batch in batch.micro_batches:
            tokens = micro_batch.tokens.to(self._device, non_blocking=True)
            targets = micro_batch.targets.to(self._device, non_blocking=True)
            objective, cross_entropy, _ = self._model(tokens, targets)
            (objective / batch.num_targets).backward()
            loss_sum += cross_entropy
            self._accumulate()
        self.grad_norms.append(torch.nn.utils.clip_grad_norm_(self._masters.parameters(), self._config.optim.grad_clip))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._round_weights()
        self.losses.append(loss_sum / batch.num_targets)

    def _accumulate(self) -> None:
        """Adds the bf16 gradients of a micro-batch to the fp32 gradients of the masters."""
        if self._masters is self._model:
            return
        for weight, master in zip(self._model.parameters(), self._masters.parameters(), strict=True):
            if master.grad is None:
                master.grad = weight.grad.float()
            else:
                master.grad.add_(weight.grad)
            weight.grad = None

    @torch.no_grad()
    def _round_weights(self) -> None:
        """Copies the masters to the bf16 weights, rounded."""
        if self._masters is self._model:
            return
        for weight, master in zip(self._model.parameters(), self._masters.parameters(), strict=True):
            weight.copy_(master)
