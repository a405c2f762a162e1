"""The head of a MoE block for few tokens: residual, RMSNorm and router in one launch, top-k and plan in one.

Room: decode steps. Rule: the choice and the plan are those of `route` and `align`. The first kernel
spreads the router's rows over the chip; the second is one thread block with a warp for each token, so that
a choice never waits for another warp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..types import EXPERT_ADDRESS, EXPERT_HOST, MoeBlock
from .align import HEADER, Alignment, max_blocks
from .launch import begin, dependent
from .norm_rope import scaled

TOKENS = 16  # an expert's tokens fit one block of every tile
_SCORES = 2048  # that a thread block's registers hold
_ROWS = 4  # of the router, a program
_HOST = tl.constexpr(EXPERT_HOST)
_ADDRESS = tl.constexpr(EXPERT_ADDRESS)


@triton.jit
def norm_router_kernel(
    x, residual, norm, router, normed, total, logits, eps,
    H: tl.constexpr, ROWS: tl.constexpr, STRIDE: tl.constexpr,
    ZERO_CENTRED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`BLOCK_N` rows of the router for one token; every program makes its norm. Grid: (rows / BLOCK_N, T)."""
    part, token = tl.program_id(0), tl.program_id(1)
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.arange(0, BLOCK_H)[None, :]
    inside = i < H
    w = tl.load(router + n[:, None] * H + i, mask=(n < ROWS)[:, None] & inside, other=0.0)
    scale = tl.load(norm + i, mask=inside, other=0.0)
    begin(PDL)
    h = tl.load(x + token * H + i, mask=inside, other=0.0)
    h += tl.load(residual + token * H + i, mask=inside, other=0.0)
    wide = h.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 1) / H + eps)[:, None]
    y = scaled(wide, scale, h.dtype, ZERO_CENTRED)
    if part == 0:
        tl.store(total + token * H + i, h, mask=inside)
        tl.store(normed + token * H + i, y, mask=inside)
    logit = tl.sum(w.to(tl.float32) * y.to(tl.float32), 1)
    tl.store(logits + token * STRIDE + n, logit.to(logits.dtype.element_ty), mask=n < ROWS)


@triton.jit(do_not_specialize=["tokens", "room"], do_not_specialize_on_alignment=["live"])
def choose_experts_kernel(
    logits, correction, live, table, touched, weights, ids, work, tokens, room,
    STRIDE: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr, BIAS: tl.constexpr, LIVE: tl.constexpr, COUNT: tl.constexpr,
    TOKENS: tl.constexpr, PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`route` and `align` of all tokens, `[TOKENS, PAD]` at a time. Grid: (1,)."""
    t = tl.arange(0, TOKENS)
    e = tl.arange(0, PAD)[None, :]
    at = tl.arange(0, PAD)
    entry = tl.load(table + at, mask=at < EXPERTS, other=0)
    if BIAS:
        shift = tl.load(correction + e, mask=e < EXPERTS, other=0.0).to(tl.float32)
    begin(PDL)
    # Rows past the last are the last again; nothing of them is kept.
    z_at = logits + tl.minimum(t, tokens - 1)[:, None] * STRIDE + e
    z = tl.load(z_at, mask=e < EXPERTS, other=float("-inf")).to(tl.float32)
    used = t < tokens
    if LIVE:
        used = tl.load(live + t, mask=used, other=-1) >= 0
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-z))
    else:
        score = tl.exp(z - tl.max(z, 1)[:, None])
        score = score / tl.sum(score, 1)[:, None]
    choice = score
    if BIAS:
        choice += shift
    # Not a number loses to every number, and no expert is chosen twice: what is taken becomes -inf, and
    # what was never there falls below that.
    choice = tl.where(choice == choice, tl.maximum(choice, -3.0e38), -3.2e38)
    choice = tl.where(e < EXPERTS, choice, float("-inf"))
    rank = tl.full([TOKENS, PAD], TOP_K, tl.int32)
    for j in tl.static_range(TOP_K):
        best = tl.argmax(choice, 1)
        hit = e == best[:, None]
        rank = tl.where(hit, j, rank)
        choice = tl.where(hit, float("-inf"), choice)
    chosen = rank < TOP_K
    if NORMALIZE:
        total = tl.sum(tl.where(chosen, score, 0.0), 1)
        score = score / tl.maximum(total, 1e-20)[:, None]
    pair = t[:, None] * TOP_K + rank
    keep = chosen & (t < tokens)[:, None]
    tl.store(weights + pair, tl.where(used[:, None], score, 0.0), mask=keep)
    tl.store(ids + pair, tl.where(used[:, None], e, -1), mask=keep)

    taken = (chosen & used[:, None]).to(tl.int32)
    counts = tl.sum(taken, 0)
    host = (entry & _HOST) != 0
    # Three running sums in one: rows in the low 12 bits, then blocks in the pool, then blocks of the host.
    block = tl.where((counts > 0) & (entry != 0), tl.where(host, 1 << 22, 1 << 12), 0)
    before = tl.cumsum(counts + block, axis=0) - counts - block
    first_row, in_pool, in_host = before & 0xFFF, (before >> 12) & 0x3FF, before >> 22
    all_blocks = tl.sum(block, axis=0)
    pool_blocks = (all_blocks >> 12) & 0x3FF
    tl.store(work, all_blocks >> 22)
    slot = work + HEADER + tl.where(host, room + in_host, in_pool) * 4
    tl.store(slot.to(tl.pointer_type(tl.int64)), entry & _ADDRESS, mask=block > 0)
    tl.store(slot + 2, first_row, mask=block > 0)
    tl.store(slot + 3, counts, mask=block > 0)
    for start in range(0, room, PAD):
        b = start + at
        tl.store(work + HEADER + b * 4 + 3, tl.zeros([PAD], tl.int32), mask=(b >= pool_blocks) & (b < room))
    row = first_row[None, :] + tl.cumsum(taken, axis=0) - taken
    tl.store(work + HEADER + 8 * room + row, pair, mask=taken > 0)
    if COUNT:
        tl.store(touched + at, tl.load(touched + at, mask=at < EXPERTS, other=0) + counts, mask=at < EXPERTS)


def fits(tokens: int, experts: int) -> bool:
    """Whether these kernels take a step of `tokens`."""
    padded = triton.next_power_of_2(tokens)
    return padded <= TOKENS and padded * triton.next_power_of_2(experts) <= _SCORES


def norm_router(
    x: torch.Tensor, residual: torch.Tensor, block: MoeBlock
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMSNorm of x + residual `[T, H]` and the router's product with it: normed, sum, logits `[T, rows]`."""
    (tokens, hidden), rows, pdl = x.shape, block.router.shape[0], dependent(x)
    normed, total = torch.empty_like(x), torch.empty_like(x)
    # Aligned rows, so that a warp takes a whole row of them in the next kernel.
    logits = x.new_empty((tokens, triton.cdiv(rows, 8) * 8))[:, :rows]
    norm_router_kernel[(triton.cdiv(rows, _ROWS), tokens)](
        x, residual, block.norm, block.router, normed, total, logits, block.eps,
        H=hidden, ROWS=rows, STRIDE=logits.stride(0), ZERO_CENTRED=block.zero_centred, BLOCK_N=_ROWS,
        BLOCK_H=triton.next_power_of_2(hidden), PDL=pdl, num_warps=4, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip
    return normed, total, logits


def choose_experts(
    logits: torch.Tensor,
    block: MoeBlock,
    table: torch.Tensor,
    touched: torch.Tensor | None,
    live: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, Alignment]:
    """`route` of logits `[T, >= E]` and `align` of its choice: weights, ids and the plan."""
    tokens, experts, top_k = len(logits), block.experts, block.top_k
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    room = max_blocks(tokens, top_k, experts, TOKENS)
    work = torch.empty(HEADER.value + 8 * room + tokens * top_k, dtype=torch.int32, device=logits.device)
    pad, pdl = triton.next_power_of_2(tokens), dependent(logits)
    choose_experts_kernel[(1,)](
        logits, logits if block.bias is None else block.bias, ids if live is None else live, table,
        ids if touched is None else touched, weights, ids, work, tokens, room,
        STRIDE=logits.stride(0), EXPERTS=experts, TOP_K=top_k, SIGMOID=block.scoring == "sigmoid",
        NORMALIZE=block.normalize, BIAS=block.bias is not None, LIVE=live is not None,
        COUNT=touched is not None, TOKENS=pad,
        PAD=triton.next_power_of_2(experts), PDL=pdl, num_warps=pad, launch_pdl=pdl,
    )  # fmt: skip
    return weights, ids, Alignment(work, room)
