"""Promotions on a stream of their own, on a machine whose two streams advance as they please."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
import torch
from experts.test_store import LAYOUT, House

from rimuru.experts.side_copy import CudaLane, SideStreamCopy
from rimuru.kernels.reference import tensor_at
from rimuru.kernels.types import EXPERT_ADDRESS


class Happened:
    done = False

    def query(self) -> bool:
        return self.done


class Machine:
    """A compute stream and a copy stream: each in order, neither faster than the other."""

    def __init__(self, waits: bool = True):
        self.compute: deque[tuple[Callable[[], None], Happened]] = deque()
        self.copies: deque[tuple[Happened, Callable[[], None], Happened]] = deque()
        self._waits = waits

    def launch(self, work: Callable[[], None]) -> Happened:
        self.compute.append((work, Happened()))
        return self.compute[-1][1]

    # the lane of a SideStreamCopy

    def launched(self) -> Happened:
        return self.launch(lambda: None)

    def copy(self, to: torch.Tensor, source: torch.Tensor, after: Happened) -> Happened:
        self.copies.append((after, lambda: to.copy_(source), Happened()))
        return self.copies[-1][2]

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
    """Steps launched one ahead, on the pool of a `House`: each reads every expert and writes the KV."""

    def __init__(self, seed: int, machine: Machine, pages: int, ahead: int):
        self.rng, self.machine = np.random.default_rng(seed), machine
        self.side = SideStreamCopy(machine, ahead)
        # Poison is work on the compute stream, which this machine would have to launch.
        self.house = House(pages, 12, 0, copy=self.side, poison=False)
        self.kv: list[int] = []
        self.wrong = 0
        self._flush()
        machine.finish()

    def _flush(self) -> None:
        def apply(table, index, value):
            index, value = index.clone(), value.clone()
            self.machine.launch(lambda: table.view(-1).index_copy_(0, index, value))

        self.house.table.flush(apply)

    def _step(self, kv: list[int]) -> None:
        house = self.house
        for (layer, expert), (gate_up, _) in house.weights.items():
            at = int(house.table.device_table[layer, expert]) & EXPERT_ADDRESS
            self.wrong += not torch.equal(tensor_at(at, gate_up.shape, LAYOUT.dtype), gate_up)
        for page in kv:
            house.arena.page(page, house.allocator.geometry.grain, house.kv_bytes).fill_(255)

    def turn(self) -> None:
        """Launch a step, then do what an update of the last one does: KV comes and goes, experts too."""
        house, rng = self.house, self.rng
        self._flush()
        kv = list(self.kv)
        self.machine.launch(lambda: self._step(kv))
        for _ in range(rng.integers(0, 6)):
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


def run(seed: int, machine: Machine, turns: int = 30) -> Engine:
    engine = Engine(seed, machine, pages=6, ahead=1 + seed % 3)
    for _ in range(turns):
        engine.turn()
    for _ in range(20):
        machine.finish()
        engine.house.store.poll()
    return engine


@pytest.mark.parametrize("seed", range(12))
def test_every_step_reads_whole_experts_whatever_the_streams_do(seed):
    engine = run(seed, Machine())
    assert engine.wrong == 0
    assert engine.side.pending == 0
    assert not engine.house.store.in_flight.any()


def test_without_the_wait_for_launched_steps_experts_are_torn():
    """So the machine above can show the fault."""
    assert any(run(seed, Machine(waits=False)).wrong for seed in range(12))


def test_copies_are_issued_at_the_poll_after_the_call_and_few_at_a_time():
    machine = Machine()
    side = SideStreamCopy(machine, ahead=2)
    pages = [(torch.zeros(4), torch.full((4,), float(i))) for i in range(5)]
    first, second = side(pages[:4]), side(pages[4:])
    assert not machine.copies
    assert not first.query()
    assert len(machine.copies) == 2
    machine.finish()
    assert not first.query()
    assert len(machine.copies) == 2
    machine.finish()
    assert first.query()
    assert not second.query()
    machine.finish()
    assert second.query()
    assert side.pending == 0
    assert all(torch.equal(to, source) for to, source in pages)


def test_none_at_a_time_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        SideStreamCopy(Machine(), ahead=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU's streams")
def test_on_a_gpu_a_copy_waits_for_the_work_launched_before_it_was_asked_for():
    side = SideStreamCopy(CudaLane(torch.cuda.Stream()))
    page = torch.zeros(1 << 20, device="cuda")
    source = torch.ones(1 << 20).pin_memory()
    torch.cuda._sleep(200_000_000)  # cycles: about 0.1 s, in which the copy must not start
    seen = page.clone()
    event = side([(page, source)])
    assert not event.query()  # issues the copy
    later = page.new_zeros(())
    while not event.query():
        pass
    later += page.sum()
    assert seen.sum().item() == 0
    assert later.item() == 1 << 20
