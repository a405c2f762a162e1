"""Time candidate tiles of the expert GEMMs, the source of the table in `moe_tiles`.

    PYTHONPATH=src python benchmarks/tune_moe.py [--tokens 8,32] [--rounds 3]

Candidates are compiled beforehand by one process a core: they share Triton's cache on disk.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import triton
from harness import replay_times
from moe_case import QWEN3, QWEN15, Layer, Routing, Shape

from rimuru.kernels.triton.align import align
from rimuru.kernels.triton.moe import HOST_LANES, _expert_kernel
from rimuru.kernels.triton.moe_tiles import Tile

SMALL = [
    Tile(16, 64, 128, 4, 4), Tile(16, 64, 128, 4, 5), Tile(16, 64, 256, 4, 3), Tile(16, 128, 64, 4, 5),
    Tile(16, 128, 128, 4, 3), Tile(16, 128, 128, 4, 4), Tile(16, 32, 256, 4, 4), Tile(16, 64, 128, 8, 4),
    Tile(16, 64, 64, 4, 6),
]  # fmt: skip
MIDDLE = [
    Tile(16, 64, 128, 4, 4), Tile(32, 64, 128, 4, 4), Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 4, 4),
    Tile(64, 64, 64, 4, 4, few_m=16, few_k=128), Tile(64, 128, 64, 8, 4),
]  # fmt: skip
LARGE = [
    Tile(64, 128, 64, 4, 4), Tile(64, 256, 64, 4, 4), Tile(256, 128, 64, 8, 4),
    *(replace(Tile(128, n, 64, warps, stages), few_m=few, few_k=few and 64)
      for n, warps, stages in ((128, 4, 3), (128, 8, 3), (256, 8, 3), (256, 8, 4)) for few in (0, 64)),
]  # fmt: skip
CANDIDATES = {1: SMALL, 8: SMALL, 32: MIDDLE, 128: MIDDLE, 1024: LARGE, 8192: LARGE}


def constants(shape: Shape, tile: Tile, gate_up: bool) -> dict:
    inter, hidden = shape.intermediate, shape.hidden
    return {
        "PART": 0 if gate_up else shape.layout().down_offset,
        "N": 2 * inter if gate_up else hidden,
        "K": hidden if gate_up else inter,
        "TOP_K": shape.top_k, "GATE_UP": gate_up, "SLICES": 0, "PDL": False,
        "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k,
        "FEW_M": tile.few_m, "FEW_K": tile.few_k,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def compile_share(jobs: list[tuple[Shape, Tile, bool]]) -> None:
    half = torch.bfloat16
    for job in jobs:
        _expert_kernel.warmup(half, half, half, torch.int32, 1, 100, 64, grid=(1,), **constants(*job))


def launches(layer: Layer, sets: list[Routing], tile: Tile, gate_up: bool) -> Callable[[], None]:
    """One product of every routing of `sets`, on random inputs."""
    shape, pairs = layer.shape, sets[0].ids.numel()
    act = torch.randn((pairs, shape.intermediate), device="cuda").to(torch.bfloat16)
    parts = torch.empty((pairs, shape.hidden), dtype=torch.bfloat16, device="cuda")
    plans = [align(r.ids, layer.scattered, tile.m) for r in sets]
    fixed = constants(shape, tile, gate_up)
    tiles = triton.cdiv(shape.intermediate, tile.n // 2) if gate_up else triton.cdiv(shape.hidden, tile.n)
    lanes = min(HOST_LANES, plans[0].room * tiles)

    def launch() -> None:
        for r, plan in zip(sets, plans, strict=True):
            a, out = (r.x, act) if gate_up else (act, parts)
            _expert_kernel[(lanes + plan.room * tiles,)](a, out, a, plan.work, 0, plan.room, lanes, **fixed)

    return launch


def time_product(layer: Layer, tokens: int, gate_up: bool, rounds: int) -> None:
    sets = [layer.routing(tokens) for _ in range(8 if tokens <= 128 else 2)]
    touched = sum(layer.expert_bytes(r) for r in sets) / len(sets)
    variants = {str(tile): launches(layer, sets, tile, gate_up) for tile in CANDIDATES[tokens]}
    share, part = (2 / 3, "gate_up") if gate_up else (1 / 3, "down")
    times = replay_times(variants, calls=len(sets), rounds=rounds, budget_ms=8)
    for name, us in sorted(times.items(), key=lambda item: item[1]):
        rate, flops = share * touched / us / 1e6, share * layer.shape.flops(tokens) / us / 1e6
        print(f"{layer.shape.name} {tokens} {part} {name}: {us:.1f} us {rate:.2f} TB/s {flops:.0f} TFLOP/s")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default=",".join(map(str, CANDIDATES)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", help="compile part i/n only (what the parent starts)")
    args = parser.parse_args()
    sizes = [int(t) for t in args.tokens.split(",")]
    tiles = dict.fromkeys(tile for n in sizes for tile in CANDIDATES[n])
    jobs = [(shape, tile, up) for shape in (QWEN15, QWEN3) for tile in tiles for up in (True, False)]
    if args.share:
        i, n = map(int, args.share.split("/"))
        return compile_share(jobs[i::n])
    begin = time.monotonic()
    n = os.cpu_count() or 1
    workers = [
        subprocess.Popen([sys.executable, __file__, "--tokens", args.tokens, "--share", f"{i}/{n}"])
        for i in range(n)
    ]
    for worker in workers:
        worker.wait()
    print(f"compiled {len(jobs)} kernels in {time.monotonic() - begin:.0f} s", flush=True)

    for shape in (QWEN15, QWEN3):
        layer = Layer(shape)
        for tokens in sizes:
            for gate_up in (True, False):
                time_product(layer, tokens, gate_up, args.rounds)


if __name__ == "__main__":
    main()
