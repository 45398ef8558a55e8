import torch

from model.attention.rotary import apply_rotary, rotary_table


def rotate_in_the_complex_plane(x_BTHK: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotation of the pairs (i, i + K/2) as complex numbers, in float64."""
    _, T, _, K = x_BTHK.shape
    frequencies = theta ** (-2.0 * torch.arange(K // 2, dtype=torch.float64) / K)
    angles = torch.arange(T, dtype=torch.float64)[:, None] * frequencies
    first, second = x_BTHK.double().chunk(2, dim=-1)
    rotated = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((rotated.real, rotated.imag), dim=-1)


def test_rotation_equals_complex_multiplication():
    x_BTHK = torch.randn(2, 33, 3, 10)
    table = rotary_table(torch.arange(33), 10, 500.0)
    assert torch.allclose(apply_rotary(x_BTHK, table).double(), rotate_in_the_complex_plane(x_BTHK, 500.0), atol=1e-5)


def test_scores_depend_on_distance_only():
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
