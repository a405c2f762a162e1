"""A layer's MoE half, from attention's output to the next layer's input, in five launches for few tokens.

Room: `moe_block`. Rule: which kernels run follows from the number of tokens alone. What is bound by launches
and latencies is fused: the head (`router`), the shared expert beside the routed ones, and the tail.
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl

from .. import operation, reference
from ..types import MoeBlock
from . import router
from .align import align
from .launch import begin_early, dependent
from .linear import linear
from .moe import expert_parts
from .moe_tiles import choose
from .norm_rope import scaled
from .route import route
from .router import choose_experts, norm_router

TOKENS = 128  # most tokens whose shared expert rides along with the routed ones
_WIDEST = 8192  # longest row that a thread block normalises here


@triton.jit
def combine_norm_kernel(
    parts, ids, weights, gate, residual, norm, out, total, eps, gate_stride,
    H: tl.constexpr, TOP_K: tl.constexpr, SLICES: tl.constexpr, GATE: tl.constexpr,
    ZERO_CENTRED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The weighted sum of one token's experts, the residual, and RMSNorm of what comes out. Grid: (T,)."""
    token = tl.program_id(0)
    tokens = tl.num_programs(0)
    i = tl.arange(0, BLOCK)
    live = i < H
    weight = tl.load(norm + i, mask=live, other=0.0)
    begin_early(PDL)
    mixed = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        # Read before the id is known, so that the two latencies overlap; nobody wrote a skipped part.
        part = tl.load(parts + pair * H + i, mask=live, other=0.0).to(tl.float32)
        mixed += tl.where(tl.load(ids + pair) >= 0, part, 0.0) * tl.load(weights + pair)
    if SLICES:
        dense = tl.zeros([BLOCK], tl.float32)
        for s in tl.static_range(SLICES):
            row = tokens * TOP_K + token * SLICES + s
            dense += tl.load(parts + row * H + i, mask=live, other=0.0).to(tl.float32)
        if GATE:
            dense *= tl.sigmoid(tl.load(gate + token * gate_stride).to(tl.float32))
        mixed += dense
    x = mixed.to(out.dtype.element_ty) + tl.load(residual + token * H + i, mask=live, other=0.0)
    tl.store(total + token * H + i, x, mask=live)
    h = x.to(tl.float32)
    h = h * tl.rsqrt(tl.sum(h * h, 0) / H + eps)
    tl.store(out + token * H + i, scaled(h, weight, x.dtype, ZERO_CENTRED), mask=live)


def combine_norm(
    parts: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    scores: torch.Tensor,
    residual: torch.Tensor,
    block: MoeBlock,
    norm: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum of `expert_parts`, plus residual `[T, H]`, and its norm: (normed, sum).

    scores `[T, rows]`: the router's logits, of which the one after the experts' is the shared expert's gate.
    """
    (tokens, hidden), gated = residual.shape, scores.shape[1] > block.experts
    slices = len(parts) // tokens - block.top_k
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    size, pdl = triton.next_power_of_2(hidden), dependent(residual)
    combine_norm_kernel[(tokens,)](
        parts, ids, weights, scores[:, block.experts] if gated else scores, residual, norm, out, total,
        block.eps, scores.stride(0),
        H=hidden, TOP_K=block.top_k, SLICES=slices, GATE=gated, ZERO_CENTRED=block.zero_centred,
        BLOCK=size, PDL=pdl, num_warps=min(16, max(1, size // 256)), launch_pdl=pdl,
    )  # fmt: skip
    return out, total


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
    tokens, hidden, ops = *x.shape, sys.modules[__package__]
    shared = 0 if block.shared_down is None else block.shared_down.shape[1]
    rides = x.dtype.itemsize == 2 and hidden <= _WIDEST and shared % block.layout.intermediate == 0
    if not (0 < tokens <= TOKENS and isinstance(table, torch.Tensor) and rides):
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
    parts = expert_parts(h, plan, tiles, block)
    return combine_norm(parts, ids, weights, scores, residual, block, next_norm)
