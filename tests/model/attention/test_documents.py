"""Attention within documents, compared with running each document separately."""

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
from tests.model.attention import reference
from tests.model.attention.reference import largest_logits, reference_attention
from tests.model.attention.test_options import KINDS, OPTIONS, SINGLE_AND_ALL, option_names
from tests.model.attention.test_softcap import PeakMemory, random_inputs

# Document lengths in each row of the batch: a single document, documents of one token, and a typical mixture.
ROWS = [[40], [1, 1, 7, 1, 30], [13, 5, 22]]

every_kind = pytest.mark.parametrize("keys", KINDS.values(), ids=KINDS)
document_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def positions_of(rows: list[list[int]]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in rows]).int()


def bounds_of(lengths: list[int]) -> list[tuple[int, int]]:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return list(pairwise([0, *ends]))


def masks_of(rows: list[list[int]]) -> torch.Tensor:
    """Returns whether each query sees each key (B, T, T)."""
    return torch.stack([reference.document_mask(lengths) for lengths in rows])


def gradients_of(model: GPT, loss: torch.Tensor) -> dict[str, torch.Tensor]:
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
def test_matches_running_each_document_separately(make_model, batch, monkeypatch, keys, qk_norm, options, group_tokens):
    """Logits, loss sums and gradients in float64; the reference uses neither positions nor masks."""
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
    # Rotary tables and gates are fp32 whatever the dtype of the weights.
    torch.testing.assert_close(logits.flatten(0, 1), expected_logits, rtol=1e-5, atol=1e-5)
    expected_sum = sum(sums[0] for _, sums in alone)
    found_sum = model(tokens_BT, targets_BT, positions_BT=positions_BT)[0]
    torch.testing.assert_close(found_sum, expected_sum, rtol=1e-5, atol=1e-5)
    found, expected = gradients_of(model, found_sum), gradients_of(model, expected_sum)
    for name, gradient in expected.items():
        scale = max(gradient.abs().max().item(), 1)
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5 * scale, msg=name)


@every_kind
def test_one_document_per_row_matches_attention_without_documents(make_model, batch, keys):
    model, (tokens_BT, targets_BT) = make_model(**keys, options=OPTIONS), batch
    plain = model(tokens_BT, targets_BT)[0]
    masked = model(tokens_BT, targets_BT, positions_BT=positions_of([[40]] * 3))[0]
    torch.testing.assert_close(masked, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
@every_kind
def test_activation_checkpointing_gives_identical_gradients(make_model, batch, keys, options):
    positions_BT = positions_of(ROWS)
    plain, checkpointed = (make_model(flag, **keys, options=options) for flag in (False, True))
    expected, found = (
        gradients_of(model, model(*batch, positions_BT=positions_BT)[0]) for model in (plain, checkpointed)
    )
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@every_kind
def test_bf16_is_close_to_fp32(make_model, batch, keys):
    model, positions_BT = make_model(**keys, options={"sink": True}), positions_of(ROWS)
    expected = model(*batch, positions_BT=positions_BT)[0]
    found = model.bfloat16()(*batch, positions_BT=positions_BT)[0]
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_blocks_match_eager_without_recompiling_for_new_documents(make_model, batch):
    model = make_model()
    many = [positions_of(rows) for rows in (ROWS, [[20, 20]] * 3, [[3] * 13 + [1]] * 3)]
    expected = [gradients_of(model, model(*batch, positions_BT=positions_BT)[0]) for positions_BT in many]
    torch.compiler.reset()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = [gradients_of(model, model(*batch, positions_BT=positions_BT)[0]) for positions_BT in many]
    for gradients, expected_gradients in zip(found, expected, strict=True):
        for name, gradient in expected_gradients.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-4, msg=name)


@given(rows=st.lists(document_lengths, min_size=1, max_size=4), group_tokens=st.integers(1, 60))
def test_groups_hold_as_many_whole_documents_as_fit(rows, group_tokens):
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


@given(lengths=document_lengths)
def test_document_mask_matches_the_reference(lengths):
    assert torch.equal(document_mask(positions_of([lengths])[0]), reference.document_mask(lengths))


@pytest.mark.parametrize("has_sink", [False, True])
@settings(max_examples=15, deadline=None)
@given(
    length=st.sampled_from([1, 127, 128, 129, 255, 256, 511, 640]),
    cuts=st.lists(st.lists(st.integers(1, 639), max_size=12), min_size=1, max_size=3),
)
def test_block_mask_matches_one_that_evaluates_every_pair(has_sink, length, cuts):
    """Checks the block lists, every pair, and that full blocks are really full."""
    rows = []
    for row in cuts:
        bounds = sorted({0, length, *(cut for cut in row if cut < length)})
        rows.append([b - a for a, b in pairwise(bounds)])
    found = document_block_mask(positions_of(rows), has_sink)
    visible = masks_of(rows)
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
def test_flex_attention_matches_the_formula(softcap, has_sink, compiled):
    """Only the forward pass, since the backward pass needs a GPU."""
    *qkv, sink = [tensor.detach() for tensor in random_inputs(300, 300, 24, torch.float32)]
    rows = [[300], [100, 1, 70, 129]]
    positions_BT = positions_of(rows)
    arguments = (*qkv, softcap, sink if has_sink else None)
    expected = reference_attention(*arguments, masks_of(rows).unsqueeze(1)).float()
    on_cpu = causal_attention(*arguments, Documents(positions_BT))
    torch.testing.assert_close(on_cpu, expected, rtol=1e-5, atol=1e-5)
    attend = flex_softcap_attention
    if compiled:
        attend = torch.compile(flex_softcap_attention, backend="eager", fullgraph=True)
    found = attend(*arguments, block_mask=document_block_mask(positions_BT, has_sink))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if compiled:
        rows = [[150, 150], [2] * 150]
        expected = reference_attention(*arguments, masks_of(rows).unsqueeze(1)).float()
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = attend(*arguments, block_mask=document_block_mask(positions_of(rows), has_sink))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(("softcap", "has_sink"), [(None, False), (1.5, True)])
@torch.no_grad()
def test_the_compiled_kernel_skips_only_masked_blocks(softcap, has_sink):
    """Unlike the eager implementation it uses the block lists. New documents must not recompile it."""
    *qkv, sink = [tensor.detach() for tensor in random_inputs(300, 300, 24, torch.float32)]
    arguments = (*qkv, softcap, sink if has_sink else None)
    torch.compiler.reset()
    attend = torch.compile(flex_attention)
    for number, rows in enumerate(([[300], [100, 1, 70, 129]], [[150, 150], [2] * 150], [[1] * 300, [299, 1]])):
        positions_BT = positions_of(rows)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            block_mask = document_block_mask(positions_BT, has_sink)
            found = flex_softcap_attention(*arguments, attend, block_mask)
        expected = reference_attention(*arguments, masks_of(rows).unsqueeze(1)).float()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("document_length", [8, None], ids=["short", "one"])
def test_memory_grows_linearly_with_the_length(document_length, softcap):
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
def test_logit_maxima_cover_only_visible_pairs(seed, chunk, cuts):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 4, 11, 6, generator=generator), torch.randn(2, 2, 11, 6, generator=generator)
    rows = [[11], [b - a for a, b in pairwise(sorted({0, 11, *cuts}))]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clip, "CHUNK_ELEMENTS", chunk)
        found = causal_logit_maxima(q, k, -1.0, None, positions_of(rows))
    expected = largest_logits(q, k, masks_of(rows).unsqueeze(1))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@every_kind
def test_a_training_pass_records_the_maxima_within_documents(make_model, batch, keys: dict[str, Any]):
    """They equal the maxima over the documents one by one."""
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
