"""What the page pool costs: nanoseconds a 16-token block, and microseconds a boundary move.

Room: the benchmarks. Rule: the same work and units as the published comparison of block pools
(256 requests of 128 blocks, freed in shuffled order, best of several runs, collector off), on real
plans: the pages of a block lie in the parents that the model's experts dictate.

    rimuru bench allocator [--json] [--repeat N]

A block counts once, however many layer groups share it out. `bulk` is `KVCache.grow` of a whole
request and its `release`, `growth` one block at a time through `KVCache.grow_many` and the release,
both with caching off; `prefix_steady` the life of a request in a full pool, hashing its keys, evicting
others' blocks and publishing its own; `boundary_move` cuts 1,000 expert pages into KV pages and merges
them back. The clock is this thread's CPU time, so that a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import time
from array import array
from collections.abc import Callable, Sequence

from rimuru.cache import KVCache, extend_keys
from rimuru.pool import Allocator, AttentionKind, Geometry, Kind, PoolSpec, plan_geometry

BLOCK = 16
REQUESTS = 256
PER_REQUEST = 128
ROW = 1024  # blocks a request could grow to, as an engine's block tables have it
POOL_BLOCKS = 65_536
MIB = 1 << 20


def plan_of(groups: int) -> Geometry:
    """A plan with that many layer groups: Qwen3.5-35B-A3B's attention (1; 19 KV pages an expert),
    Qwen1.5-MoE (2; 11), and its eight groups of three layers (8; 32), each in bf16."""
    if groups == 1:
        attention: tuple[AttentionKind, ...] = (AttentionKind("full", tuple(range(10)), 2048),)
        spec = PoolSpec(attention, expert_bytes=6 * MIB)
    elif groups == 2:
        spec = PoolSpec((AttentionKind("full", tuple(range(24)), 8192),), expert_bytes=33 * MIB // 2)
    else:
        layers = 24 // groups
        attention = tuple(
            AttentionKind(f"part{i}", tuple(range(layers * i, layers * (i + 1))), 8192) for i in range(groups)
        )
        spec = PoolSpec(attention, expert_bytes=99 * MIB // 8)
    plan = plan_geometry(spec)
    assert len(plan.groups) == groups, plan.describe()
    return plan


def cache_of(groups: int, prefix_caching: bool, blocks: int = POOL_BLOCKS) -> KVCache:
    """A KV cache of about `blocks` blocks over the plan with that many groups."""
    plan = plan_of(groups)
    classes = [g.page_class for g in plan.groups_of(Kind.KV)]
    roots = -(-blocks * groups // plan.classes[classes[0]].per_parent)
    allocator = Allocator(plan, roots * plan.huge_bytes)
    return KVCache(allocator, classes, BLOCK, REQUESTS, ROW, prefix_caching=prefix_caching)


def best_of(repeat: int, work: Callable[[], object]) -> float:
    """Nanoseconds of the fastest of `repeat` runs, garbage collector off."""
    best = float("inf")
    for _ in range(repeat):
        gc.collect()
        gc.disable()
        start = time.thread_time_ns()
        work()
        best = min(best, time.thread_time_ns() - start)
        gc.enable()
    return best


def bulk_ns(groups: int, repeat: int) -> float:
    """ns per block: a request's blocks at once, all requests, then back in shuffled order."""
    cache = cache_of(groups, prefix_caching=False)
    order = _shuffled()

    def work() -> None:
        for slot in range(REQUESTS):
            cache.grow(slot, PER_REQUEST)
        for slot in order:
            cache.release(slot)

    return best_of(repeat, work) / (REQUESTS * PER_REQUEST)


def growth_ns(groups: int, repeat: int) -> float:
    """ns per block: every request grows by one block a step; then back in shuffled order."""
    cache = cache_of(groups, prefix_caching=False)
    order = _shuffled()
    slots = list(range(REQUESTS))

    def work() -> None:
        for blocks in range(1, PER_REQUEST + 1):
            cache.grow_many(slots, [blocks] * REQUESTS)
        for slot in order:
            cache.release(slot)

    return best_of(repeat, work) / (REQUESTS * PER_REQUEST)


def prefix_steady_ns(groups: int, repeat: int) -> float:
    """ns per block in a pool full of cached prefixes: hash, evict, take, publish, release."""
    cache = cache_of(groups, prefix_caching=True)
    rng = random.Random(0)
    tokens = [
        array("i", [rng.randrange(150_000) for _ in range(PER_REQUEST * BLOCK)]) for _ in range(REQUESTS)
    ]
    order = _shuffled()
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
    return best_of(repeat, work) / (REQUESTS * PER_REQUEST)


def boundary_move_us(groups: int, repeat: int, pages: int = 1000) -> float:
    """Microseconds to lend `pages` expert pages to KV, fill them, and get them back."""
    plan = plan_of(groups)
    expert, kv = plan.class_of(Kind.EXPERT), plan.groups_of(Kind.KV)[0].page_class
    allocator = Allocator(plan, 2 * pages * plan.huge_bytes)
    experts = allocator.take(expert, 2 * pages, "experts")
    assert isinstance(experts, list)
    lent = experts[::2]
    n = pages * plan.classes[kv].per_parent

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

    return best_of(repeat, work) / 1000


def _shuffled() -> list[int]:
    order = list(range(REQUESTS))
    random.Random(0).shuffle(order)
    return order


MEASURES = {
    "bulk_ns": bulk_ns,
    "growth_ns": growth_ns,
    "prefix_steady_ns": prefix_steady_ns,
    "boundary_move_us": boundary_move_us,
}


def measure(repeat: int = 7) -> dict[str, float]:
    """Every measure at 1, 2 and 8 layer groups; keys end in `_2g` and `_8g` for the latter two."""
    return {
        name + ("" if groups == 1 else f"_{groups}g"): round(fn(groups, repeat), 1)
        for groups in (1, 2, 8)
        for name, fn in MEASURES.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; prints a table or, with `--json`, one object."""
    parser = argparse.ArgumentParser(
        prog="rimuru bench allocator", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repeat", type=int, default=7, help="runs of which the best counts (default 7)")
    args = parser.parse_args(argv)
    if args.repeat < 1:
        parser.error("--repeat must be at least 1")
    result: dict[str, float | str] = {"python": platform.python_version(), **measure(args.repeat)}
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{'':<18}{'1 group':>10}{'2 groups':>10}{'8 groups':>10}")
        for name in MEASURES:
            print(f"{name:<18}" + "".join(f"{result[name + s]:>10}" for s in ("", "_2g", "_8g")))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
