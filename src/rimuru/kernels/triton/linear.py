"""Dense products of few rows: bound by reading the weight, so every byte of it is asked for early.

Room: `linear`. Rule: cuBLAS for everything but a few rows of 16-bit values, where its latencies, split sums
and biases cost more than the bytes. Sums are float32 in one fixed order, rounded once.

One row or two: a program holds a few weight rows in registers, asked for before it waits for the kernel
ahead; no shared memory, no tensor cores. A few more: tensor cores, each warp on its own part of K, so that
no warp multiplies a long chain of tiles one after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..reference import linear as dense_linear
from .launch import begin, dependent

ROWS = 2  # most rows that multiply weights held in registers
FEW = 0  # most rows of the tensor core kernel
_WIDEST = 4096  # longest row of weights that fits the registers
_HELD = 8192  # weights a program holds
_HALF = (torch.bfloat16, torch.float16)


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
    begin(PDL)
    for t in tl.static_range(T):
        row = tl.load(x + t * K + k, mask=k < K, other=0.0).to(tl.float32)
        total = tl.sum(w.to(tl.float32) * row, 1)
        if BIAS:
            total += b
        tl.store(out + t * N + n, total.to(out.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["tokens"])
def few_kernel(
    x, weight, bias, out, tokens, N,
    K: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`BLOCK_N` columns of at most `BLOCK_M` rows, each warp on its part of K. Grid: (blocks of N,)."""
    PART: tl.constexpr = K // SPLIT
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = (tl.arange(0, SPLIT) * PART)[:, None] + tl.arange(0, BLOCK_K)[None, :]
    if BIAS:
        b = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    begin(PDL)
    x_at = x + m[None, :, None] * K + k[:, None, :]
    w_at = weight + tl.minimum(n, N - 1)[None, None, :].to(tl.int64) * K + k[:, :, None]
    acc = tl.zeros([SPLIT, BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(0, PART, BLOCK_K):
        acc = tl.dot(tl.load(x_at, mask=(m < tokens)[None, :, None], other=0.0), tl.load(w_at), acc)
        x_at += BLOCK_K
        w_at += BLOCK_K
    total = tl.sum(acc, 0)
    if BIAS:
        total += b[None, :]
    keep = (m < tokens)[:, None] & (n < N)[None, :]
    tl.store(out + m[:, None].to(tl.int64) * N + n[None, :], total.to(out.dtype.element_ty), mask=keep)


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


def few_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    tile: tuple[int, int, int, int] = (16, 128, 4, 4),
) -> torch.Tensor:  # fmt: skip
    """Up to 32 rows. tile: columns, depth, split of K, stages; K is a multiple of depth times split."""
    (tokens, k), n = x.shape, weight.shape[0]
    columns, depth, split, stages = tile
    out = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    pdl = dependent(x)
    few_kernel[(triton.cdiv(n, columns),)](
        x, weight, weight if bias is None else bias, out, tokens, n,
        K=k, BIAS=bias is not None, SPLIT=split, BLOCK_M=max(16, triton.next_power_of_2(tokens)),
        BLOCK_N=columns, BLOCK_K=depth, PDL=pdl, num_warps=split, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x [T, K] @ weight [N, K].T + bias [N]` -> `[T, N]`: as `rimuru.kernels.reference.linear`."""
    tokens, k = x.shape
    if 0 < tokens <= max(ROWS, FEW) and x.dtype in _HALF and weight.is_contiguous() and k % 8 == 0:
        if tokens <= ROWS and k <= _WIDEST:
            return rows_linear(x.contiguous(), weight, bias)
        if tokens <= FEW and k % 512 == 0:
            return few_linear(x.contiguous(), weight, bias)
    return dense_linear(x, weight, bias)
