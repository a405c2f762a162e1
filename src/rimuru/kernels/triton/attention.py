"""Attention over KV pages where they lie in the pool: a kernel for prompts and one for decode.

Room: the triton back end. Rule: page addresses are computed in int64 from constants known when the
kernel compiles, so that every load keeps its full width; the grid depends on host values only, so
that a captured graph replays with any sequence lengths.

A sequence with one query takes the decode kernel (Dao et al., Flash-Decoding, 2023): the cached
tokens are split over thread blocks: one wide block a multiprocessor where that shares the work out
evenly, several narrow ones otherwise. Few partial results of narrow blocks are merged by the last
block of a head to finish, all others by a second launch; in split order, so that the sum does not
depend on timing. Longer queries take the prompt kernel (Dao, FlashAttention-2, 2023). A mixed step
launches both, and each skips what is not its own. How a token of a decode step is computed depends on
the number of sequences and the bound of their lengths, not on what they hold. A captured mixed step is
mostly padding, so there the kernel looks how many sequences decode, and splits by that.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..types import KVLayout, KVView, StepMeta
from . import attention_tiles as tiles
from .launch import begin_early

LOG2E = 1.4426950408889634
STEP_ARRAYS = ["query_start_ptr", "slots_ptr", "seq_lens_ptr"]  # slices of one buffer, at any alignment
COUNTERS = 1 << 17  # heads of sequences in one step
BALANCE_TOKENS = tl.constexpr(tiles.BALANCE_TOKENS)


def check_supported(layout: KVLayout, q_heads: int) -> None:
    """Raise ValueError if the kernels cannot serve this layout, naming what would work."""
    if layout.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"attention kernels take bfloat16, float16 or float32 KV, not {layout.dtype}")
    dim = layout.head_dim
    if dim not in (16, 32, 64, 128, 256):
        raise ValueError(f"attention kernels take head_dim 16, 32, 64, 128 or 256, not {dim}")
    if q_heads % layout.heads:
        raise ValueError(f"{q_heads} query heads do not divide among {layout.heads} KV heads")
    if layout.grain % 16:
        raise ValueError(f"KV pages must be aligned to 16 bytes; the grain is {layout.grain}")


# The loops below carry the pages of the next tokens from one turn to the next. Were they loaded where they
# are used, the pipeline would hold one tile of K and V in flight instead of `stages - 1`.
@triton.jit
def _page(row_ptr, n, end, BLOCK_TOKENS: tl.constexpr):
    """Table entries (grain indices) of the pages of tokens n `[N]`; 0 at or past `end`."""
    return tl.load(row_ptr + n // BLOCK_TOKENS, mask=n < end, other=0)


@triton.jit
def _inside(n, N: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Places of tokens n `[N]` in their pages. Tiles begin at a multiple of N."""
    if N % BLOCK_TOKENS == 0:
        return tl.arange(0, N) % BLOCK_TOKENS  # the same in every turn of a loop
    else:
        return n % BLOCK_TOKENS


@triton.jit
def _prompt_scan(
    acc, total, peak, q, keys, row_ptr, begin, end, at_q, d, scale, window,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, GRAIN: tl.constexpr, KV: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, ROW: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax of a query tile over cached tokens `[begin, end)`."""
    page = _page(row_ptr, begin + tl.arange(0, BLOCK_N), end, BLOCK_TOKENS)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = _inside(n, BLOCK_N, BLOCK_TOKENS) * ROW
        at = (keys + inside[:, None] + d[None, :]) + (page.to(tl.int64) * GRAIN)[:, None]
        k = tl.load(at, mask=(n < end)[:, None], other=0.0) if MASKED else tl.load(at)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            seen = (n[None, :] <= at_q[:, None]) & (n < end)[None, :]
            if WINDOW:
                seen = seen & (n[None, :] > at_q[:, None] - window)
            score = tl.where(seen, score * scale, -float("inf"))
            new_peak = tl.maximum(peak, tl.max(score, 1))
            # A row that has seen nothing yet must not subtract infinity from itself.
            base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
            weight = tl.exp2(score - base[:, None])
        else:
            new_peak = tl.maximum(peak, tl.max(score, 1) * scale)
            base = new_peak
            weight = tl.exp2(score * scale - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weight, 1)
        v = tl.load(at + KV, mask=(n < end)[:, None], other=0.0) if MASKED else tl.load(at + KV)
        acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        peak = new_peak
        page = _page(row_ptr, n + BLOCK_N, end, BLOCK_TOKENS)
    return acc, total, peak


@triton.jit
def _prompt_tile(
    q_ptr, keys, table_ptr, out_ptr, query_start_ptr, slots_ptr, seq_lens_ptr,
    seqs, tokens, table_stride, scale, window, head, seq, offset,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    GRAIN: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries `[offset, offset + BLOCK_M)` of a sequence."""
    first = tl.load(query_start_ptr + seq)
    queries = tl.load(query_start_ptr + seq + 1, mask=seq < seqs, other=tokens) - first
    length = tl.load(seq_lens_ptr + seq, mask=seq < seqs, other=0)
    slot = tl.load(slots_ptr + seq, mask=seq < seqs, other=0).to(tl.int64)
    KV: tl.constexpr = BLOCK_TOKENS * KV_HEADS * DIM
    ROW: tl.constexpr = KV_HEADS * DIM
    d = tl.arange(0, DIM)
    m = offset + tl.arange(0, BLOCK_M)
    rows = ((first + m).to(tl.int64) * Q_HEADS + head) * DIM
    q = tl.load(q_ptr + rows[:, None] + d[None, :], mask=(m < queries)[:, None], other=0.0)
    at_q = length - queries + m
    row_ptr = table_ptr + slot * table_stride

    low = tl.maximum(length - queries + offset, 0)  # position of the tile's first query; 0 of padding
    high = tl.minimum(low + BLOCK_M, length)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    if WINDOW:
        middle = tl.maximum(low + 1 - window, 0) // BLOCK_N * BLOCK_N
    elif PRECISION == "ieee":
        middle = low * 0  # one loop: two of these, without tensor cores, do not fit the registers
    else:
        middle = (low + 1) // BLOCK_N * BLOCK_N  # every query of the tile sees all tokens before this
        acc, total, peak = _prompt_scan(
            acc, total, peak, q, keys, row_ptr, 0, middle, at_q, d, scale, window,
            False, False, GRAIN, KV, BLOCK_TOKENS, ROW, BLOCK_N, PRECISION,
        )  # fmt: skip
    acc, total, peak = _prompt_scan(
        acc, total, peak, q, keys, row_ptr, middle, high, at_q, d, scale, window,
        True, WINDOW, GRAIN, KV, BLOCK_TOKENS, ROW, BLOCK_N, PRECISION,
    )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    to = out_ptr + rows[:, None] + d[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), (m < queries)[:, None])


@triton.jit(
    do_not_specialize=["seqs", "tokens", "table_stride", "layer", "window"],
    do_not_specialize_on_alignment=STEP_ARRAYS,
)
def prompt_kernel(
    q_ptr, pool_ptr, table_ptr, out_ptr, query_start_ptr, slots_ptr, seq_lens_ptr,
    seqs, tokens, table_stride, layer, scale, window,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    GRAIN: tl.constexpr, SEQS: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, TURNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tiles of queries of one head, sequences of one query left out. Grid: (query heads, tiles).

    Rows behind the last sequence's count as the queries of one more sequence, which has nothing in the
    cache: they become zero. SEQS is a power of two above `seqs`. With TURNS the grid may be smaller
    than the number of tiles, else larger.
    """
    head = tl.program_id(0)
    i = tl.arange(0, SEQS)
    begins = tl.load(query_start_ptr + i, mask=i <= seqs, other=0)
    ends = tl.load(query_start_ptr + 1 + i, mask=i < seqs, other=0)
    counts = tl.where(i == seqs, tokens, ends) - begins
    needed = tl.where((counts > 1) | (i == seqs), tl.cdiv(counts, BLOCK_M), 0)
    following = tl.cumsum(needed, 0)  # the tile after each sequence's last
    all_tiles = tl.sum(needed, 0)
    KV: tl.constexpr = BLOCK_TOKENS * KV_HEADS * DIM
    keys = pool_ptr + layer.to(tl.int64) * (2 * KV) + head // (Q_HEADS // KV_HEADS) * DIM
    if TURNS:
        for turn in range(tl.program_id(1), all_tiles, tl.num_programs(1)):
            tile = all_tiles - 1 - turn  # the longest rows first
            seq = tl.sum((following <= tile).to(tl.int32), 0)
            offset = (tile - tl.sum(tl.where(i < seq, needed, 0), 0)) * BLOCK_M
            _prompt_tile(
                q_ptr, keys, table_ptr, out_ptr, query_start_ptr, slots_ptr, seq_lens_ptr,
                seqs, tokens, table_stride, scale, window, head, seq, offset,
                Q_HEADS, KV_HEADS, DIM, BLOCK_TOKENS, GRAIN, WINDOW, BLOCK_M, BLOCK_N, PRECISION,
            )  # fmt: skip
    else:
        tile = all_tiles - 1 - tl.program_id(1)
        if tile < 0:
            return
        seq = tl.sum((following <= tile).to(tl.int32), 0)
        offset = (tile - tl.sum(tl.where(i < seq, needed, 0), 0)) * BLOCK_M
        _prompt_tile(
            q_ptr, keys, table_ptr, out_ptr, query_start_ptr, slots_ptr, seq_lens_ptr,
            seqs, tokens, table_stride, scale, window, head, seq, offset,
            Q_HEADS, KV_HEADS, DIM, BLOCK_TOKENS, GRAIN, WINDOW, BLOCK_M, BLOCK_N, PRECISION,
        )  # fmt: skip


@triton.jit
def _low(length, window, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First token a decode query reads, rounded down to a tile."""
    return tl.maximum(length - window, 0) // BLOCK_N * BLOCK_N if WINDOW else length * 0


@triton.jit
def _split_size(tokens, splits, BLOCK_N: tl.constexpr, MIN_SPLIT: tl.constexpr):
    return tl.maximum(tl.cdiv(tl.cdiv(tokens, splits), BLOCK_N) * BLOCK_N, MIN_SPLIT)


@triton.jit
def _fair_splits(
    query_start_ptr, seq_lens_ptr, seqs, splits, blocks, SEQS: tl.constexpr, KV_HEADS: tl.constexpr
):
    """As many splits as `blocks` thread blocks give each of the step's decode sequences, at most `splits`.

    A long sequence must not be left to one block, however many others there are.
    """
    i = tl.arange(0, SEQS)
    queries = tl.load(query_start_ptr + 1 + i, mask=i < seqs, other=0) - tl.load(
        query_start_ptr + i, mask=i < seqs, other=0
    )
    lengths = tl.where(queries == 1, tl.load(seq_lens_ptr + i, mask=i < seqs, other=0), 0)
    live = tl.sum((lengths > 0).to(tl.int32), 0)
    fill = tl.cdiv(blocks, tl.maximum(live, 1) * KV_HEADS)
    return tl.minimum(splits, tl.maximum(fill, tl.cdiv(tl.max(lengths, 0), BALANCE_TOKENS)))


@triton.jit(
    do_not_specialize=["padded", "blocks", "table_stride", "layer", "window"],
    do_not_specialize_on_alignment=STEP_ARRAYS,
)
def decode_kernel(
    q_ptr, pool_ptr, table_ptr, out_ptr, partial_ptr, lse_ptr, counter_ptr,
    query_start_ptr, slots_ptr, seq_lens_ptr, padded, blocks, table_stride, layer, scale, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    GRAIN: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MIN_SPLIT: tl.constexpr, ROWS: tl.constexpr, FUSED: tl.constexpr, MIXED: tl.constexpr,
    PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The query heads of one KV head against one split of one sequence. Grid: (KV heads, S, splits).

    Partials: float32 `[S, KV heads, splits, ROWS, DIM]` with ROWS the group rounded up to a power
    of two; lse: float32 `[S, KV heads, splits, ROWS]` in base 2; counters start and end at zero.
    Rows from the last sequence's to `padded` (at most S) become zero. FUSED: partials that the last
    block merges at a time, 0 for `merge_kernel`. MIXED: 0, or a power of two from S on: only as many of
    the splits are used as the sequences that decode in this step have use for.
    With PDL the grid may be placed before the kernel ahead of it has ended, and lets the next one be.
    """
    head, seq, split, splits = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    # All loads before any branch, so that their latencies overlap.
    length = tl.load(seq_lens_ptr + seq)
    first = tl.load(query_start_ptr + seq)
    following = tl.load(query_start_ptr + seq + 1)
    slot = tl.load(slots_ptr + seq).to(tl.int64)
    rest = tl.load(query_start_ptr + tl.num_programs(1))
    d = tl.arange(0, DIM)
    m = tl.arange(0, BLOCK_M)
    rows = ((first.to(tl.int64) * KV_HEADS + head) * GROUP + m) * DIM
    empty = (following - first == 1) & (length == 0)
    if (split == 0) & (empty | ((rest <= seq) & (seq < padded))):
        if PDL:
            tl.extra.cuda.gdc_wait()  # the row may be memory that the kernel ahead still reads
        row = tl.where(empty, first, seq).to(tl.int64)
        at = ((row * KV_HEADS + head) * GROUP + m) * DIM
        zero = tl.zeros([BLOCK_M, DIM], out_ptr.dtype.element_ty)
        tl.store(out_ptr + at[:, None] + d[None, :], zero, (m < GROUP)[:, None])
    if (following - first != 1) | (length == 0):
        if PDL:
            tl.extra.cuda.gdc_wait()  # were all blocks to leave, the grid would end before the kernel ahead
        return
    share = splits
    if MIXED > 0:
        share = _fair_splits(
            query_start_ptr, seq_lens_ptr, tl.num_programs(1), splits, blocks, MIXED, KV_HEADS
        )
    low = _low(length, window, WINDOW, BLOCK_N)
    size = _split_size(length - low, share, BLOCK_N, MIN_SPLIT)
    used = tl.cdiv(length - low, size)
    if split >= used:
        return

    KV: tl.constexpr = BLOCK_TOKENS * KV_HEADS * DIM
    ROW: tl.constexpr = KV_HEADS * DIM
    row_ptr = table_ptr + slot * table_stride
    keys = pool_ptr + layer.to(tl.int64) * (2 * KV) + head * DIM

    begin = low + split * size
    end = tl.minimum(begin + size, length)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    page = _page(row_ptr, begin + tl.arange(0, BLOCK_N), end, BLOCK_TOKENS)
    if PDL:
        tl.extra.cuda.gdc_wait()  # what was read so far is not the kernel ahead's to write
    q = tl.load(q_ptr + rows[:, None] + d[None, :], mask=(m < GROUP)[:, None], other=0.0)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        live = n < end
        inside = _inside(n, BLOCK_N, BLOCK_TOKENS) * ROW
        at = (keys + inside[:, None] + d[None, :]) + (page.to(tl.int64) * GRAIN)[:, None]
        k = tl.load(at, mask=live[:, None], other=0.0)
        v = tl.load(at + KV, mask=live[:, None], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if WINDOW:
            live = live & (n >= length - window)
        score = tl.where(live[None, :], score, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak) if WINDOW else new_peak
        weight = tl.exp2(score - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        peak = new_peak
        page = _page(row_ptr, n + BLOCK_N, end, BLOCK_TOKENS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if used == 1:
        value = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + rows[:, None] + d[None, :], value, (m < GROUP)[:, None])
        return

    owner = seq * KV_HEADS + head
    mine = (owner * splits + split).to(tl.int64) * ROWS + m
    tl.store(partial_ptr + mine[:, None] * DIM + d[None, :], acc, (m < GROUP)[:, None])
    tl.store(lse_ptr + mine, peak + tl.log2(total), m < GROUP)
    if FUSED > 0:
        tl.debug_barrier()  # every thread's partial is written before the count that announces it
        if tl.atomic_add(counter_ptr + owner, 1, sem="acq_rel") == used - 1:
            tl.store(counter_ptr + owner, 0)
            r = tl.arange(0, ROWS)
            value = tl.zeros([ROWS, DIM], tl.float32)
            norm = tl.zeros([ROWS], tl.float32)
            top = tl.full([ROWS], -float("inf"), tl.float32)
            for done in range(0, used, FUSED):
                s = done + tl.arange(0, FUSED)
                theirs = ((owner * splits).to(tl.int64) + s)[:, None] * ROWS + r[None, :]
                ok = (s < used)[:, None] & (r < GROUP)[None, :]
                lse = tl.load(lse_ptr + theirs, mask=ok, other=-float("inf"), cache_modifier=".cg")
                part = tl.load(
                    partial_ptr + theirs[:, :, None] * DIM + d[None, None, :],
                    mask=ok[:, :, None], other=0.0, cache_modifier=".cg",
                )  # fmt: skip
                new_top = tl.where(r < GROUP, tl.maximum(top, tl.max(lse, 0)), 0.0)
                weights = tl.exp2(lse - new_top[None, :])
                fade_r = tl.exp2(top - new_top)
                value = value * fade_r[:, None] + tl.sum(part * weights[:, :, None], 0)
                norm = norm * fade_r + tl.sum(weights, 0)
                top = new_top
            value = (value / tl.where(norm == 0.0, 1.0, norm)[:, None]).to(out_ptr.dtype.element_ty)
            to = ((first.to(tl.int64) * KV_HEADS + head) * GROUP + r) * DIM
            tl.store(out_ptr + to[:, None] + d[None, :], value, (r < GROUP)[:, None])


@triton.jit(do_not_specialize=["splits", "window"], do_not_specialize_on_alignment=STEP_ARRAYS)
def merge_kernel(
    partial_ptr, lse_ptr, out_ptr, query_start_ptr, seq_lens_ptr, splits, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, MIN_SPLIT: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One query head's partials, in split order. Grid: (query heads, S)."""
    head, seq = tl.program_id(0), tl.program_id(1)
    length = tl.load(seq_lens_ptr + seq)
    first = tl.load(query_start_ptr + seq)
    following = tl.load(query_start_ptr + seq + 1)
    begin_early(PDL)
    low = _low(length, window, WINDOW, BLOCK_N)
    used = tl.cdiv(length - low, _split_size(length - low, splits, BLOCK_N, MIN_SPLIT))
    if (following - first != 1) | (used < 2):
        return
    d = tl.arange(0, DIM)
    base = (seq * KV_HEADS + head // GROUP).to(tl.int64) * splits
    top = -float("inf")
    norm = 0.0
    out = tl.zeros([DIM], tl.float32)
    for start in range(0, used, STEP):
        s = start + tl.arange(0, STEP)
        at = (base + s) * ROWS + head % GROUP
        lse = tl.load(lse_ptr + at, mask=s < used, other=-float("inf"))
        part = tl.load(partial_ptr + at[:, None] * DIM + d[None, :], mask=(s < used)[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        share = tl.exp2(lse - new_top)
        fade = tl.exp2(top - new_top)
        out = out * fade + tl.sum(part * share[:, None], 0)
        norm = norm * fade + tl.sum(share, 0)
        top = new_top
    at = (first.to(tl.int64) * (KV_HEADS * GROUP) + head) * DIM + d
    tl.store(out_ptr + at, (out / norm).to(out_ptr.dtype.element_ty))


@functools.cache
def _device(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, shared memory class); a plausible GPU where kernels are interpreted."""
    if device.type != "cuda":
        return 1, 99
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, tiles.shared_memory_class((properties.major, properties.minor))


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    """Counters of finished splits, zero between launches. All launches share one stream."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("run attention once before capturing it: its counters must outlive the graph")
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def attention(q: torch.Tensor, kv: KVView, meta: StepMeta, scale: float, window: int = 0) -> torch.Tensor:
    """Causal attention of this step's queries over the pages; see `reference.attention`.

    In a pure decode step row s is sequence s, padding or not. Raises ValueError for a layout without
    a kernel (`check_supported`).
    """
    lay = kv.layout
    tokens, q_heads, dim = q.shape
    check_supported(lay, q_heads)
    seqs, group = meta.slots.shape[0], q_heads // lay.heads
    out = torch.empty(tokens, q_heads * dim, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    q = q.contiguous()
    multiprocessors, shared = _device(q.device)
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    where = (meta.query_start, meta.slots, meta.seq_lens)
    stride, scale = kv.table.stride(0), scale * LOG2E
    mixed = meta.max_query_len > 1 or tokens > seqs
    if mixed:
        few = -(-tokens // 128) * q_heads <= multiprocessors
        tile, turns = tiles.prompt_tile(q.dtype, dim, shared, few)
        blocks = tokens // tile.m + seqs  # if every sequence has a last tile that is not full
        if turns:
            # Two thread blocks a multiprocessor, or one for each tile of one long prompt, and tiles beyond
            # these take turns: most sequences may be padding or decode.
            blocks = min(blocks, max(-(-tokens // tile.m), -(-2 * multiprocessors // q_heads)))
        prompt_kernel[(q_heads, blocks)](
            q, kv.pool, kv.table, out, *where, seqs, tokens, stride, kv.layer, scale, window,
            Q_HEADS=q_heads, KV_HEADS=lay.heads, DIM=dim, BLOCK_TOKENS=lay.block_tokens,
            GRAIN=lay.grain_elems, SEQS=tiles.sequences(seqs), WINDOW=window > 0,
            BLOCK_M=tile.m, BLOCK_N=tile.n, TURNS=turns, PRECISION=precision,
            num_warps=tile.warps, num_stages=tile.stages, maxnreg=tiles.registers(q.dtype),
        )  # fmt: skip
    tile, wide_splits, least = tiles.decode_tile(q.dtype, dim, group, shared), 0, tiles.MIN_SPLIT
    if mixed:
        splits = tiles.mixed_split_count(seqs, lay.heads, meta.max_seq_len)
    else:
        least = tiles.min_split(seqs, lay.heads, meta.max_seq_len, multiprocessors)
        splits = tiles.split_count(seqs, lay.heads, meta.max_seq_len, multiprocessors)
        if wider := tiles.wide_tile(q.dtype, dim, group, shared):
            wide_splits = tiles.wide_split_count(seqs, lay.heads, meta.max_seq_len, multiprocessors)
            tile, splits = (wider, wide_splits) if wide_splits else (tile, splits)
    rows = triton.next_power_of_2(group)
    if seqs * lay.heads > COUNTERS or seqs >= tiles.SEQUENCES[-1]:
        most = min(COUNTERS // lay.heads, tiles.SEQUENCES[-1] - 1)
        raise ValueError(f"a step holds at most {most} sequences, got {seqs}")
    scratch = seqs * lay.heads * splits * rows
    partial = torch.empty(scratch * (dim + 1), dtype=torch.float32, device=q.device)
    lse = partial[scratch * dim :]
    fused = mixed or (not wide_splits and splits <= tiles.MAX_FUSED)
    # Where narrow blocks fill the GPU, an early grid would take the room of working ones.
    alone = wide_splits or splits * seqs * lay.heads <= 2 * multiprocessors
    pdl = bool(alone) and not mixed and q.is_cuda and shared == 227
    decode_kernel[(lay.heads, seqs, splits)](
        q, kv.pool, kv.table, out, partial, lse, _counters(q.device), *where,
        0 if mixed else tokens, tiles.BLOCKS_PER_SM * multiprocessors, stride, kv.layer, scale, window,
        KV_HEADS=lay.heads, GROUP=group, DIM=dim, BLOCK_TOKENS=lay.block_tokens, GRAIN=lay.grain_elems,
        WINDOW=window > 0, BLOCK_M=tile.m, BLOCK_N=tile.n, MIN_SPLIT=least, ROWS=rows,
        FUSED=max(1, min(8, 4096 // (rows * dim))) if fused else 0,
        MIXED=tiles.sequences(seqs) if mixed else 0,
        PDL=pdl, PRECISION=precision, num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip
    if splits > 1 and not fused:
        merge_kernel[(q_heads, seqs)](
            partial, lse, out, meta.query_start, meta.seq_lens, splits, window,
            KV_HEADS=lay.heads, GROUP=group, DIM=dim, WINDOW=window > 0, BLOCK_N=tile.n,
            MIN_SPLIT=least, ROWS=rows, STEP=32, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    return out
