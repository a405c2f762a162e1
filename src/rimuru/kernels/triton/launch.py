"""Programmatic dependent launch: a kernel may be placed on the chip before the one ahead of it has ended.

Room: what the kernels of a decode step share. Rule: before its wait a kernel reads only what no kernel of
the step writes (weights, tables, lengths, pages of earlier steps), and so it may be placed as early as there
is room for it. One exception: the second product of experts reads its plan, which is of the last but one
kernel; so the first product lets it be placed only after its own wait (`begin`), when that one has ended.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl


@triton.jit
def begin(PDL: tl.constexpr):
    """All that the kernel ahead has written is there; the next kernel may be placed."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def begin_early(PDL: tl.constexpr):
    """As `begin`, but the next kernel may be placed at once, beside the kernel ahead too."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@lru_cache
def _early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent(x: torch.Tensor) -> bool:
    """Whether a kernel over the rows of x is launched early: few rows, compute capability 9.0 and later.

    With many rows the waiting blocks take the room of working ones.
    """
    return len(x) <= 512 and _early(x.device)
