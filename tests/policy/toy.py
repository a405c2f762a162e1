"""A toy server, for the policies' tests: pages are counts, every running request grows a page at times."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rimuru.policy.boundary import BoundaryPlan, BoundaryPolicy, Capacity, Snapshot

STEP = 0.02  # seconds


@dataclass(eq=False, slots=True)
class Request:
    arrival: float
    final: int  # pages at its end
    held: int = 0


class Toy:
    """Requests want 4 pages to start, grow to 4..24 and finish. LIFO preemption, FCFS admission."""

    def __init__(self, policy: BoundaryPolicy, arrivals_per_step: float, seed: int, **rates: float):
        self.capacity = Capacity(
            pool_pages=90, expert_total=80, expert_lendable=80, expert_floor=8,
            expert_page_bytes=6 << 20, kv_page_bytes=1 << 20, kv_per_expert=6, kv_min=24,
        )  # fmt: skip
        self.policy, self.rates = policy, rates
        self.resident = self.start = policy.start(self.capacity)
        self.rng, self.rate = random.Random(seed), arrivals_per_step
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.steps = self.finished = self.preempted = 0
        self.moves: list[int] = []
        self.plans: list[tuple[Snapshot, BoundaryPlan]] = []
        self.waits: list[float] = []

    def burst(self, n: int) -> None:
        self.waiting += [Request(self.now, self.rng.randint(4, 24)) for _ in range(n)]

    @property
    def now(self) -> float:
        return self.steps * STEP

    @property
    def used(self) -> int:
        return sum(r.held for r in self.running)

    @property
    def free(self) -> int:
        return (self.capacity.pool_pages - self.resident) * self.capacity.kv_per_expert - self.used

    def snapshot(self) -> Snapshot:
        c = self.capacity
        admit = self.waiting[: max(0, 64 - len(self.running))]
        return Snapshot(
            now=self.now, expert_total=c.expert_total, expert_resident=self.resident,
            expert_lendable=self.resident, expert_floor=c.expert_floor, expert_page_bytes=c.expert_page_bytes,
            kv_page_bytes=c.kv_page_bytes, kv_per_expert=c.kv_per_expert, kv_used=self.used,
            kv_obtainable=self.free, kv_wanted_running=len(self.running), kv_wanted_waiting=4 * len(admit),
            kv_wanted_first=4 if admit else 0, running=len(self.running), waiting=len(self.waiting),
            oldest_wait=self.now - self.waiting[0].arrival if self.waiting else 0.0,
            can_finish=bool(self.running), request_kv_pages=10.0, **self.rates,
        )  # fmt: skip

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.steps += 1
        if self.rng.random() < self.rate:
            self.burst(1)
        s = self.snapshot()
        plan = self.policy.decide(s)
        self.plans.append((s, plan))
        change = plan.expert_pages - self.resident
        if change > 0:
            change = min(change, max(0, self.free) // self.capacity.kv_per_expert)
        assert -change <= s.room_to_lend
        self.resident += change
        if change:
            self.moves.append(change)
        for request in [r for r in self.running if self.rng.random() < 0.1]:
            while self.free < 1 and len(self.running) > 1:
                self.waiting.insert(0, self.running.pop())
                self.waiting[0].held = 0
                self.preempted += 1
            if request.held and self.free:
                request.held += 1
                if request.held > request.final:
                    self.running.remove(request)
                    self.finished += 1
        while self.waiting and self.free >= 4 + len(self.running) and len(self.running) < 64:
            request = self.waiting.pop(0)
            request.held = 4
            self.waits.append(self.now - request.arrival)
            self.running.append(request)
