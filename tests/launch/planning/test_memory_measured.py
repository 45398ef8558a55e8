"""The plan is within 10 % of what a rank's resident memory grows by on CPU, for a model of 50M parameters.

`memory_worker.py` says how that is measured. All cases and what was measured are in docs/memory.md.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from configs.load import load_config
from launch.planning.memory import model_sizes, plan_memory
from tests.conftest import ROOT, finish, launcher_command, start
from tests.launch.planning.memory_worker import memory_environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc"),
]

SHORT = ["model.max_seq_len=64", "train.micro_batch_size=2"]
LONG = ["model.max_seq_len=128", "train.micro_batch_size=8", "train.global_batch_tokens=1024"]
# Precision and what else. Their peaks are in the forward pass, and in the reductions of stages 2 and 3.
CASES = {
    "bf16, mostly activations": [
        "deepspeed.zero_stage=1",
        "train.precision=bf16",
        *LONG,
        "model.attention.kind=mla",
    ],
    "fp32, two micro-batches": ["deepspeed.zero_stage=2", "train.precision=fp32", "train.global_batch_tokens=256"],
    "bf16": ["deepspeed.zero_stage=3", "train.precision=bf16", "train.global_batch_tokens=128"],
}


@pytest.mark.timeout(1200)
def test_resident_memory_grows_as_planned(tmp_path: Path) -> None:
    config_path = tmp_path / "memory.yaml"
    config_path.write_text(
        yaml.safe_dump(
            {
                "model": {"vocab_size": 8192, "dim": 640, "num_layers": 8, "num_heads": 10, "ffn_dim": 1728},
                "data": {"sources": [{"path": "none"}]},
                "train": {"steps": 20, "global_batch_tokens": 128},
                "monitor": {"every_steps": None},
            }
        )
    )
    cases = [[str(config_path), [*SHORT, *overrides]] for overrides in CASES.values()]
    cases_path = tmp_path / "cases.json"
    cases_path.write_text(json.dumps(cases))
    command = launcher_command("plain", 1, ROOT / "tests/launch/planning/memory_worker.py", str(cases_path))
    finished = finish(start(command, memory_environment()), timeout=1100)
    assert finished.code == 0, finished.output + finished.errors
    measured = json.loads(Path(f"{cases_path}.peaks").read_text())
    differences = {}
    for name, (path, overrides), peak in zip(CASES, cases, measured, strict=True):
        config = load_config(path, overrides)
        sizes = model_sizes(config)
        assert 49e6 < sizes.num_parameters < 52e6
        planned = plan_memory(sizes, config, config.deepspeed.zero_stage, 1, on_gpu=False).peak
        differences[f"stage {config.deepspeed.zero_stage}, {name}"] = planned / peak - 1
    assert max(map(abs, differences.values())) < 0.1, differences
