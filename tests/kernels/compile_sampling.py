"""The draw, table edits and page moves, for `kernels.compile_only`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rimuru.kernels.triton import sampling, tables

VOCAB = 151_936


def kernels(chip: int) -> Iterator:
    bf16, f32, i32, i64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
    yield (
        "move",
        tables.move_kernel.warmup(
            i32, i32, i32, WORDS=393_216, GRAIN=2048, BLOCK=tables.CHUNK // 4, num_warps=8, grid=(1,)
        ),
    )
    yield "edits", tables.edits_kernel.warmup(i64, i64, i64, 300, BLOCK=256, num_warps=2, grid=(1,))
    for dtype in (bf16, f32):
        yield (
            f"race {dtype}",
            sampling.race_kernel.warmup(
                dtype, VOCAB, f32, i64, i64, f32, i32, f32, f32, VOCAB=VOCAB, SPLIT=sampling.SPLIT,
                num_warps=8, grid=(1,),
            ),
        )  # fmt: skip
        splits = -(-VOCAB // sampling.SPLIT)
        yield (
            f"filter {dtype}",
            sampling.filter_kernel.warmup(
                dtype, VOCAB, f32, i32, f32, f32, i64, i64, f32, i32, f32, f32, i32, i32, i32,
                VOCAB=VOCAB, SPLITS=splits, SPLITS_PAD=1 << (splits - 1).bit_length(), BLOCK=sampling.BLOCK,
                num_warps=16, grid=(1,),
            ),
        )  # fmt: skip
