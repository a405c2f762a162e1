"""Greedy tokens and logits equal transformers', along every path the memory can take."""

from __future__ import annotations

import pytest
import torch
from support.cores import GREEDY, Bench, cap_for, greedy
from support.tiny import FAMILIES, oracle, tiny_checkpoint, tiny_prompts

from rimuru.policy.boundary import Swing

LOGIT_BOUND = 1e-4  # float32, the product's own bar


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


def run_all(bench: Bench, prompts: list[list[int]], prefix: str = "r", each_step=None) -> None:
    for i, prompt in enumerate(prompts):
        bench.add(f"{prefix}{i}", prompt)
    bench.run(each_step)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [7, 16, 64])
def test_eight_prompts_batched_in_chunks(bench, family, chunk):
    b = bench(family, max_num_batched_tokens=max(chunk, 8))
    prompts = tiny_prompts()
    assert max(map(len, prompts)) > chunk
    run_all(b, prompts)
    assert_equal(b, family, prompts)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_expert_in_host_memory(bench, family):
    b = bench(family, memory_policy="static", resident_experts=0, device_memory=cap_for(family, 0.2, 2048))
    prompts = tiny_prompts()
    run_all(b, prompts)
    assert b.core.store.resident.sum() == 0
    stats = b.core.stats()
    assert stats.expert_misses > 0
    assert stats.expert_hits == 0
    assert_equal(b, family, prompts)


@pytest.mark.parametrize("family", FAMILIES)
def test_pool_that_holds_a_third_of_the_experts(bench, family):
    b = bench(family, device_memory=cap_for(family, 1 / 3, 64))
    prompts = tiny_prompts()
    run_all(b, prompts)
    resident = int(b.core.store.resident.sum())
    assert resident <= b.plan.experts_total * 0.5, "the cap was meant to be tight"
    stats = b.core.stats()
    assert stats.expert_misses > 0
    assert_equal(b, family, prompts)


@pytest.mark.parametrize("family", FAMILIES)
def test_boundary_that_swings_on_every_step(bench, family):
    b = bench(family, device_memory=cap_for(family, 0.5, 512))
    b.core.memory.boundary = Swing(0.8)
    seen = set()
    run_all(b, tiny_prompts(), each_step=lambda i: seen.add(int(b.core.store.resident.sum())))
    assert max(seen) - min(seen) >= b.plan.experts_total * 0.2, f"it hardly moved: {sorted(seen)}"
    assert b.core.stats().demotions > 20
    assert b.core.stats().promotions > 20
    assert_equal(b, family, tiny_prompts())


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_hit_equals_miss(bench, family):
    b = bench(family)
    prompts = tiny_prompts()
    run_all(b, prompts, "miss")
    assert b.core.stats().prefix_hits == 0
    run_all(b, prompts, "hit")
    # Every full block but one that would leave nothing to compute.
    assert b.core.stats().prefix_hits == sum((len(p) - 1) // 16 * 16 for p in prompts)
    assert_equal(b, family, prompts, "miss")
    assert_equal(b, family, prompts, "hit")


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_forced_preemption(bench, family, caching):
    b = bench(family, max_num_batched_tokens=16, enable_prefix_caching=caching)

    def preempt(step: int) -> None:
        running = b.core.scheduler.running
        if step < 40 and step % 3 == 2 and running:  # for ever would let nobody finish a prefill
            b.core.scheduler.preempt(running[step // 3 % len(running)], "forced")

    run_all(b, tiny_prompts(), each_step=preempt)
    assert b.core.stats().preemptions["forced"] >= 8
    assert_equal(b, family, tiny_prompts())


def test_pool_too_small_for_all_preempts_by_itself_and_stays_right(bench):
    family = "qwen3_moe"
    b = bench(
        family, max_model_len=None, memory_policy="static", resident_experts=0,
        device_memory=cap_for(family, 0, 160, max_model_len=None),
    )  # fmt: skip
    prompts = tiny_prompts((17, 30, 31, 45, 46, 33))
    for i, prompt in enumerate(prompts):
        b.add(f"r{i}", prompt, greedy(40))
    b.run()
    assert b.core.stats().preemptions.get("memory", 0) > 0
    assert_equal(b, family, prompts, n=40)


def test_every_prompt_length_around_a_block_hits_and_misses_alike(bench):
    family = "mixtral"
    b = bench(family, max_num_seqs=4)
    for n in (15, 16, 17, 18, 31, 32, 33):
        prompt = tiny_prompts((n,), seed=n)
        run_all(b, prompt, f"{n}-first-")
        run_all(b, prompt, f"{n}-again-")
        assert_equal(b, family, prompt, f"{n}-first-")
        assert_equal(b, family, prompt, f"{n}-again-")


def test_greedy_is_the_same_alone_and_in_a_batch_with_sampling_neighbours(bench):
    from rimuru.engine.request import SamplingParams

    b = bench("olmoe")
    prompts = tiny_prompts()
    for i, prompt in enumerate(prompts):
        b.add(
            f"r{i}", prompt, greedy() if i % 2 == 0 else SamplingParams(max_tokens=GREEDY, seed=i, top_p=0.9)
        )
    b.run()
    tokens, _ = oracle(tiny_checkpoint("olmoe"), prompts[::2], GREEDY)
    assert [b.tokens(f"r{i}") for i in range(0, len(prompts), 2)] == tokens
