"""Every configuration key with its type, default, limits and meaning. Units are part of the name or the description.

The classes are frozen and forbid unknown keys. They hold what the user wrote; `resolve` fills in sizes that are
derived from other keys. Checks that involve several keys are functions in `configs.checks`, so that all problems of a
configuration can be reported together.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from configs.policies import POLICIES, QkPolicy

FFN_MULTIPLE = 64


class Section(BaseModel):
    """A frozen group of keys that rejects unknown ones."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=(), allow_inf_nan=False)


class RunConfig(Section):
    """Which run this is, and where it starts from."""

    name: str | None = Field(
        None, min_length=1, pattern=r"^[^/\\]+$", description="name of the run's folder; default: the YAML file's name"
    )
    dir: str = Field("runs", min_length=1, description="folder that contains the run folders")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of the initial weights and of the data order")
    resume: str = Field(
        "auto",
        min_length=1,
        description="`auto`: resume from the newest undamaged checkpoint in this run's folder, or start a new run;"
        " `never`: start a new run, and fail if the folder already holds one; a path: resume from that checkpoint, or"
        " fail",
    )
    init_from: str | None = Field(
        None,
        min_length=1,
        description="initialise the weights from another run (a run's folder or one checkpoint), with this run's own"
        " schedule, data and folder",
    )
    deterministic: bool = Field(False, description="use deterministic kernels on GPU as well (slower)")


class MlaConfig(Section):
    """Sizes of multi-head latent attention. The derived sizes have the proportions of DeepSeek-V2-Lite."""

    q_latent_dim: int | None = Field(
        None, ge=1, description="width of the query latent; null: no query compression (DeepSeek-V2-Lite)"
    )
    kv_latent_dim: int | None = Field(
        None, ge=1, description="width of the key/value latent; null: 4 head_dim, at most dim / 2"
    )
    nope_dim: int | None = Field(
        None, ge=1, description="width of the part of a query/key head without positions; null: head_dim"
    )
    rope_dim: int | None = Field(
        None,
        ge=2,
        description="width of the part of a query/key head with rotary positions, an even number; null: head_dim / 2,"
        " rounded up to an even number",
    )
    value_dim: int | None = Field(None, ge=1, description="width of a value head; null: head_dim")
    latent_norm: bool = Field(True, description="RMSNorm on the latents (DeepSeek)")


class AttentionConfig(Section):
    """How attention is computed."""

    kind: Literal["mha", "mla"] = Field(
        "mha",
        description="`mha`: multi-head attention, or grouped-query attention when num_kv_heads < num_heads; `mla`:"
        " multi-head latent attention (DeepSeek)",
    )
    qk_norm: bool = Field(
        False,
        description="RMSNorm with a learned gain on every query and key head (Qwen3); with `mla`, over both parts of"
        " a head together",
    )
    softcap: float | None = Field(
        None, gt=0, description="attention logits s become softcap tanh(s / softcap) (Gemma 2); null: off"
    )
    ssmax: bool = Field(
        False,
        description="multiply queries by a learned scale per head and log(number of visible keys) (Scalable-Softmax)",
    )
    sink: bool = Field(False, description="a learned logit per head that takes attention weight but has no value")
    gated: bool = Field(False, description="multiply attention outputs by sigmoid(x W) before the output projection")
    mla: MlaConfig = Field(default_factory=MlaConfig)


class ModelConfig(Section):
    """The architecture of the network."""

    vocab_size: int | None = Field(
        None, ge=2, description="rows of the embedding; null: the padded vocabulary size in the data's manifest"
    )
    dim: int = Field(256, ge=2, description="width of the residual stream")
    num_layers: int = Field(4, ge=1, description="number of transformer blocks")
    num_heads: int = Field(4, ge=1, description="number of query heads")
    num_kv_heads: int | None = Field(
        None, ge=1, description="number of key/value heads; null, and always with `mla`: num_heads"
    )
    head_dim: int | None = Field(None, ge=2, description="width of a head; null: dim / num_heads")
    ffn_dim: int | None = Field(
        None, ge=1, description="hidden width of SwiGLU; null: 8/3 of dim, rounded up to a multiple of 64"
    )
    max_seq_len: int = Field(1024, ge=1, description="longest context in tokens")
    tie_embeddings: bool = Field(False, description="share one matrix between the embedding and the output head")
    rope_theta: float = Field(10000.0, gt=1, description="base of the rotary frequencies")
    norm_eps: float = Field(1e-5, gt=0, description="epsilon of RMSNorm")
    init_std: float = Field(
        0.02,
        gt=0,
        description="standard deviation of the initial weights; divided by sqrt(2 num_layers) for residual outputs",
    )
    attention: AttentionConfig = Field(default_factory=AttentionConfig)


class AdaptiveConfig(Section):
    """The controller of `qk_control.policy: adaptive`; see docs/stability.md."""

    every_steps: int = Field(10, ge=1, description="steps between measurements of the logit drift")
    target: float | None = Field(
        None,
        gt=0,
        description="RMS change of the logits per step at the peak learning rate; null: the median of the first ten"
        " measurements after the warm-up",
    )
    exponent: float = Field(0.5, gt=0, le=1, description="alpha is multiplied by (target / drift)^exponent")
    min_alpha: float = Field(1e-3, gt=0, le=1, description="smallest alpha of a layer; the largest is 1")


class QkControlConfig(Section):
    """The learning rate of the query/key weights."""

    policy: Literal["none", "constant", "quack", "adaptive"] = Field(
        "none",
        description="`none`: the base learning rate everywhere; `constant`: alpha times the base learning rate for"
        " query/key weights; `quack`: like `constant`, and the steps of a head's query (key) weights shrink as its key"
        " (query) weights grow; `adaptive`: the alpha of each layer is adapted to the measured drift of its logits",
    )
    alpha: float = Field(
        0.1,
        gt=0,
        description="factor on the learning rate of query/key weights (not used by `none`; initial value for"
        " `adaptive`)",
    )
    max_ratio: float | None = Field(None, gt=0, description="upper limit of `quack`'s per-head ratios; null: no limit")
    clip_threshold: float | None = Field(
        None,
        gt=0,
        description="QK-Clip: when an attention logit exceeds this, the head's query/key weights are scaled down after"
        " the step; null: off",
    )
    adaptive: AdaptiveConfig = Field(default_factory=AdaptiveConfig)

    @property
    def chosen(self) -> QkPolicy:
        """The policy object that `policy` names."""
        return POLICIES[self.policy]


class MuonConfig(Section):
    """Muon for the hidden matrices; embeddings, gains and the output head use AdamW."""

    momentum: float = Field(0.95, ge=0, lt=1, description="Nesterov momentum")
    newton_schulz_steps: int = Field(5, ge=1, description="Newton-Schulz iterations of the orthogonalisation")
    per_head: bool = Field(False, description="orthogonalise each head of a query/key matrix separately")
    adamw_lr: float | None = Field(
        None, gt=0, description="peak learning rate of the parameters that use AdamW; null: optim.lr"
    )


class OptimConfig(Section):
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "muon"] = Field("adamw", description="optimizer")
    lr: float = Field(3e-4, gt=0, description="base learning rate, the peak of the schedule")
    betas: tuple[float, float] = Field((0.9, 0.95), strict=False, description="decay rates of AdamW's moments")
    eps: float = Field(1e-8, gt=0, description="epsilon of AdamW")
    weight_decay: float = Field(0.1, ge=0, description="decoupled weight decay of all matrices except embeddings")
    grad_clip: float = Field(1.0, ge=0, description="maximum global gradient norm; 0: no clipping")
    warmup_steps: int = Field(100, ge=0, description="steps of linear warm-up")
    schedule: Literal["constant", "cosine", "wsd"] = Field("cosine", description="schedule after the warm-up")
    decay_fraction: float = Field(
        0.2, gt=0, le=1, description="fraction of train.steps over which `wsd` decays linearly to min_lr_ratio"
    )
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="learning rate at train.steps as a fraction of lr")
    muon: MuonConfig = Field(default_factory=MuonConfig)


class SourceConfig(Section):
    """One source of training data."""

    path: str = Field(min_length=1, description="folder of shards, or the prefix of one Megatron shard")
    weight: float = Field(1.0, gt=0, description="relative share of the samples")


class PhaseConfig(Section):
    """A mixture of sources from some point of the run on."""

    start_tokens: int = Field(
        ge=1, description="training tokens after which the phase begins, rounded up to whole sequences"
    )
    sources: tuple[SourceConfig, ...] = Field(
        strict=False, min_length=1, description="like data.sources; a path used before continues where it stopped"
    )


class DataConfig(Section):
    """The training and validation data."""

    sources: tuple[SourceConfig, ...] = Field(
        strict=False, min_length=1, description="training data: list of {path, weight}"
    )
    phases: tuple[PhaseConfig, ...] = Field(
        (), strict=False, description="later mixtures that replace data.sources: list of {start_tokens, sources}"
    )
    val_sources: dict[str, str] = Field(
        default_factory=dict, description="validation data: name -> path; the first is `val_loss`"
    )
    seq_len: int | None = Field(None, ge=1, description="tokens of a training sample; null: model.max_seq_len")
    mask_documents: bool = Field(
        False,
        description="attention stays within documents, positions restart in each document, and its first token is not a"
        " target",
    )
    eod_loss: bool = Field(
        True, description="the last token of each document, its end-of-document token if it has one, is a target"
    )
    tokenizer: str | None = Field(
        None, min_length=1, description="tokenizer file; null: the tokenizer in the data's manifest"
    )
    eod_id: int | None = Field(None, ge=0, description="end-of-document id; null: the id in the data's manifest")


class ProfileConfig(Section):
    """The steps to profile."""

    start_step: int = Field(ge=0, description="first profiled step")
    steps: int = Field(ge=1, description="number of profiled steps")


class SpikeConfig(Section):
    """When the loss or the gradient norm of a step counts as a spike, and what happens then."""

    window: int = Field(
        128, ge=2, description="number of earlier steps that a step is compared with, once half of them are available"
    )
    threshold_sigma: float | None = Field(
        6.0,
        gt=0,
        description="a spike is this many standard deviations of the window above its mean; null: no detection",
    )
    action: Literal["warn", "skip", "rollback"] = Field(
        "warn", description="`warn`: log a warning; `skip`, `rollback`: as in train.on_nonfinite"
    )


class TrainConfig(Section):
    """The length of the run, and how its steps are computed."""

    steps: int = Field(ge=1, description="length of the run and its schedule, in optimizer steps")
    stop_step: int | None = Field(None, ge=1, description="stop after this step, without changing the schedule")
    max_seconds: float | None = Field(
        None,
        gt=0,
        description="save a checkpoint and stop (exit code 75) this long after the start of the process, or of the"
        " launcher or launch.run that started it",
    )
    global_batch_tokens: int = Field(ge=1, description="tokens of one optimizer step over all ranks")
    micro_batch_size: int = Field(
        1, ge=1, description="sequences that a rank processes at once; gradient accumulation is derived from it"
    )
    precision: Literal["fp32", "bf16"] = Field(
        "bf16",
        description="`bf16`: bf16 compute, fp32 master weights and gradient accumulation; `fp32`: uses TF32 on GPU"
        " unless run.deterministic is set",
    )
    z_loss: float = Field(0.0, ge=0, description="weight of mean(logsumexp(logits)^2); usually 1e-4, 0: off")
    compile: bool = Field(False, description="apply torch.compile to every block")
    activation_checkpointing: bool = Field(False, description="recompute each block in the backward pass")
    on_nonfinite: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="action on a NaN or infinite loss or gradient: `stop` the run; `skip` the update (each step then"
        " waits for its metrics); `rollback`: resume from the last checkpoint and skip the samples since then",
    )
    spike: SpikeConfig = Field(default_factory=SpikeConfig)
    max_skips: int = Field(10, ge=1, description="consecutive skipped steps after which the run stops")
    max_rollbacks: int = Field(3, ge=1, description="rollbacks to the same checkpoint after which the run stops")
    profile: ProfileConfig | None = Field(None, description="torch profiler trace: {start_step, steps}")

    @property
    def last_step(self) -> int:
        """The step after which training stops."""
        return self.stop_step or self.steps


class DeepSpeedConfig(Section):
    """Settings of the DeepSpeed engine."""

    zero_stage: Literal[0, 1, 2, 3] = Field(1, description="ZeRO stage")
    overrides: dict[str, Any] = Field(
        default_factory=dict, description="other DeepSpeed keys, e.g. {zero_optimization: {reduce_bucket_size: 2.0e8}}"
    )
    timeout_seconds: float = Field(1800, gt=0, description="timeout of collectives, after which the run fails")


class CheckpointConfig(Section):
    """When checkpoints are saved and how long they are kept."""

    every_steps: int = Field(1000, ge=1, description="steps between checkpoints; the last step always has one")
    keep_last: int = Field(2, ge=1, description="number of newest checkpoints to keep")
    keep_every: int | None = Field(
        None, ge=1, description="keep checkpoints at multiples of this step permanently; null: none"
    )
    max_failures: int = Field(3, ge=1, description="consecutive failed saves after which the run stops")


class ValidationConfig(Section):
    """When the validation loss is computed, and on how much data."""

    every_steps: int = Field(500, ge=1, description="steps between validations; the last step always has one")
    batches: int = Field(8, ge=1, description="fixed global batches (of train.global_batch_tokens) per validation set")


class MonitorConfig(Section):
    """Measurements of attention on a fixed probe batch."""

    every_steps: int | None = Field(100, ge=1, description="steps between measurements of all heads; null: none")
    probe_sequences: int = Field(
        2, ge=1, description="number of sequences in the probe batch, the first ones of the training data"
    )
    probe_queries: int = Field(32, ge=1, description="number of query positions sampled from each sequence")
    warn_max_logit: float | None = Field(
        100.0, gt=0, description="warn if an attention logit is larger than this; null: never"
    )
    warn_min_entropy: float | None = Field(
        0.02, ge=0, le=1, description="warn if a head's entropy / log L falls below this; null: never"
    )
    warn_max_entropy: float | None = Field(
        0.98, ge=0, le=1, description="warn if a head's entropy / log L rises above this again; null: never"
    )
    warn_change_factor: float | None = Field(
        5.0,
        gt=1,
        description="warn if a layer's logits change this many times more in a step than before; null: never",
    )


class WatchdogConfig(Section):
    """When a run without progress counts as hung. Each rank then writes its stack traces and exits with a failure."""

    min_seconds: float | None = Field(
        300.0,
        gt=0,
        description="a run is hung when no step finishes for this long and for step_factor times the median step time;"
        " null: never",
    )
    step_factor: float = Field(20.0, ge=1, description="see min_seconds")
    slow_seconds: float = Field(
        1800.0,
        gt=0,
        description="limit for the start up to the second step (includes compilation), a checkpoint or a validation",
    )


class Config(Section):
    """The whole configuration; see the classes of the sections."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    qk_control: QkControlConfig = Field(default_factory=QkControlConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    data: DataConfig
    train: TrainConfig
    deepspeed: DeepSpeedConfig = Field(default_factory=DeepSpeedConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    monitor: MonitorConfig = Field(default_factory=MonitorConfig)
    watchdog: WatchdogConfig = Field(default_factory=WatchdogConfig)


def resolve_model(model: ModelConfig) -> ModelConfig:
    """Fills in the sizes that are null, except for vocab_size, which depends on the data."""
    ffn_dim = -(-8 * model.dim // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE
    head_dim = model.head_dim or model.dim // model.num_heads
    is_latent = model.attention.kind == "mla"
    derived: dict[str, Any] = {
        "num_kv_heads": model.num_heads if is_latent else model.num_kv_heads or model.num_heads,
        "head_dim": head_dim,
        "ffn_dim": model.ffn_dim or ffn_dim,
    }
    if is_latent:
        mla = _resolve_mla(model.attention.mla, model.dim, head_dim)
        derived["attention"] = model.attention.model_copy(update={"mla": mla})
    return model.model_copy(update=derived)


def _resolve_mla(mla: MlaConfig, dim: int, head_dim: int) -> MlaConfig:
    derived = {
        "kv_latent_dim": mla.kv_latent_dim or min(4 * head_dim, dim // 2),
        "nope_dim": mla.nope_dim or head_dim,
        "rope_dim": mla.rope_dim or 2 * -(-head_dim // 4),
        "value_dim": mla.value_dim or head_dim,
    }
    return mla.model_copy(update=derived)


def resolve(config: Config) -> Config:
    """Fills in every null that follows from other keys of the configuration."""
    model = resolve_model(config.model)
    data = config.data.model_copy(update={"seq_len": config.data.seq_len or model.max_seq_len})
    return config.model_copy(update={"model": model, "data": data})
