"""The table of request fields in docs/server.md is what the server does, field by field."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rimuru.models.tokenizer import Tokenizer
from rimuru.server.frontend import Frontend
from rimuru.server.prompts import Prompts
from rimuru.server.protocol import ChatBody, CompletionBody
from rimuru.server.settings import ServerSettings
from server.conftest import Live, listening
from server.stub_engine import StubEngine

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

# What clients written for the OpenAI API and for vLLM put into bodies.
SENT_BY_CLIENTS = {
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "stop",
    "stream", "stream_options", "seed", "logprobs", "top_logprobs", "logit_bias", "presence_penalty",
    "frequency_penalty", "response_format", "tools", "tool_choice", "parallel_tool_calls", "user", "echo",
    "suffix", "reasoning_effort",
    "top_k", "min_p", "repetition_penalty", "ignore_eos", "min_tokens", "stop_token_ids",
    "skip_special_tokens", "include_stop_str_in_output", "add_generation_prompt", "continue_final_message",
    "chat_template", "chat_template_kwargs", "add_special_tokens", "truncate_prompt_tokens",
    "prompt_logprobs", "allowed_token_ids", "structured_outputs", "priority", "cache_salt", "request_id",
    "return_token_ids",
}  # fmt: skip

# A value that asks for something, and what must go with it.
ASKED: dict[str, Any] = {
    "messages": HI, "prompt": [[5, 6], [7]], "model": "stub", "max_tokens": 3, "max_completion_tokens": 3,
    "min_tokens": 1, "n": 2, "seed": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
    "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"5": 1},
    "allowed_token_ids": [70, 71], "stop": ["x", "y"], "stop_token_ids": [70],
    "include_stop_str_in_output": True, "ignore_eos": True, "skip_special_tokens": False, "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "logprobs": {CHAT: True, COMPLETIONS: 2}, "top_logprobs": 2, "prompt_logprobs": 2, "echo": True,
    "return_token_ids": True, "truncate_prompt_tokens": 1,
    "add_special_tokens": True, "priority": -3, "cache_salt": "mine", "request_id": "mine", "user": "me",
    "add_generation_prompt": False, "continue_final_message": True, "chat_template_kwargs": {"x": 1},
    "reasoning_effort": "low", "chat_template": "{{ 1 }}", "tools": [TOOL], "tool_choice": "none",
    "parallel_tool_calls": False, "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a+"}, "guided_json": {"type": "object"}, "guided_regex": "a+",
    "guided_choice": ["a"], "guided_grammar": 'root ::= "a"',
    "modalities": ["text"], "audio": {"voice": "x"}, "functions": [{"name": "f"}], "function_call": "auto",
    "suffix": "end", "prompt_embeds": "x", "best_of": 3, "use_beam_search": True, "logits_processors": ["x"],
    "bad_words": ["x"], "return_tokens_as_token_ids": True, "kv_transfer_params": {"x": 1},
}  # fmt: skip
WITH: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "tools": {"tool_choice": "required"},
    "continue_final_message": {"add_generation_prompt": False},
}


def table() -> dict[str, dict[str, str]]:
    """Field to what its row says of each route: `yes`, `400` or nothing."""
    section = PAGE.read_text().split("## Fields of a request")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ?(yes|400|) ?\| ?(yes|400|) ?\|", section, re.MULTILINE)
    assert len(rows) == section.count("\n| `"), "a row that is not read"
    assert len({name for name, *_ in rows}) == len(rows), "a field twice"
    return {name: {CHAT: chat, COMPLETIONS: completions} for name, chat, completions in rows}


@pytest.fixture(scope="module")
def live(tokenizer: Tokenizer) -> Iterator[Live]:
    engine = StubEngine()
    frontend = Frontend(engine, Prompts(tokenizer, engine.info), ServerSettings(["stub"]))
    with listening(frontend, engine) as live:
        yield live


def test_every_field_of_the_bodies_has_its_row_and_every_row_its_field() -> None:
    rows = table()
    for path, body in ((CHAT, ChatBody), (COMPLETIONS, CompletionBody)):
        assert {name for name, by_path in rows.items() if by_path[path]} == set(body.model_fields)


def test_every_field_that_clients_send_is_in_the_table() -> None:
    assert table().keys() >= SENT_BY_CLIENTS


@pytest.mark.parametrize(
    ("field", "path", "says"),
    [(name, path, says) for name, by_path in table().items() for path, says in by_path.items() if says],
)
def test_a_field_is_served_or_refused_as_the_table_says(live: Live, field: str, path: str, says: str) -> None:
    value = ASKED[field]
    if field == "logprobs":
        value = value[path]
    base = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    answer = live.post(path, {"max_tokens": 2, **base, **WITH.get(field, {}), field: value})
    if says == "400":
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == field
    else:
        assert answer.status_code == 200, answer.text
