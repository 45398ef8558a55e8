"""Rotary position embeddings, compared with a rotation in the complex plane."""

import torch

from model.attention.rotary import apply_rotary, rotary_table
from tests.model.attention.reference import rotate


def test_rotation_matches_complex_multiplication():
    x_BTHK = torch.randn(2, 33, 3, 10)
    rotated = apply_rotary(x_BTHK, rotary_table(torch.arange(33), 10, 500.0))
    for head in range(3):
        assert torch.allclose(rotated[:, :, head].double(), rotate(x_BTHK[:, :, head].double(), 500.0), atol=1e-5)


def test_scores_depend_only_on_distance():
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def score(query_position: int, key_position: int) -> torch.Tensor:
        rotated_q = apply_rotary(q, rotary_table(torch.tensor([query_position]), 16, 1e4))
        rotated_k = apply_rotary(k, rotary_table(torch.tensor([key_position]), 16, 1e4))
        return (rotated_q * rotated_k).sum()

    assert torch.allclose(score(9, 4), score(905, 900), atol=1e-3)


def test_tables_are_fp32_and_bf16_inputs_are_rounded_once():
    table = rotary_table(torch.arange(2000), 16, 1e4)
    assert all(part.dtype == torch.float32 for part in table)
    x_BTHK = torch.randn(1, 2000, 1, 16).bfloat16()
    rotated = apply_rotary(x_BTHK, table)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, apply_rotary(x_BTHK.float(), table).bfloat16())


def test_tables_stay_fp32_in_a_bf16_model(make_model, batch):
    """DeepSpeed casts whole modules to bf16, buffers included."""
    model = make_model().bfloat16()
    assert list(model.buffers()) == []
    tables = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: tables.append(inputs[1]))
    model(*batch)
    for received, expected in zip(tables[0], rotary_table(torch.arange(40), 8, 10000.0), strict=True):
        assert received.dtype == torch.float32
        assert torch.equal(received, expected)
