"""The fused MoE: gate_up with SwiGLU, down, and the weighted sum, each expert read where it lies.

Room: `moe` and its ablation `moe_gather`. Rule: what a launch computes depends on the routing and
never on where an expert lives: same tile, same order of every reduction, no float atomics, so the
bits are equal for any residency. Nothing waits on the host, and a call can be captured in a graph.

The experts of a step are two lists of tiles, host experts first. The first `HOST_LANES` programs
walk the tiles of host experts and so bound how many programs read over the link at a time (the
link is full with a few dozen and slows down with a thousand); every other program has one tile in
the pool, and the hardware hands those out as multiprocessors come free. A host expert whose rows
fit one M block crosses the link once.

Where experts have rows enough, on Hopper, both products are `moe_specialised`'s, with the same bits.

A shared expert of `m * intermediate` columns can ride along as `m` experts that every token goes to
(`moe_block`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from ..types import ALIGN, EXPERT_ADDRESS, ExpertLayout, MoeBlock
from . import moe_specialised
from .align import HEADER, Alignment, align
from .launch import begin, dependent
from .moe_tiles import Pair, Tile, choose

_ADDRESS = tl.constexpr(EXPERT_ADDRESS)
HOST_LANES = 64


@triton.jit
def _tile(
    a, out, weight, pairs, row, rows, column, piece, base,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, GATE_UP: tl.constexpr, SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`rows` sorted rows from `row` on, times the weight rows of output columns from `column` on.

    With SLICES, of slice `piece` of the shared expert: rows are tokens, those of `act` and `parts` lie from
    `base` on.
    """
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATE_UP else BLOCK_N  # output columns of a tile
    COLUMNS: tl.constexpr = N // 2 if GATE_UP else N
    dtype = a.dtype.element_ty
    live = tl.arange(0, BLOCK_M) < rows
    row += tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    # Gate and up rows alternate, so that the two halves of a column meet in one thread.
    feature = column + (n // 2 if GATE_UP else n)
    if COLUMNS % WIDTH:
        feature = tl.minimum(feature, COLUMNS - 1)
    k = tl.arange(0, BLOCK_K)
    if SLICES:
        out_row = base + row * SLICES + piece
        a_row = row if GATE_UP else out_row
        if GATE_UP:
            w_row = (piece * COLUMNS + feature + n % 2 * (SLICES * COLUMNS)) * K
        else:
            w_row = feature * (SLICES * K) + piece * K
    else:
        pair = tl.load(pairs + row, mask=live, other=0)
        out_row = row if GATE_UP else pair
        a_row = pair // TOP_K if GATE_UP else row
        w_row = (feature + n % 2 * COLUMNS if GATE_UP else feature) * K
    a_at = a + a_row.to(tl.int64)[:, None] * K + k[None, :]
    w_at = weight + w_row[None, :] + k[:, None]
    if not GATE_UP:
        begin(PDL)  # the plan is older than the kernel ahead, its rows are not
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K:
            inside = k < K - start
            a_tile = tl.load(a_at, mask=live[:, None] & inside[None, :], other=0.0)
            w_tile = tl.load(w_at, mask=inside[:, None], other=0.0)
        else:
            a_tile = tl.load(a_at, mask=live[:, None], other=0.0)
            w_tile = tl.load(w_at)
        acc = tl.dot(a_tile, w_tile, acc, input_precision="ieee")
        a_at += BLOCK_K
        w_at += BLOCK_K
    if GATE_UP:
        gate, up = tl.split(tl.reshape(acc, [BLOCK_M, WIDTH, 2]))
        gate = gate.to(dtype).to(tl.float32)
        result = gate / (1.0 + tl.exp(-gate)) * up.to(dtype).to(tl.float32)
    else:
        result = acc
    at = column + tl.arange(0, WIDTH)
    keep = live[:, None]
    if COLUMNS % WIDTH:
        keep = keep & (at < COLUMNS)[None, :]
    tl.store(out + out_row.to(tl.int64)[:, None] * COLUMNS + at[None, :], result.to(dtype), mask=keep)


@triton.jit(do_not_specialize=["tokens", "room", "lanes"])
def _expert_kernel(
    a, out, shared, work, tokens, room, lanes,
    PART: tl.constexpr,  # bytes from the page's start to this product's weights
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, GATE_UP: tl.constexpr, SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FEW_M: tl.constexpr, FEW_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One product of every block of the plan. `N` is rows of the weight, 2 * intermediate for gate_up.

    gate_up: `a` is x `[T, K]`, `out` the activation `[pairs, N / 2]` in sorted order.
    down: `a` is that activation, `out` `[pairs, N]` in pair order.
    With SLICES, also of the shared expert (`expert_parts`). Grid: lanes, shared tiles, pool tiles.
    """
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATE_UP else BLOCK_N
    TILES: tl.constexpr = ((N // 2 if GATE_UP else N) + WIDTH - 1) // WIDTH
    program = tl.program_id(0)
    if GATE_UP:
        begin(PDL)
    pairs = work + HEADER + 8 * room
    blocks = work + HEADER
    dense = 0
    if SLICES:
        dense = SLICES * TILES * tl.cdiv(tokens, BLOCK_M)
    if SLICES and program >= lanes and program < lanes + dense:
        tile = (program - lanes) % (SLICES * TILES)
        row = (program - lanes) // (SLICES * TILES) * BLOCK_M
        column = tile % TILES * WIDTH
        rows = tl.minimum(tokens - row, BLOCK_M)
        if rows > FEW_M:
            _tile(
                a, out, shared, pairs, row, rows, column, tile // TILES, tokens * TOP_K,
                N, K, TOP_K, GATE_UP, SLICES, BLOCK_M, BLOCK_N, BLOCK_K, PDL,
            )  # fmt: skip
        elif FEW_M > 0:
            _tile(
                a, out, shared, pairs, row, rows, column, tile // TILES, tokens * TOP_K,
                N, K, TOP_K, GATE_UP, SLICES, FEW_M, BLOCK_N, FEW_K, PDL,
            )  # fmt: skip
    else:
        if program < lanes:
            first, last, step = program, tl.load(work) * TILES, lanes
            blocks += 4 * room
        else:
            first, last, step = program - lanes - dense, room * TILES, tl.num_programs(0) - lanes - dense
        for tile in range(first, last, step):
            block = blocks + tile // TILES * 4
            address = tl.load(block.to(tl.pointer_type(tl.int64))) + PART
            row, rows = tl.load(block + 2), tl.load(block + 3)
            # The alignment of an address out of a table is unknown to the compiler: without this hint
            # loads are narrow and not pipelined, at a third of the speed.
            page = tl.multiple_of(address.to(tl.pointer_type(a.dtype.element_ty)), 256)
            column = tile % TILES * WIDTH
            if rows > FEW_M:
                _tile(
                    a, out, page, pairs, row, rows, column, 0, 0,
                    N, K, TOP_K, GATE_UP, 0, BLOCK_M, BLOCK_N, BLOCK_K, PDL,
                )  # fmt: skip
            elif FEW_M > 0:  # noqa: SIM102 (this test is made while compiling, the next one by the program)
                if rows > 0:
                    _tile(
                        a, out, page, pairs, row, rows, column, 0, 0,
                        N, K, TOP_K, GATE_UP, 0, FEW_M, BLOCK_N, FEW_K, PDL,
                    )  # fmt: skip
    if not GATE_UP:
        begin(PDL)  # also where there was no tile: nobody ends before the kernel ahead


@triton.jit
def _combine_kernel(
    parts, ids, weights, shared, gate, gate_stride, out,
    H: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`out[t] = sum_j weights[t, j] * parts[t * k + j]`, in the order of j, then `sigmoid(gate) * shared`."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        used = tl.load(ids + pair) >= 0
        part = tl.load(parts + pair * H + at, mask=used & (at < H), other=0.0)
        total += part.to(tl.float32) * tl.load(weights + pair)
    if SHARED:
        part = tl.load(shared + token * H + at, mask=at < H, other=0.0).to(tl.float32)
        if GATE:
            part *= tl.sigmoid(tl.load(gate + token * gate_stride).to(tl.float32))
        total += part
    tl.store(out + token * H + at, total.to(out.dtype.element_ty), mask=at < H)


def _product(
    a: torch.Tensor, out: torch.Tensor, plan: Alignment, tile: Tile, layout: ExpertLayout, top_k: int,
    gate_up: bool, tokens: int = 0, shared: torch.Tensor | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    n, k = (2 * layout.intermediate, layout.hidden) if gate_up else (layout.hidden, layout.intermediate)
    # One dimension of the shared expert's weight is the experts', the other `slices` times theirs.
    slices = 0 if shared is None else shared.numel() // (n * k)
    tiles = triton.cdiv(n, tile.n)
    lanes = min(HOST_LANES, plan.room * tiles)
    dense = slices * triton.cdiv(tokens, tile.m)
    _expert_kernel[(lanes + (dense + plan.room) * tiles,)](
        a, out, a if shared is None else shared, plan.work, tokens, plan.room, lanes,
        PART=0 if gate_up else layout.down_offset, N=n, K=k, TOP_K=top_k, GATE_UP=gate_up, SLICES=slices,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, FEW_M=tile.few_m, FEW_K=tile.few_k, PDL=pdl,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip


def expert_parts(x: torch.Tensor, plan: Alignment, tiles: Pair, block: MoeBlock) -> torch.Tensor:
    """Both products of x `[T, H]`, before their weights, beside the shared expert's.

    The shared expert of `m * intermediate` columns is `m` more experts, one a slice of its columns, that
    every token goes to. Returns `[T * k + T * m, H]`: the pairs, then slice s of token t at `t * m + s`.
    """
    layout, top_k, tokens = block.layout, block.top_k, len(x)
    slices = 0 if block.shared_down is None else block.shared_down.shape[1] // layout.intermediate
    act = x.new_empty((tokens * (top_k + slices), layout.intermediate))
    parts = x.new_empty((tokens * (top_k + slices), layout.hidden))
    pdl = dependent(x)
    _product(x, act, plan, tiles[0], layout, top_k, True, tokens, block.shared_gate_up, pdl)
    _product(act, parts, plan, tiles[1], layout, top_k, False, tokens, block.shared_down, pdl)
    return parts


def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    table: torch.Tensor | Iterable[torch.Tensor],
    layout: ExpertLayout,
    touched: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """SwiGLU experts read through their address table: as `rimuru.kernels.reference.moe`.

    x `[T, H]` contiguous; ids int32 `[T, k]` (-1: skip); weights float32 `[T, k]`; table int64
    `[E]` of tagged addresses that the GPU can read (pool, or registered host memory); `touched`
    int32 `[E]` is incremented; shared `[T, H]` is added, times `sigmoid(gate)` of gate `[T]` or `[T, 1]`
    (any row stride). Returns `[T, H]`. Needs `pairs * (H + intermediate)` elements of transient memory.
    Raises ValueError for a dtype without a kernel.

    Where experts are still arriving, `table` is an iterable of such rows: each is asked for when the
    launches of the one before have been made, and holds 0 for the experts of other passes. The bits
    are those of one pass.
    """
    tokens, top_k = ids.shape
    hidden, inter = layout.hidden, layout.intermediate
    if x.dtype != layout.dtype or x.shape != (tokens, hidden) or not x.is_contiguous():
        raise ValueError(
            f"moe takes contiguous x [{tokens}, {hidden}] {layout.dtype}, not {list(x.shape)} {x.dtype} "
            f"with strides {x.stride()}"
        )
    out = torch.empty_like(x)
    if tokens == 0:
        return out
    act = torch.empty((tokens * top_k, inter), dtype=x.dtype, device=x.device)
    parts = torch.empty((tokens * top_k, hidden), dtype=x.dtype, device=x.device)
    for row in (table,) if isinstance(table, torch.Tensor) else table:
        if moe_specialised.suits(layout, tokens, top_k, row.numel(), x.device):
            plan = align(ids, row, moe_specialised.BLOCK_M, touched)
            moe_specialised.product(x, act, plan, layout, top_k, gate_up=True)
            moe_specialised.product(act, parts, plan, layout, top_k, gate_up=False)
            continue
        gate_up, down = choose(tokens, top_k, row.numel(), layout.dtype, x.device)
        plan = align(ids, row, gate_up.m, touched)
        _product(x, act, plan, gate_up, layout, top_k, gate_up=True)
        _product(act, parts, plan, down, layout, top_k, gate_up=False)
    block = min(1024, triton.next_power_of_2(hidden))
    _combine_kernel[(tokens, triton.cdiv(hidden, block))](
        parts, ids, weights,
        parts if shared is None else shared.contiguous(),
        parts if gate is None else gate, 0 if gate is None else gate.stride(0), out,
        H=hidden, TOP_K=top_k, SHARED=shared is not None, GATE=gate is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["pairs", "stride"])
def _gather_kernel(
    ids, table, scratch, pairs, stride, PAGE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    expert = tl.program_id(0)
    hits = 0
    for start in range(0, pairs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        hits += tl.sum((tl.load(ids + at, mask=at < pairs, other=-1) == expert).to(tl.int32), axis=0)
    if hits > 0:
        source = (tl.load(table + expert) & _ADDRESS).to(tl.pointer_type(tl.int32))
        source = tl.multiple_of(source, 256)
        target = scratch + expert.to(tl.int64) * tl.multiple_of(stride, 64)
        for start in range(tl.program_id(1) * BLOCK, PAGE // 4, tl.num_programs(1) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(target + at, tl.load(source + at, mask=at < PAGE // 4), mask=at < PAGE // 4)


def moe_gather(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    table: torch.Tensor,
    layout: ExpertLayout,
    scratch: torch.Tensor,
    touched: torch.Tensor | None = None,
) -> torch.Tensor:
    """`moe` that first copies each touched expert to `scratch`: the ablation of reading in place.

    scratch: uint8, at least `E * layout.page_bytes` bytes on x's device, aligned as a page is.
    Bit-identical to `moe`. Raises ValueError for a scratch too small or misaligned.
    """
    experts, page = table.numel(), layout.page_bytes
    if scratch.numel() < experts * page:
        raise ValueError(f"moe_gather needs {experts * page} bytes of scratch, got {scratch.numel()}")
    if scratch.data_ptr() % ALIGN:
        raise ValueError(f"moe_gather's scratch must start on a multiple of {ALIGN} bytes")
    copies = torch.arange(experts, device=x.device) * page + scratch.data_ptr()
    if ids.numel():
        _gather_kernel[(experts, 8)](
            ids, table, scratch.view(torch.int32), ids.numel(), page // 4, PAGE=page, BLOCK=4096, CHUNK=512
        )
    return moe(x, ids, weights, copies, layout, touched)
