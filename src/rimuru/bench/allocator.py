"""What the page pool costs: nanoseconds a 16-token block, and microseconds a boundary move.

Room: the benchmarks. Rule: the same work and units as the published comparison of block pools
(256 requests of 128 blocks in a pool of 65,536, freed in shuffled order, best of several runs,
collector off), through the calls and with the types that the engine uses, on plans of real models.

    rimuru bench allocator [--json] [--repeat N] [--vllm DIR]

A block counts once, however many layer groups share it out. `bulk` is `KVCache.grow` of a whole
request and its `release`; `growth` is `grow_many` by one block for every request, as a step of decodes
asks for it, and the release; both with caching off. `prefix_steady` is the life of a request in a pool
full of cached prefixes: hashing its token list, looking up and admitting, evicting others' blocks,
publishing its own, release. `boundary_move` cuts 1,000 expert pages into KV pages and merges them back.

Plans, in bf16; the pages of a block lie in the parents that the model's experts dictate:

    (none)   Qwen3-30B-A3B, 1 group of 48 layers: 6 pages of 1,536 KiB a parent, the headline
    _wide    the attention of Qwen3.5-35B-A3B, 1 group of 10 layers: 19 pages of 320 KiB a parent
    _2g      Qwen1.5-MoE-A2.7B, 2 groups of 12 layers: 11 pages of 1,536 KiB a parent
    _8g      the same with packed experts, 8 groups of 3 layers: 33 pages of 384 KiB a parent

Rows are 2,560 blocks long, as for a context of 40,960 tokens. The clock is this thread's CPU time,
so that a busy machine disturbs less; it still slows caches down, so compare ratios of one run.

With `--vllm` (a directory with an unpacked source distribution of vLLM) its BlockPool does the same with
one group, in turn with ours, and `bulk_ratio`, `growth_ratio`, `prefix_steady_ratio` are the medians over
the repetitions of ours by theirs, also for the plans with several groups.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rimuru.cache import KVCache, extend_keys
from rimuru.pool import Allocator, AttentionKind, Geometry, Kind, PoolSpec, plan_geometry

from ._vllm_pool import VllmPool

BLOCK = 16
REQUESTS = 256
PER_REQUEST = 128
ROW = 2560
POOL_BLOCKS = 65_536
MIB = 1 << 20
GROUPS = {"": 1, "_wide": 1, "_2g": 2, "_8g": 8}

Work = Callable[[], object]


def plan_of(plan: str = "") -> Geometry:
    """The geometry of one of the plans of this module's docstring."""
    if plan == "":
        attention: tuple[AttentionKind, ...] = (AttentionKind("full", tuple(range(48)), 2048),)
        expert = 9 * MIB
    elif plan == "_wide":
        attention, expert = (AttentionKind("full", tuple(range(10)), 2048),), 6 * MIB
    elif plan == "_2g":
        attention, expert = (AttentionKind("full", tuple(range(24)), 8192),), 33 * MIB // 2
    else:
        parts = [tuple(range(at, at + 3)) for at in range(0, 24, 3)]
        attention = tuple(AttentionKind(f"part{i}", layers, 8192) for i, layers in enumerate(parts))
        expert = 199 * MIB // 16
    return plan_geometry(PoolSpec(attention, expert_bytes=expert))


def cache_of(plan: str, prefix_caching: bool, blocks: int = POOL_BLOCKS) -> KVCache:
    """A KV cache of about `blocks` blocks over a plan."""
    geometry = plan_of(plan)
    classes = [g.page_class for g in geometry.groups_of(Kind.KV)]
    roots = -(-blocks * len(classes) // geometry.classes[classes[0]].per_parent)
    allocator = Allocator(geometry, roots * geometry.huge_bytes)
    return KVCache(allocator, classes, BLOCK, REQUESTS, ROW, prefix_caching=prefix_caching)


def timed(work: Work) -> int:
    """Nanoseconds of one run, garbage collector off."""
    gc.collect()
    gc.disable()
    start = time.thread_time_ns()
    work()
    took = time.thread_time_ns() - start
    gc.enable()
    return took


def bulk_work(plan: str = "") -> Work:
    """A request's blocks at once, all requests, then back in shuffled order."""
    cache = cache_of(plan, prefix_caching=False)
    order = _shuffled()

    def work() -> None:
        for slot in range(REQUESTS):
            cache.grow(slot, PER_REQUEST)
        for slot in order:
            cache.release(slot)

    return work


def growth_work(plan: str = "") -> Work:
    """Every request grows by one block a step; then back in shuffled order."""
    cache = cache_of(plan, prefix_caching=False)
    slots, order = list(range(REQUESTS)), _shuffled()

    def work() -> None:
        for blocks in range(1, PER_REQUEST + 1):
            cache.grow_many(slots, [blocks] * REQUESTS)
        for slot in order:
            cache.release(slot)

    return work


def steady_work(plan: str = "") -> Work:
    """In a pool full of cached prefixes: hash, look up, admit, take by evicting, publish, release."""
    cache = cache_of(plan, prefix_caching=True)
    tokens, order = _prompts(), _shuffled()
    turn = 0

    def work() -> None:
        nonlocal turn
        turn += 1
        seed = turn.to_bytes(32, "big")
        for slot in range(REQUESTS):
            keys: list[bytes] = []
            extend_keys(keys, tokens[slot], BLOCK, seed)
            cache.admit(slot, keys, cache.match(keys))
            cache.grow(slot, PER_REQUEST)
            cache.commit(slot, keys, PER_REQUEST)
        for slot in order:
            cache.release(slot)

    while cache.free_blocks():
        work()
    return work


def boundary_work(plan: str = "", pages: int = 1000) -> Work:
    """`pages` expert pages are lent to KV, filled, and taken back."""
    geometry = plan_of(plan)
    expert, kv = geometry.class_of(Kind.EXPERT), geometry.groups_of(Kind.KV)[0].page_class
    allocator = Allocator(geometry, 2 * pages * geometry.huge_bytes)
    experts = allocator.take(expert, 2 * pages, "experts")
    assert isinstance(experts, list)
    lent = experts[::2]
    n = pages * geometry.classes[kv].per_parent

    def work() -> None:
        nonlocal lent
        allocator.set_limit(Kind.EXPERT, pages)
        allocator.give(expert, lent, "experts")
        allocator.take(kv, n, "kv")
        allocator.give_all(kv, "kv")
        allocator.set_limit(Kind.EXPERT, None)
        back = allocator.take(expert, pages, "experts")
        assert isinstance(back, list)
        lent = back

    return work


def _shuffled() -> list[int]:
    order = list(range(REQUESTS))
    random.Random(0).shuffle(order)
    return order


def _prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(150_000) for _ in range(PER_REQUEST * BLOCK)] for _ in range(REQUESTS)]


# Name without its unit -> (what makes the work, the unit, how many units a run of it is).
MEASURES: dict[str, tuple[Callable[[str], Work], str, int]] = {
    "bulk": (bulk_work, "ns", REQUESTS * PER_REQUEST),
    "growth": (growth_work, "ns", REQUESTS * PER_REQUEST),
    "prefix_steady": (steady_work, "ns", REQUESTS * PER_REQUEST),
    "boundary_move": (boundary_work, "us", 1000),
}


def measure(repeat: int = 7, vllm: Path | None = None) -> dict[str, float]:
    """Every measure on every plan, as `NAME_UNIT` and the plan's suffix; with `vllm` ratios and its own
    figures (`vllm_NAME_ns`) too. OSError where its files are not there."""
    theirs: dict[str, Callable[[], Work]] = {}
    if vllm is not None:
        peer = VllmPool(vllm, POOL_BLOCKS, BLOCK, REQUESTS, PER_REQUEST)
        theirs = {
            "bulk": lambda: peer.bulk(_shuffled()),
            "growth": lambda: peer.growth(_shuffled()),
            "prefix_steady": lambda: peer.steady(_shuffled(), _prompts()),
        }
    out: dict[str, float] = {}
    for name, (make, unit, units) in MEASURES.items():
        works = {plan: make(plan) for plan in GROUPS}
        other = theirs[name]() if name in theirs else None
        rounds = []
        for _ in range(repeat):
            rounds.append({plan: timed(work) for plan, work in works.items()})
            if other is not None:
                rounds[-1]["vllm"] = timed(other)
        for plan in GROUPS:
            out[f"{name}_{unit}{plan}"] = round(min(took[plan] for took in rounds) / units, 1)
        if other is not None:
            out[f"vllm_{name}_{unit}"] = round(min(took["vllm"] for took in rounds) / units, 1)
            for plan in GROUPS:
                out[f"{name}_ratio{plan}"] = round(median(t[plan] / t["vllm"] for t in rounds), 3)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; prints a table or, with `--json`, one object."""
    parser = argparse.ArgumentParser(
        prog="rimuru bench allocator", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repeat", type=int, default=7, help="runs of which the best counts (default 7)")
    parser.add_argument("--vllm", type=Path, metavar="DIR", help="compare with vLLM's sources in DIR")
    args = parser.parse_args(argv)
    if args.repeat < 1:
        parser.error("--repeat must be at least 1")
    try:
        result: dict[str, Any] = {"python": platform.python_version(), **measure(args.repeat, args.vllm)}
    except OSError as error:
        parser.error(f"--vllm {args.vllm} is no unpacked source distribution of vLLM: {error}")
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{'':<22}{'1 group':>10}{'1, wide':>10}{'2 groups':>10}{'8 groups':>10}")
        for key in result:
            if key + "_8g" in result:
                print(f"{key:<22}" + "".join(f"{result[key + plan]:>10}" for plan in GROUPS))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
