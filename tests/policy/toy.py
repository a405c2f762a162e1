"""A toy server, for the policies' tests: pages are counts, every running request grows a page at times."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rimuru.policy.boundary import BoundaryPlan, BoundaryPolicy, Capacity, Snapshot

STEP = 0.02  # seconds, where no rates are given
PAGE, KV = 6 << 20, 3 << 20  # bytes
EXPERTS, PER = 400, 2
START, MOST = 2, 12  # KV pages of a request
MEAN = 5.3  # pages held, averaged over the lives of all requests
PERIOD = 10  # steps for which a page lasts
TOUCH = 0.05  # P(one request touches one expert in a step)


@dataclass(eq=False, slots=True)
class Request:
    arrival: float
    final: int  # pages at its end
    held: int = 0
    age: int = 0  # steps it has run


class Toy:
    """Requests want 2 pages to start, grow to 2..12 and finish. LIFO preemption, FCFS admission.

    With `link` and `hbm` rates (bytes/s) a step takes as long as its bytes do, misses beyond those that
    it hides cost link time, and the policy is told the rates; else every step takes `STEP`.
    """

    def __init__(
        self,
        policy: BoundaryPolicy,
        arrivals: float,  # a second
        seed: int,
        link: float = 0.0,
        hbm: float = 0.0,
        pool_pages: int = 430,
    ):
        self.capacity = Capacity(
            pool_pages=pool_pages, expert_total=EXPERTS, expert_lendable=EXPERTS, expert_floor=40,
            expert_page_bytes=PAGE, kv_page_bytes=KV, kv_per_expert=PER, kv_min=MOST,
        )  # fmt: skip
        self.policy, self.link, self.hbm = policy, link, hbm
        self.now = 0.0
        self.tokens = 0  # of finished requests
        self.resident = self.start = policy.start(self.capacity)
        self.rng, self.rate = random.Random(seed), arrivals
        self.next = 0.0
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.steps = self.finished = self.preempted = 0
        self.moves: list[int] = []
        self.plans: list[tuple[Snapshot, BoundaryPlan]] = []
        self.waits: list[float] = []

    def burst(self, n: int) -> None:
        self.waiting += [Request(self.now, self.rng.randint(START, MOST)) for _ in range(n)]

    @property
    def used(self) -> int:
        return sum(r.held for r in self.running)

    @property
    def free(self) -> int:
        return (self.capacity.pool_pages - self.resident) * PER - self.used

    def bytes_touched(self) -> tuple[float, float, float]:
        """Experts touched and missed in a step of the present batch, and its seconds."""
        touched = EXPERTS * (1 - (1 - TOUCH) ** len(self.running))
        missed = touched * (EXPERTS - self.resident) / EXPERTS
        if not self.hbm:
            return touched, missed, STEP
        local = (touched - missed) * PAGE / self.hbm
        exposed = max(0.0, missed * PAGE / self.link - local)
        return touched, missed, 1e-4 + local + self.used * KV / self.hbm + exposed

    def snapshot(self, growing: int) -> Snapshot:
        c = self.capacity
        touched, missed, seconds = self.bytes_touched() if self.hbm else (0.0, 0.0, 0.0)
        admit = self.waiting[: max(0, 64 - len(self.running))]
        return Snapshot(
            now=self.now, expert_total=c.expert_total, expert_resident=self.resident,
            expert_lendable=self.resident, expert_floor=c.expert_floor, expert_page_bytes=c.expert_page_bytes,
            kv_page_bytes=c.kv_page_bytes, kv_per_expert=c.kv_per_expert, kv_used=self.used,
            kv_obtainable=self.free, kv_wanted_running=growing, kv_wanted_waiting=START * len(admit),
            kv_wanted_first=START if admit else 0, running=len(self.running), waiting=len(self.waiting),
            oldest_wait=self.now - self.waiting[0].arrival if self.waiting else 0.0,
            can_finish=bool(self.running), request_kv_pages=MEAN, max_running=64,
            touched=touched, missed=missed, step_seconds=seconds, link_bytes_s=self.link,
            hbm_bytes_s=self.hbm,
        )  # fmt: skip

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def serve(self, requests: int) -> float:
        """Tokens a second until so many requests have finished."""
        while self.finished < requests:
            self.step()
        return self.tokens / self.now

    def step(self) -> None:
        self.steps += 1
        while self.rate and self.next <= self.now:
            self.burst(1)
            self.next += self.rng.expovariate(self.rate)
        for request in self.running:
            request.age += 1
        done = [r for r in self.running if r.age == PERIOD * (r.final - START + 1)]
        for request in done:
            self.running.remove(request)
            self.finished += 1
            self.tokens += request.age
        growing = [r for r in self.running if r.age % PERIOD == 0]
        s = self.snapshot(len(growing))
        plan = self.policy.decide(s)
        self.plans.append((s, plan))
        change = plan.expert_pages - self.resident
        if change > 0:
            change = min(change, s.kv_obtainable // PER)
        assert -change <= s.room_to_lend
        self.resident += change
        if change:
            self.moves.append(change)
        for request in growing:
            while self.free < 1 and len(self.running) > 1 and request.held:
                self.preempted += 1
                last = self.running.pop()
                last.held = last.age = 0
                self.waiting.insert(0, last)
            request.held += request.held > 0 and self.free > 0
        while self.waiting and self.free >= START and len(self.running) < 64:
            request = self.waiting.pop(0)
            request.held = START
            self.waits.append(self.now - request.arrival)
            self.running.append(request)
        idle = self.next - self.now if self.rate and not self.running else 0.0
        self.now += max(self.bytes_touched()[2], idle)
