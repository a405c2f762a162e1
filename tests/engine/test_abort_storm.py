"""A thousand requests killed wherever they are: every page comes back, and the next answer is the same."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from support.cores import cap_for, greedy, make_bench
from support.tiny import tiny_prompts

from rimuru.engine.request import Grammar, Phase, SamplingParams
from rimuru.policy.boundary import Swing

SHAPE = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "memory_policy": "reactive"}


@pytest.mark.slow
def test_a_thousand_kills_in_every_phase_leave_the_pool_as_it_was() -> None:
    # Memory for part of the experts and two or three requests: steps lend, take back, preempt and queue.
    options = {**SHAPE, "debug_pool": True, "enable_prefix_caching": False}
    bench = make_bench(device_memory=cap_for("qwen3_moe", 0.6, 500, **SHAPE), **options)
    core, rng = bench.core, random.Random(0)
    core.memory.boundary = Swing(
        0.2
    )  # the boundary moves with every step, so experts come and go all the time
    probe = tiny_prompts()[6]
    bench.add("before", probe)
    bench.run()

    def held() -> dict[tuple[str, str], int]:
        return {key: n for key, n in core.pool_stats().pages_by.items() if key[0] == "kv"}

    baseline = held()
    phases: Counter[str] = Counter()
    alive: dict[str, None] = {}
    started = 0
    while phases.total() < 1000:
        # Always a dozen under way, so that there is something to lend memory to.
        while len(alive) < 12:
            name = f"r{started}"
            started += 1
            size = rng.choice((3, 20, 90, 150))
            bench.add(name, [rng.randrange(3, 640) for _ in range(size)], greedy(rng.choice((30, 60, 90))))
            alive[name] = None
        for _ in range(rng.randrange(3)):
            moved = core.memory.promotions + core.memory.demotions
            bench.step()
            alive = {n: None for n in alive if n in core.scheduler.requests}
            if core.memory.promotions + core.memory.demotions != moved and alive:
                victim = rng.choice(list(alive))
                phases["boundary"] += 1
                core.abort(victim)
                core.check()
                del alive[victim]
        if alive:
            victim = rng.choice(list(alive))
            request = core.scheduler.requests[victim]
            if request.phase is Phase.RUNNING:
                phases["prefill" if request.num_computed < request.num_prompt else "decode"] += 1
            else:
                phases["queued" if request.phase is Phase.WAITING else "preempted"] += 1
            core.abort(victim)
            core.check()
            del alive[victim]
    for name in list(alive):
        core.abort(name)
    core.check()
    assert not core.has_work
    assert held() == baseline
    assert all(phases[phase] >= 10 for phase in ("queued", "prefill", "decode", "boundary")), phases
    bench.add("after", probe)
    bench.run()
    assert bench.tokens("after") == bench.tokens("before")


def test_a_request_killed_while_its_grammar_compiles_leaves_nothing() -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    bench = make_bench()
    for i in range(10):
        params = SamplingParams(max_tokens=20, grammar=Grammar("regex", f"a{{{i + 1}}}"))
        bench.add(f"g{i}", [3, 4], params)
        bench.core.abort(f"g{i}")
    assert not bench.core.has_work
    bench.core.check()
