"""Every attention kernel that ships, for `kernels.compile_only`: dtype, head size, group and window."""

from __future__ import annotations

from importlib import import_module

import torch

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# dtype, head size, query heads and KV heads of served models: Qwen3-30B, Qwen1.5-MoE, Qwen3.5, small ones.
CASES = [
    (torch.bfloat16, 128, 32, 4),
    (torch.bfloat16, 128, 16, 16),
    (torch.float16, 128, 96, 8),
    (torch.bfloat16, 256, 16, 2),
    (torch.bfloat16, 64, 16, 16),
]


def kernels(chip: int, cases=CASES):
    attention = import_module("rimuru.kernels.triton.attention")
    shared = attention.shared_memory_class(divmod(chip, 10))
    i32, f32 = torch.int32, torch.float32
    for dtype, dim, q_heads, heads in cases:
        precision = "ieee" if dtype == f32 else "tf32"
        common = {"KV_HEADS": heads, "DIM": dim, "BLOCK_TOKENS": 16, "GRAIN": 2048, "PRECISION": precision}
        for window in (False, True):
            name = f"{NAMES[dtype]} {dim} {q_heads}/{heads}{' window' if window else ''}"
            tile = attention.prompt_tile(dtype, dim, shared)
            yield (
                f"prompt {name} m{tile.m}",
                attention.prompt_kernel.warmup(
                    dtype, dtype, i32, dtype, i32, i32, i32, 8, 512, 4096, 3, 0.1, 512,
                    Q_HEADS=q_heads, SEQS=64, WINDOW=window, BLOCK_M=tile.m, BLOCK_N=tile.n,
                    num_warps=tile.warps, num_stages=tile.stages, grid=(1,), **common,
                ),
            )  # fmt: skip
            group = q_heads // heads
            rows = 1 << (group - 1).bit_length()
            narrow = attention.decode_tile(dtype, dim, group, shared)
            for kind, tile in (("", narrow), (" wide", attention.wide_tile(dtype, dim, group, shared))):
                if not tile:
                    continue
                yield (
                    f"decode{kind} {name}",
                    attention.decode_kernel.warmup(
                        dtype, dtype, i32, dtype, f32, f32, i32, i32, i32, i32, 8, 8, 4096, 3, 0.1, 512,
                        GROUP=group, WINDOW=window, BLOCK_M=tile.m, BLOCK_N=tile.n, MIN_SPLIT=128, ROWS=rows,
                        FUSED=not window and not kind, PDL=bool(kind), launch_pdl=bool(kind),
                        num_warps=tile.warps, num_stages=tile.stages, grid=(1,), **common,
                    ),
                )  # fmt: skip
        yield (
            f"merge {name}",
            attention.merge_kernel.warmup(
                f32, f32, dtype, i32, i32, 8, 512, KV_HEADS=heads, GROUP=group, DIM=dim, WINDOW=True,
                BLOCK_N=narrow.n, MIN_SPLIT=128, ROWS=rows, STEP=32, PDL=chip == 90, launch_pdl=chip == 90,
                num_warps=4, grid=(1,),
            ),
        )  # fmt: skip
