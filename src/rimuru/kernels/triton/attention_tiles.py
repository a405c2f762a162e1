"""Tiles of the attention kernels, and how many thread blocks share a sequence.

Room: the triton back end. Rule: chosen from what the host knows (sizes, the chip, bounds), never by
timing, so that a captured graph and an eager step choose alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

MIN_SPLIT = 128  # tokens
MAX_SPLITS = 128
MAX_FUSED = 4  # splits that the last thread block to finish merges; more take a launch of their own
MIXED_SPLITS = 8  # in a mixed step the last block always merges
MIXED_BLOCKS = 4096  # decode blocks of a mixed step, most of which may find nothing to do
BLOCKS_PER_SM = 3  # narrow decode blocks a multiprocessor should find, to keep enough bytes in flight
BALANCE_TOKENS = 2048  # of one sequence that one narrow block should read at most
SEQUENCES = (256, 4096)  # a step holds fewer; two sizes, because each is a kernel to compile
WIDE_TOKENS = (512, 8192)  # a wide block reads at least four tiles; a long sequence is not left to one block
WIDE_SPLITS = 8  # below this many the merge's launch costs more than wide blocks gain


class Tile(NamedTuple):
    """Tile sizes of one kernel: rows of queries, cached tokens, warps and pipeline stages."""

    m: int
    n: int
    warps: int
    stages: int


def shared_memory_class(capability: tuple[int, int]) -> int:
    """Shared memory a thread block may use, KiB: 227 (9.0, 10.x), 163 (8.0, 8.7) or 99 (others)."""
    if capability[0] in (9, 10):
        return 227
    return 163 if capability in ((8, 0), (8, 7)) else 99


def prompt_tile(dtype: torch.dtype, dim: int, shared: int, few: bool) -> tuple[Tile, bool]:
    """Tile of the prompt kernel for a shared memory class, and whether thread blocks take turns at tiles.

    few: 128 rows a block would leave multiprocessors idle. Turns save the blocks of sequences without a
    tile, of which a captured step has many; the loop costs long prompts 3 %.
    """
    if dtype == torch.float32:
        return Tile(16, 16, 4, 2), True
    if few and dim <= 128:
        return Tile(64, 64, 4, 3) if shared == 227 else Tile(64, 32, 4, 2), True
    if dim <= 64:
        return Tile(128, 64, 4 if shared == 227 else 8, 3), few
    if dim <= 128:
        return Tile(128, 128, 8, 3) if shared == 227 else Tile(128, 32, 8, 2), few
    return Tile(128, 32, 8, 2) if shared == 227 else Tile(64, 32, 8, 2), few


def registers(dtype: torch.dtype) -> int | None:
    """Registers that a thread of the prompt kernel is told it may use.

    Without tensor cores a product is unrolled into hundreds of multiply-adds, for which the assembler,
    left alone, aims at fewer registers than there are and spills.
    """
    return 255 if dtype == torch.float32 else None


def decode_tile(dtype: torch.dtype, dim: int, group: int, shared: int) -> Tile:
    """Narrow tile of the decode kernel; `m` holds the query heads of one KV head.

    Small tiles of two warps: several thread blocks a multiprocessor hide each other's latencies
    better than deep pipelines of one.
    """
    rows = max(16, triton.next_power_of_2(group))
    if dtype == torch.float32:
        return Tile(rows, 16, 4, 2)
    stages = 4 if shared > 99 else 3
    if dim <= 64:
        return Tile(rows, 64, 2, stages)
    return Tile(rows, 32, 2, stages) if dim <= 128 else Tile(rows, 32, 4, stages)


def wide_tile(dtype: torch.dtype, dim: int, group: int, shared: int) -> Tile | None:
    """Tile of decode blocks that have a multiprocessor each, or None where there is no such kernel."""
    if dtype == torch.float32 or dim != 128 or group > 16 or shared != 227:
        return None
    return Tile(16, 128, 8, 3)


def sequences(seqs: int) -> int:
    """The size of vectors over a step's sequences and one more."""
    return next((size for size in SEQUENCES if seqs < size), SEQUENCES[-1])


def min_split(seqs: int, kv_heads: int, max_seq_len: int, multiprocessors: int) -> int:
    """The fewest tokens worth a narrow block: half of them where most multiprocessors would have no block."""
    blocks = seqs * kv_heads * -(-max_seq_len // MIN_SPLIT)
    return MIN_SPLIT // 2 if 2 * blocks <= multiprocessors else MIN_SPLIT


def split_count(seqs: int, kv_heads: int, max_seq_len: int, multiprocessors: int) -> int:
    """How many narrow blocks share a sequence of a decode step: enough to fill the GPU.

    From host values only. A large batch needs none for that, but a long sequence in it must not be left
    to one block.
    """
    fill = -(-BLOCKS_PER_SM * multiprocessors // (seqs * kv_heads))
    balance = min(8, -(-max_seq_len // BALANCE_TOKENS))
    least = min_split(seqs, kv_heads, max_seq_len, multiprocessors)
    return max(1, min(max(fill, balance), MAX_SPLITS, -(-max_seq_len // least)))


def mixed_split_count(seqs: int, kv_heads: int, max_seq_len: int) -> int:
    """The most narrow blocks that may share a sequence of a mixed step; the kernel decides how many do.

    How many of the sequences decode is not known here. Blocks that find nothing to do cost a little, so
    there are not very many.
    """
    fill = MIXED_BLOCKS // (seqs * kv_heads)
    balance = -(-max_seq_len // BALANCE_TOKENS)
    return max(1, min(max(fill, balance), MIXED_SPLITS, -(-max_seq_len // MIN_SPLIT)))


def wide_split_count(seqs: int, kv_heads: int, max_seq_len: int, multiprocessors: int) -> int:
    """How many wide blocks share a sequence; 0 where one a multiprocessor would not share the work well.

    From host values only. Without a split nothing is merged; with many, each block reads enough for
    the merge to be small beside it.
    """
    least, most = WIDE_TOKENS
    fit = multiprocessors // (seqs * kv_heads)
    splits = min(fit, -(-max_seq_len // least), MAX_SPLITS)
    busy = splits * seqs * kv_heads >= 0.8 * multiprocessors
    merges_well = splits == 1 or splits >= WIDE_SPLITS
    return splits if busy and merges_well and max_seq_len <= most * splits else 0
