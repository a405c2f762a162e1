"""Dense products of few rows: bound by reading the weight, so every byte of it is asked for early.

Room: `linear`. Rule: cuBLAS for everything but the two kinds of product of 16-bit values below, where its
latencies and split sums cost more than the bytes. Sums are float32 in one fixed order, rounded once.

A program asks for all of its weight rows before it waits for the kernel ahead. It holds 16 of them in shared
memory and multiplies on tensor cores, each warp a part of K, while all programs are on the chip at once: so
the whole weight is on its way before the rows are there. One row or two of more weights than that (the
logits) are multiplied without tensor cores, by programs that hold a few weight rows in registers.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ..reference import linear as dense_linear
from .attention_tiles import shared_memory_class
from .launch import begin_early, dependent

ROWS = 2  # most rows that multiply weights held in registers
FEW = 8  # most rows that multiply weights held in shared memory
_BLOCK = 16  # weight rows of such a program
_WIDEST = 4096  # longest row of weights that fits the registers
_HELD = 8192  # weights a program holds in registers
_PART = 256  # of K, a warp on tensor cores
_HALF = (torch.bfloat16, torch.float16)


@triton.jit(do_not_specialize=["tokens"])
def few_kernel(
    x, weight, bias, out, tokens, N,
    T: tl.constexpr, FEW: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`BLOCK_N` columns of all rows, at most T; a warp sums one of PARTS parts of K. Grid: (blocks of N,).

    T is a power of two up to FEW, the rows of the product: it repeats them, which takes less shared memory
    than padding would.
    """
    DEEP: tl.constexpr = K // PARTS
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, PARTS)[:, None, None] * DEEP + tl.arange(0, DEEP)[None, None, :]
    w = tl.load(weight + n[None, :, None].to(tl.int64) * K + k, mask=(n < N)[None, :, None], other=0.0)
    if BIAS:
        b = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    begin_early(PDL)
    t = tl.arange(0, T)[None, :, None]
    row = tl.load(x + t * K + k, mask=t < tokens, other=0.0)
    if T == 1:
        row = tl.broadcast_to(row, [PARTS, FEW, DEEP])
    elif T < FEW:
        row = tl.broadcast_to(row[:, None, :, :], [PARTS, FEW // T, T, DEEP])
        row = tl.reshape(row, [PARTS, FEW, DEEP])
    total = tl.sum(tl.dot(w, tl.permute(row, (0, 2, 1))), 0)
    if BIAS:
        total += b[:, None]
    column = tl.arange(0, FEW)[None, :]
    keep = (n < N)[:, None] & (column < tokens)
    tl.store(out + column * N + n[:, None], total.to(out.dtype.element_ty), mask=keep)


def few_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A few rows: x `[T, K]`, T at most `FEW`, K a power of two that `_PART` divides."""
    (tokens, k), n = x.shape, weight.shape[0]
    out, pdl = torch.empty((tokens, n), dtype=x.dtype, device=x.device), dependent(x)
    few_kernel[(triton.cdiv(n, _BLOCK),)](
        x, weight, weight if bias is None else bias, out, tokens, n,
        T=_rows_held(tokens), FEW=FEW, K=k, PARTS=k // _PART, BIAS=bias is not None, BLOCK_N=_BLOCK,
        PDL=pdl, num_warps=k // _PART, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _rows_held(tokens: int) -> int:
    return tokens if tokens <= 2 else FEW


@cache
def _chip(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, bytes of shared memory that a thread block may use)."""
    properties = torch.cuda.get_device_properties(device)
    shared = shared_memory_class((properties.major, properties.minor)) << 10
    return properties.multi_processor_count, shared


def holds_at_once(tokens: int, n: int, k: int, multiprocessors: int, shared: int) -> bool:
    """Whether `few_kernel` holds all of a weight `[n, k]`, and most multiprocessors have a program."""
    # The weights, and the rows on their way to the tensor cores. Each block costs 1 KiB more, and a
    # multiprocessor has 1 KiB more than one block may use.
    block = 2 * k * (_BLOCK + _rows_held(tokens)) + 1024
    together = (shared + 1024) // block * multiprocessors
    whole = k % _PART == 0 and k & (k - 1) == 0
    return whole and multiprocessors // 2 < triton.cdiv(n, _BLOCK) <= together


@triton.jit
def rows_kernel(
    x, weight, bias, out, N,
    T: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`BLOCK_N` columns of all T rows. Grid: (blocks of N,)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, :]
    inside = (n < N)[:, None] & (k < K)
    w = tl.load(weight + n[:, None].to(tl.int64) * K + k, mask=inside, other=0.0)
    if BIAS:
        b = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    begin_early(PDL)
    for t in tl.static_range(T):
        row = tl.load(x + t * K + k, mask=k < K, other=0.0).to(tl.float32)
        total = tl.sum(w.to(tl.float32) * row, 1)
        if BIAS:
            total += b
        tl.store(out + t * N + n, total.to(out.dtype.element_ty), mask=n < N)


def rows_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """One row or two: x `[T, K]`, K at most `_WIDEST`."""
    (tokens, k), n = x.shape, weight.shape[0]
    out = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    block_k, pdl = triton.next_power_of_2(k), dependent(x)
    block_n = _HELD // block_k
    rows_kernel[(triton.cdiv(n, block_n),)](
        x, weight, weight if bias is None else bias, out, n,
        T=tokens, K=k, BIAS=bias is not None, BLOCK_N=block_n, BLOCK_K=block_k, PDL=pdl,
        num_warps=4, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x [T, K] @ weight [N, K].T + bias [N]` -> `[T, N]`: as `rimuru.kernels.reference.linear`."""
    (tokens, k), n = x.shape, weight.shape[0]
    if 0 < tokens <= FEW and x.dtype in _HALF and weight.is_contiguous():
        # Without an early launch nothing is read ahead.
        if dependent(x) and holds_at_once(tokens, n, k, *_chip(x.device)):
            return few_linear(x.contiguous(), weight, bias)
        if tokens <= ROWS and k <= _WIDEST and k % 8 == 0:
            return rows_linear(x.contiguous(), weight, bias)
    return dense_linear(x, weight, bias)
