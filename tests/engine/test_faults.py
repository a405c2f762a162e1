"""What once went wrong, or nearly: requests, caps and clients that try to break the engine."""

from __future__ import annotations

import pytest
from support.cores import greedy
from support.tiny import oracle, tiny_checkpoint, tiny_prompts

from rimuru.engine.llm import LLM
from rimuru.engine.request import SamplingParams
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
