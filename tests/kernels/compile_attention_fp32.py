"""The float32 attention kernels, for `kernels.compile_only`. They take minutes."""

from __future__ import annotations

import torch
from kernels import compile_attention

CASES = [(torch.float32, 128, 32, 4), (torch.float32, 64, 8, 8), (torch.float32, 256, 16, 2)]


def kernels(chip: int):
    return compile_attention.kernels(chip, CASES)
