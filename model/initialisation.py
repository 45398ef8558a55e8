"""Initial values of the parameters.

Every parameter is drawn from its own generator, seeded by (seed, full name). Its values therefore do not
depend on other parameters, the order of construction, the number of ranks, the device or (up to rounding)
the dtype, and parameters can be set one at a time where the whole model never fits in memory (ZeRO-3).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model.parameters import Kind, ParameterSpec, collect_specs


@dataclass(frozen=True)
class InitRow:
    """Parameters that differ only in their block and have the same initial distribution.

    Attributes:
        pattern: Full name, with `*` for the index of the block.
        kind: The parameters' role.
        shape: Shape of each parameter.
        std: Standard deviation of the normal initial values; None: all are `value`.
        count: Number of parameters that match the pattern.
        value: The initial value if std is None.
    """

    pattern: str
    kind: Kind
    shape: tuple[int, ...]
    std: float | None
    count: int
    value: float = 1.0


@torch.no_grad()
def init_parameter(name: str, tensor: Tensor, spec: ParameterSpec, seed: int) -> None:
    """Sets a whole parameter in place: to init_value if spec.init_std is None, else to normal(0, init_std).

    The values are drawn in fp32 on the CPU, so that they are the same on every device, and then rounded to
    the tensor's dtype.
    """
    if spec.init_std is None:
        tensor.fill_(spec.init_value)
        return
    generator = torch.Generator().manual_seed(_parameter_seed(seed, name))
    tensor.copy_(torch.empty(tensor.shape, device="cpu").normal_(0.0, spec.init_std, generator=generator))


def initialise(model: nn.Module, seed: int) -> None:
    """Sets every parameter of a model that is not sharded."""
    specs = collect_specs(model)
    for name, parameter in model.named_parameters():
        init_parameter(name, parameter, specs[name], seed)


def describe_init(model: nn.Module) -> list[InitRow]:
    """Returns the rows of a table of initial values, in the order of the model; works on the meta device."""
    specs = collect_specs(model)
    counts: dict[tuple[str, Kind, tuple[int, ...], float | None, float], int] = {}
    for name, parameter in model.named_parameters():
        pattern, spec = re.sub(r"\.\d+\.", ".*.", name), specs[name]
        key = (pattern, spec.kind, tuple(parameter.shape), spec.init_std, spec.init_value)
        counts[key] = counts.get(key, 0) + 1
    return [
        InitRow(pattern, kind, shape, std, count, value) for (pattern, kind, shape, std, value), count in counts.items()
    ]


def _parameter_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
