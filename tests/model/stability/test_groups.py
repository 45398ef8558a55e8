"""Optimizer groups and their learning rates."""

import pytest

from configs.policies import POLICIES
from model.parameters import Kind, ParameterSpec, collect_specs
from model.stability.groups import GroupName, group_names, group_of


def test_groups_partition_the_parameters(make_model):
    specs = collect_specs(make_model(qk_norm=True))
    groups = group_names(specs)
    assert [str(group) for group in groups] == ["query_key", "query_key_no_decay", "decay", "no_decay"]
    assert sorted(name for names in groups.values() for name in names) == sorted(specs)
    for group, names in groups.items():
        for name in names:
            assert group_of(specs[name]) is group
            assert group.is_decayed == specs[name].is_decayed
            assert group.is_query_key == specs[name].is_query_key
    assert groups[GroupName.QUERY_KEY] == [
        f"blocks.{layer}.attention.{matrix}.weight" for layer in range(2) for matrix in ("query", "key")
    ]
    assert "head.weight" in groups[GroupName.DECAY]
    assert "embedding.weight" in groups[GroupName.NO_DECAY]


def test_groups_of_latent_attention(make_model):
    """The gains of the latent norms belong to the query/key parameters, without decay; values do not belong to them."""
    model = make_model(kind="mla", num_layers=1, mla={"q_latent_dim": 12})
    groups = group_names(collect_specs(model))
    prefix = "blocks.0.attention."
    matrices = ("query_down", "query_up", "query_rope", "kv_down", "key_up", "key_rope")
    assert groups[GroupName.QUERY_KEY] == [f"{prefix}{matrix}.weight" for matrix in matrices]
    gains = ("query_latent_norm", "kv_latent_norm")
    assert groups[GroupName.QUERY_KEY_NO_DECAY] == [f"{prefix}{gain}.weight" for gain in gains]
    assert {f"{prefix}value_up.weight", f"{prefix}output.weight"} <= set(groups[GroupName.DECAY])


def test_a_tied_head_does_not_decay(make_model):
    groups = group_names(collect_specs(make_model(tie_embeddings=True)))
    assert "embedding.weight" in groups[GroupName.NO_DECAY]
    assert not any("head" in name for names in groups.values() for name in names)


def test_an_untied_head_can_have_its_own_group(make_model):
    """Then the hidden groups hold only matrices between hidden states."""
    specs = collect_specs(make_model(qk_norm=True))
    groups = group_names(specs, separate_head=True)
    assert groups[GroupName.HEAD] == ["head.weight"]
    assert GroupName.HEAD.is_decayed and not GroupName.HEAD.is_query_key
    hidden = [name for group, names in groups.items() if group.is_hidden for name in names]
    assert {name.split(".")[-2] for name in hidden} == {"query", "key", "value", "output", "gate", "up", "down"}
    assert sorted(name for names in groups.values() for name in names) == sorted(specs)
    assert GroupName.HEAD not in group_names(collect_specs(make_model(tie_embeddings=True)), separate_head=True)


def test_the_group_of_gains_exists_only_with_query_key_norms(make_model):
    assert GroupName.QUERY_KEY_NO_DECAY not in group_names(collect_specs(make_model()))
    assert group_of(ParameterSpec(Kind.QK_NORM_GAIN)) is GroupName.QUERY_KEY_NO_DECAY


@pytest.mark.parametrize(
    ("policy", "query_key_scale"), [("none", 1.0), ("constant", 0.1), ("quack", 0.1), ("adaptive", 0.1)]
)
def test_only_query_key_groups_have_a_scaled_learning_rate(policy, query_key_scale):
    scales = {group: POLICIES[policy].learning_rate_scale(0.1, group.is_query_key) for group in GroupName}
    assert scales == {
        GroupName.QUERY_KEY: query_key_scale,
        GroupName.QUERY_KEY_NO_DECAY: query_key_scale,
        GroupName.DECAY: 1.0,
        GroupName.NO_DECAY: 1.0,
        GroupName.HEAD: 1.0,
    }
