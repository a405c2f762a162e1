"""`POST /v1/chat/completions`: messages in, an assistant's message out.

Room: one endpoint. Rule: a streamed token is a prepared template around one escaped string; only first,
last and annotated chunks are built as dicts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from json.encoder import encode_basestring as quote
from typing import Any

from rimuru.engine.request import FinishReason
from rimuru.errors import RequestError

from .frontend import Delta, Frontend, Job
from .logprobs import chat_logprobs, prompt_table
from .parsers import REASONING_STYLES, THINK, TOOL_STYLES, MessageParser, Said, ToolStyle
from .protocol import ChatBody
from .structured import forced_calls


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


async def start_chat(frontend: Frontend, body: ChatBody, request_id: str | None) -> Job:
    """Check the body and turn it into a job; nothing runs yet."""
    try:
        return await _start(frontend, body, request_id)
    except RequestError as error:
        if error.param == "max_tokens" and body.max_completion_tokens is not None:
            raise RequestError(str(error), "max_completion_tokens") from None  # the name that was sent
        raise


async def _start(frontend: Frontend, body: ChatBody, request_id: str | None) -> Job:
    model = frontend.admit(body.model, body.priority)
    body.refuse_unserved()
    params = body.params(frontend.settings.default_sampling)
    params.check(frontend.info.vocab_size)
    forced = forced_calls(body)
    if forced is not None:
        if params.grammar is not None:
            raise RequestError("tool_choice and another form of output exclude each other", "tool_choice")
        params.grammar = forced[0]
        params.check(frontend.info.vocab_size)
    style = _tool_style(frontend, body)
    if style is not None and style.special:
        params.skip_special_tokens = False
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    tokens = await frontend.prompts.chat(
        body.messages,
        tools=body.offered_tools or None,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
        template=body.chat_template,
        template_kwargs=kwargs,
    )
    tokens = frontend.prompts.check(tokens, params.max_tokens, body.truncate_prompt_tokens, "messages")
    if params.grammar is not None and _reasons(frontend, tokens)[0]:
        # The reasoning before the answer is free.
        ids = frontend.prompts.backend.encode(THINK[1], add_special_tokens=False).ids
        params.grammar = dataclasses.replace(params.grammar, after=tuple(ids))
    return Job(
        frontend,
        "chatcmpl",
        [tokens],
        params,
        model=model,
        request_id=body.request_id or request_id,
        priority=body.priority,
        cache_salt=body.cache_salt or "",
    )


def _tool_style(frontend: Frontend, body: ChatBody) -> ToolStyle | None:
    """How to read tool calls in the answer; None where no tools are offered."""
    forced = forced_calls(body)
    if forced is not None:
        return forced[1]
    if not body.offered_tools:
        return None
    name = frontend.settings.tool_parser
    if name is None:
        raise RequestError(
            f"tools need a server started with --tool-call-parser, one of {', '.join(TOOL_STYLES)}; "
            "tool_choice 'none' leaves them aside",
            "tools",
        )
    return TOOL_STYLES[name]


def _parser_maker(job: Job, body: ChatBody) -> Callable[[], MessageParser] | None:
    """Makes the parser of each choice; None where the text is the message."""
    settings = job.frontend.settings
    style = _tool_style(job.frontend, body)
    reasoning = settings.reasoning_parser is not None
    if style is None and not reasoning:
        return None
    thinking = _reasons(job.frontend, job.prompts[0])[1]
    return lambda: MessageParser(reasoning, thinking, style, body.parallel_tool_calls is not False)


def _reasons(frontend: Frontend, prompt: list[int]) -> tuple[bool, bool]:
    """Whether the answer begins with reasoning, and whether already inside of it.

    Templates open or close the reasoning themselves; the end of the prompt tells.
    """
    style = frontend.settings.reasoning_parser
    if style is None:
        return False, False
    tail = frontend.vocabulary.decode(prompt[-16:], skip_special_tokens=False).rstrip()
    opened, closed = (tail.endswith(tag) for tag in THINK)
    return not closed, opened or (REASONING_STYLES[style] and not closed)


async def answer_chat(job: Job, body: ChatBody) -> dict[str, Any]:
    """The whole answer, once every choice has ended."""
    wholes: dict[int, Delta] = {}
    async with aclosing(job.deltas()) as deltas:
        async for delta in deltas:
            if delta.index in wholes:
                wholes[delta.index].absorb(delta)
            else:
                wholes[delta.index] = delta
    vocabulary = job.frontend.vocabulary
    make_parser = _parser_maker(job, body)
    choices = []
    for index, whole in sorted(wholes.items()):
        message: dict[str, Any] = {
            "role": job.frontend.settings.response_role,
            "content": whole.text,
            "refusal": None,
        }
        finish: str | None = whole.finish
        if make_parser is not None:
            parser = make_parser()
            said = parser.push(whole.text, final=True)
            message.update(_parsed(said))
            message["content"] = said.content or (None if said.calls or said.reasoning else "")
            finish = _finish(whole.finish, parser)
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": None if whole.logprobs is None else chat_logprobs(vocabulary, whole.logprobs),
            "finish_reason": finish,
            "stop_reason": whole.stop_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = whole.tokens
        choices.append(choice)
    answer = {
        "id": job.id,
        "object": "chat.completion",
        "created": job.created,
        "model": job.model,
        "choices": choices,
        "usage": job.usage(),
    }
    if body.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_table(vocabulary, wholes[0].prompt_logprobs)
    if body.return_token_ids:
        answer["prompt_token_ids"] = job.prompts[0]
    return answer


async def stream_chat(job: Job, body: ChatBody) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events, without the final `[DONE]`."""
    head = (
        f'data: {{"id":{quote(job.id)},"object":"chat.completion.chunk","created":{job.created},'
        f'"model":{quote(job.model)},"choices":['
    )
    role = quote(job.frontend.settings.response_role)
    make_parser = _parser_maker(job, body)
    parsers: dict[int, MessageParser] = {}
    started: set[int] = set()
    vocabulary = job.frontend.vocabulary
    async with aclosing(job.deltas()) as deltas:
        async for delta in deltas:
            index = delta.index
            if index not in started:
                started.add(index)
                ids = f',"prompt_token_ids":{dumps(job.prompts[0])}' if body.return_token_ids else ""
                yield (
                    f'{head}{{"index":{index},"delta":{{"role":{role},"content":""}},'
                    f'"logprobs":null,"finish_reason":null}}]{ids}}}\n\n'
                ).encode()
            quiet = delta.finish is None and delta.logprobs is None and not body.return_token_ids
            said: dict[str, Any] | None = None
            finish: str | None = delta.finish
            if make_parser is not None:
                if index not in parsers:
                    parsers[index] = make_parser()
                parser = parsers[index]
                before = parser.num_calls
                said = _delta_of(parser.push(delta.text, final=delta.finish is not None), before)
                finish = _finish(delta.finish, parser)
                if quiet and not said:
                    continue
            elif quiet:
                if delta.text:
                    yield (
                        f'{head}{{"index":{index},"delta":{{"content":{quote(delta.text)}}},'
                        f'"logprobs":null,"finish_reason":null}}]{_usage(job, body)}}}\n\n'
                    ).encode()
                continue
            choice: dict[str, Any] = {
                "index": index,
                "delta": {"content": delta.text} if said is None else said,
                "logprobs": None if delta.logprobs is None else chat_logprobs(vocabulary, delta.logprobs),
                "finish_reason": finish,
            }
            if delta.finish is not None:
                choice["stop_reason"] = delta.stop_reason
            if body.return_token_ids:
                choice["token_ids"] = delta.tokens
            yield f"{head}{dumps(choice)}]{_usage(job, body)}}}\n\n".encode()
    if body.include_usage:
        yield f'{head}],"usage":{dumps(job.usage())}}}\n\n'.encode()


def _parsed(said: Said) -> dict[str, Any]:
    """The fields of a message beside its content. Clients know the reasoning under either name."""
    fields: dict[str, Any] = {}
    if said.reasoning:
        fields |= {"reasoning": said.reasoning, "reasoning_content": said.reasoning}
    if said.calls:
        fields["tool_calls"] = [call.as_json() for call in said.calls]
    return fields


def _delta_of(said: Said, calls_before: int) -> dict[str, Any]:
    """The delta of a chunk; calls are numbered on from those of earlier chunks, each whole in one."""
    delta = _parsed(said)
    if said.content:
        delta["content"] = said.content
    for index, call in enumerate(delta.get("tool_calls", ()), start=calls_before):
        call["index"] = index
    return delta


def _finish(finish: FinishReason | None, parser: MessageParser) -> str | None:
    return "tool_calls" if finish is FinishReason.STOP and parser.num_calls else finish


def _usage(job: Job, body: ChatBody) -> str:
    return f',"usage":{dumps(job.usage())}' if body.continuous_usage else ""
