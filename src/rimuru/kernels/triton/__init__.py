"""The Triton back end: the names of `rimuru.kernels.reference`, each from the module that owns it.

Room: dispatch for GPUs. Rule: a function shadows the module it comes from, so every module is
imported here and nowhere lazily; `from rimuru.kernels.triton.moe import ...` still reaches inside.
"""

from __future__ import annotations

from ..reference import rope_table  # built once at load
from .attention import attention
from .embed import embed
from .linear import linear
from .moe import moe, moe_gather
from .moe_block import moe_block
from .norm_rope import qkv_to_cache, rms_norm, silu_and_mul, zero_centred_rms_norm
from .route import route
from .tables import apply_edits, move_pages

__all__ = [
    "apply_edits",
    "attention",
    "embed",
    "linear",
    "moe",
    "moe_block",
    "moe_gather",
    "move_pages",
    "qkv_to_cache",
    "rms_norm",
    "rope_table",
    "route",
    "silu_and_mul",
    "zero_centred_rms_norm",
]
