"""Muon under ZeRO takes the steps of a plain single-process loop, whatever the stage, precision and number of ranks.

The reference knows nothing of flat tensors, owners or Newton-Schulz: whole matrices, singular value decompositions in
float64, and `torch.optim.AdamW` for the rest. Weight decay and clipping are on, sizes are such that heads and matrices
straddle the shards' borders, and the batch does not divide.

In fp32 both run freely for five steps. In bf16 they would part: another order of sums flips roundings of gradients,
and orthogonalising makes noise in small singular directions as large as everything else (up to 485 times; 2 % of the
momentum became 17 % of the change). So there each step starts from the run's own weights and momenta: the gradient must
be right to bf16's precision, and the step exactly that of the run's own momenta.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.load import load_config
from configs.schema import Config
from data.loader import BatchGeometry, StepLoader
from data.order import SampleOrder
from data.source import TokenSource
from launch.checkpoint.files import CheckpointReader
from launch.optim.muon import (
    Block,
    Fragment,
    MuonWithAdamW,
    ShardRange,
    assign_owners,
    make_plan,
    orthogonalise_blocks,
    split_into_blocks,
)
from launch.optim.optimizer import group_learning_rates
from launch.optim.schedule import learning_rate
from model.gpt import GPT
from model.initialisation import initialise
from model.stability.groups import GroupName
from tests.conftest import VOCAB_SIZE, read_metrics
from tests.launch.attention_control.reference import is_controlled, quack_by_hand

NUM_STEPS = 5
SEQ_LEN = 32
SETTINGS = [
    f"train.steps={NUM_STEPS}",
    "train.global_batch_tokens=352",
    "optim={name: muon, lr: 5.0e-3, eps: 1.0e-5, warmup_steps: 0, grad_clip: 0.5, weight_decay: 0.3}",
    "optim.muon={momentum: 0.9, adamw_lr: 3.0e-3}",
    "model.dim=36",
    "model.head_dim=10",
    "model.ffn_dim=70",
]
MODELS = {
    "mha": ["model.num_kv_heads=4"],
    "gqa_by_head": ["model.num_kv_heads=2", "optim.muon.per_head=true"],
    # Two query/key matrices: fewer than three ranks.
    "one_layer": ["model.num_layers=1", "model.tie_embeddings=true", "model.attention.qk_norm=true"],
    "mla": ["model.attention={kind: mla, mla: {q_latent_dim: 14, kv_latent_dim: 10, rope_dim: 6, latent_norm: false}}"],
    "mla_by_head": [
        "model.attention={kind: mla, mla: {q_latent_dim: 14, kv_latent_dim: 10, rope_dim: 6}}",
        "optim.muon.per_head=true",
    ],
}
ADAMW_SHARE = 3e-3 / 5e-3
# Relative errors; in brackets the largest that was seen.
FP32_TOLERANCE = 1e-4  # five steps (3.8e-5, of a matrix with small singular values; others 1e-5)
BF16_MOMENTUM_TOLERANCE = 5e-3  # (1.7e-3 on two ranks, 3e-3 on three, where DeepSpeed divides bf16 gradients by 3)
BF16_STEP_TOLERANCE = 3e-4  # a step, given the run's own momenta (8.5e-5)
BF16_ADAMW_TOLERANCE = 3e-2  # a step (1.1e-2)
QUACK = "qk_control={policy: quack, alpha: 1.25}"
Weights = dict[str, torch.Tensor]
MicroBatch = tuple[torch.Tensor, torch.Tensor, int]  # tokens, targets, number of targets of the whole batch


class Case(NamedTuple):
    """One combination of a run's settings."""

    model: str
    stage: int
    precision: str
    policy: str

    def settings(self, name: str) -> list[str]:
        more = [QUACK] if self.policy == "quack" else []
        if self.stage == 3:  # several sub-groups, and parameters that are split although they are small
            zero = "{stage3_param_persistence_threshold: 64, sub_group_size: 3000}"
            more.append(f"deepspeed.overrides.zero_optimization={zero}")
        return [
            *SETTINGS,
            *MODELS[self.model],
            *more,
            "checkpoint={every_steps: 1, keep_last: 9}",
            f"run.name={name}",
            f"deepspeed.zero_stage={self.stage}",
            f"train.precision={self.precision}",
        ]


def orthogonal_by_svd(matrix: torch.Tensor) -> torch.Tensor:
    """Five iterations of the polynomial on the singular values, in float64."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ vh


def has_muon(name: str, weight: torch.Tensor) -> bool:
    return weight.dim() == 2 and name not in ("embedding.weight", "head.weight")


def heads_of(name: str, config: Config) -> int:
    """Heads that are orthogonalised on their own."""
    if config.optim.muon.per_head and name.endswith(("query.weight", "query_up.weight", "query_rope.weight")):
        return config.model.num_heads
    if config.optim.muon.per_head and name.endswith(("key.weight", "key_up.weight")):
        assert config.model.num_kv_heads is not None
        return config.model.num_kv_heads
    return 1


class Checkpoints:
    """A run's weights and Muon's momenta after each step, whole."""

    def __init__(self, run_folder: Path, shapes: dict[str, torch.Size]) -> None:
        self._folder = run_folder / "checkpoints"
        self._shapes = shapes

    def read(self, step: int, kind: str, names: Iterable[str]) -> Weights:
        out = {name: torch.empty(self._shapes[name].numel()) for name in names}
        with CheckpointReader(self._folder / f"step_{step:08d}") as reader:
            for name, tensor in out.items():
                reader.read_range(kind, name, tensor, 0)
        return {name: tensor.view(self._shapes[name]) for name, tensor in out.items()}


def muon_change(weight: torch.Tensor, direction: torch.Tensor, lr: float, num_heads: int, decay: float) -> torch.Tensor:
    """What one step adds to a weight, in float64."""
    steps = [0.2 * max(head.shape) ** 0.5 * orthogonal_by_svd(head) for head in direction.chunk(num_heads)]
    return -lr * (decay * weight.double() + torch.cat(steps))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def problems_of_a_run(config: Config, num_ranks: int, run_folder: Path) -> Iterator[str]:
    """Trains with the run's micro-batches and compares with its checkpoints."""
    in_bf16 = config.train.precision == "bf16"
    is_autocast = config.deepspeed.zero_stage == 0 and in_bf16
    model = GPT(config.model)
    initialise(model, config.run.seed)
    if in_bf16 and not is_autocast:
        model.bfloat16()
    parameters = dict(model.named_parameters())
    checkpoints = Checkpoints(run_folder, {name: parameter.shape for name, parameter in parameters.items()})
    masters = {name: parameter.detach().float().clone() for name, parameter in parameters.items()}
    initial = copy.deepcopy(masters)
    momenta = {name: torch.zeros_like(weight) for name, weight in masters.items() if has_muon(name, weight)}
    alpha = config.qk_control.alpha if config.qk_control.policy == "quack" else 1.0
    mu, decay = config.optim.muon.momentum, config.optim.weight_decay
    adamw = torch.optim.AdamW(
        [
            {"params": [weight], "name": name, "weight_decay": decay if name == "head.weight" else 0.0}
            for name, weight in masters.items()
            if name not in momenta
        ],
        betas=config.optim.betas,
        eps=config.optim.eps,
        fused=True,
    )
    for step, micro_batches in enumerate(batches(config)):
        set_gradients(masters, model, micro_batches, num_ranks, is_autocast)
        torch.nn.utils.clip_grad_norm_(list(masters.values()), config.optim.grad_clip)
        rate = learning_rate(step, NUM_STEPS, config.optim)
        for group in adamw.param_groups:
            group["lr"] = rate * ADAMW_SHARE * (alpha if is_controlled(group["name"]) else 1.0)
        old, old_momenta = copy.deepcopy(masters), copy.deepcopy(momenta)
        ratios = quack_by_hand(masters, initial, config) if config.qk_control.policy == "quack" else {}
        adamw.step()
        for name, momentum in momenta.items():
            momentum.copy_(mu * momentum + (1 - mu) * masters[name].grad)
        if in_bf16:
            for name, momentum in checkpoints.read(step + 1, "momentum_buffer", momenta).items():
                error = relative_error(momentum, momenta[name])
                if error > BF16_MOMENTUM_TOLERANCE:
                    yield f"step {step}: the momentum of {name} is off by {error:.2e}"
                momenta[name].copy_(momentum)
        for name, momentum in momenta.items():
            lr = rate * (alpha if is_controlled(name) else 1.0)
            # Nesterov: momentum M + (1 - momentum) G, and (1 - momentum) G = M - momentum M_old
            direction = (1 + mu) * momentum.double() - mu * old_momenta[name].double()
            change = muon_change(old[name], direction, lr, heads_of(name, config), decay)
            masters[name].copy_(old[name].double() + change)
        for name, values in ratios.items():
            heads = zip(old[name].chunk(len(values)), masters[name].chunk(len(values)), values, strict=True)
            masters[name].copy_(torch.cat([before + ratio * (new - before) for before, new, ratio in heads]))
        if in_bf16:
            for name, found in checkpoints.read(step + 1, "master", masters).items():
                error = relative_error(found - old[name], masters[name] - old[name])
                if error > (BF16_STEP_TOLERANCE if name in momenta else BF16_ADAMW_TOLERANCE):
                    yield f"step {step}: the change of {name} is off by {error:.2e}"
                masters[name].copy_(found)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(masters[name])
    if not in_bf16:
        for name, found in checkpoints.read(NUM_STEPS, "master", masters).items():
            error = relative_error(found - initial[name], masters[name] - initial[name])
            if error > FP32_TOLERANCE:
                yield f"the change of {name} is off by {error:.2e}"


def set_gradients(
    masters: Weights, model: GPT, micro_batches: list[MicroBatch], num_ranks: int, is_autocast: bool
) -> None:
    """Gives the masters the gradient of the mean loss, in the run's order of scaling and summing."""
    for weight in masters.values():
        weight.grad = torch.zeros_like(weight)
    for tokens, targets, num_targets in micro_batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            loss, _, _ = model(tokens, targets)
        (loss * (num_ranks / num_targets)).backward()
        for name, parameter in model.named_parameters():
            masters[name].grad.add_(parameter.grad.float())
            parameter.grad = None
    for weight in masters.values():
        weight.grad.div_(num_ranks)


def batches(config: Config) -> Iterator[list[MicroBatch]]:
    """The micro-batches of every step, on one rank."""
    source = TokenSource.open(config.data.sources[0].path)
    order = SampleOrder([source.num_windows(SEQ_LEN)], [1.0], config.run.seed)
    rows, samples = config.train.micro_batch_size, config.train.global_batch_tokens // SEQ_LEN
    geometry = BatchGeometry(samples, rows, -(-samples // rows), 1)
    with StepLoader([source], order, geometry, SEQ_LEN, 0, 0, VOCAB_SIZE) as loader:
        for batch in itertools.islice(loader, NUM_STEPS):
            yield [(micro.tokens, micro.targets, batch.num_targets) for micro in batch.micro_batches]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_equal_to_a_plain_loop(
    num_ranks: int, tiny_config: Path, tmp_path: Path, run_cases: Callable[..., Any]
) -> None:
    """All stages in both precisions on each number of ranks; over the three numbers, every model at every stage."""
    models, cases = list(MODELS), {}
    for stage, (index, precision) in itertools.product((0, 1, 2, 3), enumerate(("fp32", "bf16"))):
        model = models[(stage + 2 * index + num_ranks) % len(models)]
        policy = ("none", "quack")[(stage + index + num_ranks) % 2]
        name = f"{model}_s{stage}_{precision}_{policy}_r{num_ranks}"
        cases[name] = Case(model, stage, precision, policy).settings(name)
    outcomes = run_cases(num_ranks, [(tiny_config, settings) for settings in cases.values()])
    assert outcomes == [[0] * len(cases)] * num_ranks, outcomes
    problems = []
    for name, settings in cases.items():
        config, folder = load_config(tiny_config, settings), tmp_path / "runs" / name
        problems += [f"{name}: {problem}" for problem in problems_of_a_run(config, num_ranks, folder)]
        for step, record in enumerate(read_metrics(folder)):
            rate = learning_rate(step, NUM_STEPS, config.optim)
            scale = 1.25 if config.qk_control.policy == "quack" else 1.0
            assert (record["lr"], record["lr_qk"]) == (rate, rate * scale)
    assert not problems, "\n".join(problems)


def test_clipping_acts_on_the_raw_gradient(tiny_config: Path, tmp_path: Path, run_cases: Callable[..., Any]) -> None:
    """A first step orthogonalises the gradient, so clipping leaves it alone, and makes the momentum smaller.

    Clipped after the orthogonalisation, the step would shrink 10,000 times, and the momentum would keep its size.
    """
    clip = 1e-4
    runs = {}
    for stage, value in itertools.product((0, 1, 2, 3), (0.0, clip)):
        name = f"s{stage}_{value}"
        settings = Case("mha", stage, "fp32", "none").settings(name)
        runs[name] = [*settings, "train.steps=1", f"optim.grad_clip={value}"]
    assert run_cases(2, [(tiny_config, settings) for settings in runs.values()]) == [[0] * len(runs)] * 2
    model = GPT(load_config(tiny_config, runs["s0_0.0"]).model)
    initialise(model, seed=0)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    hidden = [name for name, parameter in model.named_parameters() if has_muon(name, parameter)]
    for stage in (0, 1, 2, 3):
        free, clipped = (tmp_path / "runs" / f"s{stage}_{value}" for value in (0.0, clip))
        gradient_norm = read_metrics(free)[0]["grad_norm"]
        assert gradient_norm > 0.1
        weights, momenta = (
            [Checkpoints(folder, shapes).read(1, kind, hidden) for folder in (free, clipped)]
            for kind in ("master", "momentum_buffer")
        )
        for name in hidden:
            start = dict(model.named_parameters())[name].detach()
            changes = [table[name] - start for table in weights]
            assert relative_error(changes[1], changes[0]) <= 1e-4, (stage, name)
            assert relative_error(momenta[1][name], momenta[0][name] * (clip / gradient_norm)) <= 1e-5, (stage, name)


@given(costs=st.lists(st.integers(1, 10**9), max_size=60), num_ranks=st.integers(1, 9))
def test_every_matrix_has_one_owner_and_the_loads_are_balanced(costs: list[int], num_ranks: int) -> None:
    owners = assign_owners(costs, num_ranks)
    assert len(owners) == len(costs)
    assert all(0 <= owner < num_ranks for owner in owners)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(num_ranks)]
    mean, largest = sum(costs) / num_ranks, max(costs, default=0)
    assert max(loads) <= mean + (1 - 1 / num_ranks) * largest + 1e-6
    if costs and len(costs) <= num_ranks:
        assert max(loads) == largest, "a rank had two while another had none"


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[Block], list[list[ShardRange]]]:
    """Blocks of some parameters, and pieces of them on some ranks: cut anywhere, in any order, empty ranks included."""
    num_ranks = draw(st.integers(1, 5))
    blocks, pieces = [], [[] for _ in range(num_ranks)]
    for index in range(draw(st.integers(0, 6))):
        heads, rows, cols = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
        blocks += split_into_blocks(f"w{index}", (heads * rows, cols), heads)
        numel = heads * rows * cols
        cuts = sorted(draw(st.lists(st.integers(0, numel), min_size=num_ranks - 1, max_size=num_ranks - 1)))
        ranks = draw(st.permutations(range(num_ranks)))
        for rank, start, stop in zip(ranks, [0, *cuts], [*cuts, numel], strict=True):
            if start < stop:
                pieces[rank].append((f"w{index}", start, stop))
    return blocks, pieces


@given(layout=layouts())
def test_pieces_on_any_cut_meet_at_their_owners_and_return(layout: tuple[list[Block], list[list[ShardRange]]]) -> None:
    """The plans of all ranks, with the exchange done by hand."""
    blocks, pieces = layout
    plans = [make_plan(blocks, pieces, rank) for rank in range(len(pieces))]
    assert sorted(map(repr, itertools.chain.from_iterable(plan.blocks for plan in plans))) == sorted(map(repr, blocks))
    held = [{(name, number) for name, start, stop in part for number in range(start, stop)} for part in pieces]

    def numbers(fragments: Iterable[Fragment]) -> list[tuple[str, int]]:
        return [(part.block.name, number) for part in fragments for number in range(part.start, part.stop)]

    messages = []
    for rank, plan in enumerate(plans):
        sent = numbers(plan.outgoing)
        assert set(sent) == held[rank] and len(sent) == len(held[rank]), "each number of a piece is sent once"
        parts = iter(sent)
        messages.append([list(itertools.islice(parts, size)) for size in plan.outgoing_sizes])
    for rank, plan in enumerate(plans):
        received = [message[rank] for message in messages]
        assert [len(part) for part in received] == plan.incoming_sizes
        assert list(itertools.chain.from_iterable(received)) == numbers(plan.incoming)
        whole = [(block.name, number) for block in plan.blocks for number in range(block.start, block.stop)]
        assert numbers(plan.incoming[position] for position in plan.order) == whole


def test_heads_and_shapes_are_orthogonalised_on_their_own() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = [*split_into_blocks("q", (24, 10), 4), *split_into_blocks("v", (24, 10)), *split_into_blocks("k", (9, 10))]
    matrices = [torch.randn(block.shape, generator=generator) for block in blocks]
    flat = torch.cat([matrix.flatten() for matrix in matrices])
    orthogonalise_blocks(flat, blocks, steps=5, dtype=torch.float32)
    for block, matrix, found in zip(blocks, matrices, flat.split([block.numel for block in blocks]), strict=True):
        expected = 0.2 * max(block.shape) ** 0.5 * orthogonal_by_svd(matrix)
        assert relative_error(found.view(block.shape), expected) <= 1e-5


def test_a_batch_larger_than_the_limit_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = split_into_blocks("w", (40, 6), 10)
    whole = torch.randn(240, generator=torch.Generator().manual_seed(0))
    parts = whole.clone()
    orthogonalise_blocks(whole, blocks, steps=5, dtype=torch.float32)
    monkeypatch.setattr("launch.optim.muon.MAX_BATCH_NUMEL", 80)
    orthogonalise_blocks(parts, blocks, steps=5, dtype=torch.float32)
    torch.testing.assert_close(parts, whole)


def test_only_matrices_are_split() -> None:
    with pytest.raises(ValueError, match=r"sink: has shape \(4,\); Muon expects a matrix"):
        split_into_blocks("sink", (4,))


def test_the_rest_has_exactly_adamw() -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(7, 5, generator=generator), torch.randn(11, generator=generator)]
    ours, theirs = ([torch.nn.Parameter(weight.clone()) for weight in start] for _ in range(2))
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}

    def groups(weights: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": [weight], "algorithm": "adamw", "weight_decay": decay}
            for weight, decay in zip(weights, (0.1, 0.0), strict=True)
        ]

    muon = MuonWithAdamW(groups(ours), **settings, momentum=0.95, newton_schulz_steps=5)
    adamw = torch.optim.AdamW(groups(theirs), **settings, fused=True)
    for _ in range(3):
        for our_weight, their_weight in zip(ours, theirs, strict=True):
            our_weight.grad = torch.randn(our_weight.shape, generator=generator)
            their_weight.grad = our_weight.grad.clone()
        muon.step()
        adamw.step()
    for our_weight, their_weight in zip(ours, theirs, strict=True):
        assert torch.equal(our_weight, their_weight)
        state, their_state = muon.state[our_weight], adamw.state[their_weight]
        assert state.keys() == their_state.keys()
        assert all(torch.equal(state[key], their_state[key]) for key in state)


def test_rates_of_the_parameters_that_have_adamw(tiny_config: Path) -> None:
    """They follow the schedule to a peak of their own; query/key gains get alpha times that."""
    settings = ["optim={name: muon, lr: 8e-3, warmup_steps: 2, schedule: constant}", "qk_control.policy=constant"]
    own = load_config(tiny_config, [*settings, "optim.muon.adamw_lr=4e-3"])
    expected = {"query_key": 4e-4, "query_key_no_decay": 2e-4, "decay": 4e-3, "no_decay": 2e-3, "head": 2e-3}
    assert group_learning_rates(0, own, GroupName) == pytest.approx(expected)
    assert group_learning_rates(5, own, GroupName) == pytest.approx({name: 2 * rate for name, rate in expected.items()})
    shared = group_learning_rates(0, load_config(tiny_config, settings), GroupName)
    assert shared["decay"] == shared["no_decay"] == shared["head"] == 4e-3
