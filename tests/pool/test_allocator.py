"""The allocator against a model that only knows which bytes are taken."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from shapes import MIB, every_kind, plain

from rimuru.pool import (
    Allocator,
    CorruptPoolError,
    DoubleFreeError,
    ForeignPageError,
    GeometryError,
    Kind,
    Shortage,
    WrongKindError,
)

OWNERS = ("a", "b", "c")
PLAN = every_kind()


class AnyOrder(RuleBasedStateMachine):
    """All kinds, three owners, sharing (disowned pages) and limits, in any order."""

    @initialize(roots=st.integers(1, 4))
    def start(self, roots):
        self.plan = PLAN
        self.pool = Allocator(self.plan, roots * self.plan.huge_bytes + 1)
        self.bytes: dict[int, tuple[int, int]] = {}  # grain -> (class, first grain of its page)
        self.held: dict[tuple[int, str | None], list[int]] = {}

    classes = st.integers(0, len(PLAN.classes) - 1)

    @rule(cls=classes, n=st.integers(0, 30), owner=st.sampled_from(OWNERS), ahead=st.sampled_from([0, 0, 3]))
    def take(self, cls, n, owner, ahead):
        could = self.pool.obtainable(cls)
        got = self.pool.take(cls, n, owner, ahead=ahead)
        if isinstance(got, Shortage):
            assert got.obtainable == could < n
            return
        assert n <= len(got) <= n + ahead
        grains = self.plan.page_grains(cls)
        for page in got:
            assert 0 <= page <= self.pool.roots * self.plan.page_grains(0) - grains
            for grain in range(page, page + grains):
                assert grain not in self.bytes, "two pages overlap"
                self.bytes[grain] = (cls, page)
        self.held.setdefault((cls, owner), []).extend(got)

    def forget(self, cls, pages):
        for page in pages:
            for grain in range(page, page + self.plan.page_grains(cls)):
                assert self.bytes.pop(grain) == (cls, page)

    @rule(cls=classes, owner=st.sampled_from((*OWNERS, None)), data=st.data())
    def give_some(self, cls, owner, data):
        held = self.held.get((cls, owner), [])
        if held:
            some = data.draw(st.lists(st.sampled_from(held), unique=True, max_size=8))
            self.pool.give(cls, some, owner)
            self.held[cls, owner] = [p for p in held if p not in some]
            self.forget(cls, some)

    @rule(cls=classes, owner=st.sampled_from(OWNERS))
    def give_all(self, cls, owner):
        held = self.held.pop((cls, owner), [])
        assert self.pool.give_all(cls, owner) == len(held)
        self.forget(cls, held)

    @rule(cls=classes, owner=st.sampled_from(OWNERS))
    def disown(self, cls, owner):
        self.pool.disown(cls, owner)
        self.held.setdefault((cls, None), []).extend(self.held.pop((cls, owner), []))

    @rule(cls=classes, limit=st.one_of(st.none(), st.integers(0, 30)))
    def limit_class(self, cls, limit):
        self.pool.set_limit(cls, limit)

    @rule(kind=st.sampled_from(list(Kind)), limit=st.one_of(st.none(), st.integers(0, 30)))
    def limit_kind(self, kind, limit):
        self.pool.set_limit(kind, limit)

    @rule(each=st.dictionaries(classes, st.integers(1, 3), min_size=1, max_size=3))
    def bundles(self, each):
        most = self.pool.obtainable_together(each)
        for n, fits in ((most, True), (most + 1, False)):
            got = [self.pool.take(cls, k * n, "trial") for cls, k in each.items()]
            assert any(isinstance(g, Shortage) for g in got) != fits
            for cls in each:
                self.pool.give_all(cls, "trial")

    @rule(cls=classes, page=st.integers(-3, 400), owner=st.sampled_from((*OWNERS, None)))
    def give_anything(self, cls, page, owner):
        """A page that is not the giver's is refused by name and nothing changes."""
        if page in self.held.get((cls, owner), []) or (
            # Whom a page belongs to is not known of pages given in nobody's name.
            owner is None and any(page in self.held.get((cls, o), []) for o in OWNERS)
        ):
            return
        before = self.pool.counts(Kind.KV), self.pool.counts(Kind.EXPERT), self.pool.whole_free()
        with pytest.raises((DoubleFreeError, ForeignPageError, WrongKindError)) as error:
            self.pool.give(cls, [page], owner)
        assert error.value.page == page
        assert error.value.owner == owner
        assert before == (self.pool.counts(Kind.KV), self.pool.counts(Kind.EXPERT), self.pool.whole_free())

    @invariant()
    def books_agree(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        for cls in range(len(self.plan.classes)):
            assert self.pool.used(cls) == sum(len(p) for (c, _), p in self.held.items() if c == cls)
        for (cls, owner), pages in self.held.items():
            if owner is not None:
                assert self.pool.held_by(cls, owner) == len(pages)

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for (cls, owner), pages in self.held.items():
            self.pool.give(cls, pages, owner)
        assert self.pool.whole_free() == self.pool.roots, "something did not merge"
        self.pool.check()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_every_kind_is_in_the_test_geometry():
    plan = PLAN
    assert {c.kind for c in plan.classes} == {None, *Kind}
    assert len(plan.classes_of(Kind.KV)) == 2


def pool(roots: int = 3) -> tuple[Allocator, int, int]:
    plan = plain()
    return Allocator(plan, plan.huge_bytes * roots), plan.class_of(Kind.KV), plan.class_of(Kind.EXPERT)


def test_parents_split_on_demand_and_merge_on_the_last_free():
    a, kv, expert = pool()
    pages = a.take(kv, 1, "request")
    assert a.obtainable(expert) == 2
    a.give(kv, pages, "request")
    assert a.obtainable(expert) == 3


def test_an_owner_keeps_to_its_parent():
    a, kv, _ = pool()
    per = a.geometry.classes[kv].per_parent
    rows = {o: list(a.take(kv, 1, o)) for o in "ab"}
    a.take(kv, per * 1, "c")
    for _ in range(2):
        for o in "ab":
            rows[o] += a.take(kv, 1, o)
    span = a.geometry.page_grains(0)
    assert len({p // span for p in rows["a"]}) == 1


def test_a_shortage_takes_nothing_and_says_what_there_is():
    a, kv, expert = pool()
    a.take(expert, 2, "experts")
    per = a.geometry.classes[kv].per_parent
    assert a.take(kv, per + 1, "request") == Shortage(per)
    assert a.counts(Kind.KV).used == 0
    assert a.obtainable(kv) == per


def test_pages_ahead_come_from_the_last_parent_only():
    a, kv, _ = pool()
    per = a.geometry.classes[kv].per_parent
    assert len(a.take(kv, per, "a", ahead=4)) == per
    assert len(a.take(kv, 1, "b", ahead=per * 2)) == per
    assert len(a.take(kv, 1, "c", ahead=3, unit=2)) == 3


def test_limits_bound_a_class_and_a_kind():
    a, kv, expert = pool()
    a.set_limit(Kind.EXPERT, 1)
    assert a.take(expert, 2, "experts") == Shortage(1)
    assert a.take(expert, 1, "experts")
    a.set_limit(kv, 2)
    assert a.obtainable(kv) == 2
    a.take(kv, 2, "r")
    a.set_limit(kv, 1)
    assert (a.obtainable(kv), a.excess(kv)) == (0, 1)
    a.set_limit(kv, None)
    assert a.obtainable(kv) > 0


def test_wrong_gives_are_told_apart():
    a, kv, expert = pool()
    mine, other = a.take(kv, 2, "mine"), a.take(kv, 1, "other")
    with pytest.raises(ForeignPageError, match=f"page {other[0]} .*'mine'"):
        a.give(kv, [mine[0], other[0]], "mine")
    with pytest.raises(DoubleFreeError, match="twice"):
        a.give(kv, [mine[0], mine[0]], "mine")
    with pytest.raises(WrongKindError):
        a.give(kv, [mine[0] + 1], "mine")
    with pytest.raises(WrongKindError):
        a.give(expert, [min(mine)], None)
    a.give(kv, mine[:1], "mine")
    with pytest.raises(DoubleFreeError, match="free already"):
        a.give(kv, mine[:1], "mine")
    a.check()
    assert a.counts(Kind.KV).used == 2


def test_sizes_that_cannot_be_are_refused():
    plan = plain()
    for nbytes in (0, -1, plan.huge_bytes - 1):
        with pytest.raises(GeometryError, match="give at least"):
            Allocator(plan, nbytes)
    with pytest.raises(GeometryError, match="2\\^31"):
        Allocator(plan, 2**60)
    a, kv, _ = pool()
    with pytest.raises(ValueError, match="-1 pages"):
        a.take(kv, -1, "r")
    with pytest.raises(ValueError, match="least is 0"):
        a.set_limit(kv, -1)


def test_check_finds_books_that_were_cooked():
    a, kv, _ = pool()
    a.take(kv, 1, "r")
    a._levels[kv].used += 1
    with pytest.raises(CorruptPoolError, match="counted"):
        a.check()


def test_a_pool_of_many_pages_is_quick_to_make():
    plan = plain()
    a = Allocator(plan, 80 << 30)
    assert a.roots == (80 << 30) // (2 * MIB)


def test_a_kind_over_its_limit_does_not_stop_the_others():
    plan = every_kind()
    a = Allocator(plan, 4 * plan.huge_bytes)
    bundle = dict.fromkeys(plan.classes_of(Kind.KV), 1)
    a.take(plan.class_of(Kind.EXPERT), 3, "experts")
    before = a.obtainable_together(bundle)
    a.set_limit(Kind.EXPERT, 1)
    assert a.obtainable_together(bundle) == before > 0
