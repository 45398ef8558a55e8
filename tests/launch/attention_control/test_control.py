"""Query/key control changes the weights exactly as a plain single-process loop does, at every ZeRO stage.

The reference (`reference.py`) is written from the papers' formulas: AdamW over whole matrices, after its step each
head goes back to `old + ratio * (new - old)`, and clipping multiplies heads. Weight decay and gradient clipping are on,
sizes are such that heads straddle the shards' borders, and the batch does not divide.

    bash launch/test.sh tests/launch/attention_control/test_control.py --full-product

runs every combination instead of a subset.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from configs.load import load_config
from configs.schema import Config
from launch.attention_control.control import Clipper, QueryKeyControl
from launch.attention_control.head_weights import HeadWeights
from launch.attention_control.rules import QuackRule
from launch.checkpoint.files import CheckpointReader, read_state
from launch.distributed.shards import Shard
from launch.errors import RunError
from model.gpt import GPT
from model.initialisation import initialise
from model.parameters import Kind, collect_specs
from model.stability.clip import LogitMaxima
from model.stability.layers import HeadLayout, collect_layouts
from tests.conftest import read_metrics
from tests.launch.attention_control.reference import (
    Reference,
    clip,
    is_controlled,
    quack_by_hand,
    reference,
    validation_loss,
)

NUM_STEPS = 5
ROWS = 2
SETTINGS = [
    f"train.steps={NUM_STEPS}",
    # The large epsilon keeps AdamW from turning rounding noise in tiny gradients into full steps.
    "optim={lr: 5.0e-3, eps: 1.0e-5, warmup_steps: 0, grad_clip: 0.5, weight_decay: 0.3}",
    "train.global_batch_tokens=352",
    f"train.micro_batch_size={ROWS}",
    "model.dim=36",
    "model.head_dim=10",
]
ATTENTION = {
    "mha": ["model.num_kv_heads=4"],
    "gqa": ["model.num_kv_heads=2"],
    "qk_norm": ["model.num_kv_heads=2", "model.attention.qk_norm=true"],
    "mla": ["model.attention={kind: mla, mla: {q_latent_dim: 14, kv_latent_dim: 10, rope_dim: 6, latent_norm: false}}"],
    "mla_norm": ["model.attention={kind: mla, mla: {q_latent_dim: 14, kv_latent_dim: 10, rope_dim: 6}}"],
    "mla_qk_norm": [
        "model.attention={kind: mla, qk_norm: true, mla: {q_latent_dim: 14, kv_latent_dim: 10, rope_dim: 6}}"
    ],
    "mla_v2_lite": ["model.attention={kind: mla, mla: {kv_latent_dim: 10, rope_dim: 6, latent_norm: false}}"],
}
# Between the heads' largest logits, so that some clip and others don't.
THRESHOLD = {"mha": 0.06, "gqa": 0.06, "mla": 0.0028, "mla_norm": 0.026, "mla_v2_lite": 0.038}
CONTROL = {
    "none": ["qk_control.policy=none"],
    "constant": ["qk_control={policy: constant, alpha: 1.25}"],
    "quack": ["qk_control={policy: quack, alpha: 1.25}"],
    "adaptive": [
        "qk_control={policy: adaptive, alpha: 0.5, adaptive: {every_steps: 2, target: 0.02}}",
        "monitor={probe_sequences: 1, probe_queries: 8}",
    ],
    "constant_muon": ["qk_control={policy: constant, alpha: 1.25}", "optim.name=muon"],
    "adaptive_muon_clip": [
        "qk_control={policy: adaptive, alpha: 0.5, adaptive: {every_steps: 2, target: 0.02}}",
        "monitor={probe_sequences: 1, probe_queries: 8}",
        "optim.name=muon",
    ],
    "clip": ["qk_control.policy=none"],
    "quack_clip": ["qk_control={policy: quack, alpha: 1.25}"],
    "adaptive_clip": [
        "qk_control={policy: adaptive, alpha: 0.5, adaptive: {every_steps: 2, target: 0.02}}",
        "monitor={probe_sequences: 1, probe_queries: 8}",
    ],
}


class Case(NamedTuple):
    """One combination."""

    num_ranks: int
    control: str
    attention: str
    stage: int
    precision: str

    @property
    def is_allowed(self) -> bool:
        """Clipping and query/key norms exclude each other; Muon's steps in bf16 are compared in test_muon."""
        excluded = "qk_norm" in self.attention and "clip" in self.control
        return not excluded and not ("muon" in self.control and self.precision == "bf16")


def run_and_compare(cases: list[Case], tiny_config: Path, runs: Path, run_cases: Callable[..., Any]) -> None:
    """Runs cases of one number of ranks, each against the reference."""
    num_ranks = cases[0].num_ranks
    settings = {}
    for case in cases:
        name = f"{case.control}_{case.attention}_s{case.stage}_{case.precision}_r{num_ranks}"
        settings[name] = [
            *SETTINGS,
            *ATTENTION[case.attention],
            *CONTROL[case.control],
            f"run.name={name}",
            f"deepspeed.zero_stage={case.stage}",
            f"train.precision={case.precision}",
        ]
        if "clip" in case.control:
            settings[name].append(f"qk_control.clip_threshold={THRESHOLD[case.attention]}")
        if case.stage == 3:
            settings[name].append("deepspeed.overrides.zero_optimization.stage3_param_persistence_threshold=64")
    timeout = 120 + 10 * len(cases)
    outcomes = run_cases(num_ranks, [(tiny_config, value) for value in settings.values()], timeout)
    assert outcomes == [[0] * len(cases)] * num_ranks, outcomes
    problems = []
    for name, value in settings.items():
        config = load_config(tiny_config, value)
        expected, model = reference(config, num_ranks)
        problems += [f"{name}: {problem}" for problem in weight_problems(runs / name, config, expected, num_ranks)]
        problems += [f"{name}: {problem}" for problem in record_problems(runs / name, config, expected)]
        problems += [f"{name}: {problem}" for problem in copy_problems(runs / name, config, model)]
    assert not problems, "\n".join(problems)


def tolerances(config: Config, num_ranks: int) -> tuple[float, float]:
    """For the change of query/key matrices, and of other weights."""
    if config.train.precision == "fp32":
        return 1e-4, 1e-4
    # With three ranks DeepSpeed divides bf16 gradients by 3, which rounds them once more. Clipping multiplies whole
    # weights by a factor that follows the largest logit, which bf16 knows to three digits. Another order of the ranks'
    # sums flips roundings to bf16, which AdamW makes visible in small gradients.
    is_rough = num_ranks == 3 or config.qk_control.clip_threshold is not None
    return (2e-2 if is_rough else 1e-2), 3e-2


def weight_problems(folder: Path, config: Config, expected: Reference, num_ranks: int) -> list[str]:
    """Parameters whose change over the run is too far from the reference's."""
    own, elsewhere = tolerances(config, num_ranks)
    problems = []
    with CheckpointReader(folder / f"checkpoints/step_{NUM_STEPS:08d}") as reader:
        for name, master in expected.masters.items():
            step = reader.read_parameter(name) - expected.initial[name]
            expected_step = master - expected.initial[name]
            error = float((step - expected_step).norm() / expected_step.norm())
            if error > (own if is_controlled(name) and master.dim() == 2 else elsewhere):
                problems.append(f"{name} is off by {error:.2e}")
    return problems


def record_problems(folder: Path, config: Config, expected: Reference) -> list[str]:
    """Records that do not say what the reference did."""
    tolerance = 1e-4 if config.train.precision == "fp32" else 2e-2
    policy, has_clip = config.qk_control.policy, config.qk_control.clip_threshold is not None
    records, problems = read_metrics(folder), []
    for step, record in enumerate(records):
        values = [ratio for heads in expected.ratios[step].values() for ratio in heads]
        if values:
            for key, value in {"min": min(values), "max": max(values)}.items():
                if record["qk_ratio"][key] != pytest.approx(value, rel=tolerance):
                    problems.append(f"step {step}: ratio {key} is {record['qk_ratio'][key]}, expected {value}")
        if has_clip and abs(record["qk_clip"]["heads"] - expected.clipped_heads[step]) > (
            0 if config.train.precision == "fp32" else 2
        ):
            problems.append(f"step {step}: {record['qk_clip']} of {expected.clipped_heads[step]} heads")
    if policy in ("quack", "adaptive") and not max(abs(value - 1) for value in values) > 0.02:
        problems.append("ratios of 1 show nothing")
    if policy == "adaptive":
        found = [record["qk_adaptive"]["alpha"] for record in records if "qk_adaptive" in record]
        if found[-1] != pytest.approx(expected.alphas[-1], rel=tolerance) or len(found) != 2:
            problems.append(f"alphas {found}, expected {expected.alphas}")
    num_heads = config.model.num_layers * config.model.num_heads
    if has_clip and not any(0 < count < num_heads for count in expected.clipped_heads):
        problems.append(f"{expected.clipped_heads} clipped heads show nothing")
    return problems


def copy_problems(folder: Path, config: Config, model: Any) -> list[str]:
    """The weights that the run computes with are the rounded masters: its last validation loss is theirs."""
    with CheckpointReader(folder / f"checkpoints/step_{NUM_STEPS:08d}") as reader, torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(reader.read_parameter(name))
    found, expected = read_metrics(folder)[-1]["val_loss"], validation_loss(model, config)
    return [] if found == pytest.approx(expected, rel=1e-6) else [f"validation loss {found}, expected {expected}"]


PRODUCT = [
    case
    for case in map(Case._make, itertools.product((2, 3, 1), CONTROL, ATTENTION, (0, 1, 2, 3), ("fp32", "bf16")))
    if case.is_allowed
]


def pairwise(cases: list[Case]) -> list[Case]:
    """Few cases that together hold every pair of values that any case holds."""

    def pairs(case: Case) -> set[Any]:
        return set(itertools.combinations(enumerate(case), 2))

    missing = set().union(*map(pairs, cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(missing & pairs(case)))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_exactness(
    num_ranks: int, tiny_config: Path, tmp_path: Path, run_cases: Any, request: pytest.FixtureRequest
) -> None:
    chosen = PRODUCT if request.config.getoption("--full-product") else pairwise(PRODUCT)
    cases = [case for case in chosen if case.num_ranks == num_ranks]
    run_and_compare(cases, tiny_config, tmp_path / "runs", run_cases)


@pytest.mark.parametrize("control", ["quack", "adaptive"])
def test_the_policy_survives_a_stop_and_other_ranks(
    control: str, tiny_config: Path, tmp_path: Path, run_cases: Any
) -> None:
    attention = "gqa" if control == "quack" else "mla_norm"
    settings = [*SETTINGS, *ATTENTION[attention], *CONTROL[control]]
    whole = [*settings, "run.name=whole"]
    parts = [*settings, "run.name=parts"]
    # The stop falls into an interval of the adaptive policy, whose inputs and logits must come along.
    assert run_cases(1, [(tiny_config, whole), (tiny_config, [*parts, "train.stop_step=3"])]) == [[0, 0]]
    assert run_cases(2, [(tiny_config, parts)]) == [[0], [0]]
    ours, expected = (read_metrics(tmp_path / "runs" / name) for name in ("parts", "whole"))
    for record, reference_record in zip(ours, expected, strict=True):
        assert record["loss"] == pytest.approx(reference_record["loss"], rel=1e-5)
        assert record["qk_ratio"]["min"] == pytest.approx(reference_record["qk_ratio"]["min"], rel=1e-5)
        if control == "adaptive":
            drifts, expected_drifts = (part.get("qk_adaptive", {}).get("drift") for part in (record, reference_record))
            assert drifts == (expected_drifts and pytest.approx(expected_drifts, rel=1e-4))
    if control == "quack":
        norms = [
            read_state(tmp_path / f"runs/{name}/checkpoints/step_{NUM_STEPS:08d}").policy_state["initial_norms"]
            for name in ("parts", "whole")
        ]
        assert norms[0] == norms[1] and set(norms[0]) == {"query", "key"}


def test_a_head_that_starts_at_zero_is_refused() -> None:
    weights = {"q": torch.ones(4, 3), "k": torch.cat([torch.ones(2, 3), torch.zeros(2, 3)])}
    shards = [Shard(name, (4, 3), 0, 12, weight, 0, True) for name, weight in weights.items()]
    layouts = {Kind.QUERY: HeadLayout(("q",), 2, 6), Kind.KEY: HeadLayout(("k",), 2, 6)}
    rule = QuackRule(
        HeadWeights(layouts, shards, torch.device("cpu"), is_replicated=True), has_qk_norm=False, max_ratio=None
    )
    with pytest.raises(RunError, match="head 1 of k is zero"):
        rule.update(0)


class LayerRatios:
    """A rule whose ratios differ by layer, as those of the adaptive policy."""

    def __init__(self, weights: HeadWeights) -> None:
        self._weights = weights

    def update(self, step: int) -> dict[Kind, torch.Tensor]:
        ratios = torch.tensor([0.3, 2.0], dtype=torch.float64)[:, None]
        return {kind: ratios.expand(-1, layout.num_heads) for kind, layout in self._weights.layouts.items()}

    def after_applied_step(self, lr_multiplier: float, clipping_LH: torch.Tensor | None) -> None:
        pass


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("control", "attention"),
    [
        pair
        for pair in itertools.product(["quack", "layers", "clip", "quack_clip"], ATTENTION)
        if Case(1, *pair, 1, "fp32").is_allowed
    ],
)
def test_given_the_same_gradients_each_head_is_exact_on_any_number_of_ranks(
    control: str, attention: str, num_ranks: int, tiny_config: Path
) -> None:
    """One AdamW step with decay on ZeRO's flat partitions, all ranks in one process: 1e-6 of each head's change."""
    overrides = [*SETTINGS, *ATTENTION[attention], "train.precision=fp32"]
    config = load_config(tiny_config, [*overrides, f"qk_control.clip_threshold={THRESHOLD.get(attention, 'null')}"])
    model = GPT(config.model)
    initialise(model, seed=1)
    specs, parameters = collect_specs(model), dict(model.named_parameters())
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    generator = torch.Generator().manual_seed(2)
    grown = {
        name: w * (1 + torch.rand(w.shape[0], *[1] * (w.dim() - 1), generator=generator)) for name, w in start.items()
    }
    gradients = {name: torch.randn(w.shape, generator=generator) for name, w in start.items()}
    largest = 0.2 * torch.rand(2, 4, generator=generator)

    names = [name for name in start if is_controlled(name)]
    total = sum(grown[name].numel() for name in names)
    length = -(-total // num_ranks)

    def flat_parts(table: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        whole = torch.cat([table[name].flatten() for name in names])
        return [part.clone() for part in torch.nn.functional.pad(whole, (0, length * num_ranks - total)).split(length)]

    flats = flat_parts(grown)
    shards, offset = [], 0
    for name in names:
        numel = grown[name].numel()
        for rank, flat in enumerate(flats):
            first, last = max(offset, rank * length), min(offset + numel, (rank + 1) * length)
            if first < last:
                place = first - rank * length
                shards.append(Shard(name, tuple(grown[name].shape), first - offset, last - offset, flat, place, True))
        offset += numel
    heads = {name: spec.num_heads for name, spec in specs.items()}
    layouts = collect_layouts(model, heads, {name: w.numel() for name, w in start.items()})
    weights = HeadWeights(layouts, shards, torch.device("cpu"), is_replicated=True)
    rule: Any = None
    if "quack" in control:
        rule = QuackRule(weights, config.model.attention.qk_norm, None, config.model.attention.mla.kv_latent_dim)
        kinds = {name: kind for kind, layout in layouts.items() for name in layout.names}
        norms: dict[str, list[list[float]]] = {}
        for name, kind in kinds.items():
            parts = start[name].double().view(layouts[kind].num_heads, -1).norm(dim=1)
            norms.setdefault(kind.value, []).append(parts.tolist())
        rule.load_state({"initial_norms": norms})
    elif control == "layers":
        rule = LayerRatios(weights)
    clipper = None
    if "clip" in control:
        maxima = [LogitMaxima(4, 0.05, torch.device("cpu")) for _ in range(2)]
        for layer, values in zip(maxima, largest, strict=True):
            layer.max_H.copy_(values)
        key_heads = None if config.model.attention.kind == "mla" else config.model.num_kv_heads
        clipper = Clipper(maxima, config.qk_control.clip_threshold, key_heads)
    control_of_all = QueryKeyControl(weights, rule, clipper)
    settings = {"lr": 1e-2, "weight_decay": 0.3, "eps": 1e-8}

    optimizer = torch.optim.AdamW(flats, **settings)
    for flat, gradient in zip(flats, flat_parts(gradients), strict=True):
        flat.grad = gradient
    control_of_all.prepare(0, 1.0)
    if clipper is not None:
        factors, _ = clip_alone(clipper)
        control_of_all._factors = factors
    control_of_all.before_base_step(flats)
    optimizer.step()
    control_of_all.after_base_step(flats)
    control_of_all.after_applied_step()

    expected = {name: grown[name].clone() for name in names}
    optimizer = torch.optim.AdamW(expected.values(), **settings)
    for name, weight in expected.items():
        weight.grad = gradients[name]
    optimizer.step()
    ratios: Any = {}
    if "quack" in control:
        ratios = quack_by_hand(grown, start, config)
    elif control == "layers":
        ratios = {name: [(0.3, 2.0)[int(name.split(".")[1])]] for name in names if grown[name].dim() == 2}
    for name, values in ratios.items():
        width = grown[name].shape[0] // len(values)
        heads_of = zip(grown[name].split(width), expected[name].split(width), values, strict=True)
        expected[name] = torch.cat([old + ratio * (new - old) for old, new, ratio in heads_of])
    if clipper is not None:
        clip(expected, list(largest), config)
    found = torch.cat(flats)[:total].split([grown[name].numel() for name in names])
    for name, flat in zip(names, found, strict=True):
        num_heads = heads[name] or 1
        change = (flat - grown[name].flatten()).view(num_heads, -1)
        reference_change = (expected[name] - grown[name]).view(num_heads, -1)
        error = (change - reference_change).norm(dim=1) / reference_change.norm(dim=1)
        assert error.max() <= 1e-6, (name, error)


def clip_alone(clipper: Clipper) -> Any:
    """`Clipper.agree` with one rank and no process group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launch.attention_control.control.dist.all_reduce", lambda tensor, op: None)
        return clipper.compute_factors()
