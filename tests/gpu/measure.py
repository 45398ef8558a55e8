"""Measures training on one GPU: speed and memory against bare PyTorch, the kernels used, host waits, exact resume.

Every part runs in a separate process, so that a failure or timeout affects no other part; results so far are written to
OUT/results.json and OUT/results.md after every part. Nothing is downloaded: the data are synthetic shards. `--dry` runs
the same code with tiny shapes on the CPU, without the measurements that need CUDA.

Run from the repository root: `python tests/gpu/measure.py --out OUT`. README.md in this folder describes the results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[2]))

from configs.load import load_config
from configs.schema import Config
from launch.distributed.process_group import start_distributed
from launch.distributed.topology import detect_topology
from launch.metrics.hardware import device_peak_flops
from launch.planning.plan import ASSUMED_VOCAB_SIZE
from launch.training.data import batch_geometry, open_data, sequence_length, training_batches
from model.attention.mha import causal_attention
from model.flops import flops_per_token
from tests.benchmarks.common import BareLoop, EngineLoop, seconds, write_shard

Results = dict[str, Any]
ROOT = Path(__file__).parents[2]

WARMUP_STEPS = 3
STEPS_PER_ROUND = 2
MAX_ROUNDS = 6
MIN_ROUNDS = 2
CHECK_RESERVE_SECONDS = 30  # kept for the checks after the rounds
START_SECONDS = 15  # of a part's time limit, for imports
RESUME_STEPS = 8
KERNELS_LISTED = 25
LOSS_TOLERANCE = 0.02  # relative; bf16 has 8 bits of precision
TARGET_RATIO = 0.95
TARGET_MFU = {"gpt-1b": 0.5}

DRY_OVERRIDES = [
    "model={dim: 64, num_layers: 2, num_heads: 2, head_dim: 32, ffn_dim: 128, max_seq_len: 64, vocab_size: 512}",
    "train.global_batch_tokens=1024",
    "train.micro_batch_size=4",
    "train.compile=false",
]
# Substrings of the names of kernels and CPU operators that identify the attention implementation.
ATTENTION_NAMES = {
    "flash": ("flash_fwd", "flash_bwd", "flash_attention"),
    "cudnn": ("cudnn_generated", "cudnn_attention"),
    "memory-efficient": ("fmha_", "efficient_attention"),
    "math": ("softmax_warp", "cunn_softmax", "attention_math"),
}


@dataclass(frozen=True)
class Part:
    """One process of the measurement.

    Attributes:
        min_seconds: The part is skipped if less time is left.
        max_seconds: The part is ended after this time.
    """

    name: str
    min_seconds: float
    max_seconds: float


PARTS = (Part("gpt-124m", 90, 170), Part("gpt-1b", 110, 260), Part("resume", 60, 150))


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part is None:
        run_parts(args)
        return
    results: Results = {}
    path = args.out / f"{args.part}.json"
    deadline = time.monotonic() + args.budget_seconds
    if args.part == "resume":
        attempt(results, path, "resume", lambda: measure_resume(args.dry, deadline))
    else:
        measure_training(args.part, args.dry, deadline, results, path)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json and results.md")
    parser.add_argument(
        "--budget-seconds", type=float, default=480, help="time limit; parts that do not fit are skipped"
    )
    parser.add_argument("--dry", action="store_true", help="check this script with tiny shapes on the CPU")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="parts to run; default: all")
    parser.add_argument("--part", choices=[part.name for part in PARTS], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.dry and not torch.cuda.is_available():
        parser.error("no CUDA device; --dry checks the script on the CPU")
    return args


def run_parts(args: argparse.Namespace) -> None:
    """Starts the parts one after the other and writes the results after each."""
    deadline = time.monotonic() + args.budget_seconds
    results: Results = {"environment": describe_environment(), "dry": args.dry}
    for part in PARTS:
        if args.only and part.name not in args.only:
            continue
        left = deadline - time.monotonic()
        if left < part.min_seconds and not args.dry:
            results[part.name] = {"skipped": f"{left:.0f} s left, {part.min_seconds:.0f} s needed"}
            progress(f"{part.name}: skipped, {left:.0f} s left")
        else:
            results[part.name] = run_part(part, args, min(left, part.max_seconds))
        write_results(args.out, results)
    progress(f"results in {args.out}")
    print((args.out / "results.md").read_text())


def run_part(part: Part, args: argparse.Namespace, limit_seconds: float) -> Results:
    """Runs one part; returns its results, which may be incomplete."""
    progress(f"{part.name}: at most {limit_seconds:.0f} s")
    path = args.out / f"{part.name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--out", str(args.out), "--part", part.name]
    command += ["--budget-seconds", str(limit_seconds - START_SECONDS), *(["--dry"] if args.dry else [])]
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if args.dry else {})}
    try:
        code: int | str = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=limit_seconds, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        code = f"ended after {limit_seconds:.0f} s"
    found: Results = json.loads(path.read_text()) if path.exists() else {}
    return found if code == 0 else {**found, "ended_early": code}


def measure_training(name: str, dry: bool, deadline: float, results: Results, path: Path) -> None:
    """Builds both loops from configs/NAME.yaml and runs all measurements."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"model.vocab_size={ASSUMED_VOCAB_SIZE}",
            f"run.dir={folder}",
            f"data.sources=[{{path: {folder}/shard}}]",
            "data.val_sources={}",
            "optim.warmup_steps=5",
            *(DRY_OVERRIDES if dry else []),
        ]
        if not dry and not attempt(results, path, "compile", try_compile):
            overrides.append("train.compile=false")
        config = load_config(ROOT / "configs" / f"{name}.yaml", overrides)
        num_steps = WARMUP_STEPS + MAX_ROUNDS * STEPS_PER_ROUND
        assert config.model.vocab_size is not None
        num_tokens = (num_steps + 4) * config.train.global_batch_tokens
        write_shard(Path(folder) / "shard", num_tokens, config.model.vocab_size)
        loops = Loops(config, num_steps)
        attempt(results, path, "setting", loops.describe)
        if attempt(results, path, "build", loops.build):
            attempt(results, path, "speed", lambda: loops.measure_speed(deadline - CHECK_RESERVE_SECONDS))
            attempt(results, path, "agreement", loops.compare_losses)
            attempt(results, path, "profile", loops.profile)
            attempt(results, path, "host_waits", loops.find_host_waits)
            attempt(results, path, "flash", loops.try_flash)
        loops.close()


class Loops:
    """The engine's loop and the bare loop with the same model and data, in one process.

    A loop's peak memory is that during its steps, minus what the other loop holds between steps.
    """

    def __init__(self, config: Config, num_steps: int) -> None:
        self._topology = detect_topology(os.environ)
        self._device = start_distributed(self._topology, config)
        self._data, self._config = open_data(config)
        self._num_steps = num_steps
        self._held_bytes: dict[str, int] = {}
        self._peak_bytes: dict[str, int] = {"engine": 0, "bare": 0}
        self._engine: EngineLoop | None = None

    def describe(self) -> Results:
        """Returns the settings of the measurement."""
        train, geometry = self._config.train, batch_geometry(self._config, self._topology.world_size)
        return {
            "precision": train.precision,
            "compile": train.compile,
            "zero_stage": self._config.deepspeed.zero_stage,
            "seq_len": sequence_length(self._config),
            "micro_batch_size": train.micro_batch_size,
            "accumulation": geometry.accumulation,
            "batch_tokens": train.global_batch_tokens,
            "vocab_size": self._config.model.vocab_size,
            "flops_per_token": flops_per_token(self._config.model, sequence_length(self._config)),
        }

    def build(self) -> Results:
        """Builds both loops and runs their first steps (compilation, optimizer state, autotuning)."""
        config, device = self._config, self._device
        geometry = batch_geometry(config, self._topology.world_size)
        with training_batches(self._data, config, geometry, 0, 0, device) as loader:
            batches = [next(loader) for _ in range(self._num_steps)]
        start_seconds, start_peak_bytes = {}, {}

        def engine() -> EngineLoop:
            return EngineLoop(config, self._data, self._topology, device)

        def bare() -> BareLoop:
            return BareLoop(config, batches, device)

        for name, make in (("engine", engine), ("bare", bare)):
            before = allocated_bytes()
            reset_peak()
            start = time.perf_counter()
            loop = make()
            start_peak_bytes[name] = peak_bytes() - before
            for _ in range(WARMUP_STEPS):
                loop.step()
            synchronize()
            start_seconds[name] = time.perf_counter() - start
            self._held_bytes[name] = allocated_bytes() - before
            if isinstance(loop, EngineLoop):
                self._engine = loop
            else:
                self._bare = loop
            progress(f"{name}: built and warm after {start_seconds[name]:.1f} s")
        return {"start_seconds": start_seconds, "start_peak_bytes": start_peak_bytes, "held_bytes": self._held_bytes}

    def measure_speed(self, deadline: float) -> Results:
        """Runs alternating rounds of both loops until `deadline`."""
        assert self._engine is not None
        loops = {"engine": self._engine, "bare": self._bare}
        step_seconds: dict[str, list[float]] = {name: [] for name in loops}
        for round_index in range(MAX_ROUNDS):
            if round_index >= MIN_ROUNDS and time.monotonic() > deadline:
                break
            for name, loop in loops.items():
                reset_peak()
                elapsed = seconds(lambda loop=loop: [loop.step() for _ in range(STEPS_PER_ROUND)])
                step_seconds[name].append(elapsed / STEPS_PER_ROUND)
                other = "bare" if name == "engine" else "engine"
                self._peak_bytes[name] = max(self._peak_bytes[name], peak_bytes() - self._held_bytes[other])
            progress(f"round {round_index + 1}: " + ", ".join(f"{k} {v[-1]:.3f} s" for k, v in step_seconds.items()))
        medians = {name: statistics.median(values) for name, values in step_seconds.items()}
        rates = {name: self._config.train.global_batch_tokens / median for name, median in medians.items()}
        peak = device_peak_flops(self._device, self._config.train.precision)
        per_token = flops_per_token(self._config.model, sequence_length(self._config))
        return {
            "step_seconds": step_seconds,
            "tokens_per_second": rates,
            "ratio_to_bare": rates["engine"] / rates["bare"],
            "mfu": {name: None if peak is None else rate * per_token / peak for name, rate in rates.items()},
            "peak_bytes": self._peak_bytes if self._device.type == "cuda" else None,
            "data_seconds": statistics.median(self._engine.data_seconds),
        }

    def compare_losses(self) -> Results:
        """Returns the largest relative differences of the two loops' losses and gradient norms."""
        assert self._engine is not None
        self._engine.read_pending()
        reports = self._engine.reports
        bare_losses = [float(loss) for loss in self._bare.losses]
        bare_norms = [float(norm) for norm in self._bare.grad_norms]
        pairs = list(zip([report.loss for report in reports], bare_losses, strict=True))
        norm_pairs = list(zip([report.grad_norm for report in reports], bare_norms, strict=True))
        return {
            "first_and_last_loss": [pairs[0], pairs[-1]],
            "loss_difference": largest_difference(pairs),
            "grad_norm_difference": largest_difference(norm_pairs),
            "agree": largest_difference(pairs) <= LOSS_TOLERANCE,
        }

    def profile(self) -> Results:
        """Returns the kernels of one step of the engine, their times, and the attention implementation."""
        assert self._engine is not None
        on_gpu = self._device.type == "cuda"
        activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[activity]) as profiler:
            elapsed = seconds(self._engine.step)
        times = {
            event.key: ((event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6, event.count)
            for event in profiler.key_averages()
            if not event.is_user_annotation  # these span kernels that are listed themselves
        }
        listed = sorted(times.items(), key=lambda item: -item[1][0])[:KERNELS_LISTED]
        attention = [kind for kind, parts in ATTENTION_NAMES.items() if any(contains(key, parts) for key in times)]
        return {
            "attention": attention,
            "step_seconds": elapsed,
            "busy_seconds": sum(spent for spent, _ in times.values()),
            "kernels": [{"name": key, "seconds": spent, "count": count} for key, (spent, count) in listed],
        }

    def find_host_waits(self) -> Results:
        """Returns where the host waits for the GPU during two steps of the engine.

        Only reading a report is expected to wait: for the previous step.
        """
        assert self._engine is not None
        with record_host_waits() as places:
            for _ in range(2):
                self._engine.step()
        ours = {place: count for place, count in places.items() if not place.startswith("deepspeed")}
        return {
            "ours": ours,
            "deepspeed": {place: count for place, count in places.items() if place.startswith("deepspeed")},
            "unexpected": sorted(place for place in ours if not place.endswith(" read")),
        }

    def try_flash(self) -> Results:
        """Checks that the flash kernel supports this model's heads; otherwise SDPA raises."""
        model, train = self._config.model, self._config.train
        assert model.num_kv_heads is not None
        assert model.head_dim is not None
        sizes = [model.num_heads, model.num_kv_heads, model.num_kv_heads]
        length = sequence_length(self._config)
        q, k, v = (
            torch.randn(train.micro_batch_size, heads, length, model.head_dim, device=self._device).bfloat16()
            for heads in sizes
        )
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            causal_attention(q, k, v)
        return {"usable": True}

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        torch.distributed.destroy_process_group()


def measure_resume(dry: bool, deadline: float) -> Results:
    """Checks that 4 steps and, after a restart, 4 more give exactly the losses and weights of 8 (run.deterministic).

    Raises:
        subprocess.TimeoutExpired: The three runs do not finish before `deadline`.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = write_resume_config(folder, dry)
        half = f"train.stop_step={RESUME_STEPS // 2}"
        for overrides in (["run.name=whole"], ["run.name=parts", half], ["run.name=parts"]):
            progress(f"train.py {' '.join(overrides)}")
            command = [sys.executable, "train.py", str(config), *overrides]
            left = deadline - time.monotonic()
            finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=left)
            if finished.returncode != 0:
                raise RuntimeError(f"train.py {overrides} failed:\n{finished.stdout[-2000:]}{finished.stderr[-4000:]}")
        whole, parts = (read_records(folder / run) for run in ("whole", "parts"))
        differing = differing_tensors(folder / "whole", folder / "parts")
    same_records = computed_values(whole) == computed_values(parts)
    return {
        "losses": [record["loss"] for record in whole],
        "same_records": same_records,
        "differing_tensors": differing,
        "identical": same_records and not differing and len(whole) == RESUME_STEPS,
    }


def write_resume_config(folder: Path, dry: bool) -> Path:
    """Writes the configuration of a tiny bf16 run at ZeRO stage 1, with grouped heads that flash attention supports."""
    shard = str(write_shard(folder / "shard", 400_000, 1024))
    settings = {
        "run": {"dir": str(folder), "seed": 1, "deterministic": True},
        "model": {"vocab_size": 1024, "dim": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2},
        "optim": {"lr": 1e-3, "warmup_steps": 2},
        "data": {"sources": [{"path": shard}], "val_sources": {"same": shard}, "seq_len": 64 if dry else 256},
        "train": {"steps": RESUME_STEPS, "global_batch_tokens": 4096, "micro_batch_size": 4, "precision": "bf16"},
        "deepspeed": {"zero_stage": 1},
        "validation": {"every_steps": RESUME_STEPS, "batches": 1},
    }
    path = folder / "resume.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def computed_values(records: list[Results]) -> list[float]:
    """Returns every step's loss and gradient norm, and the last validation loss."""
    return [record[key] for record in records for key in ("loss", "grad_norm")] + [records[-1]["val_loss"]]


def read_records(run: Path) -> list[Results]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def differing_tensors(first: Path, second: Path) -> list[str]:
    """Returns the names of tensors in the last checkpoints that are not bit-identical."""
    from safetensors.torch import load_file

    checkpoints = [run / "checkpoints" / f"step_{RESUME_STEPS:08d}" for run in (first, second)]
    files = [{path.name: load_file(path) for path in folder.glob("*.safetensors")} for folder in checkpoints]
    tensors = [
        {f"{file}/{name}": value for file, held in part.items() for name, value in held.items()} for part in files
    ]
    names = sorted(tensors[0].keys() | tensors[1].keys())
    assert names, f"no tensors in {checkpoints[0]}"
    return [name for name in names if not is_same(tensors[0].get(name), tensors[1].get(name))]


def is_same(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    return first is not None and second is not None and torch.equal(first, second)


@contextlib.contextmanager
def record_host_waits() -> Iterator[Counter[str]]:
    """Counts where the host waits for the GPU, by the "FILE:LINE FUNCTION" that `caller` returns.

    Torch warns about synchronising operations such as .item() and copies from pageable memory, but not about calls of
    the synchronise functions, so these are wrapped.
    """
    places: Counter[str] = Counter()

    def note_warning(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchronizing" in str(message):
            places[caller()] += 1

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            places[caller()] += 1
            return function(*args, **kwargs)

        return wrapper

    functions = [(torch.cuda, "synchronize"), (torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize")]
    originals = [(owner, name, getattr(owner, name)) for owner, name in functions]
    on_gpu = torch.cuda.is_available()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note_warning
        for owner, name, function in originals:
            setattr(owner, name, noting(function))
        if on_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            if on_gpu:
                torch.cuda.set_sync_debug_mode("default")
            for owner, name, function in originals:
                setattr(owner, name, function)


def caller() -> str:
    """Returns the innermost frame in launch, data, model or DeepSpeed; else the innermost one outside this file."""
    skipped = (__file__, warnings.__file__)
    frames = [frame for frame in reversed(traceback.extract_stack()) if frame.filename not in skipped]
    for frame in frames:
        path = Path(frame.filename)
        if "deepspeed" in path.parts:
            package = Path("deepspeed", *path.parts[path.parts.index("deepspeed") + 1 :])
            return f"{package}:{frame.lineno} {frame.name}"
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ("launch", "data", "model"):
            return f"{path.relative_to(ROOT)}:{frame.lineno} {frame.name}"
    return f"{frames[0].filename}:{frames[0].lineno} {frames[0].name}"


def try_compile() -> Results:
    """Compiles and runs a small function, since torch.compile needs a C compiler and Python's headers."""
    x = torch.randn(1024, device="cuda")
    compiled = torch.compile(lambda y: torch.nn.functional.silu(y) * 2)
    compiled(x)
    return {"works": True}


def largest_difference(pairs: list[tuple[float, float]]) -> float:
    """Returns the largest relative difference; infinite if a value is non-finite."""
    if not all(map(math.isfinite, (value for pair in pairs for value in pair))):
        return math.inf
    return max(abs(first - second) / abs(second) for first, second in pairs)


def contains(name: str, parts: tuple[str, ...]) -> bool:
    return any(part in name.lower() for part in parts)


def allocated_bytes() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def peak_bytes() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def attempt(results: Results, path: Path, name: str, measure: Callable[[], Results]) -> bool:
    """Records the result or the error of `measure`, and writes all results so far. Returns whether it succeeded."""
    start = time.perf_counter()
    try:
        results[name] = measure()
    except Exception:  # the other measurements continue after any error
        results[name] = {"error": traceback.format_exc()}
    failed = "error" in results[name]
    progress(f"{path.stem}: {name} {'failed' if failed else 'done'} ({time.perf_counter() - start:.1f} s)")
    path.write_text(json.dumps(results, indent=1))
    return not failed


def progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def describe_environment() -> Results:
    """Returns the versions and the device."""
    from importlib.metadata import version

    on_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "deepspeed": version("deepspeed"),
    }


def write_results(out: Path, results: Results) -> None:
    """Writes results.json and its readable form, results.md."""
    (out / "results.json").write_text(json.dumps(results, indent=1))
    environment = ", ".join(f"{key} {value}" for key, value in results["environment"].items())
    lines = ["# Training on one GPU", "", environment, ""]
    if results["dry"]:
        lines += ["A dry run with tiny shapes: the values are meaningless.", ""]
    lines += speed_lines(results)
    lines += check_lines(results)
    for name in TRAINING_PARTS:
        lines += kernel_lines(name, results.get(name, {}))
    lines += problem_lines(results)
    (out / "results.md").write_text("\n".join(lines) + "\n")


TRAINING_PARTS = tuple(part.name for part in PARTS if part.name != "resume")


def speed_lines(results: Results) -> list[str]:
    lines = [
        "| configuration | loop | tokens/s | step, s | vs bare | MFU | peak memory, GB | peak at start, GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for part in TRAINING_PARTS:
        speed, build = results.get(part, {}).get("speed", {}), results.get(part, {}).get("build", {})
        if "tokens_per_second" not in speed:
            continue
        for loop, rate in speed["tokens_per_second"].items():
            cells = [
                part,
                loop,
                f"{rate:,.0f}",
                f"{statistics.median(speed['step_seconds'][loop]):.4f}",
                f"{rate / speed['tokens_per_second']['bare']:.3f}",
                "-" if speed["mfu"][loop] is None else f"{speed['mfu'][loop]:.1%}",
                "-" if speed["peak_bytes"] is None else f"{speed['peak_bytes'][loop] / 1e9:.1f}",
                "-" if speed["peak_bytes"] is None else f"{build['start_peak_bytes'][loop] / 1e9:.1f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def check_lines(results: Results) -> list[str]:
    """One line per check, with the expectation and the result."""
    rows: list[tuple[str, str, bool]] = []
    for part in TRAINING_PARTS:
        found = results.get(part, {})
        speed, profile, waits = (found.get(key, {}) for key in ("speed", "profile", "host_waits"))
        if "ratio_to_bare" in speed:
            ratio, mfu = speed["ratio_to_bare"], speed["mfu"]["engine"]
            rows.append((f"{part}: at least {TARGET_RATIO} of bare PyTorch", f"{ratio:.3f}", ratio >= TARGET_RATIO))
            if part in TARGET_MFU and mfu is not None:
                rows.append((f"{part}: MFU at least {TARGET_MFU[part]:.0%}", f"{mfu:.1%}", mfu >= TARGET_MFU[part]))
        if "agree" in found.get("agreement", {}):
            difference = found["agreement"]["loss_difference"]
            rows.append(
                (f"{part}: losses within {LOSS_TOLERANCE:.0%}", f"{difference:.2e}", difference <= LOSS_TOLERANCE)
            )
        if "attention" in profile:
            kinds = profile["attention"]
            met = bool(kinds) and "math" not in kinds
            rows.append((f"{part}: fused attention only", ", ".join(kinds) or "no attention kernel", met))
        if "unexpected" in waits and not results["dry"]:
            unexpected = waits["unexpected"]
            rows.append((f"{part}: no unexpected host waits", ", ".join(unexpected) or "none", not unexpected))
    resume = results.get("resume", {}).get("resume", {})
    if "identical" in resume:
        rows.append(("resume is bit-identical", str(resume["identical"]), resume["identical"]))
    return [
        "| check | found | met |",
        "|---|---|---|",
        *(f"| {check} | {found} | {'yes' if met else 'no'} |" for check, found, met in rows),
        "",
    ]


def kernel_lines(part: str, found: Results) -> list[str]:
    """The kernels of a step, and the host waits."""
    lines = []
    profile, waits = found.get("profile", {}), found.get("host_waits", {})
    if "kernels" in profile:
        lines += [
            f"## {part}: kernels of one step",
            "",
            f"The step took {profile['step_seconds']:.3f} s under the profiler, the device was busy for "
            f"{profile['busy_seconds']:.3f} s of it.",
            "",
            "| kernel | ms | calls |",
            "|---|---|---|",
        ]
        for kernel in profile["kernels"]:
            name = kernel["name"].replace("|", "/")[:100]
            lines.append(f"| `{name}` | {kernel['seconds'] * 1e3:.2f} | {kernel['count']} |")
        lines.append("")
    if "ours" in waits:
        lines += [f"Host waits of {part} in two steps:", ""]
        places = {**waits["ours"], **waits["deepspeed"]}
        lines += [f"- {count} x `{place}`" for place, count in places.items()] or ["- none"]
        lines.append("")
    return lines


def problem_lines(results: Results) -> list[str]:
    """The parts that were skipped, ended early or failed."""
    lines = []
    for part in (part.name for part in PARTS):
        for name, found in results.get(part, {}).items():
            if name in ("skipped", "ended_early"):
                lines.append(f"- {part}: {name.replace('_', ' ')}: {found}")
            elif "error" in found:
                lines += [f"- {part}: {name} failed:", "", "```", found["error"].rstrip(), "```", ""]
    return ["## Not measured", "", *lines, ""] if lines else []


if __name__ == "__main__":
    main()
