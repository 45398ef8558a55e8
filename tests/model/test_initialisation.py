"""Initial values of the parameters."""

import pytest
import torch

from model.gpt import GPT
from model.initialisation import InitRow, describe_init, init_parameter, initialise
from model.parameters import Kind, ParameterSpec, collect_specs


def test_values_have_the_declared_distribution(make_config):
    model = GPT(make_config(dim=128, num_layers=3, vocab_size=300, qk_norm=True))
    initialise(model, seed=3)
    for name, spec in collect_specs(model).items():
        values = model.get_parameter(name)
        if spec.init_std is None:
            assert torch.equal(values, torch.full_like(values, spec.init_value))
            continue
        assert values.std().item() == pytest.approx(spec.init_std, rel=0.03)
        assert abs(values.mean().item()) < 5 * spec.init_std / values.numel() ** 0.5
    specs = collect_specs(model)
    assert specs["blocks.0.feed_forward.gate.weight"].init_std == 0.02
    assert specs["blocks.2.feed_forward.down.weight"].init_std == pytest.approx(0.02 / 6**0.5)
    assert specs["blocks.2.attention.output.weight"].init_std == pytest.approx(0.02 / 6**0.5)


def test_values_depend_only_on_seed_and_name(make_config):
    small, deep = GPT(make_config(num_layers=2, init_std=0.02)), GPT(make_config(num_layers=5, init_std=0.02))
    initialise(small, seed=7)
    torch.manual_seed(99)
    initialise(deep, seed=7)
    names = ["embedding.weight", "head.weight", "blocks.0.attention.query.weight", "blocks.1.feed_forward.up.weight"]
    for name in names:
        assert torch.equal(small.get_parameter(name), deep.get_parameter(name))
    assert not torch.equal(small.blocks[0].attention.query.weight, small.blocks[1].attention.query.weight)
    assert not torch.equal(small.blocks[0].attention.query.weight, small.blocks[0].attention.value.weight)

    initialise(deep, seed=8)
    assert not torch.equal(small.embedding.weight, deep.embedding.weight)


def test_parameters_can_be_set_one_at_a_time_in_any_dtype(make_model, make_config):
    model = GPT(make_config())
    initialise(model, seed=5)
    name = "blocks.1.attention.key.weight"
    gathered = torch.empty_like(model.get_parameter(name), dtype=torch.bfloat16)
    init_parameter(name, gathered, collect_specs(model)[name], seed=5)
    assert torch.equal(gathered, model.get_parameter(name).bfloat16())


def test_the_global_generator_is_not_used():
    state = torch.get_rng_state()
    init_parameter("x", torch.empty(5, 5), ParameterSpec(Kind.QUERY, init_std=0.1), seed=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_describe_init_lists_every_kind_of_parameter_once(make_config):
    with torch.device("meta"):
        rows = describe_init(GPT(make_config(num_layers=8, tie_embeddings=True)))
    assert InitRow("blocks.*.attention.query.weight", Kind.QUERY, (32, 32), 0.02, 8) in rows
    assert InitRow("blocks.*.attention.output.weight", Kind.ATTENTION_OUTPUT, (32, 32), 0.005, 8) in rows
    assert InitRow("final_norm.weight", Kind.NORM_GAIN, (32,), None, 1) in rows
    assert [row.kind for row in rows].count(Kind.EMBEDDING) == 1
    assert all(row.kind is not Kind.HEAD for row in rows)
