"""`POST /v1/chat/completions`: messages in, an assistant's message out.

Room: one endpoint. Rule: a streamed token is a prepared template around one escaped string; only first,
last and annotated chunks are built as dicts.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from json.encoder import encode_basestring as quote
from typing import Any

from .frontend import Delta, Frontend, Job
from .logprobs import chat_logprobs, prompt_table
from .protocol import ChatBody


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


async def start_chat(frontend: Frontend, body: ChatBody, request_id: str | None) -> Job:
    """Check the body and turn it into a job; nothing runs yet."""
    model = frontend.admit(body.model, body.priority)
    body.refuse_unserved()
    params = body.params(frontend.settings.default_sampling)
    params.check(frontend.info.vocab_size)
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    tokens = await frontend.prompts.chat(
        body.messages,
        tools=body.tools if body.tool_choice != "none" else None,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
        template=body.chat_template,
        template_kwargs=kwargs,
    )
    tokens = frontend.prompts.check(tokens, params.max_tokens, body.truncate_prompt_tokens, "messages")
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
    choices = []
    for index, whole in sorted(wholes.items()):
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": job.frontend.settings.response_role, "content": whole.text, "refusal": None},
            "logprobs": None if whole.logprobs is None else chat_logprobs(vocabulary, whole.logprobs),
            "finish_reason": whole.finish,
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
            if delta.finish is None and delta.logprobs is None and not body.return_token_ids:
                if delta.text:
                    yield (
                        f'{head}{{"index":{index},"delta":{{"content":{quote(delta.text)}}},'
                        f'"logprobs":null,"finish_reason":null}}]{_usage(job, body)}}}\n\n'
                    ).encode()
                continue
            choice: dict[str, Any] = {
                "index": index,
                "delta": {"content": delta.text},
                "logprobs": None if delta.logprobs is None else chat_logprobs(vocabulary, delta.logprobs),
                "finish_reason": delta.finish,
            }
            if delta.finish is not None:
                choice["stop_reason"] = delta.stop_reason
            if body.return_token_ids:
                choice["token_ids"] = delta.tokens
            yield f"{head}{dumps(choice)}]{_usage(job, body)}}}\n\n".encode()
    if body.include_usage:
        yield f'{head}],"usage":{dumps(job.usage())}}}\n\n'.encode()


def _usage(job: Job, body: ChatBody) -> str:
    return f',"usage":{dumps(job.usage())}' if body.continuous_usage else ""
