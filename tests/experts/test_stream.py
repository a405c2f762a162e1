import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rimuru.experts.store import ExpertStore
from rimuru.experts.stream import ExpertStream, crossings, plan_ring, worth_streaming
from rimuru.kernels import backend_for, reference
from rimuru.kernels.types import EXPERT_ADDRESS, EXPERT_HOST, ExpertLayout
from rimuru.pool.allocator import Allocator, Shortage
from rimuru.pool.arena import Arena
from rimuru.pool.geometry import AttentionKind, Kind, PoolSpec, plan_geometry
from rimuru.pool.tables import Table

LAYERS, EXPERTS, TOP_K = 4, 6, 2
MANY = 200  # tokens that touch every expert for certain
LAYOUT = ExpertLayout(hidden=48, intermediate=32, dtype=torch.float32)


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

    def run(self):
        """Everything that was asked for; a wait that can never end fails."""
        queues = [self.compute, self.copies]
        eager = self.random.random()  # how much one stream runs ahead of the other
        while any(queues):
            able = [q for q in queues if q and q[0][2] <= self.done]
            assert able, "each stream waits for the other"
            queue = able[0] if self.random.random() < eager else able[-1]
            number, work, _ = queue.pop(0)
            work()
            self.done.add(number)


class House:
    """A pool with `free` expert pages beside the resident experts, a store, and a stream."""

    def __init__(self, resident: int, free: int, seed: int = 0, **options):
        kv = AttentionKind("kv", (0, 1), bytes_per_token_per_layer=256, block_tokens=8)
        geometry = plan_geometry(PoolSpec(attention=(kv,), expert_bytes=LAYOUT.page_bytes))
        cls = geometry.class_of(Kind.EXPERT)
        per_root = max(1, geometry.classes[cls].per_parent)
        self.allocator = Allocator(geometry, -(-max(1, resident + free) // per_root) * geometry.huge_bytes)
        self.cls = cls
        self.arena = Arena(self.allocator.roots * geometry.huge_bytes)
        self.table = Table((LAYERS, EXPERTS), torch.int64)
        self.store = ExpertStore(
            LAYOUT, LAYERS, EXPERTS, allocator=self.allocator, page_class=cls, arena=self.arena,
            table=self.table, lendable=LAYERS * EXPERTS, resident=resident, poison=True,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                for part in self.store.sink(layer, expert):
                    part.copy_(torch.randn(part.shape, generator=generator) / 7)
        # In any order, so that layers differ in how many of their experts are missing.
        shuffled = np.random.default_rng(seed).permutation(LAYERS * EXPERTS).tolist()
        self.store.fill_initial(divmod(i, EXPERTS) for i in shuffled)
        self.allocator.take(cls, self.allocator.obtainable(cls) - free, "others")
        self.table.flush(reference.apply_edits)
        self.stream = ExpertStream(
            LAYOUT, self.store.host_page, table=self.table, allocator=self.allocator, page_class=cls,
            arena=self.arena, top_k=TOP_K, poison=True, **options,
        )  # fmt: skip

    @property
    def missing(self) -> np.ndarray:
        return ~self.store.resident

    def bytes_at(self, entry: int) -> torch.Tensor:
        return reference.tensor_at(entry & EXPERT_ADDRESS, (LAYOUT.page_bytes,), torch.uint8)

    def check(self) -> None:
        self.stream.check()
        self.store.check()
        self.allocator.check()


def read_all(house: House, table: torch.Tensor, layer: int) -> None:
    """What a MoE layer does to its experts: it finds each one's own bytes, wherever it lies."""
    for expert in range(EXPERTS):
        assert torch.equal(house.bytes_at(int(table[layer, expert])), house.store.host_page(layer, expert)), (
            f"expert {expert} of layer {layer} is not itself"
        )


def check_whole(page: torch.Tensor) -> None:
    assert (page == 0xEE).all(), "a copy came late"


def run_layers(house: House, table: torch.Tensor, launch, layers: int = LAYERS) -> None:
    for layer in range(layers):
        house.stream.before(layer)
        launch(lambda layer=layer: read_all(house, table, layer))
        house.stream.after(layer)


@settings(max_examples=50)
@given(
    gain=st.lists(st.lists(st.integers(-1, 3), min_size=5, max_size=5), min_size=1, max_size=6),
    slots=st.integers(0, 40),
)
def test_a_slot_is_written_again_only_when_the_layer_that_reads_it_has_run(gain, slots):
    gain = np.array(gain, float)
    ring = plan_ring(gain, slots)
    reader = {}  # slot -> the layer that reads what was copied there last
    for at, (layer, slot, after) in enumerate(zip(ring.layer, ring.slot, ring.after, strict=True)):
        assert 0 <= slot < slots
        assert reader.get(slot, -1) <= after < layer
        assert at < ring.ends[layer]
        assert at < ring.released[layer], "a layer would wait for a copy that only it releases"
        reader[slot] = layer
    # No copy waits for more than it must: with as many slots as copies none waits at all.
    assert (ring.after[:slots] == -1).all()
    assert ring.released[-1] == ring.ends[-1] == len(ring.layer)
    for layer, row in enumerate(gain):
        taken = ring.expert[ring.layer == layer]
        assert len(set(taken.tolist())) == len(taken) == min(slots, np.count_nonzero(row > 0))
        left = np.delete(row, taken)
        assert not len(taken) or left.max(initial=-1) <= row[taken].min(), "the dearest are taken first"


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**16), resident=st.integers(0, LAYERS * EXPERTS), free=st.integers(0, 14),
    reserve=st.integers(0, 3),
    steps=st.lists(st.integers(0, LAYERS), min_size=1, max_size=3),
)  # fmt: skip
def test_every_layer_finds_its_experts_whatever_runs_ahead_of_what(seed, resident, free, reserve, steps):
    streams = TwoStreams(seed)
    reserve = min(reserve, free)
    house = House(resident, free, seed=1, copies=streams, reserve=reserve)
    poison = house.arena.poison
    house.arena.poison = lambda *a: streams.launch(lambda: poison(*a))  # on the compute stream
    before = house.allocator.obtainable(house.cls)
    for layers in steps:  # a step is given up after so many
        with house.stream.step(MANY) as table:
            assert (table is None) == (free == 0 or not house.missing.any())
            if table is not None:
                run_layers(house, table.clone(), streams.launch, layers)
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


def test_what_is_streamed_is_what_has_pages_and_residency_stays_as_it_was():
    house = House(resident=10, free=5)
    mirror, resident = house.table.mirror.copy(), house.store.resident.copy()
    with house.stream.step(MANY) as table:
        host = (table.numpy() & EXPERT_HOST) != 0
        streamed = house.missing & ~host
        assert streamed.sum(1).tolist() == np.minimum(house.missing.sum(1), 5).tolist()
        assert (host & ~house.missing).sum() == 0
        assert np.array_equal(table.numpy()[~streamed], mirror[~streamed])
        run_layers(house, table, lambda work: work())
    assert house.stream.streamed_experts == streamed.sum()
    assert house.stream.in_place_experts == host.sum()
    assert np.array_equal(house.table.mirror, mirror)
    assert np.array_equal(house.store.resident, resident)
    house.check()


def test_the_buffer_shrinks_to_what_is_free_and_to_nothing():
    house = House(resident=6, free=8)
    held = []
    for _ in range(9):
        with house.stream.step(MANY) as table:
            if table is None:
                assert not house.allocator.obtainable(house.cls)
                break
            assert house.allocator.held_by(house.cls, "prefill streaming") == 8 - len(held)
            run_layers(house, table, lambda work: work())
        held += house.allocator.take(house.cls, 1, "request")
    assert len(held) == 8
    house.check()


def test_reserved_pages_serve_when_nothing_else_is_free():
    house = House(resident=6, free=3, reserve=2)
    assert house.stream.reserved_pages == 2
    house.allocator.take(house.cls, 1, "request")
    with house.stream.step(MANY) as table:
        run_layers(house, table, lambda work: work())
    assert house.stream.streamed_experts == 2 * LAYERS
    house.check()
    with pytest.raises(MemoryError, match="4 pages to reserve for prefill streaming, and the pool has 3"):
        House(resident=6, free=3, reserve=4)


def test_a_step_that_fails_half_way_leaves_nothing_behind():
    house = House(resident=6, free=8)

    def launch(work):
        work()
        raise RuntimeError("cancelled")

    def step():
        with house.stream.step(MANY) as table:
            run_layers(house, table, launch)

    with pytest.raises(RuntimeError, match="cancelled"):
        step()
    house.check()
    with house.stream.step(MANY) as table:
        run_layers(house, table, lambda work: work())
    house.check()


def test_small_steps_and_whole_residency_read_the_table_they_always_read():
    assert House(resident=6, free=8).stream.begin(2) is None
    assert House(resident=LAYERS * EXPERTS, free=8).stream.begin(MANY) is None


def test_known_routing_streams_the_experts_that_are_read():
    house = House(resident=0, free=4)
    share = np.zeros((LAYERS, EXPERTS))
    share[:, 1], share[:, 4] = 1.0, 0.5
    share[2] = 0.4
    share[2, 5] = 0.9
    with house.stream.step(MANY, share) as table:
        streamed = (table.numpy() & EXPERT_HOST) == 0
        run_layers(house, table, lambda work: work())
    assert streamed[[0, 1, 3]].nonzero()[1].tolist() == [1, 4] * 3
    assert streamed[2].sum() == 4
    assert streamed[2, 5]


@given(st.floats(0.001, 1), st.integers(1, 3000), st.sampled_from([16, 64, 128]))
def test_crossings_are_no_more_than_a_tile_by_tile_count(share, tokens, tile):
    rows = np.random.default_rng(0).binomial(tokens, share, 4000)
    counted = np.ceil(rows / tile)
    error = 4 * counted.std() / np.sqrt(len(counted)) + 0.01
    assert crossings(tokens, share, tile) <= counted.mean() + error


def test_streaming_pays_once_a_step_touches_nearly_every_expert():
    assert not worth_streaming(39, 8 / 128)
    assert worth_streaming(40, 8 / 128)
    assert worth_streaming(np.array([4096])[0], 8 / 128)
    assert worth_streaming(4096, np.array([0.0, 0.0001, 0.01])).tolist() == [False, False, True]


@pytest.mark.parametrize("free", [1, 5, 12])
@pytest.mark.parametrize("ops", [reference, backend_for(torch.device("cpu"), torch.float32)])
def test_a_model_computes_the_same_bits_streamed_in_place_and_resident(ops, free):
    house = House(resident=9, free=free)
    every = House(resident=LAYERS * EXPERTS, free=0)
    generator = torch.Generator().manual_seed(2)
    routers = torch.randn(LAYERS, EXPERTS, LAYOUT.hidden, generator=generator)

    def forward(table, stream=None):
        x = torch.randn(MANY, LAYOUT.hidden, generator=torch.Generator().manual_seed(3))
        for layer in range(LAYERS):
            weights, ids = ops.route(x @ routers[layer].T, TOP_K, "softmax", True)
            if stream:
                stream.before(layer)
            x = x + ops.moe(x, ids, weights, table[layer], LAYOUT, None)
            if stream:
                stream.after(layer)
        return x

    resident, in_place = forward(every.table.device_table), forward(house.table.device_table)
    with house.stream.step(MANY) as table:
        streamed = forward(table, house.stream)
    assert house.stream.streamed_experts > 0
    assert torch.equal(resident, in_place)
    assert torch.equal(resident, streamed)
