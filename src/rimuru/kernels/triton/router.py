"""The head of a MoE block in one launch: residual, RMSNorm, router, top-k and the experts' plan.

Room: decode steps of up to `TOKENS` tokens. Rule: many programs multiply, the last of a token to finish
chooses its experts, the last of all plans; the choice and the plan are those of `route` and `align`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..types import MoeBlock
from .align import HEADER, Alignment, _plan, max_blocks
from .launch import begin, dependent
from .norm_rope import scaled

TOKENS = 16
BLOCK_M = 16  # rows of a block of the plan: an expert has at most TOKENS
EXPERTS = 128  # beyond it comparing every expert with every other does not fit the registers
_ROWS = 4  # of the router, a program


@triton.jit(do_not_specialize=["room", "experts"])
def norm_route_kernel(
    x, residual, norm, router, correction, live, override, table, touched,
    normed, total, logits, weights, ids, work, done, eps, room, experts, override_stride,
    H: tl.constexpr, ROWS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    BIAS: tl.constexpr, LIVE: tl.constexpr, OVERRIDE: tl.constexpr, COUNT: tl.constexpr,
    ZERO_CENTRED: tl.constexpr, ONE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr, PAD: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`BLOCK_N` rows of the router for one token. Grid: (blocks of the router, T).

    done: int32 `[1 + T]`, zero before and after: tokens that have finished, and programs of each.
    """
    part, parts = tl.program_id(0), tl.num_programs(0)
    token, tokens = tl.program_id(1), tl.num_programs(1)
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
    tl.store(logits + token * ROWS + n, logit.to(logits.dtype.element_ty), mask=n < ROWS)

    tl.debug_barrier()  # every thread's logit is written before the count that announces it
    if tl.atomic_add(done + 1 + token, 1, sem="acq_rel") == parts - 1:
        tl.store(done + 1 + token, 0)
        e = tl.arange(0, PAD)
        ours = e < experts
        if OVERRIDE:
            z = tl.load(override + token * override_stride + e, mask=ours, other=float("-inf")).to(tl.float32)
        else:
            z = tl.load(
                logits + token * ROWS + e, mask=ours, other=float("-inf"), cache_modifier=".cg"
            ).to(tl.float32)  # fmt: skip
        if SIGMOID:
            score = tl.where(ours, 1.0 / (1.0 + tl.exp(-z)), 0.0)
        else:
            score = tl.exp(z - tl.max(z, axis=0))
            score = score / tl.sum(score, axis=0)
        choice = score
        if BIAS:
            choice += tl.load(correction + e, mask=ours, other=0.0).to(tl.float32)
        # Not a number is the last choice: ranks must be distinct whatever a row holds.
        choice = tl.where(ours & (choice == choice), choice, float("-inf"))
        above = (choice[None, :] > choice[:, None]) | (
            (choice[None, :] == choice[:, None]) & (e[None, :] < e[:, None])
        )
        rank = tl.sum(above.to(tl.int32), axis=1)
        chosen = rank < TOP_K
        weight = score
        if NORMALIZE:
            weight = weight / tl.maximum(tl.sum(tl.where(chosen, score, 0.0), axis=0), 1e-20)
        expert = e
        if LIVE:
            used = tl.load(live + token) >= 0
            expert, weight = tl.where(used, e, -1), tl.where(used, weight, 0.0)
        tl.store(weights + token * TOP_K + rank, weight, mask=chosen)
        tl.store(ids + token * TOP_K + rank, expert, mask=chosen)
        pairs = work + HEADER + 8 * room
        if ONE:
            chosen = chosen & (expert >= 0)
            counts = chosen.to(tl.int32)
            tl.store(pairs + tl.cumsum(counts, axis=0) - 1, rank, mask=chosen)
            _plan(counts, table, touched, work, room, experts, PAD, BLOCK_M, COUNT)
        else:
            tl.debug_barrier()
            if tl.atomic_add(done, 1, sem="acq_rel") == tokens - 1:
                tl.store(done, 0)
                p = tl.arange(0, PAIRS)
                all_ids = tl.load(ids + p, mask=p < tokens * TOP_K, other=-1, cache_modifier=".cg")
                mine, theirs = all_ids[:, None], all_ids[None, :]
                before = (theirs < mine) | ((theirs == mine) & (p[None, :] < p[:, None]))
                row = tl.sum((before & (theirs >= 0)).to(tl.int32), axis=1)
                tl.store(pairs + row, p, mask=all_ids >= 0)
                counts = tl.histogram(all_ids, PAD, mask=all_ids >= 0)
                _plan(counts, table, touched, work, room, experts, PAD, BLOCK_M, COUNT)


@functools.lru_cache
def _counters(device: torch.device) -> torch.Tensor:
    """Counters of finished programs, zero between launches. All launches share one stream."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("run a step once before capturing it: its counters must outlive the graph")
    return torch.zeros(1 + TOKENS, dtype=torch.int32, device=device)


def norm_route(
    x: torch.Tensor,
    residual: torch.Tensor,
    block: MoeBlock,
    table: torch.Tensor,
    touched: torch.Tensor | None,
    live: torch.Tensor | None,
    override: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Alignment]:
    """Norm of x + residual `[T, H]`, then what `route` and `align` make of the router's product with it.

    Returns normed and sum `[T, H]`, the logits of all router rows `[T, rows]`, weights, ids and the plan.
    `override [T, E]` takes the place of the experts' logits.
    """
    (tokens, hidden), rows, experts, top_k = x.shape, block.router.shape[0], block.experts, block.top_k
    normed, total = torch.empty_like(x), torch.empty_like(x)
    logits = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=x.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=x.device)
    room = max_blocks(tokens, top_k, experts, BLOCK_M)
    work = torch.empty(HEADER.value + 8 * room + tokens * top_k, dtype=torch.int32, device=x.device)
    pdl = dependent(x)
    norm_route_kernel[(triton.cdiv(rows, _ROWS), tokens)](
        x, residual, block.norm, block.router, x if block.bias is None else block.bias,
        ids if live is None else live, logits if override is None else override, table,
        ids if touched is None else touched, normed, total, logits, weights, ids, work,
        _counters(x.device), block.eps, room, experts, 0 if override is None else override.stride(0),
        H=hidden, ROWS=rows, TOP_K=top_k, SIGMOID=block.scoring == "sigmoid", NORMALIZE=block.normalize,
        BIAS=block.bias is not None, LIVE=live is not None, OVERRIDE=override is not None,
        COUNT=touched is not None, ZERO_CENTRED=block.zero_centred, ONE=tokens == 1, BLOCK_M=BLOCK_M,
        BLOCK_N=_ROWS, BLOCK_H=triton.next_power_of_2(hidden), PAD=triton.next_power_of_2(experts),
        PAIRS=triton.next_power_of_2(tokens * top_k), PDL=pdl, num_warps=4, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip
    return normed, total, logits, weights, ids, Alignment(work, room)
