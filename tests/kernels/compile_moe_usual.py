"""What nearly every model uses of the MoE kernels, for `kernels.compile_only`: bfloat16."""

from __future__ import annotations

import torch
from kernels.compile_moe import alignment, few_rows, products, small, specialised


def kernels(chip: int):
    """Every tile; on Hopper, where most steps are timed, the small kernels as well."""
    yield from products(chip, torch.bfloat16)
    if chip == 90:
        yield from specialised(torch.bfloat16)
        yield from small(chip, torch.bfloat16)
        yield from few_rows(chip, torch.bfloat16)
        yield from alignment(chip)
