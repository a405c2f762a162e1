"""Splits what a model says into content, reasoning and tool calls, while it says it.

Room: between text and chat answers. Rule: text leaves as soon as it cannot belong to a tag, and
nothing is lost: what looks like a tool call and is none comes back as content, to the letter.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

THINK = ("<think>", "</think>")


class ToolCall(NamedTuple):
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        """The call as `message.tool_calls` lists it, under a new id."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


@dataclass(slots=True)
class Said:
    """What became known with one piece of text."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class TagSplitter:
    """Tells the text between `opening` and `closing` from the text around; the tags are in neither.

    `closing` None: what was opened ends with the text.
    """

    def __init__(self, opening: str, closing: str | None, inside: bool = False):
        self.opening, self.closing = opening, closing
        self.inside = inside
        self._held = ""

    def push(self, text: str, final: bool = False) -> Iterator[tuple[bool, str, bool]]:
        """Yield `(inside, text, ended)`; `ended` marks the last part of an inner text."""
        text, self._held = self._held + text, ""
        while True:
            tag = self.closing if self.inside else self.opening
            before, found, after = text.partition(tag) if tag else (text, "", "")
            if not found:
                break
            if before or self.inside:
                yield self.inside, before, self.inside
            self.inside = not self.inside
            text = after
        keep = 0 if final or not tag else overlap(text, tag)
        self._held = text[len(text) - keep :]
        text = text[: len(text) - keep]
        if text or (final and self.inside):
            yield self.inside, text, final and self.inside


def overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag` and is not all of it."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0)


class ToolStyle(NamedTuple):
    """How a family of models writes tool calls. Without `opening` the whole answer is calls."""

    opening: str
    closing: str | None
    read: Callable[[str], list[ToolCall] | None]  # None: this is no tool call
    special: bool  # the tag is a special token, which must not be skipped


def _calls_of(value: Any) -> list[ToolCall] | None:
    """Calls of `{"name", "arguments"}` objects; None where any is something else."""
    calls = []
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            return None
        arguments = entry.get("arguments", entry.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append(ToolCall(entry["name"], arguments))
    return calls


def read_hermes(text: str) -> list[ToolCall] | None:
    """`{"name": ..., "arguments": {...}}` between the tags."""
    try:
        return _calls_of(json.loads(text))
    except ValueError:
        return None


def read_mistral(text: str) -> list[ToolCall] | None:
    """A JSON list of calls, or `name[ARGS]{...}`, each behind its own tag."""
    name, marker, arguments = text.partition("[ARGS]")
    try:
        if not marker:
            return _calls_of(json.loads(text))
        json.loads(arguments)
    except ValueError:
        return None
    return [ToolCall(name.strip(), arguments.strip())]


TOOL_STYLES = {
    "hermes": ToolStyle("<tool_call>", "</tool_call>", read_hermes, special=False),
    "mistral": ToolStyle("[TOOL_CALLS]", None, read_mistral, special=True),
}
TOOL_STYLES["qwen"] = TOOL_STYLES["hermes"]
# Whether text without tags is reasoning until the closing tag.
REASONING_STYLES = {"qwen3": False, "deepseek_r1": True}


class MessageParser:
    """The message of one choice. `thinking`: the text begins inside the reasoning."""

    def __init__(self, reasoning: bool, thinking: bool, tools: ToolStyle | None, parallel: bool = True):
        self._think = TagSplitter(*THINK, inside=thinking) if reasoning else None
        self._tools = tools
        self._tags = TagSplitter(tools.opening, tools.closing, inside=not tools.opening) if tools else None
        self._parallel = parallel
        self._inner = ""  # of a tool call that has not ended
        self._blank = True  # nothing but white space since the start or since the reasoning
        self.num_calls = 0

    def push(self, text: str, final: bool = False) -> Said:
        said = Said()
        if self._think is None:
            self._outside_reasoning(text, final, said)
            return said
        outside = ""
        for inside, part, _ in self._think.push(text, final):
            if inside:
                said.reasoning += part
            else:
                outside += part
        self._outside_reasoning(outside, final, said)
        return said

    def _outside_reasoning(self, text: str, final: bool, said: Said) -> None:
        if self._tags is None:
            self._add_content(text, said)
            return
        for inside, part, ended in self._tags.push(text, final):
            if not inside:
                self._add_content(part, said)
                continue
            self._inner += part
            if ended:
                self._end_of_call(said)

    def _end_of_call(self, said: Said) -> None:
        assert self._tools is not None
        inner, self._inner = self._inner, ""
        # Where the calls run to the end of the text, each further one brings its own tag.
        one = self._tools.closing or not self._tools.opening
        texts = [inner] if one else inner.split(self._tools.opening)
        for text in texts:
            calls = self._tools.read(text)
            if calls is None:
                self._add_content(self._tools.opening + text + (self._tools.closing or ""), said)
                continue
            if not self._parallel:
                calls = calls[: max(0, 1 - self.num_calls)]
            said.calls += calls
            self.num_calls += len(calls)

    def _add_content(self, text: str, said: Said) -> None:
        # White space between reasoning, calls and text belongs to the format, not to the answer.
        if self._blank and (self._think is not None or self.num_calls):
            text = text.lstrip()
        if text:
            self._blank = False
        said.content += text
