"""Alignment by expert: sort a step's (token, choice) pairs by expert and cut them into M blocks.

Room: the plan that the expert GEMMs follow. Rule: on the device, no host sync, one launch for a
decode step and three for a prefill; the order of pairs is fixed by their ids alone.

The plan is one int32 workspace, with room for B blocks in each of two lists:

    [0]                   blocks of host experts
    [1], [2]              tiles drawn of gate_up and of down, 0 at first (`moe_specialised`); [3] unused
    [4 + 4 b ...]         pool block b: address (int64), first sorted row, rows (0: unused block)
    [4 + 4 B + 4 b ...]   host block b: the same
    [4 + 8 B + r]         sorted row r -> pair (token * k + choice)

Each list is by ascending expert; one whose table entry is 0 has rows, but no block and no count. A block
carries the address, so that a GEMM program is two loads away from its first tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..types import EXPERT_ADDRESS, EXPERT_HOST
from .launch import begin, dependent

HEADER = tl.constexpr(4)
_HOST = tl.constexpr(EXPERT_HOST)
_ADDRESS = tl.constexpr(EXPERT_ADDRESS)
_PAIRWISE_LIMIT = 1024  # beyond it the quadratic count costs more than two launches
_CHUNK = 128


@triton.jit
def _plan(
    counts, table, touched, work, room, experts, PAD: tl.constexpr, BLOCK_M: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    expert = tl.arange(0, PAD)
    live = expert < experts
    entry = tl.load(table + expert, mask=live, other=0)
    host = (entry & _HOST) != 0
    here = tl.where(entry == 0, 0, counts)
    blocks = (here + BLOCK_M - 1) // BLOCK_M
    host_blocks = tl.where(host, blocks, 0)
    pool_blocks = blocks - host_blocks
    first_block = tl.where(
        host,
        room + tl.cumsum(host_blocks, axis=0) - host_blocks,
        tl.cumsum(pool_blocks, axis=0) - pool_blocks,
    )
    first_row = tl.cumsum(counts, axis=0) - counts
    tl.store(work, tl.sum(host_blocks, axis=0))
    tl.store(work + 1, 0)
    tl.store(work + 2, 0)
    for i in range(0, tl.max(blocks, axis=0)):
        slot = work + HEADER + (first_block + i) * 4
        mine = i < blocks
        tl.store(slot.to(tl.pointer_type(tl.int64)), entry & _ADDRESS, mask=mine)
        tl.store(slot + 2, first_row + i * BLOCK_M, mask=mine)
        tl.store(slot + 3, tl.minimum(counts - i * BLOCK_M, BLOCK_M), mask=mine)
    in_pool = tl.sum(pool_blocks, axis=0)
    for start in range(0, room, PAD):
        b = start + expert
        tl.store(work + HEADER + b * 4 + 3, tl.zeros([PAD], tl.int32), mask=(b >= in_pool) & (b < room))
    if COUNT:
        tl.store(touched + expert, tl.load(touched + expert, mask=live, other=0) + here, mask=live)


@triton.jit(do_not_specialize=["pairs", "room", "experts"])
def _align_kernel(
    ids, table, touched, work, pairs, room, experts,
    PAD: tl.constexpr, BLOCK_M: tl.constexpr, COUNT: tl.constexpr, MINE: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program 0 plans; program p > 0 places pairs: a pair's row is the number of pairs before it."""
    program = tl.program_id(0)
    begin(PDL)
    if program == 0:
        counts = tl.zeros([PAD], tl.int32)
        for start in range(0, pairs, CHUNK):
            at = start + tl.arange(0, CHUNK)
            e = tl.load(ids + at, mask=at < pairs, other=-1)
            counts += tl.histogram(e, PAD, mask=e >= 0)
        _plan(counts, table, touched, work, room, experts, PAD, BLOCK_M, COUNT)
    else:
        mine = (program - 1) * MINE + tl.arange(0, MINE)
        my_expert = tl.load(ids + mine, mask=mine < pairs, other=-1)
        row = tl.zeros([MINE], tl.int32)
        for start in range(0, pairs, CHUNK):
            at = start + tl.arange(0, CHUNK)
            e = tl.load(ids + at, mask=at < pairs, other=-1)[None, :]
            before = (e < my_expert[:, None]) | ((e == my_expert[:, None]) & (at[None, :] < mine[:, None]))
            row += tl.sum((before & (e >= 0)).to(tl.int32), axis=1)
        tl.store(work + HEADER + 8 * room + row, mine, mask=my_expert >= 0)


@triton.jit(do_not_specialize=["pairs", "chunks"])
def _count_kernel(ids, counts, pairs, chunks, PAD: tl.constexpr, CHUNK: tl.constexpr):
    """`counts[expert, chunk]`: pairs of each expert in each chunk."""
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    e = tl.load(ids + at, mask=at < pairs, other=-1)
    tl.store(counts + tl.arange(0, PAD) * chunks + tl.program_id(0), tl.histogram(e, PAD, mask=e >= 0))


@triton.jit(do_not_specialize=["chunks"])
def _scan_kernel(counts, totals, chunks, BLOCK: tl.constexpr):
    """One expert: its count in each chunk becomes its count in the chunks before."""
    row = counts + tl.program_id(0) * chunks
    before = 0
    for start in range(0, chunks, BLOCK):
        at = start + tl.arange(0, BLOCK)
        n = tl.load(row + at, mask=at < chunks, other=0)
        tl.store(row + at, before + tl.cumsum(n, axis=0) - n, mask=at < chunks)
        before += tl.sum(n, axis=0)
    tl.store(totals + tl.program_id(0), before)


@triton.jit(do_not_specialize=["pairs", "room", "experts", "chunks"])
def _place_kernel(
    ids, counts, totals, table, touched, work, pairs, room, experts, chunks,
    PAD: tl.constexpr, BLOCK_M: tl.constexpr, COUNT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program 0 plans; program p > 0 places the pairs of chunk p - 1."""
    expert = tl.arange(0, PAD)
    total = tl.load(totals + expert)
    if tl.program_id(0) == 0:
        _plan(total, table, touched, work, room, experts, PAD, BLOCK_M, COUNT)
    else:
        chunk = tl.program_id(0) - 1
        base = tl.cumsum(total, axis=0) - total + tl.load(counts + expert * chunks + chunk)
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        e = tl.load(ids + at, mask=at < pairs, other=-1)
        earlier = (e[None, :] == e[:, None]) & (at[None, :] < at[:, None])
        row = tl.gather(base, tl.maximum(e, 0), axis=0) + tl.sum(earlier.to(tl.int32), axis=1)
        tl.store(work + HEADER + 8 * room + row, at, mask=e >= 0)


@dataclass(frozen=True, slots=True)
class Alignment:
    """Device plan of one MoE call. `work` is laid out as the module says."""

    work: torch.Tensor  # int32
    room: int  # blocks that fit in each list, enough for any routing


def max_blocks(tokens: int, top_k: int, experts: int, block_m: int) -> int:
    """The most M blocks that any routing of `tokens` can need."""
    pairs = tokens * top_k
    touched = min(experts, pairs)
    # A token goes to an expert at most once, so an expert has at most `tokens` rows.
    return min(touched + (pairs - touched) // block_m, touched * -(-tokens // block_m))


def align(
    ids: torch.Tensor, table: torch.Tensor, block_m: int, touched: torch.Tensor | None = None
) -> Alignment:
    """Plan the M blocks of `ids` int32 `[T, k]` (-1: skip) over `table` int64 `[E]` (0: not now).

    `touched` int32 `[E]` is incremented by the number of pairs of each expert that has an entry.
    """
    tokens, top_k = ids.shape
    pairs, experts = tokens * top_k, table.numel()
    room = max_blocks(tokens, top_k, experts, block_m)
    work = torch.empty(HEADER.value + 8 * room + pairs, dtype=torch.int32, device=ids.device)
    counter = table if touched is None else touched
    pad = triton.next_power_of_2(experts)
    if pairs <= _PAIRWISE_LIMIT:
        chunk, pdl = max(32, min(512, triton.next_power_of_2(pairs))), dependent(ids)
        _align_kernel[(1 + triton.cdiv(pairs, 32),)](
            ids, table, counter, work, pairs, room, experts,
            PAD=pad, BLOCK_M=block_m, COUNT=touched is not None, MINE=32, CHUNK=chunk,
            PDL=pdl, num_warps=4 if chunk <= 128 else 8, launch_pdl=pdl,
        )  # fmt: skip
    else:
        chunks = triton.cdiv(pairs, _CHUNK)
        counts = torch.empty(pad * (chunks + 1), dtype=torch.int32, device=ids.device)
        totals, counts = counts[:pad], counts[pad:]
        _count_kernel[(chunks,)](ids, counts, pairs, chunks, PAD=pad, CHUNK=_CHUNK)
        _scan_kernel[(pad,)](counts, totals, chunks, BLOCK=1024)
        _place_kernel[(1 + chunks,)](
            ids, counts, totals, table, counter, work, pairs, room, experts, chunks,
            PAD=pad, BLOCK_M=block_m, COUNT=touched is not None, CHUNK=_CHUNK,
        )  # fmt: skip
    return Alignment(work, room)
