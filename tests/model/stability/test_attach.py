"""The optimizer hooks, on a plain training loop over a `transformers` Llama."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from model.parameters import Kind
from model.stability.attach import AttentionWeights, QueryKeyHooks, llama_weights

HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 8


def make_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=HEAD_DIM,
    )
    return LlamaForCausalLM(config)


def backward(model: LlamaForCausalLM, step: int) -> None:
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()


def train(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()


@pytest.mark.parametrize("policy", ["constant", "quack"])
def test_hooks_match_scaling_the_step_of_every_head_by_hand(policy: str) -> None:
    ours, theirs = make_llama(), make_llama()
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2, weight_decay=0.1)
    QueryKeyHooks(optimizer, llama_weights(ours), alpha=0.5, policy=policy)

    # The reference scales the step of every head by hand after each step of the same AdamW.
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    layers = [layer.self_attn for layer in theirs.model.layers]

    def heads(weight: torch.Tensor) -> list[torch.Tensor]:
        return [head.clone() for head in weight.detach().split(HEAD_DIM)]

    start = [(heads(layer.q_proj.weight), heads(layer.k_proj.weight)) for layer in layers]
    for step in range(4):
        old = [(heads(layer.q_proj.weight), heads(layer.k_proj.weight)) for layer in layers]
        backward(theirs, step)
        reference.step()
        for layer, (q, k), (q0, k0) in zip(layers, old, start, strict=True):
            shared = HEADS // KEY_HEADS
            for head in range(HEADS):
                ratio = k0[head // shared].norm() / k[head // shared].norm() if policy == "quack" else 1.0
                rows = layer.q_proj.weight.data[head * HEAD_DIM : (head + 1) * HEAD_DIM]
                rows.copy_(q[head] + 0.5 * ratio * (rows - q[head]))
            for head in range(KEY_HEADS):
                members = slice(head * shared, (head + 1) * shared)
                largest = max(x.norm() for x in q0[members]) / max(x.norm() for x in q[members])
                ratio = largest if policy == "quack" else 1.0
                rows = layer.k_proj.weight.data[head * HEAD_DIM : (head + 1) * HEAD_DIM]
                rows.copy_(k[head] + 0.5 * ratio * (rows - k[head]))
        backward(ours, step)
        optimizer.step()
    for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, expected, rtol=1e-5, atol=1e-7)


def test_max_ratio_limits_the_ratios() -> None:
    model = make_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    layers = llama_weights(model)
    hooks = QueryKeyHooks(optimizer, layers, alpha=1.0, max_ratio=1.5)
    for layer in layers:
        layer.query.data *= 0.25
        layer.key.data *= 2.0
    train(model, optimizer, range(1))
    torch.testing.assert_close(hooks.ratios[Kind.KEY], torch.full((2, KEY_HEADS), 1.5, dtype=torch.float64))
    torch.testing.assert_close(hooks.ratios[Kind.QUERY], torch.full((2, HEADS), 0.5, dtype=torch.float64))


def test_with_query_key_norms_the_ratio_of_a_head_is_its_own_growth() -> None:
    model = make_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    layers = llama_weights(model)
    hooks = QueryKeyHooks(optimizer, layers, alpha=1.0, has_qk_norm=True)
    layers[1].query.data[:HEAD_DIM] *= 4.0
    train(model, optimizer, range(1))
    expected = torch.ones(2, HEADS, dtype=torch.float64)
    expected[1, 0] = 4.0
    torch.testing.assert_close(hooks.ratios[Kind.QUERY], expected)
    torch.testing.assert_close(hooks.ratios[Kind.KEY], torch.ones(2, KEY_HEADS, dtype=torch.float64))


def test_resuming_with_the_saved_initial_norms_is_bit_identical() -> None:
    whole = make_llama()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    hooks = QueryKeyHooks(optimizer, llama_weights(whole), alpha=0.5)
    train(whole, optimizer, range(2))
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict(), hooks.state_dict()))
    resumed = make_llama()
    resumed.load_state_dict(saved[0])
    resumed_optimizer = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
    resumed_optimizer.load_state_dict(saved[1])
    resumed_hooks = QueryKeyHooks(resumed_optimizer, llama_weights(resumed), alpha=0.5)
    resumed_hooks.load_state_dict(saved[2])
    train(resumed, resumed_optimizer, range(2, 4))
    train(whole, optimizer, range(2, 4))
    for mine, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, expected)


def test_removed_hooks_have_no_effect() -> None:
    ours, theirs = make_llama(), make_llama()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (ours, theirs)]
    QueryKeyHooks(optimizers[0], llama_weights(ours), alpha=0.5).remove()
    train(ours, optimizers[0], range(2))
    train(theirs, optimizers[1], range(2))
    for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, expected)


def test_invalid_arguments_raise() -> None:
    model = make_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"alpha is 0; expected a positive number"):
        QueryKeyHooks(optimizer, llama_weights(model), alpha=0)
    with pytest.raises(ValueError, match=r"policy is 'adaptive'; expected constant or quack"):
        QueryKeyHooks(optimizer, llama_weights(model), alpha=1, policy="adaptive")
    with pytest.raises(ValueError, match=r"^layers is empty; expected at least one attention layer$"):
        QueryKeyHooks(optimizer, [], alpha=1)
    layer = llama_weights(model)[1]
    layer.key.data[HEAD_DIM:].zero_()
    with pytest.raises(ValueError, match=r"head 1 of the key matrix of layer 0 is zero"):
        QueryKeyHooks(optimizer, [AttentionWeights(layer.query, layer.key, HEAD_DIM)], alpha=1)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16))
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel does not have Llama's module names"):
        llama_weights(gpt2)
