"""What a request demands of its output's form, as one `Grammar`.

Room: between bodies and the engine. Rule: every way clients have of asking (OpenAI's, vLLM's old and new)
ends in the same few kinds; two demands at once are refused, because no output could be held to both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rimuru.engine.request import Grammar
from rimuru.errors import RequestError

from .parsers import ToolCall, ToolStyle

if TYPE_CHECKING:
    from .protocol import ChatBody, GenerationBody

_ANY_OBJECT = '{"type": "object"}'
_OPTIONS = ("json", "json_object", "regex", "choice", "grammar")
_FORMATS = ("text", "json_object", "json_schema")


def grammar_of(body: GenerationBody) -> Grammar | None:
    """The one grammar that a body asks for, by whatever field; None where the output is free."""
    found = [
        *_response_format(body.response_format),
        *_structured(body.structured_outputs or {}),
        *(
            _option(kind, value, f"guided_{kind}")
            for kind in ("json", "regex", "choice", "grammar")
            if (value := getattr(body, f"guided_{kind}")) is not None
        ),
    ]
    if len(found) > 1:
        names = ", ".join(dict.fromkeys(str(g.param) for g in found))
        raise RequestError(
            f"the output's form is asked for more than once ({names}); keep one", found[1].param
        )
    return found[0] if found else None


def _response_format(chosen: dict[str, Any] | None) -> Iterator[Grammar]:
    field = "response_format"
    kind = (chosen or {"type": "text"}).get("type")
    if kind == "json_object":
        yield Grammar("json_schema", _ANY_OBJECT, param=field)
    elif kind == "json_schema":
        described = (chosen or {}).get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if schema is None:
            raise RequestError("response_format needs json_schema.schema, a JSON schema", field)
        yield _option("json", schema, field)
    elif kind != "text":
        raise RequestError(f"response_format.type can be {', '.join(_FORMATS)}, not {kind!r}", field)


def _structured(chosen: dict[str, Any]) -> Iterator[Grammar]:
    """vLLM's `structured_outputs`: one of several options; what is null is not asked for."""
    for name, value in chosen.items():
        if value is None or value is False:
            continue
        if name not in _OPTIONS:
            raise RequestError(
                f"structured_outputs.{name} is not supported; these are: {', '.join(_OPTIONS)}",
                "structured_outputs",
            )
        yield _option(name, value, "structured_outputs")


def _option(name: str, value: Any, field: str) -> Grammar:
    if name == "json_object":
        return Grammar("json_schema", _ANY_OBJECT, param=field)
    if name == "json":
        if not isinstance(value, (dict, str, bool)):
            raise RequestError(f"{field}: a JSON schema is an object or its text", field)
        return Grammar("json_schema", value if isinstance(value, str) else _dumps(value), param=field)
    if name == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
            raise RequestError(f"{field}: choice must be a list of non-empty strings", field)
        return Grammar("choice", _dumps(value), param=field)
    if not isinstance(value, str) or not value:
        raise RequestError(f"{field}: {name} must be a non-empty string", field)
    return Grammar(name, value, param=field)


# -- calls that must be made -----------------------------------------------------------------


def forced_calls(body: ChatBody) -> tuple[Grammar, ToolStyle] | None:
    """The grammar of `tool_choice` "required" or of a named function, and how to read what it lets through.

    None where the model is free to call or not.
    """
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return None
    offered = _functions(body.tools or [])
    if choice == "required":
        wanted = offered
    else:
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise RequestError(
                "tool_choice can be 'none', 'auto', 'required' or "
                '{"type": "function", "function": {"name": ...}}',
                "tool_choice",
            )
        wanted = {name: offered[name]} if name in offered else {}
    if not wanted:
        raise RequestError(
            f"tool_choice asks for a call that tools do not offer; they have: {', '.join(offered) or 'none'}",
            "tool_choice",
        )
    if choice == "required":
        calls = [_call_schema(name, parameters) for name, parameters in wanted.items()]
        schema: Any = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        if body.parallel_tool_calls is False:
            schema["maxItems"] = 1
        return Grammar("json_schema", _dumps(schema), param="tools"), ToolStyle("", None, _read_calls, False)
    ((name, parameters),) = wanted.items()

    def read(text: str) -> list[ToolCall] | None:
        return [ToolCall(name, text.strip())] if _is_json(text) else None

    return Grammar("json_schema", _dumps(parameters), param="tools"), ToolStyle("", None, read, False)


def _functions(tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Parameters' schemas by name."""
    out = {}
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"tools.{index}.function.name must be a string", "tools")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(parameters, dict):
            raise RequestError(f"tools.{index}.function.parameters must be a JSON schema", "tools")
        out[function["name"]] = parameters
    return out


def _call_schema(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _read_calls(text: str) -> list[ToolCall] | None:
    try:
        return [ToolCall(call["name"], _dumps(call["arguments"])) for call in json.loads(text)]
    except (ValueError, TypeError, KeyError):  # cut short by max_tokens
        return None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
