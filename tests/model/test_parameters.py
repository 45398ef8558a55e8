"""The roles and layouts that modules declare for their parameters."""

import pytest
import torch
from torch import nn

from model.gpt import GPT
from model.parameters import Kind, ParameterSpec, collect_specs

LATENT_MATRICES = {
    Kind.QUERY_DOWN,
    Kind.QUERY_UP,
    Kind.QUERY_ROPE,
    Kind.KV_DOWN,
    Kind.KEY_UP,
    Kind.KEY_ROPE,
}


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_every_parameter_has_one_spec(make_model, qk_norm, tie_embeddings):
    model = make_model(qk_norm=qk_norm, tie_embeddings=tie_embeddings)
    specs = collect_specs(model)
    assert list(specs) == [name for name, _ in model.named_parameters()]
    kinds = [spec.kind for spec in specs.values()]
    assert kinds.count(Kind.EMBEDDING) == 1
    assert kinds.count(Kind.HEAD) == (0 if tie_embeddings else 1)
    assert kinds.count(Kind.QUERY) == kinds.count(Kind.KEY) == kinds.count(Kind.FFN_OUT) == 2
    assert kinds.count(Kind.QK_NORM_GAIN) == (4 if qk_norm else 0)
    assert kinds.count(Kind.NORM_GAIN) == 5


def test_heads_are_contiguous_rows(make_model):
    model = make_model(num_kv_heads=2, head_dim=10)
    specs = collect_specs(model)
    for name, parameter in model.named_parameters():
        spec = specs[name]
        if spec.kind in (Kind.QUERY, Kind.KEY, Kind.VALUE):
            assert parameter.shape == (spec.num_heads * spec.head_dim, 32)
    assert specs["blocks.0.attention.query.weight"].num_heads == 4
    assert specs["blocks.0.attention.key.weight"].num_heads == 2
    assert specs["blocks.1.attention.output.weight"] == ParameterSpec(
        Kind.ATTENTION_OUTPUT, num_heads=4, head_dim=10, init_std=0.15 / 2
    )


def test_roles_determine_decay_and_query_key_membership():
    decayed = {kind for kind in Kind if ParameterSpec(kind).is_decayed}
    assert decayed == {
        Kind.QUERY,
        Kind.KEY,
        Kind.VALUE,
        Kind.ATTENTION_OUTPUT,
        Kind.FFN_IN,
        Kind.FFN_OUT,
        Kind.HEAD,
        Kind.ATTENTION_GATE,
        *LATENT_MATRICES,
    }
    query_key = {kind for kind in Kind if ParameterSpec(kind).is_query_key}
    gains = {Kind.QK_NORM_GAIN, Kind.QUERY_LATENT_GAIN, Kind.KV_LATENT_GAIN}
    assert query_key == {Kind.QUERY, Kind.KEY, Kind.SOFTMAX_SCALE, *LATENT_MATRICES, *gains}


class Declared(nn.Module):
    def __init__(self, specs: dict[str, ParameterSpec]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.specs = specs

    def parameter_specs(self) -> dict[str, ParameterSpec]:
        return self.specs


def test_invalid_declarations_raise_and_name_the_parameter(make_config):
    gain = {"weight": ParameterSpec(Kind.NORM_GAIN)}

    model = GPT(make_config())
    model.blocks[1].attention.extra = nn.Linear(3, 2, bias=False)
    with pytest.raises(ValueError, match=r"blocks\.1\.attention\.extra\.weight"):
        collect_specs(model)

    with pytest.raises(ValueError, match=r"0\.bias: declared by Declared, which has no such parameter"):
        collect_specs(nn.Sequential(Declared({**gain, "bias": ParameterSpec(Kind.NORM_GAIN)})))

    tied = nn.Sequential(Declared(gain), Declared(gain))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"1\.weight: declared more than once"):
        collect_specs(tied)
