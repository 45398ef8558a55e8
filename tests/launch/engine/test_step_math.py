"""A step is AdamW on the mean loss of the whole global batch: equal to a plain single-process loop at every stage,
on any number of ranks and micro-batch size, also when they do not divide the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.load import load_config
from configs.schema import Config
from data.loader import BatchGeometry, StepLoader
from data.order import SampleOrder
from data.source import TokenSource
from launch.checkpoint.files import CheckpointReader
from launch.optim.schedule import learning_rate
from model.gpt import GPT
from model.initialisation import initialise
from model.parameters import collect_specs
from tests.conftest import VOCAB_SIZE, read_metrics

NUM_STEPS = 4
# 7 sequences per step, which no number of ranks or rows divides. Clipping is active, and query/key weights are slower.
SETTINGS = [
    f"train.steps={NUM_STEPS}",
    "train.global_batch_tokens=224",
    "optim.grad_clip=0.5",
    "optim.weight_decay=0.3",
    "qk_control={policy: constant, alpha: 0.25}",
    "train.z_loss=1e-3",
    "model.attention.qk_norm=true",
    "model.tie_embeddings=true",
]
VARIANTS = {
    "plain": [],
    "wide": ["train.micro_batch_size=5"],
    "recomputed": ["train.activation_checkpointing=true"],
}


def reference(config: Config) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Losses, norms and final weights of a loop in plain PyTorch with the whole batch at once."""
    model = GPT(config.model)
    initialise(model, config.run.seed)
    specs = collect_specs(model)
    parameters = dict(model.named_parameters())
    slow = [name for name, spec in specs.items() if spec.kind.value in ("query", "key", "qk_norm_gain")]
    decayed = [name for name in parameters if parameters[name].dim() == 2 and name != "embedding.weight"]
    groups = [
        {
            "params": [parameter],
            "scale": 0.25 if name in slow else 1.0,
            "weight_decay": 0.3 if name in decayed else 0.0,
        }
        for name, parameter in parameters.items()
    ]
    optimizer = torch.optim.AdamW(groups, betas=config.optim.betas, eps=config.optim.eps, fused=False, foreach=False)
    source = TokenSource.open(config.data.sources[0].path)
    order = SampleOrder([source.num_windows(32)], [1.0], config.run.seed)
    records = []
    loader = StepLoader([source], order, BatchGeometry(7, 7, 1, 1), 32, 0, 0, VOCAB_SIZE)
    with loader:
        for step in range(NUM_STEPS):
            batch = next(loader)
            (micro_batch,) = batch.micro_batches
            logits = model.logits(micro_batch.tokens).double()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), micro_batch.targets.flatten())
            z_loss = torch.logsumexp(logits, -1).square().mean()
            (loss + config.train.z_loss * z_loss).backward()
            norm = torch.nn.utils.clip_grad_norm_(list(parameters.values()), config.optim.grad_clip)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config.train.steps, config.optim) * group["scale"]
            optimizer.step()
            optimizer.zero_grad()
            records.append({"loss": loss.item(), "z_loss": z_loss.item(), "grad_norm": norm.item()})
    return records, {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_equal_to_a_plain_loop(num_ranks: int, tiny_config: Path, tmp_path: Path, run_cases: Any) -> None:
    cases = {
        f"stage{stage}_{variant}": [*SETTINGS, f"deepspeed.zero_stage={stage}", *settings]
        for stage in (0, 1, 2, 3)
        for variant, settings in VARIANTS.items()
    }
    for name, settings in cases.items():
        if name.startswith("stage3"):
            settings.append("deepspeed.overrides.zero_optimization.stage3_param_persistence_threshold=64")
    outcomes = run_cases(num_ranks, [(tiny_config, [*value, f"run.name={name}"]) for name, value in cases.items()])
    assert outcomes == [[0] * len(cases)] * num_ranks

    records, weights = reference(load_config(tiny_config, SETTINGS))
    for name in cases:
        folder = tmp_path / "runs" / name
        for ours, expected in zip(read_metrics(folder), records, strict=True):
            for key, value in expected.items():
                assert ours[key] == pytest.approx(value, rel=1e-5), (name, key)
            squares = sum(norm**2 for norm in ours["grad_norms"].values())
            assert squares**0.5 == pytest.approx(expected["grad_norm"], rel=1e-5), name
            assert ours["lr_qk"] == 0.25 * ours["lr"]
        with CheckpointReader(folder / f"checkpoints/step_{NUM_STEPS:08d}") as reader:
            for parameter, expected_weight in weights.items():
                difference = reader.read_parameter(parameter) - expected_weight
                assert difference.norm() <= 2e-5 * expected_weight.norm(), (name, parameter)
