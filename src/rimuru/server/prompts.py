"""Prompts to token ids: chat templates, tokenizing off the loop when long, lengths checked.

Room: between request bodies and the engine. Rule: whatever is wrong with a prompt is found here, in
the client's terms, before the engine sees it.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from rimuru.engine.client import EngineInfo
from rimuru.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from rimuru.models.tokenizer import Tokenizer

_OWN_VARIABLES = {
    "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "return_dict", "return_tensors", "conversation", "tokenizer_kwargs", "padding", "truncation",
    "max_length",
}  # fmt: skip
LONG_TEXT = 16_384  # characters; below, tokenizing inline is cheaper than a thread (about 5 ms at most)


class Prompts:
    """A tokenizer with the chat template in use, and the limits prompts are held to."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        info: EngineInfo,
        chat_template: str | None = None,
        trust_request_template: bool = False,
    ):
        self.tokenizer = tokenizer
        self.backend = tokenizer.backend
        self.info = info
        self.trust_request_template = trust_request_template
        self.chosen_template = chat_template  # None: the tokenizer's own

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; long ones in a thread, where the tokenizer lets other threads run."""
        if len(text) < LONG_TEXT:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        batch = await asyncio.to_thread(
            self.backend.encode_batch_fast, [text], add_special_tokens=add_special_tokens
        )
        return batch[0].ids

    async def chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation under the model's chat template."""
        if template is not None and not self.trust_request_template:
            raise RequestError(
                "chat_template in a request is refused: templates are programs. "
                "Start the server with --trust-request-chat-template to allow it.",
                "chat_template",
            )
        variables = dict(template_kwargs or {})
        taken = sorted(variables.keys() & _OWN_VARIABLES)
        if taken:
            raise RequestError(f"chat_template_kwargs cannot set {', '.join(taken)}", "chat_template_kwargs")
        if continue_final_message:
            variables["continue_final_message"] = True
        text = self.tokenizer.render_chat(
            [_message(i, m) for i, m in enumerate(messages)],
            tools=tools,
            chat_template=template or self.chosen_template,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            **variables,
        )
        return await self.encode(text, add_special_tokens)

    def check(self, tokens: list[int], max_tokens: int | None, truncate: int | None, param: str) -> list[int]:
        """The prompt, truncated if asked for; `RequestError` where it cannot be served.

        `truncate` keeps the last so many tokens; -1 keeps what leaves room for the output.
        """
        limit = self.info.max_model_len
        if truncate is not None:
            if truncate == -1:
                truncate = max(1, limit - (max_tokens or 1))
            if not 1 <= truncate <= limit:
                raise RequestError(
                    f"truncate_prompt_tokens must be -1 or from 1 to {limit}", "truncate_prompt_tokens"
                )
            tokens = tokens[-truncate:]
        if not tokens:
            raise RequestError("The prompt is empty: it has no tokens.", param)
        if len(tokens) >= limit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens, prompt and output together. The "
                f"prompt has {len(tokens)} tokens; shorten it to {limit - 1} or set truncate_prompt_tokens.",
                param,
            )
        if max_tokens is not None and len(tokens) + max_tokens > limit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens. The prompt has {len(tokens)} and "
                f"max_tokens asks for {max_tokens} more; ask for at most {limit - len(tokens)}.",
                "max_tokens",
            )
        if not 0 <= min(tokens) <= max(tokens) < self.info.vocab_size:
            raise RequestError(f"Token ids must be from 0 to {self.info.vocab_size - 1}.", param)
        return tokens


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: text content, tool arguments as objects."""
    where = f"messages.{index}"
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{where}.role must be a string", "messages")
    message = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = "\n".join(
            _text_part(f"{where}.content.{i}", part) for i, part in enumerate(content)
        )
    elif content is None:
        message["content"] = ""
    elif not isinstance(content, str):
        raise RequestError(f"{where}.content must be a string or a list of parts", "messages")
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise RequestError(f"{where}.tool_calls must be a list", "messages")
        message["tool_calls"] = [_tool_call(f"{where}.tool_calls.{i}", call) for i, call in enumerate(calls)]
    return message


def _text_part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "refusal", "thinking"):
        raise RequestError(f"{where}: only text parts can be read by this model, got {kind!r}", "messages")
    text = part.get("refusal" if kind == "refusal" else "thinking" if kind == "thinking" else "text")
    if not isinstance(text, str):
        raise RequestError(f"{where}: the text must be a string", "messages")
    return text


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}.function.name must be a string", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            raise RequestError(f"{where}.function.arguments is not valid JSON", "messages") from None
    return {**call, "function": {**function, "arguments": arguments or {}}}


def read_template(text: str | None) -> str | None:
    """`--chat-template`: a file, or the template itself. A template that does not parse is refused."""
    if text is None:
        return None
    looks_inline = "{" in text or "\n" in text
    if not looks_inline:
        path = Path(text)
        if not path.is_file():
            raise ConfigError(f"--chat-template: there is no file {text!r}, and it is no template text")
        text = path.read_text(encoding="utf-8")
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except jinja2.TemplateSyntaxError as exc:
        raise ConfigError(f"--chat-template: line {exc.lineno}: {exc.message}") from None
    return text
