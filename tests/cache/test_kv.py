"""KVCache against a model that keeps every block as a set entry, whatever order things happen in."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rimuru.cache import KVCache, extend_keys
from rimuru.pool import Allocator, AttentionKind, Kind, PoolSpec, plan_geometry

MIB = 1 << 20
SEED = b"a seed of this test"


def geometry(groups: str):
    """One page class for one group; two groups of one class; or two groups of different classes."""
    if groups == "one":
        attention = (AttentionKind("full", tuple(range(4)), 16384),)
        return plan_geometry(PoolSpec(attention, expert_bytes=7 * MIB))
    if groups == "same":
        attention = (AttentionKind("full", (1, 3), 16384), AttentionKind("sliding", (0, 2), 16384))
        return plan_geometry(PoolSpec(attention, expert_bytes=7 * MIB // 2))
    attention = (AttentionKind("csa", tuple(range(3)), 16384), AttentionKind("hca", (3, 4), 4096))
    return plan_geometry(PoolSpec(attention, expert_bytes=2 * MIB))


def make(groups: str = "one", roots: int = 4, slots: int = 6, **options):
    plan = geometry(groups)
    allocator = Allocator(plan, plan.huge_bytes * roots)
    classes = [g.page_class for g in plan.groups_of(Kind.KV)]
    return KVCache(allocator, classes, 4, slots, 64, track_freed=True, **options)


def keys_of(tokens: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, tokens, 4, SEED)
    return keys


class AnyLife(RuleBasedStateMachine):
    """Requests over a tiny vocabulary (so that prefixes collide), with limits that move."""

    groups = "one"
    caching = True

    @initialize()
    def start(self):
        self.cache = make(self.groups, prefix_caching=self.caching)
        self.allocator = self.cache.allocator
        self.expert = self.allocator.geometry.class_of(Kind.EXPERT)
        self.tokens: dict[int, list[int]] = {}
        self.total: dict[int, int] = {}
        self.content: dict[tuple[int, ...], bytes] = {}  # pages of a committed block -> its key

    def pages(self, slot: int) -> list[tuple[int, ...]]:
        return list(zip(*(self.cache.row(slot, g) for g in range(self.cache._groups)), strict=True))

    @rule(slot=st.integers(0, 5), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=48))
    def begin(self, slot, tokens):
        if slot in self.total:
            return
        keys = keys_of(tokens)
        hit = self.cache.match(keys)
        self.cache.admit(slot, keys, hit)
        for i, pages in enumerate(self.pages(slot)):
            assert self.content[pages] == keys[i], "a hit reads another prefix's pages"
        self.tokens[slot], self.total[slot] = tokens, hit

    @rule(slot=st.integers(0, 5), more=st.integers(0, 9), evict=st.booleans())
    def grow(self, slot, more, evict):
        if slot not in self.total:
            return
        want = self.total[slot] + more
        counts = self.cache.counts()
        before = self.pages(slot)
        own = self.cache._room[slot]
        missing = self.cache.grow(slot, want, evict)
        if missing:
            assert self.cache.counts() == counts
            assert self.pages(slot) == before
            over = max(self.allocator.excess(c) for c in self.cache._each)
            if not over:
                room = counts.free - (own - len(before)) + (counts.cached if evict else 0)
                assert missing == want - own - room
        else:
            assert self.pages(slot)[: len(before)] == before
            self.total[slot] = want
            if not evict:
                assert self.cache.counts().cached == counts.cached

    @rule(slots=st.permutations(range(6)), evict=st.booleans())
    def decode(self, slots, evict):
        slots = [s for s in slots if self.total.get(s, 0)]
        totals = [self.total[s] + 1 for s in slots]
        short = self.cache.grow_many(slots, totals, evict)
        self.total |= {s: total for s, total in zip(slots, totals, strict=True) if s not in short}

    @rule(slot=st.integers(0, 5))
    def commit(self, slot):
        if slot not in self.total:
            return
        keys = keys_of(self.tokens[slot])
        n = min(self.total[slot], len(keys))
        self.cache.commit(slot, keys, n)
        if self.caching:
            for pages, key in zip(self.pages(slot)[:n], keys, strict=False):
                self.content[pages] = key
            assert self.cache.match(keys[:n]) == n

    @rule(slot=st.integers(0, 5))
    def release(self, slot):
        if slot not in self.total:
            return
        self.cache.release(slot)
        del self.tokens[slot], self.total[slot]

    @rule(slot=st.integers(0, 5), less=st.integers(0, 3))
    def shrink(self, slot, less):
        if slot not in self.total:
            return
        want = max(self.total[slot] - less, self.cache._committed[slot])
        self.cache.shrink(slot, want)
        self.total[slot] = want

    @rule(n=st.integers(0, 5))
    def evict(self, n):
        cached = self.cache.evictable_blocks()
        assert self.cache.evict(n) == min(n, cached)

    @rule(n=st.integers(1, 2))
    def evict_parents(self, n):
        before = {cls: self.allocator.parents(cls) for cls in self.cache._each}
        freed = self.cache.evict_parents(n)
        assert sum(before.values()) - sum(map(self.allocator.parents, before)) == freed

    @rule(most=st.sampled_from([1, 3, 100]), pins=st.integers(0, 3), over_cached=st.booleans())
    def compact(self, most, pins, over_cached):
        """Nothing in use is lost: every block shows what it showed, at its new place."""
        size = max(c.page_bytes for c in self.allocator.geometry.classes)
        before = {slot: self.pages(slot) for slot in self.total}
        cached = self.cache.counts().cached
        moves = self.cache.compact(most * size, lambda cls, page: page % 4 < pins, over_cached)
        assert 0 <= cached - self.cache.counts().cached <= (len(moves) if over_cached else 0)
        assert all(m.source % 4 >= pins for m in moves)
        for cls, groups in self.cache._groups_of.items():
            new = {m.source: m.target for m in moves if m.cls == cls}
            assert new.keys().isdisjoint(new.values())
            assert len(new) * self.allocator.geometry.classes[cls].page_bytes <= most * size

            def moved(pages, groups=groups, new=new):
                return tuple(new.get(p, p) if g in groups else p for g, p in enumerate(pages))

            places = {(g, page) for page in new.values() for g in groups}
            self.content = {
                moved(pages): key
                for pages, key in self.content.items()
                if places.isdisjoint(enumerate(pages))  # what was there before is written over
            }
            before = {slot: [moved(p) for p in pages] for slot, pages in before.items()}
            if most == 100 and pins == 0 and not over_cached:
                assert len(self.allocator.open_parents(cls)) <= 1
        assert before == {slot: self.pages(slot) for slot in self.total}

    @rule()
    def reset(self):
        self.cache.reset_prefix()
        assert self.cache.cached_blocks() == 0

    @rule(pages=st.one_of(st.none(), st.integers(0, 40)))
    def move_the_boundary(self, pages):
        self.allocator.set_limit(Kind.KV, pages)

    @rule(n=st.integers(1, 2))
    def promote(self, n):
        self.allocator.take(self.expert, n, "experts")

    @rule()
    def demote(self):
        self.allocator.give_all(self.expert, "experts")

    @invariant()
    def books_agree(self):
        if not hasattr(self, "cache"):
            return
        self.allocator.check()
        self.cache.check()
        for slot in range(6):
            assert self.cache.held[slot] == self.total.get(slot, 0)
        counts = self.cache.counts()
        used = {p for s in self.total for p in self.pages(s)}
        assert counts.used == len(used)
        taken = counts.used + counts.cached + counts.reserved
        for cls, n in self.cache._each.items():
            assert self.allocator.used(cls) == taken * n + self.cache._loose

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for slot in range(6):
            self.cache.release(slot)
        self.cache.reset_prefix()
        self.allocator.give_all(self.expert, "experts")
        assert self.allocator.whole_free() == self.allocator.roots, "pages leaked"


def machine(name: str, groups: str, caching: bool):
    cls = type(name, (AnyLife,), {"groups": groups, "caching": caching})
    case = cls.TestCase
    case.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
    return case


TestOneGroup = machine("OneGroup", "one", True)
TestTwoGroupsOfOneClass = machine("TwoGroupsOfOneClass", "same", True)
TestTwoGroupsOfTwoClasses = machine("TwoGroupsOfTwoClasses", "different", True)
TestWithoutPrefixCaching = machine("WithoutPrefixCaching", "one", False)


def test_two_requests_share_the_blocks_of_a_common_prefix():
    cache = make()
    keys = keys_of(list(range(16)))
    cache.admit(0, keys, cache.match(keys))
    assert cache.grow(0, 4) == 0
    cache.commit(0, keys, 4)
    cache.admit(1, keys, cache.match(keys))
    assert cache.row(1) == cache.row(0)
    cache.release(0)
    assert cache.evict(10) == 0
    assert cache.row(1)
    cache.release(1)
    assert cache.counts().cached == 4


def test_heads_outlive_tails():
    cache = make()
    keys = keys_of(list(range(32)))
    cache.admit(0, keys, 0)
    cache.grow(0, 8)
    cache.commit(0, keys, 8)
    cache.release(0)
    cache.evict(3)
    assert cache.match(keys) == 5


def test_a_key_that_is_published_keeps_its_first_block():
    cache = make()
    keys = keys_of(list(range(8)))
    for slot in (0, 1):
        cache.admit(slot, keys, 0)
        cache.grow(slot, 2)
    for slot in (0, 1):
        cache.commit(slot, keys, 2)
    first = cache.row(0)
    cache.release(1)
    assert cache.counts().cached == 0
    cache.admit(2, keys, 2)
    assert cache.row(2) == first


def test_growth_reserves_from_its_own_parent_and_gives_the_reserve_up_first():
    cache = make(roots=12)
    cache.grow(0, 1)
    assert 0 < cache.counts().reserved <= 8
    rest = cache.free_blocks()
    assert cache.grow(1, 60) == 0
    assert cache.grow(2, rest - 60) == 0
    assert cache.counts().reserved == 0
    assert cache.grow(0, 2) == 1


def test_limits_that_fall_below_what_is_held_stop_growth_until_it_is_back():
    cache = make()
    cache.grow(0, 5)
    cache.allocator.set_limit(Kind.KV, 3)
    assert cache.grow(1, 1) == 3
    cache.shrink(0, 2)
    assert cache.grow(1, 1) == 0
    assert cache.grow(1, 2) == 1


def test_decode_growth_names_the_slots_without_room():
    cache = make(roots=1)
    blocks = cache.free_blocks()
    for slot in range(2):
        assert cache.grow(slot, blocks // 2) == 0
    left = cache.free_blocks()
    totals = [cache.held[0] + left, cache.held[1] + 1]
    assert cache.grow_many([0, 1], totals) == [1]
    assert cache.held[:2] == [totals[0], blocks // 2]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("groups", ["one", "same", "different"])
def test_growing_together_gives_what_growing_in_turn_gives(groups, caching):
    """As many blocks for everybody, from as many parents, and nothing lost when all is over."""
    together, in_turn = (make(groups, roots=100, prefix_caching=caching) for _ in range(2))
    for blocks in range(1, 30):
        assert together.grow_many(range(6), [blocks] * 6) == []
        for slot in range(6):
            assert in_turn.grow(slot, blocks) == 0
        together.check()
        assert together.held == in_turn.held
        parents = [[c.allocator.parents(cls) for cls in c._each] for c in (together, in_turn)]
        assert parents[0] == parents[1]
    for slot in range(6):
        together.release(slot)
    together.allocator.check()
    assert together.allocator.whole_free() == 100


def test_misuse_is_refused_and_changes_nothing():
    cache = make()
    keys = keys_of(list(range(8)))
    cache.admit(0, keys, 0)
    cache.grow(0, 2)
    with pytest.raises(ValueError, match="taken"):
        cache.admit(0, keys, 0)
    with pytest.raises(KeyError):
        cache.admit(1, keys, 2)
    with pytest.raises(ValueError, match="row of 64"):
        cache.grow(0, 65)
    with pytest.raises(ValueError, match="cannot publish"):
        cache.commit(0, keys, 3)
    cache.commit(0, keys, 2)
    with pytest.raises(ValueError, match="are published"):
        cache.shrink(0, 1)
    cache.check()
    assert cache.counts().used == 2


def test_freed_pages_are_told_for_poisoning():
    cache = make()
    cache.grow(0, 3)
    pages = cache.row(0)
    cache.freed()
    cache.release(0)
    assert {p for _, p in cache.freed()} >= set(pages)
    assert cache.freed() == []


def test_compaction_leaves_one_partly_used_parent_and_moves_the_tables_with_it():
    written = {}

    class Tables:
        def stage_blocks(self, slot, block, pages):
            for i, page in enumerate(pages):
                written[0, slot, block + i] = page

    cache = make(roots=8, tables=Tables(), reserve_blocks=0)
    cls = next(iter(cache._each))
    for step in range(1, 9):
        for slot in range(6):
            cache.grow(slot, step)
    for slot in (0, 2, 4):
        cache.release(slot)
    whole = cache.allocator.whole_free()
    moves = cache.compact(most=1 << 40)
    assert moves
    assert cache.allocator.whole_free() > whole
    assert len(cache.allocator.open_parents(cls)) <= 1
    for slot in (1, 3, 5):
        assert cache.row(slot) == [written[0, slot, i] for i in range(8)]
    cache.check()
    assert cache.compact() == []


def test_moving_over_cached_blocks_parts_them_from_those_in_use():
    cache = make(roots=8, reserve_blocks=0)
    cls = next(iter(cache._each))
    for step in range(1, 9):
        for slot in range(6):
            cache.grow(slot, step)
    for slot in range(6):
        cache.commit(slot, keys_of([slot] * 32), 8)
    for slot in (0, 2, 4):
        cache.release(slot)
    moves = cache.compact(most=1 << 40, over_cached=True)
    spare = {cache.allocator.parent_of(cls, page) for page in cache.spare_pages(cls)}
    used = {cache.allocator.parent_of(cls, page) for slot in (1, 3, 5) for page in cache.row(slot)}
    assert moves
    assert len(spare & used) <= 1
    assert 24 - len(moves) <= cache.evictable_blocks() < 24
    cache.check()


def test_moving_over_cached_blocks_leaves_the_others_where_they_are():
    """A block's pages may lie in two parents, one of them among cached blocks alone."""
    attention = (AttentionKind("full", (1, 3), 16384), AttentionKind("sliding", (0, 2), 16384))
    plan = plan_geometry(PoolSpec(attention, expert_bytes=3 * 128 << 10))
    classes = [g.page_class for g in plan.groups_of(Kind.KV)]
    assert plan.classes[classes[0]].per_parent == 3
    rng = random.Random(0)
    moved = 0
    for _ in range(60):
        cache = KVCache(Allocator(plan, plan.huge_bytes * 24), classes, 4, 4, 64, reserve_blocks=0)
        for turn in range(12):
            slot = turn % 4
            cache.release(slot)
            keys = keys_of([turn] * 4 * (blocks := rng.randrange(1, 4)))
            cache.admit(slot, keys, 0)
            assert cache.grow(slot, blocks) == 0
            cache.commit(slot, keys, rng.randrange(blocks + 1))
            if rng.random() < 0.5:
                moved += len(cache.compact(over_cached=True))
            cache.check()
    assert moved


def test_pinned_pages_stay_and_their_parents_take_others_in():
    cache = make(roots=8, reserve_blocks=0)
    for step in range(1, 9):
        for slot in range(6):
            cache.grow(slot, step)
    for slot in range(1, 6):
        cache.release(slot)
    stays = set(cache.row(0)[:2])
    moves = cache.compact(1 << 40, lambda cls, page: page in stays)
    assert not stays & {m.source for m in moves}
    assert set(cache.row(0)) >= stays


def test_eviction_by_parent_forgets_the_cheapest_tails():
    cache = make(roots=8, reserve_blocks=0)
    cls = next(iter(cache._each))
    per = cache.allocator.geometry.classes[cls].per_parent
    long, short = keys_of(list(range(12 * per))), keys_of(list(range(1000, 1000 + 4 * per)))
    for slot, keys in ((0, long), (1, short)):
        cache.admit(slot, keys, 0)
        cache.grow(slot, len(keys))
        cache.commit(slot, keys, len(keys))
        cache.release(slot)
    assert cache.evict_parents(1) == 1
    assert cache.match(long) == 2 * per, "the last parent of the long prefix was cheapest and oldest"
    assert cache.match(short) == per
    assert cache.evict_parents(100) == 3
    assert cache.cached_blocks() == 0
