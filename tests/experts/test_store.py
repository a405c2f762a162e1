import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rimuru.errors import MemoryPlanError
from rimuru.experts.store import ExpertStore, copy_now, lendable_within
from rimuru.kernels import reference
from rimuru.kernels.types import EXPERT_ADDRESS, EXPERT_HOST, ExpertLayout
from rimuru.pool.allocator import Allocator
from rimuru.pool.arena import Arena
from rimuru.pool.geometry import AttentionKind, Kind, PoolSpec, plan_geometry
from rimuru.pool.tables import Table

LAYERS, EXPERTS = 3, 4
LAYOUT = ExpertLayout(hidden=48, intermediate=40, dtype=torch.float32)


class House:
    """A pool of `pages` expert pages with KV as the other tenant, and a loaded store."""

    def __init__(self, pages: int, lendable: int, resident: int, load: bool = True, **options):
        kv = AttentionKind("kv", (0, 1), bytes_per_token_per_layer=256, block_tokens=8)
        geometry = plan_geometry(PoolSpec(attention=(kv,), expert_bytes=LAYOUT.page_bytes))
        self.expert_class, self.kv_class = geometry.class_of(Kind.EXPERT), geometry.class_of(Kind.KV)
        self.kv_bytes = geometry.classes[self.kv_class].payload_bytes
        per_root = max(1, geometry.classes[self.expert_class].per_parent)
        size = -(-pages // per_root) * geometry.huge_bytes
        self.allocator = Allocator(geometry, size)
        self.arena = Arena(size)
        self.pages = self.allocator.obtainable(self.expert_class)
        self.table = Table((LAYERS, EXPERTS), torch.int64)
        self.store = ExpertStore(
            LAYOUT, LAYERS, EXPERTS, allocator=self.allocator, page_class=self.expert_class,
            arena=self.arena, table=self.table, lendable=lendable, resident=resident,
            **{"poison": True} | options,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        self.weights = {
            (layer, expert): (
                torch.randn(2 * LAYOUT.intermediate, LAYOUT.hidden, generator=generator),
                torch.randn(LAYOUT.hidden, LAYOUT.intermediate, generator=generator),
            )
            for layer in range(LAYERS)
            for expert in range(EXPERTS)
        }
        if load:
            for (layer, expert), weights in self.weights.items():
                for to, source in zip(self.store.sink(layer, expert), weights, strict=True):
                    to.copy_(source)

    def at(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The expert as a kernel finds it, through the device's table."""
        self.table.flush(reference.apply_edits)
        base = int(self.table.device_table[layer, expert]) & EXPERT_ADDRESS
        return (
            reference.tensor_at(base, (2 * LAYOUT.intermediate, LAYOUT.hidden), LAYOUT.dtype),
            reference.tensor_at(
                base + LAYOUT.down_offset, (LAYOUT.hidden, LAYOUT.intermediate), LAYOUT.dtype
            ),
        )

    def in_host(self, layer: int, expert: int) -> bool:
        self.table.flush(reference.apply_edits)
        return bool(int(self.table.device_table[layer, expert]) & EXPERT_HOST)

    def check(self) -> None:
        self.store.check()
        self.allocator.check()
        for x, weights in self.weights.items():
            assert self.in_host(*x) == (not self.store.resident[x])
            assert all(torch.equal(a, b) for a, b in zip(self.at(*x), weights, strict=True))


class Later:
    """A copy that is done, bytes and all, only when it is told so."""

    def __init__(self):
        self.open: list[tuple[list, Later.Event]] = []

    class Event:
        done = False

        def query(self) -> bool:
            return self.done

    def __call__(self, pairs):
        self.open.append((list(pairs), self.Event()))
        return self.open[-1][1]

    def finish(self) -> None:
        for pairs, event in self.open:
            copy_now(pairs)
            event.done = True
        self.open.clear()


@pytest.mark.parametrize(("lendable", "resident"), [(12, 0), (12, 5), (12, 12), (7, 5), (7, 9), (0, 12)])
def test_every_expert_is_found_through_the_table_with_its_weights(lendable, resident):
    house = House(12, lendable, resident)
    assert house.store.fill_initial() == resident
    assert house.store.resident.sum() == resident
    assert house.store.lendable.sum() == lendable
    house.check()


def test_only_lendable_experts_have_host_copies_and_they_spread_over_layers():
    house = House(12, 7, 5)
    assert house.store.host_bytes == 7 * LAYOUT.page_bytes
    assert sorted(house.store.lendable.sum(1).tolist()) == [2, 2, 3]
    assert House(12, 0, 12).store.host_bytes == 0


def test_initial_experts_spread_over_layers_unless_an_order_is_given():
    house = House(12, 12, 6)
    house.store.fill_initial()
    assert house.store.resident.sum(1).tolist() == [2, 2, 2]
    house = House(12, 12, 0)
    assert house.store.fill_initial([(2, 3), (0, 1), (1, 1)], pages=2) == 2
    assert house.store.resident[2, 3]
    assert house.store.resident[0, 1]


def test_promotion_stops_where_the_pool_ends_and_says_what_came():
    house = House(4, 12, 0)
    asked = [(0, 0), (0, 1), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    came = house.store.promote(asked)
    assert came == list(dict.fromkeys(asked))[: house.pages]
    assert house.store.promote([(2, 3)]) == []
    house.check()


def test_the_first_asked_get_pages_and_the_first_layers_are_copied_first():
    later = Later()
    house = House(4, 12, 0, copy=later)
    asked = [(2, 0), (0, 3), (1, 1), (0, 2), (2, 1), (1, 3), (0, 0), (0, 1), (1, 0)]
    came = house.store.promote(asked)
    assert came == asked[: house.pages]
    ((arrivals, _),) = later.open
    hosts = [house.store.host_page(*x).data_ptr() for x in sorted(came)]
    assert [a.source.data_ptr() for a in arrivals] == hosts
    assert [a.cell.data_ptr() for a in arrivals] == [
        house.table.device_table[x].data_ptr() for x in sorted(came)
    ]


def test_a_demoted_page_serves_kv_and_the_expert_is_read_from_host_memory():
    house = House(2, 12, 0)
    came = house.store.promote([(0, 0), (0, 1), (0, 2), (0, 3)])
    assert house.allocator.obtainable(house.kv_class) == 0
    house.store.demote(came)
    pages = house.allocator.take(house.kv_class, house.allocator.obtainable(house.kv_class), "request")
    for page in pages:
        house.arena.page(page, house.allocator.geometry.grain, house.kv_bytes).fill_(7)
    house.check()


def test_what_cannot_be_demoted_is_refused_and_nothing_changes():
    house = House(12, 7, 8)
    house.store.fill_initial()
    stays = next(x for x in house.weights if not house.store.lendable[x])
    away = next(x for x in house.weights if not house.store.resident[x])
    here = next(x for x in house.weights if house.store.resident[x] and house.store.lendable[x])
    before = house.store.resident.copy()
    for bad in (stays, away):
        with pytest.raises(ValueError, match=f"expert {bad[1]} of MoE layer {bad[0]} cannot be demoted"):
            house.store.demote([here, bad])
    assert np.array_equal(house.store.resident, before)
    house.check()


def test_pages_of_a_step_in_flight_stay_until_its_event():
    house = House(3, 12, 3)
    house.store.fill_initial()
    free = house.allocator.obtainable(house.expert_class)
    event = Later.Event()
    gone = [x for x in house.weights if house.store.resident[x]][:2]
    old = [house.at(*x)[0] for x in gone]
    house.store.demote(gone, until=event)
    assert all(house.in_host(*x) for x in gone)
    house.store.poll()
    assert house.store.leaving_pages == 2
    assert house.allocator.obtainable(house.expert_class) == free
    assert all(torch.equal(t, house.weights[x][0]) for t, x in zip(old, gone, strict=True))
    event.done = True
    house.store.poll()
    assert house.store.leaving_pages == 0
    assert house.allocator.obtainable(house.expert_class) == free + 2
    house.check()


def test_a_slow_copy_is_read_from_host_memory_until_it_has_arrived():
    later = Later()
    house = House(4, 12, 0, copy=later)
    assert house.store.promote([(1, 2), (0, 3)]) == [(1, 2), (0, 3)]
    assert house.store.promote([(1, 2)]) == []
    house.store.poll()
    assert house.store.in_flight.sum() == 2
    assert not house.store.resident.any()
    house.check()
    later.finish()
    house.store.poll()
    assert house.store.resident[1, 2]
    assert house.store.resident[0, 3]
    assert not house.store.in_flight.any()
    house.check()


def test_a_pool_without_a_page_for_an_expert_that_must_stay_says_so():
    house = House(2, 0, 12, load=False)
    every = list(house.weights)
    for x in every[: house.pages]:
        house.store.sink(*x)
    with pytest.raises(MemoryError, match="no page left in the pool for expert"):
        house.store.sink(*every[house.pages])
    with pytest.raises(ValueError, match="4 to 12 can"):
        House(12, 8, 3)


def test_the_first_experts_are_resident_at_once_however_copies_are_made():
    house = House(6, 12, 6, copy=Later())
    assert house.store.fill_initial() == 6
    assert house.store.resident.sum() == 6
    assert house.store.arriving == 0
    house.check()


def test_what_the_machine_does_not_page_lock_stays_on_the_device_and_is_told(caplog):
    size = 1000
    assert lendable_within(10_000, size, lendable=10, total=12, resident=5) == 10
    assert not caplog.records
    assert lendable_within(8_500, size, lendable=10, total=12, resident=5) == 8
    assert "page-locks 8,500 of 10,000 bytes of host memory for experts" in caplog.text
    assert "so 4 of 12 experts must stay on the device" in caplog.text
    with pytest.raises(MemoryPlanError, match=r"6 of 12 experts must .*, where 5 .* by 1,000 bytes"):
        lendable_within(6_999, size, lendable=10, total=12, resident=5)
    with pytest.raises(MemoryPlanError, match=r"12 of 12 experts must .*\(ulimit -l"):
        lendable_within(0, size, lendable=10, total=12, resident=5)


def test_moe_output_does_not_depend_on_where_experts_lie():
    house = House(6, 12, 0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, LAYOUT.hidden, generator=generator)
    weights, ids = reference.route(torch.randn(9, EXPERTS, generator=generator), 2, False)
    outputs = []
    for change in ((), ("promote", [(0, 0), (0, 2)]), ("promote", [(0, 1)]), ("demote", [(0, 2), (0, 0)])):
        if change:
            getattr(house.store, change[0])(change[1])
        house.table.flush(reference.apply_edits)
        outputs.append(reference.moe(x, ids, weights, house.table.device_table[0], LAYOUT))
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


class Churn(RuleBasedStateMachine):
    """Promotions, demotions and KV traffic in any order; every expert keeps its weights."""

    @initialize(lendable=st.integers(4, 12), pages=st.integers(9, 12), slow=st.booleans())
    def begin(self, lendable, pages, slow):
        self.later = Later() if slow else None
        resident = 12 - lendable
        options = {"copy": self.later} if slow else {}
        self.house = House(pages, lendable, resident, **options)
        self.kv: list[int] = []
        self.events: list[Later.Event] = []

    def some(self, seed: int, mask: np.ndarray) -> list[tuple[int, int]]:
        every = list(zip(*(i.tolist() for i in np.nonzero(mask)), strict=True))
        rng = np.random.default_rng(seed)
        return [every[i] for i in rng.permutation(len(every))[: rng.integers(0, 5)]]

    @rule(seed=st.integers(0, 2**32 - 1))
    def promote(self, seed):
        store = self.house.store
        free = self.house.allocator.obtainable(self.house.expert_class)
        asked = self.some(seed, ~store.resident & ~store.in_flight)
        assert store.promote(asked) == asked[:free]

    @rule(seed=st.integers(0, 2**32 - 1), waits=st.booleans())
    def demote(self, seed, waits):
        store = self.house.store
        event = Later.Event() if waits else None
        store.demote(self.some(seed, store.resident & store.lendable), until=event)
        if event:
            self.events.append(event)

    @rule(n=st.integers(1, 20))
    def kv_takes(self, n):
        allocator = self.house.allocator
        pages = allocator.take(self.house.kv_class, min(n, allocator.obtainable(self.house.kv_class)), "kv")
        for page in pages:
            self.house.arena.page(page, allocator.geometry.grain, self.house.kv_bytes).fill_(255)
        self.kv += pages

    @rule(n=st.integers(1, 20))
    def kv_gives(self, n):
        back, self.kv = self.kv[:n], self.kv[n:]
        self.house.allocator.give(self.house.kv_class, back, "kv")

    @rule()
    def time_passes(self):
        for event in self.events:
            event.done = True
        if self.later:
            self.later.finish()
        self.house.store.poll()
        self.events.clear()
        assert not self.house.store.in_flight.any()
        assert self.house.store.leaving_pages == 0

    @invariant()
    def every_expert_is_whole(self):
        if hasattr(self, "house"):
            self.house.check()


TestChurn = Churn.TestCase
TestChurn.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
