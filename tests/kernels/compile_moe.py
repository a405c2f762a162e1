"""Every MoE kernel that ships, for `kernels.compile_only`: each tile, dtype and both products."""

from __future__ import annotations

import torch

from rimuru.kernels.triton import moe_tiles
from rimuru.kernels.triton.align import _align_kernel, _count_kernel, _place_kernel, _scan_kernel
from rimuru.kernels.triton.moe import _combine_kernel, _expert_kernel
from rimuru.kernels.triton.moe_block import combine_norm_kernel
from rimuru.kernels.triton.moe_specialised import _specialised_kernel
from rimuru.kernels.triton.route import _route_kernel
from rimuru.kernels.triton.router import choose_experts_kernel, norm_router_kernel
from rimuru.kernels.types import ExpertLayout

PARTS = ("gate_up", "down")
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def products(chip: int, dtype: torch.dtype):
    """Both products with every tile, and beside a shared expert where that can be."""
    layout, pdl = ExpertLayout(2048, 1408, dtype), chip >= 90
    i32 = torch.int32
    pairs = moe_tiles.shipped(dtype, divmod(chip, 10))
    # Tables name a tile more than once.
    for part, tile in dict.fromkeys((p, t) for pair in pairs for p, t in zip(PARTS, pair, strict=True)):
        up = part == "gate_up"
        for slices in (0, 4) if tile.m <= 64 and dtype != torch.float32 else (0,):
            yield (
                f"{NAMES[dtype]} {part}{' shared' * bool(slices)} {tile.m}x{tile.n}x{tile.k}",
                _expert_kernel.warmup(
                    dtype, dtype, dtype, i32, 1, 100, 64,
                    PART=0 if up else layout.down_offset, N=2816 if up else 2048, K=2048 if up else 1408,
                    TOP_K=4, GATE_UP=up, SLICES=slices, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k,
                    FEW_M=tile.few_m, FEW_K=tile.few_k, PDL=pdl, num_warps=tile.warps,
                    num_stages=tile.stages, launch_pdl=pdl, grid=(1,),
                ),
            )  # fmt: skip


def specialised(dtype: torch.dtype):
    """Both products of a long prefill, of sizes that are whole tiles and of sizes that are not."""
    for hidden, inter in ((2048, 1408), (320, 192)):
        layout = ExpertLayout(hidden, inter, dtype)
        for part in PARTS:
            up = part == "gate_up"
            yield f"{NAMES[dtype]} {part} specialised {hidden} 128x256x64", _specialised_kernel.warmup(
                dtype, dtype, torch.int32, 100, 4096,
                PART=0 if up else layout.down_offset, N=2 * inter if up else hidden,
                K=hidden if up else inter, TOP_K=4, GATE_UP=up, LANES=64, num_warps=4, grid=(1,),
            )  # fmt: skip


def few_rows(chip: int, dtype: torch.dtype):
    """Head and tail of a MoE block in a decode step."""
    i32, i64, f32, pdl = torch.int32, torch.int64, torch.float32, chip >= 90
    name = NAMES[dtype]
    yield f"{name} norm_router", norm_router_kernel.warmup(
        dtype, dtype, dtype, dtype, dtype, dtype, dtype, 1e-6,
        H=2048, ROWS=61, STRIDE=64, ZERO_CENTRED=False, BLOCK_N=4, BLOCK_H=2048, PDL=pdl, num_warps=4,
        num_stages=1, launch_pdl=pdl, grid=(1,),
    )  # fmt: skip
    for tokens, experts, top_k in ((1, 60, 4), (16, 128, 8), (8, 256, 8)):
        yield f"{name} choose {experts} by {tokens}", choose_experts_kernel.warmup(
            dtype, f32, i32, i64, i32, f32, i32, i32, 1, 9,
            STRIDE=-(-experts // 8) * 8, EXPERTS=experts, TOP_K=top_k, SIGMOID=False, NORMALIZE=True,
            BIAS=True, LIVE=True, COUNT=True, TOKENS=tokens, PAD=1 << (experts - 1).bit_length(),
            PDL=pdl, num_warps=tokens, launch_pdl=pdl, grid=(1,),
        )  # fmt: skip
    yield f"{name} combine_norm", combine_norm_kernel.warmup(
        dtype, i32, f32, dtype, dtype, dtype, dtype, dtype, 1e-6, 61,
        H=2048, TOP_K=8, SLICES=4, GATE=True, ZERO_CENTRED=False, BLOCK=2048, PDL=pdl, num_warps=8,
        launch_pdl=pdl, grid=(1,),
    )  # fmt: skip


def small(chip: int, dtype: torch.dtype):
    """What is not a product: routing and weighted sum of any step."""
    i32, f32, pdl = torch.int32, torch.float32, chip >= 90
    yield (
        f"{NAMES[dtype]} combine",
        _combine_kernel.warmup(
            dtype, i32, f32, dtype, dtype, 61, dtype,
            H=2048, TOP_K=4, SHARED=True, GATE=True, BLOCK=1024, grid=(1,),
        ),
    )  # fmt: skip
    yield f"{NAMES[dtype]} route", _route_kernel.warmup(
        dtype, f32, i32, f32, i32, 128, 128, TOP_K=8, TOP_K_PAD=8, EXPERTS_PAD=128,
        SIGMOID=True, NORMALIZE=True, BIAS=True, PADDING=True, PDL=pdl, num_warps=1, launch_pdl=pdl,
        grid=(1,),
    )  # fmt: skip


def alignment(chip: int):
    i32, i64, pdl = torch.int32, torch.int64, chip >= 90
    for pad in (64, 256):
        yield f"align {pad}", _align_kernel.warmup(
            i32, i64, i32, i32, 512, 9, 60,
            PAD=pad, BLOCK_M=16, COUNT=True, MINE=32, CHUNK=512, PDL=pdl, num_warps=8, launch_pdl=pdl,
            grid=(1,),
        )  # fmt: skip
        yield f"place {pad}", _place_kernel.warmup(
            i32, i32, i32, i64, i32, i32, 5120, 9, 60, 10,
            PAD=pad, BLOCK_M=128, COUNT=True, CHUNK=128, grid=(1,),
        )  # fmt: skip
    yield "count", _count_kernel.warmup(i32, i32, 5120, 40, PAD=64, CHUNK=128, grid=(1,))
    yield "scan", _scan_kernel.warmup(i32, i32, 40, BLOCK=1024, grid=(1,))


def kernels(chip: int):
    for dtype in NAMES:
        yield from products(chip, dtype)
        yield from small(chip, dtype)
        if dtype != torch.float32:
            yield from few_rows(chip, dtype)
            if chip == 90:
                yield from specialised(dtype)
    yield from alignment(chip)
