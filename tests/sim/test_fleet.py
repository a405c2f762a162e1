"""Fleets: what the router chooses, and that replicas serve as they would alone."""

from __future__ import annotations

import numpy as np
import pytest
from sim.conftest import load

from rimuru.errors import ConfigError
from rimuru.sim.fleet import Fleet, Router, steady_load
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
    Fleet([routed], Router("prefix")).serve(arrivals)
    assert routed.series.clock == alone.series.clock
    assert routed.series.resident == alone.series.resident


def test_the_prefix_router_finds_more_prefixes_than_the_others(make_sim):
    turns = [Arrival(0.3 * t + 0.01 * c, 40 + 100 * t, 60, c) for t in range(6) for c in range(12)]
    rates, served = {}, {}
    for kind in ("prefix", "least", "random"):
        replicas = [make_sim(kv_mib=120) for _ in range(3)]
        fleet = Fleet(replicas, Router(kind))
        fleet.serve(turns)
        result = fleet.summary(scale=10.0)
        rates[kind], served[kind] = result["prefix_hit_rate"], result["requests"]
        for replica in replicas:
            replica.check()
    assert served == dict.fromkeys(rates, 720)  # 72, ten times
    assert rates["prefix"] > rates["least"] + 0.1
    assert rates["prefix"] > rates["random"] + 0.1


def test_a_steady_load_has_its_rate_from_the_first_second_and_every_turn_in_order():
    rows = [Arrival(0.0, 10 * (t + 1), 5, c) for c in range(50) for t in range(1 + c % 5)]
    got = steady_load(rows, rate=20.0, think=10.0, seconds=400.0, seed=3)
    counts = np.histogram([a.at for a in got], bins=np.arange(0, 401, 40))[0] / 40
    # A conversation's turns come together, so counts scatter more than a Poisson process's (3.5 %).
    assert counts.mean() == pytest.approx(20.0, rel=0.05)
    assert abs(counts - 20).max() < 5
    assert [a.at for a in got] == sorted(a.at for a in got)
    assert 0 <= got[0].at < got[-1].at < 400
    talks: dict[int, list[int]] = {}
    for a in got:
        talks.setdefault(a.conversation, []).append(a.prompt)
    assert all(prompts == sorted(set(prompts)) for prompts in talks.values())
    first = [a for a in got if a.at < 5]
    assert any(a.prompt > 10 for a in first)  # some are in the middle of their conversation


def test_only_what_comes_after_the_warm_up_counts(make_sim):
    arrivals = load(60, gap=0.02)
    whole, late = (Fleet([make_sim(kv_mib=60) for _ in range(2)], Router("least"), s) for s in (0.0, 0.6))
    for fleet in (whole, late):
        fleet.serve(arrivals)
    all_of_it, counted = whole.summary(), late.summary()
    assert all_of_it["requests"] == 60
    assert counted["requests"] == sum(a.at >= 0.6 for a in arrivals)
    assert counted["seconds"] == pytest.approx(arrivals[-1].at - 0.6)
    series = [(t, n) for r in late.replicas for t, n in zip(r.series.clock, r.series.outputs, strict=True)]
    inside = sum(n for t, n in series if 0.6 <= t < arrivals[-1].at)
    assert counted["output_tokens_per_s"] * counted["seconds"] == pytest.approx(inside)


def test_a_fleet_that_refuses_everything_says_why(make_sim):
    fleet = Fleet([make_sim(kv_mib=6)], Router("prefix"))
    fleet.serve([Arrival(0.0, 4000, 50, 0)])
    with pytest.raises(ConfigError, match="no request was served: request 0"):
        fleet.summary()
