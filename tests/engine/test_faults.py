"""What once went wrong, or nearly: requests, caps and clients that try to break the engine."""

from __future__ import annotations

import time

import pytest
from support.cores import cap_for, greedy
from support.tiny import oracle, tiny_checkpoint, tiny_prompts

from rimuru.engine.llm import LLM
from rimuru.engine.request import FinishReason, SamplingParams
from rimuru.errors import RequestError

PROMPT = tiny_prompts((20,))[0]


@pytest.mark.parametrize(
    ("params", "more", "field"),
    [
        (SamplingParams(top_k=2**40), {}, "top_k"),
        (SamplingParams(repetition_penalty=1e-45), {}, "repetition_penalty"),
        (SamplingParams(stop_token_ids=None), {}, "stop_token_ids"),  # type: ignore[arg-type]
        (SamplingParams(allowed_token_ids=7), {}, "allowed_token_ids"),  # type: ignore[arg-type]
        (SamplingParams(logit_bias=[7]), {}, "logit_bias"),  # type: ignore[arg-type]
        (SamplingParams(allowed_token_ids=[2, 0], min_tokens=2), {}, "min_tokens"),
        (SamplingParams(allowed_token_ids=[9], stop_token_ids=[9], min_tokens=1), {}, "min_tokens"),
        (greedy(), {"cache_salt": "\ud800"}, "cache_salt"),
        (greedy(), {"priority": "high"}, "priority"),
    ],
)
def test_what_would_stop_a_later_step_is_refused_on_arrival(bench, params, more, field):
    b = bench("mixtral")
    b.add("good", PROMPT)
    b.step()
    with pytest.raises(RequestError) as error:
        b.add("bad", PROMPT, params, **more)
    assert error.value.param == field
    b.run()
    assert b.tokens("good") == oracle(tiny_checkpoint("mixtral"), [PROMPT], 12)[0][0]


@pytest.fixture(scope="module")
def llm():
    return LLM(
        str(tiny_checkpoint("mixtral")), dtype="float32", device="cpu", max_num_seqs=4, max_model_len=256
    )


def test_streams_read_in_turn_lose_no_tokens_to_each_other(llm):
    prompts = tiny_prompts((20, 9))
    want = oracle(tiny_checkpoint("mixtral"), prompts, 12)[0]
    first, second = (llm.stream(p, greedy()) for p in prompts)
    next(first)
    next(second)
    assert llm.generate(prompts[1], greedy(3))[0].outputs[0].token_ids == want[1][:3]
    *_, a = first  # steps the other stream's request to its end
    *_, b = second
    assert [a.outputs[0].token_ids, b.outputs[0].token_ids] == want


def test_a_stream_closed_early_leaves_the_others_alone(llm):
    prompts = tiny_prompts((20, 9))
    first, second = (llm.stream(p, greedy()) for p in prompts)
    next(first)
    next(second)
    first.close()
    *_, b = second
    assert [b.outputs[0].token_ids] == oracle(tiny_checkpoint("mixtral"), prompts, 12)[0][1:]
    assert not llm.core.has_work
    assert sum(llm.core.memory.held) == 0


class Clock:
    """Runs faster than the wall's, so that what waits a quarter of a second happens within a few steps."""

    def __init__(self, speed: float):
        self.speed = speed

    def monotonic(self) -> float:
        return time.monotonic() * self.speed


# 20 tokens a block: the KV pages of this model are cut from huge pages that hold four experts each, so an
# expert that leaves alone makes room for no block.
SCATTERED = {"block_size": 20, "max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 240}


@pytest.mark.parametrize("policy", ["reactive", "economic"])
def test_a_lone_request_grows_though_each_expert_that_leaves_shares_its_huge_page(bench, monkeypatch, policy):
    family = "qwen3_moe"
    monkeypatch.setattr("rimuru.engine.core.time", Clock(100))
    b = bench(family, memory_policy=policy, device_memory=cap_for(family, 0.9, 160, **SCATTERED), **SCATTERED)
    assert b.plan.units.experts_per_huge > 1
    assert b.plan.units.per_block * b.plan.units.page_bytes < b.plan.geometry.huge_bytes
    prompts = tiny_prompts((30, 100))
    for _ in range(3):
        b.add("both", prompts[1], greedy(2))  # lends, then finishes, so that experts come back where they can
        b.add("lone", prompts[0], greedy(180))
        b.run()
        assert b.finish("lone") == FinishReason.LENGTH, b.outputs["lone"][-1].error
        assert b.tokens("lone") == oracle(tiny_checkpoint(family), prompts, 180)[0][0]
        b.outputs.clear()
