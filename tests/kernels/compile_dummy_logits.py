"""The dummy router's kernels, for `kernels.compile_only`."""

from __future__ import annotations

import torch

from rimuru.kernels.triton import dummy_logits


def kernels(chip: int):
    f32, i16, i32 = torch.float32, torch.int16, torch.int32
    yield (
        "follow",
        dummy_logits.follow_kernel.warmup(i32, i32, i32, i32, i32, i32, 7, BLOCK=128, grid=(1,)),
    )
    for experts in (60, 128, 512):
        pad = 1 << (experts - 1).bit_length()
        options = {"EXPERTS": experts, "EXPERTS_PAD": pad, "num_warps": 1 if pad <= 128 else 4, "grid": (1,)}
        yield (
            f"model {experts}",
            dummy_logits.model_kernel.warmup(i32, i32, i32, f32, f32, f32, 0, 3, 0.07, **options),
        )
        yield (
            f"trace {experts}",
            dummy_logits.trace_kernel.warmup(
                i32, i32, i32, i16, i32, f32, 9, 24, 0, 3, TOP_K=8, REFUSED=-100.0, FALL=0.25, **options
            ),
        )
