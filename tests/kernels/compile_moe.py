"""Every MoE kernel that ships, for `kernels.compile_only`: each tile, dtype and both products."""

from __future__ import annotations

import torch

from rimuru.kernels.triton import moe_tiles
from rimuru.kernels.triton.align import _align_kernel, _count_kernel, _place_kernel, _scan_kernel
from rimuru.kernels.triton.moe import _combine_kernel, _expert_kernel
from rimuru.kernels.triton.route import _route_kernel
from rimuru.kernels.types import ExpertLayout

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def kernels(chip: int):
    capability = divmod(chip, 10)
    i32, i64, f32 = torch.int32, torch.int64, torch.float32
    for dtype, name in NAMES.items():
        layout = ExpertLayout(2048, 1408, dtype)
        for gate_up, down in moe_tiles.shipped(dtype, capability):
            for part, tile in (("gate_up", gate_up), ("down", down)):
                up = part == "gate_up"
                yield f"{name} {part} {tile.m}x{tile.n}x{tile.k}", _expert_kernel.warmup(
                    dtype, dtype, i32, 100, 64,
                    PART=0 if up else layout.down_offset, N=2816 if up else 2048, K=2048 if up else 1408,
                    TOP_K=4, GATE_UP=up, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k,
                    FEW_M=tile.few_m, FEW_K=tile.few_k, num_warps=tile.warps,
                    num_stages=tile.stages, grid=(1,),
                )  # fmt: skip
        yield (
            f"{name} combine",
            _combine_kernel.warmup(
                dtype, i32, f32, dtype, dtype, 61, dtype,
                H=2048, TOP_K=4, SHARED=True, GATE=True, BLOCK=1024, grid=(1,),
            ),
        )  # fmt: skip
        yield f"{name} route", _route_kernel.warmup(
            dtype, f32, i32, f32, i32, 128, 128, TOP_K=8, TOP_K_PAD=8, EXPERTS_PAD=128,
            SIGMOID=True, NORMALIZE=True, BIAS=True, PADDING=True, num_warps=1, grid=(1,),
        )  # fmt: skip
    for pad in (64, 256):
        yield f"align {pad}", _align_kernel.warmup(
            i32, i64, i32, i32, 512, 9, 60,
            PAD=pad, BLOCK_M=16, COUNT=True, MINE=32, CHUNK=512, num_warps=8, grid=(1,),
        )  # fmt: skip
        yield f"place {pad}", _place_kernel.warmup(
            i32, i32, i32, i64, i32, i32, 5120, 9, 60, 10,
            PAD=pad, BLOCK_M=128, COUNT=True, CHUNK=128, grid=(1,),
        )  # fmt: skip
    yield "count", _count_kernel.warmup(i32, i32, 5120, 40, PAD=64, CHUNK=128, grid=(1,))
    yield "scan", _scan_kernel.warmup(i32, i32, 40, BLOCK=1024, grid=(1,))
