"""Several documents in a row: the same as each of them alone."""

import shutil
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from model.attention import documents as module
from model.attention.causal import causal_attention
from model.attention.documents import Documents, document_block_mask, document_mask, group_documents
from model.attention.softcap import flex_softcap_attention
from model.gpt import GPT
from model.stability import clip
from model.stability.clip import attach_logit_maxima, causal_logit_maxima
from tests.model.attention.test_options import KINDS, OPTIONS, SINGLE_AND_ALL, option_names
from tests.model.attention.test_softcap import PeakMemory, random_inputs

# Lengths of the documents in each row of the batch: one, single tokens, and a usual mixture.
ROWS = [[40], [1, 1, 7, 1, 30], [13, 5, 22]]

every_kind = pytest.mark.parametrize("keys", KINDS.values(), ids=KINDS)
document_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def positions_of(rows: list[list[int]]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in rows]).int()


def bounds_of(lengths: list[int]) -> list[tuple[int, int]]:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return list(pairwise([0, *ends]))


def sum_and_gradients(model: GPT, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("options", "group_tokens"),
    [({}, 1), (OPTIONS, 1), ({}, 16), *((options, 16) for options in SINGLE_AND_ALL)],
    ids=lambda value: option_names(value) if isinstance(value, dict) else f"groups of {value}",
)
@pytest.mark.parametrize("qk_norm", [False, True], ids=["", "qk_norm"])
@every_kind
def test_equals_each_document_alone(make_model, batch, monkeypatch, keys, qk_norm, options, group_tokens):
    """Logits, loss sums and gradients in float64; the reference knows nothing of positions and masks."""
    monkeypatch.setattr(module, "GROUP_TOKENS", group_tokens)
    model = make_model(**keys, qk_norm=qk_norm, options=options).double()
    tokens_BT, targets_BT = batch
    positions_BT = positions_of(ROWS)
    alone = [
        (
            model.logits(tokens_BT[row : row + 1, a:b]),
            model(tokens_BT[row : row + 1, a:b], targets_BT[row : row + 1, a:b]),
        )
        for row, lengths in enumerate(ROWS)
        for a, b in bounds_of(lengths)
    ]
    with torch.no_grad():
        logits = model.logits(tokens_BT, positions_BT=positions_BT)
    expected_logits = torch.cat([part.flatten(0, 1) for part, _ in alone])
    # Rotary tables and gates are fp32 whatever the weights.
    torch.testing.assert_close(logits.flatten(0, 1), expected_logits, rtol=1e-5, atol=1e-5)
    expected_sum = sum(sums[0] for _, sums in alone)
    found_sum = model(tokens_BT, targets_BT, positions_BT=positions_BT)[0]
    torch.testing.assert_close(found_sum, expected_sum, rtol=1e-5, atol=1e-5)
    found, expected = sum_and_gradients(model, found_sum), sum_and_gradients(model, expected_sum)
    for name, gradient in expected.items():
        scale = max(gradient.abs().max().item(), 1)
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5 * scale, msg=name)


@every_kind
def test_one_document_a_row_changes_nothing(make_model, batch, keys):
    model, (tokens_BT, targets_BT) = make_model(**keys, options=OPTIONS), batch
    plain = model(tokens_BT, targets_BT)[0]
    masked = model(tokens_BT, targets_BT, positions_BT=positions_of([[40]] * 3))[0]
    torch.testing.assert_close(masked, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
@every_kind
def test_activation_checkpointing_changes_nothing(make_model, batch, keys, options):
    positions_BT = positions_of(ROWS)
    plain, checkpointed = (make_model(flag, **keys, options=options) for flag in (False, True))
    expected, found = (
        sum_and_gradients(model, model(*batch, positions_BT=positions_BT)[0]) for model in (plain, checkpointed)
    )
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@every_kind
def test_bf16_is_near_fp32(make_model, batch, keys):
    model, positions_BT = make_model(**keys, options={"sink": True}), positions_of(ROWS)
    expected = model(*batch, positions_BT=positions_BT)[0]
    found = model.bfloat16()(*batch, positions_BT=positions_BT)[0]
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=0)


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_blocks_give_the_same_for_other_documents(make_model, batch):
    model = make_model()
    many = [positions_of(rows) for rows in (ROWS, [[20, 20]] * 3, [[3] * 13 + [1]] * 3)]
    expected = [sum_and_gradients(model, model(*batch, positions_BT=positions_BT)[0]) for positions_BT in many]
    torch.compiler.reset()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = [sum_and_gradients(model, model(*batch, positions_BT=positions_BT)[0]) for positions_BT in many]
    for gradients, expected_gradients in zip(found, expected, strict=True):
        for name, gradient in expected_gradients.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-4, msg=name)


@given(rows=st.lists(document_lengths, min_size=1, max_size=4), group_tokens=st.integers(1, 60))
def test_groups_are_whole_documents_and_not_larger_than_need_be(rows, group_tokens):
    length = max(map(sum, rows))
    rows = [[*lengths, length - sum(lengths)] if sum(lengths) < length else lengths for lengths in rows]
    positions_BT = positions_of(rows)
    groups = list(group_documents(positions_BT, group_tokens))
    assert torch.cat(groups).tolist() == positions_BT.flatten().tolist()
    for group in groups:
        assert group[0] == 0
        assert len(group) <= group_tokens or group.tolist() == list(range(len(group)))
    for group, following in pairwise(groups):
        next_document = (*(following == 0).nonzero().flatten().tolist(), len(following))[1]
        assert len(group) + next_document > group_tokens


def brute_force_mask(lengths: list[int]) -> torch.Tensor:
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    order = torch.arange(len(number))
    return (number[:, None] == number) & (order[:, None] >= order)


@given(lengths=document_lengths)
def test_mask(lengths):
    assert torch.equal(document_mask(positions_of([lengths])[0]), brute_force_mask(lengths))


@pytest.mark.parametrize("has_sink", [False, True])
@settings(max_examples=15, deadline=None)
@given(
    length=st.sampled_from([1, 127, 128, 129, 255, 256, 511, 640]),
    cuts=st.lists(st.lists(st.integers(1, 639), max_size=12), min_size=1, max_size=3),
)
def test_block_mask(has_sink, length, cuts):
    """Against the one that evaluates every pair, and the pairs themselves."""
    rows = []
    for row in cuts:
        bounds = sorted({0, length, *(cut for cut in row if cut < length)})
        rows.append([b - a for a, b in pairwise(bounds)])
    found = document_block_mask(positions_of(rows), has_sink)
    visible = torch.stack([brute_force_mask(lengths) for lengths in rows])
    if has_sink:
        visible = torch.nn.functional.pad(visible, (1, 0, 1, 0))
        visible[:, :, 0] = True
    size = visible.shape[1]
    expected = create_block_mask(found.mask_mod, len(rows), None, size, size, device="cpu")
    assert found.shape == expected.shape
    assert torch.equal(found.to_dense(), expected.to_dense())
    pairs = torch.arange(size)
    batch = torch.arange(len(rows))[:, None, None]
    assert torch.equal(found.mask_mod(batch, 0, pairs[:, None], pairs).expand(len(rows), -1, -1), visible)
    for row in range(len(rows)):
        for query, count in enumerate(found.full_kv_num_blocks[row, 0].tolist()):
            for key in found.full_kv_indices[row, 0, query, :count].tolist():
                block = visible[row, query * 128 : query * 128 + 128, key * 128 : key * 128 + 128]
                assert block.shape == (128, 128) and block.all()
    assert (found.kv_num_blocks + found.full_kv_num_blocks).tolist() == (
        expected.kv_num_blocks + expected.full_kv_num_blocks
    ).tolist()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@torch.no_grad()
def test_flex_attention_computes_the_same(softcap, has_sink, compiled):
    """Its forward pass; the backward pass exists on GPUs only."""
    *qkv, sink = [tensor.detach() for tensor in random_inputs(300, 300, 24, torch.float32)]
    positions_BT = positions_of([[300], [100, 1, 70, 129]])
    arguments = (*qkv, softcap, sink if has_sink else None)
    expected = causal_attention(*arguments, Documents(positions_BT))
    attend = flex_softcap_attention
    if compiled:
        attend = torch.compile(flex_softcap_attention, backend="eager", fullgraph=True)
    found = attend(*arguments, block_mask=document_block_mask(positions_BT, has_sink))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if compiled:
        other = positions_of([[150, 150], [2] * 150])
        expected = causal_attention(*arguments, Documents(other))
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = attend(*arguments, block_mask=document_block_mask(other, has_sink))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(("softcap", "has_sink"), [(None, False), (1.5, True)])
@torch.no_grad()
def test_a_compiled_kernel_skips_hidden_blocks_only(softcap, has_sink):
    """Unlike the plain one it reads the lists of blocks; other documents need no other kernel."""
    *qkv, sink = [tensor.detach() for tensor in random_inputs(300, 300, 24, torch.float32)]
    arguments = (*qkv, softcap, sink if has_sink else None)
    torch.compiler.reset()
    attend = torch.compile(flex_attention)
    for number, rows in enumerate(([[300], [100, 1, 70, 129]], [[150, 150], [2] * 150], [[1] * 300, [299, 1]])):
        positions_BT = positions_of(rows)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            block_mask = document_block_mask(positions_BT, has_sink)
            found = flex_softcap_attention(*arguments, attend, block_mask)
        expected = causal_attention(*arguments, Documents(positions_BT))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("document_length", [8, None], ids=["short", "one"])
def test_memory_grows_with_the_length_and_not_with_its_square(document_length, softcap):
    peaks = []
    for length in (512, 2048):
        *qkv, _ = random_inputs(length, length, dtype=torch.float32)
        size = document_length or length
        documents = Documents(positions_of([[size] * (length // size)] * 2))
        with PeakMemory() as memory:
            causal_attention(*qkv, softcap, None, documents).sum().backward()
        peaks.append(memory.peak)
    assert peaks[1] < 5 * peaks[0]


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), chunk=st.sampled_from([1, 64, 1 << 24]), cuts=st.sets(st.integers(1, 10)))
def test_largest_logits_are_those_of_visible_pairs(seed, chunk, cuts):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 4, 11, 6, generator=generator), torch.randn(2, 2, 11, 6, generator=generator)
    rows = [[11], [b - a for a, b in pairwise(sorted({0, 11, *cuts}))]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clip, "CHUNK_ELEMENTS", chunk)
        found = causal_logit_maxima(q, k, -1.0, None, positions_of(rows))
    logits = q.double() @ k.double().repeat_interleave(2, dim=1).mT / 6**0.5
    visible = torch.stack([brute_force_mask(lengths) for lengths in rows]).unsqueeze(1)
    expected = logits.masked_fill(~visible, -torch.inf).amax(dim=(2, 3))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@every_kind
def test_a_training_pass_watches_visible_pairs_only(make_model, batch, keys: dict[str, Any]):
    """The same maxima as from the documents one by one."""
    model = make_model(**keys, options={"ssmax": True})
    layers = attach_logit_maxima(model, 1e-6, torch.device("cpu"))
    model.train()
    model(*batch, positions_BT=positions_of(ROWS))
    found = [layer.max_H.clone() for layer in layers]
    for layer in layers:
        layer.reset()
    for row, lengths in enumerate(ROWS):
        for a, b in bounds_of(lengths):
            model(batch[0][row : row + 1, a:b], batch[1][row : row + 1, a:b])
    for layer, maxima in zip(layers, found, strict=True):
        torch.testing.assert_close(maxima, layer.max_H, rtol=1e-5, atol=1e-5)
