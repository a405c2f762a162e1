"""What any plan must obey, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import KIB, MIB, every_kind, plain

from rimuru.pool import AttentionKind, Geometry, GeometryError, Kind, PoolSpec, RecurrentKind, plan_geometry


def obey(plan: Geometry) -> None:
    assert plan.classes[0].parent is None
    assert plan.classes[0].page_bytes == plan.huge_bytes
    for i, c in enumerate(plan.classes):
        assert c.page_bytes % plan.grain == 0
        assert 0 < c.payload_bytes <= c.page_bytes
        if i:
            assert c.parent is not None
            assert c.parent < i
            parent = plan.classes[c.parent].page_bytes
            assert c.per_parent == parent // c.page_bytes >= 1
    for g in plan.groups:
        assert g.payload_bytes <= plan.classes[g.page_class].page_bytes
    for kind, waste in plan.waste.items():
        if kind in (Kind.EXPERT, Kind.EXPERT_PACKED):
            cls = plan.class_of(kind)
            payload, cost = plan.classes[cls].payload_bytes, plan.cost(cls)
        else:
            groups = plan.groups_of(kind)
            payload = sum(g.payload_bytes for g in groups)
            cost = sum(plan.cost(g.page_class) for g in groups)
        if kind != Kind.KV or len({g.name.split(".")[0] for g in plan.groups_of(kind)}) == 1:
            assert waste == pytest.approx(1 - payload / cost, abs=1e-9)


layers = st.integers(1, 12)
size = st.integers(64, 40_000)


@settings(max_examples=20, deadline=None)
@given(layers, size, st.one_of(st.none(), st.integers(500, 3_000_000)), st.booleans(), layers, size)
def test_any_sizes_have_a_plan_that_obeys_the_rules(n, token, expert, packed, linear, state):
    spec = PoolSpec(
        (AttentionKind("full", tuple(range(n)), token),),
        expert,
        None if expert is None or not packed else -(-expert * 3 // 4),
        RecurrentKind(tuple(range(linear)), state * 8),
        RecurrentKind(tuple(range(linear)), state),
    )
    plan = plan_geometry(spec)
    obey(plan)
    assert sorted(i for g in plan.groups_of(Kind.KV) for i in g.layers) == list(range(n))


def test_equal_levels_collapse():
    plan = plain()
    assert plan.classes[0].kind == Kind.EXPERT
    assert len(plan.classes) == 2


def test_raw_and_packed_share_a_huge_page():
    plan = every_kind()
    raw, packed = plan.class_of(Kind.EXPERT), plan.class_of(Kind.EXPERT_PACKED)
    assert plan.classes[raw].per_parent * 4 == plan.classes[packed].per_parent * 3
    assert all(plan.classes[c].parent == raw for c in plan.classes_of(Kind.KV))


def test_groups_of_one_size_share_a_page_class():
    kv = 24 * KIB // 16
    full, sliding = AttentionKind("full", (1, 3), kv), AttentionKind("sliding", (0, 2), kv)
    plan = plan_geometry(PoolSpec((full, sliding), expert_bytes=3 * MIB))
    assert len(plan.groups) == 2
    assert len(plan.classes_of(Kind.KV)) == 1


def test_a_model_without_experts_has_its_kv_page_as_root():
    plan = plan_geometry(PoolSpec((AttentionKind("full", (0, 1), 1024),)))
    assert [c.kind for c in plan.classes] == [Kind.KV]


def test_experts_smaller_than_a_kv_page_are_gathered():
    plan = plan_geometry(PoolSpec((AttentionKind("full", (0,), 2048),), expert_bytes=12 * KIB))
    obey(plan)
    assert plan.worst_waste <= 0.02


@pytest.mark.parametrize(
    "spec",
    [
        PoolSpec(()),
        PoolSpec((AttentionKind("full", (), 8),)),
        PoolSpec((AttentionKind("full", (0,), 0),)),
        PoolSpec((AttentionKind("full", (0,), 8, 0),)),
        PoolSpec((AttentionKind("full", (0,), 8),), expert_bytes=-1),
        PoolSpec((AttentionKind("full", (0,), 8),), state=RecurrentKind((), 8)),
    ],
)
def test_empty_and_negative_sizes_are_refused(spec):
    with pytest.raises(GeometryError):
        plan_geometry(spec)


def test_the_plan_prints_its_tree_groups_and_waste():
    text = every_kind().describe()
    assert "EXPERT_PACKED" in text
    assert "full 1 x 4 layers" in text
    assert "waste EXPERT" in text
