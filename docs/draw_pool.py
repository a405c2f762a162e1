"""Draw the pictures of pool.md from a real pool: `python docs/draw_pool.py` writes pool-map.svg and
prints the text map. The plan is Qwen3.5-35B-A3B's with fp8 experts: two experts a huge page.
"""

from __future__ import annotations

from pathlib import Path

from rimuru.pool import Allocator, AttentionKind, Geometry, Kind, PoolSpec, RecurrentKind, plan_geometry
from rimuru.pool.draw import svg_map, text_map

KIB, MIB = 1 << 10, 1 << 20


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
    print(plan().describe(), end="\n\n")
    print(text_map(pool(), rows=29))
    (Path(__file__).parent / "pool-map.svg").write_text(svg_map(pool(), rows=28) + "\n")
