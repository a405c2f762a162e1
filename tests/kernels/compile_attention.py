"""Every attention tile that ships, once, for `kernels.compile_only`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import torch

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# dtype, head size, query heads and KV heads: Qwen3-30B first, then the other tiles.
CASES = [
    (torch.bfloat16, 128, 32, 4),
    (torch.bfloat16, 256, 16, 2),
    (torch.bfloat16, 64, 16, 16),
    (torch.float32, 128, 32, 4),
]


def kernels(chip: int) -> Iterator:
    cases = [CASES[0], CASES[-1]] if chip == 120 else CASES  # its other tiles are those of sm_89
    return of_cases(chip, cases, windows=(False,))


def of_cases(chip: int, cases: list[tuple], windows: tuple[bool, ...]) -> Iterator:
    attention = import_module("rimuru.kernels.triton.attention")
    tiles = attention.tiles
    shared = tiles.shared_memory_class(divmod(chip, 10))
    early = shared == 227
    i32, f32 = torch.int32, torch.float32
    for dtype, dim, q_heads, heads in cases:
        precision = "ieee" if dtype == f32 else "tf32"
        common = {"KV_HEADS": heads, "DIM": dim, "BLOCK_TOKENS": 16, "GRAIN": 2048, "PRECISION": precision}
        group = q_heads // heads
        rows = 1 << (group - 1).bit_length()
        narrow = tiles.decode_tile(dtype, dim, group, shared)
        for window in windows:
            name = f"{NAMES[dtype]} {dim} {q_heads}/{heads}{' window' if window else ''}"
            for tile, turns in {tiles.prompt_tile(dtype, dim, shared, few) for few in (False, True)}:
                yield (
                    f"prompt {name} m{tile.m}{' turns' if turns else ''}",
                    attention.prompt_kernel.warmup(
                        dtype, dtype, i32, dtype, i32, i32, i32, 8, 512, 4096, 3, 0.1, 512,
                        Q_HEADS=q_heads, SEQS=256, WINDOW=window, BLOCK_M=tile.m, BLOCK_N=tile.n,
                        TURNS=turns, num_warps=tile.warps, num_stages=tile.stages,
                        maxnreg=tiles.registers(dtype), grid=(1,), **common,
                    ),
                )  # fmt: skip
            # kind, tile, partials merged at a time, sequences of a mixed step, early launch
            variants = [
                ("mixed ", narrow, max(1, min(8, 4096 // (rows * dim))), 256, False),
                ("wide ", tiles.wide_tile(dtype, dim, group, shared), 0, 0, early),
            ]
            for kind, tile, fused, mixed, pdl in variants:
                if tile is None:
                    continue
                yield (
                    f"decode {kind}{name}",
                    attention.decode_kernel.warmup(
                        dtype, dtype, i32, dtype, f32, f32, i32, i32, i32, i32, 8, 8, 4096, 3, 0.1, 512,
                        GROUP=group, WINDOW=window, BLOCK_M=tile.m, BLOCK_N=tile.n, MIN_SPLIT=128, ROWS=rows,
                        FUSED=fused, MIXED=mixed, PDL=pdl, launch_pdl=pdl,
                        num_warps=tile.warps, num_stages=tile.stages, grid=(1,), **common,
                    ),
                )  # fmt: skip
        if dim == 128 and dtype != f32:
            yield (
                f"merge {name}",
                attention.merge_kernel.warmup(
                    f32, f32, dtype, i32, i32, 8, 512, KV_HEADS=heads, GROUP=group, DIM=dim, WINDOW=False,
                    BLOCK_N=narrow.n, MIN_SPLIT=128, ROWS=rows, STEP=32, PDL=early, launch_pdl=early,
                    num_warps=4, grid=(1,),
                ),
            )  # fmt: skip
