"""Small geometries with every kind of page, for the pool's tests."""

from __future__ import annotations

from rimuru.pool import AttentionKind, Geometry, PoolSpec, RecurrentKind, plan_geometry

KIB, MIB = 1 << 10, 1 << 20


def plain(kv_kib: int = 336) -> Geometry:
    """Experts are the root pages; one KV class cut from them."""
    kv = AttentionKind("full", (0, 1), kv_kib * KIB // 32)
    return plan_geometry(PoolSpec((kv,), expert_bytes=2 * MIB))


def every_kind() -> Geometry:
    """A huge page over raw and packed experts and states; KV of two sizes and CONV under experts."""
    return plan_geometry(
        PoolSpec(
            attention=(
                AttentionKind("full", tuple(range(4)), 12 * KIB // 16),
                AttentionKind("compressed", tuple(range(4, 8)), 5 * KIB // 16),
            ),
            expert_bytes=192 * KIB,
            packed_bytes=144 * KIB,
            state=RecurrentKind(tuple(range(6)), 64 * KIB),
            conv=RecurrentKind(tuple(range(6)), 3 * KIB),
        )
    )
