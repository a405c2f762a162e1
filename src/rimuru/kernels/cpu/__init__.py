"""The CPU back end: `rimuru.kernels.reference` in C, for bfloat16 and float32.

Room: one of the kernel back ends. Rule: same names and meaning as the torch twin. A row's result
depends on that row alone: not on the rest of the batch, the thread count or where an expert lies.

Importing this module compiles the kernels if they are not in the user's cache (a few seconds);
without a compiler, the names below are the twin's.
"""

from __future__ import annotations

import functools
import sys

from .. import reference
from ..reference import apply_edits, embed, rope_table
from . import build, ops

if ops.bind(build.load()):
    from .ops import attention, linear, moe, move_pages, qkv_to_cache, rms_norm, route, silu_and_mul
else:
    from ..reference import (
        attention,
        linear,
        moe,
        move_pages,
        qkv_to_cache,
        rms_norm,
        route,
        silu_and_mul,
    )

moe_block = functools.partial(reference.moe_block, ops=sys.modules[__name__])

__all__ = [
    "apply_edits",
    "attention",
    "embed",
    "linear",
    "moe",
    "moe_block",
    "move_pages",
    "qkv_to_cache",
    "rms_norm",
    "rope_table",
    "route",
    "silu_and_mul",
]
