"""Attention kernels with windows, other dtypes and other strides, for `kernels.compile_only`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from kernels.compile_attention import CASES, of_cases

# Qwen1.5-MoE, a wide group, other float32 head sizes.
MORE = [
    (torch.bfloat16, 128, 16, 16),
    (torch.float16, 128, 96, 8),
    (torch.float32, 64, 8, 8),
    (torch.float32, 256, 16, 2),
]


def kernels(chip: int) -> Iterator:
    return of_cases(chip, CASES + MORE, windows=(False, True))
