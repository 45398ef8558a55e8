"""Checks that involve several keys. They yield problems instead of raising errors, so that all are reported at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from configs.resume import allows_init_from
from configs.schema import Config, ModelConfig, Section

# Keys of the DeepSpeed file that are generated from the schema, and the key to set instead.
OWNED_BY_SCHEMA = {
    "optimizer": "optim.*",
    "scheduler": "optim.schedule, optim.warmup_steps and optim.min_lr_ratio",
    "train_batch_size": "train.global_batch_tokens",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_tokens and train.micro_batch_size",
    "gradient_clipping": "optim.grad_clip",
    "bf16": "train.precision",
    "bfloat16": "train.precision",
    "fp16": "train.precision",
    "amp": "train.precision",
    "torch_autocast": "train.precision",
    "data_types": "train.precision",
    "communication_data_type": "train.precision",
    "activation_checkpointing": "train.activation_checkpointing",
    "checkpoint": "checkpoint.*",
    "tensorboard": "nothing: TensorBoard is always written to the run's folder",
    "zero_optimization.stage": "deepspeed.zero_stage",
}
ALLOWED_OVERRIDES = (
    "comms_logger",
    "disable_allgather",
    "dump_state",
    "flops_profiler",
    "gradient_predivide_factor",
    "memory_breakdown",
    "prescale_gradients",
    "wall_clock_breakdown",
    "zero_optimization",
)
# Keys that were tested with this project; the stage-3 keys are spelt as in DeepSpeed's documentation.
ALLOWED_ZERO_KEYS = (
    "allgather_bucket_size",
    "allgather_partitions",
    "contiguous_gradients",
    "ignore_unused_parameters",
    "overlap_comm",
    "reduce_bucket_size",
    "reduce_scatter",
    "round_robin_gradients",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "sub_group_size",
)


@dataclass(frozen=True)
class Problem:
    """A problem, and the keys whose values cause it."""

    keys: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        return f"{self.keys[0]}: {self.message}"


def find_problems(config: Config) -> Iterator[Problem]:
    """Yields all problems between the keys of a configuration whose individual fields are valid."""
    yield from _model_problems(config)
    yield from _batch_problems(config)
    yield from _step_problems(config)
    yield from _phase_problems(config)
    yield from _control_problems(config)
    yield from _run_problems(config)
    yield from override_problems(config.deepspeed.overrides)


def _model_problems(config: Config) -> Iterator[Problem]:
    model = config.model
    mla = model.attention.mla
    mla_sizes = (mla.kv_latent_dim, mla.nope_dim, mla.rope_dim, mla.value_dim)
    needs_head_dim = model.attention.kind != "mla" or None in mla_sizes
    if needs_head_dim and model.head_dim is None and model.dim % model.num_heads:
        yield Problem(
            ("model.num_heads", "model.dim", "model.head_dim"),
            f"{model.num_heads} does not divide model.dim={model.dim}; set model.head_dim, or sizes that divide",
        )
    yield from _mla_problems(model) if model.attention.kind == "mla" else _mha_problems(model)


def _mha_problems(model: ModelConfig) -> Iterator[Problem]:
    num_kv_heads = model.num_kv_heads or model.num_heads
    if model.num_heads % num_kv_heads:
        yield Problem(
            ("model.num_kv_heads", "model.num_heads"),
            f"{num_kv_heads} does not divide model.num_heads={model.num_heads}",
        )
    head_dim = model.head_dim or model.dim / model.num_heads
    if head_dim % 2 == 1:
        yield Problem(
            ("model.head_dim", "model.dim", "model.num_heads"),
            f"{head_dim:.0f} is odd; rotary positions rotate pairs of values, so the width of a head must be even",
        )
    yield from _unused_keys(
        "model.attention.mla", model.attention.mla, "model.attention.kind", "mla", model.attention.kind
    )


def _mla_problems(model: ModelConfig) -> Iterator[Problem]:
    rope_dim = model.attention.mla.rope_dim
    if rope_dim is not None and rope_dim % 2:
        yield Problem(
            ("model.attention.mla.rope_dim",),
            f"{rope_dim} is odd; rotary positions rotate pairs of values, so this width must be even",
        )


def _batch_problems(config: Config) -> Iterator[Problem]:
    seq_len = config.data.seq_len or config.model.max_seq_len
    vocab_size, eod_id = config.model.vocab_size, config.data.eod_id
    if vocab_size is not None and eod_id is not None and eod_id >= vocab_size:
        yield Problem(("data.eod_id", "model.vocab_size"), f"{eod_id} is beyond model.vocab_size={vocab_size}")
    if seq_len > config.model.max_seq_len:
        yield Problem(
            ("data.seq_len", "model.max_seq_len"),
            f"{seq_len} is longer than model.max_seq_len={config.model.max_seq_len}",
        )
    if config.train.global_batch_tokens % seq_len:
        low = config.train.global_batch_tokens // seq_len * seq_len
        choices = f"{low + seq_len}" if low == 0 else f"{low} or {low + seq_len}"
        yield Problem(
            ("train.global_batch_tokens", "data.seq_len", "model.max_seq_len"),
            f"{config.train.global_batch_tokens} is not a multiple of the sequence length {seq_len}; "
            f"the nearest valid value is {choices}",
        )
    for name in config.data.val_sources:
        if not name or "/" in name:
            yield Problem(("data.val_sources",), f"{name!r} cannot name a validation set: it is empty or contains '/'")


def _step_problems(config: Config) -> Iterator[Problem]:
    train, optim = config.train, config.optim
    if train.stop_step is not None and train.stop_step > train.steps:
        yield Problem(("train.stop_step", "train.steps"), f"{train.stop_step} is beyond train.steps={train.steps}")
    for beta in optim.betas:
        if not 0 <= beta < 1:
            yield Problem(("optim.betas",), f"{beta} is not in [0, 1)")
    if train.profile and train.profile.start_step + train.profile.steps > train.last_step:
        yield Problem(
            ("train.profile", "train.steps", "train.stop_step"),
            f"steps {train.profile.start_step} to {train.profile.start_step + train.profile.steps} "
            f"are not all before the last step {train.last_step}",
        )


def _control_problems(config: Config) -> Iterator[Problem]:
    control, optim = config.qk_control, config.optim
    if control.clip_threshold is not None and config.model.attention.qk_norm:
        yield Problem(
            ("qk_control.clip_threshold", "model.attention.qk_norm"),
            f"{control.clip_threshold:g} has no effect with model.attention.qk_norm, which normalises the scale of the "
            "weights away; set only one",
        )
    if control.max_ratio is not None and "max_ratio" not in control.chosen.own_keys:
        yield Problem(
            ("qk_control.max_ratio", "qk_control.policy"),
            f"{control.max_ratio} limits the ratios of qk_control.policy=quack; set that policy, or remove this key",
        )
    max_alpha = control.chosen.max_alpha
    if max_alpha is not None and not control.adaptive.min_alpha <= control.alpha <= max_alpha:
        yield Problem(
            ("qk_control.alpha", "qk_control.adaptive.min_alpha"),
            f"{control.alpha} is the initial value of `adaptive`; expected a value between "
            f"qk_control.adaptive.min_alpha={control.adaptive.min_alpha} and {max_alpha:g}",
        )
    yield from _unused_keys("qk_control.adaptive", control.adaptive, "qk_control.policy", "adaptive", control.policy)
    yield from _unused_keys("optim.muon", optim.muon, "optim.name", "muon", optim.name)


def _phase_problems(config: Config) -> Iterator[Problem]:
    """Checks that phases are in order and that each lasts for at least one sequence."""
    seq_len = config.data.seq_len or config.model.max_seq_len
    for index, (phase, following) in enumerate(pairwise(config.data.phases)):
        if -(-phase.start_tokens // seq_len) >= -(-following.start_tokens // seq_len):
            yield Problem(
                (f"data.phases.{index + 1}.start_tokens", "data.phases", "data.seq_len", "model.max_seq_len"),
                f"{following.start_tokens} must be at least one sequence of {seq_len} tokens after "
                f"data.phases.{index}.start_tokens={phase.start_tokens}",
            )


def _unused_keys(prefix: str, section: Section, chooser: str, wanted: str, chosen: str) -> Iterator[Problem]:
    """Checks that no key of a section was changed if `chooser` selects something that does not use the section."""
    if chosen == wanted:
        return
    default = type(section)()
    for key in type(section).model_fields:
        if getattr(section, key) != getattr(default, key):
            yield Problem((f"{prefix}.{key}", chooser), f"is only for {chooser}={wanted}; set that, or remove this key")


def _run_problems(config: Config) -> Iterator[Problem]:
    if config.run.name in (".", ".."):
        yield Problem(("run.name",), f"{config.run.name!r} is not a valid folder name")
    if config.run.init_from is not None and not allows_init_from(config.run.resume):
        yield Problem(
            ("run.init_from", "run.resume"),
            "starts a new run, but run.resume names a checkpoint to resume from; set only one of them",
        )


def override_problems(overrides: dict[str, Any]) -> Iterator[Problem]:
    """Checks that no DeepSpeed key is generated from the schema, unknown, or unsupported by this project."""
    for key in overrides:
        where = f"deepspeed.overrides.{key}"
        if key in OWNED_BY_SCHEMA:
            yield Problem((where, "deepspeed.overrides"), f"is generated; set {OWNED_BY_SCHEMA[key]} instead")
        elif key not in ALLOWED_OVERRIDES:
            yield Problem((where, "deepspeed.overrides"), f"is not supported; allowed: {', '.join(ALLOWED_OVERRIDES)}")
    zero = overrides.get("zero_optimization", {})
    if not isinstance(zero, dict):
        yield Problem(("deepspeed.overrides.zero_optimization",), f"{zero!r} is not a mapping")
        return
    for key in zero:
        where = f"deepspeed.overrides.zero_optimization.{key}"
        if key == "stage":
            message = f"is generated; set {OWNED_BY_SCHEMA['zero_optimization.stage']} instead"
        elif key in ALLOWED_ZERO_KEYS:
            continue
        else:
            near = difflib.get_close_matches(key, ALLOWED_ZERO_KEYS, n=1)
            message = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(ALLOWED_ZERO_KEYS)}"
            message = f"is not supported; {message}"
        yield Problem((where, "deepspeed.overrides"), message)
