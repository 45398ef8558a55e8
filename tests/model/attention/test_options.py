"""The attention options (softcap, Scalable-Softmax, sink, gate), alone and combined, in every kind of attention."""

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from model.attention.rotary import rotary_table
from model.attention.softmax_scale import SoftmaxScale
from model.gpt import GPT
from model.initialisation import InitRow, describe_init, initialise
from model.parameters import Kind, ParameterSpec, collect_specs
from model.stability.groups import GroupName, group_names
from tests.model.attention.reference import reference_mha, reference_mla

OPTIONS: dict[str, Any] = {"softcap": 1.5, "ssmax": True, "sink": True, "gated": True}
COMBINATIONS = [dict(chosen) for size in range(1, 5) for chosen in combinations(OPTIONS.items(), size)]
SINGLE_AND_ALL = [dict([option]) for option in OPTIONS.items()] + [OPTIONS]
KINDS: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa": {"num_kv_heads": 2, "head_dim": 10},
    "mla": {"kind": "mla", "mla": {"q_latent_dim": 12, "kv_latent_dim": 14, "nope_dim": 6, "value_dim": 5}},
}
every_kind = pytest.mark.parametrize("keys", KINDS.values(), ids=KINDS)
with_and_without_qk_norm = pytest.mark.parametrize("qk_norm", [False, True], ids=["", "qk_norm"])


def option_names(options: dict[str, Any]) -> str:
    return "+".join(options)


@pytest.mark.parametrize("options", COMBINATIONS, ids=option_names)
@with_and_without_qk_norm
@every_kind
def test_values_and_gradients_match_the_formulas(make_model, keys, qk_norm, options):
    model = make_model(**keys, qk_norm=qk_norm, options=options)
    attention, config = model.blocks[0].attention, model.config
    generator = torch.Generator().manual_seed(0)
    x_BTD = torch.randn(2, 19, 32, generator=generator, requires_grad=True)
    weights_BTD = torch.randn(2, 19, 32, generator=generator)
    rotary = rotary_table(torch.arange(19), attention.rotary_dim, config.rope_theta)
    reference = reference_mla if config.attention.kind == "mla" else reference_mha

    actual, expected = attention(x_BTD, rotary), reference(attention, x_BTD, config)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    names, parameters = zip(*attention.named_parameters(), strict=True)
    inputs = (x_BTD, *parameters)
    gradients = torch.autograd.grad(actual, inputs, weights_BTD)
    expected_gradients = torch.autograd.grad(expected, inputs, weights_BTD.double())
    for name, gradient, expected_gradient in zip(("x", *names), gradients, expected_gradients, strict=True):
        scale = expected_gradient.abs().max().item()
        assert scale > 1e-3, f"{name} has no effect"
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-5 * max(scale, 1), msg=name)


@pytest.mark.parametrize("options", SINGLE_AND_ALL, ids=option_names)
@with_and_without_qk_norm
@every_kind
def test_decoding_with_a_cache_matches_the_full_forward_pass(make_model, batch, keys, qk_norm, options):
    model, tokens_BT = make_model(**keys, qk_norm=qk_norm, options=options), batch[0]
    with torch.no_grad():
        expected = model.logits(tokens_BT)
        for bounds in ([0, 7, 8, 9, 15, 40], range(41)):
            cache = model.new_cache(batch_size=3, length=40)
            parts = [model.logits(tokens_BT[:, a:b], cache) for a, b in pairwise(bounds)]
            torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)


@every_kind
def test_projected_queries_include_scalable_softmax(make_model, keys):
    """So that q·k are the logits, at whatever position the queries start."""
    plain, scaled = make_model(**keys), make_model(**keys, options={"ssmax": True})
    plain.load_state_dict(scaled.state_dict(), strict=False)
    attention, rotary_dim = scaled.blocks[0].attention, scaled.rotary_dim
    x_BTD = torch.randn(2, 19, 32, generator=torch.Generator().manual_seed(0))
    cos_TR, sin_TR = rotary = rotary_table(torch.arange(19), rotary_dim, 1e4)
    q, k, v = attention.project(x_BTD, rotary)
    plain_q, plain_k, plain_v = plain.blocks[0].attention.project(x_BTD, rotary)
    assert torch.equal(k, plain_k) and torch.equal(v, plain_v)
    num_visible_T1 = torch.arange(1.0, 20.0)[:, None]
    torch.testing.assert_close(q, plain_q * attention.softmax_scale.weight[:, None, None] * num_visible_T1.log())
    later_q, _, _ = attention.project(x_BTD[:, 5:], (cos_TR[5:], sin_TR[5:]), first_position=5)
    torch.testing.assert_close(later_q, q[:, :, 5:])


def loss_and_gradients(model: GPT, batch: tuple) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    objective_sum = model(*batch)[0]
    objective_sum.backward()
    return objective_sum.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_kind
def test_activation_checkpointing_gives_identical_loss_and_gradients(make_model, batch, keys, dtype):
    keys = {**keys, "qk_norm": True, "options": OPTIONS}
    loss, gradients = loss_and_gradients(make_model(**keys).to(dtype), batch)
    checkpointed = make_model(**keys, activation_checkpointing=True).to(dtype)
    checkpointed_loss, checkpointed_gradients = loss_and_gradients(checkpointed, batch)
    assert torch.equal(checkpointed_loss, loss)
    for name, gradient in gradients.items():
        assert torch.equal(checkpointed_gradients[name], gradient), name


@pytest.mark.slow
@pytest.mark.parametrize("options", SINGLE_AND_ALL, ids=option_names)
@pytest.mark.parametrize("keys", [KINDS["gqa"], {**KINDS["mla"], "activation_checkpointing": True}], ids=["gqa", "mla"])
def test_compiled_blocks_match_eager(make_model, batch, keys, options):
    """The blocks are traced and differentiated by the compiler, without code generation, which would be slow.

    On the CPU softcap's loop over chunks is not compiled, so it splits the graph.
    """
    model = make_model(**keys, options=options)
    loss, gradients = loss_and_gradients(model, batch)
    torch.compiler.reset()
    counters.clear()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    compiled_loss, compiled_gradients = loss_and_gradients(model, batch)
    num_graphs = counters["stats"]["unique_graphs"]
    assert num_graphs == (4 if "softcap" in options else 1), "the blocks share compiled code"
    for _ in range(3):
        model(*batch)
    assert counters["stats"]["unique_graphs"] == num_graphs, "nothing is compiled again"
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(compiled_gradients[name], gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["autocast", "bf16"])
@pytest.mark.parametrize("options", SINGLE_AND_ALL, ids=option_names)
@every_kind
def test_bf16_is_close_to_fp32(make_model, batch, keys, options, mode):
    model = make_model(**keys, options=options)
    loss, gradients = loss_and_gradients(model, batch)
    if mode == "bf16":
        model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        bf16_loss, bf16_gradients = loss_and_gradients(model, batch)
    torch.testing.assert_close(bf16_loss, loss, rtol=5e-3, atol=0)
    for name, gradient in gradients.items():
        # Parameters with one element per head have gradients that sum over all positions with both signs.
        tolerance = 0.15 if gradient.numel() == model.config.num_heads else 0.06
        assert (bf16_gradients[name] - gradient).norm() < tolerance * gradient.norm(), name


@pytest.mark.parametrize("mode", ["autocast", "bf16"])
@pytest.mark.parametrize("options", SINGLE_AND_ALL, ids=option_names)
@every_kind
def test_decoding_in_bf16_is_close_to_fp32(make_model, batch, keys, options, mode):
    model, tokens_BT = make_model(**keys, options=options), batch[0]
    expected = model.logits(tokens_BT)
    if mode == "bf16":
        model.bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        cache = model.new_cache(batch_size=3, length=40)
        logits = torch.cat([model.logits(tokens_BT[:, a:b], cache) for a, b in pairwise([0, 20, *range(21, 41)])], 1)
    assert (logits.float() - expected).abs().mean() < 0.05 * expected.std()


@every_kind
def test_options_declare_their_initial_values_and_roles(make_config, keys):
    config = make_config(**keys, qk_norm=True, options=OPTIONS, max_seq_len=64)
    model = GPT(config)
    initialise(model, seed=0)
    attention, specs = model.blocks[1].attention, collect_specs(model)
    torch.testing.assert_close(attention.softmax_scale.weight.detach() * torch.tensor(64.0).log(), torch.ones(4))
    assert torch.equal(attention.sink.detach(), torch.zeros(4))
    value_dim = 5 if config.attention.kind == "mla" else config.head_dim
    prefix = "blocks.1.attention."
    assert specs[prefix + "gate.weight"] == ParameterSpec(Kind.ATTENTION_GATE, 4, value_dim, 0.02)
    assert attention.gate.weight.shape == (4 * value_dim, 32)
    assert attention.gate.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert specs[prefix + "sink"] == ParameterSpec(Kind.ATTENTION_SINK, 4, 1, init_value=0.0)
    scale_spec = specs[prefix + "softmax_scale.weight"]
    assert scale_spec == ParameterSpec(Kind.SOFTMAX_SCALE, 4, 1, init_value=pytest.approx(0.2404, rel=1e-3))

    groups = group_names(specs)
    assert prefix + "softmax_scale.weight" in groups[GroupName.QUERY_KEY_NO_DECAY]
    assert prefix + "sink" in groups[GroupName.NO_DECAY]
    assert prefix + "gate.weight" in groups[GroupName.DECAY]
    assert not {Kind.SOFTMAX_SCALE, Kind.ATTENTION_SINK, Kind.ATTENTION_GATE} & attention.query_key_weights().keys()

    rows = describe_init(model)
    assert InitRow("blocks.*.attention.sink", Kind.ATTENTION_SINK, (4,), None, 2, 0.0) in rows
    scale_row = next(row for row in rows if row.kind is Kind.SOFTMAX_SCALE)
    assert (scale_row.std, scale_row.count, scale_row.value) == (None, 2, pytest.approx(0.2404, rel=1e-3))


@pytest.mark.parametrize("max_seq_len", [1, 2])
def test_the_shortest_contexts_have_a_finite_scale_and_gradients(make_model, max_seq_len):
    assert SoftmaxScale(4, max_seq_len).init_value == pytest.approx(1.4427, rel=1e-4)
    model = make_model(max_seq_len=max_seq_len, options=OPTIONS)
    tokens_BT = torch.zeros(1, max_seq_len, dtype=torch.long)
    loss, gradients = loss_and_gradients(model, (tokens_BT, tokens_BT))
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_disabled_options_add_no_parameters(make_model):
    names = {name.split(".")[3] for name, _ in make_model().named_parameters() if ".attention." in name}
    assert names == {"query", "key", "value", "output"}
