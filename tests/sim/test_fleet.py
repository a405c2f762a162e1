"""Fleets: what the router chooses, and that replicas serve as they would alone."""

from __future__ import annotations

import pytest
from sim.conftest import load

from rimuru.sim.fleet import Router, serve, summary
from rimuru.sim.trace import Arrival


def test_a_conversation_stays_at_its_replica_until_that_is_overloaded():
    router = Router("prefix", bound=1.25, slack=2)
    home = router.choose(7, [0, 0, 0, 0])
    assert all(router.choose(7, [1, 1, 1, 1]) == home for _ in range(5))
    busy = [1, 1, 1, 1]
    busy[home] = 9  # more than 1.25 x 3 + 2
    assert router.choose(7, busy) != home
    assert router.moved == 1


def test_new_conversations_go_to_the_less_loaded_of_two():
    router = Router("least")
    chosen = [router.choose(i, [5, 5, 5, 0]) for i in range(300)]
    # Two of four are drawn: the idle one is among them half of the time.
    assert chosen.count(3) / 300 == pytest.approx(0.5, abs=0.1)
    assert Router("random").choose(0, [3]) == 0


def test_one_replica_behind_a_router_is_one_engine(make_sim):
    alone, routed = make_sim("reactive", kv_mib=8), make_sim("reactive", kv_mib=8)
    arrivals = load(30, gap=0.02)
    alone.run(arrivals)
    serve([routed], Router("prefix"), arrivals)
    assert routed.series.clock == alone.series.clock
    assert routed.series.resident == alone.series.resident


def test_the_prefix_router_finds_more_prefixes_than_the_others(make_sim):
    turns = [Arrival(0.3 * t + 0.01 * c, 40 + 100 * t, 60, c) for t in range(6) for c in range(12)]
    rates, served = {}, {}
    for kind in ("prefix", "least", "random"):
        replicas = [make_sim(kv_mib=120) for _ in range(3)]
        router = Router(kind)
        serve(replicas, router, turns)
        result = summary(replicas, router, scale=10.0)
        rates[kind], served[kind] = result["prefix_hit_rate"], result["requests"]
        for replica in replicas:
            replica.check()
    assert served == dict.fromkeys(rates, 720)  # 72, ten times
    assert rates["prefix"] > rates["least"] + 0.1
    assert rates["prefix"] > rates["random"] + 0.1
