"""The fused MoE of a few tokens: rows of every expert's weights in registers, the shared expert beside them.

Room: the products and the sum of a decode step of up to `TOKENS` tokens. Rule: as in `moe`, the bits do
not depend on where an expert lives. A program multiplies a few weight rows, which it asks for all at
once; small programs fill the chip evenly and end together, where a tile for each multiprocessor leaves
some with two tiles and some with one.

The shared expert of `m * intermediate` columns is `m` more experts that every token goes to. It lies in
two dense tensors, gate_up `[2 * m * I, H]` and down `[H, m * I]`: slice s is the columns `s * I` on. Rows
of `act` and `parts`: the `T * k` routed ones, then row `t * m + s` for slice s of token t.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..types import ExpertLayout, MoeBlock
from .align import HEADER, Alignment
from .launch import begin, dependent
from .norm_rope import scaled

TOKENS = 4
HOST_LANES = 64  # programs that read experts over the link at a time, as in `moe`
_WIDEST = 8192  # weights a program holds


@triton.jit
def _row(
    a_at,
    w,
    out_at,
    k,
    first,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATE_UP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One token's row times the weight rows; gate and up rows alternate and meet in SwiGLU."""
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATE_UP else BLOCK_N
    dtype = out_at.dtype.element_ty
    a = tl.load(a_at + k, mask=k < K, other=0.0).to(tl.float32)
    total = tl.sum(w.to(tl.float32) * a, 1)
    if GATE_UP:
        gate, up = tl.split(tl.reshape(total, [WIDTH, 2]))
        gate = gate.to(dtype).to(tl.float32)
        total = gate / (1.0 + tl.exp(-gate)) * up.to(dtype).to(tl.float32)
    at = tl.arange(0, WIDTH)
    tl.store(out_at + at, total.to(dtype), mask=first + at < COLUMNS)


@triton.jit(do_not_specialize=["tokens", "room", "lanes"])
def expert_rows_kernel(
    a, out, shared, work, tokens, room, lanes,
    PART: tl.constexpr,  # bytes from a page's start to this product's weights
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, GATE_UP: tl.constexpr, SLICES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One product of the plan's blocks and of the shared expert's slices. Grid: lanes, shared, pool tiles."""
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATE_UP else BLOCK_N
    COLUMNS: tl.constexpr = N // 2 if GATE_UP else N
    TILES: tl.constexpr = (COLUMNS + WIDTH - 1) // WIDTH
    DENSE: tl.constexpr = SLICES * TILES
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, :]
    program = tl.program_id(0)
    if DENSE and program >= lanes and program < lanes + DENSE:
        piece = (program - lanes) // TILES
        column = (program - lanes) % TILES * WIDTH
        # Past the last column the last one is computed again, and not stored.
        feature = tl.minimum(column + (n // 2 if GATE_UP else n), COLUMNS - 1)
        if GATE_UP:
            weight_row = piece * COLUMNS + feature + n % 2 * (SLICES * COLUMNS)
            w_at = shared + weight_row[:, None] * K + k
        else:
            w_at = shared + feature[:, None] * (SLICES * K) + piece * K + k
        w = tl.load(w_at, mask=k < K, other=0.0)
        begin(PDL)
        for t in range(tokens):
            row = tokens * TOP_K + t * SLICES + piece
            _row(
                a + (t if GATE_UP else row) * K, w, out + row * COLUMNS + column, k, column,
                K, COLUMNS, GATE_UP, BLOCK_N,
            )  # fmt: skip
    else:
        pairs = work + HEADER + 8 * room
        blocks = work + HEADER
        if GATE_UP:
            begin(PDL)  # the kernel ahead makes the plan
        if program < lanes:
            first, last, step = program, tl.load(work) * TILES, lanes
            blocks += 4 * room
        else:
            first, last, step = program - lanes - DENSE, room * TILES, tl.num_programs(0) - lanes - DENSE
        for tile in range(first, last, step):
            block = blocks + tile // TILES * 4
            address = tl.load(block.to(tl.pointer_type(tl.int64))) + PART
            row, rows = tl.load(block + 2), tl.load(block + 3)
            if rows > 0:
                column = tile % TILES * WIDTH
                feature = tl.minimum(column + (n // 2 if GATE_UP else n), COLUMNS - 1)
                weight_row = feature + n % 2 * COLUMNS if GATE_UP else feature
                page = tl.multiple_of(address.to(tl.pointer_type(a.dtype.element_ty)), 256)
                w = tl.load(page + weight_row[:, None] * K + k, mask=k < K, other=0.0)
                if not GATE_UP:
                    begin(PDL)
                for r in range(row, row + rows):
                    pair = tl.load(pairs + r)
                    a_row, out_row = (pair // TOP_K, r) if GATE_UP else (r, pair)
                    _row(
                        a + a_row * K, w, out + out_row * COLUMNS + column, k, column,
                        K, COLUMNS, GATE_UP, BLOCK_N,
                    )  # fmt: skip
        if not GATE_UP:
            begin(PDL)  # also where there was no tile: nobody ends before the kernel ahead


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
    begin(PDL)
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


def fits(layout: ExpertLayout, shared: int) -> bool:
    """Whether the kernels can run experts of this layout beside a shared expert of `shared` columns."""
    sixteen_bit = layout.dtype in (torch.bfloat16, torch.float16)
    return (
        sixteen_bit
        and max(layout.hidden, layout.intermediate) <= _WIDEST
        and shared % layout.intermediate == 0
    )


def _slices(block: MoeBlock) -> int:
    return 0 if block.shared_down is None else block.shared_down.shape[1] // block.layout.intermediate


def expert_rows(x: torch.Tensor, plan: Alignment, block: MoeBlock) -> torch.Tensor:
    """Both products: x `[T, H]` -> parts `[T * k + T * slices, H]`, before their weights."""
    layout, slices = block.layout, _slices(block)
    hidden, inter = layout.hidden, layout.intermediate
    tokens, rows = len(x), len(x) * (block.top_k + slices)
    act = torch.empty((rows, inter), dtype=x.dtype, device=x.device)
    parts = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    pdl = dependent(x)
    for a, out, dense, part, n, k in (
        (x, act, block.shared_gate_up, 0, 2 * inter, hidden),
        (act, parts, block.shared_down, layout.down_offset, hidden, inter),
    ):
        block_k = triton.next_power_of_2(k)
        block_n = max(2, _WIDEST // block_k)
        tiles = triton.cdiv(n, block_n)
        lanes = min(HOST_LANES, plan.room * tiles)
        expert_rows_kernel[((slices + plan.room) * tiles + lanes,)](
            a, out, a if dense is None else dense, plan.work, tokens, plan.room, lanes,
            PART=part, N=n, K=k, TOP_K=block.top_k, GATE_UP=a is x, SLICES=slices,
            BLOCK_N=block_n, BLOCK_K=block_k, PDL=pdl, num_warps=4, num_stages=1, launch_pdl=pdl,
        )  # fmt: skip
    return parts


def combine_norm(
    parts: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    scores: torch.Tensor,
    residual: torch.Tensor,
    block: MoeBlock,
    norm: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum of `expert_rows`' parts, plus residual `[T, H]`, and its norm: (normed, sum).

    scores `[T, rows]`: the router's logits, of which the one after the experts' is the shared expert's gate.
    """
    (tokens, hidden), gated = residual.shape, scores.shape[1] > block.experts
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    size, pdl = triton.next_power_of_2(hidden), dependent(residual)
    combine_norm_kernel[(tokens,)](
        parts, ids, weights, scores[:, block.experts] if gated else scores, residual, norm, out, total,
        block.eps, scores.stride(0),
        H=hidden, TOP_K=block.top_k, SLICES=_slices(block), GATE=gated, ZERO_CENTRED=block.zero_centred,
        BLOCK=size, PDL=pdl, num_warps=min(16, max(1, size // 256)), launch_pdl=pdl,
    )  # fmt: skip
    return out, total
