"""Random lives of many requests, stepped ahead of the host, against each request alone in a roomy engine.

Requests come, are killed, preempted and moved while steps are under way, in pools that hold a few of them;
every structure is checked after each step. What is said of a request may depend on nothing of that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random

import pytest
from support.cores import Bench, cap_for, make_bench, run_ahead
from support.tiny import FAMILIES, HYBRID_FAMILIES, VOCAB

from rimuru.engine.request import FinishReason, SamplingParams, TokenOutput
from rimuru.errors import MemoryPlanError
from rimuru.policy.boundary import Swing
from rimuru.pool.geometry import Kind

LENGTH = 128


@functools.cache
def roomy(family: str) -> tuple[Bench, dict[str, list[TokenOutput]]]:
    options = {"enable_prefix_caching": False, "max_num_seqs": 1, "max_num_batched_tokens": 256}
    return make_bench(family, debug_pool=False, **options), {}


def alone(family: str, prompt: list[int], params: SamplingParams) -> list[TokenOutput]:
    """What the plain synchronous engine says of one request."""
    b, known = roomy(family)
    if (key := repr((prompt, params))) not in known:
        b.add(key, prompt, dataclasses.replace(params))
        b.run()
        known[key] = b.outputs[key]
    return known[key]


def draw_params(rng: random.Random) -> SamplingParams:
    n = rng.choice((1, 1, 2, 3, 5, 8, 12, 17))
    given: dict = {"max_tokens": n, "ignore_eos": rng.random() < 0.7, "temperature": 0.0}
    if rng.random() < 0.5:
        given |= {"temperature": 1.0, "seed": rng.randrange(1000), "top_k": rng.choice((0, 5, 20))}
    ways: list[dict] = [
        {},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"logit_bias": {rng.randrange(VOCAB): bias for bias in (-100.0, 5.0)}},
        {"allowed_token_ids": sorted({rng.randrange(VOCAB) for _ in range(5)})},
        {"min_tokens": rng.randrange(n + 1)},
    ]
    given |= rng.choice(ways)
    if rng.random() < 0.3:
        given |= {"logprobs": rng.choice((0, 3)), "prompt_logprobs": rng.choice((None, 0, 2))}
    if rng.random() < 0.4:
        given["stop_token_ids"] = [rng.randrange(VOCAB) for _ in range(40)]
    return SamplingParams(**given)


def tight(family: str, rng: random.Random) -> Bench:
    """An engine with pages for a part of the experts and a few requests."""
    options = {
        "max_num_seqs": rng.choice((1, 2, 4, 6)), "max_num_batched_tokens": rng.choice((9, 16, 33, 64)),
        "enable_prefix_caching": rng.random() < 0.75, "max_model_len": LENGTH,
        "memory_policy": rng.choice(("economic", "reactive")),
    }  # fmt: skip
    b = make_bench(
        family, device_memory=cap_for(family, rng.choice((0.1, 0.3, 0.5)), rng.choice((160, 320)), **options),
        **options,
    )  # fmt: skip
    if rng.random() < 0.35:
        b.core.memory.boundary = Swing(rng.choice((0.2, 0.5, 0.8)))
    return run_ahead(b, padded=rng.random() < 0.3) if rng.random() < 0.85 else b


def live(seed: int, family: str, requests: int) -> None:
    rng, b = random.Random(seed), None
    while b is None:  # until a cap is drawn that starts
        with contextlib.suppress(MemoryPlanError):
            b = tight(family, rng)
    core, asked, killed = b.core, {}, set()
    kill, preempt, move = rng.choice((0, 0.1)), rng.choice((0, 0.1, 0.3)), rng.choice((0, 0.2, 0.7))
    stems = [[rng.randrange(3, VOCAB) for _ in range(LENGTH)] for _ in range(2)]
    while len(asked) < requests or core.has_work:
        while len(asked) < requests and rng.random() < 0.5:
            params = draw_params(rng)
            most = LENGTH - (params.max_tokens or 0)
            n = min(most, rng.choice((1, 2, 15, 16, 17, 32, 33, 48, most, rng.randrange(1, most))))
            cut = rng.choice((0, n, n // 2, n // 16 * 16))
            prompt = rng.choice(stems)[:cut] + [rng.randrange(3, VOCAB) for _ in range(n - cut)]
            asked[name := f"r{len(asked)}"] = prompt, params
            b.add(name, prompt, dataclasses.replace(params), priority=rng.choice((0, 0, 0, -1, 1)))
        b.step()
        if rng.random() < kill and asked and (victim := rng.choice(list(asked))) in core.scheduler.requests:
            killed.add(victim)
            core.abort(victim)
        forced = core.scheduler.preemptions.get("forced", 0)
        if rng.random() < preempt and core.scheduler.running and forced < 60:  # some time they may end
            core.scheduler.preempt(rng.choice(core.scheduler.running), "forced")
        if rng.random() < 0.02:
            core.reset_prefix_cache()
        if rng.random() < move:
            core.memory.compact(over_cached=rng.random() < 0.5)
        core.check()
    for name, (prompt, params) in asked.items():
        assert_same(b.outputs.get(name, []), alone(family, prompt, params), name in killed, name)
    core.reset_prefix_cache()
    core.memory.cache.take_back_reserved()
    for kind in (Kind.KV, Kind.STATE, Kind.CONV):
        for cls in core.plan.geometry.classes_of(kind):
            assert core.memory.cache.allocator.used(cls) == 0, "pages that nobody gave back"


def assert_same(got: list[TokenOutput], want: list[TokenOutput], killed: bool, name: str) -> None:
    assert all(out.finish is not FinishReason.ERROR for out in got), name
    if not killed:
        assert len(got) == len(want), name
    for mine, its in zip(got, want, strict=False):
        assert mine.tokens == its.tokens, name
        assert (mine.finish, mine.stop_reason) == (its.finish, its.stop_reason), name
        for a, c in ((mine.logprobs, its.logprobs), (mine.prompt_logprobs, its.prompt_logprobs)):
            assert (a is None) == (c is None), name
            for x, y in zip(a or [], c or [], strict=True):
                assert (x is None) == (y is None), name
                if x is not None and y is not None:
                    assert (x.token, x.rank, x.top_ids) == (y.token, y.rank, y.top_ids), name
                    # The bound of the engine's float32 logits, twice: a log-probability is a difference.
                    assert abs(x.logprob - y.logprob) < 2e-4, name


@pytest.mark.parametrize(("seed", "family"), [(2, "qwen2_moe"), (3, "qwen3_next")])
def test_random_lives_end_as_they_would_alone(seed, family):
    live(seed, family, requests=6)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES + HYBRID_FAMILIES)
@pytest.mark.parametrize("seed", range(100, 115))
def test_many_random_lives_end_as_they_would_alone(seed, family):
    live(seed, family, requests=20)
