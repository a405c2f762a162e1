"""Dense products of few rows: bound by reading the weight, so every byte of it is asked for at once.

Room: `linear`. Rule: cuBLAS for everything but a few rows of 16-bit values, where its launches, split
sums and biases cost more than the bytes. Sums are float32 in one fixed order, rounded once.

One row or a few: a program holds a few weight rows in registers, asked for before it waits for the
kernel ahead; no shared memory, no tensor cores. More rows: tensor cores, with the program's weights
asked into the L2 cache before the wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..reference import linear as dense_linear
from .launch import begin, dependent

ROWS = 0  # most rows that multiply weights held in registers
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


@triton.jit
def prefetch(address, BYTES: tl.constexpr):
    """Ask for `BYTES` from `address` on into the L2 cache; nothing waits for them."""
    LINES: tl.constexpr = BYTES // 128
    line = tl.arange(0, triton.next_power_of_2(LINES))
    at = address.to(tl.pointer_type(tl.int8)) + tl.minimum(line, LINES - 1) * 128
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["tokens"])
def few_kernel(
    x, weight, bias, out, tokens, N,
    K: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`BLOCK_N` columns of at most `BLOCK_M` rows. Grid: (blocks of N,)."""
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    if PREFETCH:
        prefetch(
            weight + first.to(tl.int64) * K, BLOCK_N * K * weight.dtype.element_ty.primitive_bitwidth // 8
        )
    if BIAS:
        b = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    begin(PDL)
    x_at = x + m[:, None] * K + k[None, :]
    w_at = weight + tl.minimum(n, N - 1)[None, :].to(tl.int64) * K + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K:
            inside = k < K - start
            a = tl.load(x_at, mask=(m < tokens)[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_at, mask=inside[:, None], other=0.0)
        else:
            a = tl.load(x_at, mask=(m < tokens)[:, None], other=0.0)
            w = tl.load(w_at)
        acc = tl.dot(a, w, acc)
        x_at += BLOCK_K
        w_at += BLOCK_K
    if BIAS:
        acc += b[None, :]
    keep = (m < tokens)[:, None] & (n < N)[None, :]
    tl.store(out + m[:, None].to(tl.int64) * N + n[None, :], acc.to(out.dtype.element_ty), mask=keep)


def rows_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, block_n: int = 0, warps: int = 4
) -> torch.Tensor:
    (tokens, k), n = x.shape, weight.shape[0]
    out = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    block_k, pdl = triton.next_power_of_2(k), dependent(x)
    block_n = block_n or max(1, _HELD // block_k)
    rows_kernel[(triton.cdiv(n, block_n),)](
        x, weight, weight if bias is None else bias, out, n,
        T=tokens, K=k, BIAS=bias is not None, BLOCK_N=block_n, BLOCK_K=block_k, PDL=pdl,
        num_warps=warps, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip
    return out


def few_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    tile: tuple[int, int, int, int] = (16, 256, 1, 4), prefetch: bool = True,
) -> torch.Tensor:  # fmt: skip
    block_n, block_k, warps, stages = tile
    (tokens, k), n = x.shape, weight.shape[0]
    out = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    pdl = dependent(x)
    few_kernel[(triton.cdiv(n, block_n),)](
        x, weight, weight if bias is None else bias, out, tokens, n,
        K=k, BIAS=bias is not None, BLOCK_M=max(16, triton.next_power_of_2(tokens)), BLOCK_N=block_n,
        BLOCK_K=block_k, PREFETCH=pdl and prefetch, PDL=pdl,
        num_warps=warps, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x [T, K] @ weight [N, K].T + bias [N]` -> `[T, N]`: as `rimuru.kernels.reference.linear`."""
    tokens, k = x.shape
    if tokens <= FEW and tokens and x.dtype in _HALF and weight.is_contiguous() and k % 8 == 0:
        x = x.contiguous()
        if tokens <= ROWS and k <= _WIDEST:
            return rows_linear(x, weight, bias)
        return few_linear(x, weight, bias)
    return dense_linear(x, weight, bias)
