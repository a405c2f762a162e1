"""Tiles of the expert GEMMs: a small table by tokens per expert, dtype and chip.

Room: `choose`. Rule: no autotuning while serving; a tile follows from the token count and never
from residency. Up to 64 tokens an expert's rows fit one M block whatever the routing, so that a
host expert crosses the link once. On Hopper `moe_specialised` takes most steps of 60 rows an expert and
more. Measured on an H200: docs/benchmarks/notes.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """`m` rows of tokens by `n` rows of weight, `k` deep; pipelined in `stages`.

    A block with at most `few_m` rows is computed by a `few_m` x `n` x `few_k` tile of the same
    kernel: the last block of an expert is half empty on average, and in decode most blocks are.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    few_m: int = 0
    few_k: int = 0

    def shared(self, itemsize: int) -> int:
        """Bytes of shared memory that the pipeline's buffers take at most."""
        most = max((self.m + self.n) * self.k, (self.few_m + self.n) * self.few_k)
        return most * itemsize * self.stages


Pair = tuple[Tile, Tile]  # gate_up, down: both have the same m

# (most tokens, most rows an expert on average) -> tiles; the first line that holds both is taken.
_ANY = float("inf")
_DECODE = Tile(16, 64, 128, 4, 4)
_MIXED = Tile(64, 64, 64, 4, 4, few_m=16, few_k=128)
_CHUNK = Tile(128, 128, 64, 4, 3, few_m=64, few_k=64)
_PREFILL = Tile(128, 256, 64, 8, 4, few_m=64, few_k=64)
_HALF: tuple[tuple[float, float, Pair], ...] = (
    (16, _ANY, (_DECODE, _DECODE)),
    (_ANY, 24, (_MIXED, _MIXED)),
    (_ANY, 96, (_CHUNK, _CHUNK)),
    (_ANY, _ANY, (_CHUNK, _PREFILL)),
)
_FLOAT: tuple[tuple[float, float, Pair], ...] = (
    (16, _ANY, (Tile(16, 64, 32, 4, 3), Tile(16, 64, 32, 4, 3))),
    (_ANY, _ANY, (Tile(64, 64, 32, 8, 3), Tile(64, 64, 32, 8, 3))),
)
_TABLES = {torch.bfloat16: _HALF, torch.float16: _HALF, torch.float32: _FLOAT}

# Shared memory a block may take, bytes, by compute capability (CUDA programming guide).
_SHARED = {(8, 0): 163 << 10, (8, 7): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10, (10, 3): 227 << 10}
_SHARED_OTHERS = 99 << 10


def fit(tile: Tile, capability: tuple[int, int], itemsize: int) -> Tile:
    """The tile with what the chip has room for: fewer stages, and narrower without wgmma."""
    if capability[0] != 9 and tile.m == 128:
        # Without wgmma both operands pass through registers: half the width, twice the warps.
        tile = replace(tile, n=128, warps=8, stages=3)
    limit = _SHARED.get(capability, _SHARED_OTHERS)
    stages = tile.stages
    while stages > 2 and replace(tile, stages=stages).shared(itemsize) > limit - 1024:
        stages -= 1
    return replace(tile, stages=stages)


def shipped(dtype: torch.dtype, capability: tuple[int, int]) -> list[Pair]:
    """Every pair of tiles that `choose` can return for a dtype on a chip."""
    size = dtype.itemsize
    return [(fit(g, capability, size), fit(d, capability, size)) for _, _, (g, d) in _TABLES[dtype]]


@lru_cache(maxsize=1024)
def choose(tokens: int, top_k: int, experts: int, dtype: torch.dtype, device: torch.device) -> Pair:
    """Tiles for a step of `tokens` routed to `top_k` of `experts`. Raises ValueError by name."""
    if dtype not in _TABLES:
        names = ", ".join(str(d).removeprefix("torch.") for d in _TABLES)
        raise ValueError(f"no MoE kernel for {dtype}; {names} work")
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    if capability < (8, 0):
        raise ValueError(f"GPU of compute capability {capability[0]}.{capability[1]}; 8.0 and later work")
    rows = tokens * top_k / experts
    for most_tokens, most_rows, (gate_up, down) in _TABLES[dtype]:
        if tokens <= most_tokens and rows <= most_rows:
            return fit(gate_up, capability, dtype.itemsize), fit(down, capability, dtype.itemsize)
    raise AssertionError("the last line of every table holds any step")
