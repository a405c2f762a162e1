"""What once went wrong, or nearly: requests, caps and clients that try to break the engine."""

from __future__ import annotations

import pytest
from support.cores import greedy
from support.tiny import oracle, tiny_checkpoint, tiny_prompts

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
