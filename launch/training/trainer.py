"""The training loop: steps, validation, checkpoints, and a common stop of all ranks."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

from configs.schema import Config
from data.loader import BatchGeometry, StepLoader
from launch.checkpoint.files import TrainingState
from launch.checkpoint.retention import prune_checkpoints
from launch.checkpoint.save import optimizer_scalars, optimizer_tensor_kinds, save_checkpoint
from launch.distributed.collective import on_main_rank
from launch.engine.anomalies import Anomaly, AnomalyPolicy
from launch.engine.engine import Engine
from launch.engine.step_report import PendingReport, StepReport
from launch.engine.timing import Interval
from launch.errors import EXIT_DONE, EXIT_STOPPED, RunError, SharedError
from launch.metrics.hardware import device_peak_flops
from launch.metrics.profiler import StepProfiler
from launch.metrics.recorder import Recorder, step_record
from launch.optim.optimizer import group_learning_rates
from launch.process.stop import StopRequest
from launch.process.watchdog import Watchdog
from launch.run_folder.checkpoints import list_checkpoints
from launch.run_folder.folder import RunFolder, mark_done
from launch.training.bad_batch import locate_samples, report_samples, samples_to_report
from launch.training.data import TrainingData, fixed_batches, sequence_length, training_batches
from launch.training.rollback import Rollback
from model.flops import flops_per_token

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _PendingStep:
    """A step whose report has not been read yet.

    Attributes:
        step: The number of the step, from 1.
        consumed_samples: The number of samples that the run has used, including those of the step.
    """

    step: int
    consumed_samples: int
    learning_rates: dict[str, float]
    interval: Interval
    report: PendingReport


class _RollbackRequested(Exception):
    """The run must roll back, for the reason in the message."""

    def __init__(self, pending: _PendingStep, reason: str) -> None:
        super().__init__(reason)
        self.pending = pending


class Trainer:
    """Runs the training steps of one rank; all ranks run the same steps.

    Args:
        config: The resolved configuration, with the vocabulary size.
        geometry: The layout of a global batch.
        state: The state in the checkpoint that was loaded; None at step 0.
        stop: The request to stop early.
        watchdog: Notified after every step.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        data: TrainingData,
        geometry: BatchGeometry,
        engine: Engine,
        state: TrainingState | None,
        stop: StopRequest,
        watchdog: Watchdog,
    ) -> None:
        self._config = config
        self._folder = folder
        self._data = data
        self._geometry = geometry
        self._engine = engine
        self._stop = stop
        self._watchdog = watchdog
        self._last_step = config.train.last_step
        self._peak_flops = device_peak_flops(engine.device, config.train.precision)
        self._flops_per_token = flops_per_token(config.model, sequence_length(config))
        self._first_step = state.step if state else 0
        self._consumed_samples = state.consumed_samples if state else 0
        self._loss = state.loss if state else math.nan
        self._val_losses = dict(state.val_losses) if state else {}
        self._anomalies = AnomalyPolicy(config.train)
        self._anomalies.load_state(state.step_figures if state else {})
        self._num_skips = 0
        self._num_failed_saves = 0

    def fit(self) -> int | Rollback:
        """Trains until the last step or a request to stop. Collective.

        Returns:
            The exit code (finished, or stopped on request after a checkpoint), or a request to roll back.

        Raises:
            RunError: The run must stop because of an anomaly, or checkpoints could not be saved.
        """
        config, engine = self._config, self._engine
        self._stop.begin_training()
        profiler = StepProfiler(
            config.train.profile, self._folder.profile, engine.rank, engine.device, self._first_step
        )
        recorder = Recorder(self._folder, config, self._first_step, self._last_step)
        on_main_rank(recorder.open)
        loader = training_batches(
            self._data, config, self._geometry, engine.rank, self._consumed_samples, engine.device
        )
        pending: _PendingStep | None = None
        stopping = False
        saved_step = self._first_step if self._first_step else None
        try:
            for step in range(self._first_step, self._last_step):
                started = self._start_step(step, loader, profiler)
                # Reading a report waits for its step, so each is read while the next one runs on the device.
                if pending is not None:
                    stopping = self._complete_step(pending, recorder)
                pending = started
                if stopping or self._must_read_now(step + 1):
                    stopping = self._complete_step(pending, recorder) or stopping
                    pending = None
                    if stopping or self._checkpoint_is_due(step + 1):
                        saved_step = self._save(step + 1, recorder, must_succeed=stopping) or saved_step
                if stopping and step + 1 < self._last_step:
                    log.info("stopped on request after step %d; run the same command again to resume", step + 1)
                    return EXIT_STOPPED
            self._finish_run(recorder, saved_step)
            return EXIT_DONE
        except _RollbackRequested as request:
            last = request.pending
            return Rollback(last.step, last.consumed_samples, self._data.order.skipped, str(request))
        finally:
            profiler.close()
            loader.close()
            recorder.close()

    def _start_step(self, step: int, loader: StepLoader, profiler: StepProfiler) -> _PendingStep:
        """Runs a step, without waiting for the device to finish it. Collective."""
        profiler.before_step(step)
        interval = Interval(self._engine.device)
        wait_start = time.perf_counter()
        batch = next(loader)
        data_seconds = time.perf_counter() - wait_start
        learning_rates = group_learning_rates(step, self._config, self._engine.groups)
        check = self._anomalies.check if self._anomalies.may_skip else None
        report = self._engine.train_step(step, batch, learning_rates, data_seconds, self._stop.is_set, check)
        interval.stop()
        profiler.after_step(step)
        self._consumed_samples += self._geometry.samples_per_step
        return _PendingStep(step + 1, self._consumed_samples, learning_rates, interval, report)

    def _finish_run(self, recorder: Recorder, saved_step: int | None) -> None:
        if saved_step != self._last_step:
            self._save(self._last_step, recorder, must_succeed=True)
        on_main_rank(lambda: mark_done(self._folder, self._last_step, self._loss))

    def _must_read_now(self, step: int) -> bool:
        return step == self._last_step or self._checkpoint_is_due(step) or self._validation_is_due(step)

    def _checkpoint_is_due(self, step: int) -> bool:
        return step % self._config.checkpoint.every_steps == 0 and step < self._last_step

    def _validation_is_due(self, step: int) -> bool:
        return step % self._config.validation.every_steps == 0 or step == self._last_step

    def _complete_step(self, pending: _PendingStep, recorder: Recorder) -> bool:
        """Reads a step's report, checks it, validates if due, and records it. Returns whether to stop."""
        report = pending.report.read()
        self._watchdog.step_finished(pending.step)
        anomaly = self._find_anomaly(report)
        if anomaly is not None:
            with self._watchdog.slow_work():
                self._handle_anomaly(anomaly, pending, report)
        self._num_skips = 0 if report.step_applied else self._num_skips + 1
        record = step_record(
            pending.step,
            pending.consumed_samples * sequence_length(self._config),
            report,
            pending.learning_rates,
            step_seconds=pending.interval.seconds(),
            batch_tokens=self._config.train.global_batch_tokens,
            flops_per_second_peak=self._peak_flops,
            flops_per_token=self._flops_per_token,
            num_ranks=self._engine.world_size,
        )
        if math.isfinite(report.loss):
            self._loss = report.loss
        if self._validation_is_due(pending.step):
            with self._watchdog.slow_work():
                record.update(self._validate())
        recorder.write(record, report)
        return report.stop_requested

    def _find_anomaly(self, report: StepReport) -> Anomaly | None:
        if report.was_checked:
            return report.anomaly
        if not report.step_applied:  # DeepSpeed dropped it because of non-finite gradients
            return self._anomalies.nonfinite()
        return self._anomalies.check(report.loss, report.grad_norm)

    def _handle_anomaly(self, anomaly: Anomaly, pending: _PendingStep, report: StepReport) -> None:
        """Reports the anomaly and its samples, and takes the configured action. Collective.

        Raises:
            SharedError: The run must stop.
            _RollbackRequested: The run must roll back.
        """
        samples_per_step = self._geometry.samples_per_step
        first_sample = pending.consumed_samples - samples_per_step
        samples = [first_sample + slot for slot in samples_to_report(report.bad_micro_batches, self._geometry)]
        records = locate_samples(self._data, samples, sequence_length(self._config))
        trained_on = on_main_rank(lambda: report_samples(self._folder, pending.step, records))
        text = f"{_describe(anomaly, report, pending.step)}; {trained_on}"
        if anomaly.action == "stop":
            raise SharedError(f"{text}; {self._newest_checkpoint_text()}")
        if anomaly.action == "skip" and self._num_skips == self._config.train.max_skips:
            raise SharedError(f"{text}; the {self._num_skips} steps before it were skipped, too (train.max_skips)")
        log.warning("%s%s", text, "; the step is skipped" if anomaly.action == "skip" else "")
        if anomaly.action == "rollback":
            raise _RollbackRequested(pending, text)

    def _validate(self) -> dict[str, float]:
        """Returns `val_loss` of the first validation set, and `val_loss/NAME` of each. Collective."""
        losses = {}
        for name, source in self._data.val_sources.items():
            batches = fixed_batches(self._data, source, self._config, self._geometry, self._engine.rank)
            losses[name] = self._engine.evaluate(batches)
        self._val_losses = losses
        if not losses:
            return {}
        first = next(iter(losses.values()))
        return {"val_loss": first, **{f"val_loss/{name}": loss for name, loss in losses.items()}}

    def _save(self, step: int, recorder: Recorder, must_succeed: bool) -> int | None:
        """Saves a checkpoint, and returns the step if it was saved; a failure is only logged unless it is final."""
        start = time.perf_counter()
        recorder.sync()
        try:
            with self._watchdog.slow_work():
                path = save_checkpoint(
                    self._folder.checkpoints, self._engine, self._config, self._state(step), self._data.tokenizer
                )
                on_main_rank(lambda: prune_checkpoints(self._folder.checkpoints, self._config.checkpoint))
        except RunError as error:
            message = f"the checkpoint of step {step} could not be saved: {error}; {self._newest_checkpoint_text()}"
            self._num_failed_saves += 1
            if must_succeed:
                raise SharedError(message) from None
            if self._num_failed_saves > self._config.checkpoint.max_failures:
                raise SharedError(
                    f"{message}; {self._num_failed_saves} saves in a row have failed (checkpoint.max_failures)"
                ) from None
            log.error("%s; training continues, and the next checkpoint is tried as usual", message)
            return None
        self._num_failed_saves = 0
        seconds = time.perf_counter() - start
        recorder.record_checkpoint(step, seconds)
        log.info("checkpoint %s (%.1f s)", path, seconds)
        return step

    def _newest_checkpoint_text(self) -> str:
        if not self._folder.path.is_dir():
            return f"{self._folder.path} is missing, with all checkpoints"
        good = list_checkpoints(self._folder.checkpoints)
        return f"the last good checkpoint is {good[-1][1]}" if good else "there is no checkpoint yet"

    def _state(self, step: int) -> TrainingState:
        tokenizer = self._data.tokenizer
        return TrainingState(
            step=step,
            consumed_samples=self._consumed_samples,
            num_ranks=self._engine.world_size,
            zero_stage=self._config.deepspeed.zero_stage,
            parameters={name: list(shape) for name, shape in self._engine.parameter_shapes().items()},
            groups={group.value: names for group, names in self._engine.groups.items()},
            optimizer_tensors=optimizer_tensor_kinds(self._engine),
            optimizer_scalars=optimizer_scalars(self._engine),
            policy_state=self._engine.policy_state(),
            data_fingerprints=list(self._data.fingerprints),
            tokenizer_sha256=self._data.tokenizer_sha256,
            tokenizer_file=None if tokenizer is None else f"tokenizer{tokenizer.suffix}",
            loss=self._loss,
            val_losses=self._val_losses,
            step_figures=self._anomalies.state(),
            skipped_samples=[list(edges) for edges in self._data.order.skipped.ranges],
        )


def _describe(anomaly: Anomaly, report: StepReport, step: int) -> str:
    if anomaly.spike is not None:
        return f"spike at step {step}: {anomaly.spike}"
    if report.bad_ranks:
        return f"non-finite loss at step {step} on rank {', '.join(map(str, report.bad_ranks))}"
    return f"non-finite gradients at step {step} (the loss was {report.loss:.4f})"
