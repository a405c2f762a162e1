"""State sets and checkpoints: who owns which page, what a hit may start from, what is forgotten first."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rimuru.cache import KVCache, StateCache
from rimuru.models.config import load_model_config
from rimuru.pool import (
    Allocator,
    AttentionKind,
    CorruptPoolError,
    Kind,
    PoolSpec,
    RecurrentKind,
    plan_geometry,
)

KIB = 1 << 10
# A set is 3 STATE pages and 2 CONV pages; an expert's page holds two of the former or six of the latter.
GEOMETRY = plan_geometry(
    PoolSpec(
        attention=(AttentionKind("kv", (3,), 2 * KIB, 16),), expert_bytes=192 * KIB,
        state=RecurrentKind(tuple(range(3)), 96 * KIB), conv=RecurrentKind(tuple(range(2)), 32 * KIB),
    )
)  # fmt: skip
GROUPS = [g for kind in (Kind.STATE, Kind.CONV) for g in GEOMETRY.groups_of(kind)]
CLASSES = [g.page_class for g in GROUPS]


class Bytes:
    """The pool's contents as a model: what was last written to each page."""

    def __init__(self):
        self.at: dict[tuple[int, int], object] = {}

    def copy(self, cls, source, target):
        assert not set(source) & set(target)
        for a, b in zip(source, target, strict=True):
            self.at[cls, b] = self.at.get((cls, a))

    def write(self, pages, value):
        self.at |= dict.fromkeys(zip(CLASSES, pages, strict=True), value)

    def read(self, pages):
        (value,) = {self.at.get((cls, page)) for cls, page in zip(CLASSES, pages, strict=True)}
        return value


class Cells:
    def __init__(self):
        self.cells: dict[int, int] = {}

    def stage(self, index, value):
        self.cells[index] = value


def make(sets: int, slots: int = 4):
    """A cache over a pool that holds exactly `sets` sets, and what it writes to."""
    roots = 1
    while Allocator(GEOMETRY, roots * GEOMETRY.huge_bytes).obtainable_together(
        {cls: CLASSES.count(cls) for cls in CLASSES}
    ) < sets:  # fmt: skip
        roots += 1
    allocator, contents, cells = Allocator(GEOMETRY, roots * GEOMETRY.huge_bytes), Bytes(), Cells()
    states = StateCache(allocator, CLASSES, slots, cells, contents.copy, track_freed=True)
    n = 0
    while states.acquire(n % slots):  # what is left over goes to an owner that keeps it
        states._slots[n % slots], n = None, n + 1
    spare = n - sets
    for cls in set(CLASSES):
        allocator.give_all(cls, "states")
        if spare:
            allocator.take(cls, spare * CLASSES.count(cls), "somebody else")
    return states, allocator, contents, cells


def keys(name: str, n: int) -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(n)]


def test_a_set_is_all_or_nothing_and_its_pages_stand_in_the_table():
    states, allocator, _, cells = make(2)
    assert states.acquire(0)
    assert states.acquire(3)
    free = [allocator.obtainable(cls) for cls in CLASSES]
    assert not states.acquire(1)
    assert not states.can_save()
    assert [allocator.obtainable(cls) for cls in CLASSES] == free
    for group in range(len(GROUPS)):
        for slot in (0, 3):
            assert cells.cells[group * 4 + slot] == states.pages(slot)[group]
    with pytest.raises(ValueError, match="slot 0 has a state already"):
        states.acquire(0)
    states.release(0)
    assert states.acquire(1)
    states.check()


def test_a_checkpoint_keeps_the_state_while_the_slot_moves_on():
    states, _, contents, _ = make(3)
    states.acquire(0)
    contents.write(states.pages(0), "after 4")
    assert states.save(0, keys("a", 4))
    contents.write(states.pages(0), "after 5")
    states.acquire(1)
    states.resume(1, b"a3")
    assert contents.read(states.pages(1)) == "after 4"
    assert states.match(keys("a", 6)) == 4
    assert states.match(keys("a", 3)) == 0
    states.check()


def test_without_a_set_of_its_own_a_slot_takes_the_checkpoints_pages():
    states, _, contents, cells = make(2)
    states.acquire(0)
    contents.write(states.pages(0), "x")
    states.save(0, keys("a", 2))
    assert not states.acquire(1)
    states.resume(1, b"a1")
    assert contents.read(states.pages(1)) == "x"
    assert cells.cells[1] == states.pages(1)[0]
    assert states.checkpoints == 0
    with pytest.raises(KeyError):
        states.resume(2, b"a1")
    states.check()


def test_a_full_pool_gives_the_least_worthy_checkpoints_pages_to_a_new_one():
    states, _, contents, _ = make(3)
    states.acquire(0)
    states.save(0, keys("short", 2))
    states.save(0, keys("long", 9))
    contents.write(states.pages(0), "new")
    assert states.can_save()
    assert states.save(0, keys("other", 3))
    assert states.match(keys("short", 2)) == 0
    assert states.match(keys("long", 9)) == 9
    assert not states.save(0, keys("brief", 1)), "one block is worth less than either that is there"
    assert not states.save(0, keys("other", 3)), "it is there already"
    states.check()


def test_least_recently_used_goes_first_among_equals_and_a_long_one_ages_too():
    states, _, _, _ = make(4)
    states.acquire(0)
    for name in "abc":
        states.save(0, keys(name, 2))
    states.save(0, keys("d", 2))
    assert [states.match(keys(name, 2)) for name in "abcd"] == [0, 2, 2, 2]
    long, rounds = keys("long", 12), 0
    assert states.save(0, long)
    while states.match(long):
        rounds += 1
        states.save(0, keys(f"fresh{rounds}-", 2))
    assert 1 < rounds < 30
    states.check()


def test_what_is_held_is_not_evicted_and_what_no_hit_can_reach_goes_first():
    states, _, _, _ = make(4)
    states.acquire(0)
    for name in "abc":
        states.save(0, keys(name, 2))
    states.hold(b"a1")
    assert states.drop(lambda key: key == b"c1") == 1
    assert states.evict(5) == 1
    assert states.match(keys("a", 2)) == 2
    states.let_go(b"a1")
    assert states.evict(5) == 1
    assert states.checkpoints == 0
    states.check()


def test_states_that_lie_apart_are_moved_together_and_stay_what_they_were():
    states, allocator, contents, cells = make(8, slots=8)
    for slot in range(8):
        states.acquire(slot)
        contents.write(states.pages(slot), f"state {slot}")
    states.save(7, keys("kept", 2))
    for slot in (0, 2, 3, 5, 7):
        states.release(slot)
    before = sum(map(allocator.parents, set(CLASSES)))
    states.freed()
    moved = states.compact(1 << 40)
    assert moved
    assert sum(map(allocator.parents, set(CLASSES))) < before
    for cls, page in states.freed():
        contents.at[cls, page] = "poison"
    for slot in (1, 4, 6):
        assert contents.read(states.pages(slot)) == f"state {slot}"
        for group, page in enumerate(states.pages(slot)):
            assert cells.cells[group * 8 + slot] == page
    assert states.compact(1 << 40) == {}
    states.check()
    allocator.check()


def test_a_page_in_two_states_is_found():
    states, _, _, _ = make(2)
    states.acquire(0)
    states._slots[1] = states.pages(0)
    with pytest.raises(CorruptPoolError, match="two states"):
        states.check()


def test_states_need_groups_and_a_state_to_save():
    allocator = Allocator(GEOMETRY, GEOMETRY.huge_bytes * 8)
    with pytest.raises(ValueError, match="a layer group and a slot"):
        StateCache(allocator, [], 1)
    states = StateCache(allocator, CLASSES, 1)
    with pytest.raises(ValueError, match="no state to save"):
        states.save(0, keys("a", 1))


@pytest.mark.parametrize("name", ["Qwen3-Next-80B-A3B-Instruct", "Qwen3.5-35B-A3B", "Qwen3.5-122B-A10B"])
def test_a_prompt_of_twelve_tokens_holds_its_state_and_one_block_a_group(name, shared_file):
    from rimuru.engine.plan import state_groups
    from rimuru.engine.sizes import pool_spec

    model = load_model_config(shared_file(f"data/models/{name}"))
    geometry = plan_geometry(pool_spec(model, 16, 2))
    allocator = Allocator(geometry, geometry.huge_bytes * 400)
    kv_groups, own = geometry.groups_of(Kind.KV), state_groups(geometry)
    cache = KVCache(allocator, [g.page_class for g in kv_groups], 16, 4, 64)
    states = StateCache(allocator, [g.page_class for g in own], 4)
    assert states.acquire(0)
    assert cache.grow(0, 1) == 0
    cache.take_back_reserved()
    r = model.recurrent
    state = len(r.layers) * (r.state_bytes + r.conv_elements * 2)
    block = model.attention_layers * 16 * model.kv_bytes_per_token_per_layer("bfloat16")
    used = sum(allocator.used(i) * c.page_bytes for i, c in enumerate(geometry.classes) if c.kind is not None)
    assert used <= 1.02 * state + block * 1.02
    assert allocator.counts(Kind.KV).used == len(kv_groups)


class Requests(RuleBasedStateMachine):
    """Against a model: each slot's state is the text of what it computed, a checkpoint's that of its keys."""

    def __init__(self):
        super().__init__()
        self.states, self.allocator, self.contents, _ = make(5, slots=4)
        self.texts: dict[int, list[bytes]] = {}

    def poison(self):
        """What was given back may hold anything; done before pages are filled, as the engine does."""
        for cls, page in self.states.freed():
            self.contents.at[cls, page] = "poison"

    @rule(slot=st.integers(0, 3), name=st.sampled_from("ab"), n=st.integers(1, 6))
    def start(self, slot, name, n):
        if slot in self.texts:
            return
        wanted = keys(name, n)
        hit = self.states.match(wanted)
        if hit:
            self.states.hold(wanted[hit - 1])
        owns = self.states.acquire(slot)
        if not owns and not hit and self.states.evict(1):
            owns = self.states.acquire(slot)
        if hit:
            self.states.let_go(wanted[hit - 1])
            self.poison()
            self.states.resume(slot, wanted[hit - 1])
            assert self.contents.read(self.states.pages(slot)) == tuple(wanted[:hit])
        elif not owns:
            assert self.states.active + self.states.checkpoints >= 5
            return
        self.poison()
        self.texts[slot] = wanted
        self.contents.write(self.states.pages(slot), tuple(wanted))

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def save(self, data):
        slot = data.draw(st.sampled_from(sorted(self.texts)))
        before = self.states.match(self.texts[slot]) == len(self.texts[slot])
        self.poison()
        if self.states.save(slot, self.texts[slot]):
            assert not before
            assert self.states.match(self.texts[slot]) == len(self.texts[slot])

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def stop(self, data):
        slot = data.draw(st.sampled_from(sorted(self.texts)))
        del self.texts[slot]
        self.states.release(slot)

    @rule(most=st.sampled_from([200 * KIB, 1 << 40]), parents=st.sampled_from([None, 1]))
    def compact(self, most, parents):
        self.poison()
        cut = {cls: self.allocator.parents(cls) for cls in set(CLASSES)}
        moved = self.states.compact(most, parents)
        for cls in cut:
            assert moved.get(cls, 0) * GEOMETRY.classes[cls].page_bytes <= most
            freed = cut[cls] - self.allocator.parents(cls)
            assert freed <= (parents or freed)
            if parents is None and most == 1 << 40:
                assert len(self.allocator.open_parents(cls)) <= 1

    @rule(n=st.integers(1, 3))
    def evict(self, n):
        there = self.states.checkpoints
        assert self.states.evict(n) == min(n, there)

    @invariant()
    def every_state_is_its_own(self):
        self.states.check()
        self.allocator.check()
        for slot, text in self.texts.items():
            assert self.contents.read(self.states.pages(slot)) == tuple(text)


TestRequests = Requests.TestCase
TestRequests.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
