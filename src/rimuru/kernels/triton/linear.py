"""Dense products of few rows: bound by reading the weight, so every byte of it is asked for early.

Room: `linear`. Rule: cuBLAS for everything but one or two rows of 16-bit values, where its latencies and
split sums cost more than the bytes. Sums are float32 in one fixed order, rounded once.

A program holds a few weight rows in registers, asked for before it waits for the kernel ahead; no shared
memory, no tensor cores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..reference import linear as dense_linear
from .launch import begin, dependent

ROWS = 2  # most rows that multiply weights held in registers
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
    if 0 < tokens <= ROWS and k <= _WIDEST and k % 8 == 0 and x.dtype in _HALF and weight.is_contiguous():
        return rows_linear(x.contiguous(), weight, bias)
    return dense_linear(x, weight, bias)
