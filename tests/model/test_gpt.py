"""The whole model, compared with Hugging Face's Llama and Qwen3, and across dtypes and execution modes."""

import shutil
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from configs.schema import ModelConfig
from model.gpt import GPT
from model.initialisation import initialise

HF_NAMES = {
    "embedding": "model.embed_tokens",
    "blocks": "model.layers",
    "final_norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "query_norm": "q_norm",
    "key_norm": "k_norm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward": "mlp",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}


MLA = {"kind": "mla", "mla": {"q_latent_dim": 12, "value_dim": 6}}


def hf_name(name: str) -> str:
    return ".".join(HF_NAMES.get(part, part) for part in name.split("."))


def hf_twin(model: GPT) -> PreTrainedModel:
    """Returns the Hugging Face model of the same sizes with the same weights."""
    config = model.config
    sizes: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
    }
    if config.attention.qk_norm:
        twin = Qwen3ForCausalLM(Qwen3Config(**sizes))
    else:
        twin = LlamaForCausalLM(LlamaConfig(**sizes))
    weights = {hf_name(name): value for name, value in model.state_dict().items()}
    twin.load_state_dict(weights, strict=True)
    return twin


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"tie_embeddings": True, "rope_theta": 500.0},
        {"num_kv_heads": 2, "norm_eps": 1e-2},
        {"num_kv_heads": 1, "head_dim": 14, "ffn_dim": 50, "tie_embeddings": True},
        {"dim": 24, "num_heads": 3, "head_dim": 6},
        {"qk_norm": True},
        {"qk_norm": True, "num_kv_heads": 2, "head_dim": 10, "tie_embeddings": True},
    ],
    ids=lambda keys: ",".join(f"{key}={value}" for key, value in keys.items()) or "mha",
)
def test_loss_logits_and_gradients_match_hugging_face(make_model, batch, keys):
    model = make_model(**keys)
    twin = hf_twin(model)
    tokens_BT, targets_BT = batch
    num_targets = (targets_BT != -100).sum()

    logits = model.logits(tokens_BT)
    expected_logits = twin(tokens_BT).logits
    torch.testing.assert_close(logits, expected_logits, rtol=1e-5, atol=1e-5)

    objective_sum, cross_entropy_sum, z_loss_sum = model(tokens_BT, targets_BT)
    (objective_sum / num_targets).backward()
    expected_loss = twin(tokens_BT, labels=tokens_BT, shift_labels=targets_BT).loss
    expected_loss.backward()
    torch.testing.assert_close(objective_sum / num_targets, expected_loss, rtol=1e-5, atol=1e-5)
    assert torch.equal(cross_entropy_sum, objective_sum.detach())
    expected_z_loss = expected_logits.logsumexp(-1).square()[targets_BT != -100].sum()
    torch.testing.assert_close(z_loss_sum, expected_z_loss, rtol=1e-5, atol=1e-5)

    expected_gradients = {name: parameter.grad for name, parameter in twin.named_parameters()}
    gradients = {hf_name(name): parameter.grad for name, parameter in model.named_parameters()}
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected_gradients[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def loss_and_gradients(model: GPT, batch: tuple) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    objective_sum = model(*batch, z_loss_weight=1e-3)[0]
    objective_sum.backward()
    return objective_sum.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [{}, MLA], ids=["mha", "mla"])
def test_activation_checkpointing_gives_identical_loss_and_gradients(make_model, batch, dtype, keys):
    keys = {**keys, "qk_norm": True, "tie_embeddings": True}
    plain = make_model(**keys).to(dtype)
    checkpointed = make_model(**keys, activation_checkpointing=True).to(dtype)
    calls = []
    checkpointed.blocks[0].attention.register_forward_hook(lambda *_: calls.append(1))
    loss, gradients = loss_and_gradients(plain, batch)
    checkpointed_loss, checkpointed_gradients = loss_and_gradients(checkpointed, batch)
    assert len(calls) == 2
    assert torch.equal(checkpointed_loss, loss)
    for name, gradient in gradients.items():
        assert torch.equal(checkpointed_gradients[name], gradient), name


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(
    "keys",
    [{}, {"activation_checkpointing": True}, {**MLA, "activation_checkpointing": True}],
    ids=["mha", "mha checkpointed", "mla checkpointed"],
)
def test_compiled_blocks_match_eager(make_model, batch, keys):
    """Slow: compilation takes 30 s without a warm cache."""
    model = make_model(**keys)
    loss, gradients = loss_and_gradients(model, batch)
    torch.compiler.reset()
    counters.clear()
    model.compile_blocks()
    compiled_loss, compiled_gradients = loss_and_gradients(model, batch)
    assert counters["stats"]["unique_graphs"] == 1, "the blocks share compiled code"
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(compiled_gradients[name], gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["autocast", "bf16"])
@pytest.mark.parametrize(
    "keys", [{"qk_norm": True, "num_kv_heads": 2}, {"tie_embeddings": True}, MLA, {**MLA, "qk_norm": True}]
)
def test_bf16_is_close_to_fp32(make_model, batch, mode, keys):
    model = make_model(**keys)
    loss, gradients = loss_and_gradients(model, batch)
    if mode == "bf16":
        model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        bf16_loss, bf16_gradients = loss_and_gradients(model, batch)
    assert bf16_loss.dtype == torch.float32
    torch.testing.assert_close(bf16_loss, loss, rtol=5e-3, atol=0)
    for name, gradient in gradients.items():
        assert bf16_gradients[name].dtype == (torch.bfloat16 if mode == "bf16" else torch.float32)
        assert (bf16_gradients[name] - gradient).norm() < 0.06 * gradient.norm(), name


@pytest.mark.parametrize("keys", [{"num_kv_heads": 2}, MLA], ids=["gqa", "mla"])
def test_logits_do_not_depend_on_later_tokens(make_model, batch, keys):
    model, tokens_BT = make_model(**keys), batch[0]
    changed_BT = tokens_BT.clone()
    changed_BT[:, 20:] = (changed_BT[:, 20:] + 1) % 61
    with torch.no_grad():
        logits, changed_logits = model.logits(tokens_BT), model.logits(changed_BT)
    torch.testing.assert_close(logits[:, :20], changed_logits[:, :20])
    assert not torch.allclose(logits[:, 20], changed_logits[:, 20])


def test_last_only_returns_the_logits_of_the_last_position(make_model, batch):
    model = make_model()
    torch.testing.assert_close(model.logits(batch[0], last_only=True), model.logits(batch[0])[:, -1:])


def test_loss_sums_of_micro_batches_add_up(make_model, batch):
    model = make_model()
    tokens_BT, targets_BT = batch
    whole = model(tokens_BT, targets_BT, 1e-3)
    parts = [model(tokens_BT[i : i + 1], targets_BT[i : i + 1], 1e-3) for i in range(3)]
    for index, value in enumerate(whole):
        torch.testing.assert_close(sum(part[index] for part in parts), value)


def test_sums_under_no_grad_require_no_gradients(make_model, batch):
    model = make_model(activation_checkpointing=True)
    with torch.no_grad():
        sums = model(*batch)
    assert not any(value.requires_grad for value in sums)
    torch.testing.assert_close(sums[0], model(*batch)[0].detach())


@pytest.mark.parametrize("keys", [{}, {**MLA, "qk_norm": True}], ids=["mha", "mla"])
@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_a_model_from_the_meta_device_matches_one_built_directly(make_config, make_model, batch, tie_embeddings, keys):
    config = make_config(tie_embeddings=tie_embeddings, **keys)
    with torch.device("meta"):
        model = GPT(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    num_parameters = model.num_parameters
    model.to_empty(device="cpu")
    initialise(model, seed=4)
    assert (model.head.weight is model.embedding.weight) == tie_embeddings
    assert model.num_parameters == num_parameters

    direct = GPT(config)
    initialise(direct, seed=4)
    assert torch.equal(model(*batch)[0], direct(*batch)[0])


def test_llama_3_70b_has_the_expected_number_of_parameters(make_config):
    with torch.device("meta"):
        model = GPT(
            make_config(vocab_size=128_256, dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, ffn_dim=28_672)
        )
    assert model.num_parameters == 70_553_706_496


def test_invalid_sizes_are_all_reported(make_config):
    with pytest.raises(ValueError, match=r"vocab_size is not set; .*num_kv_heads is not set"):
        GPT(ModelConfig())
    with pytest.raises(ValueError, match=r"head_dim is 7; .*num_heads is 4; expected a multiple of 3"):
        GPT(make_config(head_dim=7, num_kv_heads=3))


def test_exceeding_the_maximum_context_raises(make_model):
    tokens_BT = torch.zeros(1, 49, dtype=torch.long)
    with pytest.raises(ValueError, match="49 tokens exceed the maximum context of 48"):
        make_model()(tokens_BT, tokens_BT)
