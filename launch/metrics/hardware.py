"""The peak matrix throughput of known GPUs, for model FLOP utilisation (MFU)."""

from __future__ import annotations

import re

import torch

# Dense bf16 FLOP/s with fp32 accumulation, from NVIDIA's data sheets. The first match counts: longer names first.
PEAK_BF16_FLOPS = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("GH200", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("H100", 989e12),
    ("H20", 148e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A40", 150e12),
    ("A10G", 70e12),
)


def peak_flops(device_name: str) -> float | None:
    """The peak bf16 FLOP/s of a GPU by its name; None if unknown, so that no wrong utilisation is reported."""
    words = set(re.split(r"[\s-]+", device_name))
    for name, peak in PEAK_BF16_FLOPS:
        if words.issuperset(name.split()):
            return peak
    return None


def device_peak_flops(device: torch.device, precision: str) -> float | None:
    """The peak FLOP/s of this device in a bf16 run; None on a CPU, in fp32, or if unknown."""
    if device.type != "cuda" or precision != "bf16":
        return None
    return peak_flops(torch.cuda.get_device_name(device))
