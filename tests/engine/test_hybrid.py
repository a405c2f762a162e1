"""Recurrent states in the pool: `transformers`' tokens along every path, and never a stale state."""

from __future__ import annotations

import random

import pytest
import torch
from support.cores import GREEDY, Bench, cap_for, greedy
from support.tiny import HYBRID_FAMILIES, oracle, tiny_checkpoint, tiny_prompts

from rimuru.engine.request import FinishReason
from rimuru.policy.boundary import Swing
from rimuru.pool.geometry import Kind

LOGIT_BOUND = 1e-4  # float32, the product's own bar
BLOCK = 16


def assert_equal(
    bench: Bench, family: str, prompts: list[list[int]], prefix: str = "r", n: int = GREEDY
) -> None:
    tokens, logits = oracle(tiny_checkpoint(family), prompts, n)
    for i in range(len(prompts)):
        name = f"{prefix}{i}"
        assert bench.tokens(name) == tokens[i], f"prompt {i} of {len(prompts[i])} tokens"
        rows = torch.stack(bench.logits[name][-n:])
        assert torch.isfinite(rows).all()
        assert (rows - logits[i]).abs().max() < LOGIT_BOUND


def run_all(
    bench: Bench, prompts: list[list[int]], prefix: str = "r", each_step=None, n: int = GREEDY
) -> None:
    for i, prompt in enumerate(prompts):
        bench.add(f"{prefix}{i}", prompt, greedy(n))
    bench.run(each_step)


def used(bench: Bench, kind: Kind) -> int:
    allocator = bench.core.memory.cache.allocator
    return sum(allocator.used(cls) for cls in bench.plan.geometry.classes_of(kind))


def groups(bench: Bench, kind: Kind) -> int:
    return len(bench.plan.geometry.groups_of(kind))


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
@pytest.mark.parametrize("chunk", [9, 64])
def test_eight_prompts_batched_in_chunks(bench, family, chunk):
    b = bench(family, max_num_batched_tokens=chunk)
    run_all(b, tiny_prompts())
    assert_equal(b, family, tiny_prompts())


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_pool_that_holds_a_third_of_the_experts(bench, family):
    b = bench(family, device_memory=cap_for(family, 1 / 3, 64))
    run_all(b, tiny_prompts())
    stats = b.core.stats()
    assert int(b.core.store.resident.sum()) <= b.plan.experts_total * 0.5, "the cap was meant to be tight"
    assert stats.expert_misses > 0
    assert_equal(b, family, tiny_prompts())


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_boundary_that_swings_on_every_step(bench, family):
    b = bench(family, device_memory=cap_for(family, 0.5, 512))
    b.core.memory.boundary = Swing(0.8)
    run_all(b, tiny_prompts(), "first-")
    run_all(b, tiny_prompts(), "again-")
    assert b.core.stats().demotions > 20
    assert b.core.stats().promotions > 20
    assert_equal(b, family, tiny_prompts(), "first-")
    assert_equal(b, family, tiny_prompts(), "again-")


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_prompts_of_every_offset_in_a_block_hit_and_miss_alike(bench, family):
    b = bench(family, max_num_seqs=4)
    for n in range(2 * BLOCK - 1, 3 * BLOCK + 2):
        prompt = tiny_prompts((n,), seed=n)
        before = b.core.stats().prefix_hits
        run_all(b, prompt, f"{n}-miss-", n=4)
        assert b.core.stats().prefix_hits == before
        run_all(b, prompt, f"{n}-hit-", n=4)
        assert b.core.stats().prefix_hits - before == (n - 1) // BLOCK * BLOCK
        assert_equal(b, family, prompt, f"{n}-miss-", n=4)
        assert_equal(b, family, prompt, f"{n}-hit-", n=4)


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_a_prompt_that_continues_another_starts_from_its_checkpoint(bench, family):
    b = bench(family, max_num_batched_tokens=2 * BLOCK)
    first = tiny_prompts((70,), seed=1)[0]
    run_all(b, [first], "first-")
    # Chunks ended at 32 and 64; a prompt that leaves the first one between them starts from the lower.
    for cut, expected in ((70, 64), (65, 64), (64, 64), (50, 32), (40, 32), (31, 0)):
        prompt = first[:cut] + tiny_prompts((21,), seed=cut)[0]
        before = b.core.stats().prefix_hits
        run_all(b, [prompt], f"{cut}-", n=4)
        assert b.core.stats().prefix_hits - before == expected, cut
        assert_equal(b, family, [prompt], f"{cut}-", n=4)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_forced_preemption_in_every_phase(bench, family, caching):
    b = bench(family, max_num_batched_tokens=16, enable_prefix_caching=caching)

    def preempt(step: int) -> None:
        running = b.core.scheduler.running
        if step < 40 and step % 3 == 2 and running:
            b.core.scheduler.preempt(running[step // 3 % len(running)], "forced")

    run_all(b, tiny_prompts(), each_step=preempt)
    assert b.core.stats().preemptions["forced"] >= 8
    assert_equal(b, family, tiny_prompts())


def test_pool_too_small_for_all_preempts_by_itself_and_stays_right(bench):
    family = "qwen3_next"
    b = bench(
        family, max_model_len=None, memory_policy="static", resident_experts=0, max_num_seqs=6,
        device_memory=cap_for(family, 0, 240, max_model_len=None, max_num_seqs=6),
    )  # fmt: skip
    prompts = tiny_prompts((17, 30, 31, 45, 46, 33))
    for i, prompt in enumerate(prompts):
        b.add(f"r{i}", prompt, greedy(32))
    b.run()
    assert b.core.stats().preemptions.get("memory", 0) > 0
    assert_equal(b, family, prompts, n=32)


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_a_short_request_holds_its_state_and_one_block_a_group(bench, family):
    b = bench(family, max_num_batched_tokens=128)
    for i, prompt in enumerate(tiny_prompts((12,) * 8, seed=7)):
        b.add(f"r{i}", prompt, greedy(2))
    b.step()
    cache = b.core.memory.cache
    assert len(b.core.scheduler.running) == 8
    assert used(b, Kind.STATE) == 8 * groups(b, Kind.STATE)
    assert used(b, Kind.CONV) == 8 * groups(b, Kind.CONV)
    assert cache.counts().used == 8
    # What lies reserved behind a block fills the rest of its own parent and counts as free.
    cache.take_back_reserved()
    assert used(b, Kind.KV) == 8 * groups(b, Kind.KV)
    b.run()
    assert used(b, Kind.STATE) == 0
    assert used(b, Kind.CONV) == 0


def test_two_hundred_short_prompts_in_a_small_pool(bench):
    family = "qwen3_5_moe"
    b = bench(family, max_num_seqs=16, device_memory=cap_for(family, 0.4, 64, max_num_seqs=4))
    prompts = tiny_prompts((12,) * 200, seed=11)
    run_all(b, prompts, n=3)
    assert b.core.memory.cache.counts().used == 0
    some = {i: prompts[i] for i in range(0, 200, 25)}
    tokens, _ = oracle(tiny_checkpoint(family), list(some.values()), 3)
    assert [b.tokens(f"r{i}") for i in some] == tokens
    assert b.core.stats().preemptions == {}


def test_experts_leave_for_a_lone_request_where_forgetting_checkpoints_makes_no_room(bench):
    """All checkpoints lie in one page with the request's own state, and only count as evictable."""
    family, options = "qwen3_next", {"max_num_seqs": 1, "max_model_len": None}
    b = bench(family, device_memory=cap_for(family, 5 / 32, 240, **options), **options)
    longest = b.plan.max_request_tokens - 1
    prompts = tiny_prompts((longest, 1, 240), seed=4)
    for i, (prompt, n) in enumerate(zip(prompts, (1, 20, 20), strict=True)):
        b.add(f"r{i}", prompt, greedy(n))
    b.run()
    assert [b.finish(f"r{i}") for i in range(3)] == [FinishReason.LENGTH] * 3
    assert b.tokens("r2") == oracle(tiny_checkpoint(family), prompts[2:], 20)[0][0]


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_checkpoints_give_way_to_requests_and_to_each_other(bench, family):
    b = bench(family, max_num_seqs=3, device_memory=cap_for(family, 0.2, 128, max_num_seqs=4))
    rng = random.Random(3)
    prompts = [tiny_prompts((rng.randrange(20, 70),), seed=i)[0] for i in range(9)]
    for turn in range(3):
        rng.shuffle(prompts)
        run_all(b, prompts, f"{turn}-", n=4)
        assert_equal(b, family, prompts, f"{turn}-", n=4)
    assert b.core.memory.states.checkpoints > 0


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_aborts_in_every_phase_leave_nothing_behind(bench, family):
    b = bench(family, max_num_batched_tokens=24)
    rng = random.Random(5)
    for i in range(30):
        b.add(f"r{i}", tiny_prompts((rng.randrange(1, 80),), seed=i)[0])
        for _ in range(rng.randrange(4)):
            b.step()
        b.core.abort(f"r{rng.randrange(i + 1)}")
    b.run()
    assert b.core.memory.states.active == 0
    b.core.reset_prefix_cache()
    assert [used(b, kind) for kind in (Kind.KV, Kind.STATE, Kind.CONV)] == [0, 0, 0]
    prompt = tiny_prompts((40,), seed=99)
    run_all(b, prompt, "after-")
    assert_equal(b, family, prompt, "after-")


@pytest.mark.parametrize("swing", [False, True])
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_shared_prefixes_preemptions_and_aborts_in_a_tight_pool(bench, family, swing):
    rng = random.Random(family + str(swing))
    b = bench(family, max_num_seqs=4, max_num_batched_tokens=40, device_memory=cap_for(family, 0.3, 300))
    if swing:
        b.core.memory.boundary = Swing(0.8)
    stems = tiny_prompts((20, 45, 90), seed=8)
    prompts = []
    for i, tail in enumerate(tiny_prompts((1, 9, 16, 22, 30, 33), seed=9)):
        stem = stems[i % 3]
        prompts.append(stem[: rng.randrange(len(stem)) if i > 2 else len(stem)] + tail)
    asked: dict[str, int] = {}
    aborted = set()
    while len(asked) < 24 or b.core.has_work:
        if len(asked) < 24 and rng.random() < 0.4:
            name = f"r{len(asked)}"
            asked[name] = rng.randrange(len(prompts))
            b.add(name, prompts[asked[name]], greedy(4))
        if b.core.has_work:
            b.step()
        if b.core.scheduler.running and rng.random() < 0.1:
            b.core.scheduler.preempt(rng.choice(b.core.scheduler.running), "forced")
        if asked and rng.random() < 0.05:
            aborted.add(name := rng.choice(list(asked)))
            b.core.abort(name)
    tokens, _ = oracle(tiny_checkpoint(family), prompts, 4)
    for name, i in asked.items():
        assert name in aborted or b.tokens(name) == tokens[i], name
    stats = b.core.stats()
    assert swing or stats.prefix_hits > 0  # a swing takes the cached prefixes' pages for experts
    assert stats.preemptions["forced"] > 0
    assert b.core.memory.states.active == 0


def test_the_pool_accounts_for_states_and_checkpoints(bench):
    b = bench("qwen3_next")
    b.add("a", tiny_prompts((40,))[0])
    b.step()
    b.step()
    stats = b.core.pool_stats()
    assert stats.pages_by["state", "used"] == groups(b, Kind.STATE)
    assert stats.pages_by["state", "cached"] == groups(b, Kind.STATE)
    assert stats.pages_by["conv", "used"] == groups(b, Kind.CONV)
    assert sum(stats.bytes_by.values()) == stats.pool_bytes


def test_a_checkpoint_of_another_prompt_would_show(bench):
    """The comparison can fail: a state that is not the one of the block's end changes the answer."""
    family = "qwen3_next"
    b = bench(family)
    prompts = tiny_prompts((40, 41), seed=2)
    run_all(b, prompts, "miss-")
    points = b.core.memory.states._checkpoints
    first, second = points.values()
    first.pages, second.pages = second.pages, first.pages
    run_all(b, prompts, "hit-")
    with pytest.raises(AssertionError):
        assert_equal(b, family, prompts, "hit-")
