"""Sampling: reproducibility, limits, and the distribution of the sampled tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.generate import generate, sample_next


def greedy_without_cache(model, tokens: list[int], num_new: int) -> list[int]:
    tokens = list(tokens)
    with torch.no_grad():
        for _ in range(num_new):
            tokens.append(int(model.logits(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[-num_new:]


def test_greedy_decoding_matches_the_full_forward_pass(make_model):
    model = make_model(num_kv_heads=2)
    prompt = [3, 1, 4, 1, 5]
    expected = greedy_without_cache(model, prompt, 20)
    assert list(generate(model, prompt, 20, temperature=0)) == expected
    assert list(generate(model, prompt, 20, temperature=0, seed=9)) == expected


def test_a_seed_reproduces_the_text_without_changing_the_global_generator(make_model):
    model = make_model()
    state = torch.get_rng_state()
    first = list(generate(model, [1, 2], 30, temperature=0.9, top_p=0.95, seed=1))
    assert list(generate(model, [1, 2], 30, temperature=0.9, top_p=0.95, seed=1)) == first
    assert list(generate(model, [1, 2], 30, temperature=0.9, top_p=0.95, seed=2)) != first
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_stay_enabled_for_the_caller(make_model):
    for _ in generate(make_model(), [1], 3):
        assert torch.is_grad_enabled()


def test_generation_ends_before_the_end_of_document(make_model):
    model = make_model()
    tokens = list(generate(model, [1, 2], 10, temperature=0))
    stop = tokens[4]
    assert list(generate(model, [1, 2], 10, temperature=0, eod_id=stop)) == tokens[: tokens.index(stop)]


def test_invalid_arguments_raise(make_model):
    model = make_model(max_seq_len=8)
    assert len(list(generate(model, [1, 2, 3], 5))) == 5
    with pytest.raises(ValueError, match=r"3 prompt tokens and 6 new tokens are more than model\.max_seq_len 8"):
        generate(model, [1, 2, 3], 6)
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(model, [], 1)
    with pytest.raises(ValueError, match="temperature is -1"):
        generate(model, [1], 1, temperature=-1)
    with pytest.raises(ValueError, match="top_p is 0"):
        generate(model, [1], 1, top_p=0)


@given(seed=st.integers(0, 1000), top_p=st.floats(0.01, 1), temperature=st.floats(0.1, 3))
@settings(max_examples=40, deadline=None)
def test_top_p_draws_from_the_smallest_sufficient_set(seed, top_p, temperature):
    generator = torch.Generator().manual_seed(seed)
    logits_BV = 2 * torch.randn(4, 19, generator=generator)
    draws_BN = torch.stack([sample_next(logits_BV, temperature, top_p, generator) for _ in range(30)], dim=1)
    for row in range(4):
        probabilities = (logits_BV[row] / temperature).softmax(0)
        nucleus: set[int] = set()
        for token in probabilities.argsort(descending=True).tolist():
            if probabilities[list(nucleus)].sum() >= top_p - 1e-6:
                break
            nucleus.add(token)
        assert set(draws_BN[row].tolist()) <= nucleus


def test_frequencies_follow_the_probabilities():
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draws = sample_next(probabilities.log().expand(20_000, 4), generator=generator)
    frequencies = draws.bincount(minlength=4) / 20_000
    assert torch.allclose(frequencies, probabilities, atol=0.02)


@pytest.mark.parametrize("temperature", [1e-5, 1e-40, 1e-320])
def test_tiny_temperatures_equal_greedy_decoding(temperature):
    logits_BV = torch.randn(5, 11, generator=torch.Generator().manual_seed(3))
    assert torch.equal(sample_next(logits_BV, temperature), logits_BV.argmax(1))


@pytest.mark.parametrize("temperature", [float("nan"), float("inf")])
def test_non_finite_temperatures_raise(temperature):
    with pytest.raises(ValueError, match="expected 0 or more, and finite"):
        sample_next(torch.zeros(1, 4), temperature)


def test_temperature_zero_picks_the_most_likely_token():
    logits_BV = torch.randn(5, 7)
    assert torch.equal(sample_next(logits_BV, temperature=0), logits_BV.argmax(1))


def test_padding_ids_of_the_vocabulary_are_never_drawn(make_model):
    model = make_model(vocab_size=64)
    with torch.no_grad():
        model.head.weight[40:] *= 100.0  # without the limit, these ids would dominate
    assert max(generate(model, [1, 2], 20, temperature=5.0, num_token_ids=40)) < 40
    assert max(generate(model, [1, 2], 20, temperature=5.0)) >= 40
