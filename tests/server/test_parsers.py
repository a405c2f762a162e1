"""Reasoning and tool calls: the same split wherever the text is cut, and nothing lost."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rimuru.server.parsers import TOOL_STYLES, MessageParser, Said, ToolCall
from server.stub_engine import EOS, StubEngine

HI = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "東京"}}\n</tool_call>'
PARSED = ToolCall("weather", '{"city": "東京"}')


def parse(
    text: str, cuts: list[int], style: str | None, reasoning: bool = False, thinking: bool = False
) -> Said:
    parser = MessageParser(reasoning, thinking, TOOL_STYLES[style] if style else None)
    whole = Said()
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        piece = parser.push(text[start:end], final=end == len(text))
        whole.content += piece.content
        whole.reasoning += piece.reasoning
        whole.calls += piece.calls
    return whole


@pytest.mark.parametrize(
    ("text", "style", "reasoning", "thinking", "expected"),
    [
        ("just text <", "hermes", True, False, Said("just text <")),
        (CALL, "hermes", False, False, Said("", "", [PARSED])),
        (f"Let me look.\n{CALL}{CALL}", "qwen", False, False, Said("Let me look.\n", "", [PARSED, PARSED])),
        (CALL.removesuffix("</tool_call>"), "hermes", False, False, Said("", "", [PARSED])),
        ("<tool_call>no json</tool_call> and on", "hermes", False, False,
         Said("<tool_call>no json</tool_call> and on")),
        ("<think>\nhm\n</think>\n\nyes", None, True, False, Said("yes", "\nhm\n")),
        ("hm</think>yes", None, True, True, Said("yes", "hm")),
        ("hm, on and on", None, True, True, Said("", "hm, on and on")),
        (f"<think>a tool?</think>\n{CALL}", "hermes", True, False, Said("", "a tool?", [PARSED])),
        ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "東京"}}]', "mistral", False, False,
         Said("", "", [PARSED])),
        ('ok[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[ARGS]{}', "mistral", False, False,
         Said("ok", "", [ToolCall("a", '{"x": 1}'), ToolCall("b", "{}")])),
        ("[TOOL_CALLS]nonsense", "mistral", False, False, Said("[TOOL_CALLS]nonsense")),
    ],
)  # fmt: skip
@given(cuts=st.lists(st.integers(0, 200), max_size=30))
def test_a_message_is_split_alike_wherever_it_is_cut(
    text: str, style: str | None, reasoning: bool, thinking: bool, expected: Said, cuts: list[int]
) -> None:
    assert parse(text, cuts, style, reasoning, thinking) == expected


def test_text_leaves_at_once_unless_it_may_begin_a_tag() -> None:
    parser = MessageParser(False, False, TOOL_STYLES["hermes"])
    assert parser.push("a < b").content == "a < b"
    assert parser.push(" <tool").content == " "
    assert parser.push("box>").content == "<toolbox>"


def test_only_one_call_where_parallel_ones_are_not_wanted() -> None:
    parser = MessageParser(False, False, TOOL_STYLES["hermes"], parallel=False)
    assert parser.push(CALL + CALL, final=True).calls == [PARSED]


@pytest.fixture
def live(serve, tokenizer):
    said = tokenizer.encode(f"<think>hm</think>\nLooking.{CALL}")
    engine = StubEngine(answer=lambda prompt, params: [*said, EOS])
    return serve(engine, tool_parser="hermes", reasoning_parser="qwen3")


def test_tool_calls_and_reasoning_reach_the_openai_client(live) -> None:
    answer = live.openai().chat.completions.create(model="stub", messages=HI, tools=[WEATHER])
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert (message.content, message.reasoning_content) == ("Looking.", "hm")
    assert message.tool_calls[0].function.name == "weather"
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "東京"}
    again = [
        *HI,
        message.model_dump(),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12 C"},
    ]
    assert live.openai().chat.completions.create(model="stub", messages=again, tools=[WEATHER]).choices


def test_streamed_tool_calls_and_reasoning_add_up_to_the_same(live) -> None:
    content, reasoning, calls, finish = "", "", [], None
    for chunk in live.openai().chat.completions.create(
        model="stub", messages=HI, tools=[WEATHER], stream=True
    ):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        calls += delta.tool_calls or []
        finish = chunk.choices[0].finish_reason or finish
    assert (content, reasoning, finish) == ("Looking.", "hm", "tool_calls")
    assert [(c.index, c.function.name) for c in calls] == [(0, "weather")]
    assert json.loads(calls[0].function.arguments) == {"city": "東京"}


def test_without_tools_in_the_request_their_syntax_is_content(live) -> None:
    message = live.openai().chat.completions.create(model="stub", messages=HI).choices[0].message
    assert message.content == f"Looking.{CALL}"
    assert message.tool_calls is None


def test_a_prompt_that_opens_the_reasoning_starts_inside_it(serve, tokenizer) -> None:
    said = tokenizer.encode("hm</think>yes")
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}<think>\n"
    live = serve(StubEngine(answer=lambda p, q: [*said, EOS]), template=template, reasoning_parser="qwen3")
    message = live.openai().chat.completions.create(model="stub", messages=HI).choices[0].message
    assert (message.content, message.reasoning_content) == ("yes", "hm")
