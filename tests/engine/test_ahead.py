"""Steps launched before the last one is known, as on a GPU: the same answers, and nothing left behind.

The host's part of it runs here on the CPU: placeholders, packed inputs, padded shapes, tokens that only the
device knows. The graphs themselves are checked by `benchmarks/gpu_check.py`.
"""

from __future__ import annotations

import pytest
from support.cores import Bench, cap_for, greedy, make_bench, run_ahead
from support.tiny import FAMILIES, HYBRID_FAMILIES, oracle, tiny_checkpoint, tiny_prompts
from test_equals_transformers import assert_equal, run_all

from rimuru.engine.request import FinishReason, SamplingParams
from rimuru.policy.boundary import Swing


def ahead(family: str = "qwen3_moe", padded: bool = False, **options) -> Bench:
    return run_ahead(make_bench(family, **options), padded)


def known_tokens(family: str, n: int) -> list[list[int]]:
    return oracle(tiny_checkpoint(family), tiny_prompts(), n)[0]


@pytest.mark.parametrize("family", FAMILIES + HYBRID_FAMILIES)
@pytest.mark.parametrize("padded", [False, True])
def test_greedy_tokens_equal_transformers(family, padded):
    b = ahead(family, padded, max_num_batched_tokens=32)
    run_all(b, tiny_prompts())
    assert_equal(b, family, tiny_prompts())


@pytest.mark.parametrize("padded", [False, True])
def test_padding_touches_no_expert(padded):
    counts = []
    for b in (make_bench(), ahead(padded=padded)):
        run_all(b, tiny_prompts())
        counts.append(b.core.stats().expert_hits)
    assert counts[0] == counts[1]


def test_boundary_swings_while_steps_are_under_way():
    b = ahead("mixtral", True, device_memory=cap_for("mixtral", 0.5, 512))
    b.core.memory.boundary = Swing(0.8)
    run_all(b, tiny_prompts())
    assert b.core.stats().demotions > 20
    assert_equal(b, "mixtral", tiny_prompts())


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_while_its_token_is_under_way(caching):
    b = ahead(max_num_batched_tokens=16, enable_prefix_caching=caching)

    def preempt(step: int) -> None:
        running = b.core.scheduler.running
        if step < 40 and step % 3 == 2 and running:
            b.core.scheduler.preempt(running[step // 3 % len(running)], "forced")

    run_all(b, tiny_prompts(), each_step=preempt)
    assert b.core.stats().preemptions["forced"] >= 8
    expected = known_tokens("qwen3_moe", 12)
    for i in range(len(expected)):
        assert b.tokens(f"r{i}") == expected[i]


def test_prefix_hit_equals_miss():
    b = ahead("qwen2_moe")
    for name in ("miss", "hit"):
        run_all(b, tiny_prompts(), name)
        assert_equal(b, "qwen2_moe", tiny_prompts(), name)
    assert b.core.stats().prefix_hits == sum((len(p) - 1) // 16 * 16 for p in tiny_prompts())


def test_a_stop_token_ends_a_request_whose_next_step_was_launched():
    expected = known_tokens("qwen3_moe", 12)
    b = ahead()
    for i, prompt in enumerate(tiny_prompts()):
        stop = [expected[i][5]] if i % 2 else []
        b.add(
            f"r{i}",
            prompt,
            SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=stop),
        )
    b.run()
    for i, tokens in enumerate(expected):
        if i % 2:
            assert b.tokens(f"r{i}") == tokens[: tokens.index(tokens[5]) + 1]
            assert b.finish(f"r{i}") == FinishReason.STOP
        else:
            assert b.tokens(f"r{i}") == tokens
    assert not b.core.has_work
    assert b.core.pool_stats().bytes_by["kv", "used"] == 0


def test_an_abort_while_a_step_is_under_way_returns_the_pages_and_disturbs_nobody():
    b = ahead()
    for i, prompt in enumerate(tiny_prompts()):
        b.add(f"r{i}", prompt)
    b.run(lambda step: b.core.abort("r3") if step == 6 else None)
    expected = known_tokens("qwen3_moe", 12)
    assert all(b.tokens(f"r{i}") == expected[i] for i in range(len(expected)) if i != 3)
    assert b.tokens("r3") == expected[3][: len(b.tokens("r3"))]
    assert b.core.pool_stats().bytes_by["kv", "used"] == 0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1, max_tokens=9),
        SamplingParams(seed=2, max_tokens=9, top_p=0.8, top_k=7, min_p=0.01),
        SamplingParams(seed=3, max_tokens=9, repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(seed=4, max_tokens=9, min_tokens=5, logit_bias={3: 5.0, 7: -100.0}),
        SamplingParams(temperature=0.0, max_tokens=9, logprobs=3, prompt_logprobs=2),
        SamplingParams(seed=5, max_tokens=9, allowed_token_ids=[4, 5, 6, 7]),
    ],
    ids=["plain", "filters", "penalties", "bias", "logprobs", "allowed"],
)
def test_every_way_of_sampling_gives_what_it_gives_step_by_step(params):
    results = []
    for b in (make_bench(), ahead(), ahead(padded=True)):
        for i, prompt in enumerate(tiny_prompts()):
            b.add(f"r{i}", prompt, params if i % 2 else greedy(9))
        b.run()
        results.append(b)
    plain = results[0]
    for other in results[1:]:
        for i in range(len(tiny_prompts())):
            name = f"r{i}"
            assert other.tokens(name) == plain.tokens(name)
            for mine, its in zip(other.outputs[name], plain.outputs[name], strict=True):
                for attribute in ("logprobs", "prompt_logprobs"):
                    a, c = getattr(mine, attribute), getattr(its, attribute)
                    assert (a is None) == (c is None)
                    for x, y in zip(a or [], c or [], strict=True):
                        assert (x is None) == (y is None)
                        if x is not None:
                            assert (x.token, x.rank, x.top_ids) == (y.token, y.rank, y.top_ids)
                            assert abs(x.logprob - y.logprob) < 1e-4


def test_one_step_is_always_under_way_while_requests_decode():
    b = ahead()
    for i, prompt in enumerate(tiny_prompts()):
        b.add(f"r{i}", prompt)
    assert b.step() == [], "the first step is launched, and nothing is known yet"
    assert b.step(), "its outputs come while the second is under way"
    assert b.core._under_way is not None
