"""Tests that all problems of a configuration are reported at once, each with its key and a suggestion."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from configs.errors import ConfigError
from configs.load import differences, load_config, schema_keys, to_yaml
from configs.schema import Config
from configs.table import page

MINIMAL = {
    "model": {"vocab_size": 300},
    "data": {"sources": [{"path": "shards"}]},
    "train": {"steps": 10, "global_batch_tokens": 2048},
}


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "minimal.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return list(caught.value.problems)


def test_derived_sizes_and_defaults(minimal: Path) -> None:
    config = load_config(minimal, ["model.dim=512", "model.num_heads=8", "model.num_kv_heads=2"])
    assert (config.model.head_dim, config.model.num_kv_heads, config.model.ffn_dim) == (64, 2, 1408)
    assert config.data.seq_len == config.model.max_seq_len == 1024
    assert config.run.name == "minimal"


def test_latent_attention_derives_its_sizes(minimal: Path) -> None:
    config = load_config(minimal, ["model.dim=512", "model.num_heads=8", "model.attention.kind=mla"])
    mla = config.model.attention.mla
    assert (mla.kv_latent_dim, mla.nope_dim, mla.rope_dim, mla.value_dim) == (256, 64, 32, 64)
    assert mla.q_latent_dim is None
    assert mla.latent_norm
    # With any head size, the rotated width is even and the latent smaller than the residual stream.
    config = load_config(minimal, ["model.dim=10", "model.head_dim=5", "model.attention.kind=mla"])
    assert (config.model.attention.mla.rope_dim, config.model.attention.mla.kv_latent_dim) == (4, 5)


def test_latent_attention_has_as_many_key_heads_as_query_heads(minimal: Path) -> None:
    config = load_config(minimal, ["model.num_kv_heads=2", "model.attention.kind=mla"])
    assert config.model.num_kv_heads == config.model.num_heads == 4


def test_latent_attention_with_all_sizes_needs_no_head_dim(minimal: Path) -> None:
    sizes = "{kv_latent_dim: 24, nope_dim: 10, rope_dim: 6, value_dim: 9}"
    load_config(minimal, ["model.num_heads=3", "model.attention.kind=mla", f"model.attention.mla={sizes}"])
    problems = problems_of(minimal, "model.num_heads=3", "model.attention.kind=mla")
    assert problems == [
        "model.num_heads: 3 does not divide model.dim=256; set model.head_dim, or sizes that divide",
    ]


def test_empty_section_has_its_defaults(minimal: Path) -> None:
    minimal.write_text(minimal.read_text() + "optim:\nrun:\n")
    assert load_config(minimal) == load_config(minimal, ["optim={}"])


def test_configuration_is_frozen(minimal: Path) -> None:
    with pytest.raises(ValidationError):
        load_config(minimal).optim.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("written", "value"), [("1e-3", 1e-3), ("3", 3.0), ("2.5E+2", 250.0), (".5", 0.5), ("6.0e-4", 6e-4)]
)
def test_common_number_formats_are_accepted(minimal: Path, written: str, value: float) -> None:
    assert load_config(minimal, [f"optim.lr={written}"]).optim.lr == value


def test_all_problems_are_reported_at_once(minimal: Path) -> None:
    problems = problems_of(
        minimal,
        "optim.lrr=3",
        "modle.dim=4",
        "train.steps=many",
        "train.micro_batch_size=0",
        "model.num_heads=3",
        "optim.betas=[0.9, 1.5]",
        "deepspeed.overrides.scheduler={type: WarmupLR}",
        "nonsense",
    )
    text = "\n".join(problems)
    assert len(problems) == 8
    assert "optim.lrr: unknown key; did you mean optim.lr?" in text
    assert "modle: unknown key; did you mean model?" in text
    assert "train.steps: 'many' is not allowed" in text
    assert "train.micro_batch_size: 0 is not allowed" in text
    assert "model.num_heads: 3 does not divide model.dim=256" in text
    assert "optim.betas: 1.5 is not in [0, 1)" in text
    assert "deepspeed.overrides.scheduler: is generated; set optim.schedule" in text
    assert "'nonsense': expected key.sub=value" in text


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("lr=1", "did you mean optim.lr?"),
        ("model.attention.qknorm=true", "did you mean model.attention.qk_norm?"),
        ("train.learning_rate=1", "unknown key"),
        ("model.num_kv_heads=3", "does not divide model.num_heads=4"),
        ("model.head_dim=7", "must be even"),
        ("model.attention.kind=mha2", "expected 'mha' or 'mla'"),
        ("model.attention={kind: mla, mla: {rope_dim: 7}}", "model.attention.mla.rope_dim: 7 is odd"),
        ("model.attention={kind: mla, mla: {rope_dim: 1}}", "model.attention.mla.rope_dim: 1 is not allowed"),
        ("model.attention={kind: mla, mla: {kv_latent_dim: 0}}", "model.attention.mla.kv_latent_dim: 0 is not allowed"),
        ("model.attention={kind: mla, mla: {kv_dim: 8}}", "model.attention.mla.kv_dim: unknown key"),
        ("model.attention.mla.kv_latent_dim=64", "is only for model.attention.kind=mla; set that"),
        ("qk_control.adaptive.target=0.1", "is only for qk_control.policy=adaptive"),
        ("optim.muon.per_head=true", "is only for optim.name=muon"),
        ("qk_control={policy: adaptive, alpha: 2.0}", "qk_control.alpha: 2.0 is the initial value"),
        ("model.attention.mla.latent_norm=false", "model.attention.mla.latent_norm: is only for"),
        ("data.seq_len=2000", "longer than model.max_seq_len=1024"),
        ("train.global_batch_tokens=1500", "the nearest valid value is 1024 or 2048"),
        ("train.global_batch_tokens=10", "the nearest valid value is 1024"),
        ("train.stop_step=11", "beyond train.steps=10"),
        ("train.profile={start_step: 8, steps: 4}", "not all before the last step 10"),
        ("run.seed=true", "True is not allowed"),
        ("run.seed=1.5", "1.5 is not allowed"),
        ("run.name=a/b", "'a/b' is not allowed"),
        ("optim.lr=.nan", "nan is not allowed"),
        ("optim.lr=-1", "-1 is not allowed; expected greater than 0"),
        ("optim.name=sgd", "'sgd' is not allowed; expected 'adamw'"),
        ("deepspeed.zero_stage=4", "expected 0, 1, 2 or 3"),
        ("deepspeed.overrides.zero_optimization.stage=2", "set deepspeed.zero_stage instead"),
        ("deepspeed.overrides.bf16={enabled: true}", "set train.precision instead"),
        ("deepspeed.overrides.gradient_clipping=1", "set optim.grad_clip instead"),
        ("deepspeed.overrides.train_batch_size=1", "set train.global_batch_tokens instead"),
        ("deepspeed.overrides.optimizer={type: Adam}", "set optim.* instead"),
        ("deepspeed.overrides.zero_optimizaton={}", "is not supported; allowed:"),
        ("deepspeed.overrides.zero_optimization.offload_optimizer={device: cpu}", "is not supported"),
        ("deepspeed.overrides.zero_optimization.reduce_buckt_size=5", "did you mean reduce_bucket_size?"),
        ("run.name=2026", "run.name: 2026 is not allowed; expected text, in quotes: '\"2026\"'"),
        ("run.name=..", "is not a valid folder name"),
        ("data.sources=3", "3 is not allowed; expected a list"),
        ("data.eod_id=4000", "beyond model.vocab_size=300"),
        ("data.sources=[]", "data.sources: [] is not allowed"),
        ("data.sources=[{pth: x}]", "data.sources.0.pth: unknown key; did you mean data.sources.path?"),
        ("data.sources.1.path=x", "'1' is not a valid index of a list with 1 entries"),
        ("data.sources.0.weight=0", "data.sources.0.weight: 0 is not allowed"),
        ("data.phases=[{start_tokens: 0, sources: [{path: x}]}]", "data.phases.0.start_tokens: 0 is not allowed"),
        ("data.phases=[{start_tokens: 5, sources: []}]", "data.phases.0.sources: [] is not allowed"),
        ("data.phases=[{start_tokens: 5}]", "data.phases.0.sources: is required"),
        ("data.phases=[{start_step: 5, sources: [{path: x}]}]", "data.phases.0.start_step: unknown key; did you mean"),
        (
            "data.phases=[{start_tokens: 5, sources: [{path: x}]}, {start_tokens: 1024, sources: [{path: x}]}]",
            "data.phases.1.start_tokens: 1024 must be at least one sequence of 1024 tokens after data.phases.0.start_t",
        ),
        ("data.val_sources={a/b: x}", "cannot name a validation set"),
        ("train=3", "train: 3 is not allowed; expected a mapping of keys"),
        ("train.steps.more=3", "train.steps.more: steps is 10, which has no keys"),
        ("optim.lr=[", "not valid YAML"),
    ],
)
def test_each_problem_is_reported_with_a_suggestion(minimal: Path, override: str, answer: str) -> None:
    problems = problems_of(minimal, override)
    assert answer in "\n".join(problems)
    assert all("\n" not in problem for problem in problems)


def test_init_from_and_a_resume_path_are_mutually_exclusive(minimal: Path) -> None:
    assert "set only one of them" in problems_of(minimal, "run.init_from=a", "run.resume=b")[0]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("a: [1", "not valid YAML: line 1"),
        ("- 1\n- 2", "expected a mapping of sections, found list"),
        ("train: {}\ntrain: {}", "key 'train' is given twice"),
        ("1: 2", "key 1 is not a string"),
        ("", "data: is required"),
        ("a: !!python/object:os.system x", "not valid YAML"),
    ],
)
def test_invalid_files_are_reported(tmp_path: Path, text: str, answer: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert answer in "\n".join(problems_of(path))


def test_missing_and_undecodable_files_are_reported(tmp_path: Path) -> None:
    assert "no such configuration file" in problems_of(tmp_path / "none.yaml")[0]
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: \xe9}")
    assert "cannot be read" in problems_of(tmp_path / "latin.yaml")[0]


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_resolved_configuration_is_read_back_unchanged(minimal: Path, tmp_path: Path, kind: str) -> None:
    overrides = ["train.profile={start_step: 1, steps: 2}", "optim.betas=[0.8, 0.9]", f"model.attention.kind={kind}"]
    overrides.append("data.phases=[{start_tokens: 4096, sources: [{path: x, weight: 2.0}]}]")
    config = load_config(minimal, overrides)
    (tmp_path / "resolved.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "resolved.yaml") == config


def test_differences_name_every_changed_leaf() -> None:
    old = {"a": {"b": 1, "c": 2}, "d": [1]}
    new = {"a": {"b": 1, "c": 3, "e": 4}, "d": [2]}
    assert list(differences(old, new)) == [("a.c", 2, 3), ("a.e", None, 4), ("d", [1], [2])]


def test_every_key_has_a_description() -> None:
    leaves = [(key, field) for key, field in schema_keys(Config) if "." in key]
    sections = {key.rpartition(".")[0] for key, _ in leaves}
    assert [key for key, field in leaves if key not in sections and not field.description] == []


def test_the_configuration_page_is_up_to_date() -> None:
    written = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
    assert written == page(), "run `python -m configs.table > docs/configuration.md`"
