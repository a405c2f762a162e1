"""Draw the pictures of pool.md from real pools: `python docs/draw_pool.py` writes pool-map.svg and
prints the plans and text maps. The plans are Qwen3-30B-A3B's, where an expert is a huge page, and
Qwen3.5-35B-A3B's with fp8 experts, two a huge page.
"""

from __future__ import annotations

from pathlib import Path

from rimuru.pool import Allocator, AttentionKind, Geometry, Kind, PoolSpec, RecurrentKind, plan_geometry
from rimuru.pool.draw import svg_map, text_map

KIB, MIB = 1 << 10, 1 << 20


def simple_plan() -> Geometry:
    return plan_geometry(PoolSpec((AttentionKind("full", tuple(range(48)), 2048),), expert_bytes=9 * MIB))


def simple_pool() -> Allocator:
    """Four experts and two running requests with 13 and 4 blocks."""
    geometry = simple_plan()
    allocator = Allocator(geometry, 8 * geometry.huge_bytes)
    allocator.take(geometry.class_of(Kind.EXPERT), 4, "experts")
    for request, blocks in (("long", 13), ("short", 4)):
        allocator.take(geometry.class_of(Kind.KV), blocks, request)
    return allocator


def plan() -> Geometry:
    linear = tuple(range(30))
    return plan_geometry(
        PoolSpec(
            attention=(AttentionKind("full", tuple(range(10)), 2048),),
            expert_bytes=3 * MIB + 2304,
            state=RecurrentKind(linear, 2 * MIB),
            conv=RecurrentKind(linear, 48 * KIB),
        )
    )


def pool() -> Allocator:
    """Nine experts, two running requests of a hybrid model, one of them with a long prompt."""
    geometry = plan()
    allocator = Allocator(geometry, 40 * geometry.huge_bytes)
    allocator.take(geometry.class_of(Kind.EXPERT), 9, "experts")
    for request, blocks in (("short", 1), ("long", 24)):
        for kind, each in ((Kind.KV, blocks), (Kind.STATE, 1), (Kind.CONV, 1)):
            for group in geometry.groups_of(kind):
                allocator.take(group.page_class, each, request)
    return allocator


if __name__ == "__main__":
    print(simple_plan().describe(), end="\n\n")
    print(text_map(simple_pool()), end="\n\n")
    print(plan().describe(), end="\n\n")
    print(text_map(pool(), rows=29))
    (Path(__file__).parent / "pool-map.svg").write_text(svg_map(pool(), rows=28) + "\n")
