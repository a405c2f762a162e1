"""Promotions on a stream of their own, on a machine whose two streams advance as they please."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from experts.test_store import EXPERTS, LAYERS, LAYOUT, House

from rimuru.experts.side_copy import CudaLane, SideStreamCopy
from rimuru.experts.store import Arrival
from rimuru.kernels import reference
from rimuru.kernels.reference import tensor_at
from rimuru.kernels.types import EXPERT_ADDRESS, EXPERT_HOST


class Happened:
    done = False

    def query(self) -> bool:
        return self.done


class Machine:
    """A compute stream and a copy stream: each in order, neither faster than the other."""

    def __init__(self, waits: bool = True, writes: bool = True):
        self.compute: deque[tuple[Callable[[], None], Happened]] = deque()
        self.copies: deque[tuple[Happened, Callable[[], None], Happened]] = deque()
        self._waits, self._writes = waits, writes

    def launch(self, work: Callable[[], None]) -> Happened:
        self.compute.append((work, Happened()))
        return self.compute[-1][1]

    # the lane of a SideStreamCopy

    def launched(self) -> Happened:
        return self.launch(lambda: None)

    def copy(self, arrival: Arrival, after: Happened) -> Happened:
        self.copies.append((after, lambda: arrival.to.copy_(arrival.source), Happened()))
        write = partial(arrival.cell.fill_, arrival.entry) if self._writes else lambda: None
        self.copies.append((after, write, Happened()))
        return self.copies[-1][2]

    @property
    def issued(self) -> int:
        """Copies on the way, each with its entry."""
        return len(self.copies) // 2

    def advance_compute(self) -> bool:
        if not self.compute:
            return False
        work, event = self.compute.popleft()
        work()
        event.done = True
        return True

    def advance_copies(self) -> bool:
        if not self.copies or (self._waits and not self.copies[0][0].done):
            return False
        _, work, event = self.copies.popleft()
        work()
        event.done = True
        return True

    def finish(self) -> None:
        while self.advance_compute() or self.advance_copies():
            pass


class Engine:
    """Steps launched one ahead, on the pool of a `House`: each reads every expert and writes the KV.

    A layer reads the table in one launch and its experts in the next, as the kernels do.
    """

    def __init__(self, seed: int, machine: Machine, pages: int, ahead: int):
        self.rng, self.machine = np.random.default_rng(seed), machine
        self.side = SideStreamCopy(machine, ahead)
        # Poison is work on the compute stream, which this machine would have to launch.
        self.house = House(pages, 12, 0, copy=self.side, poison=False)
        self.kv: list[int] = []
        self.wrong = self.early = 0
        self.flush()
        machine.finish()

    def flush(self) -> None:
        def apply(table, index, value):
            index, value = index.clone(), value.clone()
            self.machine.launch(lambda: table.view(-1).index_copy_(0, index, value))

        self.house.table.flush(apply)

    def launch(self) -> None:
        """A step: its layers, then its KV."""
        house, kv = self.house, list(self.kv)
        for layer in range(LAYERS):
            seen: list[int] = []
            self.machine.launch(lambda layer=layer, seen=seen: self._plan(layer, seen))
            self.machine.launch(lambda layer=layer, seen=seen: self._read(layer, seen))
        for page in kv:
            where = house.arena.page(page, house.allocator.geometry.grain, house.kv_bytes)
            self.machine.launch(lambda where=where: where.fill_(255))

    def _plan(self, layer: int, seen: list[int]) -> None:
        seen += self.house.table.device_table[layer].tolist()

    def _read(self, layer: int, seen: list[int]) -> None:
        house = self.house
        for expert, entry in enumerate(seen):
            gate_up, _ = house.weights[layer, expert]
            got = tensor_at(entry & EXPERT_ADDRESS, gate_up.shape, LAYOUT.dtype)
            self.wrong += not torch.equal(got, gate_up)
            self.early += not entry & EXPERT_HOST and not house.store.resident[layer, expert]

    def turn(self) -> None:
        """Launch a step, then do what an update of the last one does: KV comes and goes, experts too."""
        house, rng = self.house, self.rng
        self.flush()
        self.launch()
        for _ in range(rng.integers(0, 30)):
            (self.machine.advance_compute if rng.random() < 0.5 else self.machine.advance_copies)()
        house.store.poll()
        n = int(rng.integers(0, len(self.kv) + 1))
        back, self.kv = self.kv[:n], self.kv[n:]
        house.allocator.give(house.kv_class, back, "kv")
        here = house.store.resident & house.store.lendable
        house.store.demote([x for x in house.weights if here[x] and rng.random() < 0.4])
        absent = [x for x in house.weights if rng.random() < 0.4]
        house.store.promote(absent)
        room = house.allocator.obtainable(house.kv_class)
        self.kv += house.allocator.take(house.kv_class, int(rng.integers(0, room + 1)), "kv")
        house.store.check()
        house.allocator.check()
        self.side.check()


def run(seed: int, machine: Machine, turns: int = 30) -> Engine:
    engine = Engine(seed, machine, pages=6, ahead=1 + seed % 3)
    for _ in range(turns):
        engine.turn()
    for _ in range(20):
        machine.finish()
        engine.house.store.poll()
    engine.flush()
    machine.finish()
    return engine


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("writes", [True, False])
def test_every_step_reads_whole_experts_whatever_the_streams_do(seed, writes):
    engine = run(seed, Machine(writes=writes))
    assert engine.wrong == 0
    assert engine.side.pending == 0
    assert not engine.house.store.in_flight.any()
    engine.house.table.check()


def test_without_the_wait_for_launched_steps_experts_are_torn():
    """So the machine above can show the fault."""
    assert any(run(seed, Machine(waits=False)).wrong for seed in range(12))


def test_pages_are_read_before_the_host_knows_of_them():
    """So the machine above reads what the copy stream has written."""
    assert all(run(seed, Machine()).early for seed in range(12))


def test_a_step_under_way_finds_the_page_at_the_layers_it_has_yet_to_reach():
    machine = Machine()
    engine = Engine(0, machine, pages=6, ahead=4)
    house = engine.house
    promoted = [(layer, 1) for layer in range(LAYERS)]
    house.store.promote(promoted)
    house.store.poll()  # issues the copies
    engine.flush()
    engine.launch()
    while len(machine.compute) > 2 * (LAYERS - 1):
        machine.advance_compute()  # up to and with the first layer
    assert engine.early == 0
    while machine.advance_copies():
        pass
    assert not house.store.resident.any(), "the host has not looked"
    machine.finish()
    assert engine.early == LAYERS - 1
    assert engine.wrong == 0
    house.store.poll()
    assert all(house.store.resident[x] for x in promoted)


def test_a_victims_page_is_filled_only_after_the_steps_that_may_read_it():
    machine = Machine()
    engine = Engine(0, machine, pages=1, ahead=4)
    house = engine.house
    pages = house.pages
    first, second = list(house.weights)[:pages], list(house.weights)[pages : 2 * pages]
    house.store.promote(first)
    while not house.store.resident[first[0]]:
        house.store.poll()
        machine.finish()
    engine.flush()
    engine.launch()  # reads the pages of `first`
    house.store.demote(first)
    house.store.promote(second)
    house.store.poll()
    assert not machine.advance_copies(), "a copy starts while a step may read the page"
    engine.flush()
    engine.launch()  # reads the host copies of both, or the pages of `second`
    while not machine.copies[0][0].done:
        machine.advance_compute()
    assert machine.advance_copies()
    machine.finish()
    assert engine.wrong == 0


def test_a_demotions_edit_that_comes_behind_a_copys_own_is_mended_when_the_host_sees_the_copy():
    machine = Machine()
    engine = Engine(0, machine, pages=6, ahead=4)
    house, x = engine.house, (1, 2)

    def settle(in_host: bool) -> None:
        engine.flush()
        machine.finish()
        assert bool(int(house.table.device_table[x]) & EXPERT_HOST) == in_host

    house.store.promote([x])
    house.store.poll()
    settle(in_host=False)
    house.store.poll()
    house.store.demote([x])
    house.store.promote([x])
    house.store.poll()
    machine.finish()  # the copy writes the entry; the demotion's edit is staged still
    settle(in_host=True)
    house.store.poll()
    settle(in_host=False)
    house.table.check()


def test_outputs_are_the_same_bits_whichever_address_a_layer_finds():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, LAYOUT.hidden, generator=generator)
    weights, ids = reference.route(torch.randn(9, EXPERTS, generator=generator), 2, False)

    def outputs(copied_before: int) -> list[torch.Tensor]:
        machine = Machine()
        house = Engine(0, machine, pages=12, ahead=12).house
        house.store.promote(list(house.weights))
        house.store.poll()
        out = [x]
        for layer in range(LAYERS):
            if layer == copied_before:
                machine.finish()
            out.append(reference.moe(out[-1], ids, weights, house.table.device_table[layer], LAYOUT))
        return out

    in_host = outputs(copied_before=LAYERS)
    for layer in range(LAYERS):
        assert all(torch.equal(a, b) for a, b in zip(outputs(layer), in_host, strict=True))


def test_copies_are_issued_at_the_poll_after_the_call_and_few_at_a_time():
    machine = Machine()
    side = SideStreamCopy(machine, ahead=2)
    table = torch.zeros(5, dtype=torch.int64)
    pages = [Arrival(torch.zeros(4), torch.full((4,), float(i)), table[i], 7 + i) for i in range(5)]
    first, second = side(pages[:4]), side(pages[4:])
    assert machine.issued == 0
    assert not first.query()
    assert machine.issued == 2
    machine.finish()
    assert not first.query()
    assert machine.issued == 2
    machine.finish()
    assert first.query()
    assert not second.query()
    machine.finish()
    assert second.query()
    assert side.pending == 0
    assert all(torch.equal(p.to, p.source) for p in pages)
    assert table.tolist() == [7, 8, 9, 10, 11]


def test_none_at_a_time_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        SideStreamCopy(Machine(), ahead=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU's streams")
def test_on_a_gpu_a_copy_waits_for_the_work_launched_before_it_was_asked_for():
    side = SideStreamCopy(CudaLane(torch.cuda.Stream()))
    page, table = torch.zeros(1 << 20, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    source = torch.ones(1 << 20).pin_memory()
    torch.cuda._sleep(200_000_000)  # cycles: about 0.1 s, in which the copy must not start
    seen, entries = page.clone(), table.clone()
    event = side([Arrival(page, source, table[1], 1 << 40)])
    assert not event.query()  # issues the copy
    later = page.new_zeros(())
    while not event.query():
        pass
    later += page.sum()
    assert seen.sum().item() == 0
    assert later.item() == 1 << 20
    assert entries.tolist() == [0, 0]
    assert table.tolist() == [0, 1 << 40]
