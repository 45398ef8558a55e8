"""Multi-head latent attention, compared with its formulas and with Hugging Face's DeepSeek-V3."""

from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch.profiler import profile

from configs.schema import ModelConfig, resolve_model
from model.attention.rotary import rotary_table
from model.gpt import GPT
from model.parameters import Kind, ParameterSpec, collect_specs
from tests.model.attention.deepseek import build_deepseek
from tests.model.attention.reference import reference_mla

SIZES: dict[str, Any] = {"kv_latent_dim": 14, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
VARIANTS = [
    {"kind": "mla", "qk_norm": qk_norm, "mla": {**SIZES, "latent_norm": latent_norm, "q_latent_dim": q_latent_dim}}
    for qk_norm, latent_norm, q_latent_dim in product((False, True), (False, True), (None, 12))
]


def variant_name(keys: dict[str, Any]) -> str:
    mla = keys.get("mla", {})
    return f"qk_norm={keys['qk_norm']},latent_norm={mla['latent_norm']},q_latent_dim={mla['q_latent_dim']}"


@pytest.mark.parametrize("keys", VARIANTS, ids=variant_name)
def test_output_matches_the_formulas(make_model, keys):
    model = make_model(**keys)
    attention = model.blocks[0].attention
    x_BTD = torch.randn(2, 19, 32, generator=torch.Generator().manual_seed(0))
    rotary = rotary_table(torch.arange(19), 4, model.config.rope_theta)
    expected = reference_mla(attention, x_BTD, model.config)
    torch.testing.assert_close(attention(x_BTD, rotary).double(), expected, rtol=1e-5, atol=1e-5)


def interleave(rows: torch.Tensor) -> torch.Tensor:
    """Reorders the rows of a rotated head for DeepSeek, whose pairs are adjacent instead of half a head apart."""
    first, second = rows.chunk(2)
    return torch.stack((first, second), dim=1).flatten(0, 1)


def deepseek_tensors(tensors: dict[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Converts parameters, or their gradients, to the names and layout of Hugging Face's DeepSeek-V3."""
    mla, num_heads = config.attention.mla, config.num_heads

    def by_head(*heads_of: torch.Tensor) -> torch.Tensor:
        """Concatenates the rows of head 0 of every matrix, then those of head 1, and so on."""
        per_matrix = [matrix.chunk(num_heads) for matrix in heads_of]
        return torch.cat([rows for head in zip(*per_matrix, strict=True) for rows in head])

    result = {
        "model.embed_tokens.weight": tensors["embedding.weight"],
        "model.norm.weight": tensors["final_norm.weight"],
    }
    result["lm_head.weight"] = tensors["embedding.weight" if config.tie_embeddings else "head.weight"]
    for layer in range(config.num_layers):
        ours = {
            name.removeprefix(f"blocks.{layer}.").removesuffix(".weight"): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"blocks.{layer}.")
        }
        attention = {
            name.removeprefix("attention."): tensor for name, tensor in ours.items() if name.startswith("attention.")
        }
        query_rope = torch.cat([interleave(rows) for rows in attention["query_rope"].chunk(num_heads)])
        query = by_head(attention["query_up"], query_rope)
        theirs = {
            "input_layernorm": ours["attention_norm"],
            "post_attention_layernorm": ours["feed_forward_norm"],
            **{f"mlp.{part}_proj": ours[f"feed_forward.{part}"] for part in ("gate", "up", "down")},
            "self_attn.kv_a_proj_with_mqa": torch.cat((attention["kv_down"], interleave(attention["key_rope"]))),
            "self_attn.kv_a_layernorm": attention["kv_latent_norm"],
            "self_attn.kv_b_proj": by_head(attention["key_up"], attention["value_up"]),
            "self_attn.o_proj": attention["output"],
        }
        if mla.q_latent_dim is None:
            theirs["self_attn.q_proj"] = query
        else:
            theirs["self_attn.q_a_proj"] = attention["query_down"]
            theirs["self_attn.q_a_layernorm"] = attention["query_latent_norm"]
            theirs["self_attn.q_b_proj"] = query
        result |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in theirs.items()}
    return result


@pytest.mark.parametrize("q_latent_dim", [None, 12])
@pytest.mark.parametrize(
    "keys",
    [
        {"mla": {}},
        {"mla": SIZES, "norm_eps": 1e-2, "rope_theta": 500.0},
        {"mla": {"value_dim": 20}, "tie_embeddings": True},
    ],
    ids=["derived sizes", "narrow values", "wide values"],
)
def test_loss_logits_and_gradients_match_hugging_face(make_model, batch, keys, q_latent_dim):
    model = make_model(**{**keys, "kind": "mla", "mla": {**keys["mla"], "q_latent_dim": q_latent_dim}})
    twin = build_deepseek(model.config)
    twin.load_state_dict(deepseek_tensors(model.state_dict(), model.config), strict=True)
    tokens_BT, targets_BT = batch
    num_targets = (targets_BT != -100).sum()

    torch.testing.assert_close(model.logits(tokens_BT), twin(tokens_BT).logits, rtol=1e-5, atol=1e-5)
    loss = model(tokens_BT, targets_BT)[0] / num_targets
    loss.backward()
    expected_loss = twin(tokens_BT, labels=tokens_BT, shift_labels=targets_BT).loss
    expected_loss.backward()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
    gradients = deepseek_tensors({name: p.grad for name, p in model.named_parameters()}, model.config)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(
            gradients[name], parameter.grad, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("keys", VARIANTS, ids=variant_name)
def test_decoding_with_a_cache_matches_the_full_forward_pass(make_model, batch, keys):
    model, tokens_BT = make_model(**keys), batch[0]
    with torch.no_grad():
        expected = model.logits(tokens_BT)
        for bounds in ([0, 7, 8, 9, 15, *range(16, 41)], range(41)):
            cache = model.new_cache(batch_size=3, length=40)
            parts = [model.logits(tokens_BT[:, a:b], cache) for a, b in pairwise(bounds)]
            assert torch.allclose(torch.cat(parts, dim=1), expected, atol=2e-5)
            assert cache.length == 40


@pytest.mark.parametrize("qk_norm", [False, True])
def test_decoding_in_bf16_and_under_autocast_is_close_to_fp32(make_model, batch, qk_norm):
    model, tokens_BT = make_model(kind="mla", qk_norm=qk_norm), batch[0]
    expected = model.logits(tokens_BT)

    def decode() -> torch.Tensor:
        cache = model.new_cache(batch_size=3, length=40)
        return torch.cat([model.logits(tokens_BT[:, a:b], cache) for a, b in pairwise([0, 20, *range(21, 41)])], dim=1)

    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            under_autocast = decode()
        model.bfloat16()
        in_bf16 = decode()
    for logits in (under_autocast, in_bf16):
        assert (logits.float() - expected).abs().mean() < 0.05 * expected.std()


def test_the_cache_holds_only_latents(make_model):
    """c_kv and the shared rotated key, for any number of heads; with query/key norms also one element per head."""
    model = make_model(kind="mla", mla=SIZES)
    assert model.new_cache(batch_size=3, length=5).num_bytes_per_token == 2 * (14 + 4) * 4
    assert model.new_cache(batch_size=1, dtype=torch.bfloat16).num_bytes_per_token == 2 * (14 + 4) * 2
    normed = make_model(kind="mla", mla=SIZES, qk_norm=True)
    assert normed.new_cache(batch_size=3, length=5).num_bytes_per_token == 2 * (14 + 4 + 4) * 4


@pytest.mark.parametrize("value_dim", [4, 24, 40], ids=["narrow", "equal", "wide"])
def test_training_uses_the_flash_kernel(make_model, batch, value_dim):
    model = make_model(kind="mla", mla={"nope_dim": 16, "rope_dim": 8, "value_dim": value_dim})
    with profile() as profiler:
        model(*batch)[0].backward()
    calls = {event.key: event.count for event in profiler.key_averages()}
    assert calls["aten::_scaled_dot_product_flash_attention_for_cpu"] == 2
    assert calls["aten::_scaled_dot_product_flash_attention_for_cpu_backward"] == 2
    assert "aten::_scaled_dot_product_attention_math" not in calls


def test_every_parameter_declares_its_role_and_head_layout(make_model):
    model = make_model(kind="mla", qk_norm=True, mla={**SIZES, "q_latent_dim": 12})
    specs = collect_specs(model)
    layout = {
        name.removeprefix("blocks.0.attention.").removesuffix(".weight"): (tuple(parameter.shape), specs[name])
        for name, parameter in model.named_parameters()
        if name.startswith("blocks.0.attention.")
    }
    std = 0.15
    assert layout == {
        "query_down": ((12, 32), ParameterSpec(Kind.QUERY_DOWN, init_std=std)),
        "query_latent_norm": ((12,), ParameterSpec(Kind.QUERY_LATENT_GAIN)),
        "query_up": ((4 * 6, 12), ParameterSpec(Kind.QUERY_UP, 4, 6, std)),
        "query_rope": ((4 * 4, 12), ParameterSpec(Kind.QUERY_ROPE, 4, 4, std)),
        "kv_down": ((14, 32), ParameterSpec(Kind.KV_DOWN, init_std=std)),
        "kv_latent_norm": ((14,), ParameterSpec(Kind.KV_LATENT_GAIN)),
        "key_up": ((4 * 6, 14), ParameterSpec(Kind.KEY_UP, 4, 6, std)),
        "key_rope": ((4, 32), ParameterSpec(Kind.KEY_ROPE, init_std=std)),
        "value_up": ((4 * 5, 14), ParameterSpec(Kind.VALUE, 4, 5, std)),
        "output": ((32, 4 * 5), ParameterSpec(Kind.ATTENTION_OUTPUT, 4, 5, std / 2)),
        "query_norm": ((10,), ParameterSpec(Kind.QK_NORM_GAIN)),
        "key_norm": ((10,), ParameterSpec(Kind.QK_NORM_GAIN)),
    }
    declared = model.blocks[0].attention.query_key_weights()
    assert {kind: tuple(weight.shape) for kind, weight in declared.items()} == {
        spec.kind: shape for shape, spec in layout.values() if spec.is_query_key and spec.kind is not Kind.QK_NORM_GAIN
    }

    plain = make_model(kind="mla", mla={**SIZES, "latent_norm": False})
    assert list(plain.blocks[0].attention.query_key_weights()) == [
        *(Kind.QUERY_UP, Kind.QUERY_ROPE, Kind.KV_DOWN, Kind.KEY_UP, Kind.KEY_ROPE)
    ]
    assert {
        name: tuple(parameter.shape)
        for name, parameter in plain.blocks[0].attention.named_parameters()
        if "query" in name or "norm" in name
    } == {"query_up.weight": (4 * 6, 32), "query_rope.weight": (4 * 4, 32)}
    assert list(plain.buffers()) == []


def test_default_sizes_are_those_of_deepseek_v2_lite():
    """Width 2048 and 16 heads of 128 give a latent of 512, queries and keys of 128 + 64, and values of 128."""
    model = ModelConfig(vocab_size=102_400, dim=2048, num_layers=27, num_heads=16, attention={"kind": "mla"})
    mla = resolve_model(model).attention.mla
    assert (mla.q_latent_dim, mla.kv_latent_dim) == (None, 512)
    assert (mla.nope_dim, mla.rope_dim, mla.value_dim) == (128, 64, 128)


def test_missing_and_odd_sizes_are_all_reported(make_config):
    unresolved = ModelConfig(vocab_size=61, ffn_dim=64, attention={"kind": "mla", "mla": {"rope_dim": 3}})
    with pytest.raises(ValueError, match=r"mla\.kv_latent_dim is not set; .*mla\.rope_dim is 3; rotary positions"):
        GPT(unresolved)
