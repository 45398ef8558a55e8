"""Opens the configured data, and creates the batches of one rank."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import xxhash

from configs.errors import ConfigError
from configs.schema import Config
from data.errors import DataError
from data.files import update_with_samples
from data.indexed import bin_path
from data.loader import BatchGeometry, MicroBatch, StepLoader, validation_batches
from data.order import Phase, SampleOrder
from data.packing import Packing
from data.skips import SkippedSamples
from data.source import TokenSource
from launch.engine.deepspeed_config import accumulation_steps


@dataclass(frozen=True)
class TrainingData:
    """The opened data of a run. Shards without a manifest come from other programs.

    Attributes:
        sources: The training sources of all phases; see `list_sources`.
        source_keys: For each training source, the key under which it is first configured.
        val_sources: The validation sets by name.
        order: The order of the samples.
        num_token_ids: The number of valid token ids: the tokenizer's vocabulary, or the model's without a manifest.
        tokenizer: The tokenizer's file; None if there is neither a manifest nor data.tokenizer.
        tokenizer_sha256: The hash of the tokenizer; None if there is none.
        fingerprints: The fingerprint of each training source; see `fingerprint`.
    """

    sources: list[TokenSource]
    source_keys: list[str]
    val_sources: dict[str, TokenSource]
    order: SampleOrder
    num_token_ids: int
    tokenizer: Path | None
    tokenizer_sha256: str | None
    fingerprints: tuple[str, ...]

    def skipping(self, skipped: SkippedSamples) -> TrainingData:
        """Returns the same data without these samples."""
        return replace(self, order=self.order.skipping(skipped))


def open_data(config: Config) -> tuple[TrainingData, Config]:
    """Opens all sources and completes the configuration with the vocabulary size.

    Raises:
        ConfigError: A source cannot be used; there is one line for each, with its key.
    """
    seq_len = sequence_length(config)
    problems: list[str] = []
    paths, phases = list_sources(config)
    sources: list[TokenSource] = []
    for key, path in paths.items():
        sources += _open(f"{key}.path", path, seq_len, problems)
    val_sources: dict[str, TokenSource] = {}
    for name, path in config.data.val_sources.items():
        for source in _open(f"data.val_sources.{name}", path, seq_len, problems):
            val_sources[name] = source
    if problems:
        raise ConfigError(problems)
    opened = [*sources, *val_sources.values()]
    tokenizer, sha256 = _common_tokenizer(config, opened)
    vocab_size, num_token_ids = _vocabulary(config, opened)
    num_windows = [source.num_windows(seq_len) for source in sources]
    order = SampleOrder(num_windows, phases[0].weights, config.run.seed, phases[1:])
    fingerprints = tuple(fingerprint(source) for source in sources)
    data = TrainingData(sources, list(paths), val_sources, order, num_token_ids, tokenizer, sha256, fingerprints)
    model = config.model.model_copy(update={"vocab_size": vocab_size})
    eod_ids = [source.manifest.eod_id for source in opened if source.manifest is not None]
    eod_id = config.data.eod_id if config.data.eod_id is not None else next(iter(eod_ids), None)
    chosen = config.data.model_copy(update={"eod_id": eod_id})
    return data, config.model_copy(update={"model": model, "data": chosen})


def list_sources(config: Config) -> tuple[dict[str, str], list[Phase]]:
    """Returns the sources of all phases, and the phases, of which data.sources is the first.

    A phase that names the path of an earlier phase continues that source; the n-th mention of a path in a phase
    continues the n-th source with that path.

    Returns:
        Key (`data.sources.0`, `data.phases.0.sources.1`) -> path of each source, in order of appearance; and the
        phases, which refer to sources by their index.
    """
    entries = [("data.sources", 0, config.data.sources)]
    for index, later in enumerate(config.data.phases):
        first_sample = -(-later.start_tokens // sequence_length(config))
        entries.append((f"data.phases.{index}.sources", first_sample, later.sources))
    paths: dict[str, str] = {}
    phases: list[Phase] = []
    positions: dict[tuple[str, int], int] = {}
    for key, first_sample, sources in entries:
        mentions: Counter[str] = Counter()
        chosen = []
        for index, source in enumerate(sources):
            mention = (source.path, mentions[source.path])
            mentions[source.path] += 1
            if mention not in positions:
                positions[mention] = len(paths)
                paths[f"{key}.{index}"] = source.path
            chosen.append(positions[mention])
        phases.append(Phase(first_sample, tuple(chosen), tuple(source.weight for source in sources)))
    return paths, phases


def past_phases(config: Config, fingerprints: Sequence[str], consumed_samples: int) -> list[str]:
    """Describes the entries of `data.phases` that affected the first samples, one line each, for a comparison.

    A source is identified by its index, which shows where it was used before, and by its fingerprint.
    """
    _, phases = list_sources(config)
    texts = []
    for phase in phases[1:]:
        if phase.first_sample < consumed_samples:
            sources = ", ".join(
                f"source {number} ({fingerprints[number][:8]}) with weight {weight:g}"
                for number, weight in zip(phase.sources, phase.weights, strict=True)
            )
            texts.append(f"from token {phase.first_sample * sequence_length(config):,} {sources}")
    return texts


def sequence_length(config: Config) -> int:
    """The number of tokens in a training sample, from a resolved configuration."""
    assert config.data.seq_len is not None
    return config.data.seq_len


def batch_geometry(config: Config, world_size: int) -> BatchGeometry:
    """The layout of a global batch over ranks, micro-batches and accumulation."""
    samples_per_step = config.train.global_batch_tokens // sequence_length(config)
    accumulation = accumulation_steps(config, world_size)
    return BatchGeometry(samples_per_step, config.train.micro_batch_size, accumulation, world_size)


def training_batches(
    data: TrainingData, config: Config, geometry: BatchGeometry, rank: int, first_sample: int, device: torch.device
) -> StepLoader:
    """Loads this rank's batches, starting at the run's sample `first_sample`."""
    return StepLoader(
        data.sources,
        data.order,
        geometry,
        seq_len=sequence_length(config),
        rank=rank,
        first_sample=first_sample,
        vocab_size=data.num_token_ids,
        pin_for=device if device.type == "cuda" else None,
        packing=_packing(config),
    )


def probe_batch(data: TrainingData, config: Config) -> torch.Tensor:
    """Returns the tokens (B, T) of the first training samples, on which attention is measured, on all ranks.

    Documents are not masked, regardless of data.mask_documents. Skipped samples are included, so that the batch stays
    the same for the whole run.
    """
    num_sequences, seq_len = config.monitor.probe_sequences, sequence_length(config)
    located = data.order.skipping(SkippedSamples()).locate(np.arange(num_sequences))
    windows = np.empty((num_sequences, seq_len + 1), np.int64)
    for row, (source, window) in enumerate(zip(located.source.tolist(), located.window.tolist(), strict=True)):
        data.sources[source].read_window(window, seq_len, windows[row])
    return torch.from_numpy(windows[:, :-1].copy())


def fixed_batches(
    data: TrainingData, source: TokenSource, config: Config, geometry: BatchGeometry, rank: int
) -> Iterator[MicroBatch]:
    """Yields this rank's share of a validation set's fixed windows."""
    return validation_batches(
        source,
        sequence_length(config),
        num_samples=config.validation.batches * geometry.samples_per_step,
        micro_batch_size=geometry.micro_batch_size,
        rank=rank,
        world_size=geometry.world_size,
        vocab_size=data.num_token_ids,
        packing=_packing(config),
    )


def _packing(config: Config) -> Packing:
    return Packing(config.data.mask_documents, config.data.eod_loss)


def fingerprint(source: TokenSource) -> str:
    """Returns a hash of a source's content, which does not depend on its path.

    With a manifest, the hash covers the hashes that it lists. Foreign shards may hold terabytes, so their hash covers
    the size of each and evenly spaced samples of its tokens.
    """
    digest = xxhash.xxh3_128()
    if source.manifest is not None:
        for file in source.manifest.files:
            digest.update(f"{file.name} {file.size_bytes} {file.xxh3}\n".encode())
        return digest.hexdigest()
    for shard in source.shards:
        path = bin_path(shard.prefix)
        digest.update(f"{path.stat().st_size}\n".encode())
        update_with_samples(digest, path)
    return digest.hexdigest()


def describe_data(data: TrainingData, config: Config) -> list[str]:
    """Returns a line per source, with its tokens and how much of it the run uses, and a line per phase if several."""
    seq_len = sequence_length(config)
    steps = config.train.last_step
    samples_per_step = config.train.global_batch_tokens // seq_len
    num_samples = steps * samples_per_step
    used = data.order.samples_of_sources(num_samples)
    lines = []
    for source, samples in zip(data.sources, used.tolist(), strict=True):
        lines.append(
            f"data {source.name}: {source.num_tokens:,} tokens; supplies {samples * seq_len:,} tokens "
            f"({samples / num_samples:.1%} of the run), {samples / source.num_windows(seq_len):.2f} epochs"
        )
    _, phases = list_sources(config)
    for number, phase in enumerate(phases if len(phases) > 1 else []):
        counts = data.order.counts(number)
        shares = ", ".join(
            f"{data.sources[source].name} {counts[source] / counts.sum():.1%}" for source in phase.sources
        )
        first_sample = data.order.skipped.samples_before(phase.first_sample)
        reached = "" if first_sample < num_samples else ", which the run does not reach"
        lines.append(
            f"data phase {number}, from token {phase.first_sample * seq_len:,} "
            f"(step {first_sample // samples_per_step:,}){reached}: {shares}"
        )
    for name, source in data.val_sources.items():
        lines.append(f"validation {name}: {source.num_tokens:,} tokens")
    return lines


def _open(key: str, path: str, seq_len: int, problems: list[str]) -> list[TokenSource]:
    """Returns the source in a list, or an empty list after appending to `problems`."""
    try:
        source = TokenSource.open(path)
        source.num_windows(seq_len)
    except (DataError, OSError) as error:
        problems.append(f"{key}: {error}")
        return []
    return [source]


def _common_tokenizer(config: Config, sources: list[TokenSource]) -> tuple[Path | None, str | None]:
    """The tokenizer with which all sources were made, and its hash."""
    hashes = {source.manifest.tokenizer_sha256: source for source in sources if source.manifest is not None}
    if len(hashes) > 1:
        made = "; ".join(f"{source.path} with {sha256[:12]}" for sha256, source in hashes.items())
        raise ConfigError([f"data.sources: not all were made with the same tokenizer: {made}"])
    if config.data.tokenizer is not None:
        path = Path(config.data.tokenizer)
        if not path.is_file():
            raise ConfigError([f"data.tokenizer: {path}: no such file"])
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        if hashes and sha256 not in hashes:
            raise ConfigError([f"data.tokenizer: {path} is not the tokenizer that the shards were made with"])
        return path, sha256
    for sha256, source in hashes.items():
        assert source.manifest is not None
        return source.path / source.manifest.tokenizer_file, sha256
    return None, None


def _vocabulary(config: Config, sources: list[TokenSource]) -> tuple[int, int]:
    """The rows of the embedding, and the number of valid token ids."""
    manifests = [source.manifest for source in sources if source.manifest is not None]
    used = max((manifest.vocab_size for manifest in manifests), default=None)
    wanted = config.model.vocab_size
    eod_id = config.data.eod_id
    if wanted is None:
        if used is None:
            raise ConfigError(["model.vocab_size: is required, because the shards have no manifest"])
        wanted = max(manifest.padded_vocab_size for manifest in manifests)
    elif used is not None and wanted < used:
        raise ConfigError([f"model.vocab_size: {wanted} is less than the {used} token ids of the data"])
    if eod_id is not None and eod_id >= wanted:
        raise ConfigError([f"data.eod_id: {eod_id} is beyond the vocabulary of {wanted}"])
    return wanted, wanted if used is None else used
