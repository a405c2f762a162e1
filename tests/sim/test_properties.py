"""What must hold of the economic policy whatever the load, on the engine's own classes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.conftest import ALL_EXPERTS, MODEL, ROUTING, SKEWED, WEIGHTS

from rimuru.engine.config import EngineConfig
from rimuru.policy.boundary import BoundaryPlan, Snapshot
from rimuru.policy.cost import gpu
from rimuru.sim.engine import Hardware, Simulation
from rimuru.sim.trace import Arrival


def make(card: str = "h200", kv_mib: float = 12, routing=ROUTING, **engine) -> Simulation:
    options = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "memory_policy": "economic"} | engine
    config = EngineConfig(model="toy", device_memory=WEIGHTS + ALL_EXPERTS + int(kv_mib * 2**20), **options)
    return Simulation(MODEL, config, Hardware(gpu(card), reserve_bytes=0), routing)


def poisson(rate: float, seconds: float, start: float = 0.0, seed: int = 0) -> list[Arrival]:
    gaps = np.random.default_rng(seed).exponential(1 / rate, round(rate * seconds))
    return [
        Arrival(start + at, 40 + i % 7, 60 + i % 11, round(1000 * start) + i)
        for i, at in enumerate(np.cumsum(gaps).tolist())
    ]


def watch(sim: Simulation, look: Callable[[Snapshot, BoundaryPlan], None]) -> None:
    """Have `look` see every decision."""
    decide = sim.memory.boundary.decide

    def seen(snapshot: Snapshot) -> BoundaryPlan:
        plan = decide(snapshot)
        look(snapshot, plan)
        return plan

    sim.memory.boundary.decide = seen  # type: ignore[method-assign]


def lent(sim: Simulation, begin: float, end: float) -> np.ndarray:
    """Experts lent at each step between two times."""
    clock = np.array(sim.series.clock)
    return sim.plan.experts_total - np.array(sim.series.resident)[(clock >= begin) & (clock < end)]


def test_more_demand_is_lent_no_less_and_runs_no_fewer():
    shares, concurrency = [], []
    for rate in (30, 100, 250):
        sim = make("rtx-5090")
        sim.run(poisson(rate, 0.8))
        shares.append(lent(sim, 0.3, 0.8).mean())
        concurrency.append(max(sim.series.running))
    assert shares == sorted(shares)
    assert shares[-1] > shares[0] + 5
    assert concurrency == sorted(concurrency)


@pytest.mark.parametrize(
    ("card", "rate", "seconds"),
    [
        ("rtx-5090", 200, 1.5),
        pytest.param("h200", 120, 4.0, marks=pytest.mark.slow),
        pytest.param("h200", 400, 4.0, marks=pytest.mark.slow),
        pytest.param("rtx-5090", 400, 4.0, marks=pytest.mark.slow),
    ],
)
def test_on_a_constant_load_the_boundary_comes_to_rest(card, rate, seconds):
    sim = make(card)
    sim.run(poisson(rate, seconds))
    steady = lent(sim, max(1.0, seconds / 2), seconds)
    # An expert's page holds the KV of two requests: their coming and going may move the boundary by one.
    moves = np.diff(steady)
    turns = np.count_nonzero(np.diff(np.sign(moves[np.abs(moves) > 1])))
    assert turns <= 2
    assert np.ptp(steady) <= 4


@settings(max_examples=6, deadline=None)
@given(
    rates=st.lists(st.sampled_from([20, 100, 400]), min_size=1, max_size=3),
    card=st.sampled_from(["h200", "rtx-4090"]),
    skewed=st.booleans(),
)
def test_an_expert_leaves_only_for_a_predicted_gain_or_by_force(rates, card, skewed):
    sim = make(card, routing=SKEWED if skewed else ROUTING)

    def look(s: Snapshot, plan: BoundaryPlan) -> None:
        leaving = s.expert_resident - plan.expert_pages
        if leaving > 0 and not plan.forced and "goodput_now" in plan.numbers:
            assert s.lent + leaving <= plan.numbers["best_lent"]
            assert plan.numbers["goodput_best"] >= plan.numbers["goodput_now"]

    watch(sim, look)
    arrivals = [a for n, rate in enumerate(rates) for a in poisson(rate, 0.2, 0.2 * n, seed=n)]
    sim.run(arrivals)
    sim.check()


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 1000),
    kv_mib=st.sampled_from([-60, 3, 12]),
    wait=st.sampled_from([0.0, 0.05, 0.5]),
    long=st.booleans(),
)
def test_no_request_waits_for_ever(seed, kv_mib, wait, long):
    """However dear its pages: whoever stands first in the queue runs after `max_boundary_wait`, the time
    in which a running request may finish, and that of the steps between."""
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(0.004, 40)).tolist()
    sizes = rng.integers(10, 600 if long else 120, (40, 2)).tolist()
    sim = make("rtx-4090", kv_mib, max_boundary_wait=wait, max_num_seqs=16)
    heads: dict[str, tuple[float, float]] = {}  # when it first stood at the head, and was last seen there

    def look(s: Snapshot, plan: BoundaryPlan) -> None:
        if sim.scheduler.waiting:
            name = sim.scheduler.waiting[0][3].request_id
            heads[name] = heads.get(name, (s.now,))[0], s.now

    watch(sim, look)
    sim.run([Arrival(t, *size, i) for i, (t, size) in enumerate(zip(at, sizes, strict=True))])
    sim.check()
    assert len(sim.scheduler.samples) + len(sim.refused) == 40
    # Slots run out before pages do at times: then the one that stands first waits for a request to end.
    longest = max((s.decode_time for s in sim.scheduler.samples), default=0.0)
    slow = max(sim.series.seconds)
    assert all(seen - since <= wait + longest + 2 * slow for since, seen in heads.values())


def test_after_a_burst_the_experts_come_home_and_latency_is_as_before():
    def calm(start: float) -> list[Arrival]:
        return [Arrival(start + 0.05 * i, 40, 60, round(1000 * start) + i) for i in range(16)]

    sim = make("rtx-5090", enable_prefix_caching=False)
    sim.run([*calm(0.0), *(Arrival(1.0, 40, 60, 5000 + i) for i in range(100)), *calm(3.0)])
    assert lent(sim, 1.0, 3.0).max() >= 6
    assert lent(sim, 3.4, 9.0).max() == 0
    before = [ttft for at, ttft in sim.first_tokens if at < 1]
    after = [ttft for at, ttft in sim.first_tokens if at > 3.4]
    assert np.mean(after) == pytest.approx(np.mean(before), rel=0.1)
