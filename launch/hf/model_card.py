"""README.md of an exported folder: what the run recorded about the model, and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from configs.schema import Config, ModelConfig
from data.errors import DataError
from data.source import TokenSource
from launch.checkpoint.files import TrainingState
from launch.hf.architecture import OWN, choose_architecture
from launch.hf.layouts import Shapes
from launch.training.data import fingerprint, list_sources, sequence_length

PICTURE = "loss.png"
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
        dtype: `bf16` or `fp32`, of the exported weights.
        remarks: what else a user should know; a missing picture is added to it.
    """
    has_picture = False
    records = read_curve(checkpoint, state)
    if records:
        has_picture = draw_curve(records, folder / PICTURE)
        if not has_picture:
            remarks.append("no picture of the loss was drawn, since matplotlib is not installed")
    num_parameters = sum(math.prod(shape) for shape in shapes.values())
    blocks = [
        _head(config, state, num_parameters),
        _usage(config.model, state, dtype, (folder / "tokenization_steadyhead.py").exists()),
        _table("Model", _model_rows(config.model, num_parameters)),
    ]
    if state.step:
        blocks += [
            _table("Training", _training_rows(config, state)),
            _results(state, has_picture),
            _data(config, state),
        ]
    blocks.append(_limits(remarks))
    (folder / "README.md").write_text("\n".join(blocks), encoding="utf-8")


def read_curve(checkpoint: Path, state: TrainingState) -> _Records:
    """The run's records up to the checkpoint's step; none unless they end with the checkpoint's own loss."""
    path = checkpoint.resolve().parent.parent / "metrics.jsonl"
    if not state.step or not path.is_file():
        return []
    records = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # cut off by a kill
            if isinstance(record, dict) and {"step", "loss"} <= record.keys() and record["step"] <= state.step:
                # A long run has a million lines, of which a picture needs little.
                records.append({key: record[key] for key in _CURVE_KEYS & record.keys()})
    is_ours = bool(records) and records[-1]["step"] == state.step and records[-1]["loss"] == state.loss
    return records if is_ours else []


def draw_curve(records: _Records, path: Path) -> bool:
    """Training and validation loss over the steps as a picture; False where matplotlib is missing."""
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


def _head(config: Config, state: TrainingState, num_parameters: int) -> str:
    origin = (
        f"trained with Steadyhead for {state.step:,} steps"
        if state.step
        else "imported into Steadyhead, which has not trained it"
    )
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n"
        f"# {config.run.name}\n\nA language model of {num_parameters:,} parameters, {origin}.\n"
    )


def _usage(model: ModelConfig, state: TrainingState, dtype: str, has_own_tokenizer: bool) -> str:
    is_own = choose_architecture(model) == OWN
    trust = ", trust_remote_code=True" if is_own else ""
    own = (
        "\nNo architecture of `transformers` computes this model, so `modeling_steadyhead.py` in this folder does:"
        " read it before you trust it.\n"
        if is_own
        else ""
    )
    tokenizer, prompt = "", ""
    if state.tokenizer_file:
        trust_tokenizer = ", trust_remote_code=True" if has_own_tokenizer else ""
        tokenizer = f"tokenizer = AutoTokenizer.from_pretrained(folder{trust_tokenizer})\n"
        prompt = "The tokenizer adds no token before or after a text.\n"
        if has_own_tokenizer:
            prompt += (
                "With `trust_remote_code=True`, `tokenization_steadyhead.py` in this folder asks SentencePiece itself."
                " Without it, a text that can be split in two equally likely ways (a long run of one character) may be"
                " split in the other one.\n"
            )
    return (
        "## Use\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'folder = "."\nmodel = AutoModelForCausalLM.from_pretrained(folder{trust})  # weights in {dtype}\n'
        f"{tokenizer}```\n{own}{prompt}"
    )


def _model_rows(model: ModelConfig, num_parameters: int) -> Iterator[tuple[str, object]]:
    attention = model.attention
    yield "architecture", choose_architecture(model)
    yield "parameters", f"{num_parameters:,}"
    yield "layers, width, feed-forward width", f"{model.num_layers}, {model.dim}, {model.ffn_dim}"
    yield "vocabulary (rows of the embedding)", f"{model.vocab_size:,}"
    yield "embeddings", "tied" if model.tie_embeddings else "untied"
    yield "longest context in tokens", f"{model.max_seq_len:,}"
    yield "rotary base, norm epsilon", f"{model.rope_theta:g}, {model.norm_eps:g}"
    if attention.kind == "mla":
        mla = attention.mla
        yield (
            "attention",
            f"latent, {model.num_heads} heads of {mla.nope_dim} + {mla.rope_dim} rotated, values of {mla.value_dim}; "
            f"latents: {mla.q_latent_dim or 'none'} for queries, {mla.kv_latent_dim} for keys and values, "
            f"{'normed' if mla.latent_norm else 'not normed'}",
        )
    else:
        yield "attention", f"{model.num_heads} query heads, {model.num_kv_heads} key/value heads of {model.head_dim}"
    names = {
        "norms of queries and keys": attention.qk_norm,
        f"softcap {attention.softcap}": attention.softcap is not None,
        "Scalable-Softmax": attention.ssmax,
        "learned sink": attention.sink,
        "gated output": attention.gated,
    }
    options = [name for name, is_on in names.items() if is_on]
    if options:
        yield "options of attention", ", ".join(options)


def _training_rows(config: Config, state: TrainingState) -> Iterator[tuple[str, object]]:
    train, optim, control = config.train, config.optim, config.qk_control
    assert config.data.seq_len is not None
    yield "steps (of the schedule's horizon)", f"{state.step:,} of {train.steps:,}"
    yield "tokens seen", f"{state.consumed_samples * config.data.seq_len:,}"
    yield "sequence length, tokens of a step", f"{config.data.seq_len:,}, {train.global_batch_tokens:,}"
    if config.run.init_from is not None:
        yield "started from the weights of", Path(config.run.init_from).name
    yield (
        "optimizer",
        f"{optim.name}, betas {optim.betas}, weight decay {optim.weight_decay:g}, clipping {optim.grad_clip:g}",
    )
    yield (
        "learning rate",
        f"{optim.lr:g}, {optim.schedule}, {optim.warmup_steps} warm-up steps, minimum {optim.min_lr_ratio:g} of it",
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


def _results(state: TrainingState, has_picture: bool) -> str:
    lines = [
        "## Loss",
        "In nats per token.",
        "",
        "| | loss |",
        "|---|---|",
        f"| training, last step | {state.loss:.4f} |",
    ]
    lines += [f"| validation, {name} | {loss:.4f} |" for name, loss in state.val_losses.items()]
    if has_picture:
        lines += ["", f"![Loss over the steps]({PICTURE})"]
    return "\n".join(lines) + "\n"


def _data(config: Config, state: TrainingState) -> str:
    lines = [
        "## Data",
        "The fingerprint is a hash of the hashes in the source's manifest (of samples, where it has none).",
        "",
        "| source | weight | documents | tokens | fingerprint |",
        "|---|---|---|---|---|",
    ]
    paths, phases = list_sources(config)
    for number, (path, saved) in enumerate(zip(paths.values(), state.data_fingerprints, strict=False)):
        documents, tokens = _counts(path, saved)
        weights = ", then ".join(f"{phase.weight_of(number):g}" for phase in phases)
        lines.append(f"| {_short(path)} | {weights} | {documents} | {tokens} | `{saved}` |")
    if len(phases) > 1:
        changes = ", ".join(f"{phase.first_sample * sequence_length(config):,}" for phase in phases[1:])
        lines += ["", f"The weights change after so many tokens: {changes}."]
    if state.tokenizer_sha256 is not None:
        lines += ["", f"Tokenizer: SHA-256 `{state.tokenizer_sha256}`."]
    return "\n".join(lines) + "\n"


def _counts(path: str, saved_fingerprint: str) -> tuple[str, str]:
    """Documents and tokens of a source, as far as it is still there and still the same."""
    try:
        source = TokenSource.open(path)
        if fingerprint(source) != saved_fingerprint:
            return "?", "?"
    except (DataError, OSError):
        return "?", "?"
    documents = "?" if source.manifest is None else f"{source.manifest.num_documents:,}"
    return documents, f"{source.num_tokens:,}"


def _short(path: str) -> str:
    """The end of a path: the rest tells only whose machine it was."""
    return "/".join(Path(path).parts[-2:])


def _limits(remarks: list[str]) -> str:
    lines = [
        "## What is not known",
        "The run records neither the origin and licence of the texts nor what they were filtered for, and no evaluation"
        " beyond the losses above. Expect the model to repeat and invent what such texts say.",
        *(f"\nNote: {remark}." for remark in remarks),
    ]
    return "\n".join(lines) + "\n"


def _table(title: str, rows: Iterable[tuple[str, object]]) -> str:
    return "\n".join([f"## {title}", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]) + "\n"
