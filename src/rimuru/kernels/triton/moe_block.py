"""A layer's MoE half, from attention's output to the next layer's input, in five launches for few tokens.

Room: `moe_block`. Rule: which kernels run follows from the number of tokens alone. What is bound by launches
and latencies is fused: the head (`router`), the shared expert beside the routed ones, and the tail.
"""

from __future__ import annotations

import sys

import torch

from .. import operation, reference
from ..types import MoeBlock
from . import moe_rows, router
from .align import align
from .linear import linear
from .moe import expert_tiles
from .moe_rows import combine_norm, expert_rows
from .moe_tiles import choose
from .route import route
from .router import choose_experts, norm_router

TOKENS = 128  # most tokens whose shared expert rides along with the routed ones


def moe_block(
    x: torch.Tensor,
    residual: torch.Tensor,
    block: MoeBlock,
    table: torch.Tensor,
    next_norm: torch.Tensor,
    touched: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
    logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A decoder layer from attention's output to the next layer's input: as `reference.moe_block`."""
    tokens, ops = len(x), sys.modules[__package__]
    shared = 0 if block.shared_down is None else block.shared_down.shape[1]
    if not (0 < tokens <= TOKENS and isinstance(table, torch.Tensor) and moe_rows.fits(block.layout, shared)):
        return reference.moe_block(x, residual, block, table, next_norm, touched, live, logits, ops=ops)
    tiles = choose(tokens, block.top_k, block.experts, x.dtype, x.device)
    if router.fits(tokens, block.experts):
        h, residual, scores = norm_router(x, residual, block)
        chosen = scores if logits is None else logits
        weights, ids, plan = choose_experts(chosen, block, table, touched, live)
    else:
        norm = operation(ops, "zero_centred_rms_norm" if block.zero_centred else "rms_norm")
        h, residual = norm(x, block.norm, block.eps, residual)
        scores = linear(h, block.router)
        chosen = scores[:, : block.experts] if logits is None else logits
        weights, ids = route(chosen, block.top_k, block.scoring, block.normalize, block.bias, live)
        plan = align(ids, table, tiles[0].m, touched)
    parts = expert_rows(h, plan, block) if tokens <= moe_rows.TOKENS else expert_tiles(h, plan, tiles, block)
    return combine_norm(parts, ids, weights, scores, residual, block, next_norm)
