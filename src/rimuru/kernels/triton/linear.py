"""Dense products of few rows: bound by reading the weight, so every byte of it is asked for early.

Room: `linear`. Rule: cuBLAS for everything but the two kinds of product of 16-bit values below, where its
latencies and split sums cost more than the bytes. Sums are float32 in one fixed order, rounded once.

A program asks for all of its weight rows before it waits for the kernel ahead. For one row or two it holds
a few of them in registers; for up to eight it holds 16 in shared memory and multiplies on tensor cores, each
warp a part of K. The second kind wins only while all of its programs are on the chip at once.
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
_WIDEST = 4096  # longest row of weights that fits the registers
_HELD = 8192  # weights a program holds in registers
_BLOCK = 16  # weight rows that a program holds in shared memory
_PART = 256  # of K, a warp on tensor cores
_HALF = (torch.bfloat16, torch.float16)


@triton.jit(do_not_specialize=["tokens"])
def few_kernel(
    x, weight, bias, out, tokens, N,
    T: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`BLOCK_N` columns of all rows, at most T; a warp sums one of PARTS parts of K. Grid: (blocks of N,)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.arange(0, T)
    k = tl.arange(0, PARTS)[:, None, None] * (K // PARTS) + tl.arange(0, K // PARTS)[None, None, :]
    w = tl.load(weight + n[None, :, None].to(tl.int64) * K + k, mask=(n < N)[None, :, None], other=0.0)
    if BIAS:
        b = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    begin_early(PDL)
    row = tl.load(x + t[None, :, None] * K + k, mask=(t < tokens)[None, :, None], other=0.0)
    total = tl.sum(tl.dot(w, tl.permute(row, (0, 2, 1))), 0)
    if BIAS:
        total += b[:, None]
    keep = (n < N)[:, None] & (t < tokens)[None, :]
    tl.store(out + t[None, :] * N + n[:, None], total.to(out.dtype.element_ty), mask=keep)


def few_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A few rows: x `[T, K]`, T at most `FEW`, K a power of two that `_PART` divides."""
    (tokens, k), n = x.shape, weight.shape[0]
    out, pdl = torch.empty((tokens, n), dtype=x.dtype, device=x.device), dependent(x)
    few_kernel[(triton.cdiv(n, _BLOCK),)](
        x, weight, weight if bias is None else bias, out, tokens, n,
        T=FEW, K=k, PARTS=k // _PART, BIAS=bias is not None, BLOCK_N=_BLOCK,
        PDL=pdl, num_warps=k // _PART, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip
    return out


@cache
def _chip(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, bytes of shared memory that a thread block may use)."""
    properties = torch.cuda.get_device_properties(device)
    shared = shared_memory_class((properties.major, properties.minor)) << 10
    return properties.multi_processor_count, shared


def holds_at_once(n: int, k: int, multiprocessors: int, shared: int) -> bool:
    """Whether `few_kernel` reads a weight `[n, k]` in one go, most multiprocessors having a program."""
    whole = k % _PART == 0 and k & (k - 1) == 0
    fits = 2 * k * (_BLOCK + FEW) <= shared  # the weights, and the rows on their way to the tensor cores
    return whole and fits and multiprocessors // 2 < triton.cdiv(n, _BLOCK) <= multiprocessors


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
    tokens, k = x.shape
    if 0 < tokens <= FEW and x.dtype in _HALF and weight.is_contiguous():
        if tokens <= ROWS and k <= _WIDEST and k % 8 == 0:
            return rows_linear(x.contiguous(), weight, bias)
        # Without an early launch nothing is read ahead.
        if tokens > ROWS and dependent(x) and holds_at_once(len(weight), k, *_chip(x.device)):
            return few_linear(x.contiguous(), weight, bias)
    return dense_linear(x, weight, bias)
