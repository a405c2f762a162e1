"""Writes to device tables and moves of pages, both in stream order.

Room: the triton back end. Rule: no host synchronisation; one launch whatever the number of edits
or pages.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 32 * 1024  # bytes of a page that one program copies


@triton.jit(do_not_specialize=["count"])
def edits_kernel(table_ptr, index_ptr, value_ptr, count, BLOCK: tl.constexpr):
    """Grid: (blocks of edits,)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    at = tl.load(index_ptr + i, mask=live, other=0).to(tl.int64)
    value = tl.load(value_ptr + i, mask=live, other=0)
    tl.store(table_ptr + at, value.to(table_ptr.dtype.element_ty), mask=live)


def apply_edits(table: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> None:
    """Write `value[i]` to the flattened `table[index[i]]`; see `reference.apply_edits`."""
    if not table.is_contiguous():
        raise ValueError("a table of edits must be contiguous")
    count = index.numel()
    if count:
        edits_kernel[(triton.cdiv(count, 256),)](table, index, value, count, BLOCK=256, num_warps=2)


# The pages' numbers are slices of one tensor, at any alignment: no kernel for each.
@triton.jit(do_not_specialize_on_alignment=["source_ptr", "target_ptr"])
def move_kernel(
    pool_ptr, source_ptr, target_ptr, WORDS: tl.constexpr, GRAIN: tl.constexpr, BLOCK: tl.constexpr
):
    """One chunk of one page, in 4-byte words. Grid: (chunks of a page, pages)."""
    page = tl.program_id(1)
    source = tl.load(source_ptr + page).to(tl.int64) * GRAIN
    target = tl.load(target_ptr + page).to(tl.int64) * GRAIN
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    data = tl.load(pool_ptr + source + i, mask=i < WORDS)
    tl.store(pool_ptr + target + i, data, mask=i < WORDS)


def move_pages(
    pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor, grain: int, nbytes: int
) -> None:
    """Copy pages of `nbytes` inside the uint8 pool; see `reference.move_pages`.

    Raises ValueError if the grain or `nbytes` is not a multiple of 16: such pages would be copied
    in narrow accesses.
    """
    if grain % 16 or nbytes % 16:
        raise ValueError(f"pages must be multiples of 16 bytes: grain {grain}, page {nbytes}")
    pages = source.numel()
    if pages:
        move_kernel[(triton.cdiv(nbytes, CHUNK), pages)](
            pool.view(torch.int32), source, target,
            WORDS=nbytes // 4, GRAIN=grain // 4, BLOCK=CHUNK // 4, num_warps=8,
        )  # fmt: skip
