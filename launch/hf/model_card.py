"""README.md of an exported folder: what the run recorded about the model, and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.schema import Config, ModelConfig
from data.errors import DataError
from data.source import TokenSource
from launch.checkpoint.files import TrainingState
from launch.hf.architecture import OWN, choose_architecture
from launch.hf.layouts import Shapes
from launch.reporting.render import render
from launch.training.data import fingerprint, list_sources, sequence_length

PLOT = "loss.png"
_CURVE_KEYS = {"step", "loss", "val_loss"}
_Records = list[dict[str, Any]]
_FEW_POINTS = 50


def write_model_card(
    folder: Path,
    checkpoint: Path,
    config: Config,
    state: TrainingState,
    shapes: Shapes,
    dtype: str,
    remarks: list[str],
) -> None:
    """Writes README.md, and loss.png where the run's metrics lie beside the checkpoint.

    Args:
        dtype: The type of the exported weights, `bf16` or `fp32`.
        remarks: What else a user should know; a missing plot is added to it.
    """
    records = read_curve(checkpoint, state)
    has_plot = bool(records) and draw_curve(records, folder / PLOT)
    if records and not has_plot:
        remarks.append("the loss was not plotted, since matplotlib is not installed")
    num_parameters = sum(math.prod(shape) for shape in shapes.values())
    values: dict[str, Any] = {
        "name": config.run.name,
        "num_parameters": f"{num_parameters:,}",
        "num_steps": f"{state.step:,}" if state.step else None,
        "dtype": dtype,
        "has_own_model": choose_architecture(config.model) == OWN,
        "has_tokenizer": bool(state.tokenizer_file),
        "has_own_tokenizer": (folder / "tokenization_steadyhead.py").exists(),
        "model_rows": list(_model_rows(config.model, num_parameters)),
        "remarks": remarks,
    }
    if state.step:
        values |= {
            "training_rows": list(_training_rows(config, state)),
            "loss_rows": list(_loss_rows(state)),
            "plot": PLOT if has_plot else None,
            **data_values(config, state),
        }
    (folder / "README.md").write_text(render("model_card.md.j2", **values), encoding="utf-8")


def read_curve(checkpoint: Path, state: TrainingState) -> _Records:
    """Returns the run's records up to the checkpoint's step, or none unless they end with the checkpoint's loss."""
    path = checkpoint.resolve().parent.parent / "metrics.jsonl"
    if not state.step or not path.is_file():
        return []
    records = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # truncated by a kill
            if isinstance(record, dict) and {"step", "loss"} <= record.keys() and record["step"] <= state.step:
                # A long run has a million records, of which the plot needs few keys.
                records.append({key: record[key] for key in _CURVE_KEYS & record.keys()})
    is_ours = bool(records) and records[-1]["step"] == state.step and records[-1]["loss"] == state.loss
    return records if is_ours else []


def draw_curve(records: _Records, path: Path) -> bool:
    """Plots training and validation loss over the steps; returns False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 3.6), dpi=130, layout="constrained")
    axes = figure.subplots()
    marker = "." if len(records) <= _FEW_POINTS else ""
    steps, losses = [record["step"] for record in records], [record["loss"] for record in records]
    axes.plot(steps, losses, linewidth=0.8, color="tab:blue", marker=marker, label="training")
    validated = [record for record in records if "val_loss" in record]
    if validated:
        points = [record["step"] for record in validated], [record["val_loss"] for record in validated]
        axes.plot(*points, marker="o", markersize=3.5, color="tab:orange", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    return True


def _model_rows(model: ModelConfig, num_parameters: int) -> Iterator[tuple[str, object]]:
    attention = model.attention
    yield "architecture", choose_architecture(model)
    yield "parameters", f"{num_parameters:,}"
    yield "layers, width, feed-forward width", f"{model.num_layers}, {model.dim}, {model.ffn_dim}"
    yield "vocabulary (rows of the embedding)", f"{model.vocab_size:,}"
    yield "embeddings", "tied" if model.tie_embeddings else "untied"
    yield "maximum context in tokens", f"{model.max_seq_len:,}"
    yield "rotary base, norm epsilon", f"{model.rope_theta:g}, {model.norm_eps:g}"
    if attention.kind == "mla":
        mla = attention.mla
        yield (
            "attention",
            f"latent, {model.num_heads} heads of {mla.nope_dim} + {mla.rope_dim} (rotary), values of {mla.value_dim}; "
            f"latents: {mla.q_latent_dim or 'none'} for queries, {mla.kv_latent_dim} for keys and values, "
            f"{'normalised' if mla.latent_norm else 'not normalised'}",
        )
    else:
        yield "attention", f"{model.num_heads} query heads, {model.num_kv_heads} key/value heads of {model.head_dim}"
    names = {
        "query/key norms": attention.qk_norm,
        f"softcap {attention.softcap}": attention.softcap is not None,
        "Scalable-Softmax": attention.ssmax,
        "learned sinks": attention.sink,
        "gated output": attention.gated,
    }
    options = [name for name, is_on in names.items() if is_on]
    if options:
        yield "attention options", ", ".join(options)


def _training_rows(config: Config, state: TrainingState) -> Iterator[tuple[str, object]]:
    train, optim, control = config.train, config.optim, config.qk_control
    assert config.data.seq_len is not None
    yield "steps (of the schedule's horizon)", f"{state.step:,} of {train.steps:,}"
    yield "tokens seen", f"{state.consumed_samples * config.data.seq_len:,}"
    yield "sequence length, tokens per step", f"{config.data.seq_len:,}, {train.global_batch_tokens:,}"
    if config.run.init_from is not None:
        yield "initialised from the weights of", Path(config.run.init_from).name
    yield (
        "optimizer",
        f"{optim.name}, betas {optim.betas}, weight decay {optim.weight_decay:g}, "
        f"gradient clipping {optim.grad_clip:g}",
    )
    yield (
        "learning rate",
        f"{optim.lr:g}, {optim.schedule}, {optim.warmup_steps} warm-up steps, "
        f"minimum {optim.min_lr_ratio:g} times the peak",
    )
    policy = f"{control.policy}, alpha {control.alpha:g}" if control.chosen.uses_alpha else control.policy
    if control.max_ratio is not None:
        policy += f", ratios up to {control.max_ratio:g}"
    if control.clip_threshold is not None:
        policy += f", QK-Clip at {control.clip_threshold:g}"
    yield "query/key policy (`qk_control`)", policy
    yield "precision, z-loss", f"{train.precision}, {train.z_loss:g}"
    yield "ZeRO stage, ranks", f"{state.zero_stage}, {state.num_ranks}"
    yield "seed", config.run.seed


def _loss_rows(state: TrainingState) -> Iterator[tuple[str, str]]:
    yield "training, last step", f"{state.loss:.4f}"
    for name, loss in state.val_losses.items():
        yield f"validation, {name}", f"{loss:.4f}"


def data_values(config: Config, state: TrainingState) -> dict[str, Any]:
    """Returns what the template needs for the section about the data."""
    paths, phases = list_sources(config)
    rows = []
    for number, (path, saved) in enumerate(zip(paths.values(), state.data_fingerprints, strict=False)):
        weights = ", then ".join(f"{phase.weight_of(number):g}" for phase in phases)
        rows.append((_short(path), weights, *_counts(path, saved), f"`{saved}`"))
    return {
        "source_rows": rows,
        "weight_changes": [f"{phase.first_sample * sequence_length(config):,}" for phase in phases[1:]],
        "tokenizer_sha256": state.tokenizer_sha256,
    }


def _counts(path: str, saved_fingerprint: str) -> tuple[str, str]:
    """Returns the documents and tokens of a source; `?` where it is missing or has changed."""
    try:
        source = TokenSource.open(path)
        if fingerprint(source) != saved_fingerprint:
            return "?", "?"
    except (DataError, OSError):
        return "?", "?"
    documents = "?" if source.manifest is None else f"{source.manifest.num_documents:,}"
    return documents, f"{source.num_tokens:,}"


def _short(path: str) -> str:
    """Returns the last two parts of a path; the rest only describes the machine."""
    return "/".join(Path(path).parts[-2:])
