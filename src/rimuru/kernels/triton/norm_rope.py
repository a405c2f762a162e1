"""The small kernels around attention: RMSNorm with residual, and q/k norm, RoPE and KV write in one.

Room: the triton back end. Rule: one pass over the data, and intermediate roundings exactly where
the torch twin has them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..types import KVView, StepMeta
from .launch import begin_early, dependent


@triton.jit
def scaled(h, weight, dtype: tl.constexpr, ZERO_CENTRED: tl.constexpr):
    """h, normalised in float32, times the weight: rounded before it, or after it where it is zero-centred."""
    if ZERO_CENTRED:
        return (h * (1.0 + weight.to(tl.float32))).to(dtype)
    return weight * h.to(dtype)


# Widths are constants: a mask against a value of unknown alignment would split loads into elements.
@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, stride, eps,
    WIDTH: tl.constexpr, RESIDUAL: tl.constexpr, ZERO_CENTRED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row. Grid: (T,). `stride` is x's row stride in elements; the other tensors are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    live = i < WIDTH
    weight = tl.load(weight_ptr + i, mask=live, other=0.0)
    begin_early(PDL)
    x = tl.load(x_ptr + row * stride + i, mask=live, other=0.0)
    if RESIDUAL:
        x += tl.load(residual_ptr + row * WIDTH + i, mask=live, other=0.0)
        tl.store(sum_ptr + row * WIDTH + i, x, mask=live)
    h = x.to(tl.float32)
    h = h * tl.rsqrt(tl.sum(h * h, 0) / WIDTH + eps)
    tl.store(out_ptr + row * WIDTH + i, scaled(h, weight, x.dtype, ZERO_CENTRED), mask=live)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of `x + residual`; see `reference.rms_norm`. x may be a slice of wider rows."""
    return _rms_norm(x, weight, eps, residual, False)


def zero_centred_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm with the weight `1 + weight`; see `reference.zero_centred_rms_norm`."""
    return _rms_norm(x, weight, eps, residual, True)


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, zero_centred: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    if tokens:
        block, pdl = triton.next_power_of_2(width), dependent(x)
        rms_norm_kernel[(tokens,)](
            x, out if residual is None else residual.contiguous(), weight, out, total, x.stride(0), eps,
            WIDTH=width, RESIDUAL=residual is not None, ZERO_CENTRED=zero_centred, BLOCK=block, PDL=pdl,
            num_warps=min(16, max(1, block // 512)), launch_pdl=pdl,
        )  # fmt: skip
    return out, total


@triton.jit
def _norm(x, inverse, weight_ptr, at, live, NORM: tl.constexpr):
    """x times its inverse root mean square, rounded, then times the weight; x itself without a norm."""
    if NORM:
        x = (x.to(tl.float32) * inverse).to(x.dtype) * tl.load(weight_ptr + at, mask=live, other=0.0)
    return x


@triton.jit
def _heads(
    x_ptr, weight_ptr, rope_ptr, eps, h, live_h, d,
    NORM: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Norm and rotation of heads h `[H]` of one token, `[H, DIM]`. NORM: 0 none, 1 a head, 2 all heads."""
    HALF: tl.constexpr = ROTARY // 2
    live = live_h[:, None] & (d < DIM)[None, :]
    x = tl.load(x_ptr + h[:, None] * DIM + d[None, :], mask=live, other=0.0)
    # The element each one turns with, half a rotary width away; its second load comes from L1.
    mate = tl.where(d < HALF, d + HALF, d - HALF)
    turns = d < ROTARY
    y = tl.load(x_ptr + h[:, None] * DIM + mate[None, :], mask=live & turns[None, :], other=0.0)
    inverse = 1.0
    if NORM:
        square = x.to(tl.float32) * x.to(tl.float32)
        if NORM == 1:
            inverse = tl.rsqrt(tl.sum(square, 1) / DIM + eps)[:, None]
        else:
            inverse = tl.rsqrt(tl.sum(tl.sum(square, 1), 0) / (HEADS * DIM) + eps)
    row = h[:, None] * DIM if NORM == 2 else h[:, None] * 0
    x = _norm(x, inverse, weight_ptr, row + d[None, :], live, NORM)
    y = _norm(y, inverse, weight_ptr, row + mate[None, :], live & turns[None, :], NORM)
    cos = tl.load(rope_ptr + d % HALF, mask=turns, other=1.0)
    sin = tl.load(rope_ptr + HALF + d % HALF, mask=turns, other=0.0)
    sin = tl.where(d < HALF, -sin, sin)
    return (x.to(tl.float32) * cos[None, :] + y.to(tl.float32) * sin[None, :]).to(x.dtype)


@triton.jit(
    do_not_specialize=["table_stride", "layer"],
    do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"],
)
def qkv_kernel(
    qkv_ptr, q_out_ptr, pool_ptr, table_ptr, positions_ptr, slots_ptr, rope_ptr, q_norm_ptr, k_norm_ptr,
    stride, table_stride, layer, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, GRAIN: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of heads of one token. Grid: (T, blocks of q heads + 2 x blocks of KV heads)."""
    token = tl.program_id(0)
    part = tl.program_id(1)
    Q_PARTS: tl.constexpr = (Q_HEADS + Q_BLOCK - 1) // Q_BLOCK
    KV_PARTS: tl.constexpr = (KV_HEADS + KV_BLOCK - 1) // KV_BLOCK
    begin_early(PDL)
    position = tl.load(positions_ptr + token)
    x_ptr = qkv_ptr + token.to(tl.int64) * stride
    rope_ptr += position.to(tl.int64) * ROTARY
    d = tl.arange(0, BLOCK_D)
    if part < Q_PARTS:
        h = part * Q_BLOCK + tl.arange(0, Q_BLOCK)
        live = h < Q_HEADS
        q = _heads(x_ptr, q_norm_ptr, rope_ptr, eps, h, live, d, Q_NORM, Q_HEADS, DIM, ROTARY)
        at = q_out_ptr + token.to(tl.int64) * (Q_HEADS * DIM) + h[:, None] * DIM + d[None, :]
        tl.store(at, q, mask=live[:, None] & (d < DIM)[None, :])
        return
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    KV: tl.constexpr = BLOCK_TOKENS * KV_HEADS * DIM
    page = tl.load(table_ptr + slot.to(tl.int64) * table_stride + position // BLOCK_TOKENS).to(tl.int64)
    h = (part - Q_PARTS) % KV_PARTS * KV_BLOCK + tl.arange(0, KV_BLOCK)
    live = h < KV_HEADS
    mask = live[:, None] & (d < DIM)[None, :]
    at = pool_ptr + page * GRAIN + layer.to(tl.int64) * (2 * KV) + position % BLOCK_TOKENS * (KV_HEADS * DIM)
    at = at + h[:, None] * DIM + d[None, :]
    if part < Q_PARTS + KV_PARTS:
        k_ptr = x_ptr + Q_HEADS * DIM
        k = _heads(k_ptr, k_norm_ptr, rope_ptr, eps, h, live, d, K_NORM, KV_HEADS, DIM, ROTARY)
        tl.store(at, k.to(pool_ptr.dtype.element_ty), mask=mask)
    else:
        v = tl.load(x_ptr + (Q_HEADS + KV_HEADS) * DIM + h[:, None] * DIM + d[None, :], mask=mask)
        tl.store(at + KV, v.to(pool_ptr.dtype.element_ty), mask=mask)


def _norm_kind(weight: torch.Tensor | None, dim: int) -> int:
    if weight is None:
        return 0
    return 1 if weight.numel() == dim else 2


def qkv_to_cache(
    qkv: torch.Tensor,
    q_heads: int,
    kv: KVView,
    meta: StepMeta,
    rope: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """q/k norm, rotary embedding, and K and V to their pages; see `reference.qkv_to_cache`."""
    lay, tokens = kv.layout, qkv.shape[0]
    q = torch.empty(tokens, q_heads, lay.head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    q_kind, k_kind = _norm_kind(q_norm, lay.head_dim), _norm_kind(k_norm, lay.head_dim)
    # A norm over all heads needs them in one program; otherwise few heads a program keep decode wide.
    few = max(1, 1024 // lay.head_dim)
    q_block = triton.next_power_of_2(q_heads if q_kind == 2 else min(q_heads, few))
    kv_block = triton.next_power_of_2(lay.heads if k_kind == 2 else min(lay.heads, few))
    parts = triton.cdiv(q_heads, q_block) + 2 * triton.cdiv(lay.heads, kv_block)
    pdl = dependent(qkv)
    qkv_kernel[(tokens, parts)](
        qkv, q, kv.pool, kv.table, meta.positions, meta.token_slots, rope,
        qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
        qkv.stride(0), kv.table.stride(0), kv.layer, eps,
        Q_HEADS=q_heads, KV_HEADS=lay.heads, DIM=lay.head_dim, ROTARY=rope.shape[1],
        BLOCK_TOKENS=lay.block_tokens, GRAIN=lay.grain_elems, Q_NORM=q_kind, K_NORM=k_kind,
        Q_BLOCK=q_block, KV_BLOCK=kv_block, BLOCK_D=triton.next_power_of_2(lay.head_dim), PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return q


@triton.jit
def silu_and_mul_kernel(x_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (T, blocks of the width)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * WIDTH + WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * WIDTH + i, value.to(out_ptr.dtype.element_ty), mask=i < WIDTH)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """SwiGLU's activation (Shazeer, 2020): `x [T, 2 * I]`, gate then up -> `silu(gate) * up`, `[T, I]`."""
    tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    if tokens:
        silu_and_mul_kernel[(tokens, triton.cdiv(width, 1024))](x.contiguous(), out, WIDTH=width, BLOCK=1024)
    return out
