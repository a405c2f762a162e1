"""Norm, rotary and KV write, dense products of few rows, for `kernels.compile_only`."""

from __future__ import annotations

from importlib import import_module

import torch
from kernels.compile_only import SHARED_LIMIT

from rimuru.kernels.triton import norm_rope

# The package's attributes of these names are functions.
linear, embed = (import_module(f"rimuru.kernels.triton.{name}") for name in ("linear", "embed"))


def kernels(chip: int):
    bf16, f32, i32, i64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
    pdl = chip >= 90
    for width in (2048, 8192):
        block = max(1, width // 512)
        yield (
            f"rms_norm {width}",
            norm_rope.rms_norm_kernel.warmup(
                bf16, bf16, bf16, bf16, bf16, 2048, 1e-6, WIDTH=width, RESIDUAL=True,
                ZERO_CENTRED=False, BLOCK=width, PDL=pdl, num_warps=min(16, block), launch_pdl=pdl, grid=(1,),
            ),
        )  # fmt: skip
    for q_heads, heads, norm, q_block, kv_block in ((32, 4, 1, 8, 4), (16, 16, 2, 16, 16)):
        yield (
            f"qkv_to_cache {q_heads}/{heads}",
            norm_rope.qkv_kernel.warmup(
                bf16, bf16, bf16, i32, i32, i32, f32, bf16, bf16, 4096, 4096, 3, 1e-6,
                Q_HEADS=q_heads, KV_HEADS=heads, DIM=128, ROTARY=128, BLOCK_TOKENS=16, GRAIN=4096,
                Q_NORM=norm, K_NORM=norm, Q_BLOCK=q_block, KV_BLOCK=kv_block, BLOCK_D=128, PDL=pdl,
                num_warps=4, launch_pdl=pdl, grid=(1,),
            ),
        )  # fmt: skip
    for k, block_n in ((2048, 4), (4096, 2)):
        yield f"linear of rows {k}", linear.rows_kernel.warmup(
            bf16, bf16, bf16, bf16, 6144,
            T=2, K=k, BIAS=True, BLOCK_N=block_n, BLOCK_K=1 << (k - 1).bit_length(), PDL=pdl,
            num_warps=4, num_stages=1, launch_pdl=pdl, grid=(1,),
        )  # fmt: skip
    for k in (2048, 4096):
        if linear.holds_at_once(2048, k, 132, SHARED_LIMIT[chip]):
            yield f"linear of few rows {k}", linear.few_kernel.warmup(
                bf16, bf16, bf16, bf16, 8, 2048,
                T=linear.FEW, K=k, PARTS=k // 256, BIAS=True, BLOCK_N=16, PDL=pdl,
                num_warps=k // 256, num_stages=1, launch_pdl=pdl, grid=(1,),
            )  # fmt: skip
    yield (
        "embed",
        embed.embed_kernel.warmup(
            i32, i32, i64, bf16, bf16, WIDTH=2048, LATEST=True, BLOCK=1024, num_warps=4, grid=(1,)
        ),
    )
