import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.streaming import EXPERTS, LAYERS, LAYOUT, MANY, House

from rimuru.experts.side_copy import SideStreamCopy
from rimuru.experts.stream import PASSES, plan_ring, worth_streaming
from rimuru.kernels import reference
from rimuru.kernels.types import EXPERT_HOST
from rimuru.pool.allocator import Shortage


class TwoStreams:
    """A compute stream and a copy stream that run when told to, in any interleaving their waits allow.

    `launch(work)` puts work on the compute stream. Waits are bound when they are asked for, as CUDA's are.
    """

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.compute, self.copies = [], []  # (work, what must have been done before)
        self.done = set()
        self.counter = 0
        self.blocked = {"compute": set(), "copies": set()}  # by the next work of each queue

    def _put(self, name, queue, work):
        self.counter += 1
        queue.append((self.counter, work, self.blocked[name]))
        self.blocked[name] = set()

    def launch(self, work):
        self._put("compute", self.compute, work)

    def fence(self):
        self._put("compute", self.compute, lambda: None)
        self.blocked["copies"] = self.blocked["copies"] | {self.counter}

    def copy(self, pairs):
        for to, source in pairs:
            for half in zip(to.chunk(2), source.chunk(2), strict=True):  # a copy is seen half done
                self._put("copies", self.copies, lambda half=half: half[0].copy_(half[1]))

    def mark(self):
        self._put("copies", self.copies, lambda: None)
        return self.counter

    def wait(self, mark):
        self.blocked["compute"] = self.blocked["compute"] | {mark}

    def run(self, most: int = 1 << 30):
        """Everything that was asked for, or some of it; a wait that can never end fails."""
        queues = [self.compute, self.copies]
        eager = self.random.random()  # how much one stream runs ahead of the other
        while any(queues) and most:
            most -= 1
            able = [q for q in queues if q and q[0][2] <= self.done]
            assert able, "each stream waits for the other"
            queue = able[0] if self.random.random() < eager else able[-1]
            number, work, _ = queue.pop(0)
            work()
            self.done.add(number)


class PromotionLane:
    """The copy stream of a `TwoStreams` as promotions use it."""

    def __init__(self, streams: TwoStreams):
        self.streams = streams

    def launched(self) -> int:
        self.streams.launch(lambda: None)
        return self.streams.counter

    def copy(self, arrival, after: int):
        streams = self.streams
        streams.blocked["copies"] = streams.blocked["copies"] | {after}
        streams.copy([(arrival.to, arrival.source)])
        streams._put("copies", streams.copies, lambda: arrival.cell.fill_(arrival.entry))
        mark = streams.mark()
        return SimpleNamespace(query=lambda: mark in streams.done)


def read(house: House, layer: int, row: list[int]) -> None:
    """What one pass of a MoE layer does to its experts: it finds each one's own bytes, wherever it lies."""
    for expert, entry in enumerate(row):
        if entry:
            assert torch.equal(house.bytes_at(entry), house.store.host_page(layer, expert)), (
                f"expert {expert} of layer {layer} is not itself"
            )


def check_whole(page: torch.Tensor) -> None:
    assert (page == 0xEE).all(), "a copy came late"


def run(house: House, passes, launch=lambda work: work(), layers: int = LAYERS) -> np.ndarray:
    """The step's first layers; whether each expert was read from the pool, bool `[layers, experts]`."""
    in_pool = np.zeros((LAYERS, EXPERTS), bool)
    for layer in range(layers):
        seen = []
        for row in passes[layer]:
            entries = row.tolist()
            seen += [e for e, entry in enumerate(entries) if entry]
            in_pool[layer] |= [entry != 0 and not entry & EXPERT_HOST for entry in entries]
            launch(lambda layer=layer, entries=entries: read(house, layer, entries))
        assert sorted(seen) == list(range(EXPERTS)), "each expert is in one pass"
    return in_pool


@settings(max_examples=50)
@given(
    missing=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=6),
    slots=st.integers(0, 40),
)
def test_a_slot_is_written_again_only_when_the_pass_that_reads_it_has_run(missing, slots):
    missing = np.array(missing)
    ring = plan_ring(missing, slots)
    reader = {}  # slot -> the pass that reads what was copied there last
    for at, (layer, turn, slot) in enumerate(zip(ring.layer, ring.turn, ring.slot, strict=True)):
        assert 0 <= slot < slots
        assert layer * PASSES <= turn < layer * PASSES + ring.passes[layer]
        assert at < ring.ends[turn]
        assert at < ring.released[turn], "a pass would wait for a copy that only it releases"
        last = reader.get(slot, -1)
        assert last < turn
        assert at >= ring.released[max(0, last)] or last < 0, "released before its slot was read"
        assert at < ring.released[last + 1], "held back for longer than its slot is in use"
        reader[slot] = turn
    assert ring.released[-1] == ring.ends[-1] == len(ring.layer)
    assert not len(ring.turn) or np.bincount(ring.turn).max() <= max(slots // 2, 1)
    streamed = np.zeros_like(missing)
    streamed[ring.layer, ring.expert] = True
    assert streamed.sum() == len(ring.layer)
    assert np.array_equal(streamed, missing if slots else np.zeros_like(missing))


def test_a_layer_never_takes_more_passes_than_are_worth_their_launches():
    ring = plan_ring(np.ones((1, 4 * PASSES), bool), 2)
    assert ring.passes.tolist() == [PASSES]
    assert ring.expert.tolist() == list(range(2 * PASSES))


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**16), resident=st.integers(0, LAYERS * EXPERTS), free=st.integers(0, 14),
    reserve=st.integers(0, 3),
    steps=st.lists(st.integers(0, LAYERS), min_size=1, max_size=3),
)  # fmt: skip
def test_every_layer_finds_its_experts_whatever_runs_ahead_of_what(seed, resident, free, reserve, steps):
    streams = TwoStreams(seed)
    house = House(resident, free, seed=1, copies=streams, reserve=reserve)
    before = house.allocator.obtainable(house.cls)
    for layers in steps:  # a step is given up after so many
        with house.stream.step(MANY) as passes:
            assert (passes is None) == (free + reserve == 0 or not house.missing.any())
            if passes is not None:
                assert run(house, passes, streams.launch, layers)[:layers].all()
        # Freed while the step is still on its way: the next owner writes behind it on the compute stream.
        pages = house.allocator.take(house.cls, before, "others")
        assert not isinstance(pages, Shortage)
        grain = house.allocator.geometry.grain
        theirs = [house.arena.page(page, grain, LAYOUT.page_bytes) for page in pages]
        for page in theirs:
            streams.launch(lambda page=page: page.fill_(0xEE))
        for page in theirs:
            streams.launch(lambda page=page: check_whole(page))
        house.allocator.give(house.cls, pages, "others")
    streams.run()
    house.check()


@settings(max_examples=25)
@given(seed=st.integers(0, 2**16), free=st.integers(0, 8), reserve=st.integers(0, 2))
def test_promotions_share_the_copy_stream_and_nobody_reads_a_page_half_written(seed, free, reserve):
    rng, streams = random.Random(seed), TwoStreams(seed)
    side = SideStreamCopy(PromotionLane(streams), ahead=2)
    house = House(8, free, promote=side, poison=False, copies=streams, reserve=reserve)
    store, every = house.store, list(np.ndindex(LAYERS, EXPERTS))
    for _ in range(12):
        house.table.flush(reference.apply_edits)
        with house.stream.step(rng.choice([1, MANY])) as passes:
            run(
                house,
                [[row] for row in house.table.device_table] if passes is None else passes,
                streams.launch,
            )
        streams.run(rng.randrange(60))
        store.poll()
        store.demote([x for x in every if store.resident[x] and rng.random() < 0.3])
        store.promote([x for x in every if rng.random() < 0.3])
        house.check()
    streams.run()
    while side.pending:
        store.poll()
        streams.run()
    store.poll()
    assert not store.in_flight.any()
    assert np.array_equal(store.resident, (house.table.mirror & EXPERT_HOST) == 0)


def test_every_missing_expert_passes_through_the_pool_and_residency_stays_as_it_was():
    house = House(resident=10, free=3)
    mirror, resident = house.table.mirror.copy(), house.store.resident.copy()
    with house.stream.step(MANY) as passes:
        assert run(house, passes).all()
    assert house.stream.streamed_experts == house.missing.sum()
    assert np.array_equal(house.table.mirror, mirror)
    assert np.array_equal(house.store.resident, resident)
    house.check()


def test_the_buffer_shrinks_to_what_is_free_and_to_nothing():
    house = House(resident=6, free=8)
    held = []
    for _ in range(9):
        with house.stream.step(MANY) as passes:
            if passes is None:
                assert not house.allocator.obtainable(house.cls)
                break
            assert house.allocator.held_by(house.cls, "prefill streaming") == 8 - len(held)
            run(house, passes)
        held += house.allocator.take(house.cls, 1, "request")
    assert len(held) == 8
    house.check()


def test_pages_of_its_own_serve_when_the_pool_has_none():
    house = House(resident=6, free=0, reserve=2)
    with house.stream.step(MANY) as passes:
        assert run(house, passes).all()
    house.check()


def test_a_step_that_fails_half_way_leaves_nothing_behind():
    house = House(resident=6, free=8)

    def launch(work):
        work()
        raise RuntimeError("cancelled")

    def step():
        with house.stream.step(MANY) as passes:
            run(house, passes, launch)

    with pytest.raises(RuntimeError, match="cancelled"):
        step()
    house.check()
    with house.stream.step(MANY) as passes:
        run(house, passes)
    house.check()


def test_small_steps_and_whole_residency_read_the_table_they_always_read():
    assert House(resident=6, free=8).stream.begin(2) is None
    assert House(resident=LAYERS * EXPERTS, free=8).stream.begin(MANY) is None


def test_streaming_pays_from_half_a_tile_of_rows_an_expert_on():
    assert not worth_streaming(1023, 8, 128)
    assert worth_streaming(1024, 8, 128)
    assert worth_streaming(960, 4, 60)
    assert not worth_streaming(959, 4, 60)
