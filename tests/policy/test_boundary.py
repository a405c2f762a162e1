from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy.toy import Toy

from rimuru.errors import ConfigError, MemoryPlanError
from rimuru.policy.boundary import (
    BoundaryPlan,
    Capacity,
    DecisionLog,
    Fixed,
    Reactive,
    Snapshot,
    Static,
    Swing,
    hidden_experts,
    make_policy,
    reachable_kv_pages,
    start_check,
)

CAPACITY = Capacity(
    pool_pages=100,
    expert_total=80,
    expert_lendable=60,
    expert_floor=10,
    expert_page_bytes=6 << 20,
    kv_page_bytes=1 << 20,
    kv_per_expert=6,
    kv_min=50,
)


def snap(**over) -> Snapshot:
    base = {
        "now": 10.0, "expert_total": 80, "expert_resident": 80, "expert_lendable": 60, "expert_floor": 20,
        "expert_page_bytes": 6 << 20, "kv_page_bytes": 1 << 20, "kv_per_expert": 6,
        "kv_used": 100, "kv_obtainable": 20,
    }  # fmt: skip
    return Snapshot(**(base | over))


@st.composite
def snapshots(draw) -> Snapshot:
    total = draw(st.integers(1, 200))
    resident = draw(st.integers(0, total))
    rated = draw(st.booleans())
    waiting = draw(st.integers(0, 50))
    touched = draw(st.floats(0, total))
    return Snapshot(
        now=draw(st.floats(0, 1e4)),
        expert_total=total,
        expert_resident=resident,
        expert_lendable=draw(st.integers(0, resident)),
        expert_floor=draw(st.integers(0, total)),
        expert_page_bytes=6 << 20,
        kv_page_bytes=1 << 20,
        kv_per_expert=draw(st.integers(1, 12)),
        kv_used=draw(st.integers(0, 1000)),
        kv_obtainable=draw(st.integers(0, 500)),
        kv_evictable=draw(st.integers(0, 300)),
        kv_wanted_running=draw(st.integers(0, 400)),
        kv_wanted_waiting=draw(st.integers(0, 400)) if waiting else 0,
        running=draw(st.integers(0, 100)),
        waiting=waiting,
        oldest_wait=draw(st.floats(0, 10)) if waiting else 0.0,
        can_finish=draw(st.booleans()),
        touched=touched,
        missed=draw(st.floats(0, 1)) * touched,
        step_seconds=draw(st.floats(0, 0.5)),
        link_bytes_s=50e9 if rated else 0.0,
        hbm_bytes_s=4e12 if rated else 0.0,
        request_kv_pages=draw(st.floats(1, 100)),
        recompute_seconds=draw(st.floats(0, 0.1)),
        swap_seconds=draw(st.floats(0, 0.1)),
    )


def policies():
    return [Fixed(), Static(40), Reactive(), Swing(0.2)]


@settings(max_examples=120, deadline=None)
@given(snapshots())
def test_no_plan_asks_for_more_than_there_is(s):
    for policy in policies():
        plan = policy.decide(s)
        assert 0 <= plan.evict_pages <= s.kv_evictable
        if policy.name != "static":
            assert s.expert_resident - s.room_to_lend <= plan.expert_pages <= s.expert_total


@settings(max_examples=120, deadline=None)
@given(snapshots(), st.integers(1, 200))
def test_reactive_lends_no_less_when_more_is_wanted(s, more):
    less = Reactive(hold=0).decide(s)
    greater = Reactive(hold=0).decide(replace(s, kv_wanted_running=s.kv_wanted_running + more))
    assert greater.expert_pages <= less.expert_pages
    if s.shortfall > 0:
        assert greater.evict_pages >= less.evict_pages


@settings(max_examples=120, deadline=None)
@given(snapshots())
def test_reactive_gives_all_it_can_before_a_request_is_refused(s):
    plan = Reactive().decide(s)
    if s.shortfall > 0:
        lent = s.expert_resident - plan.expert_pages
        enough = lent * s.kv_per_expert + plan.evict_pages >= s.shortfall
        exhausted = lent == s.room_to_lend and plan.evict_pages == s.kv_evictable
        assert enough or exhausted
        assert lent * s.kv_per_expert < s.shortfall + s.kv_per_expert


@settings(max_examples=80, deadline=None)
@given(snapshots())
def test_fixed_and_static_never_move(s):
    assert Fixed().decide(s).expert_pages == s.expert_resident
    assert Static(40).decide(s).expert_pages == 40


def test_hidden_experts_are_lent_before_cached_prefixes_and_those_before_costly_ones():
    # Each layer's expert reads hide 5 % of what it touches: 4 of 80 experts.
    rated = {"touched": 80.0, "link_bytes_s": 50e9, "hbm_bytes_s": 1e12, "hiding_layers": 10}
    s = snap(kv_wanted_waiting=20 + 24, waiting=1, kv_evictable=30, **rated)
    assert hidden_experts(s) == pytest.approx(4)
    plan = Reactive().decide(s)
    assert (plan.expert_pages, plan.evict_pages, plan.cause) == (76, 0, "admission")
    plan = Reactive().decide(replace(s, kv_wanted_waiting=20 + 24 + 30))
    assert (plan.expert_pages, plan.evict_pages) == (76, 30)
    plan = Reactive().decide(replace(s, kv_wanted_waiting=20 + 24 + 30 + 7))
    assert (plan.expert_pages, plan.evict_pages) == (74, 30)


def test_growth_of_running_requests_is_named_as_the_cause():
    assert Reactive().decide(snap(kv_wanted_running=21)).cause == "growth"


def test_reactive_gives_back_only_after_a_quiet_time_and_keeps_a_reserve():
    policy = Reactive(hold=0.25)
    s = snap(expert_resident=70, kv_used=50, kv_obtainable=6 + 5 + 6 * 4)  # reserve: one page and 10 %
    assert policy.decide(replace(s, now=1.0)).expert_pages == 70
    assert policy.decide(replace(s, now=1.2)).expert_pages == 70
    plan = policy.decide(replace(s, now=1.3))
    assert (plan.expert_pages, plan.cause, plan.evict_pages) == (74, "surplus", 0)
    policy.decide(replace(s, now=1.4, waiting=1))  # someone waits: the quiet time starts again
    assert policy.decide(replace(s, now=1.5)).expert_pages == 70


def test_cached_prefixes_give_way_only_to_experts_whose_misses_cost():
    s = snap(expert_resident=70, kv_used=0, kv_obtainable=6, kv_evictable=60)
    assert Reactive(hold=0).decide(s).evict_pages == 60
    hidden = replace(s, touched=80.0, link_bytes_s=50e9, hbm_bytes_s=250e9)  # hides 16, only 10 are lent
    assert Reactive(hold=0).decide(hidden).evict_pages == 0


@pytest.mark.parametrize("policy", [Reactive(), Reactive(reserve=0.0)])
def test_no_oscillation_on_constant_load(policy):
    toy = Toy(policy, arrivals=25.0, seed=1)
    toy.run(3000)
    toy.moves.clear()
    toy.run(3000)
    turns = sum(a * b < 0 for a, b in zip(toy.moves, toy.moves[1:], strict=False))
    # a turn needs a quiet spell of `hold`: at most a few of them in the 60 s simulated here
    assert turns <= 60 / policy.hold * 0.1


def test_every_request_is_served_and_experts_come_back_after_a_burst():
    toy = Toy(Reactive(), arrivals=0.0, seed=2)
    toy.burst(60)
    toy.run(40)
    low = toy.resident
    toy.run(6000)
    assert low < toy.capacity.expert_total
    assert toy.finished == 60
    assert toy.resident >= toy.start - 2


def test_swing_moves_its_share_and_still_serves():
    toy = Toy(Swing(0.25), arrivals=10.0, seed=3)
    toy.run(2000)
    assert toy.finished > 100
    assert sum(m < 0 for m in toy.moves) > 500


def test_fixed_refuses_to_start_unless_all_fits_and_says_what_would_work():
    with pytest.raises(MemoryPlanError, match=r"at least 0\.56 GB.*reactive"):
        start_check(Fixed(), replace(CAPACITY, pool_pages=85))
    start_check(Fixed(), CAPACITY)


def test_static_names_the_host_memory_that_lacks():
    with pytest.raises(MemoryPlanError, match="at least 20 must stay resident"):
        Static(12).start(CAPACITY)
    with pytest.raises(ConfigError, match="has 80 experts"):
        Static(81).start(CAPACITY)
    assert Static(30).start(CAPACITY) == 30


def test_reactive_refuses_when_not_even_one_request_fits():
    with pytest.raises(MemoryPlanError, match="host-memory"):
        Reactive().start(replace(CAPACITY, pool_pages=25, expert_lendable=60))


def test_reachable_capacity_counts_what_the_policy_may_lend():
    assert reachable_kv_pages(Fixed(), CAPACITY) == 20 * 6
    assert reachable_kv_pages(Static(50), CAPACITY) == 50 * 6
    assert reachable_kv_pages(Reactive(), CAPACITY) == 80 * 6
    assert reachable_kv_pages(Reactive(), replace(CAPACITY, expert_lendable=80)) == 90 * 6


def test_start_leaves_room_for_the_longest_request():
    tight = replace(CAPACITY, pool_pages=82)
    assert Reactive().start(tight) == 82 - 9
    assert Reactive().start(CAPACITY) == 80


def test_log_keeps_moves_and_skips_repeats():
    log = DecisionLog(size=2)
    s = snap()
    log.note("reactive", s, BoundaryPlan(expert_pages=80))
    lend = BoundaryPlan(expert_pages=78, evict_pages=3, cause="growth", numbers={"shortfall": 9})
    log.note("reactive", s, lend)
    log.note("reactive", s, lend)
    log.note("reactive", replace(s, expert_resident=78), BoundaryPlan(expert_pages=79, cause="surplus"))
    assert log.moves == {
        ("reactive", "growth", "lend"): 1,
        ("reactive", "growth", "evict"): 1,
        ("reactive", "surplus", "reclaim"): 1,
    }
    assert [r["expert_pages"] for r in log.recent()] == [78, 79]
    assert log.recent()[0]["shortfall"] == 9
    assert [r["cause"] for r in log.recent(1)] == ["surplus"]


def test_unknown_policy_is_named():
    with pytest.raises(ConfigError, match="'greedy' is unknown"):
        make_policy("greedy")
    with pytest.raises(ConfigError, match="resident-experts"):
        make_policy("static")
