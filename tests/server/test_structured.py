"""Forms of output: every way of asking becomes the grammar it means, and forced calls come back as calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rimuru.engine.request import Grammar
from server.conftest import Live
from server.stub_engine import EOS, StubEngine

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "json_schema",
            json.dumps(SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '["a", "b"]'),
        ({"guided_json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["é"]}, "choice", '["é"]'),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
    ],
)
def test_every_way_of_asking_means_one_grammar(serve: Any, fields: Any, kind: str, text: str) -> None:
    live: Live = serve()
    for path, body in ((CHAT, {"messages": HI}), ("/v1/completions", {"prompt": "hi"})):
        assert live.post(path, {**body, **fields, "max_tokens": 1}).status_code == 200
        grammar = live.engine.seen[-1][2].grammar
        assert grammar == Grammar(kind, text)
        assert grammar.param == next(iter(fields))


def test_a_format_of_text_asks_for_nothing(serve: Any) -> None:
    live: Live = serve()
    live.post(CHAT, {"messages": HI, "max_tokens": 1, "response_format": {"type": "text"}})
    assert live.engine.seen[-1][2].grammar is None


def answering(serve: Any, tokenizer: Any, text: str, **settings: Any) -> Live:
    return serve(StubEngine(answer=lambda p, q: [*tokenizer.encode(text), EOS]), **settings)


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_call_is_the_arguments_and_nothing_else(serve: Any, tokenizer: Any, stream: bool) -> None:
    live = answering(serve, tokenizer, '{"city": "東京"}')
    call, finish, content = first_call(live, stream, tools=[WEATHER, CLOCK], tool_choice=NAMED)
    assert call == ("weather", {"city": "東京"})
    assert (finish, content) == ("tool_calls", "")
    assert json.loads(live.engine.seen[-1][2].grammar.text) == SCHEMA


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_is_one_of_those_offered(serve: Any, tokenizer: Any, stream: bool) -> None:
    live = answering(serve, tokenizer, '[{"name": "weather", "arguments": {"city": "x"}}]')
    call, finish, content = first_call(live, stream, tools=[WEATHER, CLOCK], tool_choice="required")
    assert call == ("weather", {"city": "x"})
    assert (finish, content) == ("tool_calls", "")
    schema = json.loads(live.engine.seen[-1][2].grammar.text)
    assert [s["properties"]["name"]["const"] for s in schema["items"]["anyOf"]] == ["weather", "clock"]


def first_call(live: Live, stream: bool, **options: Any) -> tuple[Any, str | None, str]:
    answer = live.openai().chat.completions.create(model="stub", messages=HI, stream=stream, **options)
    if not stream:
        choice = answer.choices[0]
        (call,) = choice.message.tool_calls
        named = call.function.name, json.loads(call.function.arguments)
        return named, choice.finish_reason, choice.message.content or ""
    chunks = list(answer)
    (call,) = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    return (
        (call.function.name, json.loads(call.function.arguments)),
        chunks[-1].choices[0].finish_reason,
        content,
    )


def test_a_call_cut_short_comes_back_as_content(serve: Any, tokenizer: Any) -> None:
    live = answering(serve, tokenizer, '{"city": "Par')
    body = {"messages": HI, "tools": [WEATHER], "tool_choice": NAMED}
    (choice,) = live.post(CHAT, body).json()["choices"]
    assert choice["message"]["content"] == '{"city": "Par'
    assert "tool_calls" not in choice["message"]


def test_the_form_begins_where_the_reasoning_ends(serve: Any, tokenizer: Any) -> None:
    end = tuple(tokenizer.encode("</think>"))
    live = answering(serve, tokenizer, "hm</think>{}", reasoning_parser="deepseek_r1")
    body = {"messages": HI, "response_format": {"type": "json_object"}}
    message = live.post(CHAT, body).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("{}", "hm")
    assert live.engine.seen[-1][2].grammar.after == end
    shut = "{% for m in messages %}{{ m['content'] }}{% endfor %}<think></think>\n"
    closed = answering(serve, tokenizer, "{}", reasoning_parser="deepseek_r1", template=shut)
    assert closed.post(CHAT, body).json()["choices"][0]["message"]["content"] == "{}"
    assert closed.engine.seen[-1][2].grammar.after == ()


def test_a_form_and_a_forced_call_exclude_each_other(serve: Any) -> None:
    live: Live = serve()
    body = {"messages": HI, "tools": [WEATHER], "tool_choice": "required", "guided_regex": "a"}
    answer = live.post(CHAT, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tool_choice"
